"""Inspect the locked wheels (`python -m audit PART`); write the result or compare with it."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from audit import elf_rules, libraries
from audit.elf_scan import scan_wheels
from audit.errors import AuditError
from audit.wheels import locked_wheels

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

HERE = Path(__file__).resolve().parent.parent
RESULTS = HERE / "audit" / "results"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one part; return its exit status (0 right, 1 problems, difference or failure)."""
    arguments = _parser().parse_args(argv)
    try:
        result = PARTS[arguments.part](arguments)
        return _deliver(arguments.part, result, check=arguments.check)
    except AuditError as error:
        print(f"audit: {error}", file=sys.stderr)
        return 1


def elf(arguments: argparse.Namespace) -> dict[str, Any]:
    """ELF closure: every DT_NEEDED has a source, nothing is declared in vain."""
    table = libraries.load(HERE / "libraries.json")
    wheels = locked_wheels(HERE / "poetry.lock")
    opens = {
        name: [one for names in sources.values() for one in names]
        for name, sources in table.opens.items()
    }
    target = tomllib.loads((HERE / "pyproject.toml").read_text())["tool"]["relock"]["target"]
    major, minor = map(int, target["glibc"].split("."))
    closure = elf_rules.judge(
        scan_wheels(arguments.wheels, wheels, opens),
        table,
        {wheel.name: wheel.file for wheel in wheels},
        (major, minor),
    )
    return closure.as_data()


PARTS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {"elf": elf}


def _deliver(part: str, result: dict[str, Any], *, check: bool) -> int:
    path = RESULTS / f"{part}.json"
    text = json.dumps(result, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
    problems = result.get("problems", [])
    for problem in problems:
        print(f"audit: {problem}", file=sys.stderr)
    if check:
        same = path.exists() and path.read_text(encoding="utf-8") == text
        print(f"{path.name}: {'as committed' if same else 'differs from the committed result'}")
        return 0 if same and not problems else 1
    path.write_text(text, encoding="utf-8")
    print(f"{path.name}: written, {len(problems)} problems")
    return 1 if problems else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="audit", description=__doc__)
    parser.add_argument("part", choices=sorted(PARTS), help="what to inspect")
    parser.add_argument(
        "--wheels",
        type=Path,
        default=os.environ.get("SGLANG_ENV_WHEELS"),
        help="folder of the wheels (default: $SGLANG_ENV_WHEELS)",
    )
    parser.add_argument("--check", action="store_true", help="compare with the committed result")
    return parser


if __name__ == "__main__":
    sys.exit(main())
