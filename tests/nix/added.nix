# What a plan adds to a machine: everything in `host` that `base`, the same machine without a plan,
# does not have or has otherwise.
{ base, host }:
let
  old = base.config;
  new = host.config;
  inherit (host.pkgs) lib;

  # attributes that are new or differ, each as { before, after }
  changes =
    before: after:
    lib.mapAttrs (name: value: {
      before = before.${name} or null;
      after = value;
    }) (lib.filterAttrs (name: value: !(before ? ${name}) || before.${name} != value) after);
  more = before: after: lib.filter (item: !lib.elem item before) after;

  enabled = config: lib.filterAttrs (_: unit: unit.enable) config.systemd.units;
  units =
    config: lib.mapAttrs (_: unit: { inherit (unit) text wantedBy requiredBy; }) (enabled config);
  etc =
    config:
    lib.mapAttrs (_: file: "${file.source}") (
      lib.filterAttrs (_: file: file.enable) config.environment.etc
    );
  sysctl =
    config:
    lib.mapAttrs (_: toString) (lib.filterAttrs (_: value: value != null) config.boot.kernel.sysctl);
  names = packages: map (package: package.pname or package.name) packages;
in
{
  units = changes (units old) (units new);
  etc = lib.attrNames (changes (etc old) (etc new));
  sysctl = lib.mapAttrs (_: change: change.after) (changes (sysctl old) (sysctl new));
  gone = {
    units = more (lib.attrNames (units new)) (lib.attrNames (units old));
    etc = more (lib.attrNames (etc new)) (lib.attrNames (etc old));
    kernelModules = more new.boot.kernelModules old.boot.kernelModules;
    kernelParams = more new.boot.kernelParams old.boot.kernelParams;
  };

  kernelModules = more old.boot.kernelModules new.boot.kernelModules;
  kernelParams = more old.boot.kernelParams new.boot.kernelParams;
  blacklist = more old.boot.blacklistedKernelModules new.boot.blacklistedKernelModules;
  modprobe = lib.removePrefix old.boot.extraModprobeConfig new.boot.extraModprobeConfig;
  fileSystems = more (lib.attrNames old.fileSystems) (lib.attrNames new.fileSystems);
  tmpfiles = {
    rules = more old.systemd.tmpfiles.rules new.systemd.tmpfiles.rules;
    settings = changes old.systemd.tmpfiles.settings new.systemd.tmpfiles.settings;
  };
  udev = {
    rules = lib.splitString "\n" (
      lib.removePrefix old.services.udev.extraRules new.services.udev.extraRules
    );
    packages = more (names old.services.udev.packages) (names new.services.udev.packages);
  };
  users = more (lib.attrNames old.users.users) (lib.attrNames new.users.users);
  groups = more (lib.attrNames old.users.groups) (lib.attrNames new.users.groups);
  loginLimits = more old.security.pam.loginLimits new.security.pam.loginLimits;
  packages = more (names old.environment.systemPackages) (names new.environment.systemPackages);

  nftables = new.networking.nftables.enable;
  ports = {
    tcp = more old.networking.firewall.allowedTCPPorts new.networking.firewall.allowedTCPPorts;
    udp = more old.networking.firewall.allowedUDPPorts new.networking.firewall.allowedUDPPorts;
  };
  inherit (new.networking.firewall) trustedInterfaces extraInputRules;
  unmanaged = new.networking.networkmanager.unmanaged;
}
