# What the tests look at in the systems that disk images are made of.
{ flake }:
let
  inherit (flake.nixosConfigurations.appliance) pkgs;
  inherit (pkgs) lib;

  look =
    host:
    let
      c = host.config;
      image = c.services.spark.image;
    in
    {
      passwords = lib.mapAttrs (_: user: {
        inherit (user)
          password
          hashedPassword
          hashedPasswordFile
          initialPassword
          initialHashedPassword
          ;
      }) c.users.users;
      autologin = c.services.getty.autologinUser;
      sshd = {
        inherit (c.services.openssh) enable;
        inherit (c.services.openssh.settings)
          PasswordAuthentication
          KbdInteractiveAuthentication
          PermitRootLogin
          ;
      };
      espFiles = lib.mapAttrs (_: toString) (
        lib.filterAttrs (name: _: lib.hasPrefix "spark/" name) image.espFiles
      );
      identity = c.systemd.units."spark-identity.service".text or null;
      engram = image.engram.enable;
      hostName = c.networking.hostName;
      checks = map (check: check.name) c.system.checks;
      image = c.system.build.image.drvPath;
      bootLoader = c.boot.loader.systemd-boot.extraInstallCommands;
      esp = c.image.repart.partitions."10-esp".repartConfig;
      mkfs = c.image.repart.mkfsOptions;
      networkd = c.networking.useNetworkd;
      lan = c.systemd.network.units."45-spark-lan.network".text or null;
    };
  stateVersion.system.stateVersion = "26.05";
in
lib.mapAttrs (_: look) {
  inherit (flake.nixosConfigurations) appliance;
  node = flake.nixosConfigurations.triangle-spark1;
  cluster = flake.lib.mkAppliance {
    lock = ../../examples/three-spark-triangle/cluster.lock.json;
    modules = [ stateVersion ];
  };
}
