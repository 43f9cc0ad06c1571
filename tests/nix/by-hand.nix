# Nodes with hand-written options that must work: the plan and the texts of the units of each.
{ flake }:
let
  inherit (flake) nixosModules;
  inherit (flake.nixosConfigurations.appliance) pkgs;
  inherit (pkgs) lib;

  evaluate = import ./evaluate.nix { inherit pkgs; };

  fabric = {
    imports = [ nixosModules.fabric ];
    services.spark.fabric = {
      enable = true;
      rails.enp1s0f0np0 = {
        rdma = "rocep1s0f0";
        pci = "0000:01:00.0";
        address = "10.77.1.1/24";
        peers = [
          {
            node = "spark8";
            address = "10.77.1.2";
          }
        ];
      };
    };
  };

  weights = {
    imports = [ nixosModules.weights ];
    services.spark.weights = {
      enable = true;
      path = "/models/small";
    };
  };

  engram = {
    imports = [ nixosModules.engram ];
    services.spark.engram = {
      enable = true;
      device = "/dev/disk/by-id/nvme-x-part3";
      packArgv = [
        "spark-engram"
        "pack"
        "--checkpoint"
        "/models/small"
        "--output"
        "/var/lib/spark/engram"
        "--tp"
        "1"
        "--rank"
        "0"
      ];
      files = [
        {
          name = "engram-l2-rows-0-2.bin";
          layer = 2;
          layout = "rows";
          row_start = 0;
          row_end = 2;
          bytes = 8192;
        }
      ];
    };
  };

  guard = {
    imports = [ nixosModules.guard ];
    services.spark.guard.enable = true;
  };

  engine = {
    imports = [
      nixosModules.engine
      guard
    ];
    services.spark.engine = {
      enable = true;
      package = pkgs.hello;
      argv = [
        "python3"
        "-m"
        "sglang.launch_server"
        "--model-path"
        "/models/small"
        "--port=8888"
      ];
      settings.model.shards = 1;
    };
  };

  withKey.services.spark.engine = {
    apiKeyFile = "/etc/spark/api-key";
    configFile = "/run/spark-engine/config.yaml";
    cacheDirectory = "/srv/spark-engine";
    env.NCCL_DEBUG = "WARN";
    settings = {
      health.interval = 5;
      restart.limit = 1;
    };
  };

  router = {
    imports = [ nixosModules.router ];
    services.spark.router = {
      enable = true;
      package = pkgs.hello;
      argv = [
        "--port"
        "8000"
        "--worker-urls"
        "http://192.168.1.11:8888"
        "http://192.168.1.21:8888"
        "--policy"
        "cache_aware"
      ];
    };
  };

  ours = lib.filterAttrs (name: _: lib.hasPrefix "spark" name);
  look = config: {
    inherit (config.services.spark) plan;
    units = lib.mapAttrs (_: unit: unit.text) (ours config.systemd.units);
  };
in
lib.mapAttrs (_: modules: evaluate { inherit modules look; }) {
  fabric = [ fabric ];
  engram = [ engram ];
  guard = [ guard ];
  router = [ router ];
  engine = [ engine ];
  engine-fabric = [
    engine
    fabric
  ];
  engine-weights = [
    engine
    weights
  ];
  engine-everything = [
    engine
    withKey
    fabric
    weights
    engram
    router
  ];
}
