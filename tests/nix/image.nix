# The container images as a machine of each kind would build them, as plain values.
{ flake }:
let
  describe = image: {
    drv = builtins.unsafeDiscardStringContext image.drvPath;
    command = builtins.unsafeDiscardStringContext image.drvAttrs.buildCommand;
    debs = map (deb: {
      inherit (deb) file name outputHash;
      url = builtins.head deb.drvAttrs.urls;
    }) image.debs;
    wheels = map (wheel: { inherit (wheel) file name outputHash; }) image.wheels;
    compilers = map (wheel: { inherit (wheel) file name outputHash; }) image.compilers;
  };
in
builtins.mapAttrs (_: own: {
  full = describe own.oci;
  tools = describe own.oci-tools;
  smoke = describe own.oci-smoke;
  given = describe (own.oci-tools.override { engramLibrary = "/given/libspark_engram.so"; });
}) { inherit (flake.packages) aarch64-linux x86_64-linux; }
