# One machine with hand-written options and two NVMe disks: `engram0` is empty, `used0` is not.
{ own, spark }:
{ pkgs, lib, ... }:
let
  disk = serial: "/dev/disk/by-id/nvme-QEMU_NVMe_Ctrl_${serial}";

  # written to in QEMU's own overlay, which is gone after the test
  image =
    name: content:
    pkgs.runCommand "${name}.qcow2" { nativeBuildInputs = [ pkgs.vmTools.qemu ]; } ''
      truncate -s 2G raw
      ${content}
      qemu-img convert -f raw -O qcow2 raw $out
    '';
  nvme = serial: content: [
    "-drive if=none,id=${serial},format=qcow2,snapshot=on,file=${image serial content}"
    "-device nvme,serial=${serial},drive=${serial}"
  ];
in
{
  imports = [
    spark.modules.engram
    spark.modules.weights
  ];

  services.spark = {
    nodeName = "machine";
    weights = {
      enable = true;
      path = "/models/small";
    };
    engram = {
      enable = true;
      package = own.spark-engram;
      device = disk "engram0";
      createFilesystem = true;
      packArgv = [
        "spark-engram"
        "pack"
        "--checkpoint"
        "/models/small"
        "--output"
        "/var/lib/spark/engram"
        "--tp"
        "1"
        "--rank"
        "0"
        "--json-progress"
      ];
    };
  };

  # the test starts the target itself, once the checkpoint is there
  systemd.targets.spark.wantedBy = lib.mkForce [ ];

  virtualisation = {
    memorySize = 1024;
    qemu.options =
      nvme "engram0" "" ++ nvme "used0" "printf precious | dd of=raw conv=notrunc status=none";
  };
}
