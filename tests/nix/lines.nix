# lib/cluster-lines.nix over the files of a folder.
{ flake, folder }:
let
  inherit (flake.nixosConfigurations.appliance.pkgs) lib;
  hash = import ../../lib/cluster-lines.nix { inherit lib; };
in
builtins.mapAttrs (name: _: hash (/. + "${folder}/${name}")) (builtins.readDir (/. + folder))
