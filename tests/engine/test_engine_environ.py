"""Every variable that the plan sets is one that the engine reads, with a value that it takes."""

from __future__ import annotations

import pytest
from engine_venv import Engine
from rendered import rendered

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def environments():
    return {name: node.env for name, node in rendered().items() if not node.refused}


def test_every_engine_variable_exists_and_takes_its_value(engine: Engine, environments):
    asked = {
        name: {variable: env[variable] for variable in env if variable.startswith("SGLANG_")}
        for name, env in environments.items()
    }
    answer = engine.judge(environments=asked)["environments"]
    assert set(answer) == set(environments)
    problems = {
        verdict["problem"]
        for verdicts in answer.values()
        for verdict in verdicts.values()
        if verdict["problem"]
    }
    assert problems == set()


# Variables that make the engine import a module that its wheel does not depend on.
EXTRA_MODULES = {"SGLANG_LOCAL_IP_NIC": "netifaces"}


def test_no_variable_needs_a_module_that_is_not_installed(engine, environments):
    needed = {
        EXTRA_MODULES[variable]
        for env in environments.values()
        for variable in env
        if variable in EXTRA_MODULES
    }
    assert needed - engine.dependencies() == set()


CONTROLS = [
    ("SGLANG_FLASHINFER_MOE_FUSED_FINALIZE", "0", "declared", None),
    ("SGLANG_FLASHINFER_MOE_FUSED_FINALIZE", "off", "declared", "not a valid boolean"),
    ("SGLANG_FLASHINFER_MOE_FUSED_FINALIZE", "", "declared", "not a valid boolean"),
    ("SGLANG_TCP_STORE_PORT", "29600.5", "declared", "not a valid integer"),
    ("SGLANG_CACHE_DIR", "/var/cache/sglang", "declared", None),
    ("SGLANG_HOST_IP", "10.0.0.1", "read", None),
    ("SGLANG_HEALTH_CHECK_TIMEOUT", "20", "read", None),
    ("SGLANG_DSPARK_FOLDED_SAMPLING", "2", "deprecated", "retired"),
    ("SGLANG_ROCE_GID_INDEX", "3", "unknown", "nothing reads"),
    ("SGLANG_API_KEY", "secret", "unknown", "nothing reads"),
]


@pytest.fixture(scope="module")
def controls(engine):
    asked = {f"{name}={value}": {name: value} for name, value, _, _ in CONTROLS}
    return engine.judge(environments=asked)["environments"]


@pytest.mark.parametrize(("variable", "value", "status", "problem"), CONTROLS)
def test_the_registry_tells_known_from_unknown(controls, variable, value, status, problem):
    verdict = controls[f"{variable}={value}"][variable]
    assert verdict["status"] == status
    if problem is None:
        assert verdict["problem"] is None
    else:
        assert problem in verdict["problem"]
