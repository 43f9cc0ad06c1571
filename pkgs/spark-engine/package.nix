# The engine as the units run it: sglang-env with this project's plugins in the same environment,
# its programs wrapped with what they need from the system (compiler, CUDA_HOME, driver, RDMA).
{
  lib,
  runCommand,
  makeWrapper,
  src,
  sglang-env,
  cmake,
  ninja,
  liburing,
}:
let
  inherit (sglang-env) python;
  plugins = [
    (python.pkgs.callPackage ../spark-engram/package.nix {
      src = src.spark-engram;
      inherit cmake ninja liburing;
    })
    (python.pkgs.callPackage ../spark-tp-pad/package.nix { src = src.spark-tp-pad; })
  ];
  env = python.withPackages (_: lib.attrValues sglang-env.packages ++ plugins);

  # defaults only: what the plan sets wins
  defaults = lib.concatLists (
    lib.mapAttrsToList (name: value: [
      "--set-default"
      name
      value
    ]) sglang-env.runtimeEnv
  );
in
runCommand "spark-engine-${sglang-env.packages.sglang.version}"
  {
    nativeBuildInputs = [ makeWrapper ];
    passthru = {
      inherit env plugins;
      inherit (sglang-env) packages;
      sitePackages = "${env}/${python.sitePackages}";
    };
    meta = {
      description = "SGLang with the plugins of spark-appliance";
      mainProgram = "python3";
      platforms = [ "aarch64-linux" ];
    };
  }
  ''
    mkdir -p $out/bin
    for program in python3 spark-engram; do
      makeWrapper ${env}/bin/$program $out/bin/$program \
        ${lib.escapeShellArgs defaults} \
        --prefix PATH : ${lib.makeBinPath sglang-env.runtimePath} \
        --prefix LD_LIBRARY_PATH : ${sglang-env.rdmaCore}/lib
    done
  ''
