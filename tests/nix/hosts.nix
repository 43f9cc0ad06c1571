# All NixOS nodes of a plan, each as the values of host.nix and what the plan adds to the machine.
{ flake, lock }:
builtins.mapAttrs
  (
    _: host:
    import ./host.nix host
    // {
      added = import ./added.nix {
        inherit host;
        base = flake.nixosConfigurations.appliance;
      };
    }
  )
  (
    flake.lib.mkFleet {
      lock = /. + lock;
      modules = [ { system.stateVersion = "26.05"; } ];
    }
  )
