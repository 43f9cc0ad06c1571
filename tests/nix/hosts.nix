# All NixOS nodes of a plan, each as the values of host.nix and what the plan adds to the machine.
# `cluster`: take them from the flake's own outputs, where they are named CLUSTER-NODE.
{
  flake,
  lock,
  cluster ? null,
}:
let
  plan = flake.lib.readPlan (/. + lock);
  own = map (node: node.name) plan.nodes;
  hosts =
    if cluster == null then
      flake.lib.mkFleet {
        lock = /. + lock;
        modules = [ { system.stateVersion = "26.05"; } ];
      }
    else
      builtins.listToAttrs (
        map (name: {
          inherit name;
          value = flake.nixosConfigurations."${cluster}-${name}";
        }) own
      );
  # what a first boot asks for itself is not what a node has
  base = flake.nixosConfigurations.appliance.extendModules {
    modules = [ { services.spark.image.identity.enable = false; } ];
  };
in
builtins.mapAttrs (
  _: host:
  import ./host.nix host
  // {
    added = import ./added.nix {
      inherit host;
      inherit base;
    };
  }
) hosts
