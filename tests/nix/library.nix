# What the flake's functions and its overlay give; `refused` names the call that must fail.
{
  flake,
  lock,
  refused ? null,
}:
let
  inherit (flake.nixosConfigurations.appliance) pkgs;
  overlaid = import pkgs.path {
    system = "x86_64-linux";
    config.allowUnfree = true;
    overlays = [ flake.overlays.default ];
  };
  own = flake.packages.x86_64-linux;
in
if refused == "fleet" then
  builtins.attrNames (
    flake.lib.mkFleet {
      lock = /. + lock;
      nodeModules = {
        spark2 = { };
        spark8 = { };
        spark9 = { };
      };
    }
  )
else if refused == "plan" then
  (flake.lib.readPlan (/. + lock)).version
else
  builtins.mapAttrs (name: package: {
    overlay = overlaid.${name}.drvPath;
    package = package.drvPath;
  }) { inherit (own) spark-appliance spark-engram spark-tp-pad; }
