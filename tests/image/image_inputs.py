"""Small archives and a small recipe, made here: the builder's tests need no network."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import tarfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

RECIPE = """\
version = 1
wheels = "poetry.lock"
name = "small"
version_of = "tool"
[target]
architecture = "arm64"
variant = "v8"
multiarch = "aarch64-linux-gnu"
python = "3.13"
suites = ["trixie"]
security_suites = ["trixie-security"]
components = ["main"]
[profiles.full]
why = "all"
debian = ["*"]
wheels = ["*"]
entrypoint = ["/usr/bin/hello"]
[profiles.runtime]
why = "no compilers"
refused = "compiles at run time"
[debian.roots]
hello = "for the test"
[debian.denied]
[[debian.drop]]
paths = '^usr/share/man/'
why = "manuals"
[[wheels_drop]]
wheel = "tool"
paths = '^tool/tests/'
why = "self-tests"
[[layers]]
name = "cuda"
wheels = '^nvidia-'
[[layers]]
name = "rest"
wheels = ''
"""


@dataclass(frozen=True)
class Inputs:
    """Paths of a recipe, its lock and the folder of the files."""

    recipe: Path
    lock: Path
    files: Path

    def argv(self, output: Path, *more: str) -> list[str]:
        """Arguments of ``spark-appliance image build``."""
        return [
            "image", "build", "--offline", "--recipe", str(self.recipe), "--lock", str(self.lock),
            "--files", str(self.files), "-o", str(output), *more,
        ]  # fmt: skip


def write(folder: Path) -> Inputs:
    files = folder / "files"
    files.mkdir(parents=True)
    deb = files / "hello_1.0_arm64.deb"
    deb.write_bytes(debian_package())
    wheels = [
        wheel(files, "tool", "1.0", {
            "tool/__init__.py": b"def main(): pass\n",
            "tool/tests/test_x.py": b"",
            "tool-1.0.data/scripts/run": b"#!python\nprint(1)\n",
            "tool-1.0.data/data/share/tool.txt": b"data\n",
            "tool-1.0.data/purelib/extra.py": b"x = 1\n",
        }, entry_points="[console_scripts]\ntool = tool:main\n"),
        wheel(files, "nvidia-nvrtc", "13.0", {
            "nvidia/cu13/lib/libnvrtc.so.13": b"library",
            "nvidia/cu13/lib/libnvrtc-builtins.so.13.0": b"library",
            "nvidia/cu13/bin/nvcc": b"\x7fELF",
        }),
    ]  # fmt: skip
    (folder / "poetry.lock").write_text(
        "".join(
            f'[[package]]\nname = "{name}"\nversion = "{version}"\n'
            f'files = [{{file = "{path.name}", hash = "sha256:{sha256(path)}"}}]\n'
            for name, version, path in wheels
        )
    )
    recipe = folder / "recipe.toml"
    recipe.write_text(RECIPE)
    package = {
        "name": "hello", "version": "1.0", "architecture": "arm64", "source": "hello",
        "archive": "debian", "pool": f"pool/main/h/hello/{deb.name}", "sha256": sha256(deb),
        "size": deb.stat().st_size, "installed_kib": 1, "licences": ["MIT"],
        "profiles": ["full"], "why": "for the test",
    }  # fmt: skip
    lock = folder / "image.lock.json"
    lock.write_text(
        json.dumps(
            {
                "format": 1,
                "debian": {
                    "snapshot": "20260101T000000Z",
                    "releases": {"trixie": "20260101T000000Z"},
                    "packages": [package],
                    "denied": [],
                },
            }
        )
    )
    return Inputs(recipe, lock, files)


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def wheel(
    folder: Path,
    name: str,
    version: str,
    files: Mapping[str, bytes],
    entry_points: str = "",
) -> tuple[str, str, Path]:
    stem = f"{name.replace('-', '_')}-{version}"
    info = f"{stem}.dist-info"
    content = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: py3-none-any\n",
    }
    if entry_points:
        content[f"{info}/entry_points.txt"] = entry_points.encode()
    rows = io.StringIO()
    writer = csv.writer(rows, lineterminator="\n")
    for path, data in content.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        writer.writerow((path, f"sha256={digest}", len(data)))
    writer.writerow((f"{info}/RECORD", "", ""))
    path = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for member, data in {**content, f"{info}/RECORD": rows.getvalue().encode()}.items():
            item = zipfile.ZipInfo(member, (2020, 1, 1, 0, 0, 0))
            item.external_attr = (0o100744 if "/bin/" in member else 0o100600) << 16
            archive.writestr(item, data)
    return name, version, path


def debian_package() -> bytes:
    data = _tar(
        {
            "./usr/bin/hello": (0o4755, b"#!/bin/sh\n"),  # set-uid: must not survive
            "./lib/aarch64-linux-gnu/libhello.so.1": (0o644, b"no ELF"),
            "./usr/share/man/man1/hello.1": (0o644, b"manual"),
            "./usr/share/base-passwd/passwd.master": (0o644, b"root:*:0:0::/root:/bin/sh\n"),
            "./usr/share/base-passwd/group.master": (0o644, b"root:*:0:\n"),
            "./usr/share/ca-certificates/b.crt": (0o644, b"BBB"),
            "./usr/share/ca-certificates/a.crt": (0o644, b"AAA\n"),
        },
        hard_links={"./usr/bin/hello2": "./usr/bin/hello"},
    )
    control = _tar({"./control": (0o644, b"Package: hello\nVersion: 1.0\n")})
    out = b"!<arch>\n"
    for name, content in (
        ("debian-binary", b"2.0\n"), ("control.tar", control), ("data.tar", data)
    ):  # fmt: skip
        head = f"{name:<16}{0:<12}{0:<6}{0:<6}{'100644':<8}{len(content):<10}`\n"
        out += head.encode() + content + b"\n" * (len(content) % 2)
    return out


def _tar(
    files: Mapping[str, tuple[int, bytes]], hard_links: Mapping[str, str] | None = None
) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for name, (mode, content) in files.items():
            item = tarfile.TarInfo(name)
            item.mode, item.size, item.uid, item.mtime = mode, len(content), 1234, 999
            archive.addfile(item, io.BytesIO(content))
        for name, target in (hard_links or {}).items():
            item = tarfile.TarInfo(name)
            item.type, item.linkname = tarfile.LNKTYPE, target
            archive.addfile(item)
    return out.getvalue()
