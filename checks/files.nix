# The files that `format` and `lint` look at: sources, and what configures the tools.
{ lib }:
let
  # of ruff (pyproject.toml of the root, ruff.toml beside it or below) and of statix
  configurations = [
    "pyproject.toml"
    "ruff.toml"
    "statix.toml"
  ];
in
lib.fileset.fileFilter (
  file: file.hasExt "nix" || file.hasExt "py" || lib.elem file.name configurations
) ../.
