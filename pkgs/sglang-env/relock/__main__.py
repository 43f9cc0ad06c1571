"""Lock and prune (`python -m relock`), or judge the committed lock offline (`--check`)."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from relock import poetry
from relock.errors import RelockError
from relock.lockfile import content_hash, dump, header_version, read
from relock.prune import prune
from relock.target import Target

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType

HERE = Path(__file__).resolve().parent.parent


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; return its exit status (0 right, 1 wrong or failed)."""
    arguments = _parser().parse_args(argv)
    # So that a stopped run ends Poetry and removes its temporary folder.
    signal.signal(signal.SIGTERM, _stop)
    try:
        if arguments.check:
            check(arguments.project)
            print("poetry.lock is pruned and belongs to pyproject.toml")
        else:
            changed = relock(arguments.project, arguments.index, update=arguments.update)
            print("poetry.lock written" if changed else "poetry.lock: no change")
    except RelockError as error:
        print(f"relock: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("relock: stopped; poetry.lock is as it was", file=sys.stderr)
        return 130
    return 0


def relock(project: Path, index: str | None, *, update: bool) -> bool:
    """Resolve, prune, let Poetry verify, write. Return whether the file changed.

    Args:
        project: folder of pyproject.toml and poetry.lock.
        index: address of a simple index, or None for Poetry's own default.
        update: forget the locked versions and take the newest that fit; without it they are kept
            as long as they fit together.

    Raises:
        RelockError: no lock can be made; the committed one is left as it was.
    """
    source = project / "pyproject.toml"
    place = project / "poetry.lock"
    pyproject = read(source)
    target = Target.from_pyproject(pyproject)
    keep = {}
    if place.exists() and not update:
        keep = {entry["name"]: entry["version"] for entry in read(place)["package"]}
    try:
        lock = poetry.resolve(pyproject, target, index, keep)
    except RelockError as error:
        if not keep:
            raise
        print(
            f"relock: Poetry could not keep the locked versions, resolving anew ({error})",
            file=sys.stderr,
        )
        lock = poetry.resolve(pyproject, target, index, {})
    pruned = prune(lock, pyproject, target)
    pruned["metadata"]["content-hash"] = content_hash(pyproject)
    text = dump(pruned, poetry.version())
    poetry.verify(source, text)
    changed = not place.exists() or place.read_text(encoding="utf-8") != text
    if changed:
        partial = place.with_suffix(".lock.partial")
        partial.write_text(text, encoding="utf-8")
        partial.replace(place)
    return changed


def check(project: Path) -> None:
    """Prove offline that the committed lock is pruned and belongs to its pyproject.toml.

    Raises:
        RelockError: it is not; the text says what differs.
    """
    place = project / "poetry.lock"
    pyproject = read(project / "pyproject.toml")
    lock = read(place)
    text = place.read_text(encoding="utf-8")
    if lock["metadata"]["content-hash"] != content_hash(pyproject):
        raise RelockError(f"{place}: pyproject.toml changed since; run `python -m relock`")
    pruned = prune(lock, pyproject, Target.from_pyproject(pyproject))
    for before, after in zip(lock["package"], pruned["package"], strict=False):
        if before != after:
            raise RelockError(f"{place}: {before['name']} is not pruned; run `python -m relock`")
    if dump(pruned, header_version(text)) != text:
        raise RelockError(f"{place}: not as relock writes it; run `python -m relock`")


def _stop(number: int, _: FrameType | None) -> NoReturn:
    sys.exit(128 + number)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="relock", description=__doc__)
    parser.add_argument(
        "--project", type=Path, default=HERE, help="folder of pyproject.toml (default: this one)"
    )
    parser.add_argument(
        "--index",
        default=os.environ.get("RELOCK_INDEX"),
        help="address of a simple package index (default: $RELOCK_INDEX, else Poetry's own)",
    )
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--update", action="store_true", help="take the newest versions that fit")
    mode.add_argument("--check", action="store_true", help="offline: change nothing, only judge")
    return parser


if __name__ == "__main__":
    sys.exit(main())
