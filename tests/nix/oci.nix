# The container images as a machine of each kind would build them, as plain values.
{ flake }:
let
  file = item: {
    inherit (item) file name outputHash;
    path = builtins.unsafeDiscardStringContext item.outPath;
  };
  describe = image: {
    drv = builtins.unsafeDiscardStringContext image.drvPath;
    command = builtins.unsafeDiscardStringContext image.drvAttrs.buildCommand;
    debs = map (deb: file deb // { url = builtins.head deb.drvAttrs.urls; }) image.debs;
    wheels = map file image.wheels;
    compilers = map file image.compilers;
  };
in
builtins.mapAttrs (_: own: {
  full = describe own.oci;
  tools = describe own.oci-tools;
  smoke = describe own.oci-smoke;
  given = describe (own.oci-tools.override { engramLibrary = "/given/libspark_engram.so"; });
}) { inherit (flake.packages) aarch64-linux x86_64-linux; }
