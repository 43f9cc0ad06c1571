"""The flake's checks `format` and `lint` see what configures their tools."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from nixtool import REPOSITORY, Nix, copy_sources

SUFFIXES = {".nix", ".py"}
CONFIGURATIONS = {"pyproject.toml", "ruff.toml", "statix.toml"}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The repository as the checks see it; that they do is compared below, where Nix is there."""
    whole, seen = tmp_path / "whole", tmp_path / "tree"
    copy_sources(whole)
    for file in whole.rglob("*"):
        if file.is_file() and (file.suffix in SUFFIXES or file.name in CONFIGURATIONS):
            target = seen / file.relative_to(whole)
            target.parent.mkdir(parents=True, exist_ok=True)
            file.rename(target)
    return seen


def test_ruff_finds_nothing_to_format_in_what_the_check_sees(tree: Path) -> None:
    ruff = shutil.which("ruff", path=f"{Path(sys.executable).parent}:/usr/bin:/usr/local/bin")
    if ruff is None:
        pytest.skip("ruff is not installed (pip install 'spark-appliance[dev]')")
    # treefmt names every file, so that no folder's own settings are left out
    files = sorted(str(file.relative_to(tree)) for file in tree.rglob("*.py"))
    assert "spark_appliance/doctor/probe/__init__.py" in files
    done = subprocess.run(
        [ruff, "format", "--check", "--no-cache", *files],
        cwd=tree,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_treefmt_finds_the_tree_in_one_way() -> None:
    """It refuses --tree-root beside tree-root-file; the file is in the tree."""
    text = (REPOSITORY / "checks" / "format.nix").read_text(encoding="utf-8")
    (name,) = re.findall(r'tree-root-file = "([^"]+)";', text)
    assert "--tree-root" not in text
    assert Path(name).suffix in SUFFIXES
    assert (REPOSITORY / name).is_file()


def test_statix_has_no_more_than_its_settings() -> None:
    """statix takes these keys alone, each a list of strings."""
    settings = tomllib.loads((REPOSITORY / "statix.toml").read_text(encoding="utf-8"))
    assert settings == {"disabled": ["bool_comparison", "repeated_keys"]}


@pytest.mark.nix
def test_the_checks_see_these_files(nix: Nix, tree: Path) -> None:
    expected = {str(file.relative_to(tree)) for file in tree.rglob("*") if file.is_file()}
    assert set(nix.evaluate("files.nix")) == expected
