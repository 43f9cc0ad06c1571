# This project's packages for a package set; the overlay and the flake's outputs both read this.
{ pkgs, poetry2nix }:
let
  inherit (pkgs) lib;
  src = import ./sources.nix { inherit lib; };
  callPackage = lib.callPackageWith (pkgs // packages // { inherit src; });

  # what poetry2nix fetches wheels with, for whatever machine builds
  fetchers = pkgs.callPackage (poetry2nix + "/fetchers") {
    pyproject-nix = import (poetry2nix + "/vendor/pyproject.nix") { inherit lib; };
  };
  image =
    profile:
    callPackage ./oci-image {
      inherit profile;
      fetchWheel = fetchers.fetchFromPypi;
    };

  packages = {
    # command line and node program: plain Python, every system
    spark-appliance = callPackage ./spark-appliance/package.nix {
      inherit (pkgs.python3Packages)
        buildPythonApplication
        hatchling
        click
        pydantic
        pyyaml
        rich
        ;
    };

    # the engine: aarch64-linux only, its wheels have no other platform
    sglang-env = callPackage ./sglang-env {
      poetry2nix = import poetry2nix { inherit pkgs; };
    };
    # the same with this project's plugins, and what it needs from the system
    spark-engine = callPackage ./spark-engine/package.nix { };

    # in front of several clusters
    sglang-router = callPackage ./sglang-router/package.nix { };

    # the container image: for arm64, built on any Linux machine
    oci = image "full";
    oci-tools = image "tools";
    oci-smoke = image "smoke";

    # for the command line; the engine has builds of its own Python's
    spark-engram = pkgs.python3Packages.callPackage ./spark-engram/package.nix {
      src = src.spark-engram;
      # the tools, not the Python packages of these names
      inherit (pkgs) cmake ninja;
    };
    spark-tp-pad = pkgs.python3Packages.callPackage ./spark-tp-pad/package.nix {
      src = src.spark-tp-pad;
    };

    # for tests: answers like the engine, needs no GPU
    stand-in-engine = callPackage ./stand-in-engine/package.nix { };
  };
in
packages
