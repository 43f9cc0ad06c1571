# sglang-router from its wheel, with what it imports from the engine's locked packages.
# aarch64-linux only, as the engine. The version is that of spark_appliance/render/router.py.
{
  lib,
  stdenv,
  fetchPypi,
  autoPatchelfHook,
  sglang-env,
}:
let
  inherit (sglang-env) python packages;
  version = "0.3.2";
  router = python.pkgs.buildPythonPackage {
    pname = "sglang-router";
    inherit version;
    format = "wheel";
    src = fetchPypi {
      pname = "sglang_router";
      inherit version;
      format = "wheel";
      dist = "cp38";
      python = "cp38";
      abi = "abi3";
      platform = "manylinux_2_17_aarch64.manylinux2014_aarch64";
      hash = "sha256-QKEPOBe4A3fCzrMmtiXyS9BuuXQm5QRN5yIpXsf6ecA=";
    };
    nativeBuildInputs = [ autoPatchelfHook ];
    buildInputs = [ (lib.getLib stdenv.cc.cc) ];
    propagatedBuildInputs = [
      packages.aiohttp
      packages.fastapi
      packages.orjson
      packages.setproctitle
      packages.uvicorn
    ];
    pythonImportsCheck = [ "sglang_router.launch_router" ];
  };
in
(python.withPackages (_: [ router ])).overrideAttrs (old: {
  name = "sglang-router-${version}";
  passthru = (old.passthru or { }) // {
    inherit router version;
  };
  meta = {
    description = "Python that can import sglang-router";
    homepage = "https://github.com/sgl-project/sglang";
    license = lib.licenses.asl20;
    mainProgram = "python3";
    platforms = [ "aarch64-linux" ];
  };
})
