"""What the maintainer scripts of the Debian packages would have done, as plain files.

Each function names the package whose script it stands for. No script runs, so nothing depends on
the machine that builds.
"""

from __future__ import annotations

from spark_appliance.image.tree import Tree

USER = "spark"
UID = 10001
"""User and group id of the image's own user; outside Debian's static and dynamic ranges
(Debian Policy 9.2.2: 0-999 system, 1000-59999 people; containers usually start at 10001)."""
RDMA_GID = 101
"""Group of the RDMA devices: the first dynamic id, as ``addgroup --system`` would choose."""
CACHE = "cache"

_DIRECTORIES = {
    "dev": 0o755, "media": 0o755, "mnt": 0o755, "opt": 0o755, "proc": 0o755, "root": 0o700,
    "run": 0o755, "run/lock": 0o1777, "srv": 0o755, "sys": 0o755, "tmp": 0o1777,
    "usr/local/bin": 0o755, "usr/local/lib": 0o755, "var/cache": 0o755, "var/mail": 0o755,
    "var/tmp": 0o1777,
}  # fmt: skip
# update-alternatives keeps a database; a link is what the programs need.
_ALTERNATIVES = {
    "usr/bin/awk": ("mawk", "usr/bin/mawk"),
    "usr/bin/nawk": ("mawk", "usr/bin/mawk"),
    "usr/bin/which": ("which.debianutils", "usr/bin/which.debianutils"),
    "usr/bin/cc": ("gcc", "usr/bin/gcc"),
    "usr/bin/c++": ("g++", "usr/bin/g++"),
    "usr/bin/c89": ("c89-gcc", "usr/bin/c89-gcc"),
    "usr/bin/c99": ("c99-gcc", "usr/bin/c99-gcc"),
    "usr/lib/cpp": ("../bin/cpp", "usr/bin/cpp"),
}
_CERTIFICATES = "usr/share/ca-certificates/"


def finish(tree: Tree) -> None:
    """Bring a tree of unpacked packages into the state after their installation."""
    _users(tree)
    _skeleton(tree)
    for path, (target, needed) in _ALTERNATIVES.items():
        if needed in tree:
            tree.link(path, target)
    _certificates(tree)


def _users(tree: Tree) -> None:
    """base-passwd (update-passwd) and libibverbs1 (addgroup rdma), and the image's own user."""
    for name, extra in (
        ("passwd", f"{USER}:*:{UID}:{UID}::/{CACHE}:/bin/sh\n"),
        ("group", f"rdma:*:{RDMA_GID}:{USER}\n{USER}:*:{UID}:\n"),
    ):
        source = f"usr/share/base-passwd/{name}.master"
        if source in tree:
            content = tree[source].content
            if isinstance(content, bytes):
                tree.file(f"etc/{name}", content + extra.encode())
    tree.file("etc/subuid", "")
    tree.file("etc/subgid", "")
    tree.directory(CACHE, 0o755, UID)


def _skeleton(tree: Tree) -> None:
    """base-files and libc-bin."""
    for source, path in (
        ("usr/share/libc-bin/nsswitch.conf", "etc/nsswitch.conf"),
        ("usr/share/base-files/profile", "etc/profile"),
        ("usr/share/base-files/dot.bashrc", "root/.bashrc"),
        ("usr/share/base-files/dot.profile", "root/.profile"),
    ):
        if source in tree:
            tree.copy(source, path)
    for path, mode in _DIRECTORIES.items():
        tree.directory(path, mode)
    for path, target in (("var/run", "/run"), ("var/lock", "/run/lock")):
        tree.remove(path)
        tree.link(path, target)
    tree.link("etc/dpkg/origins/default", "debian", replace=True)


def _certificates(tree: Tree) -> None:
    """update-ca-certificates: every certificate, in sorted order, in one bundle."""
    paths = sorted(
        path for path in tree.entries if path.startswith(_CERTIFICATES) and path.endswith(".crt")
    )
    if not paths:
        return
    parts = []
    for path in paths:
        content = tree[path].content
        if isinstance(content, bytes):
            parts.append(content.rstrip(b"\n") + b"\n")
    tree.file("etc/ssl/certs/ca-certificates.crt", b"".join(parts))
    names = "".join(path.removeprefix(_CERTIFICATES) + "\n" for path in paths)
    tree.file("etc/ca-certificates.conf", names)
