"""The last and smallest layer: the virtual environment's skeleton, CUDA_HOME, loader, plugins."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping, Sequence

from spark_appliance.image import ldcache
from spark_appliance.image.base import CACHE
from spark_appliance.image.tree import Tree
from spark_appliance.image.wheels import Layout

CUDA = "nvidia/cu13"
"""Folder of the CUDA toolkit wheels below site-packages."""
_SYSTEM_FOLDERS = ("/usr/local/lib/{0}", "/lib/{0}", "/usr/local/lib")
"""Search order of Debian's own /etc/ld.so.conf.d (libc-bin, libc6)."""
_LAST_FOLDER = "/lib"
"""ldconfig ends with the trusted folders."""


def skeleton(layout: Layout, multiarch: str, paths: frozenset[str], version: str) -> Tree:
    """Return the virtual environment, /usr/local/cuda and ld.so.conf.d.

    Args:
        layout: where the environment is.
        multiarch: Debian's multiarch name of the target.
        paths: the library files that the wheel layers hold.
        version: full version of the interpreter, for pyvenv.cfg.
    """
    tree = Tree()
    interpreter = f"/usr/bin/python{layout.python}"
    tree.file(
        f"{layout.prefix}/pyvenv.cfg",
        "home = /usr/bin\ninclude-system-site-packages = false\n"
        f"version = {version}\nexecutable = {interpreter}\n",
    )
    for name in ("python", "python3", f"python{layout.python}"):
        tree.link(f"{layout.prefix}/bin/{name}", interpreter)
    cuda = f"{layout.site}/{CUDA}"
    if any(path.startswith(f"{cuda}/") for path in paths):
        _cuda_home(tree, cuda, multiarch, paths)
    folders = library_folders(layout, paths)
    if folders:
        tree.file("etc/ld.so.conf.d/zz-sglang.conf", "".join(f"/{name}\n" for name in folders))
    return tree


def _cuda_home(tree: Tree, cuda: str, multiarch: str, paths: frozenset[str]) -> None:
    """Add what compilers look for and the wheels lack: lib64, names without version, the stub."""
    tree.link("usr/local/cuda", f"/{cuda}")
    tree.link(f"{cuda}/lib64", "lib")
    for path in sorted(paths):
        match = re.fullmatch(rf"{re.escape(cuda)}/lib/(lib[\w.+-]+?\.so)(\.\d+)+", path)
        if match and f"{cuda}/lib/{match[1]}" not in paths:
            tree.link(f"{cuda}/lib/{match[1]}", posixpath.basename(path), replace=True)
    # dangling until the NVIDIA run time mounts the driver
    tree.link(f"{cuda}/lib/stubs/libcuda.so", f"/usr/lib/{multiarch}/libcuda.so.1")


def library_folders(layout: Layout, paths: frozenset[str]) -> list[str]:
    """Return the folders of NVIDIA's wheels that hold shared libraries, sorted."""
    pattern = re.compile(rf"{re.escape(layout.site)}/nvidia/[^/]+/lib")
    heads = {
        head
        for head, name in (posixpath.split(path) for path in paths)
        if pattern.fullmatch(head) and ldcache.LIBRARY.fullmatch(name)
    }
    return sorted(heads)


def loader_cache(
    multiarch: str,
    base: Mapping[str, Sequence[str]],
    folders: Sequence[str],
    paths: frozenset[str],
    tree: Tree,
) -> bytes:
    """Return ld.so.cache for the whole image.

    Args:
        multiarch: Debian's multiarch name.
        base: folder below the root -> names of the Debian libraries in it.
        folders: what ``library_folders`` returns.
        paths: the library files that the wheel layers hold.
        tree: this layer, for its links.
    """
    found: list[tuple[str, Sequence[str]]] = []
    for pattern in _SYSTEM_FOLDERS:
        folder = pattern.format(multiarch)
        real = folder.lstrip("/") if folder.startswith("/usr") else f"usr{folder}"
        found.append((folder, base.get(real, ())))
    for folder in folders:
        here = {posixpath.basename(p) for p in paths if posixpath.dirname(p) == folder}
        names = {name for name in here if ldcache.LIBRARY.fullmatch(name)}
        names.update(ldcache.names(tree, folder))
        found.append((f"/{folder}", sorted(names)))
    found.append((_LAST_FOLDER, base.get(f"usr{_LAST_FOLDER}", ())))
    return ldcache.encode(ldcache.entries(found))


def environment(layout: Layout, *, compilers: bool) -> list[str]:
    """Return the variables of the image; the engine's are those of pkgs/sglang-env."""
    values = {
        "PATH": f"/{layout.prefix}/bin:/usr/local/cuda/bin:/usr/local/bin:/usr/bin:/bin",
        "VIRTUAL_ENV": f"/{layout.prefix}",
        "HOME": f"/{CACHE}",
        "LANG": "C.UTF-8",
        "PYTHONNOUSERSITE": "1",
        "PYTHONPYCACHEPREFIX": f"/{CACHE}/pyc",  # no .pyc in the image: only CPython writes them
        "PYTHONUNBUFFERED": "1",
        "SSL_CERT_FILE": "/etc/ssl/certs/ca-certificates.crt",
        "XDG_CACHE_HOME": f"/{CACHE}/xdg",
    }
    if compilers:
        values |= {
            "CC": "/usr/bin/gcc",
            "CXX": "/usr/bin/g++",
            "CUDA_HOME": "/usr/local/cuda",
            "CUDA_PATH": "/usr/local/cuda",
            "FLASHINFER_CUDA_ARCH_LIST": "12.1a",  # GB10 is compute capability 12.1
            "TORCH_CUDA_ARCH_LIST": "12.1a",
            "MAX_JOBS": "2",  # each nvcc can take 6 GiB of the memory that the GPU uses too
            "SGLANG_CACHE_DIR": f"/{CACHE}/sglang",
            "NVIDIA_VISIBLE_DEVICES": "all",
            "NVIDIA_DRIVER_CAPABILITIES": "compute,utility",
        }
    return [f"{name}={value}" for name, value in sorted(values.items())]
