# The units of a node with hand-written options: the table of the plan (units.json, made by
# tests/nix/unit_template.py), cut down to the enabled units and to the commands before a start that
# need no other, with the node's own words filled in.
{
  lib,
  enabled,
  unitWords,
}:
let
  template = lib.importJSON ./units.json;

  fill =
    value:
    if builtins.isString value then
      lib.replaceStrings openWords (lib.attrValues texts) value
    else if builtins.isList value then
      lib.concatMap fillWord value
    else if builtins.isAttrs value then
      lib.mapAttrs (_: fill) value
    else
      value;
  # a word that is replaced as a whole may become several
  fillWord =
    word:
    let
      name = if builtins.isString word then builtins.match "<([A-Z-]+)>" word else null;
      found = if name == null then null else unitWords.${lib.head name} or null;
    in
    if builtins.isList found then found else [ (fill word) ];
  openWords = map (name: "<${name}>") (lib.attrNames texts);
  texts = lib.filterAttrs (_: builtins.isString) unitWords;

  filled = map fill template;
  isThere = name: lib.elem name enabled || !lib.elem name (map (unit: unit.name) filled);
  keep = names: lib.filter isThere names;
in
lib.listToAttrs (
  map (
    unit:
    lib.nameValuePair unit.name (
      unit
      // {
        after = keep unit.after;
        requires = keep unit.requires;
        wants = keep unit.wants;
        exec_start_pre = map (entry: entry.command) (
          lib.filter (entry: lib.all (name: lib.elem name enabled) entry.needs) unit.exec_start_pre
        );
        # what stays open was not asked for: a credential without a key file
        settings = lib.filterAttrs (
          _: value: !builtins.isString value || builtins.match ".*<[A-Z-]+>.*" value == null
        ) unit.settings;
      }
    )
  ) (lib.filter (unit: lib.elem unit.name enabled) filled)
)
