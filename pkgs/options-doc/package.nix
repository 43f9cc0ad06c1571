# Reference of all options, made of the modules themselves.
{
  lib,
  runCommand,
  nixosOptionsDoc,
  spark,
}:
let
  inherit
    (spark.lib.nixosSystem {
      modules = [
        spark.modules.default
        spark.modules.image
        { nixpkgs.hostPlatform = "aarch64-linux"; }
      ];
    })
    options
    ;

  root = toString ../..;
  doc = nixosOptionsDoc {
    options = {
      services.spark = options.services.spark;
      hardware.spark = options.hardware.spark;
    };
    # paths in the repository instead of paths in the store
    transformOptions =
      option:
      option
      // {
        declarations = map (declaration: {
          name = lib.removePrefix "/" (lib.removePrefix root (toString declaration));
        }) option.declarations;
      };
    warningsAreErrors = true;
  };
in
runCommand "options-doc" { passthru = { inherit (doc) optionsNix; }; } ''
  mkdir -p $out
  cp ${doc.optionsCommonMark} $out/options.md
  cp ${doc.optionsJSON}/share/doc/nixos/options.json $out/options.json
''
