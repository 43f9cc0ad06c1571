# ruff: noqa: SIM905 - lists of words are read better without quotes
"""The guests' base image: Debian for arm64 as erofs, kernel, initrd. Made once, kept by content.

``mmdebstrap --variant=extract`` only unpacks, so nothing of the foreign architecture runs here;
``_settle`` does what the maintainer scripts would have done, as far as a guest needs it. The file
system is not compressed: the host's page cache is shared by all guests, and an emulated CPU need
not decompress.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from harness import cpio, guest_files, packages

CACHE = Path(__file__).parents[3] / ".cache" / "vm"
TOOLS = ("mmdebstrap", "mkfs.erofs", "depmod", "unshare", "xz", "qemu-aarch64-static")


class BaseImageError(Exception):
    """The image could not be made; the text says which step failed."""


@dataclass(frozen=True)
class BaseImage:
    """A finished image."""

    folder: Path

    @property
    def root(self) -> Path:
        """The root file system, read only."""
        return self.folder / "base.erofs"

    @property
    def kernel(self) -> Path:
        """The kernel."""
        return self.folder / "vmlinuz"

    @property
    def engine_tree(self) -> Path:
        """Python, numpy and their libraries: the bottom of the engine's container image."""
        return self.folder / "engine-tree"

    @property
    def uring(self) -> Path:
        """Folder with ``include`` and ``lib`` of liburing, to compile against."""
        return self.folder / "uring"

    @property
    def initrd(self) -> Path:
        """Finds the root and a disk to write to; archives may be appended."""
        return self.folder / "initrd"


def key() -> str:
    """Return what the image is made of, as a hash."""
    here = Path(__file__).parent
    digest = hashlib.sha256()
    for name in ("base_image.py", "cpio.py", "guest_files.py", "packages.py"):
        digest.update((here / name).read_bytes())
    return digest.hexdigest()[:16]


