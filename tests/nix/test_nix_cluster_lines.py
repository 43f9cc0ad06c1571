"""Nix and Python agree on which lines of a cluster file count."""

from __future__ import annotations

import pytest
from nixplans import NAMES, cluster_file
from nixtool import Nix

from spark_appliance.model.yamlfile import lines_sha256

SAME = [
    "a: 1\nb: 2\n",
    "# top\na: 1\n\n   # inside\nb: 2",
    "a: 1  # one\r\n\r\nb: 2\t# two # three\n\n",
    "a: 1 \t\nb: 2 #\n",
]
"""All say the same."""

OTHERS = [
    "a: 1\nb: 3\n",
    "b: 2\na: 1\n",
    "a: 1\n b: 2\n",
    "a: 1\nb: 2#\n",
    "a: 1\nb: '2 # two'\n",
    'a: 1\nb: 2 # "two"\n',
    "",
    "a: \u00e9 # \u00fc\n",
]
"""Each says something else."""


def test_comments_and_blank_lines_do_not_count() -> None:
    assert len({lines_sha256(text.encode()) for text in SAME}) == 1


def test_everything_else_counts() -> None:
    assert len({lines_sha256(text.encode()) for text in [SAME[0], *OTHERS]}) == len(OTHERS) + 1


@pytest.mark.nix
def test_nix_computes_the_same(nix: Nix) -> None:
    files = {f"text-{number}": text.encode() for number, text in enumerate([*SAME, *OTHERS])}
    files |= {name.replace("/", "-"): cluster_file(name).read_bytes() for name in NAMES}
    folder = nix.source.parent / "lines"
    folder.mkdir()
    for name, raw in files.items():
        (folder / name).write_bytes(raw)
    found = nix.evaluate("lines.nix", {"folder": nix.inside(folder)})
    assert found == {name: lines_sha256(raw) for name, raw in files.items()}
