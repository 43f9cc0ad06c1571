# The plugin that pads tensor-parallel sizes which do not divide.
{
  lib,
  src,
  buildPythonPackage,
  hatchling,
}:
let
  inherit (lib.importTOML ./pyproject.toml) project;
in
buildPythonPackage {
  pname = project.name;
  inherit (project) version;
  pyproject = true;

  inherit src;

  build-system = [ hatchling ];

  # the plugin itself imports torch and sglang, which come with the engine
  pythonImportsCheck = [ "spark_tp_pad" ];

  meta = {
    inherit (project) description;
    license = lib.licenses.asl20;
  };
}
