"""The container image of the stand-in engine: python, numpy, spark-engram's own packer and store.

A docker archive with one layer, so that ``podman load`` gives it the ID that is computed here.
"""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from harness.base_image import CACHE, BaseImage, BaseImageError

ROOT = Path(__file__).parents[3]
ENGRAM = ROOT / "pkgs" / "spark-engram"
STAND_IN = ROOT / "pkgs" / "stand-in-engine" / "stand_in_engine.py"
COMPILER = "aarch64-linux-gnu-g++"
SITE = "usr/lib/python3/dist-packages"


@dataclass(frozen=True)
class EngineImage:
    """The archive and the image's ID (sha256:...)."""

    archive: Path
    identity: str


def missing_tools() -> list[str]:
    """Return which programs that build the image are not here."""
    return [] if shutil.which(COMPILER) else [COMPILER]


def engine_image(base: BaseImage) -> EngineImage:
    """Return the image, building it when there is none of this content yet.

    Raises:
        BaseImageError: when the native core cannot be compiled.
    """
    digest = hashlib.sha256(base.folder.name.encode())
    sources = [Path(__file__), STAND_IN, *ENGRAM.glob("src/*"), *ENGRAM.rglob("python/**/*.py")]
    for path in sorted(sources):
        digest.update(path.read_bytes())
    folder = CACHE / f"engine-{digest.hexdigest()[:16]}"
    if not (folder / "id").exists():
        folder.mkdir(parents=True, exist_ok=True)
        identity = _write(base, folder / "image.tar")
        (folder / "id").write_text(identity)
    return EngineImage(folder / "image.tar", (folder / "id").read_text())


def _compile(base: BaseImage, target: Path) -> None:
    argv = [COMPILER, "-O2", "-std=c++17", "-fPIC", "-shared", "-fvisibility=hidden"]
    argv += ["-static-libstdc++", "-static-libgcc", "-DSPARK_ENGRAM_HAVE_URING"]
    argv += ["-I", str(ENGRAM / "src"), "-isystem", str(base.uring / "include")]
    argv += sorted(str(path) for path in (ENGRAM / "src").glob("*.cc"))
    argv += [str(base.uring / "lib" / "liburing.a"), "-pthread", "-o", str(target)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BaseImageError(f"{COMPILER}: {done.stderr[-2000:]}")


def _programs(work: Path, base: BaseImage) -> Iterator[tuple[str, int, bytes]]:
    """Yield path, mode and content of what is ours in the image."""
    library = work / "libspark_engram.so"
    _compile(base, library)
    package = ENGRAM / "python" / "spark_engram"
    for path in sorted(package.rglob("*.py")):
        name = path.relative_to(package)
        yield f"{SITE}/spark_engram/{name}", 0o644, path.read_bytes()
    yield f"{SITE}/spark_engram/libspark_engram.so", 0o644, library.read_bytes()
    info = f"{SITE}/spark_engram-0.dist-info"
    yield f"{info}/METADATA", 0o644, b"Metadata-Version: 2.1\nName: spark-engram\nVersion: 0\n"
    points = "[sglang.srt.plugins]\nspark_engram = spark_engram.plugin:register\n"
    yield f"{info}/entry_points.txt", 0o644, points.encode()
    shebang = b"#!/usr/bin/python3.13\n"
    run = b"import sys\nfrom spark_engram.cli import main\nsys.exit(main())\n"
    yield "usr/bin/spark-engram", 0o755, shebang + run
    # what the plan's command line calls python3 is the stand-in, as in pkgs/stand-in-engine
    yield "usr/bin/python3", 0o755, shebang + STAND_IN.read_bytes()


def _write(base: BaseImage, target: Path) -> str:
    with tempfile.TemporaryDirectory() as temporary:
        layer = Path(temporary) / "layer.tar"
        with tarfile.open(layer, "w") as archive:
            _add_tree(archive, base.engine_tree)
            for name, mode, content in _programs(Path(temporary), base):
                _add(archive, name, mode, content)
        digest = hashlib.sha256(layer.read_bytes()).hexdigest()
        config = {
            "architecture": "arm64",
            "os": "linux",
            "config": {"Env": ["PATH=/usr/bin"]},
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
        }
        text = json.dumps(config, sort_keys=True).encode()
        identity = hashlib.sha256(text).hexdigest()
        manifest = [{"Config": f"{identity}.json", "RepoTags": None, "Layers": ["layer.tar"]}]
        with tarfile.open(target, "w") as archive:
            _add(archive, "manifest.json", 0o644, json.dumps(manifest).encode())
            _add(archive, f"{identity}.json", 0o644, text)
            archive.add(layer, "layer.tar")
    return f"sha256:{identity}"


def _add_tree(archive: tarfile.TarFile, tree: Path) -> None:
    def plain(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
        if info.name == "usr/bin/python3":  # ours comes in its place
            return None
        info.uid = info.gid = info.mtime = 0
        info.uname = info.gname = ""
        return info

    for path in sorted(tree.iterdir()):
        archive.add(path, path.name, filter=plain)


def _add(archive: tarfile.TarFile, name: str, mode: int, content: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(content), mode
    archive.addfile(info, io.BytesIO(content))
