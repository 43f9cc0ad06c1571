# A small configuration: the messages of its failed assertions and what `look` makes of it.
{ pkgs }:
let
  inherit (pkgs) lib;
  isOurs = text: lib.hasInfix "services.spark" text || lib.hasInfix "hardware.spark" text;
in
{
  modules,
  look ? (_: null),
  system ? "aarch64-linux",
}:
let
  host = import (pkgs.path + "/nixos/lib/eval-config.nix") {
    system = null;
    modules = modules ++ [
      {
        nixpkgs.hostPlatform = system;
        system.stateVersion = "26.05";
        networking.hostName = "spark9";
      }
    ];
  };
in
{
  messages = map (item: item.message) (
    lib.filter (item: !item.assertion && isOurs item.message) host.config.assertions
  );
  value = look host.config;
}
