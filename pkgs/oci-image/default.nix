# The container image: the same assembler as without Nix, fed by fixed-output downloads.
# The digest must be the one of docs/digests.md; `expected` compares it while building.
{
  lib,
  runCommand,
  fetchurl,
  python3,
  sglangEnv, # pkgs/sglang-env: its packages hold the fetched wheels
  profile ? "full",
  engramLibrary ? null, # libspark_engram.so as `spark-appliance image build` compiles it
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

  mirrors = {
    debian = debianMirror;
    debian-security = securityMirror;
  };
  debs = map (
    package:
    fetchurl {
      # store names allow neither ~ nor %
      name = lib.strings.sanitizeDerivationName (baseNameOf package.pool);
      url = "${mirrors.${package.archive}}/${package.pool}";
      inherit (package) sha256;
      passthru.file = baseNameOf package.pool;
    }
  ) (lib.filter (package: lib.elem profile package.profiles) lock.debian.packages);

  isChosen = entry: chosen.wheels == [ "*" ] || lib.elem entry.name chosen.wheels;
  wheels = map (
    entry:
    sglangEnv.packages.${entry.name}.src
    // {
      file = (builtins.head entry.files).file;
    }
  ) (lib.filter isChosen wheelLock.package);

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
      ../spark-tp-pad/pyproject.toml
      ../spark-tp-pad/spark_tp_pad
    ];
  };

  plugins =
    if engramLibrary == null then
      lib.optional (lib.elem "spark-engram" chosen.plugins) "--without=spark-engram"
    else
      [ "--plugin-library=spark-engram=${engramLibrary}" ];
in
runCommand "spark-appliance-oci-${profile}"
  {
    nativeBuildInputs = [ assembler ];
    passthru = {
      inherit debs wheels;
    };
    meta.description = "OCI image layout of the engine for arm64, profile ${profile}";
  }
  ''
    mkdir files
    ${lib.concatMapStringsSep "\n" (item: "ln -s ${item} files/${lib.escapeShellArg item.file}") (
      debs ++ wheels
    )}
    cd ${source}
    export HOME=$TMPDIR PYTHONDONTWRITEBYTECODE=1
    python3 -m spark_appliance image build --offline --profile ${profile} \
      --cache "$TMPDIR/cache" --files "$TMPDIR/files" --jobs "$NIX_BUILD_CORES" \
      ${lib.escapeShellArgs plugins} -o "$TMPDIR/image" \
      ${lib.optionalString (expected != null) "--reproduce ${expected}"}
    mv "$TMPDIR/image" $out
  ''
