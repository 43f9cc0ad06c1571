# The checkpoint: exported by the head over the fabric, mounted by the workers, or a local copy.
{
  config,
  lib,
  pkgs,
  utils,
  ...
}:
let
  cfg = config.services.spark.weights;
  inherit (lib) mkOption types;
  inherit (cfg) export mount;
  isAddress = client: builtins.match "[0-9.]+" client != null;
  needed = [
    "ro"
    "root_squash"
  ];
  clients = map (client: "${client}(${lib.concatStringsSep "," export.options})") export.clients;
  # exports(5): a path with other characters is quoted
  exported =
    if builtins.match "[A-Za-z0-9_./+:@-]+" cfg.path != null then cfg.path else "\"${cfg.path}\"";
  unit = "${utils.escapeSystemdPath cfg.path}.mount";
in
{
  options.services.spark.weights = {
    enable = lib.mkEnableOption "the checkpoint's place on this node";

    path = mkOption {
      type = types.path;
      default = "/models/DeepSeek-V4.1-Flash";
      example = "/srv/models/DeepSeek-V4.1-Flash";
      description = "Directory of the checkpoint, the same on every node.";
    };

    export = {
      enable = lib.mkEnableOption "the NFSv4.2 export of the checkpoint (on the head)";
      clients = mkOption {
        type = types.listOf types.str;
        default = [ ];
        example = [ "10.77.1.2" ];
        description = "Rail addresses that may mount; nobody else may.";
      };
      options = mkOption {
        type = types.listOf types.str;
        default = [
          "ro"
          "sync"
          "no_subtree_check"
          "root_squash"
          "fsid=0"
        ];
        example = [
          "ro"
          "async"
        ];
        description = "Options of the export, see {manpage}`exports(5)`.";
      };
      threads = mkOption {
        type = types.ints.positive;
        default = 32;
        example = 64;
        description = "Threads of nfsd; the usual 8 starve three loading ranks.";
      };
      rdma = mkOption {
        type = types.bool;
        default = false;
        example = true;
        description = "Also serve NFS over RDMA on port 20049.";
      };
    };

    mount = {
      enable = lib.mkEnableOption "the mount of the head's checkpoint (on a worker)";
      what = mkOption {
        type = types.str;
        default = "";
        example = "10.77.1.1:/";
        description = "Source of the mount: the head's address on the rail that joins both.";
      };
      type = mkOption {
        type = types.str;
        default = "nfs4";
        example = "nfs4";
        description = "File system type.";
      };
      options = mkOption {
        type = types.listOf types.str;
        default = [
          "ro"
          "vers=4.2"
          "rsize=1048576"
          "wsize=1048576"
          "hard"
          "timeo=600"
          "noatime"
          "_netdev"
          "nofail"
          "proto=tcp"
          "nconnect=8"
        ];
        example = [
          "ro"
          "vers=4.2"
        ];
        description = "Mount options.";
      };
      readAheadKiB = mkOption {
        type = types.ints.positive;
        default = 16384;
        example = 4096;
        description = ''
          Read-ahead of the mount in KiB; the kernel's 128 KiB for a network mount halve the speed
          of a loader that reads in order.
        '';
      };
    };
  };

  config = lib.mkIf cfg.enable {
    assertions = [
      {
        assertion = !(export.enable && mount.enable);
        message = ''
          services.spark.weights: this node both exports (export.enable) and mounts (mount.enable)
          ${cfg.path}. The head exports, workers mount: turn one of them off.
        '';
      }
      {
        assertion = export.enable -> export.clients != [ ];
        message = ''
          services.spark.weights.export.clients is empty: an export without clients is refused to
          everyone. List the workers' rail addresses.
        '';
      }
      {
        assertion = export.enable -> lib.all isAddress export.clients;
        message = ''
          services.spark.weights.export.clients: give single IPv4 addresses (no names, no
          patterns, no networks); got ${lib.concatStringsSep ", " export.clients}.
        '';
      }
      {
        assertion = export.enable -> lib.all (option: lib.elem option export.options) needed;
        message = ''
          services.spark.weights.export.options must have ro and root_squash: a worker's root must
          not become root on the head's disk.
        '';
      }
      {
        assertion = mount.enable -> builtins.match "[^:]+:/.*" mount.what != null;
        message = ''
          services.spark.weights.mount.what is "${mount.what}". Write ADDRESS:/PATH, for example
          10.77.1.1:/ (the export is the root of NFSv4's name space).
        '';
      }
    ];

    services.nfs.server = lib.mkIf export.enable {
      enable = true;
      nproc = export.threads;
      exports = "${exported} ${lib.concatStringsSep " " clients}\n";
    };
    services.nfs.settings = lib.mkMerge [
      (lib.mkIf export.enable {
        nfsd = {
          vers3 = false;
          "vers4.0" = false;
          "vers4.1" = false;
          "vers4.2" = true;
        }
        // lib.optionalAttrs export.rdma {
          rdma = true;
          rdma-port = 20049;
        };
      })
      (lib.mkIf mount.enable {
        nfsrahead.default = mount.readAheadKiB;
      })
    ];
    boot.supportedFilesystems = lib.mkIf mount.enable [ "nfs4" ];
    # nfs-utils' own rule for new NFS mounts (99-nfs.rules); nfsrahead reads /etc/nfs.conf
    services.udev.packages = lib.mkIf mount.enable [ pkgs.nfs-utils ];

    systemd.mounts = lib.optional mount.enable {
      inherit (mount) what type;
      inherit (config.services.spark.units.${unit}) description after requires;
      where = cfg.path;
      options = lib.concatStringsSep "," mount.options;
      mountConfig.TimeoutSec = "90";
    };
    # Mounted at the first look into the directory: the boot never waits for the head.
    systemd.automounts = lib.optional mount.enable {
      inherit (config.services.spark.units.${unit}) description;
      where = cfg.path;
      wantedBy = [ "multi-user.target" ];
      automountConfig.TimeoutIdleSec = "0";
    };

    services.spark.enabledUnits =
      lib.optional export.enable "nfs-server.service"
      ++ lib.optional mount.enable unit;
    services.spark.unitWords.MOUNT = unit;
    services.spark.facts.weights = {
      mode = if export.enable || mount.enable then "nfs" else "local";
      export =
        if !export.enable then
          null
        else
          {
            inherit (cfg) path;
            inherit (export)
              clients
              options
              threads
              rdma
              ;
          };
      mount =
        if !mount.enable then
          null
        else
          {
            inherit unit;
            where = cfg.path;
            inherit (mount) what type options;
          };
    };
  };
}
