# sglang-router on the head: one address for several clusters. It has a life of its own.
{
  config,
  lib,
  ...
}:
let
  cfg = config.services.spark.router;
  inherit (lib) mkOption types;

  argv = import ./argv.nix { inherit lib; };
  # as sglang-router 0.3.2 (router_args.py) has it
  host = argv.option cfg.argv "--host" "0.0.0.0";
  port = argv.option cfg.argv "--port" "30000";
in
{
  options.services.spark.router = {
    enable = lib.mkEnableOption "sglang-router in front of several clusters";

    package = mkOption {
      type = types.package;
      default = config.services.spark.packages.sglang-router;
      defaultText = lib.literalExpression "the flake's sglang-router";
      description = "Environment with `bin/python3` that can import sglang_router.";
    };

    python = mkOption {
      type = types.str;
      default = lib.getExe' cfg.package "python3";
      defaultText = lib.literalExpression "\"\${package}/bin/python3\"";
      example = "/opt/router/bin/python3";
      description = "Interpreter that runs the router.";
    };

    version = mkOption {
      type = types.nullOr types.str;
      default = null;
      example = "0.3.2";
      description = ''
        Version that `argv` was written for, or null for any. Options of the router come and go.
      '';
    };

    argv = mkOption {
      type = types.listOf types.str;
      default = [ ];
      example = [
        "--host"
        "0.0.0.0"
        "--port"
        "8000"
        "--worker-urls"
        "http://192.168.1.11:8888"
        "http://192.168.1.21:8888"
      ];
      description = "Arguments of the router. Never a key: the unit hands it over as a credential.";
    };

    apiKeyFile = mkOption {
      type = types.nullOr types.str;
      default = null;
      example = "/etc/spark/api-key";
      description = "File with the key of the router and of all clusters behind it.";
    };

    port = mkOption {
      type = types.nullOr types.port;
      default = null;
      example = 8000;
      description = "Port of the router to open in the firewall, or null.";
    };
  };

  config = lib.mkIf cfg.enable {
    assertions = [
      {
        assertion = cfg.argv != [ ];
        message = ''
          services.spark.router.argv is empty: the router would have no clusters. Take it from a
          plan (router: in the cluster file) or write --worker-urls and --port.
        '';
      }
      {
        assertion = !lib.any (lib.hasPrefix "--api-key") cfg.argv;
        message = ''
          services.spark.router.argv has --api-key: a command line can be read by everyone on the
          node. Put the key into a file and set services.spark.router.apiKeyFile.
        '';
      }
      {
        assertion = cfg.apiKeyFile == null || !lib.hasPrefix builtins.storeDir cfg.apiKeyFile;
        message = ''
          services.spark.router.apiKeyFile is in the Nix store, which everyone can read. Write the
          path as a string outside the store, for example "/etc/spark/api-key".
        '';
      }
      {
        assertion = cfg.version == null || cfg.version == cfg.package.version or cfg.version;
        message = ''
          services.spark.router.package is sglang-router ${cfg.package.version or ""}, its arguments
          were written for ${toString cfg.version}. Take this flake's package, or render the plan
          with the release that has this router: spark-appliance render cluster.yaml
        '';
      }
    ];

    networking.firewall.allowedTCPPorts = lib.optional (cfg.port != null) cfg.port;

    services.spark = {
      enabledUnits = [ "spark-router.service" ];
      placeholders."@router-python@" = cfg.python;
      unitWords = lib.optionalAttrs (cfg.apiKeyFile != null) { KEY-FILE = cfg.apiKeyFile; };
      planFacts.router = {
        inherit (cfg) argv port version;
        readiness_url = "http://${argv.local host}:${port}/readiness";
        replicas = map (url: {
          name = url;
          inherit url;
        }) (argv.values cfg.argv "--worker-urls");
      };
    };
  };
}
