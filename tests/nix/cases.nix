# Small configurations with hand-written options. Each gives the messages of its failed assertions
# and, where `look` is given, values of what it makes.
{ flake }:
let
  inherit (flake.nixosModules)
    fabric
    weights
    engram
    guard
    engine
    router
    fleet
    hardware
    image
    ;
  inherit (flake.nixosConfigurations.appliance) pkgs;
  inherit (pkgs) lib;

  evaluate = import ./evaluate.nix { inherit pkgs; };
  unit = config: name: config.systemd.units.${name}.text;
  planOf = config: builtins.fromJSON (builtins.toJSON config.services.spark.plan);

  rail = {
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
  railByMac = removeAttrs rail [ "pci" ] // {
    mac = "4c:bb:47:00:00:01";
  };
  rails.enp1s0f0np0 = rail;
  withFabric = extra: [
    fabric
    { services.spark.fabric = { enable = true; } // extra; }
  ];
  withWeights = extra: [
    weights
    { services.spark.weights = { enable = true; } // extra; }
  ];
  packArgv = [
    "spark-engram"
    "pack"
    "--checkpoint"
    "/models/a b"
    "--output"
    "/mnt/engram"
    "--tp"
    "1"
    "--rank"
    "0"
  ];
  withEngram = extra: [
    engram
    {
      services.spark.engram = {
        enable = true;
        inherit packArgv;
      }
      // extra;
    }
  ];
  withGuard = extra: [
    guard
    { services.spark.guard = { enable = true; } // extra; }
  ];
  withEngine = extra: [
    engine
    {
      services.spark.guard.enable = lib.mkDefault true;
      services.spark.engine = {
        enable = true;
        package = pkgs.hello;
        argv = [
          "python3"
          "-m"
          "sglang.launch_server"
          "--model-path"
          "/models/small"
        ];
        settings.model.shards = lib.mkDefault 1;
      }
      // extra;
    }
  ];
  withRouter = extra: [
    router
    {
      services.spark.router = {
        enable = true;
        package = pkgs.hello;
        argv = [
          "--port"
          "8000"
          "--worker-urls"
          "http://192.168.1.11:8888"
        ];
      }
      // extra;
    }
  ];
  withImage = extra: [
    image
    { services.spark.image = { enable = true; } // extra; }
  ];
  plan = lib.importJSON ../../tests/vm/cluster/cluster.lock.json;
  withFleet = extra: [
    fleet
    {
      services.spark.engine.package = pkgs.hello;
      services.spark.fleet = {
        enable = true;
        inherit plan;
        node = "spark2";
      }
      // extra;
    }
  ];
in
lib.mapAttrs (_: evaluate) {
  # ---- fabric ------------------------------------------------------------------------------
  fabric-good = {
    modules = withFabric {
      inherit rails;
      routes = [ "10.77.9.0/24 via 10.77.1.2 dev enp1s0f0np0" ];
      peerAddresses = [ "192.168.1.8" ];
    };
    look = config: {
      unit = unit config "spark-fabric.service";
      network = config.systemd.network.units."10-spark-enp1s0f0np0.network".text;
      plan = planOf config;
      target = unit config "spark.target";
      sysctl = lib.filterAttrs (name: _: lib.hasInfix ".enp1s0f0np0." name) config.boot.kernel.sysctl;
      firewall = {
        inherit (config.networking.firewall)
          trustedInterfaces
          extraInputRules
          allowedTCPPorts
          checkReversePath
          ;
        nftables = config.networking.nftables.enable;
      };
    };
  };
  fabric-own-trust = {
    modules = withFabric { inherit rails; } ++ [
      { networking.firewall.trustedInterfaces = [ "tailscale0" ]; }
    ];
    look = config: config.networking.firewall.trustedInterfaces;
  };
  fabric-by-mac = {
    modules = withFabric {
      rails.enp1s0f0np0 = railByMac;
    };
    look = config: config.systemd.network.links."10-spark-enp1s0f0np0".matchConfig;
  };
  fabric-soft = {
    modules = withFabric {
      softRoce = true;
      rails.eth1 = removeAttrs rail [ "pci" ];
    };
    look = config: {
      inherit (config.systemd.services.spark-soft-roce) script requiredBy before;
      inherit (config.boot) kernelModules;
    };
  };
  fabric-empty.modules = withFabric { };
  fabric-same-address.modules = withFabric {
    rails = {
      a = rail;
      b = rail // {
        pci = "0000:01:00.1";
      };
    };
  };
  fabric-same-subnet.modules = withFabric {
    rails = {
      a = rail;
      # the smaller subnet lies in the larger one
      b = rail // {
        pci = "0000:01:00.1";
        address = "10.77.1.129/25";
      };
      # differs from both in the last bit of its prefix
      c = rail // {
        pci = "0002:01:00.0";
        address = "10.77.0.1/24";
      };
    };
  };
  fabric-same-pci.modules = withFabric {
    rails = {
      a = rail;
      b = rail // {
        address = "10.77.2.1/24";
      };
    };
  };
  fabric-same-mac.modules = withFabric {
    rails = {
      a = railByMac;
      b = railByMac // {
        address = "10.77.2.1/24";
      };
    };
  };
  fabric-peer-name.modules = withFabric {
    inherit rails;
    peerAddresses = [ "spark8.example.org" ];
  };
  fabric-route.modules = withFabric {
    inherit rails;
    routes = [ "10.77.9.0/24 10.77.1.2" ];
  };
  fabric-unmatched.modules = withFabric { rails.enp1s0f0np0 = removeAttrs rail [ "pci" ]; };

  # ---- weights -----------------------------------------------------------------------------
  weights-export = {
    modules = withWeights {
      export = {
        enable = true;
        clients = [
          "10.77.1.2"
          "10.77.2.3"
        ];
        rdma = true;
      };
    };
    look = config: {
      inherit (config.services.nfs.server) exports nproc;
      inherit (config.services.nfs.settings) nfsd;
    };
  };
  weights-mount = {
    modules = withWeights {
      path = "/srv/my models";
      mount = {
        enable = true;
        what = "10.77.1.1:/";
      };
    };
    look = config: {
      mount = unit config "srv-my\\x20models.mount";
      automount = config.systemd.units."srv-my\\x20models.automount".wantedBy;
      readAhead = config.services.nfs.settings.nfsrahead;
    };
  };
  weights-both.modules = withWeights {
    export = {
      enable = true;
      clients = [ "10.77.1.2" ];
    };
    mount = {
      enable = true;
      what = "10.77.1.1:/";
    };
  };
  weights-no-clients.modules = withWeights { export.enable = true; };
  weights-everyone.modules = withWeights {
    export = {
      enable = true;
      clients = [ "*" ];
    };
  };
  weights-root.modules = withWeights {
    export = {
      enable = true;
      clients = [ "10.77.1.2" ];
      options = [
        "rw"
        "no_root_squash"
      ];
    };
  };
  weights-what.modules = withWeights {
    mount = {
      enable = true;
      what = "10.77.1.1";
    };
  };

  # ---- engram ------------------------------------------------------------------------------
  engram-good = {
    modules = withEngram {
      directory = "/mnt/engram";
      device = "/dev/disk/by-id/nvme-x-part3";
      createFilesystem = true;
    };
    look = config: {
      pack = unit config "spark-engram-pack.service";
      mount = unit config "mnt-engram.mount";
      format = unit config "spark-engram-format.service";
      formatRequiredBy = config.systemd.units."spark-engram-format.service".requiredBy;
      udev = config.services.udev.extraRules;
      tmpfiles = config.systemd.tmpfiles.settings."10-spark-engram";
    };
  };
  engram-directory = {
    modules = withEngram { };
    look = config: {
      format = config.systemd.units ? "spark-engram-format.service";
      mounts = map (mount: mount.where) config.systemd.mounts;
    };
  };
  engram-unstable.modules = withEngram { device = "/dev/nvme0n1p3"; };
  engram-create.modules = withEngram { createFilesystem = true; };
  engram-no-command.modules = withEngram { packArgv = lib.mkForce [ ]; };

  # ---- guard -------------------------------------------------------------------------------
  guard-good = {
    modules = withGuard { } ++ [ { services.openssh.enable = true; } ];
    look = config: {
      unit = unit config "spark-guard.service";
      sshd = { inherit (config.systemd.services.sshd.serviceConfig) MemoryMin OOMScoreAdjust; };
      slice = config.systemd.slices.system.sliceConfig;
      inherit (lib.head (planOf config).nodes) guard;
    };
  };
  guard-ssh-by-socket = {
    modules = withGuard { } ++ [
      {
        services.openssh = {
          enable = true;
          startWhenNeeded = true;
        };
      }
    ];
    look = config: {
      connection = {
        inherit (config.systemd.services."sshd@".serviceConfig) MemoryMin OOMScoreAdjust;
      };
      daemon = config.systemd.services ? sshd;
    };
  };
  guard-order.modules = withGuard {
    startBytes = 1073741824;
    steadyBytes = 2147483648;
  };
  guard-unit.modules = withGuard {
    startBytes = 5;
    steadyBytes = 3;
  };

  # ---- engine ------------------------------------------------------------------------------
  engine-good = {
    modules = withEngine {
      apiKeyFile = "/etc/spark/api-key";
      configFile = "/run/spark-engine/config.yaml";
      apiPort = 8888;
      env.NCCL_DEBUG = "WARN";
      settings.model.path = "/models/other";
      settings.model.shards = 1;
    };
    look = config: {
      engine = unit config "spark-engine.service";
      ready = unit config "spark-ready.service";
      target = unit config "spark.target";
      ports = config.networking.firewall.allowedTCPPorts;
      plan = planOf config;
    };
  };
  engine-no-argv.modules = withEngine {
    argv = lib.mkForce [ ];
    settings.model.path = "/models/small";
    settings.model.shards = 1;
  };
  engine-key-in-argv.modules = withEngine {
    argv = lib.mkForce [
      "python3"
      "--model=/models/small"
      "--api-key"
      "hunter2"
    ];
  };
  engine-key-in-store.modules = withEngine {
    apiKeyFile = "${builtins.storeDir}/key";
    configFile = "/run/spark-engine/config.yaml";
  };
  engine-key-without-config.modules = withEngine { apiKeyFile = "/etc/spark/api-key"; };
  engine-rank.modules = withEngine { rank = 1; };
  engine-ranks.modules = withEngine { ranks = 3; };
  engine-no-model.modules = withEngine {
    argv = [
      "python3"
      "-m"
      "sglang.launch_server"
    ];
  };
  engine-no-shards.modules = withEngine { settings = { }; };
  engine-in-home.modules = withEngine {
    settings.model.path = "/home/me/models/small";
    settings.model.shards = 1;
  };
  engine-no-guard.modules = withEngine { } ++ [ { services.spark.guard.enable = false; } ];

  # ---- router ------------------------------------------------------------------------------
  router-good = {
    modules = withRouter {
      apiKeyFile = "/etc/spark/api-key";
      port = 8000;
    };
    look = config: {
      unit = unit config "spark-router.service";
      inherit (config.systemd.units."spark-router.service") wantedBy;
      ports = config.networking.firewall.allowedTCPPorts;
      plan = planOf config;
    };
  };
  router-no-argv.modules = withRouter { argv = [ ]; };
  router-key-in-argv.modules = withRouter {
    argv = [
      "--api-key"
      "hunter2"
    ];
  };
  router-key-in-store.modules = withRouter { apiKeyFile = "${builtins.storeDir}/key"; };
  router-version.modules = withRouter { version = "0.0.1"; };

  # ---- fleet -------------------------------------------------------------------------------
  fleet-good.modules = withFleet { clusterFile = ../../tests/vm/cluster/cluster.yaml; };
  fleet-other-file.modules = withFleet {
    clusterFile = ../../examples/single-spark/cluster.yaml;
  };
  fleet-version.modules = withFleet { plan = lib.mkForce (plan // { version = 99; }); };
  fleet-node.modules = withFleet { node = lib.mkForce "spark7"; };
  fleet-hash.modules = withFleet { clusterSha256 = lib.concatStrings (lib.replicate 64 "0"); };
  fleet-dgx-os.modules = withFleet {
    plan = lib.mkForce (plan // { nodes = map (node: node // { system = "dgx-os"; }) plan.nodes; });
  };

  # ---- hardware and image ------------------------------------------------------------------
  hardware-good = {
    modules = [
      hardware
      {
        hardware.spark = {
          enable = true;
          gpuClockLimit = 2200;
          driver = "production";
          watchdog.enable = false;
        };
      }
    ];
    look = config: {
      clock = unit config "spark-gpu-clock.service";
      driver = config.hardware.nvidia.package.version;
      watchdog = config.systemd.settings.Manager ? RuntimeWatchdogSec;
      substituters = config.nix.settings.extra-substituters;
      keys = config.nix.settings.extra-trusted-public-keys;
      inherit (config.networking.firewall) trustedInterfaces;
    };
  };
  hardware-own-cache = {
    modules = [
      hardware
      {
        hardware.spark.enable = true;
        nix.settings = {
          extra-substituters = [ "https://cache.example.org" ];
          extra-trusted-public-keys = "cache.example.org-1:AAAA another-1:BBBB";
        };
      }
    ];
    look = config: {
      substituters = config.nix.settings.extra-substituters;
      keys = config.nix.settings.extra-trusted-public-keys;
    };
  };
  hardware-open = {
    modules = [
      hardware
      {
        hardware.spark = {
          enable = true;
          thirdPartyCache = true;
          containers = true;
          dashboard = true;
          kexecHandover = true;
        };
      }
    ];
    look = config: {
      substituters = config.nix.settings.extra-substituters;
      podman = config.virtualisation.podman.enable;
      inherit (config.networking.firewall) trustedInterfaces;
      dashboard = config.services.dgx-dashboard.enable;
      inherit (config.boot) kernelParams;
    };
  };
  hardware-swap.modules = [
    hardware
    {
      hardware.spark.enable = true;
      swapDevices = [ { device = "/swapfile"; } ];
    }
  ];
  hardware-x86 = {
    system = "x86_64-linux";
    modules = [
      hardware
      { hardware.spark.enable = true; }
    ];
  };
  image-good = {
    modules = [
      image
      {
        services.spark.image = {
          enable = true;
          engram.enable = true;
        };
      }
    ];
    look = config: {
      esp = lib.attrNames config.services.spark.image.espFiles;
      inherit (config.systemd.repart) partitions;
      root = config.fileSystems."/".device;
      passwords = config.services.openssh.settings.PasswordAuthentication;
      keys = unit config "spark-authorized-keys.service";
      keyFiles = config.services.openssh.authorizedKeysFiles;
    };
  };
  image-engram-of-the-plan = {
    modules =
      withImage { }
      ++ withEngram { device = "/dev/disk/by-partlabel/spark-engram"; };
    look = config: config.services.spark.image.engram.enable;
  };
  image-password.modules = withImage { } ++ [ { users.users.root.initialPassword = "spark"; } ];
  image-empty-password.modules = withImage { } ++ [ { users.users.root.hashedPassword = ""; } ];
  image-autologin.modules = withImage { } ++ [ { services.getty.autologinUser = "root"; } ];
  image-ssh-password.modules = withImage { } ++ [
    { services.openssh.settings.PasswordAuthentication = true; }
  ];
  image-ssh-root.modules = withImage { } ++ [
    { services.openssh.settings.PermitRootLogin = "yes"; }
  ];
  image-esp-name.modules = withImage { espFiles."/spark/node" = ./cases.nix; };
  image-locked-out.modules = [
    image
    {
      services.spark.image.enable = true;
      services.openssh.enable = false;
      users.mutableUsers = false;
    }
  ];
}
