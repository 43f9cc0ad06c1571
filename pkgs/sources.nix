# What of the repository each package is built from: other files do not change its hash.
{ lib }:
let
  fs = lib.fileset;
  root = ../.;
  python =
    directory:
    fs.fileFilter (
      file:
      lib.any file.hasExt [
        "py"
        "yaml"
        "json"
        "typed"
        "j2"
        "toml"
        "md"
        "txt"
        "svg"
      ]
    ) directory;
in
{
  spark-appliance = fs.toSource {
    inherit root;
    fileset = fs.unions [
      ../pyproject.toml
      ../README.md
      ../LICENSE
      (python ../spark_appliance)
    ];
  };
  spark-engram = fs.toSource {
    root = ./spark-engram;
    fileset = fs.unions [
      ./spark-engram/pyproject.toml
      ./spark-engram/CMakeLists.txt
      ./spark-engram/README.md
      ./spark-engram/FORMAT.md
      ./spark-engram/LICENSE
      ./spark-engram/src
      (python ./spark-engram/python)
    ];
  };
  spark-tp-pad = fs.toSource {
    root = ./spark-tp-pad;
    fileset = fs.unions [
      ./spark-tp-pad/pyproject.toml
      ./spark-tp-pad/README.md
      (python ./spark-tp-pad/spark_tp_pad)
    ];
  };
  examples = fs.toSource {
    inherit root;
    fileset = ../examples;
  };
}
