# Overlay over poetry2nix's package set. Which wheel needs what is data: libraries.json.
{
  lib,
  stdenv,
  lock, # the parsed poetry.lock
  exclude, # names that pyproject.toml leaves out on purpose
  libraries, # the parsed libraries.json
  system, # provider name -> package, for the providers that are neither driver nor everywhere
}:
final: prev:
let
  site = final.python.sitePackages;
  driver = libraries.providers.driver;
  isProvider = name: libraries.providers ? ${name};
  isPackage = name: isProvider name && name != "driver";

  # poetry2nix takes the packages it knows as build systems from nixpkgs, whatever the lock says.
  fromLock =
    entry:
    if (prev.${entry.name}.src.name or null) == (builtins.head entry.files).file then
      prev.${entry.name}
    else
      final.mkPoetryDep (
        entry
        // {
          pwd = null;
          preferWheels = true;
          source = null;
          sourceSpec = { };
          pythonPackages = final;
        }
      );

  directoryOf =
    source:
    if source == "own" then
      "$ORIGIN"
    else if source == "driver" then
      driver.directory
    else if isProvider source then
      "${lib.getLib system.${source}}/lib"
    else
      "${final.${source}}/${site}/${libraries.directories.${source}}";

  adapt =
    entry: package:
    let
      inherit (entry) name;
      native = lib.hasInfix "manylinux" (builtins.head entry.files).file;
      links = libraries.links.${name} or [ ];
      opens = libraries.opens.${name} or { };
      stray = libraries.stray.${name} or [ ];
      runpaths = lib.unique (
        lib.optional (builtins.elem "driver" links) driver.directory
        ++ map directoryOf (builtins.attrNames opens)
      );
    in
    package.overridePythonAttrs (
      old:
      {
        # In place of the long list of poetry2nix's manylinux2014: only what is declared.
        buildInputs = lib.optionals native (
          [ (lib.getLib stdenv.cc.cc) ]
          ++ map (provider: lib.getLib system.${provider}) (builtins.filter isPackage links)
        );
      }
      // lib.optionalAttrs native {
        autoPatchelfIgnoreMissingDeps =
          lib.optionals (builtins.elem "driver" links) driver.libraries
          ++ builtins.attrNames (libraries.absent.${name} or { });
        appendRunpaths = runpaths;
        preFixup = lib.concatMapStrings (source: ''
          addAutoPatchelfSearchPath ${final.${source}}/${site}
        '') (builtins.filter (source: !isProvider source) links);
      }
      // lib.optionalAttrs (stray != [ ]) {
        postInstall =
          (old.postInstall or "")
          + lib.concatMapStrings (file: ''
            rm $out/${site}/${file}
            rm -f $out/${site}/__pycache__/${lib.removeSuffix ".py" file}.*
          '') stray;
      }
      // lib.optionalAttrs (name == "sglang") {
        # sglang requires them; leaving them out is decided in pyproject.toml.
        pythonRemoveDeps = exclude;
      }
      // lib.optionalAttrs (name == "cuda-toolkit") {
        # The index calls the release 13.0.3, the file (and so the lock) 13.0.3.0.
        src = old.src.override { version = lib.removeSuffix ".0" entry.version; };
      }
    );
in
{
  # poetry2nix asks; nixpkgs dropped the flag with Python 2.
  isPy27 = false;
}
// lib.listToAttrs (
  map (entry: {
    inherit (entry) name;
    value = adapt entry (fromLock entry);
  }) lock.package
)
