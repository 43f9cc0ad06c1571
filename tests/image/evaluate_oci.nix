# What test_image_nix.py asks of pkgs/oci-image. Evaluated for aarch64-linux on any machine.
{ flake }:
let
  inherit (flake.nixosConfigurations.appliance) pkgs;
  inherit (pkgs) lib;
  sglangEnv = flake.packages.aarch64-linux.sglang-env;
  describe =
    profile:
    let
      image = pkgs.callPackage ../../pkgs/oci-image { inherit sglangEnv profile; };
    in
    {
      drv = builtins.unsafeDiscardStringContext image.drvPath;
      command = builtins.unsafeDiscardStringContext image.drvAttrs.buildCommand;
      debs = map (deb: {
        inherit (deb) file outputHash;
        url = builtins.head deb.drvAttrs.urls;
      }) image.debs;
      wheels = map (wheel: { inherit (wheel) file outputHash; }) image.wheels;
    };
in
lib.genAttrs [ "full" "smoke" ] describe
