# One rank of the engine, its supervisor and, on the head, the readiness probe.
{
  config,
  lib,
  pkgs,
  ...
}:
let
  cfg = config.services.spark.engine;
  inherit (config.services.spark) byHand;
  inherit (lib) mkOption types;

  argv = import ./argv.nix { inherit lib; };
  argument = argv.option cfg.argv;
  # what a plan says of every engine (tests/nix/unit_template.py)
  planned = lib.importJSON ./engine.json;
  base = "http://${argv.local (argument "--host" "127.0.0.1")}:${toString cfg.settings.ports.api}";
  at = lib.replaceStrings [ "<BASE>" ] [ base ];

  # torch finds NCCL in its own wheel by RUNPATH; a library already loaded under the same SONAME
  # wins over that.
  python =
    if cfg.ncclLibrary == null then
      cfg.python
    else
      lib.getExe' (pkgs.writeShellScriptBin "python3" ''
        LD_PRELOAD=${lib.escapeShellArg cfg.ncclLibrary} exec ${cfg.python} "$@"
      '') "python3";

  secretWords = lib.filter (
    word: lib.hasPrefix "--api-key" word || lib.hasPrefix "--admin-api-key" word
  ) cfg.argv;
  storePath = path: path != null && lib.hasPrefix builtins.storeDir path;

  inherit (cfg.settings) model;
  inHome =
    path:
    lib.any (home: lib.hasPrefix home path) [
      "/home/"
      "/root/"
      "/run/user/"
    ];
  # CacheDirectory= of the unit
  ownCache = "/var/cache/spark-engine";

  settings = {
    model = {
      path = mkOption {
        type = types.nullOr types.str;
        default = argument "--model-path" (argument "--model" null);
        defaultText = lib.literalMD "`--model-path` of `argv`";
        example = "/models/Qwen3-4B";
        description = "Directory of the checkpoint; its files are checked before each start.";
      };
      shards = mkOption {
        type = types.nullOr types.ints.positive;
        default = null;
        example = 3;
        description = "Number of its .safetensors files. A hand-written plan needs it.";
      };
      served_name = mkOption {
        type = types.str;
        default = argument "--served-model-name" (toString model.path);
        defaultText = lib.literalMD "`--served-model-name` of `argv`, else `model.path`";
        example = "qwen3-4b";
        description = "Name of the model in requests.";
      };
    };
    ports.api = mkOption {
      type = types.port;
      default = lib.toInt (argument "--port" "30000");
      defaultText = lib.literalMD "`--port` of `argv`, else 30000";
      example = 8888;
      description = "Port of the API.";
    };
    health = {
      live_url = mkOption {
        type = types.str;
        default = at planned.health.live_url;
        defaultText = lib.literalMD "`/health` at `--host` of `argv` and `ports.api`";
        example = "http://127.0.0.1:8888/health";
        description = "URL that answers 200 while the engine lives.";
      };
      generate_url = mkOption {
        type = types.str;
        default = at planned.health.generate_url;
        defaultText = lib.literalMD "`/v1/chat/completions` at the same place";
        example = "http://127.0.0.1:8888/v1/chat/completions";
        description = "URL of the probe, a chat completion.";
      };
      generate_body = mkOption {
        inherit (pkgs.formats.json { }) type;
        default = planned.health.generate_body // {
          model = cfg.settings.model.served_name;
        };
        defaultText = lib.literalMD "a sum of two numbers for `model.served_name`";
        example = {
          model = "qwen3-4b";
          messages = [
            {
              role = "user";
              content = "What is 19 + 23? Answer with the number.";
            }
          ];
        };
        description = "Request of the probe.";
      };
      expect = mkOption {
        type = types.str;
        default = planned.health.expect;
        example = "42";
        description = "Word that a right answer of the probe contains.";
      };
      interval = mkOption {
        type = types.ints.positive;
        default = planned.health.interval;
        example = 5;
        description = "Seconds between probes while starting.";
      };
      steady_interval = mkOption {
        type = types.ints.positive;
        default = planned.health.steady_interval;
        example = 300;
        description = "Seconds between probes while serving.";
      };
      # TimeoutStartSec= of spark-ready.service is for the planned values
      probe_timeout = mkOption {
        type = types.ints.between 1 planned.health.probe_timeout;
        default = planned.health.probe_timeout;
        example = 60;
        description = "Seconds for one probe.";
      };
      ready_timeout = mkOption {
        type = types.ints.between 1 planned.health.ready_timeout;
        default = planned.health.ready_timeout;
        example = 1800;
        description = "Seconds from start to ready before giving up.";
      };
    };
    restart = {
      limit = mkOption {
        type = types.ints.unsigned;
        default = planned.restart.limit;
        example = 5;
        description = "Restarts within the window before giving up.";
      };
      window = mkOption {
        type = types.ints.positive;
        default = planned.restart.window;
        example = 7200;
        description = "Length of the window in seconds.";
      };
      backoff = mkOption {
        type = types.nonEmptyListOf types.ints.unsigned;
        default = planned.restart.backoff;
        example = [ 30 ];
        description = "Seconds to wait before the 1st, 2nd, ... restart; the last one repeats.";
      };
    };
  };
