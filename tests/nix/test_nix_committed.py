"""Generated files in the repository are what their sources give."""

from __future__ import annotations

from pathlib import Path

import pytest
from nixtool import REPOSITORY
from unit_template import ENGINE, UNITS, files

from spark_appliance.lockfile import dump
from spark_appliance.workspace import open_cluster


@pytest.mark.parametrize("path", [UNITS, ENGINE], ids=lambda path: path.name)
def test_what_hand_written_options_get_is_the_plans(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text == files()[path], "run: python tests/nix/unit_template.py"


def test_plan_of_the_virtual_machines_is_current() -> None:
    folder = REPOSITORY / "tests" / "vm" / "cluster"
    plan = open_cluster(folder / "cluster.yaml").require_plan()
    committed = (folder / "cluster.lock.json").read_text(encoding="utf-8")
    assert committed == dump(plan), "run: spark-appliance render tests/vm/cluster/cluster.yaml"
