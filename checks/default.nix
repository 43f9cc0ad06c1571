# `nix flake check` for one system.
{
  spark,
  pkgs,
  own,
  options-doc,
  format,
}:
let
  inherit (spark) lib;
  inherit (pkgs.stdenv.hostPlatform) isLinux system;
  sources = import ../pkgs/sources.nix { inherit lib; };

  repository = lib.fileset.toSource {
    root = ../.;
    fileset = import ./files.nix { inherit lib; };
  };

  # an example's committed plan is what its cluster file renders to
  rendered = name: {
    name = "render-${name}";
    value = pkgs.runCommand "render-${name}" { nativeBuildInputs = [ own.spark-appliance ]; } ''
      cp -r --no-preserve=mode ${sources.examples}/examples/${name} example
      spark-appliance render --check example/cluster.yaml
      if [ -e example/cluster.nixos.lock.json ]; then
        spark-appliance render --check --system nixos example/cluster.yaml
      fi
      touch $out
    '';
  };

  lint =
    pkgs.runCommand "lint"
      {
        nativeBuildInputs = [
          pkgs.deadnix
          pkgs.statix
        ];
      }
      ''
        cd ${repository}
        deadnix --fail --no-lambda-pattern-names .
        statix check .
        touch $out
      '';

  # every NixOS node of the examples, as far as its derivation
  hosts = lib.mapAttrs' (name: host: {
    name = "host-${name}";
    value = pkgs.writeText "host-${name}" (
      builtins.unsafeDiscardStringContext host.config.system.build.toplevel.drvPath
    );
  }) spark.exampleHosts;

  vm = import ../tests/vm {
    inherit
      lib
      pkgs
      own
      spark
      ;
  };
in
lib.listToAttrs (map rendered spark.exampleDirectories)
// {
  inherit options-doc lint;
  inherit (own) spark-appliance;
  format = format.check repository;
}
// lib.optionalAttrs isLinux ({ inherit (own) spark-engram spark-tp-pad; } // vm)
// lib.optionalAttrs (system == "aarch64-linux") hosts
