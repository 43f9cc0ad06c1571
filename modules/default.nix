# The modules by name, closed over what they need from the flake: users import them as they are.
{
  packagesFor,
  planVersion,
  nodePlan,
  nixos-dgx-spark,
}:
let
  # A module that comes in twice, by itself and through another, counts once.
  module = name: imports: {
    key = "spark-appliance#${name}";
    _file = ./. + "/${name}.nix";
    inherit imports;
  };
  base = module "base" [ (import ./base.nix { inherit packagesFor; }) ];
in
rec {
  default = module "default" [
    hardware
    fleet
  ];
  hardware = module "hardware" [ (import ./hardware.nix { inherit nixos-dgx-spark; }) ];
  fabric = module "fabric" [
    base
    ./fabric.nix
  ];
  weights = module "weights" [
    base
    ./weights.nix
  ];
  engram = module "engram" [
    base
    ./engram.nix
  ];
  guard = module "guard" [
    base
    ./guard.nix
  ];
  engine = module "engine" [
    base
    guard
    ./engine.nix
  ];
  router = module "router" [
    base
    ./router.nix
  ];
  fleet = module "fleet" [
    fabric
    weights
    engram
    engine
    router
    (import ./fleet.nix { inherit planVersion nodePlan; })
  ];
  # apart from default: it brings nixpkgs' image.repart options with it
  image = module "image" [
    base
    ./image.nix
  ];
}