def missing_tools() -> list[str]:
    """Return which programs that build an image are not here."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    return [tool for tool in TOOLS if shutil.which(tool, path=path) is None]


def base_image() -> BaseImage:
    """Return the image, building it when there is none of this content yet.

    Raises:
        BaseImageError: when a step fails.
    """
    folder = CACHE / f"base-{key()}"
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "base.erofs").exists():
            work = CACHE / "work"
            _remove(work)
            work.mkdir()
            _build(work)
            _remove(folder)
            folder.mkdir()
            for name in ("vmlinuz", "initrd", "engine-tree", "uring", "base.erofs"):
                (work / name).rename(folder / name)
            _remove(work)
    return BaseImage(folder)


def _build(work: Path) -> None:
    root = work / "root"
    _bootstrap(root)
    version = _kernel(root, work)
    _settle(root)
    _precompile(root)
    _engine_tree(root, work)
    _initrd(root, work, version)
    _configure(root)
    # writing to a temporary name: an interrupted build leaves no image behind
    _run("mkfs.erofs", "-Enoinline_data", "-T0", work / "base.erofs", root)


def _run(*argv: object) -> None:
    words = [str(word) for word in argv]
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    inherited = {name: value for name, value in os.environ.items() if "PYTHON" not in name}
    environment = {**inherited, "LC_ALL": "C.UTF-8", "PATH": path}
    done = subprocess.run(words, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        said = "\n".join((done.stderr or done.stdout).strip().splitlines()[-15:])
        raise BaseImageError(f"{' '.join(words[:4])}: exit status {done.returncode}\n{said}")


def _archive() -> str:
    """Return the Debian archive that this machine's own apt uses."""
    argv = ["apt-get", "indextargets", "--format", "$(REPO_URI)"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    for uri in done.stdout.split():
        if uri.rstrip("/").endswith("/debian"):
            return uri
    raise BaseImageError("apt has no Debian archive configured (apt-get indextargets)")


def _bootstrap(root: Path) -> None:
    wanted = [*packages.ESSENTIAL, *packages.PACKAGES, packages.KERNEL]
    _run(
        *("unshare", "-m", "mmdebstrap", "--mode=root", "--variant=extract"),
        *(f"--architectures={packages.ARCHITECTURE}", "--components=main", "--format=directory"),
        *("--skip=check/qemu", f"--include={','.join(wanted)}"),
        *("--aptopt=Apt::Install-Recommends false", packages.SUITE, root, _archive()),
    )


def _kernel(root: Path, work: Path) -> str:
    """Take the kernel and a part of its modules, decompressed: xz is slow in a guest."""
    kept = work / "kernel"
    (kept / "lib").mkdir(parents=True)
    shutil.move(root / "usr/lib/modules", kept / "lib/modules")
    modules = next((kept / "lib/modules").iterdir())
    version = modules.name
    shutil.copy(next((root / "boot").glob("vmlinu*")), work / "vmlinuz")
    compressed = [str(path) for path in modules.rglob("*.ko.xz")]
    for start in range(0, len(compressed), 500):
        _run("xz", "-d", *compressed[start : start + 500])
    _run("depmod", "-b", kept, version)
    needs = _dependencies(modules)
    wanted: set[str] = set()
    for module, others in needs.items():
        if any(module == part or module.startswith(f"{part}/") for part in packages.MODULES):
            wanted |= {module, *others}
    target = root / "usr/lib/modules" / version
    for module in wanted:
        (target / module).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(modules / module, target / module)
    for file in modules.glob("modules.*"):
        if file.name.startswith(("modules.builtin", "modules.order")):
            shutil.copy(file, target / file.name)
    _run("depmod", "-b", root, version)
    return version


def _dependencies(modules: Path) -> dict[str, list[str]]:
    lines = (modules / "modules.dep").read_text().splitlines()
    pairs = (line.partition(":") for line in lines)
    return {module: rest.split() for module, _, rest in pairs}


def _initrd(root: Path, work: Path, version: str) -> None:
    base = root / "usr/lib/modules" / version
    needs = _dependencies(base)
    by_name = {Path(path).name.removesuffix(".ko").replace("-", "_"): path for path in needs}
    order: list[str] = []
    for name in packages.INITRD_MODULES:
        if name in by_name:  # else built in
            for module in [*reversed(needs[by_name[name]]), by_name[name]]:
                if module not in order:
                    order.append(module)
    files: dict[str, tuple[int, bytes]] = {
        "bin/busybox": (0o755, (root / "usr/bin/busybox").read_bytes()),
        "init": (0o755, guest_files.INIT.encode()),
        "modules.order": (0o644, "".join(f"/m/{Path(m).name}\n" for m in order).encode()),
    }
    files |= {f"m/{Path(m).name}": (0o644, (base / m).read_bytes()) for m in order}
    files |= {f"{name}/.keep": (0o644, b"") for name in ("dev", "proc", "sys")}
    (work / "initrd").write_bytes(cpio.archive(files))


def _settle(root: Path) -> None:
    """Do what the packages' maintainer scripts would have done."""
    etc = root / "etc"
    for name in ("passwd", "group"):
        shutil.copy(root / f"usr/share/base-passwd/{name}.master", etc / name)
    with (etc / "passwd").open("a") as passwd, (etc / "group").open("a") as group:
        for user, number in guest_files.USERS.items():
            passwd.write(f"{user}:x:{number}:{number}::/run:/usr/sbin/nologin\n")
        for name, number in (guest_files.USERS | guest_files.GROUPS).items():
            group.write(f"{name}:x:{number}:\n")
    links = {
        "usr/bin/awk": "mawk",
        "usr/bin/nft": "../sbin/nft",
        "etc/mtab": "../proc/self/mounts",
        "var/run": "/run",
        "var/lock": "/run/lock",
        "etc/localtime": "/usr/share/zoneinfo/Etc/UTC",
    }
    for link, target in links.items():
        if not (root / link).is_dir() and not (root / link).exists():
            (root / link).unlink(missing_ok=True)
            (root / link).symlink_to(target)
    for folder in ("nfs/sm", "nfs/sm.bak", "nfs/v4recovery", "nfs/rpc_pipefs", "systemd"):
        (root / "var/lib" / folder).mkdir(parents=True, exist_ok=True)
    for folder in ("models", "srv", "mnt", "var/lib/containers"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    for name in ("rmtab", "etab", "xtab", "state"):
        (root / "var/lib/nfs" / name).touch()


_TRIPLE = "usr/lib/aarch64-linux-gnu"


def _precompile(root: Path) -> None:
    """Make byte code of what is imported, with the times that erofs and the image will give."""
    for folder in ("usr/lib/python3", "usr/lib/python3.13"):
        for path in (root / folder).rglob("*.py"):
            os.utime(path, (0, 0), follow_symlinks=False)
    emulator = shutil.which("qemu-aarch64-static")
    shutil.copy(str(emulator), root / "emulator")
    program = f"import {', '.join(packages.PRECOMPILED)}"
    # Debian's alternatives would make the links to these; no maintainer script has run
    libraries = f"LD_LIBRARY_PATH={':'.join(f'/{_TRIPLE}/{name}' for name in ('blas', 'lapack'))}"
    words = ("chroot", root, "/emulator", "-cpu", "cortex-a72", "-E", libraries)
    _run(*words, "/usr/bin/python3.13", "-c", program)
    (root / "emulator").unlink()


_ENGINE_LIBRARIES = """
ld-linux-aarch64 libc libm libdl libpthread librt libutil libz libexpat libffi libgcc_s libstdc++
libgfortran libblas liblapack libcrypto libssl libuuid liblzma libbz2 libsqlite3 libreadline
libtinfo libzstd
""".split()


def _engine_tree(root: Path, work: Path) -> None:
    tree = work / "engine-tree"
    skipped = shutil.ignore_patterns("test", "tests", "idlelib", "ensurepip", "lib2to3", "tkinter")
    for folder in ("usr/lib/python3.13", "usr/lib/python3/dist-packages/numpy"):
        shutil.copytree(root / folder, tree / folder, symlinks=True, ignore=skipped)
    (tree / "usr/bin").mkdir(parents=True)
    shutil.copy(root / "usr/bin/python3.13", tree / "usr/bin/python3.13")
    (tree / "usr/bin/python3").symlink_to("python3.13")
    for folder in ("", "blas", "lapack"):
        (tree / _TRIPLE).mkdir(parents=True, exist_ok=True)
        for path in (root / _TRIPLE / folder).glob("*.so*"):
            if path.name.split(".so")[0].split("-2")[0] in _ENGINE_LIBRARIES and path.exists():
                shutil.copy(path, tree / _TRIPLE / path.name)
    shutil.copy(root / _TRIPLE / "ld-linux-aarch64.so.1", tree / "usr/lib/ld-linux-aarch64.so.1")
    (tree / "lib").symlink_to("usr/lib")
    for folder in ("tmp", "proc", "sys", "dev", "etc"):
        (tree / folder).mkdir()
    (work / "uring/lib").mkdir(parents=True)
    shutil.copytree(root / "usr/include/liburing", work / "uring/include/liburing")
    shutil.copy(root / "usr/include/liburing.h", work / "uring/include/liburing.h")
    # newer than the kernel headers of the Debian release that may compile against it
    (work / "uring/include/linux").mkdir()
    shutil.copy(root / "usr/include/linux/blkdev.h", work / "uring/include/linux/blkdev.h")
    shutil.copy(root / _TRIPLE / "liburing.a", work / "uring/lib/liburing.a")


def _configure(root: Path) -> None:
    for path, (mode, text) in guest_files.FILES.items():
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.unlink(missing_ok=True)
        file.write_text(text)
        file.chmod(mode)
    system = root / "etc/systemd/system"
    for unit in packages.MASKED:
        _link(system / unit, "/dev/null")
    for unit in packages.NOT_STARTED:
        for folder in (system, root / "usr/lib/systemd/system"):
            for wants in folder.glob("*.wants"):
                (wants / unit).unlink(missing_ok=True)
    (root / "usr/lib/systemd/system/multi-user.target.wants/dbus.service").unlink(missing_ok=True)
    for name in packages.MASKED_GENERATORS:
        _link(root / "etc/systemd/system-generators" / name, "/dev/null")
    for rule in (root / "usr/lib/udev/rules.d").glob("*.rules"):
        if rule.stem not in packages.UDEV_RULES:
            _link(root / "etc/udev/rules.d" / rule.name, "/dev/null")
    _link(system / "sysinit.target.wants/backdoor.service", "../backdoor.service")
    units = "/usr/lib/systemd/system"
    for target, unit in (
        ("multi-user.target", "systemd-networkd.service"),
        ("multi-user.target", "ssh.service"),
        ("sockets.target", "systemd-networkd.socket"),
    ):
        _link(system / f"{target}.wants" / unit, f"{units}/{unit}")
    _link(system / "default.target", f"{units}/multi-user.target")
    for folder in packages.DROPPED_FOLDERS:
        _remove(root / folder)
        (root / folder).mkdir(parents=True)


def _link(path: Path, target: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.symlink_to(target)


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)


if __name__ == "__main__":
    print(base_image().folder, file=sys.stdout)
