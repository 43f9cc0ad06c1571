# Formatting of Nix and Python files, as a command and as a check.
{ pkgs }:
let
  formatter = pkgs.treefmt.withConfig {
    runtimeInputs = [
      pkgs.nixfmt
      pkgs.ruff
    ];
    settings = {
      on-unmatched = "info";
      tree-root-file = "flake.nix";
      formatter = {
        nixfmt = {
          command = "nixfmt";
          includes = [ "*.nix" ];
          # tables of programs, a package a line
          excludes = [ "tests/nix/hosttools/hosttools.nix" ];
        };
        ruff = {
          command = "ruff";
          options = [ "format" ];
          includes = [ "*.py" ];
        };
      };
    };
  };
in
{
  inherit formatter;
  check =
    src:
    pkgs.runCommand "format" { nativeBuildInputs = [ formatter ]; } ''
      cp -r --no-preserve=mode ${src} tree
      cd tree
      treefmt --ci
      touch $out
    '';
}
