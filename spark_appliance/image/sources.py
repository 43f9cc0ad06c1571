"""Where files come from: the mirrors of apt and the index of pip, as this machine has them."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import urllib.parse
from collections.abc import Iterable, Sequence
from pathlib import Path

from spark_appliance import process
from spark_appliance.image.apt import Mirrors
from spark_appliance.image.errors import ImageError
from spark_appliance.image.lock import DebPackage, Wheel
from spark_appliance.image.recipe import Compiler, Target
from spark_appliance.image.store import Download

_TIMEOUT_S = 1800.0
# pip does not expand manylinux_2_x to the older ones; 41 is the glibc minor of Debian 13.
_PLATFORMS = ("manylinux2014_aarch64", *(f"manylinux_2_{minor}_aarch64" for minor in range(17, 42)))


def debian(packages: Iterable[DebPackage], mirrors: Mirrors) -> list[Download]:
    """Return the addresses of packages below the mirrors."""
    return [
        Download(
            package.file,
            package.sha256,
            mirrors.base(package.archive).rstrip("/")
            + "/"
            + urllib.parse.quote(package.pool, "/+~"),
        )
        for package in packages
    ]


def report_argv(
    target: Target, requirements: Path, folder: Path, platforms: Sequence[str] = _PLATFORMS
) -> list[str]:
    """Return the pip command that names the files of exact requirements without installing."""
    tag = f"cp{target.python.replace('.', '')}"
    return [
        sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--no-deps",
        "--quiet", "--report", "-", "--only-binary=:all:",
        "--target", str(folder), "--python-version", target.python, "--implementation", "cp",
        *(word for abi in (tag, "abi3", "none") for word in ("--abi", abi)),
        *(word for platform in platforms for word in ("--platform", platform)),
        "--requirement", str(requirements),
    ]  # fmt: skip


def wheels(
    missing: Sequence[Wheel], target: Target, platforms: Sequence[str] = _PLATFORMS
) -> list[Download]:
    """Ask pip for the addresses of wheels; its configuration decides on index and proxies.

    Args:
        missing: the wheels.
        target: what they are for.
        platforms: tags that pip may choose by, the preferred first (default: the target's).

    Raises:
        ImageError: pip is missing, or the index lacks a locked file.
    """
    if not missing:
        return []
    with tempfile.TemporaryDirectory(prefix="spark-image-pip-") as name:
        requirements = Path(name) / "requirements.txt"
        requirements.write_text("".join(f"{w.name}=={w.version}\n" for w in missing))
        try:
            answer = process.run(
                report_argv(target, requirements, Path(name) / "none", platforms),
                timeout=_TIMEOUT_S,
                # exact versions need no constraints of the machine
                env={"PIP_CONSTRAINT": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
            ).stdout
        except process.FailedError as error:
            raise ImageError(
                "pip cannot find every locked wheel:\n"
                + "\n".join(error.completed.stderr.strip().splitlines()[-3:])
                + "\n    remedy: point pip at an index that has them, or give a folder with --files"
            ) from None
    found = {}
    for item in json.loads(answer)["install"]:
        info = item["download_info"]
        digest = info.get("archive_info", {}).get("hashes", {}).get("sha256", "")
        found[digest] = info["url"]
    lost = [wheel.file for wheel in missing if wheel.sha256 not in found]
    if lost:
        raise ImageError(
            f"the index has no file with the locked hash for: {', '.join(lost)}\n"
            "    remedy: point pip at an index that has them, or give a folder with --files"
        )
    return [Download(w.file, w.sha256, found[w.sha256]) for w in missing]


def compiler(wanted: Compiler, target: Target) -> list[Download]:
    """Ask pip for the address of a compiler's wheel, which is for a host, not for the target.

    Raises:
        ImageError: as ``wheels``.
    """
    name, _, version = wanted.requirement.partition("==")
    wheel = Wheel(name=name, version=version, file=wanted.file, sha256=wanted.sha256)
    return wheels([wheel], target, wanted.platforms)
