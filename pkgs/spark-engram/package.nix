# Packer and io_uring row store of the Engram tables; also the plugin that SGLang loads.
{
  lib,
  src,
  buildPythonPackage,
  scikit-build-core,
  cmake,
  ninja,
  liburing,
  numpy,
}:
let
  inherit (lib.importTOML ./pyproject.toml) project;
in
buildPythonPackage {
  pname = project.name;
  inherit (project) version;
  pyproject = true;

  inherit src;

  build-system = [ scikit-build-core ];
  nativeBuildInputs = [
    cmake
    ninja
  ];
  # scikit-build-core calls them itself
  dontUseCmakeConfigure = true;
  dontUseNinjaBuild = true;
  dontUseNinjaCheck = true;
  dontUseNinjaInstall = true;
  buildInputs = [ liburing ];
  dependencies = [ numpy ];

  # without liburing the build goes on with slow reads; here that is an error
  postInstall = ''
    lib=$(find "$out" -name 'libspark_engram*' -type f | head -n 1)
    grep -q io_uring,pread "$lib" || { echo "$lib was built without io_uring" >&2; exit 1; }
  '';

  pythonImportsCheck = [ "spark_engram" ];

  meta = {
    inherit (project) description;
    license = lib.licenses.asl20;
    mainProgram = "spark-engram";
    platforms = lib.platforms.linux;
  };
}
