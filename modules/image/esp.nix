# The ESP of the image: what is on it, how it is made the same everywhere, and how large a kernel
# and its initrd may be.
{
  config,
  lib,
  pkgs,
  ...
}:
let
  cfg = config.services.spark.image;
  inherit (lib) mkOption types;

  inherit (pkgs.stdenv.hostPlatform) efiArch;
  loader = config.system.boot.loader;
  limit = toString cfg.maxBootBytes;

  build = pkgs.buildPackages;
  tool =
    name: script: runtimeInputs:
    build.writeShellApplication {
      inherit name runtimeInputs;
      text = builtins.readFile script;
    };
  makeEsp = tool "spark-image-esp" ./esp.sh [
    build.coreutils
    build.dosfstools
    build.mtools
  ];
  bootSize = tool "spark-boot-size" ./boot-size.sh [ build.coreutils ];

  # A volume id has the first 32 bits of the image's seed.
  volumeId = lib.substring 0 8 (
    if config.image.repart.seed == null then "00000000" else config.image.repart.seed
  );

  list = pkgs.writeText "esp-files" (
    lib.concatStrings (lib.mapAttrsToList (target: source: "${target}\t${source}\n") cfg.espFiles)
  );
  kernels = lib.attrValues (
    lib.filterAttrs (target: _: lib.hasPrefix "EFI/Linux/" target) cfg.espFiles
  );
  esp =
    pkgs.runCommand "spark-esp.vfat"
      {
        nativeBuildInputs = [
          bootSize
          makeEsp
        ];
      }
      ''
        for kernel in ${lib.escapeShellArgs kernels}; do
          spark-boot-size ${limit} "$kernel"
        done
        spark-image-esp $out ${cfg.espSize} ${volumeId} < ${list}
      '';
in
{
  options.services.spark.image = {
    espSize = mkOption {
      type = types.strMatching "[0-9]+[MG]";
      default = "1G";
      example = "2G";
      description = "Size of the ESP: it holds kernel and initrd of several generations.";
    };

    espFiles = mkOption {
      # lazy: the kernel file names the system, whose assertions look at the names here
      type = types.lazyAttrsOf types.path;
      example = lib.literalExpression ''{ "spark/authorized_keys" = ./authorized_keys; }'';
      description = ''
        Files on the image's ESP by their path there. The boot loader and the kernel are among
        them. Nothing secret: the ESP can be read by whoever holds the disk or the image.
      '';
    };

    maxBootBytes = mkOption {
      type = types.ints.positive;
      default = 200000000;
      example = 150000000;
      description = ''
        Largest kernel with its initrd, in bytes; building a larger one fails, the image as well
        as any later generation. The firmware of a DGX Spark was seen to hang while loading
        209 MB and to boot 101 MB (Start9, start-os pull request 3693).
      '';
    };
  };

  config = lib.mkIf cfg.enable {
    assertions = [
      {
        assertion = lib.all (name: builtins.match "[A-Za-z0-9_+.~-]+(/[A-Za-z0-9_+.~-]+)*" name != null) (
          lib.attrNames cfg.espFiles
        );
        message = ''
          services.spark.image.espFiles: names are paths on the ESP without a leading slash, of
          letters, digits and _ + . ~ -, for example "spark/node".
        '';
      }
    ];

    services.spark.image.espFiles = {
      # the firmware finds this by itself; nothing is written to its variables
      "EFI/BOOT/BOOT${lib.toUpper efiArch}.EFI" =
        "${config.systemd.package}/lib/systemd/boot/efi/systemd-boot${efiArch}.efi";
      "EFI/Linux/${loader.ukiFile}" = "${config.system.build.uki}/${loader.ukiFile}";
    };

    image.repart.partitions."10-esp".repartConfig = {
      Type = "esp";
      Label = "spark-esp";
      CopyBlocks = toString esp;
      SizeMinBytes = cfg.espSize;
      SizeMaxBytes = cfg.espSize;
    };

    # of every generation, not only of the image: nixos-rebuild fails before anything is copied
    system.checks = [
      (pkgs.runCommand "spark-boot-size" { nativeBuildInputs = [ bootSize ]; } ''
        spark-boot-size ${limit} ${config.boot.kernelPackages.kernel}/${loader.kernelFile} \
          ${config.system.build.initialRamdisk}/${loader.initrdFile} | tee $out
      '')
    ];

    system.build.spark-esp = esp;
  };
}
