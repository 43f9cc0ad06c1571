# The container image: the same assembler as without Nix, fed by fixed-output downloads.
# The digest must be the one of docs/digests.md; `expected` compares it while building.
# The image is for arm64; what builds it is any Linux machine that the recipe has a compiler for.
{
  lib,
  stdenv,
  runCommand,
  fetchurl,
  fetchWheel, # { pname, version, file, hash }: poetry2nix's fetcher, as for pkgs/sglang-env
  python3,
  profile ? "full",
  engramLibrary ? null, # libspark_engram.so instead of the one that is compiled here
  debianMirror ? "mirror://debian",
  # nixpkgs has no mirror list for it; the first of its Debian mirrors serves it beside.
  securityMirror ? "mirror://debian/../debian-security",
  expected ? null, # manifest digest or image id
}:
let
  recipe = builtins.fromTOML (builtins.readFile ./recipe.toml);
  lock = builtins.fromJSON (builtins.readFile ./image.lock.json);
  wheelLock = builtins.fromTOML (builtins.readFile (./. + "/${recipe.wheels}"));
  chosen = recipe.profiles.${profile};
  machine = stdenv.buildPlatform.parsed.cpu.name;

  # plugins of the profile whose native library is compiled here
  compiled = lib.filter (
    name: recipe.native ? ${name} && !(name == "spark-engram" && engramLibrary != null)
  ) chosen.plugins;

  mirrors = {
    debian = debianMirror;
    debian-security = securityMirror;
  };
  groups = [ profile ] ++ map (name: "plugin:${name}") compiled;
  isLocked = package: lib.any (group: lib.elem group package.profiles) groups;
  debs = map (
    package:
    fetchurl {
      # store names allow neither ~ nor %
      name = lib.strings.sanitizeDerivationName (baseNameOf package.pool);
      url = "${mirrors.${package.archive}}/${package.pool}";
      inherit (package) sha256;
      passthru.file = baseNameOf package.pool;
    }
  ) (lib.filter isLocked lock.debian.packages);

  isChosen = entry: chosen.wheels == [ "*" ] || lib.elem entry.name chosen.wheels;
  wheels = map (
    entry:
    fetchWheel {
      pname = entry.name;
      inherit (entry) version;
      inherit (builtins.head entry.files) file hash;
    }
  ) (lib.filter isChosen wheelLock.package);

  compilers = map (
    name:
    let
      inherit (recipe.native.${name}) compiler compilers;
      requirement = lib.splitString "==" compiler;
      pinned = lib.findFirst (
        wheel: wheel.machine == machine
      ) (throw "oci-image: the recipe pins no ${compiler} for ${machine}") compilers;
    in
    fetchWheel {
      pname = builtins.head requirement;
      version = lib.last requirement;
      inherit (pinned) file;
      hash = "sha256:${pinned.sha256}";
    }
  ) compiled;

  assembler = python3.withPackages (
    packages: with packages; [
      click
      cyclonedx-python-lib
      installer
      packaging
      pydantic
      pyelftools
      python-debian
      pyyaml
      rich
    ]
  );

  source = lib.fileset.toSource {
    root = ../..;
    fileset = lib.fileset.unions [
      ../../spark_appliance
      ./recipe.toml
      ./image.lock.json
      ../sglang-env/poetry.lock
      ../sglang-env/audit/results/licences.json
      ../spark-engram/pyproject.toml
      ../spark-engram/python
      ../spark-engram/src
      ../spark-tp-pad/pyproject.toml
      ../spark-tp-pad/spark_tp_pad
    ];
  };

  libraries = lib.optional (
    engramLibrary != null
  ) "--plugin-library=spark-engram=${engramLibrary}";
in
runCommand "spark-appliance-oci-${profile}"
  {
    nativeBuildInputs = [ assembler ];
    passthru = {
      inherit debs wheels compilers;
    };
    meta.description = "OCI image layout of the engine for arm64, profile ${profile}";
  }
  ''
    mkdir files
    ${lib.concatMapStringsSep "\n" (item: "ln -s ${item} files/${lib.escapeShellArg item.file}") (
      debs ++ wheels ++ compilers
    )}
    cd ${source}
    export HOME=$TMPDIR PYTHONDONTWRITEBYTECODE=1
    python3 -m spark_appliance image build --offline --profile ${profile} \
      --cache "$TMPDIR/cache" --files "$TMPDIR/files" --jobs "$NIX_BUILD_CORES" \
      ${lib.escapeShellArgs libraries} -o "$TMPDIR/image" \
      ${lib.optionalString (expected != null) "--reproduce ${expected}"}
    mv "$TMPDIR/image" $out
  ''
