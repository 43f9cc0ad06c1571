"""What the engine judges is everything that this project renders; needs no engine."""

from __future__ import annotations

import re

import pytest
from rendered import ROOT, published_command, rendered, rendered_argvs

from spark_appliance.profiles import bundled_names

# Read by other people's forks only; in 0.5.23 they do nothing (field notes, section 4.2).
FORKS = re.compile(
    r"DSV41_|SPARK_PREFILL_|LOOP_ABORT|MXFP8_BACKEND|PREFILL_EMPTY_CACHE_TOKENS|SGLANG_ROCE_"
)
# The engine renames SGL_* to SGLANG_* with a warning; a plan says the real name.
RETIRED_PREFIX = "SGL_"


@pytest.fixture(scope="module")
def nodes():
    return rendered()


def test_every_example_and_every_profile_is_rendered(nodes):
    folders = {path.parent.name for path in (ROOT / "examples").glob("*/cluster.yaml")}
    assert folders
    assert {name.split("/")[1] for name in nodes if name.startswith("examples/")} == folders
    profiles = {name.split("/")[1] for name in nodes if name.startswith("profiles/")}
    assert profiles == set(bundled_names())


def test_only_the_pair_is_refused_by_the_rules(nodes):
    refused = {name.split("/")[1] for name, node in nodes.items() if node.refused}
    assert refused == {"pair"}


def test_the_head_of_the_four_spark_switch_runs_the_published_command():
    published = published_command()["argv"]
    head = rendered_argvs()["examples/four-spark-switch/spark1"]
    address = published.index("--dist-init-addr") + 1
    assert head[address].endswith(":20000")
    assert [*head[:address], published[address], *head[address + 1 :]] == published


def test_no_variable_of_a_fork_is_set(nodes):
    found = {
        variable
        for node in nodes.values()
        for variable in node.env
        if FORKS.match(variable) or variable.startswith(RETIRED_PREFIX)
    }
    assert found == set()
