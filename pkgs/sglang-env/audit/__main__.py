"""Inspect the locked wheels (`python -m audit PART`); write the result or compare with it."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from audit import elf_rules, gpu_rules, gpu_scan, libraries
from audit import files as files_audit
from audit import index as index_audit
from audit import sbom as sbom_audit
from audit.elf_scan import scan_wheels
from audit.errors import AuditError
from audit.metadata import Licence, read_licences
from audit.wheels import locked_wheels

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

HERE = Path(__file__).resolve().parent.parent
RESULTS = HERE / "audit" / "results"
SITE = "opt/sglang/lib/python3.13/site-packages"
"""Where the container image has its wheels."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one part; return its exit status (0 right, 1 problems, difference or failure)."""
    arguments = _parser().parse_args(argv)
    try:
        if arguments.root is not None and arguments.part != "gpu":
            raise AuditError("--root is for the part gpu")
        if arguments.root is not None:
            return _show(gpu(arguments))
        if arguments.part in NEEDS_WHEELS and arguments.wheels is None:
            raise AuditError("no folder of wheels; give --wheels DIR or $SGLANG_ENV_WHEELS")
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


def gpu(arguments: argparse.Namespace) -> dict[str, Any]:
    """GPU code: what runs on sm_121, and why the rest does not matter."""
    exceptions = json.loads((HERE / "audit" / "gpu_exceptions.json").read_text(encoding="utf-8"))
    if arguments.root is not None:
        site = arguments.root / SITE
        # the image leaves some of these files out
        present = {path: why for path, why in exceptions.items() if (site / path).is_file()}
        return gpu_rules.judge(
            gpu_scan.scan_root(arguments.root, site, arguments.cuobjdump), present
        )
    wheels = locked_wheels(HERE / "poetry.lock")
    return gpu_rules.judge(
        gpu_scan.scan_wheels(arguments.wheels, wheels, arguments.cuobjdump), exceptions
    )


def index(arguments: argparse.Namespace) -> dict[str, Any]:
    """Index: every locked file is there, with the locked hash, not yanked."""
    wheels = locked_wheels(HERE / "poetry.lock")
    return index_audit.judge(list(index_audit.ask(_index(arguments), wheels)))


def licences(arguments: argparse.Namespace) -> dict[str, Any]:
    """Licences, as the wheels state them."""
    found = read_licences(arguments.wheels, locked_wheels(HERE / "poetry.lock"))
    return {
        "packages": {name: licence.as_data() for name, licence in found.items()},
        "unstated": [name for name, one in found.items() if not one.stated],
    }


def files(arguments: argparse.Namespace) -> dict[str, Any]:
    """Files: no path comes from two wheels once the declared strays are dropped."""
    table = libraries.load(HERE / "libraries.json")
    return files_audit.judge(
        files_audit.scan(arguments.wheels, locked_wheels(HERE / "poetry.lock")), table
    )


def sbom(_: argparse.Namespace) -> str:
    """Bill of materials, from the lock and the committed licences."""
    stated = json.loads((RESULTS / "licences.json").read_text(encoding="utf-8"))["packages"]
    return sbom_audit.build(
        tomllib.loads((HERE / "poetry.lock").read_text(encoding="utf-8")),
        tomllib.loads((HERE / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["poetry"],
        {name: Licence.from_data(one) for name, one in stated.items()},
    )


def download(arguments: argparse.Namespace) -> None:
    """Fetch the locked wheels into the folder (4.1 GB); goes on where it was stopped."""
    wheels = locked_wheels(HERE / "poetry.lock")
    for file, left in index_audit.download(_index(arguments), wheels, arguments.wheels):
        print(f"{file} ({left} left)", flush=True)


PARTS: dict[str, Callable[[argparse.Namespace], dict[str, Any] | str | None]] = {
    "download": download,
    "elf": elf,
    "files": files,
    "gpu": gpu,
    "index": index,
    "licences": licences,
    "sbom": sbom,
}
NEEDS_WHEELS = {"download", "elf", "files", "gpu", "licences"}


def _deliver(part: str, result: dict[str, Any] | str | None, *, check: bool) -> int:
    """Write the result, or with `check` compare it with the committed one."""
    if result is None:
        return 0
    problems = [] if isinstance(result, str) else result.get("problems", [])
    if isinstance(result, str):
        path, text = RESULTS / f"{part}.cdx.json", result
    else:
        path = RESULTS / f"{part}.json"
        text = json.dumps(result, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
    for problem in problems:
        print(f"audit: {problem}", file=sys.stderr)
    if check:
        same = path.exists() and path.read_text(encoding="utf-8") == text
        print(f"{path.name}: {'as committed' if same else 'differs from the committed result'}")
        return 0 if same and not problems else 1
    RESULTS.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8")
    print(f"{path.name}: written, {len(problems)} problems")
    return 1 if problems else 0


def _show(result: dict[str, Any]) -> int:
    """Print what was found in a root; the committed results are of the wheels."""
    print(json.dumps(result, indent=1, sort_keys=True, ensure_ascii=False))
    for problem in result["problems"]:
        print(f"audit: {problem}", file=sys.stderr)
    return 1 if result["problems"] else 0


def _index(arguments: argparse.Namespace) -> str:
    if not arguments.index:
        raise AuditError("no index; give --index ADDRESS or $RELOCK_INDEX (a simple index)")
    return str(arguments.index)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="audit", description=__doc__)
    parser.add_argument("part", choices=sorted(PARTS), help="what to inspect")
    parser.add_argument(
        "--wheels",
        type=Path,
        default=os.environ.get("SGLANG_ENV_WHEELS"),
        help="folder of the wheels (default: $SGLANG_ENV_WHEELS)",
    )
    parser.add_argument(
        "--index",
        default=os.environ.get("RELOCK_INDEX"),
        help="address of a simple index, for `index` and `download` (default: $RELOCK_INDEX)",
    )
    parser.add_argument(
        "--cuobjdump",
        type=Path,
        default=os.environ.get("CUOBJDUMP", "cuobjdump"),
        help="NVIDIA's cuobjdump, for `gpu` (default: $CUOBJDUMP, else from PATH)",
    )
    parser.add_argument(
        "--root",
        type=Path,
        help="for `gpu`: an unpacked container image instead of the wheels; prints the result",
    )
    parser.add_argument("--check", action="store_true", help="compare with the committed result")
    return parser


if __name__ == "__main__":
    sys.exit(main())
