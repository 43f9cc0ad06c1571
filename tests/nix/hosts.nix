# All NixOS nodes of a plan, each as the values of host.nix.
{ flake, lock }:
builtins.mapAttrs (_: import ./host.nix) (
  flake.lib.mkFleet {
    lock = /. + lock;
    modules = [ { system.stateVersion = "26.05"; } ];
  }
)
