# What the tests look at in a NixOS configuration, as plain values.
host:
let
  c = host.config;
  inherit (host.pkgs) lib;
  startsWith = prefixes: name: lib.any (prefix: lib.hasPrefix prefix name) prefixes;
  spark = startsWith [
    "spark"
    "models-"
    "var-lib-spark"
  ];
  ofRails = startsWith [
    "net.ipv4.conf.en"
    "vm."
  ];
  unitNames = lib.filter spark (lib.attrNames c.systemd.units) ++ [ "nfs-server.service" ];
in
{
  toplevel = c.system.build.toplevel.drvPath;
  units = lib.genAttrs (lib.filter (name: c.systemd.units ? ${name}) unitNames) (name: {
    inherit (c.systemd.units.${name}) text wantedBy requiredBy;
    drv = c.systemd.units.${name}.unit.drvPath;
  });
  network = lib.mapAttrs (_: unit: unit.text) (
    lib.filterAttrs (name: _: lib.hasPrefix "10-spark" name) c.systemd.network.units
  );
  links = lib.mapAttrs (_: link: { inherit (link) matchConfig linkConfig; }) (
    lib.filterAttrs (name: _: lib.hasPrefix "10-spark" name) c.systemd.network.links
  );
  inherit (c.boot) kernelModules kernelParams;
  initrdModules = c.boot.initrd.kernelModules ++ c.boot.initrd.availableKernelModules;
  sysctl = lib.mapAttrs (_: toString) (
    lib.filterAttrs (name: value: value != null && ofRails name) c.boot.kernel.sysctl
  );
  firewall = {
    inherit (c.networking.firewall)
      enable
      trustedInterfaces
      allowedTCPPorts
      extraInputRules
      checkReversePath
      ;
  };
  exports = c.services.nfs.server.exports;
  nfs = c.services.nfs.settings;
  nfsThreads = c.services.nfs.server.nproc;
  nfsServer = c.services.nfs.server.enable;
  plan = builtins.fromJSON (builtins.toJSON c.services.spark.plan);
  driver = c.hardware.nvidia.package.version;
  openModules = c.hardware.nvidia.open;
  kernel = c.boot.kernelPackages.kernel.version;
  substituters = c.nix.settings.extra-substituters or [ ];
  podman = c.virtualisation.podman.enable;
  dashboard = c.services.dgx-dashboard.enable;
  watchdog = c.systemd.settings.Manager;
  sshd = { inherit (c.systemd.services.sshd.serviceConfig) MemoryMin OOMScoreAdjust; };
  defaultUnit = c.systemd.defaultUnit;
  user = { inherit (c.users.users.spark) isSystemUser group; };
  swap = c.swapDevices;
  udev = c.services.udev.extraRules;
  engine = c.services.spark.engine.package.drvPath;
  image = c.system.build.image.drvPath;
  inherit (c) warnings;
  hostName = c.networking.hostName;
}
