# What of this flake the tools of a Debian machine can build (see ./README.md): our programs, and
# the files of an aarch64 node, whose engine is replaced by the stand-in.
{
  flake, # the flake's outputs with nixpkgs replaced by the tree made by ./make-tree
}:
let
  inherit (flake.nixosConfigurations.appliance) pkgs;
  inherit (pkgs) lib;
  # programs of this machine, without the node's
  x86 = import pkgs.path { system = "x86_64-linux"; };

  node = import (pkgs.path + "/nixos/lib/eval-config.nix") {
    system = null;
    modules = [
      flake.nixosModules.fleet
      {
        nixpkgs.hostPlatform = "aarch64-linux";
        system.stateVersion = "26.05";
        services.spark = {
          # a program of the right name is enough for a unit file
          engine.package = pkgs.runCommand "engine" { } ''
            mkdir -p $out/bin
            touch $out/bin/python3 $out/bin/spark-engram
          '';
          package = pkgs.runCommand "node-program" { } ''
            mkdir -p $out/bin
            touch $out/bin/spark-node
          '';
          engram.package = pkgs.runCommand "packer" { meta.mainProgram = "spark-engram"; } ''
            mkdir -p $out/bin
            touch $out/bin/spark-engram
          '';
          fleet = {
            enable = true;
            plan = lib.importJSON ../../../examples/three-spark-triangle/cluster.lock.json;
            node = "spark1";
          };
        };
      }
    ];
  };
  ours = lib.filterAttrs (
    name: _: lib.hasPrefix "spark" name || lib.hasPrefix "var-lib-spark" name
  ) node.config.systemd.units;
  images = {
    inherit (flake.packages.x86_64-linux) oci oci-smoke oci-tools;
    # as oci-tools, with one other byte in the compiled library
    altered = images.oci-tools.override {
      engramLibrary = x86.runCommand "libspark_engram.so" { } ''
        for blob in ${images.oci-tools}/blobs/sha256/*; do
          tar -xf $blob --wildcards '*/libspark_engram.so' 2>/dev/null || continue
        done
        cp "$(find opt -name libspark_engram.so)" $out
        printf X | dd of=$out bs=1 seek=$(($(stat -c %s $out) - 1)) conv=notrunc
      '';
    };
  };
  etc = lib.filterAttrs (
    name: _:
    lib.elem name [
      "spark/plan.json"
      "exports"
      "nfs.conf"
    ]
    || lib.hasPrefix "systemd/network/10-spark" name
  ) node.config.environment.etc;
in
{
  programs = pkgs.lib.genAttrs [ "spark-appliance" "spark-engram" "spark-tp-pad" "options-doc" ] (
    name: flake.packages.x86_64-linux.${name}
  );
  units = pkgs.linkFarm "units" (
    lib.mapAttrsToList (name: unit: {
      inherit name;
      path = "${unit.unit}/${name}";
    }) ours
  );
  etc = pkgs.linkFarm "etc" (
    lib.mapAttrsToList (name: file: {
      inherit name;
      path = file.source;
    }) etc
  );
  inherit images;
  checks = {
    inherit (flake.checks.x86_64-linux) render-three-spark-triangle;
  };
}
