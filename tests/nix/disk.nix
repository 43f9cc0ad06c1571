# The partitions of the first boot, of sizes that a test can make.
{ flake }:
let
  inherit (flake.nixosConfigurations.appliance) pkgs;

  smallDisk = import (pkgs.path + "/nixos/lib/eval-config.nix") {
    system = null;
    modules = [
      flake.nixosModules.image
      {
        nixpkgs.hostPlatform = "aarch64-linux";
        system.stateVersion = "26.05";
        services.spark.image = {
          enable = true;
          espSize = "96M";
          rootMinSize = "160M";
          engram = {
            enable = true;
            minSize = "128M";
            maxSize = "256M";
          };
        };
      }
    ];
  };
in
smallDisk.config.systemd.repart.partitions
