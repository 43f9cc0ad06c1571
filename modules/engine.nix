# One rank of the engine, its supervisor and, on the head, the readiness probe.
{
  config,
  lib,
  pkgs,
  ...
}:
let
  cfg = config.services.spark.engine;
  inherit (lib) mkOption types;

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
      description = "Rank of this node; 0 is the head.";
    };

    ranks = mkOption {
      type = types.ints.positive;
      default = 1;
      example = 3;
      description = "Number of ranks.";
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
      default = "/var/cache/spark-engine";
      example = "/var/cache/spark-engine";
      description = "Compiled kernels; kept between starts.";
    };

    ncclLibrary = mkOption {
      type = types.nullOr types.path;
      default = null;
      example = "/opt/nccl/libnccl.so.2";
      description = ''
        A libnccl.so.2 to use instead of the wheel's, the same file on every rank. A ring of four
        needs one with support for it.
      '';
    };

    apiPort = mkOption {
      type = types.nullOr types.port;
      default = null;
      example = 8888;
      description = "Port of the API to open in the firewall of the head, or null.";
    };

    settings = mkOption {
      type = types.submodule { freeformType = (pkgs.formats.json { }).type; };
      default = { };
      description = ''
        Further parts of a hand-written plan that the engine's programs read: `model`, `health`,
        `ports`, `api`, `restart`. The fleet module does not use it.
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
        TP = toString cfg.ranks;
      }
      // lib.optionalAttrs (cfg.apiKeyFile != null) { KEY-FILE = cfg.apiKeyFile; };
      facts = {
        inherit (cfg) argv env rank;
        role = if cfg.rank == 0 then "head" else "worker";
        config_file = cfg.configFile;
        cache_directory = cfg.cacheDirectory;
        nccl_library = if cfg.ncclLibrary == null then null else {
          path = cfg.ncclLibrary;
          sha256 = null;
        };
      };
      planFacts = cfg.settings;
    };
  };
}
