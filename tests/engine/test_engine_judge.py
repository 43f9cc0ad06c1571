"""The judge itself, with a small parser in place of the engine's: no network, no venv."""

from __future__ import annotations

import argparse
import os
import stat
import sys

import engine_venv
import pytest
from engine_venv import (
    EngineUnavailableError,
    ensure_engine,
    torch_requirement,
    venv_directory,
    venv_key,
)
from hypothesis import given
from hypothesis import strategies as st
from judge import Environ, Judge, RefusedError, split_options, variables_read
from rendered import same_value, split_stated


def add_arguments(parser):
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--tp-size", "--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--fraction", type=float)
    parser.add_argument("--hosts", nargs="+", default=["a"])
    parser.add_argument("--fast", action="store_true")
    parser.add_argument("--replay", action=argparse.BooleanOptionalAction)


@pytest.fixture
def judge():
    return Judge(add_arguments, required=["--model-path", "/model"])


def test_only_what_is_given_is_reported(judge):
    verdict = judge.verdict(["--model-path", "/m", "--tp", "1", "--no-replay", "--hosts", "b", "c"])
    assert verdict["error"] is None
    assert verdict["values"] == {
        "model_path": "/m",
        "tp_size": 1,
        "replay": False,
        "hosts": ["b", "c"],
    }
    assert verdict["options"] == [
        {"flag": "--model-path", "dest": "model_path", "value": "/m"},
        {"flag": "--tp", "dest": "tp_size", "value": 1},
        {"flag": "--no-replay", "dest": "replay", "value": False},
        {"flag": "--hosts", "dest": "hosts", "value": ["b", "c"]},
    ]
    assert verdict["abbreviated"] == ["--tp"]
    assert verdict["repeated"] == []


def test_an_equals_sign_is_taken_apart(judge):
    verdict = judge.verdict(["--model-path=/m", "--tp-size=2"])
    assert verdict["values"] == {"model_path": "/m", "tp_size": 2}
    assert [option["flag"] for option in verdict["options"]] == ["--model-path", "--tp-size"]


@pytest.mark.parametrize(
    "argv",
    [
        ["--model-path", "/m", "--unknown"],
        ["--model-path", "/m", "--tp-size", "two"],
        ["--model-path", "/m", "--fast", "yes"],
        ["stray", "--model-path", "/m"],
        ["--tp-size", "2"],
        ["--help"],
        [],
    ],
)
def test_what_the_parser_refuses_is_refused(judge, argv):
    verdict = judge.verdict(argv)
    assert verdict["error"]
    assert verdict["values"] == {}


@given(
    tp=st.integers(-99, 99),
    fraction=st.floats(0, 1),
    hosts=st.lists(st.from_regex(r"[a-z][a-z0-9.]{0,8}", fullmatch=True), min_size=1),
    fast=st.booleans(),
)
def test_every_argv_is_understood_as_it_reads(tp, fraction, hosts, fast):
    judge = Judge(add_arguments, required=["--model-path", "/model"])
    argv = ["--model-path", "/m", "--tp-size", str(tp), "--fraction", repr(fraction)]
    argv += ["--hosts", *hosts, *(["--fast"] if fast else [])]
    verdict = judge.verdict(argv)
    assert verdict["error"] is None
    pairs = list(zip(split_stated(argv), verdict["options"], strict=True))
    assert all(flag == option["flag"] for (flag, _), option in pairs)
    # A list of one cannot be told from a single value by its text alone.
    assert all(
        same_value(stated, option["value"]) or option["value"] == [stated]
        for (_, stated), option in pairs
    )


@pytest.mark.parametrize(
    ("stated", "parsed", "same"),
    [
        ("600", 600.0, True),
        ("0.78", 0.78, True),
        ("4", 4, True),
        ("4", 3, False),
        ("four", 4, False),
        ("dsv4", "dsv4", True),
        ("4", "4", True),
        (True, True, True),
        (True, None, False),
        ("true", True, False),
        (["a", "b"], ["a", "b"], True),
        (["a", "b"], ["a"], False),
    ],
)
def test_same_value(stated, parsed, same):
    assert same_value(stated, parsed) is same


def test_a_value_before_any_flag_is_refused():
    with pytest.raises(RefusedError, match="before any flag"):
        split_options(["4"])


REGISTRY = """
class EnvField:
    def __init__(self, default): self.default = default
    def __set_name__(self, owner, name): self.name = name
class EnvInt(EnvField):
    def parse(self, value): return int(value)
class EnvAlias(EnvInt):
    def __init__(self, default, deprecated_name):
        super().__init__(default)
        self.deprecated_name = deprecated_name
class Gone:
    def __init__(self, note=None): self.note = note
class Envs:
    SGLANG_PORT = EnvInt(None)
    SGLANG_NEW = EnvAlias(1, deprecated_name="SGLANG_OLD")
_DEPRECATED_ENVS = {"SGLANG_GONE": Gone("No replacement.")}
"""


@pytest.fixture
def environ(tmp_path):
    source = tmp_path / "srt"
    (source / "utils").mkdir(parents=True)
    (source / "environ.py").write_text(REGISTRY)
    (source / "utils" / "net.py").write_text('import os\n\nIP = os.getenv("SGLANG_HOST_IP", "")\n')
    return Environ(source)


