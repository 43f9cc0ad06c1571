"""The engine's own parser judges every argv that this project renders."""

from __future__ import annotations

import pytest
from engine_venv import ENGINE, Engine, refusal
from rendered import published_command, rendered, same_value, split_stated

from spark_appliance.model.flags import FLAGS, VARIABLES
from spark_appliance.render.plan import ENGINE_PACKAGE

pytestmark = pytest.mark.engine

# The published command says --tp; the engine knows --tp-size and takes the prefix.
ABBREVIATIONS = {"--tp"}


@pytest.fixture(scope="module")
def nodes():
    return rendered()


@pytest.fixture(scope="module")
def verdicts(engine: Engine, nodes):
    return engine.judge({name: node.argv for name, node in nodes.items()})["argvs"]


def test_the_judge_is_the_engine_that_the_plan_is_for(engine):
    version = engine.judge()["engine"]["sglang"]
    assert f"sglang=={version}" == ENGINE
    assert ("sglang", version) == ENGINE_PACKAGE


def test_every_rendered_argv_is_judged(nodes, verdicts):
    assert set(verdicts) == set(nodes)


def test_every_rendered_argv_parses(verdicts):
    assert refusal(verdicts) == ""


def test_the_engine_reads_the_values_that_the_plan_states(nodes, verdicts):
    wrong = [
        f"{name}: {option['flag']} is {node.stated.get(option['flag'])!r} in the plan, "
        f"the engine reads {option['dest']}={option['value']!r}"
        for name, node in nodes.items()
        for option in verdicts[name]["options"]
        if not same_value(node.stated.get(option["flag"]), option["value"])
    ]
    assert wrong == []
    for name, node in nodes.items():
        assert {option["flag"] for option in verdicts[name]["options"]} == set(node.stated), name


def test_the_engine_reads_the_values_that_the_text_says(nodes, verdicts):
    wrong = [
        f"{name}: {flag} says {said!r}, the engine reads {option['dest']}={option['value']!r}"
        for name, node in nodes.items()
        for (flag, said), option in zip(
            split_stated(node.argv), verdicts[name]["options"], strict=True
        )
        if option["flag"] != flag or not same_value(said, option["value"])
    ]
    assert wrong == []


def test_each_option_alone_means_what_it_means_in_the_whole_argv(verdicts):
    for name, verdict in verdicts.items():
        alone = {option["dest"]: option["value"] for option in verdict["options"]}
        assert alone == verdict["values"], name


def test_no_flag_is_given_twice_and_none_is_abbreviated(verdicts):
    assert {name: v["repeated"] for name, v in verdicts.items() if v["repeated"]} == {}
    abbreviated = {name: set(v["abbreviated"]) - ABBREVIATIONS for name, v in verdicts.items()}
    assert {name: flags for name, flags in abbreviated.items() if flags} == {}


def test_the_published_command_means_what_we_believe(engine):
    published = published_command()
    verdict = engine.judge({"published": published["argv"]})["argvs"]["published"]
    assert verdict["error"] is None
    assert verdict["values"] == published["values"]


# Added to a good argv, each of these must be refused: without such controls a judge that accepts
# everything would look the same.
WRONG = {
    "--engram-config {}": "unrecognized arguments: --engram-config",
    "--no-such-flag": "unrecognized arguments: --no-such-flag",
    "--tool-call-parser deepseek41": "invalid choice: 'deepseek41'",
    "--fp8-gemm-backend b12x": "invalid choice: 'b12x'",
    "--max-running-requests 16.5": "invalid int value: '16.5'",
    "--mem-fraction-static most": "invalid float value: 'most'",
    "--max-total-tokens 6m": "Invalid integer value: '6m'",
    "--cuda-graph-max-bs 16": "ambiguous option: --cuda-graph-max-bs",
    "--trust-remote-code yes": "unrecognized arguments: yes",
    "--port": "expected one argument",
    "--help": "ended the program",
}


@pytest.fixture(scope="module")
def wrong(engine):
    argvs = {extra: ["--model-path", "/m", *extra.split()] for extra in WRONG}
    return engine.judge({**argvs, "no model": ["--tp", "4"]})["argvs"]


def test_the_bundled_lists_are_the_engines(engine):
    answer = engine.judge({"any": ["--model-path", "/model"]})
    assert answer["flags"] == FLAGS.read_text().splitlines()
    assert answer["variables"] == VARIABLES.read_text().splitlines()


@pytest.mark.parametrize(("extra", "message"), WRONG.items())
def test_a_wrong_argument_is_refused(wrong, extra, message):
    assert message in wrong[extra]["error"]


def test_a_missing_model_is_refused(wrong):
    assert "the following arguments are required: --model-path" in wrong["no model"]["error"]


def test_an_abbreviated_and_a_repeated_flag_are_reported(engine):
    argv = ["--model-path", "/m", "--max-running-req", "4", "--tp", "3", "--tp-size", "4"]
    verdict = engine.judge({"sloppy": argv})["argvs"]["sloppy"]
    assert verdict["error"] is None
    assert verdict["abbreviated"] == ["--max-running-req", "--tp"]
    assert verdict["repeated"] == ["--tp", "--tp-size"]
