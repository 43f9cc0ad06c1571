# What a DGX Spark needs below the services: kernel, driver, memory, watchdog.
{ nixos-dgx-spark }:
{
  config,
  lib,
  pkgs,
  ...
}:
let
  cfg = config.hardware.spark;
  inherit (lib) mkOption types;

  # .ko files made for a kernel that nixpkgs does not know keep paths of the kernel's -dev output
  # in their strings, and nixpkgs allows a driver's modules no reference at all.
  withoutKernelPaths =
    module:
    module.overrideAttrs (old: {
      postFixup = (old.postFixup or "") + ''
        find "$out/lib/modules" -name '*.ko' -exec \
          ${lib.getExe' pkgs.removeReferencesTo "remove-references-to"} \
          -t ${config.boot.kernelPackages.kernel.dev} {} +
      '';
    });
  driver =
    {
      r580 = config.boot.kernelPackages.nvidiaPackages.legacy_580;
      production = config.boot.kernelPackages.nvidiaPackages.production;
    }
    .${cfg.driver};

  dgxSpark = "${nixos-dgx-spark}/modules/dgx-spark.nix";
  # what that module itself puts into nix.conf; read from it, so that another cache in a later
  # version is left out as well
  thirdParty = (import dgxSpark { inherit config lib pkgs; }).config.content.nix.settings;
  # a list of nix.conf without the third party's entries; those of the owner stay
  ownEntries =
    name:
    mkOption {
      type = types.coercedTo types.str (lib.splitString " ") (types.listOf types.str);
      default = [ ];
      apply = lib.filter (
        entry: !cfg.enable || cfg.thirdPartyCache || !lib.elem entry thirdParty.${name}
      );
      description = "`${name}` of {manpage}`nix.conf(5)`.";
    };
in
{
  imports = [ dgxSpark ];

  options.nix.settings = mkOption {
    type = types.submodule {
      options = lib.genAttrs [ "extra-substituters" "extra-trusted-public-keys" ] ownEntries;
    };
  };

  # imported modules trust bridges of containers, whether there are any or not
  options.networking.firewall.trustedInterfaces = mkOption {
    apply = lib.filter (name: !cfg.enable || cfg.containers || name != "podman+");
  };

  options.hardware.spark = {
    enable = lib.mkEnableOption "the settings of a DGX Spark (GB10) that serves a model";

    driver = mkOption {
      type = types.enum [
        "r580"
        "production"
      ];
      default = "r580";
      example = "production";
      description = ''
        Branch of NVIDIA's driver, always with the open kernel modules (the proprietary ones fail
        on GB10 with Xid 169).

        R580 is the branch that NVIDIA supports on the Spark, and its CUDA 13.0 is as new as the
        toolkit of the pinned engine, which PTX compiled at run time needs. `production` follows
        nixpkgs (R595 in nixos-26.05): newer toolkits run, but users saw failures of memory
        reserved through DRM.
      '';
    };

    cppcAutonomousMode = mkOption {
      type = types.bool;
      default = true;
      example = false;
      description = ''
        Let the processor choose its own frequency (`cppc_cpufreq.auto_sel_mode=1`). Without it a
        single thread reaches about a third of the memory bandwidth.
      '';
    };

    kexecHandover = mkOption {
      type = types.bool;
      default = false;
      example = true;
      description = ''
        Kexec handover of kernels 7.x. It takes 9.3 GiB for itself, and then registering memory
        for RDMA fails with ENOMEM: off means `kho=off`, which older kernels ignore.
      '';
    };

    transparentHugepages = mkOption {
      type = types.enum [
        "always"
        "madvise"
        "never"
      ];
      default = "never";
      example = "madvise";
      description = ''
        Transparent huge pages. Engine buffers are pinned anyway, and khugepaged takes from the
        headroom that the memory guard watches.
      '';
    };

    headless = mkOption {
      type = types.bool;
      default = true;
      example = false;
      description = ''
        No desktop, no splash screen, `multi-user.target`. A desktop costs 1 to 2 GiB of the
        memory that the model needs.
      '';
    };

    watchdog = {
      enable = mkOption {
        type = types.bool;
        default = true;
        example = false;
        description = ''
          Let systemd feed the hardware watchdog: a machine whose driver has used up all memory
          answers pings but nothing else, and only a reset brings it back.
        '';
      };
      runtime = mkOption {
        type = types.strMatching "[0-9]+(ms|s|min|h)?";
        default = "30s";
        example = "1min";
        description = "Time without a sign of life after which the hardware resets the machine.";
      };
      reboot = mkOption {
        type = types.strMatching "[0-9]+(ms|s|min|h)?";
        default = "10min";
        example = "5min";
        description = "The same while the machine shuts down.";
      };
    };

    gpuClockLimit = mkOption {
      type = types.nullOr (types.ints.between 300 3000);
      default = null;
      example = 2200;
      description = ''
        Highest GPU clock in MHz, or null for none. 2000 to 2200 MHz kept boxes 10 °C cooler
        without slowing decoding, and cured shutdowns from heat.
      '';
    };

    thirdPartyCache = mkOption {
      type = types.bool;
      default = false;
      example = true;
      description = ''
        Trust the third-party binary cache for CUDA packages that nixos-dgx-spark adds to the
        Nix settings. The engine comes from wheels, so nothing here needs it. Your own entries in
        `nix.settings.extra-substituters` and `extra-trusted-public-keys` stay either way.
      '';
    };

    containers = mkOption {
      type = types.bool;
      default = false;
      example = true;
      description = ''
        Podman with Docker's socket and NVIDIA's container toolkit; the firewall then trusts its
        bridges. The engine runs without containers.
      '';
    };

    dashboard = mkOption {
      type = types.bool;
      default = false;
      example = true;
      description = "NVIDIA's DGX dashboard on port 11000.";
    };
  };

  config = lib.mkIf cfg.enable {
    assertions = [
      {
        assertion = config.swapDevices == [ ] && !config.zramSwap.enable;
        message = ''
          hardware.spark: swap is configured (swapDevices or zramSwap.enable). CPU and GPU share
          one memory; a model that starts to swap hangs the machine for hours instead of failing.
          Remove swapDevices and set zramSwap.enable = false.
        '';
      }
      {
        assertion = pkgs.stdenv.hostPlatform.isAarch64;
        message = ''
          hardware.spark.enable: a DGX Spark is aarch64, this system is ${pkgs.stdenv.hostPlatform.system}.
          Set nixpkgs.hostPlatform = "aarch64-linux".
        '';
      }
    ];

    hardware.dgx-spark = {
      enable = true;
      inherit (cfg) cppcAutonomousMode;
    };

    boot.kernelParams = [
      "transparent_hugepage=${cfg.transparentHugepages}"
      # settings of DGX OS for this board
      "pci=pcie_bus_safe"
      "initcall_blacklist=tegra234_cbb_init"
    ]
    ++ lib.optional (!cfg.kexecHandover) "kho=off";
    boot.initrd.availableKernelModules = [ "nvme" ];
    boot.plymouth.enable = lib.mkIf cfg.headless false;

    hardware.nvidia = {
      package = lib.mkForce (
        driver
        // {
          open = withoutKernelPaths driver.open;
        }
        // lib.optionalAttrs (driver ? mod) { mod = withoutKernelPaths driver.mod; }
      );
      nvidiaSettings = lib.mkForce (!cfg.headless);
    };

    # The cards of other makers, cameras and so on are not there; this keeps the ConnectX-7's.
    hardware.enableRedistributableFirmware = true;

    virtualisation.podman.enable = lib.mkForce cfg.containers;
    virtualisation.podman.dockerSocket.enable = lib.mkForce cfg.containers;
    virtualisation.podman.dockerCompat = lib.mkForce cfg.containers;
    hardware.nvidia-container-toolkit.enable = lib.mkForce cfg.containers;
    services.dgx-dashboard.enable = lib.mkForce cfg.dashboard;

    systemd.defaultUnit = lib.mkIf cfg.headless "multi-user.target";
    systemd.settings.Manager = lib.mkIf cfg.watchdog.enable {
      RuntimeWatchdogSec = cfg.watchdog.runtime;
      RebootWatchdogSec = cfg.watchdog.reboot;
    };

    # systemd-oomd would judge by swap and pressure; the memory guard judges by MemAvailable.
    systemd.oomd.enable = false;

    systemd.services.spark-gpu-clock = lib.mkIf (cfg.gpuClockLimit != null) {
      description = "Limit the GPU clock to ${toString cfg.gpuClockLimit} MHz";
      wantedBy = [ "multi-user.target" ];
      after = [ "nvidia-persistenced.service" ];
      wants = [ "nvidia-persistenced.service" ];
      serviceConfig = {
        Type = "oneshot";
        RemainAfterExit = true;
        ExecStart = "${lib.getExe' config.hardware.nvidia.package.bin "nvidia-smi"} --lock-gpu-clocks=0,${toString cfg.gpuClockLimit}";
        ExecStop = "${lib.getExe' config.hardware.nvidia.package.bin "nvidia-smi"} --reset-gpu-clocks";
      };
    };
  };
}
