"""Assembling an image, as a ratio to reading, hashing and writing the same bytes.

    python benchmarks/image.py [--profile full] [--cache DIR] [--files DIR]... [--folder DIR]

Everything is on disc already and ``--jobs 1`` is used. The reference reads every input file,
hashes it, hashes as many bytes as the image has and writes them: no builder can do less. Then the
last layer alone is changed and the image built again, which takes the other layers over.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from spark_appliance.image import build, lock, plugins, sbom
from spark_appliance.image.recipe import load
from spark_appliance.image.store import CHUNK, Store, default_folder

PACKAGES = Path(__file__).parents[1] / "pkgs"
FOLDER = PACKAGES / "oci-image"


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--profile", default="full")
    parser.add_argument("--cache", type=Path, default=default_folder())
    parser.add_argument("--files", type=Path, action="append", default=[])
    parser.add_argument("--folder", type=Path, help="where to write (needs twice the image)")
    options = parser.parse_args()
    recipe = load(FOLDER / "recipe.toml")
    wheel_lock = FOLDER / recipe.wheels
    pinned = lock.load(FOLDER / "image.lock.json")
    selection = lock.select(recipe, options.profile, pinned, lock.load_wheels(wheel_lock))
    store = Store(options.cache, options.files)
    request = build.Request(recipe, pinned, selection, (), sbom.read_licences(wheel_lock))
    plugin = plugins.load(PACKAGES / "spark-tp-pad")
    changed = build.Request(recipe, pinned, selection, (plugin,), request.licences)
    inputs = [store.verified(item) for item in (*selection.debs, *selection.wheels)]  # warms
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        out = Path(name) / "image"
        assemble = _time(lambda: build.build(request, store, out, workers=1))
        size = sum(path.stat().st_size for path in (out / "blobs/sha256").iterdir())
        glue = _time(lambda: build.build(changed, store, out, workers=1))
        shutil.rmtree(out)
        reference = _time(lambda: _limit(inputs, size, Path(name) / "limit"))
    print(f"profile {options.profile}: {size / 1e9:.2f} GB from {len(inputs)} files")
    print(f"{'':<34}{'wall s':>8}{'CPU s':>8}{'ratio':>8}{'CPU ratio':>11}")
    for title, (wall, cpu) in (
        ("read + hash + write (limit)", reference),
        ("assemble", assemble),
        ("again, last layer changed", glue),
    ):
        print(
            f"{title:<34}{wall:>8.1f}{cpu:>8.1f}{wall / reference[0]:>8.2f}"
            f"{cpu / reference[1]:>11.2f}"
        )


def _time(work: Callable[[], object]) -> tuple[float, float]:
    """Return wall and CPU seconds, processes that have ended included."""
    begin, used = time.perf_counter(), sum(os.times()[:4])
    work()
    return time.perf_counter() - begin, sum(os.times()[:4]) - used


def _limit(inputs: list[Path], size: int, out: Path) -> None:
    total = hashlib.sha256()
    for path in inputs:
        with path.open("rb") as file:
            while chunk := file.read(CHUNK):
                total.update(chunk)
    block = os.urandom(CHUNK)
    with out.open("wb") as file:
        for begin in range(0, size, CHUNK):
            part = block[: min(CHUNK, size - begin)]
            total.update(part)
            file.write(part)
    print(f"limit hash {total.hexdigest()[:12]}", file=sys.stderr)
    out.unlink()


if __name__ == "__main__":
    main()
