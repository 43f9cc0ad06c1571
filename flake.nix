# Table of contents: what is here is made in lib/, modules/, pkgs/ and checks/.
{
  description = "DGX Spark boxes as one endpoint for DeepSeek-V4.1-Flash";

  inputs = {
    nixpkgs.url = "github:NixOS/nixpkgs/nixos-26.05";
    # Used by path, not as flakes: their own inputs stay out of every user's lock.
    poetry2nix = {
      url = "github:nix-community/poetry2nix";
      flake = false;
    };
    nixos-dgx-spark = {
      url = "github:graham33/nixos-dgx-spark";
      flake = false;
    };
  };

  outputs =
    inputs:
    let
      spark = import ./lib {
        inherit (inputs) nixpkgs poetry2nix nixos-dgx-spark;
      };
      perSystem = spark.forSystems (import ./checks/outputs.nix { inherit spark; });
    in
    {
      lib = {
        inherit (spark)
          mkAppliance
          mkFleet
          nodePlan
          readPlan
          planVersion
          ;
      };

      overlays.default = spark.overlay;

      nixosModules = spark.modules;

      nixosConfigurations = spark.exampleHosts // {
        inherit (spark) appliance;
      };

      templates.default = {
        path = ./templates/default;
        description = "A cluster file, its plan and a flake for one cluster";
      };

      inherit (perSystem)
        packages
        apps
        checks
        devShells
        formatter
        ;
    };
}
