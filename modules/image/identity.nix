# The first boot of an image that all nodes share: which node of the plan is this?
{
  config,
  lib,
  ...
}:
let
  cfg = config.services.spark.image;
  inherit (lib) mkOption types;
in
{
  options.services.spark.image = {
    plan = mkOption {
      type = types.nullOr types.path;
      default = null;
      example = lib.literalExpression "./cluster.lock.json";
      description = ''
        Plan to put on the image's ESP as `spark/cluster.lock.json`, so that a node finds itself
        in it on the first boot. It can also be put there afterwards.
      '';
    };

    identity.enable = mkOption {
      type = types.bool;
      default = !(config.services.spark.fleet.enable or false);
      defaultText = lib.literalMD "true for a system that is not yet a node of a plan";
      example = false;
      description = ''
        Take host name and LAN address from the plan on the ESP: the node is the one that the
        file `spark/node` names, else the one whose `serial` or `mac` in the cluster file is this
        machine's, else the only one. A node that was rolled out has its name from its own
        configuration.
      '';
    };
  };

  config = lib.mkIf cfg.enable (
    lib.mkMerge [
      (lib.mkIf (cfg.plan != null) {
        services.spark.image.espFiles."spark/cluster.lock.json" = cfg.plan;
      })
      (lib.mkIf cfg.identity.enable {
        networking.useNetworkd = lib.mkDefault true;

        systemd.services.spark-identity = {
          description = "Find out which node of the plan this is";
          wantedBy = [ "multi-user.target" ];
          # networkd then reads the address again; it may start without waiting for this
          after = [ "systemd-networkd.service" ];
          unitConfig.RequiresMountsFor = "/boot";
          serviceConfig = {
            Type = "oneshot";
            RemainAfterExit = true;
            # somebody in front of a screen must see what is missing
            StandardOutput = "journal+console";
            StandardError = "journal+console";
            ExecStart = "${lib.getExe' config.services.spark.package "spark-node"} identity --esp /boot";
          };
        };
      })
    ]
  );
}
