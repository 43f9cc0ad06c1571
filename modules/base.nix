# What the other modules share: the plan on the node and the units that run its programs.
#
# The content of the spark-* units (order, command lines, hardening) is decided once, in
# spark_appliance/render/units.py, and arrives here as data: in the plan, or, for hand-written
# options, in ./units.json, which is the same table rendered for a node that has everything.
{ packagesFor }:
{
  config,
  lib,
  pkgs,
  utils,
  ...
}:
let
  cfg = config.services.spark;
  inherit (lib) mkOption types;

  words = types.listOf types.str;

  unit = types.submodule (
    { name, ... }:
    {
      # exactly the fields of UnitPlan (spark_appliance/model/plan.py)
      options = {
        name = mkOption {
          type = types.str;
          default = name;
          description = "Name of the unit with its suffix.";
        };
        description = mkOption {
          type = types.str;
          default = name;
          description = "What it is for.";
        };
        type = mkOption {
          type = types.enum [
            "oneshot"
            "notify"
            "exec"
            "target"
            "mount"
            "system"
          ];
          description = ''
            `Type=` of a service, or `target`; `mount` and `system` units are made elsewhere and
            only named here.
          '';
        };
        after = mkOption {
          type = words;
          default = [ ];
          description = "Units it starts after.";
        };
        requires = mkOption {
          type = words;
          default = [ ];
          description = "Units without which it does not start.";
        };
        wants = mkOption {
          type = words;
          default = [ ];
          description = "Units that it starts.";
        };
        part_of = mkOption {
          type = words;
          default = [ ];
          description = "Units that stop it.";
        };
        conflicts = mkOption {
          type = words;
          default = [ ];
          description = "Units that cannot run beside it.";
        };
        wanted_by = mkOption {
          type = words;
          default = [ ];
          description = "Units that start it.";
        };
        started_by = mkOption {
          type = types.enum [
            "boot"
            "target"
            "supervisor"
          ];
          default = "target";
          description = "Who starts it.";
        };
        exec_start_pre = mkOption {
          type = types.listOf words;
          default = [ ];
          description = "Command lines run before it.";
        };
        exec_start = mkOption {
          type = words;
          default = [ ];
          description = "Command line; empty for units that are no service.";
        };
        exec_stop_post = mkOption {
          type = types.listOf words;
          default = [ ];
          description = "Command lines run after it.";
        };
        unit_settings = mkOption {
          type = types.attrsOf types.str;
          default = { };
          description = "Further settings of its [Unit] section.";
        };
        settings = mkOption {
          type = types.attrsOf (types.either types.str (types.listOf types.str));
          default = { };
          description = "Further settings of its [Service] section.";
        };
      };
    }
  );

  # A word is quoted only where it must be: the units stay readable, and equal those of DGX OS.
  escape =
    word:
    if builtins.match "[A-Za-z0-9_@:,./=+~-]+" word != null then
      word
    else
      utils.escapeSystemdExecArg word;
  replace =
    word:
    let
      parts = builtins.match "([-+]*)(@[a-z-]+@)" word;
      placeholder = lib.elemAt parts 1;
    in
    if parts == null then
      word
    else
      lib.head parts
      + (cfg.placeholders.${placeholder}
        or (throw "services.spark.units: nothing on NixOS stands for ${placeholder}: is this a DGX OS node?")
      );
  command = line: lib.concatMapStringsSep " " (word: escape (replace word)) line;

  suffix = name: lib.last (lib.splitString "." name);
  ofSuffix = wanted: lib.filterAttrs (name: _: suffix name == wanted) ownUnits;
  ownUnits = lib.filterAttrs (
    _: unit:
    !lib.elem unit.type [
      "mount"
      "system"
    ]
  ) cfg.units;
  ofType = wanted: lib.filterAttrs (_: unit: unit.type == wanted) cfg.units;
  stem = lib.mapAttrs' (name: lib.nameValuePair (lib.removeSuffix ".${suffix name}" name));

  common = unit: {
    inherit (unit)
      description
      after
      requires
      wants
      conflicts
      ;
    partOf = unit.part_of;
    wantedBy = unit.wanted_by;
    unitConfig = unit.unit_settings;
  };

  service =
    unit:
    common unit
    // {
      # Ranks live and die together: a rebuild must not restart one unit of one node, and through
      # Requires= the engine with it. A rollout stops and starts the whole cluster.
      restartIfChanged = false;
      stopIfChanged = false;
      path = [
        pkgs.iproute2
        pkgs.iputils
        config.systemd.package
      ];
      serviceConfig =
        unit.settings
        // {
          Type = unit.type;
          ExecStart = command unit.exec_start;
        }
        // lib.optionalAttrs (unit.exec_start_pre != [ ]) {
          ExecStartPre = map command unit.exec_start_pre;
        }
        // lib.optionalAttrs (unit.exec_stop_post != [ ]) {
          ExecStopPost = map command unit.exec_stop_post;
        };
    };

  handwritten = import ./units.nix {
    inherit lib;
    inherit (cfg) unitWords;
    enabled = cfg.enabledUnits ++ [ "spark.target" ];
  };
