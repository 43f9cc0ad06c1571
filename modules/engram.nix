# The Engram tables on NVMe: file system by stable id, packing, queue settings.
{
  config,
  lib,
  pkgs,
  utils,
  ...
}:
let
  cfg = config.services.spark.engram;
  inherit (lib) mkOption types;

  format = pkgs.writeShellApplication {
    name = "spark-engram-format";
    runtimeInputs = [
      pkgs.util-linux
      pkgs.coreutils
      pkgs.diffutils
      pkgs.e2fsprogs
      pkgs.xfsprogs
    ];
    text = builtins.readFile ./engram/format.sh;
  };

  mountUnit = "${utils.escapeSystemdPath cfg.directory}.mount";
in
{
  options.services.spark.engram = {
    enable = lib.mkEnableOption "packed Engram tables on this node's NVMe";

    package = mkOption {
      type = types.package;
      default = config.services.spark.packages.spark-engram;
      defaultText = lib.literalExpression "the flake's spark-engram";
      description = "Package with the `spark-engram` command.";
    };

    directory = mkOption {
      type = types.path;
      default = "/var/lib/spark/engram";
      example = "/mnt/engram";
      description = "Where the packed files are.";
    };

    device = mkOption {
      type = types.nullOr types.path;
      default = null;
      example = "/dev/disk/by-id/nvme-Samsung_SSD_990_PRO_4TB_S0000000000000-part3";
      description = ''
        Block device mounted at `directory`, by a name that stays (`/dev/disk/by-id`, `by-uuid`,
        `by-label`, `by-partuuid`, `by-partlabel`). Null: `directory` is part of another file
        system.
      '';
    };

    fsType = mkOption {
      type = types.enum [
        "ext4"
        "xfs"
      ];
      default = "ext4";
      example = "xfs";
      description = "File system; both allow O_DIRECT.";
    };

    createFilesystem = mkOption {
      type = types.bool;
      default = false;
      example = true;
      description = ''
        Make the file system when the device is empty. A device with any signature, partition or
        data in its first or last megabytes is left as it is and the unit fails.
      '';
    };

    mountOptions = mkOption {
      type = types.listOf types.str;
      default = [
        "noatime"
        "nodiratime"
        "nofail"
      ];
      example = [ "noatime" ];
      description = "Mount options of the device.";
    };

    queue = {
      scheduler = mkOption {
        type = types.enum [
          "none"
          "mq-deadline"
          "kyber"
        ];
        default = "none";
        example = "mq-deadline";
        description = ''
          I/O scheduler of NVMe disks. Rows are random 4 KiB reads, which no order makes faster.
        '';
      };
      readAheadKiB = mkOption {
        type = types.ints.unsigned;
        default = 128;
        example = 4096;
        description = "Read-ahead of NVMe disks for buffered readers; O_DIRECT does not use it.";
      };
    };

    files = mkOption {
      type = types.listOf (types.attrsOf types.anything);
      default = [ ];
      description = "Packed files with their exact sizes, as the plan has them.";
    };

    cacheBytes = mkOption {
      type = types.ints.unsigned;
      default = 0;
      example = 4294967296;
      description = "Row cache of the engine in bytes.";
    };

    packArgv = mkOption {
      type = types.listOf types.str;
      default = [ ];
      example = [
        "spark-engram"
        "pack"
        "--checkpoint"
        "/models/DeepSeek-V4.1-Flash"
        "--output"
        "/var/lib/spark/engram"
        "--tp"
        "3"
        "--rank"
        "0"
      ];
      description = "Command that packs this node's files; `spark-engram` is found in `package`.";
    };
  };

  config = lib.mkIf cfg.enable {
    assertions = [
      {
        assertion = cfg.packArgv != [ ];
        message = ''
          services.spark.engram.packArgv is empty: nothing would pack the tables. Give the command,
          for example "spark-engram pack --checkpoint DIR --output DIR --tp 3 --rank 0" as a list.
        '';
      }
      {
        assertion = cfg.createFilesystem -> cfg.device != null;
        message = ''
          services.spark.engram.createFilesystem is set without services.spark.engram.device. Name
          the device by a stable path, or turn createFilesystem off.
        '';
      }
      {
        assertion =
          cfg.device == null
          || builtins.match "/dev/disk/by-(id|(part)?uuid|(part)?label|path)/.+" cfg.device != null;
        message = ''
          services.spark.engram.device is ${toString cfg.device}: names such as /dev/nvme0n1 can
          change at each boot. Use a link of /dev/disk/by-id (ls -l /dev/disk/by-id).
        '';
      }
    ];

    systemd.services.spark-engram-format = lib.mkIf (cfg.createFilesystem && cfg.device != null) {
      description = "Make the Engram file system on an empty disk";
      requiredBy = [ mountUnit ];
      before = [ mountUnit ];
      unitConfig.DefaultDependencies = false;
      bindsTo = [ "${utils.escapeSystemdPath cfg.device}.device" ];
      after = [ "${utils.escapeSystemdPath cfg.device}.device" ];
      conflicts = [ "shutdown.target" ];
      serviceConfig = {
        Type = "oneshot";
        RemainAfterExit = true;
        ExecStart = utils.escapeSystemdExecArgs [
          (lib.getExe format)
          cfg.fsType
          cfg.device
        ];
      };
    };

    systemd.mounts = lib.optional (cfg.device != null) {
      what = cfg.device;
      where = cfg.directory;
      type = if cfg.createFilesystem then cfg.fsType else "auto";
      inherit (config.services.spark.units.${mountUnit}) description after requires;
      options = lib.concatStringsSep "," cfg.mountOptions;
      wantedBy = [ "multi-user.target" ];
    };

    services.udev.extraRules = ''
      ACTION=="add|change", SUBSYSTEM=="block", ENV{DEVTYPE}=="disk", KERNEL=="nvme*n*", ATTR{queue/scheduler}="${cfg.queue.scheduler}", ATTR{queue/read_ahead_kb}="${toString cfg.queue.readAheadKiB}"
    '';

    # ReadWritePaths= of the pack unit needs the directory to exist
    systemd.tmpfiles.settings."10-spark-engram" = {
      ${cfg.directory}.d = {
        mode = "0755";
        user = "root";
        group = "root";
      };
    };

    environment.systemPackages = [ cfg.package ];

    services.spark.enabledUnits =
      lib.optional (cfg.device != null) mountUnit ++ [ "spark-engram-pack.service" ];
    services.spark.unitWords = {
      ENGRAM-MOUNT = mountUnit;
      ENGRAM = cfg.directory;
      PACK-WORDS = lib.drop 1 cfg.packArgv;
    };
    services.spark.placeholders."@spark-engram@" = lib.mkDefault (lib.getExe cfg.package);
    services.spark.facts.engram = {
      inherit (cfg) directory device files;
      mount_unit = if cfg.device == null then null else mountUnit;
      bytes = lib.foldl' (sum: file: sum + file.bytes) 0 cfg.files;
      cache_bytes = cfg.cacheBytes;
      pack_argv = cfg.packArgv;
    };
  };
}
