# One cluster of DGX Spark boxes. Edit cluster.yaml, then:
#   nix run . -- render cluster.yaml      writes cluster.lock.json: commit both
#   nix build .#image                     one disk image for the first boot of every node
#   nix build .#spark1                    the disk image of one node, complete
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
      firstBoot = spark-appliance.lib.mkAppliance {
        lock = ./cluster.lock.json;
        modules = [ ./common.nix ];
      };
      imageOf = host: host.config.system.build.image;
    in
    {
      nixosConfigurations = hosts;
      packages.aarch64-linux = builtins.mapAttrs (_: imageOf) hosts // {
        image = imageOf firstBoot;
      };
      inherit (spark-appliance) apps;
    };
}
