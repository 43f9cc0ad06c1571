# What the tests ask of pkgs/sglang-env, as one value. Evaluated for aarch64-linux on any machine.
{ flake }:
let
  inherit (flake.nixosConfigurations.appliance) pkgs;
  inherit (pkgs) lib;
  env = flake.packages.aarch64-linux.sglang-env;
  plain = builtins.unsafeDiscardStringContext;
  describe = package: {
    inherit (package) version;
    file = package.src.name;
    hash = package.src.outputHash;
    requestedVersion = package.src.drvAttrs.version;
    buildInputs = map (input: input.pname or input.name) package.drvAttrs.buildInputs;
    runpaths = map plain (package.drvAttrs.appendRunpaths or [ ]);
    ignored = package.drvAttrs.autoPatchelfIgnoreMissingDeps or [ ];
    search = plain (package.drvAttrs.preFixup or "");
    postInstall = plain (package.drvAttrs.postInstall or "");
    removed = package.drvAttrs.pythonRemoveDeps or [ ];
    hooks = map (hook: hook.name) (lib.filter lib.isDerivation package.drvAttrs.nativeBuildInputs);
    out = plain package.outPath;
  };
in
{
  drv = plain env.drvPath;
  python = env.python.version;
  packages = lib.mapAttrs (_: describe) env.packages;
  members = map (member: member.pname or member.name) env.paths;
  sitePackages = env.python.sitePackages;
  runtimeEnv = lib.mapAttrs (_: plain) env.runtimeEnv;
  changedEnv = lib.mapAttrs (_: plain) (
    env.mkRuntimeEnv {
      cacheDir = "/elsewhere";
      maxJobs = 1;
    }
  );
  runtimePath = map (package: package.pname or package.name) env.runtimePath;
  cudaHome = {
    out = plain env.cudaHome.outPath;
    sites = map plain env.cudaHome.drvAttrs.sites;
    command = plain env.cudaHome.drvAttrs.buildCommand;
  };
  rdma = plain (lib.getLib env.rdmaCore).outPath;
  sbom = plain env.sbom.drvPath;
  lock = builtins.hashFile "sha256" env.lock;
}
