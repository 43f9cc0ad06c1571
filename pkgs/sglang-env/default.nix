# The engine's Python environment, from the wheels of poetry.lock. aarch64-linux only.
{
  lib,
  stdenv,
  runCommand,
  python313,
  poetry2nix, # import of the poetry2nix source with the same pkgs
  rdma-core,
  zlib,
  gcc, # host compiler of nvcc; CUDA 13.0 takes GCC 6 to 15
  ninja,
  which,
  coreutils,
}:
let
  pyproject = builtins.fromTOML (builtins.readFile ./pyproject.toml);
  lock = builtins.fromTOML (builtins.readFile ./poetry.lock);
  libraries = builtins.fromJSON (builtins.readFile ./libraries.json);
  driverDirectory = libraries.providers.driver.directory;

  locked = poetry2nix.mkPoetryPackages {
    pyproject = ./pyproject.toml;
    poetrylock = ./poetry.lock;
    python = python313;
    preferWheels = true;
    groups = [ "main" ];
    checkGroups = [ ];
    overrides = poetry2nix.overrides.withoutDefaults (
      import ./overrides.nix {
        inherit
          lib
          stdenv
          lock
          libraries
          ;
        exclude = builtins.attrNames pyproject.tool.relock.exclude;
        system = { inherit rdma-core zlib; };
      }
    );
  };
  packages = lib.genAttrs (map (entry: entry.name) lock.package) (name: locked.python.pkgs.${name});
  env = locked.python.withPackages (_: locked.poetryPackages);

  cudaHome =
    runCommand "cuda-home-${packages.nvidia-cuda-nvcc.version}"
      {
        sites = map (name: "${packages.${name}}/${locked.python.sitePackages}") libraries.cuda_home;
        meta.description = "CUDA toolkit tree for compilation at run time, made of the locked wheels";
      }
      ''
        bash ${./cuda-home.sh} $out ${driverDirectory} $sites
      '';

  sbom = runCommand "sglang-env-sbom-${pyproject.tool.poetry.version}" { } ''
    install -Dm444 ${./audit/results/sbom.cdx.json} $out/sglang-env.cdx.json
  '';

  mkRuntimeEnv =
    {
      cacheDir ? "/var/cache/spark-engine",
      maxJobs ? 2,
    }:
    {
      CUDA_HOME = "${cudaHome}";
      CUDA_PATH = "${cudaHome}";
      CC = "${gcc}/bin/gcc";
      CXX = "${gcc}/bin/g++";
      # GB10 is compute capability 12.1.
      FLASHINFER_CUDA_ARCH_LIST = "12.1a";
      TORCH_CUDA_ARCH_LIST = "12.1a";
      # Each nvcc can take some 6 GiB of the memory that the GPU uses too.
      MAX_JOBS = toString maxJobs;
      # For what Python opens through ctypes; compiled code has RUNPATHs.
      LD_LIBRARY_PATH = driverDirectory;
      # Triton asks /sbin/ldconfig otherwise.
      TRITON_LIBCUDA_PATH = driverDirectory;
      # SGLang sends the caches of Triton, Inductor, TileLang, FlashInfer and CUDA below its own;
      # what is left goes below the home folder.
      HOME = cacheDir;
      XDG_CACHE_HOME = "${cacheDir}/xdg";
      SGLANG_CACHE_DIR = "${cacheDir}/sglang";
      PYTHONNOUSERSITE = "1";
    };
in
lib.extendDerivation true {
  inherit
    cudaHome
    mkRuntimeEnv
    packages
    sbom
    ;
  inherit (locked) python;
  runtimeEnv = mkRuntimeEnv { };
  runtimePath = [
    cudaHome
    gcc
    ninja
    which
    coreutils
  ];
  rdmaCore = rdma-core;
  lock = ./poetry.lock;
} env
