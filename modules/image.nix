# A disk image to write with dd: ESP with systemd-boot, a root that grows, and optionally an empty
# partition for Engram. Made by systemd-repart without a VM.
{
  config,
  lib,
  pkgs,
  modulesPath,
  ...
}:
let
  cfg = config.services.spark.image;
  inherit (lib) mkOption types;

  toplevel = config.system.build.toplevel;
  registration = pkgs.closureInfo { rootPaths = [ toplevel ]; };
  engramLabel = "spark-engram";
  engramDevice = "/dev/disk/by-partlabel/${engramLabel}";

  # A type of its own, random once: systemd-repart tells partitions by their type, and would take
  # any other Linux partition on the disk for this one.
  engramType = "8a4d2f0e-5c1b-4b7a-a6e3-2d90c7f1b358";

  # `root` means the architecture of the machine that runs systemd-repart, which may be another
  rootType =
    {
      aarch64-linux = "root-arm64";
      x86_64-linux = "root-x86-64";
    }
    .${pkgs.stdenv.hostPlatform.system};

  # random once, the same for everybody
  hashSeed = "b0a7fd1c-6a2e-4b57-9d0a-3f1e0c5a9e42";

  makeRoot = pkgs.buildPackages.writeShellApplication {
    name = "spark-image-root";
    runtimeInputs = [
      pkgs.buildPackages.coreutils
      pkgs.buildPackages.findutils
      pkgs.buildPackages.gnused
    ];
    text = builtins.readFile ./image/root.sh;
  };
in
{
  imports = [
    "${modulesPath}/image/repart.nix"
    ./image/esp.nix
    ./image/access.nix
    ./image/identity.nix
  ];

  options.services.spark.image = {
    enable = lib.mkEnableOption "booting from an image made by `system.build.image`";

    rootFsType = mkOption {
      type = types.enum [ "ext4" ];
      default = "ext4";
      example = "ext4";
      description = "File system of the root.";
    };

    engram = {
      enable = mkOption {
        type = types.bool;
        default = (config.services.spark.engram.device or null) == engramDevice;
        defaultText = lib.literalMD "true when Engram's device is `/dev/disk/by-partlabel/spark-engram`";
        example = true;
        description = ''
          A partition with an empty ext4 for packed Engram tables, made on the first boot behind
          the root. Name it in the cluster file as
          `engram: {device: /dev/disk/by-partlabel/spark-engram}`. It cannot be made later: the
          root has taken the space then.
        '';
      };
      minSize = mkOption {
        type = types.strMatching "[0-9]+[MGT]";
        default = "120G";
        example = "80G";
        description = "Smallest size of the Engram partition.";
      };
      maxSize = mkOption {
        type = types.nullOr (types.strMatching "[0-9]+[MGT]");
        default = "240G";
        example = "300G";
        description = "Largest size; the root gets the rest.";
      };
    };

    rootMinSize = mkOption {
      type = types.strMatching "[0-9]+[MGT]";
      default = "64G";
      example = "1T";
      description = ''
        Smallest size of the grown root. On the head it also holds the checkpoint (476 GiB).
      '';
    };
  };

  config = lib.mkIf cfg.enable {
    boot.loader.systemd-boot.enable = true;
    boot.loader.systemd-boot.configurationLimit = lib.mkDefault 8;
    # The image starts its kernel from one file (UKI). The first rebuild writes entries for all
    # generations, the image's own included, and that file would only fill the ESP.
    boot.loader.systemd-boot.extraInstallCommands = ''
      ${lib.getExe' pkgs.coreutils "rm"} -f -- /boot/EFI/Linux/${config.system.image.id}_*.efi
    '';
    boot.loader.efi.canTouchEfiVariables = false;
    boot.loader.grub.enable = false;

    system.image.id = lib.mkDefault "spark-appliance";
    system.image.version = lib.mkDefault "1";

    fileSystems."/" = {
      device = "/dev/disk/by-partlabel/spark-root";
      fsType = cfg.rootFsType;
      options = [ "noatime" ];
      autoResize = true;
    };
    fileSystems."/boot" = {
      device = "/dev/disk/by-partlabel/spark-esp";
      fsType = "vfat";
      options = [ "umask=0077" ];
    };

    # ---- first boot: the root takes what the disk has, Engram gets its part -----------------
    boot.initrd.systemd.enable = true;
    boot.initrd.systemd.repart.enable = true;
    systemd.repart.partitions = {
      "10-esp" = {
        Type = "esp";
        Label = "spark-esp";
        SizeMinBytes = cfg.espSize;
        SizeMaxBytes = cfg.espSize;
      };
      "20-root" = {
        Type = rootType;
        Label = "spark-root";
        SizeMinBytes = cfg.rootMinSize;
        Weight = 1000;
      };
    }
    // lib.optionalAttrs cfg.engram.enable {
      "30-engram" = {
        Type = engramType;
        Label = engramLabel;
        Format = "ext4";
        SizeMinBytes = cfg.engram.minSize;
        Weight = 500;
        # left out on a disk that is too small for it; the root grows there all the same
        Priority = 1;
      }
      // lib.optionalAttrs (cfg.engram.maxSize != null) { SizeMaxBytes = cfg.engram.maxSize; };
    };

    # so that nixos-rebuild finds a store database and a system profile
    boot.postBootCommands = ''
      if [ -f /nix-path-registration ]; then
        ${config.nix.package.out}/bin/nix-store --load-db < /nix-path-registration
        ${config.nix.package.out}/bin/nix-env -p /nix/var/nix/profiles/system --set /run/current-system
        touch /etc/NIXOS
        rm -f /nix-path-registration
      fi
    '';

    # ---- the image ---------------------------------------------------------------------------
    image.repart = {
      name = lib.mkDefault config.system.image.id;
      sectorSize = 512;
      # The hash seed of folders is random otherwise. This replaces systemd-repart's own -E.
      mkfsOptions.ext4 = [ "-E hash_seed=${hashSeed},discard,lazy_itable_init=1" ];
      partitions."20-root" = {
        storePaths = [ toplevel ];
        contents."/nix-path-registration".source = "${registration}/registration";
        repartConfig = {
          Type = rootType;
          Label = "spark-root";
          Format = cfg.rootFsType;
        };
      };
    };

    system.build.image = lib.mkForce (
      config.image.repart.image.overrideAttrs (old: {
        nativeBuildInputs = old.nativeBuildInputs ++ [ makeRoot ];
        postPatch = (old.postPatch or "") + ''
          spark-image-root $finalRepartDefinitions/20-root.conf
        '';
        # it names the build's folder, which is not the same everywhere
        postInstall = (old.postInstall or "") + ''
          substituteInPlace $out/repart-output.json --replace-quiet "$PWD/" ""
        '';
      })
    );
  };
}
