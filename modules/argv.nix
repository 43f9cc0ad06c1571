# Reads a command line: `option argv "--port" "30000"` is its last --port, or the default.
{ lib }:
let
  # value of one option for each time that it is there, as `--name value` or `--name=value`
  all =
    argv: name:
    lib.concatLists (
      lib.zipListsWith (
        word: next:
        if word == name then
          [ next ]
        else
          lib.optional (lib.hasPrefix "${name}=" word) (lib.removePrefix "${name}=" word)
      ) argv (lib.drop 1 argv ++ [ "" ])
    );

  # words up to the next option
  until =
    words:
    if words == [ ] || lib.hasPrefix "--" (lib.head words) then
      [ ]
    else
      [ (lib.head words) ] ++ until (lib.tail words);
  after =
    argv: name:
    if argv == [ ] then
      [ ]
    else if lib.head argv == name then
      lib.tail argv
    else
      after (lib.tail argv) name;
in
{
  option =
    argv: name: default:
    lib.last ([ default ] ++ all argv name);
  # values of an option that takes several
  values = argv: name: until (after argv name);
  # where a server that binds `host` answers on its own machine; a plan has the URLs ready
  # (_health in spark_appliance/render/plan.py), by hand there is only the command line
  local = host: if host == "0.0.0.0" then "127.0.0.1" else host;
}
