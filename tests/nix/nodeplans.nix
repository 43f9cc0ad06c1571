# Every node's own plan as Nix projects it, once and twice: { PLAN.NODE = { own, again }; }. `locks`
# is a JSON object from names to plans.
{ flake, locks }:
builtins.mapAttrs (
  _: lock:
  let
    plan = builtins.fromJSON (builtins.readFile (/. + lock));
  in
  builtins.listToAttrs (
    map (node: {
      inherit (node) name;
      value = {
        own = flake.lib.nodePlan plan node.name;
        again = flake.lib.nodePlan (flake.lib.nodePlan plan node.name) node.name;
      };
    }) plan.nodes
  )
) (builtins.fromJSON locks)
