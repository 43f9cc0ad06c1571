# ruff: noqa: SIM905 - lists of words are read better without quotes
"""What the guests' base image is made of, and what is left out because emulation makes it dear."""

from __future__ import annotations

from typing import Final

SUITE: Final = "trixie"
ARCHITECTURE: Final = "arm64"
KERNEL: Final = "linux-image-arm64"

# --variant=extract leaves essential packages out unless they are named
ESSENTIAL: Final = """
base-files base-passwd bash bsdutils coreutils dash debianutils diffutils findutils grep gzip
hostname init-system-helpers libc-bin login mawk ncurses-base ncurses-bin passwd perl-base sed
sysvinit-utils tar util-linux
""".split()

PACKAGES: Final = """
systemd systemd-sysv udev dbus libpam-systemd openssh-server
nfs-kernel-server nfs-common rpcbind rdma-core ibverbs-utils ibverbs-providers rdmacm-utils
iproute2 iputils-ping nftables rsync curl
python3 e2fsprogs kmod procps util-linux-extra busybox-static
podman crun conmon catatonit
python3-numpy liburing-dev
""".split()

# Modules that the programs of the guests import. Byte code is made for them when the image is
# built: compiling at each start costs seconds under emulation.
PRECOMPILED: Final = """
argparse asyncio base64 concurrent.futures configparser contextlib csv ctypes dataclasses datetime
email.parser enum fcntl fnmatch functools glob grp hashlib hmac http.client http.server
importlib.metadata importlib.resources ipaddress json logging mmap numpy numpy.random numpy.typing
pathlib platform pwd queue re runpy secrets select selectors shlex shutil signal socket ssl stat
statistics struct subprocess tempfile textwrap threading time traceback typing urllib.error
urllib.request uuid zipapp zipfile zipimport
""".split()

# Parts of the module tree; what they depend on comes along.
MODULES: Final = """
kernel/drivers/virtio kernel/drivers/block/virtio_blk.ko kernel/drivers/nvme
kernel/drivers/net/virtio_net.ko kernel/drivers/net/net_failover.ko kernel/drivers/net/macvlan.ko
kernel/drivers/net/ethernet/mellanox/mlx5 kernel/drivers/infiniband/hw/mlx5
kernel/drivers/char/virtio_console.ko kernel/drivers/char/hw_random
kernel/drivers/infiniband/core kernel/drivers/infiniband/sw kernel/drivers/infiniband/ulp
kernel/fs/erofs kernel/fs/overlayfs kernel/fs/ext4 kernel/fs/jbd2 kernel/fs/nfs
kernel/fs/nfsd kernel/fs/nfs_common kernel/fs/lockd kernel/fs/netfs kernel/fs/fuse
kernel/fs/autofs kernel/fs/configfs kernel/fs/mbcache.ko
kernel/net/sunrpc kernel/net/netfilter kernel/net/ipv4 kernel/net/ipv6 kernel/net/core
kernel/net/packet kernel/net/unix kernel/net/dns_resolver
kernel/crypto kernel/lib kernel/arch kernel/security kernel/block
""".split()

INITRD_MODULES: Final = (
    "virtio_pci virtio_mmio virtio_blk virtio_console crc32c_generic erofs overlay ext4".split()
)

# Not what a test is about; each costs a second or more under emulation.
MASKED: Final = """
apt-daily.timer apt-daily-upgrade.timer dpkg-db-backup.timer e2scrub_all.timer fstrim.timer
e2scrub_reap.service systemd-timesyncd.service systemd-pstore.service getty@tty1.service
serial-getty@ttyAMA0.service serial-getty@hvc0.service console-getty.service getty.target
getty-static.service systemd-update-utmp.service systemd-tpm2-setup.service
systemd-tpm2-setup-early.service systemd-hwdb-update.service
systemd-journal-catalog-update.service ldconfig.service systemd-update-done.service
systemd-firstboot.service systemd-binfmt.service dev-hugepages.mount sys-kernel-debug.mount
sys-kernel-tracing.mount sys-fs-fuse-connections.mount modprobe@drm.service
modprobe@efi_pstore.service modprobe@fuse.service modprobe@loop.service
keyboard-setup.service console-setup.service networking.service systemd-sysusers.service
systemd-tmpfiles-setup-dev.service systemd-tmpfiles-setup-dev-early.service
kmod-static-nodes.service systemd-random-seed.service systemd-network-generator.service
systemd-udev-load-credentials.service systemd-hibernate-clear.service systemd-logind.service
systemd-user-sessions.service systemd-networkd-persistent-storage.service
systemd-pcrmachine.service systemd-pcrphase.service systemd-pcrphase-sysinit.service
systemd-machine-id-commit.service systemd-sysext.socket systemd-creds.socket
systemd-hostnamed.socket systemd-pcrextend.socket systemd-pcrlock.socket
systemd-initctl.socket sshd-unix-local.socket uuidd.socket modprobe@configfs.service
modprobe@dm_mod.service systemd-tmpfiles-clean.timer xfs_scrub_all.timer
systemd-ask-password-console.path systemd-ask-password-wall.path
systemd-journal-flush.service proc-sys-fs-binfmt_misc.automount systemd-remount-fs.service
dev-mqueue.mount run-lock.mount sys-kernel-config.mount system-xfs_scrub.slice
systemd-networkd-varlink-hook.socket podman.socket podman.service podman-restart.service
podman-auto-update.timer podman-clean-transient.service nfs-blkmap.service
rpc-statd-notify.service
""".split()

MASKED_GENERATORS: Final = """
systemd-debug-generator systemd-getty-generator systemd-gpt-auto-generator
systemd-hibernate-resume-generator systemd-rc-local-generator systemd-run-generator
systemd-ssh-generator systemd-system-update-generator systemd-sysv-generator
systemd-tpm2-generator rpc-pipefs-generator podman-system-generator
""".split()

# Installed, but started by the product or by a test.
NOT_STARTED: Final = """
nfs-server.service rpcbind.service rpcbind.socket nfs-client.target ssh.service ssh.socket
systemd-networkd-wait-online.service sshd-keygen.service nftables.service
""".split()

UDEV_RULES: Final = """
50-udev-default 60-block 60-persistent-storage 60-rdma-ndd 60-rdma-persistent-naming
75-net-description 75-rdma-description 80-drivers 80-net-setup-link 90-rdma-hw-modules
90-rdma-ulp-modules 90-rdma-umad 99-systemd
""".split()

DROPPED_FOLDERS: Final = """
var/cache/apt var/lib/apt/lists usr/share/doc usr/share/man usr/share/locale usr/share/info
usr/share/i18n boot
""".split()