@pytest.mark.parametrize(
    ("name", "value", "status", "where", "problem"),
    [
        ("SGLANG_PORT", "1", "declared", "srt/environ.py:14", None),
        ("SGLANG_PORT", "x", "declared", "srt/environ.py:14", "invalid literal"),
        ("SGLANG_OLD", "1", "deprecated", None, "use SGLANG_NEW"),
        ("SGLANG_GONE", "1", "deprecated", None, "No replacement."),
        ("SGLANG_HOST_IP", "::1", "read", "srt/utils/net.py:3", None),
        ("SGLANG_NOPE", "1", "unknown", None, "nothing reads SGLANG_NOPE"),
    ],
)
def test_environ(environ, name, value, status, where, problem):
    verdict = environ.verdict(name, value)
    assert (verdict["status"], verdict["where"]) == (status, where)
    if problem is None:
        assert verdict["problem"] is None
    else:
        assert problem in verdict["problem"]


def test_only_reads_count_as_read():
    text = "\n".join(
        [
            'os.environ["SGLANG_WRITTEN"] = "1"',
            'print("SGLANG_PRINTED")',
            'a = os.environ["SGLANG_A"]',
            'b = os.environ.get("SGLANG_B", "")',
            'c = get_bool_env_var("SGLANG_C")',
            'd = os.getenv("HOME")',
        ]
    )
    assert list(variables_read(text)) == [("SGLANG_A", 3), ("SGLANG_B", 4), ("SGLANG_C", 5)]


def test_torch_is_a_cpu_build_unless_told_otherwise():
    assert torch_requirement({}, "linux") == "torch==2.13.0+cpu"
    assert torch_requirement({}, "darwin") == "torch==2.13.0"
    assert torch_requirement({"SPARK_ENGINE_TORCH": " torch==2.14.1 "}, "linux") == "torch==2.14.1"


def test_the_directory_follows_the_variables(tmp_path):
    assert venv_directory({"SPARK_ENGINE_VENV": str(tmp_path)}, "k") == tmp_path
    cached = venv_directory({"XDG_CACHE_HOME": str(tmp_path)}, "k")
    assert cached == tmp_path / "spark-appliance" / "engine-k"
    assert venv_directory({}, "k").is_absolute()


@given(st.lists(st.text(), min_size=1), st.data())
def test_the_key_changes_with_every_part(parts, data):
    index = data.draw(st.integers(0, len(parts) - 1))
    changed = [*parts[:index], parts[index] + "x", *parts[index + 1 :]]
    assert venv_key(parts) == venv_key(list(parts))
    assert venv_key(parts) != venv_key(changed)


@pytest.fixture
def fake_python(tmp_path):
    """An interpreter that makes a venv whose pip fails when a file says so."""
    script = tmp_path / "python"
    script.write_text(
        f"""#!{sys.executable}
import os, pathlib, sys
state = pathlib.Path({str(tmp_path)!r})
with (state / "calls").open("a") as calls:
    print(*sys.argv[1:], file=calls)
if sys.argv[1:3] == ["-m", "venv"]:
    venv = pathlib.Path(sys.argv[3])
    (venv / "bin").mkdir(parents=True)
    (venv / "pyvenv.cfg").touch()
    (venv / "bin" / "python").symlink_to(state / "python")
elif (state / "offline").exists():
    sys.exit("ERROR: No matching distribution found\\nERROR: try again")
"""
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return script


@pytest.fixture
def settings(tmp_path, fake_python):
    return {
        "SPARK_ENGINE_PYTHON": str(fake_python),
        "SPARK_ENGINE_VENV": str(tmp_path / "venv"),
        "PATH": os.defpath,
    }


def calls(tmp_path):
    return (tmp_path / "calls").read_text().splitlines()


def test_the_venv_is_made_once_and_again_when_something_changed(tmp_path, settings):
    said = []
    engine = ensure_engine(settings, said.append)
    assert engine.python == tmp_path / "venv" / "bin" / "python"
    installs = [line.split(":all: ")[1] for line in calls(tmp_path) if "pip install" in line]
    assert installs == [
        torch_requirement({}, sys.platform),
        f"-r {engine_venv.HERE / 'requirements.txt'}",
        "--no-deps sglang==0.5.23",
    ]
    assert len(said) == 1
    before = len(calls(tmp_path))
    assert ensure_engine(settings, said.append) == engine
    assert (len(calls(tmp_path)), len(said)) == (before, 1)
    ensure_engine({**settings, "SPARK_ENGINE_TORCH": "torch==2.14.1"}, said.append)
    assert len(calls(tmp_path)) == 2 * before
    assert len(said) == 2


def test_a_venv_without_its_stamp_is_made_again(tmp_path, settings):
    ensure_engine(settings, lambda _: None)
    before = len(calls(tmp_path))
    (tmp_path / "venv" / engine_venv.STAMP).unlink()
    ensure_engine(settings, lambda _: None)
    assert len(calls(tmp_path)) == 2 * before


def test_without_a_package_source_the_reason_says_what_to_do(tmp_path, settings):
    (tmp_path / "offline").touch()
    with pytest.raises(
        EngineUnavailableError, match=r"No matching distribution.*SPARK_ENGINE_TORCH"
    ):
        ensure_engine(settings, lambda _: None)
    assert not (tmp_path / "venv" / engine_venv.STAMP).exists()


def test_a_directory_that_is_not_a_venv_is_left_alone(tmp_path, settings):
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv" / "thesis.tex").touch()
    with pytest.raises(EngineUnavailableError, match="not a venv and not empty"):
        ensure_engine(settings, lambda _: None)
    assert (tmp_path / "venv" / "thesis.tex").exists()


def test_a_missing_interpreter_is_named(settings):
    missing = {**settings, "SPARK_ENGINE_PYTHON": "/nowhere/python"}
    with pytest.raises(EngineUnavailableError, match="/nowhere/python"):
        ensure_engine(missing, lambda _: None)
