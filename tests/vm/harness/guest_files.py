# ruff: noqa: ISC004 - contents of several lines
"""Text files of the guests' base image."""

from __future__ import annotations

from typing import Final

INIT: Final = r"""#!/bin/busybox sh
B=/bin/busybox
$B mount -t devtmpfs dev /dev; $B mount -t proc proc /proc; $B mount -t sysfs sys /sys
while read m; do
  $B insmod $m || $B echo "initrd: insmod $m failed" >/dev/console
done </modules.order
die() { $B echo "initrd: $*" >/dev/console; $B sleep 2; $B poweroff -f; }
i=0; while [ ! -b /dev/vdb ]; do i=$((i+1)); [ $i -gt 400 ] && die "no disks"; $B usleep 20000; done
$B mkdir -p /ro /rw /root
$B mount -t erofs -o ro /dev/vda /ro || die "no base"
$B mount -t ext4 /dev/vdb /rw || die "no disk to write to"
$B mkdir -p /rw/up /rw/wk /rw/containers /rw/models
$B mount -t overlay overlay -o lowerdir=/ro,upperdir=/rw/up,workdir=/rw/wk,xino=off /root ||
  die "no overlay"
[ -d /overlay ] && $B cp -a /overlay/. /root/
# podman's layers and NFS exports cannot lie on an overlay
$B mkdir -p /root/var/lib/containers /root/models
$B mount --bind /rw/containers /root/var/lib/containers
$B mount --bind /rw/models /root/models
$B mount --move /dev /root/dev; $B mount --move /proc /root/proc; $B mount --move /sys /root/sys
exec $B switch_root /root /sbin/init
"""

BACKDOOR_UNIT: Final = """[Unit]
Description=Root shell for the test driver on /dev/hvc0
DefaultDependencies=no
Conflicts=shutdown.target
Before=shutdown.target

[Service]
ExecStart=/usr/local/sbin/backdoor
KillSignal=SIGHUP
Restart=always

[Install]
WantedBy=sysinit.target
"""

BACKDOOR_READY: Final = "Spawning backdoor root shell..."

BACKDOOR: Final = f"""#!/bin/bash
export USER=root HOME=/root PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin PAGER= TERM=dumb
cd /tmp
exec </dev/hvc0 >/dev/hvc0
exec 2>/dev/console
stty -F /dev/hvc0 raw -echo
echo "connecting to host..."
echo "{BACKDOOR_READY}"
exec -a backdoor bash --norc 2>/dev/null
"""

COLDPLUG: Final = """[Service]
ExecStart=
ExecStart=-udevadm trigger --type=devices --action=add --prioritized-subsystem=block,net \
--subsystem-match=block --subsystem-match=net --subsystem-match=pci --subsystem-match=virtio \
--subsystem-match=nvme --subsystem-match=infiniband --subsystem-match=misc
"""

FILES: Final[dict[str, tuple[int, str]]] = {
    "etc/systemd/system/backdoor.service": (0o644, BACKDOOR_UNIT),
    "usr/local/sbin/backdoor": (0o755, BACKDOOR),
    "etc/fstab": (0o644, ""),
    "etc/hostname": (0o644, "guest\n"),
    "etc/hosts": (0o644, "127.0.0.1 localhost\n::1 localhost\n"),
    "etc/machine-id": (0o644, ""),
    "etc/nsswitch.conf": (
        0o644,
        "passwd: files systemd\ngroup: files systemd\nshadow: files\n"
        "hosts: files dns\nservices: files\nprotocols: files\n",
    ),
    "etc/systemd/journald.conf.d/vm.conf": (
        0o644,
        "[Journal]\nStorage=volatile\nRateLimitIntervalSec=0\n",
    ),
    "etc/systemd/system.conf.d/vm.conf": (
        0o644,
        "[Manager]\nDefaultTimeoutStartSec=300s\nDefaultDeviceTimeoutSec=300s\n"
        "DefaultTimeoutStopSec=60s\n",
    ),
    "etc/ssh/sshd_config.d/vm.conf": (
        0o644,
        "PermitRootLogin prohibit-password\nPasswordAuthentication no\nUsePAM no\nUseDNS no\n",
    ),
    "etc/systemd/system/systemd-udev-trigger.service.d/vm.conf": (0o644, COLDPLUG),
    # the kernel's 90 s of grace after a restart of the NFS server only make tests slow
    "etc/nfs.conf": (0o644, "[nfsd]\ngrace-time=10\nlease-time=10\n"),
    # what the NVIDIA container toolkit writes on a Spark; here a GPU is one variable
    "etc/cdi/nvidia.yaml": (
        0o644,
        'cdiVersion: "0.5.0"\nkind: nvidia.com/gpu\ndevices:\n'
        "  - name: all\n    containerEdits:\n      env: [STAND_IN_GPUS=all]\n",
    ),
}

USERS: Final = {
    "messagebus": 101,
    "sshd": 102,
    "_rpc": 103,
    "statd": 104,
    "systemd-resolve": 996,
    "systemd-timesync": 997,
    "systemd-network": 998,
}
GROUPS: Final = {
    "kvm": 110,
    "render": 111,
    "input": 112,
    "sgx": 113,
    "clock": 114,
    "_ssh": 115,
    "rdma": 116,
    "systemd-journal": 999,
}
