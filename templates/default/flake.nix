# One cluster of DGX Spark boxes. Edit cluster.yaml, then:
#   nix run . -- render cluster.yaml      writes cluster.lock.json: commit both
#   nix build .#spark1                    the disk image of a node, to write with dd
#   nixos-rebuild switch --flake .#spark1 --target-host root@spark1
{
  # OWNER: where you got it from
  inputs.spark-appliance.url = "github:OWNER/spark-appliance";

  outputs =
    { spark-appliance, ... }:
    let
      hosts = spark-appliance.lib.mkFleet {
        lock = ./cluster.lock.json;
        # stops when the plan does not follow from it
        cluster = ./cluster.yaml;
        # every node
        modules = [ ./common.nix ];
        # single nodes, for example: nodeModules.spark1 = [ ./spark1.nix ];
      };
    in
    {
      nixosConfigurations = hosts;
      packages.aarch64-linux = builtins.mapAttrs (_: host: host.config.system.build.image) hosts;
      inherit (spark-appliance) apps;
    };
}
