# Every output of the flake as a string: derivations by path, modules and functions by kind.
{ flake }:
let
  drvs = builtins.mapAttrs (_: builtins.mapAttrs (_: drv: drv.drvPath));
in
{
  names = builtins.attrNames flake;
  packages = drvs flake.packages;
  checks = drvs flake.checks;
  devShells = drvs flake.devShells;
  formatter = builtins.mapAttrs (_: drv: drv.drvPath) flake.formatter;
  apps = builtins.mapAttrs (_: builtins.mapAttrs (_: app: "${app.type} ${app.program}")) flake.apps;
  nixosModules = builtins.mapAttrs (_: module: "${toString module._file}") flake.nixosModules;
  hosts = builtins.mapAttrs (
    _: host: host.config.system.build.toplevel.drvPath
  ) flake.nixosConfigurations;
  lib = builtins.attrNames flake.lib;
  overlay = builtins.isFunction flake.overlays.default;
  template = toString flake.templates.default.path;
}
