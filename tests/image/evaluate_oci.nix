# What test_image_nix.py asks of pkgs/oci-image. Evaluated for aarch64-linux on any machine.
{ nixpkgs, poetry2nix }:
let
  pkgs = import nixpkgs {
    system = "aarch64-linux";
    # The tree at hand cannot evaluate pandoc, which only writes rdma-core's manual.
    overlays = [ (final: _: { pandoc = final.hello; }) ];
  };
  inherit (pkgs) lib;
  sglangEnv = pkgs.callPackage ../../pkgs/sglang-env {
    poetry2nix = import poetry2nix { inherit pkgs; };
  };
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
