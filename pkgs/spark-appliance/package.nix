# The command line `spark-appliance` and the program of the nodes, `spark-node`.
{
  lib,
  src,
  buildPythonApplication,
  hatchling,
  click,
  pydantic,
  pyyaml,
  rich,
  installShellFiles,
  stdenv,
  mtools,
  util-linux,
}:
let
  inherit (lib.importTOML ../../pyproject.toml) project;
in
buildPythonApplication {
  pname = project.name;
  inherit (project) version;
  pyproject = true;

  src = src.spark-appliance;

  build-system = [ hatchling ];
  dependencies = [
    click
    pydantic
    pyyaml
    rich
  ];

  nativeBuildInputs = [ installShellFiles ];

  # `image write` looks at disks and puts files on an ESP; the user's own programs come first
  makeWrapperArgs = lib.optionals stdenv.hostPlatform.isLinux [
    "--suffix"
    "PATH"
    ":"
    (lib.makeBinPath [
      mtools
      util-linux
    ])
  ];

  postInstall = lib.optionalString (stdenv.buildPlatform.canExecute stdenv.hostPlatform) ''
    for shell in bash zsh fish; do
      _SPARK_APPLIANCE_COMPLETE=''${shell}_source $out/bin/spark-appliance > spark-appliance.$shell
    done
    installShellCompletion --bash spark-appliance.bash --zsh spark-appliance.zsh \
      --fish spark-appliance.fish
  '';

  pythonImportsCheck = [
    "spark_appliance"
    "spark_appliance.cli"
  ];

  meta = {
    inherit (project) description;
    license = lib.licenses.asl20;
    mainProgram = "spark-appliance";
  };
}
