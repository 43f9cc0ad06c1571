"""The node programs run on a bare Python: nothing but the standard library."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import spark_appliance
from spark_appliance import node_zipapp

PACKAGE = Path(spark_appliance.__file__).parent

IMPORT_ALL = """
import importlib, pkgutil, sys
import spark_appliance.node
package = spark_appliance.node
names = [m.name for m in pkgutil.walk_packages(package.__path__, package.__name__ + ".")]
for name in names:
    if not name.endswith("__main__"):
        importlib.import_module(name)
ours = {n for n in sys.modules if n == "spark_appliance" or n.startswith("spark_appliance.")}
foreign = sorted(
    n for n in sys.modules
    if n not in ours and n.split(".")[0] not in sys.stdlib_module_names and n != "__main__"
)
outside = sorted(
    n for n in ours
    if n not in ("spark_appliance", "spark_appliance.names")
    and not n.startswith("spark_appliance.node.") and n != "spark_appliance.node"
)
print(len(names), foreign, outside)
"""


def python(*arguments: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    # -S: no site-packages, so a third-party import fails instead of being found
    environment = {"PATH": os.environ["PATH"]}
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    return subprocess.run(
        [sys.executable, "-S", "-B", *arguments],
        capture_output=True,
        text=True,
        env=environment,
        timeout=60,
        check=False,
    )


def test_every_module_imports_with_the_standard_library_alone() -> None:
    done = python("-c", IMPORT_ALL, path=PACKAGE.parent)
    assert done.returncode == 0, done.stderr
    count, foreign, outside = done.stdout.split(" ", 1)[0], "[]", "[]"
    assert int(count) > 20
    assert done.stdout.split(" ", 1)[1].strip() == f"{foreign} {outside}"


def test_zipapp_is_reproducible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = node_zipapp.build()
    copied = tmp_path / "spark_appliance"
    shutil.copytree(PACKAGE, copied, ignore=shutil.ignore_patterns("__pycache__"))
    for file in copied.rglob("*.py"):
        os.utime(file, (1, 2_000_000_000))
        file.chmod(0o600)
    monkeypatch.setattr(node_zipapp.spark_appliance, "__file__", str(copied / "__init__.py"))
    assert node_zipapp.build() == first


def test_zipapp_holds_the_node_programs_only(tmp_path: Path) -> None:
    file = tmp_path / "spark-node.pyz"
    file.write_bytes(node_zipapp.build())
    assert file.read_bytes().startswith(b"#!/usr/bin/env python3\n")
    with zipfile.ZipFile(file) as archive:
        names = archive.namelist()
    assert names == sorted(names)
    assert "spark_appliance/node/supervisor/head.py" in names
    top = {name for name in names if not name.startswith("spark_appliance/node/")}
    assert top == {"__main__.py", "spark_appliance/__init__.py", "spark_appliance/names.py"}


def test_zipapp_runs_without_anything_installed(tmp_path: Path) -> None:
    file = tmp_path / "spark-node.pyz"
    file.write_bytes(node_zipapp.build())
    done = python("-I", str(file), "--version")
    assert (done.returncode, done.stdout) == (0, f"spark-node {spark_appliance.__version__}\n")
    done = python("-I", str(file), "--root", str(tmp_path), "--node", "spark1", "status")
    assert done.returncode == 2
    assert done.stderr.startswith(f"<3>{tmp_path}/etc/spark/plan.json: cannot read the plan")
    assert "Traceback" not in done.stderr