in
{
  options.services.spark.engine = {
    enable = lib.mkEnableOption "a rank of the engine";

    package = mkOption {
      type = types.package;
      default = config.services.spark.packages.spark-engine;
      defaultText = lib.literalExpression "the flake's spark-engine: sglang-env with the plugins";
      description = ''
        Environment of the engine: `bin/python3` that can import sglang, and `bin/spark-engram`
        of the same environment.
      '';
    };

    python = mkOption {
      type = types.str;
      default = lib.getExe' cfg.package "python3";
      defaultText = lib.literalExpression "\"\${package}/bin/python3\"";
      example = "/opt/engine/bin/python3";
      description = "Interpreter that runs the engine.";
    };

    argv = mkOption {
      type = types.listOf types.str;
      default = [ ];
      example = [
        "python"
        "-m"
        "sglang.launch_server"
        "--model-path"
        "/models/Qwen3-4B"
      ];
      description = "Command line of the rank; its first word is replaced by `python`.";
    };

    env = mkOption {
      type = types.attrsOf types.str;
      default = { };
      example = {
        NCCL_DEBUG = "WARN";
      };
      description = "Environment of the rank. Never a secret: it is readable on the node.";
    };

    rank = mkOption {
      type = types.ints.unsigned;
      default = 0;
      example = 1;
      description = ''
        Rank of this node; 0 is the head. The fleet module sets it; a node with hand-written options
        is rank 0 of 1.
      '';
    };

    ranks = mkOption {
      type = types.ints.positive;
      default = 1;
      example = 3;
      description = ''
        Number of ranks. More than one needs a plan (`services.spark.fleet`), which tells the
        supervisors of each other.
      '';
    };

    apiKeyFile = mkOption {
      type = types.nullOr types.str;
      default = null;
      example = "/etc/spark/api-key";
      description = ''
        File on the head with the API key. systemd hands it to the unit as a credential; the
        engine reads it from its private configuration file, never from a command line.
      '';
    };

    configFile = mkOption {
      type = types.nullOr types.str;
      default = null;
      example = "/run/spark-engine/config.yaml";
      description = "File of the engine's `--config` into which the unit writes the key.";
    };

    cacheDirectory = mkOption {
      type = types.path;
      default = ownCache;
      example = "/srv/spark-engine";
      description = "Compiled kernels; kept between starts.";
    };

    ncclLibrary = mkOption {
      type = types.nullOr types.path;
      default = null;
      example = "/opt/nccl/libnccl.so.2";
      description = ''
        A libnccl.so.2 to use instead of the wheel's, the same file on every rank. A ring of four
        needs one with support for it.

        It is loaded before everything else (`LD_PRELOAD`), and so into the shells that start the
        interpreter and have no library path yet: it must find what it needs, libstdc++ above all,
        by its own RUNPATH, as a library built with Nix does. `ldd` on the node shows whether it
        does.
      '';
    };

    apiPort = mkOption {
      type = types.nullOr types.port;
      default = null;
      example = 8888;
      description = "Port of the API to open in the firewall of the head, or null.";
    };

    settings = mkOption {
      type = types.submodule {
        freeformType = (pkgs.formats.json { }).type;
        options = settings;
      };
      default = { };
      description = ''
        Further parts of a hand-written plan, with the names of the plan. The fleet module does not
        use it.
      '';
    };
  };

  config = lib.mkIf cfg.enable {
    assertions = [
      {
        assertion = cfg.argv != [ ];
        message = ''
          services.spark.engine.argv is empty: there is nothing to run. Take it from a plan
          (services.spark.fleet) or write the engine's command line.
        '';
      }
      {
        assertion = secretWords == [ ];
        message = ''
          services.spark.engine.argv has ${lib.head (secretWords ++ [ "" ])}: a command line can be
          read by everyone on the node. Put the key into a file and set
          services.spark.engine.apiKeyFile and configFile.
        '';
      }
      {
        assertion = !storePath cfg.apiKeyFile;
        message = ''
          services.spark.engine.apiKeyFile is in the Nix store, which everyone can read. Write the
          path as a string outside the store, for example "/etc/spark/api-key".
        '';
      }
      {
        assertion = cfg.apiKeyFile != null && cfg.rank == 0 -> cfg.configFile != null;
        message = ''
          services.spark.engine.apiKeyFile needs services.spark.engine.configFile, where the key
          reaches the engine, and --config with the same path in argv.
        '';
      }
      {
        assertion = cfg.rank < cfg.ranks;
        message = ''
          services.spark.engine.rank is ${toString cfg.rank}, but there are only
          ${toString cfg.ranks} ranks, counted from 0.
        '';
      }
      {
        assertion = byHand -> cfg.ranks == 1;
        message = ''
          services.spark.engine.ranks is ${toString cfg.ranks}, but hand-written options make a node
          that is rank 0 of 1: supervisors of several ranks must know each other. Describe all nodes
          in a cluster file, spark-appliance render cluster.yaml, and set services.spark.fleet.plan.
        '';
      }
      {
        assertion = byHand -> model.path != null;
        message = ''
          services.spark.engine.settings.model.path is not known, since argv has no --model-path.
          Set it to the directory of the checkpoint: its files are checked before each start.
        '';
      }
      {
        assertion = byHand && model.path != null -> model.shards != null;
        message = ''
          services.spark.engine.settings.model.shards is not set. Give the number of .safetensors
          files of the checkpoint, so that an incomplete copy is found before a start:
          ls ${toString model.path}/*.safetensors | wc -l
        '';
      }
      {
        assertion = byHand && model.path != null -> !inHome model.path;
        message = ''
          services.spark.engine.settings.model.path is ${toString model.path}, but the unit of the
          engine does not see homes. Move the checkpoint, for example to /models.
        '';
      }
      {
        assertion = config.services.spark.guard.enable;
        message = ''
          services.spark.engine.enable needs services.spark.guard.enable = true: the engine and the
          rest of the machine share one memory, and without the guard a full one needs a power
          cycle.
        '';
      }
    ];

    users.users.spark = {
      isSystemUser = true;
      group = "spark";
      description = "SGLang engine";
    };
    users.groups.spark = { };
    # services have LimitMEMLOCK; this is for people of the group who run RDMA tests by hand
    security.pam.loginLimits =
      map
        (type: {
          domain = "@spark";
          inherit type;
          item = "memlock";
          value = "unlimited";
        })
        [
          "soft"
          "hard"
        ];

    networking.firewall.allowedTCPPorts = lib.optional (cfg.apiPort != null) cfg.apiPort;

    # another place must be there and be writable; its own systemd makes
    systemd.tmpfiles.settings."10-spark-engine" = lib.mkIf (cfg.cacheDirectory != ownCache) {
      ${cfg.cacheDirectory}.d = {
        mode = "0750";
        user = "spark";
        group = "spark";
      };
    };
    systemd.services.spark-engine.serviceConfig = lib.mkIf (cfg.cacheDirectory != ownCache) {
      ReadWritePaths = [ cfg.cacheDirectory ];
    };

    services.spark = {
      enabledUnits = [
        "spark-supervisor.service"
        "spark-engine.service"
      ]
      ++ lib.optional (cfg.rank == 0) "spark-ready.service";
      placeholders = {
        "@python@" = python;
        # the check before a start must look into the environment that runs
        "@spark-engram@" = lib.getExe' cfg.package "spark-engram";
      };
      unitWords = {
        RANK = toString cfg.rank;
        TP = toString cfg.ranks;
        CHECKPOINT = toString model.path;
        CACHE = cfg.cacheDirectory;
      }
      // lib.optionalAttrs (cfg.apiKeyFile != null) { KEY-FILE = cfg.apiKeyFile; };
      facts = {
        inherit (cfg) argv env rank;
        role = if cfg.rank == 0 then "head" else "worker";
        config_file = cfg.configFile;
        cache_directory = cfg.cacheDirectory;
        nccl_library =
          if cfg.ncclLibrary == null then
            null
          else
            {
              path = cfg.ncclLibrary;
              sha256 = null;
            };
      };
      planFacts = cfg.settings // {
        api = (cfg.settings.api or { }) // {
          key_file = cfg.apiKeyFile;
        };
      };
    };
  };
}
