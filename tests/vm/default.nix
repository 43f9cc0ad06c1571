# NixOS VM tests. The scripts in ./scripts use only what the Debian harness offers as well.
{
  lib,
  pkgs,
  own,
  spark,
}:
let
  cluster = import ./cluster.nix { inherit lib own spark; };

  test = name: nodes: {
    name = "vm-${name}";
    value = pkgs.testers.runNixOSTest {
      inherit name nodes;
      # scripts may take the very commands that the command line runs on nodes
      extraPythonPackages = python: [ (python.toPythonModule own.spark-appliance) ];
      testScript =
        builtins.readFile ./nixos_helpers.py + builtins.readFile (./scripts + "/${name}.py");
    };
  };
in
lib.listToAttrs [
  (test "fabric" cluster.nodes)
  (test "weights" (cluster.nodes // { inherit (cluster) stranger; }))
  (test "engine" cluster.nodes)
  (test "rollout" (lib.mapAttrs (_: cluster.withVersions) cluster.nodes))
  (test "engram" { machine = import ./engram.nix { inherit own spark; }; })
]
