# What the flake shows for one system.
{ spark }:
{ pkgs, system }:
let
  inherit (spark) lib;
  inherit (pkgs.stdenv.hostPlatform) isLinux;
  own = spark.packagesFor pkgs;
  isSpark = system == "aarch64-linux";
  linuxOnly = lib.optionalAttrs isLinux;
  sparkOnly = lib.optionalAttrs isSpark;

  options-doc = pkgs.callPackage ../pkgs/options-doc/package.nix { inherit spark; };
  format = import ./format.nix { inherit pkgs; };
in
{
  packages = {
    inherit (own) spark-appliance;
    inherit options-doc;
    default = own.spark-appliance;
  }
  // linuxOnly {
    inherit (own)
      oci
      oci-smoke
      oci-tools
      spark-engram
      spark-tp-pad
      ;
  }
  // sparkOnly {
    inherit (own) sglang-env sglang-router spark-engine;
    sglang-env-sbom = own.sglang-env.sbom;
    image = spark.appliance.config.system.build.image;
  };

  apps =
    let
      app = program: description: {
        type = "app";
        inherit program;
        meta = { inherit description; };
      };
      cli = app (lib.getExe own.spark-appliance) "Plan, check and run a cluster of DGX Spark boxes";
    in
    {
      default = cli;
      spark-appliance = cli;
    }
    // linuxOnly {
      spark-engram = app (lib.getExe own.spark-engram) "Pack and verify Engram tables";
    };

  checks = import ./default.nix {
    inherit
      spark
      pkgs
      own
      options-doc
      format
      ;
  };

  devShells.default = pkgs.mkShell {
    packages = [
      (pkgs.python3.withPackages (ps: [
        ps.click
        ps.pydantic
        ps.pyyaml
        ps.rich
        ps.hypothesis
        ps.mypy
        ps.pytest
        ps.types-pyyaml
      ]))
      pkgs.ruff
      pkgs.deadnix
      pkgs.statix
    ]
    ++ lib.optionals isLinux [
      pkgs.cmake
      pkgs.ninja
      pkgs.liburing
    ];
  };

  inherit (format) formatter;
}