in
{
  # nixpkgs has Apache Spark under the same name; the two never meet on one machine
  disabledModules = [ "services/cluster/spark/default.nix" ];

  options.services.spark = {
    package = mkOption {
      type = types.package;
      default = cfg.packages.spark-appliance;
      defaultText = lib.literalExpression "the flake's spark-appliance";
      description = "Package with `spark-node`, the program behind the units.";
    };

    nodeName = mkOption {
      type = types.str;
      default = config.networking.hostName;
      defaultText = lib.literalExpression "config.networking.hostName";
      example = "spark1";
      description = "Name of this node in the plan.";
    };

    plan = mkOption {
      inherit (pkgs.formats.json { }) type;
      description = ''
        The plan that lies on the node as `/etc/spark/plan.json`. The fleet module takes what of
        the cluster's plan concerns this node; without it a plan of this one node is made of the
        other options.
      '';
      defaultText = lib.literalMD "a plan with this one node, rank 0 of 1";
    };

    units = mkOption {
      type = types.attrsOf unit;
      default = { };
      description = ''
        The units of this node with the fields of the plan. Change a setting of a unit with the
        usual `systemd.services` options.
      '';
    };

    packages = mkOption {
      type = types.lazyAttrsOf types.raw;
      internal = true;
      readOnly = true;
      default = packagesFor pkgs;
      description = "This flake's packages for the node's package set.";
    };
    placeholders = mkOption {
      type = types.lazyAttrsOf types.str;
      internal = true;
      description = "What stands for the placeholders in command lines.";
    };
    enabledUnits = mkOption {
      type = types.listOf types.str;
      internal = true;
      default = [ ];
      description = "Units that hand-written options ask for.";
    };
    unitWords = mkOption {
      type = types.attrsOf (types.either types.str (types.listOf types.str));
      internal = true;
      default = { };
      description = "What stands for the words in capitals of units.json.";
    };
    byHand = mkOption {
      type = types.bool;
      internal = true;
      default = true;
      description = "Whether the plan is made of hand-written options.";
    };
    facts = mkOption {
      type = types.submodule { freeformType = types.attrsOf types.anything; };
      internal = true;
      default = { };
      description = "This node's entry of a plan made of hand-written options.";
    };
    planFacts = mkOption {
      type = types.submodule { freeformType = types.attrsOf types.anything; };
      internal = true;
      default = { };
      description = "The rest of that plan.";
    };
  };

  config = lib.mkIf (cfg.enabledUnits != [ ]) {
    services.spark = {
      plan = lib.mkDefault (
        {
          version = 1;
          name = cfg.nodeName;
          start_order = [ [ cfg.nodeName ] ];
          topology.cables = [ ];
          # what the enabled modules do not have, in the words of the plan
          model = null;
          router = null;
        }
        // cfg.planFacts
        // {
          nodes = [
            (
              {
                name = cfg.nodeName;
                rank = 0;
                role = "head";
                system = "nixos";
                # nobody else knows this plan
                address = "127.0.0.1";
                lan_interface = null;
                env = { };
                rails = [ ];
                engram = null;
                weights = {
                  mode = "local";
                  export = null;
                  mount = null;
                };
                units = lib.attrValues handwritten;
              }
              // cfg.facts
            )
          ];
        }
      );
      units = lib.mkDefault handwritten;
      placeholders."@spark-node@" = lib.getExe' cfg.package "spark-node";
      unitWords.NODE = cfg.nodeName;
    };

    environment.etc."spark/plan.json".source =
      (pkgs.formats.json { }).generate "spark-plan.json" cfg.plan;
    environment.systemPackages = [ cfg.package ];

    systemd.services =
      stem (lib.mapAttrs (_: service) (ofSuffix "service"))
      // stem (lib.mapAttrs (_: unit: { inherit (unit) after; }) (ofType "system"));
    systemd.targets = stem (lib.mapAttrs (_: common) (ofSuffix "target"));
  };
}
