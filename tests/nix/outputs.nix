# Every output of the flake as a string: derivations by path, modules and functions by kind.
{ flake }:
let
  drvs = builtins.mapAttrs (_: builtins.mapAttrs (_: drv: drv.drvPath));
  # all nodes of all examples at once would need more memory than a machine may have
  isHost = name: builtins.substring 0 5 name == "host-";
  withoutHosts = builtins.mapAttrs (
    _: checks:
    removeAttrs checks (builtins.filter isHost (builtins.attrNames checks))
  );
in
{
  names = builtins.attrNames flake;
  packages = drvs flake.packages;
  checks = drvs (withoutHosts flake.checks);
  hostChecks = builtins.mapAttrs (
    _: checks: builtins.filter isHost (builtins.attrNames checks)
  ) flake.checks;
  devShells = drvs flake.devShells;
  formatter = builtins.mapAttrs (_: drv: drv.drvPath) flake.formatter;
  apps = builtins.mapAttrs (_: builtins.mapAttrs (_: app: "${app.type} ${app.program}")) flake.apps;
  nixosModules = builtins.mapAttrs (_: module: "${toString module._file}") flake.nixosModules;
  hosts = builtins.attrNames flake.nixosConfigurations;
  appliance = flake.nixosConfigurations.appliance.config.system.build.toplevel.drvPath;
  lib = builtins.attrNames flake.lib;
  overlay = builtins.isFunction flake.overlays.default;
  template = toString flake.templates.default.path;
}
