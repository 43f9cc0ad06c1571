# What `format` and `lint` look at, as paths of the repository.
{ flake }:
let
  inherit (flake.nixosConfigurations.appliance.pkgs) lib;
  root = toString ../..;
in
map (path: lib.removePrefix "${root}/" (toString path)) (
  lib.fileset.toList (import ../../checks/files.nix { inherit lib; })
)
