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

  # The image module's own partitions and tools, around a root and a kernel that can be made here.
  # Names and contents are such that their order depends on who lists them.
  smallRoot = pkgs.runCommand "small-root" { } ''
    for name in zeta alpha mid "with space" beta; do
      mkdir -p "$out/$name/deep"
      seq 1 2000 > "$out/$name/deep/numbers"
      cp "$out/$name/deep/numbers" "$out/$name/deep/same"
      ln -s ../deep/numbers "$out/$name/link"
      touch "$out/$name/empty"
    done
    truncate --size=1M $out/holes
  '';
  kernelOf =
    size:
    pkgs.runCommand "kernel" { } ''
      head --bytes=${toString size} /dev/zero | tr '\0' k > $out
    '';
  imageWith =
    extra:
    (import (pkgs.path + "/nixos/lib/eval-config.nix") {
      system = null;
      modules = [
        flake.nixosModules.image
        {
          nixpkgs.hostPlatform = "aarch64-linux";
          system.stateVersion = "26.05";
          services.spark.image = {
            enable = true;
            espSize = "96M";
            plan = ../../../examples/three-spark-triangle/cluster.lock.json;
            espFiles = lib.mkMerge [
              {
                "EFI/BOOT/BOOTAA64.EFI" = lib.mkForce (kernelOf 100000);
                "EFI/Linux/spark-appliance_1.efi" = lib.mkForce (kernelOf 3000000);
              }
              (lib.genAttrs [
                "a/zeta"
                "a/alpha"
                "a/mid"
                "b/a-long-name.txt"
                "c"
              ] (_: kernelOf 1000))
            ];
          };
          image.repart.partitions."20-root" = {
            storePaths = lib.mkForce [ smallRoot ];
            contents = lib.mkForce {
              "/nix-path-registration".source = "${
                pkgs.closureInfo { rootPaths = [ smallRoot ]; }
              }/registration";
            };
          };
        }
        extra
      ];
    }).config.system.build;
in
{
  inherit smallRoot;
  inherit (imageWith { }) image;
  esp = (imageWith { }).spark-esp;
  # what systemd-repart makes of the same files by itself
  stock =
    (imageWith (
      { config, ... }:
      {
        image.repart.partitions."10-esp" = {
          contents = lib.mapAttrs' (
            name: source: lib.nameValuePair "/${name}" { inherit source; }
          ) config.services.spark.image.espFiles;
          repartConfig = {
            Format = "vfat";
            CopyBlocks = lib.mkForce "";
          };
        };
      }
    )).image;
  largeKernel =
    (imageWith {
      services.spark.image.maxBootBytes = 2999999;
    }).spark-esp;

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
