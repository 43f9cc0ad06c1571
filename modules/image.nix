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

  efiArch = pkgs.stdenv.hostPlatform.efiArch;
  toplevel = config.system.build.toplevel;
  registration = pkgs.closureInfo { rootPaths = [ toplevel ]; };
  engramLabel = "spark-engram";
in
{
  imports = [ "${modulesPath}/image/repart.nix" ];

  options.services.spark.image = {
    enable = lib.mkEnableOption "booting from an image made by `system.build.image`";

    espSize = mkOption {
      type = types.strMatching "[0-9]+[MG]";
      default = "1G";
      example = "2G";
      description = "Size of the ESP: it holds kernel and initrd of several generations.";
    };

    rootFsType = mkOption {
      type = types.enum [ "ext4" ];
      default = "ext4";
      example = "ext4";
      description = "File system of the root.";
    };

    engram = {
      enable = lib.mkEnableOption "a partition for packed Engram tables, made at the first boot";
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

    authorizedKeysFile = mkOption {
      type = types.str;
      default = "spark/authorized_keys";
      example = "spark/authorized_keys";
      description = ''
        File on the ESP with the owner's SSH keys. It can be written on any computer after the
        image was copied to the disk, and there is no other way in: no password is ever set.
      '';
    };
  };

  config = lib.mkIf cfg.enable {
    assertions = [
      {
        assertion =
          config.users.mutableUsers
          || config.services.openssh.enable
          || config.users.users.root.openssh.authorizedKeys.keys != [ ];
        message = ''
          services.spark.image.enable: nobody could log in. Enable services.openssh, or give
          users.users.root.openssh.authorizedKeys.keys.
        '';
      }
    ];

    boot.loader.systemd-boot.enable = true;
    boot.loader.systemd-boot.configurationLimit = lib.mkDefault 8;
    # the firmware finds \EFI\BOOT\BOOTAA64.EFI by itself; nothing is written to its variables
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
      };
      "20-root" = {
        Type = "root";
        Label = "spark-root";
        SizeMinBytes = cfg.rootMinSize;
        Weight = 1000;
      };
    }
    // lib.optionalAttrs cfg.engram.enable {
      "30-engram" = {
        Type = "linux-generic";
        Label = engramLabel;
        Format = "ext4";
        SizeMinBytes = cfg.engram.minSize;
        Weight = 500;
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

    # ---- the way in: keys from the ESP, never a password -------------------------------------
    services.openssh = {
      enable = lib.mkDefault true;
      settings = {
        PasswordAuthentication = lib.mkDefault false;
        KbdInteractiveAuthentication = lib.mkDefault false;
        PermitRootLogin = lib.mkDefault "prohibit-password";
      };
    };
    systemd.services.spark-authorized-keys = {
      description = "Take the owner's SSH keys from the ESP";
      wantedBy = [ "multi-user.target" ];
      before = [ "sshd.service" ];
      unitConfig = {
        RequiresMountsFor = "/boot";
        ConditionPathExists = "/boot/${cfg.authorizedKeysFile}";
      };
      serviceConfig = {
        Type = "oneshot";
        RemainAfterExit = true;
        ExecStart = "${lib.getExe' pkgs.coreutils "install"} -D --mode=0600 --owner=root --group=root /boot/${cfg.authorizedKeysFile} /root/.ssh/authorized_keys";
      };
    };

    # ---- the image ---------------------------------------------------------------------------
    image.repart = {
      name = lib.mkDefault config.system.image.id;
      sectorSize = 512;
      partitions = {
        "10-esp" = {
          contents = {
            "/EFI/BOOT/BOOT${lib.toUpper efiArch}.EFI".source =
              "${config.systemd.package}/lib/systemd/boot/efi/systemd-boot${efiArch}.efi";
            "/EFI/Linux/${config.system.boot.loader.ukiFile}".source =
              "${config.system.build.uki}/${config.system.boot.loader.ukiFile}";
          };
          repartConfig = {
            Type = "esp";
            Label = "spark-esp";
            Format = "vfat";
            SizeMinBytes = cfg.espSize;
            SizeMaxBytes = cfg.espSize;
          };
        };
        "20-root" = {
          storePaths = [ toplevel ];
          contents."/nix-path-registration".source = "${registration}/registration";
          repartConfig = {
            Type = "root";
            Label = "spark-root";
            Format = cfg.rootFsType;
            Minimize = "guess";
          };
        };
      };
    };
  };
}
