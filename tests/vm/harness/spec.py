"""What a guest is made of, and the QEMU command line that follows from it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from harness.base_image import BaseImage

QEMU = os.environ.get("SPARK_VM_QEMU", "qemu-system-aarch64")

KERNEL_OPTIONS = (
    "console=ttyAMA0 quiet loglevel=4 systemd.show_status=no mitigations=off nokaslr audit=0 "
    "lsm=capability net.ifnames=0 cryptomgr.notests random.trust_cpu=on panic=-1"
)


@dataclass(frozen=True)
class Nic:
    """A network card: its network, its MAC, and for a card of the fabric its PCI function.

    ``slot`` is (root port, function): the cards of a port are the functions of one device.
    """

    cable: str
    mac: str
    slot: tuple[int, int] | None = None


@dataclass(frozen=True)
class Spec:
    """A guest. ``files``: path -> mode, content; ``disks``: NVMe serial -> MiB."""

    name: str
    number: int
    nics: tuple[Nic, ...] = ()
    files: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    units: tuple[str, ...] = ()
    disks: Mapping[str, int] = field(default_factory=dict)
    memory_mib: int = 1024
    ssh_port: int | None = None
    attached: Mapping[str, Path] = field(default_factory=dict)
    """Read-only disks: serial -> file."""


def missing_qemu() -> str | None:
    """Return why QEMU cannot be used, None when it can."""
    return None if shutil.which(QEMU) else f"{QEMU} is not installed"


def command(
    spec: Spec, image: BaseImage, folder: Path, descriptors: Mapping[int, int]
) -> list[str]:
    """Return the command line; ``descriptors`` maps a card's position to its open socket."""
    # the guest must not outlive a test that is killed
    argv = [
        "setpriv",
        "--pdeathsig",
        "KILL",
        "--",
        QEMU,
        "-nodefaults",
        "-no-user-config",
        "-display",
        "none",
        "-name",
        spec.name,
    ]
    argv += ["-machine", "virt,gic-version=3", "-accel", "tcg,thread=multi,tb-size=256"]
    argv += ["-cpu", "cortex-a72", "-smp", "1", "-m", str(spec.memory_mib), "-no-reboot"]
    argv += ["-kernel", str(image.kernel), "-initrd", str(folder / "initrd")]
    argv += ["-append", KERNEL_OPTIONS, "-serial", f"file:{folder}/console.log"]
    argv += ["-qmp", f"unix:{folder}/monitor,server=on,wait=off"]
    argv += ["-chardev", f"socket,id=shell,path={folder}/shell,server=on,wait=off"]
    argv += ["-device", "virtio-serial-pci", "-device", "virtconsole,chardev=shell"]
    argv += ["-device", "virtio-rng-pci"]
    # vda, then vdb: initrd relies on the order
    argv += _drive("base", image.root, "readonly=on,file.locking=off")
    argv += ["-device", "virtio-blk-pci,drive=base"]
    argv += _drive("state", folder / "state.raw", "cache=unsafe")
    argv += ["-device", "virtio-blk-pci,drive=state"]
    for serial, path in spec.attached.items():
        argv += _drive(serial, path, "readonly=on,file.locking=off")
        argv += ["-device", f"virtio-blk-pci,drive={serial},serial={serial}"]
    ports = sorted({nic.slot[0] for nic in spec.nics if nic.slot is not None})
    for port in ports:
        argv += [
            "-device",
            f"pcie-root-port,id=port{port},chassis={port + 1},addr={port + 16:#x}.0",
        ]
    for position, nic in enumerate(spec.nics):
        device = f"virtio-net-pci,id={nic.cable},netdev=net-{nic.cable},mac={nic.mac},romfile="
        if nic.slot is not None:
            port, function = nic.slot
            device += f",bus=port{port},addr=0.{function}"
            device += ",multifunction=on" if function == 0 else ""
        net = f"dgram,id=net-{nic.cable},local.type=fd,local.str={descriptors[position]}"
        argv += ["-netdev", net, "-device", device]
    if spec.ssh_port is not None:
        forward = f"hostfwd=tcp:127.0.0.1:{spec.ssh_port}-:22"
        argv += ["-netdev", f"user,id=host,restrict=on,ipv6=off,{forward}"]
        argv += ["-device", f"virtio-net-pci,netdev=host,mac={host_mac(spec.number)},romfile="]
    for position, serial in enumerate(spec.disks):
        argv += _drive(f"nvme{position}", folder / f"{serial}.raw", "cache=unsafe,discard=unmap")
        argv += ["-device", f"nvme,drive=nvme{position},serial={serial}"]
    return argv


def host_mac(number: int) -> str:
    """Return the MAC of the card that leads to the machine where the tests run."""
    return f"52:54:00:12:ff:{number:02x}"


def _drive(name: str, path: Path, options: str) -> list[str]:
    return ["-drive", f"file={path},format=raw,if=none,id={name},{options}"]
