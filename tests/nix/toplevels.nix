# Derivations of the systems of a plan's NixOS nodes: { NODE = drvPath; }.
{ flake, lock }:
builtins.mapAttrs (_: host: host.config.system.build.toplevel.drvPath) (
  flake.lib.mkFleet {
    lock = /. + lock;
    modules = [ { system.stateVersion = "26.05"; } ];
  }
)
