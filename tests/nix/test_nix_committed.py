"""Generated files in the repository are what their sources give."""

from __future__ import annotations

from nixtool import REPOSITORY
from unit_template import PATH, text

from spark_appliance.lockfile import dump
from spark_appliance.workspace import open_cluster


def test_units_for_hand_written_options_are_the_plans_table() -> None:
    assert PATH.read_text(encoding="utf-8") == text(), "run: python tests/nix/unit_template.py"


def test_plan_of_the_virtual_machines_is_current() -> None:
    folder = REPOSITORY / "tests" / "vm" / "cluster"
    plan = open_cluster(folder / "cluster.yaml").require_plan()
    committed = (folder / "cluster.lock.json").read_text(encoding="utf-8")
    assert committed == dump(plan), "run: spark-appliance render tests/vm/cluster/cluster.yaml"
