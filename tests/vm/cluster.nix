# The three machines of ./cluster: the plan as rendered, rails on virtual networks with RDMA in
# software, the stand-in engine, and limits that fit a small machine.
{
  lib,
  own,
  spark,
}:
let
  rendered = spark.readPlan ./cluster/cluster.lock.json;

  # what the plan sizes for a Spark with 121 GiB and an engine that takes minutes to start
  small = builtins.fromJSON (builtins.readFile ./cluster/small-machine.json);
  plan = rendered // {
    health = rendered.health // small.health;
    restart = rendered.restart // small.restart;
    nodes = map (node: node // { guard = node.guard // small.guard; }) rendered.nodes;
  };

  # One virtual network for each subnet of the rails; the management network is number 1.
  prefix = rail: lib.concatStringsSep "." (lib.take 3 (lib.splitString "." rail.address));
  subnets = lib.unique (map prefix (lib.concatMap (node: node.rails) plan.nodes));
  numberOf = rail: 2 + lib.lists.findFirstIndex (subnet: subnet == prefix rail) null subnets;

  lan = address: {
    virtualisation.interfaces.enP7s7 = {
      vlan = 1;
      assignIP = false;
    };
    virtualisation.vlans = lib.mkForce [ ];
    networking.useDHCP = false;
    networking.useNetworkd = true;
    networking.interfaces.enP7s7.ipv4.addresses = [
      {
        inherit address;
        prefixLength = 24;
      }
    ];
  };

  machine =
    node:
    { pkgs, ... }:
    {
      imports = [
        spark.modules.fleet
        (lan node.address)
      ];

      services.spark = {
        fleet = {
          enable = true;
          inherit plan;
          node = node.name;
        };
        fabric = {
          softRoce = true;
          # the virtual cards have these names already
          rails = lib.genAttrs (map (rail: rail.netdev) node.rails) (_: {
            pci = lib.mkForce null;
          });
        };
        engine.package = own.stand-in-engine;
      };
      services.openssh.enable = true;

      virtualisation = {
        memorySize = 1536;
        interfaces = lib.listToAttrs (
          map (
            rail:
            lib.nameValuePair rail.netdev {
              vlan = numberOf rail;
              assignIP = false;
            }
          ) node.rails
        );
      };

      environment.etc."spark/api-key" = lib.mkIf (node.rank == 0) {
        mode = "0600";
        text = "not-a-secret-in-a-test";
      };
      environment.systemPackages = [
        pkgs.rdma-core
        pkgs.curl
      ];
      systemd.tmpfiles.settings."10-checkpoint" = lib.mkIf (node.rank == 0) {
        ${plan.model.path}.C.argument = "${own.stand-in-engine.checkpoint}";
      };
    };
in
{
  inherit plan;

  nodes = lib.listToAttrs (map (node: lib.nameValuePair node.name (machine node)) plan.nodes);

  # a machine on the management network that belongs to nobody
  stranger =
    { pkgs, ... }:
    {
      imports = [ (lan "192.168.1.99") ];
      environment.systemPackages = [
        pkgs.curl
        pkgs.nfs-utils
      ];
      boot.supportedFilesystems = [ "nfs4" ];
    };

  # two more configurations of the node to switch to: one that works, one that does not
  withVersions = node: {
    imports = [ node ];
    specialisation = {
      next.configuration.environment.etc."spark/release".text = "next";
      broken.configuration = {
        environment.etc."spark/release".text = "broken";
        services.spark.plan = lib.mkForce (
          plan
          // {
            nodes = map (node: node // { env = node.env // { STAND_IN_FAIL = "1"; }; }) plan.nodes;
          }
        );
      };
    };
    environment.etc."spark/release".text = lib.mkDefault "first";
    # the kernel comes from outside: "make it the boot default" is the profile alone
    boot.loader.grub.enable = lib.mkForce false;
  };
}
