# The memory guard: kills the engine before CPU and GPU run out of their shared memory.
{
  config,
  lib,
  ...
}:
let
  cfg = config.services.spark.guard;
  inherit (lib) mkOption types;
  gib = 1073741824;
  inherit (config.services) openssh;
  # started by its socket, sshd has a unit for each connection and none that listens
  sshUnit = if openssh.startWhenNeeded then "sshd@" else "sshd";
in
{
  options.services.spark.guard = {
    enable = lib.mkEnableOption "the memory guard";

    startBytes = mkOption {
      type = types.ints.positive;
      default = 5 * gib;
      defaultText = lib.literalExpression "5 * 1024 * 1024 * 1024";
      example = 6442450944;
      description = ''
        MemAvailable in bytes below which the engine is killed while it starts. Memory can fall
        from 28 to 6 GiB within 12 seconds; below, the driver fails in a way that only a power
        cycle cures.
      '';
    };

    steadyBytes = mkOption {
      type = types.ints.positive;
      default = 3 * gib;
      defaultText = lib.literalExpression "3 * 1024 * 1024 * 1024";
      example = 2147483648;
      description = "The same once the endpoint is ready.";
    };

    interval = mkOption {
      type = types.ints.between 1 10;
      default = 1;
      example = 2;
      description = "Seconds between samples.";
    };

    protectSsh = mkOption {
      type = types.bool;
      default = true;
      example = false;
      description = ''
        Keep sshd's memory from being reclaimed and sshd from being killed, so that a machine
        without memory can still be reached.
      '';
    };
  };

  config = lib.mkIf cfg.enable {
    assertions = [
      {
        assertion = cfg.startBytes >= cfg.steadyBytes;
        message = ''
          services.spark.guard.startBytes (${toString cfg.startBytes}) is below steadyBytes
          (${toString cfg.steadyBytes}): a start needs more head-room than steady work. Raise
          startBytes or lower steadyBytes.
        '';
      }
      {
        assertion = cfg.steadyBytes >= 536870912;
        message = ''
          services.spark.guard.steadyBytes is ${toString cfg.steadyBytes}, less than 512 MiB; the
          driver fails before that. Values are bytes: 3 GiB is 3221225472.
        '';
      }
    ];

    services.spark.enabledUnits = [ "spark-guard.service" ];
    services.spark.facts.guard = {
      start_bytes = cfg.startBytes;
      steady_bytes = cfg.steadyBytes;
      inherit (cfg) interval;
    };

    systemd.services.${sshUnit}.serviceConfig = lib.mkIf (cfg.protectSsh && openssh.enable) {
      MemoryMin = "64M";
      OOMScoreAdjust = -1000;
    };
    # Protection is handed down: without a share of their parent the services have none.
    systemd.slices.system.sliceConfig.MemoryMin = "256M";
  };
}
