from __future__ import annotations

import json
import signal
import threading
import time
from pathlib import Path

import pytest
from fleet_world import World

from spark_appliance.errors import InputError
from spark_appliance.fleet.crew import Crew, FleetError
from spark_appliance.fleet.evidence import RunFolder
from spark_appliance.fleet.redact import redact
from spark_appliance.fleet.remote import AS_ROOT, NodeGoneError, Rehearsal, StepError


def test_the_exact_command_line(world: World) -> None:
    rehearsal = Rehearsal()
    remote = world.crew(rehearsal=rehearsal).remotes[0]
    remote.run("look", ["systemctl", "stop", "--", "spark.target"], seconds=5, root=True)
    control = world.base / "run" / "spark-appliance" / "%C"
    assert rehearsal.commands == [
        (
            "spark1",
            "look",
            (
                "ssh",
                "-T",
                *("-o", "BatchMode=yes", "-o", "ConnectTimeout=10"),
                *("-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4"),
                *("-o", "ControlMaster=auto", "-o", "ControlPersist=60"),
                *("-o", f"ControlPath={control}"),
                "--",
                "spark1",
                f"sh -c '{AS_ROOT[2]}' sh systemctl stop -- spark.target",
            ),
            None,
        )
    ]
    assert AS_ROOT[2] == 'if [ "$(id -u)" = 0 ]; then exec "$@"; fi; exec sudo -n -- "$@"'


def test_a_gone_node_is_named_and_the_others_go_on(world: World) -> None:
    world.set("spark2", "gone")
    results, failures = world.crew().gather(
        lambda remote: remote.run("say", ["echo", remote.name], seconds=30).stdout
    )
    assert results == {"spark1": "spark1\n", "spark3": "spark3\n"}
    assert isinstance(failures["spark2"], NodeGoneError)
    assert str(failures["spark2"]).startswith("spark2: say: no SSH connection: ")
    assert "No route to host" in str(failures["spark2"])


def test_a_step_past_its_deadline_is_named_and_killed(world: World) -> None:
    remote = world.crew().get("spark3")
    began = time.monotonic()
    with pytest.raises(NodeGoneError, match=r"^spark3: wait: no end after 0\.5 s"):
        remote.run("wait", ["sleep", "600"], seconds=0.5)
    assert time.monotonic() - began < 30


def test_a_failed_step_says_what_the_node_said(world: World) -> None:
    remote = world.crew().remotes[0]
    script = "echo one >&2; echo 'the reason' >&2; exit 7"
    with pytest.raises(StepError, match=r"^spark1: try: the reason$"):
        remote.run("try", ["sh", "-c", script], seconds=30)
    answer = remote.run("try", ["sh", "-c", script], seconds=30, check=False)
    assert (answer.status, answer.stderr) == (7, "one\nthe reason\n")


def test_sudo_that_wants_a_password_is_explained(world: World) -> None:
    remote = world.crew().remotes[0]
    script = "echo 'sudo: a password is required' >&2; exit 1"
    with pytest.raises(StepError, match="let your user use sudo there without a password"):
        remote.run("try", ["sh", "-c", script], seconds=30)


def test_everything_is_written_down_without_keys(world: World, tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "runs", "test", world.plan, ["spark-appliance", "test"], 0)
    assert folder.path.name == "19700101T000000Z-test"
    crew = world.crew(folder)
    remote = crew.remotes[0]
    log = world.node("spark1") / "log"
    log.write_text("api_key='s3cret', port=1\n")
    remote.run("print it", ["cat", str(log)], seconds=30)
    remote.run("feed it", ["cat"], seconds=30, text="s3cret on stdin")
    with pytest.raises(StepError):
        remote.run("fail", ["sh", "-c", "echo no >&2; exit 3"], seconds=30)
    folder.finish("failed", {"spark1": "no"})
    lines = [json.loads(line) for line in (folder.path / "commands.jsonl").read_text().splitlines()]
    assert [(x["node"], x["step"], x["status"]) for x in lines] == [
        ("spark1", "print it", 0),
        ("spark1", "feed it", 0),
        ("spark1", "fail", 3),
    ]
    assert lines[1]["input"]["bytes"] == 15
    assert (folder.path / lines[2]["stderr"]).read_text() == "no\n"
    assert all(line["argv"][0] == "ssh" and line["seconds"] >= 0 for line in lines)
    written = {p.name: p.read_text() for p in folder.path.iterdir()}
    del written["002-spark1-feed-it.stdout"]  # the test itself echoes its input
    assert not [name for name, text in written.items() if "s3cret" in text]
    assert "api_key=***, port=1" in written["001-spark1-print-it.stdout"]
    assert json.loads(written["result.json"])["failures"] == {"spark1": "no"}


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("'api_key': 'abc', 'port': 1", "'api_key': ***, 'port': 1"),
        ('{"api_key": "abc"}', '{"api_key": ***}'),
        (
            "ServerArgs(api_key='abc', admin_api_key=None)",
            "ServerArgs(api_key=***, admin_api_key=None)",
        ),
        ("--api-key abc --port 1", "--api-key *** --port 1"),
        ("['--api-key', 'abc']", "['--api-key', ***]"),
        (r"""['--api-key', 'a\'b"c d', '--port']""", "['--api-key', ***, '--port']"),
        (r"'--api-key=a\'b', 'x'", "'--api-key=***', 'x'"),
        (
            'RouterConfig { api_key: Some("topsecret"), x: 1 }',
            "RouterConfig { api_key: Some(***), x: 1 }",
        ),
        (r"""{'api_key': 'it\'s"top secret', 'x': 1}""", "{'api_key': ***, 'x': 1}"),
        (r'{"api_key": "top\"secret", "x": 1}', '{"api_key": ***, "x": 1}'),
        ('api_keys: ["top]secret", "b"], x: 1', "api_keys: ***, x: 1"),
        ("api_key='cut off\nnext line", "api_key=***\nnext line"),
        ("Authorization: Bearer abc.def", "Authorization: Bearer ***"),
        ("api_key=None", "api_key=None"),
        ("the key file is /etc/spark/api-key", "the key file is /etc/spark/api-key"),
    ],
)
def test_keys_are_taken_out(text: str, clean: str) -> None:
    assert redact(text) == clean


def test_an_interrupt_ends_every_session(world: World) -> None:
    crew = world.crew()
    running = threading.Barrier(4)

    def work(remote: object) -> None:
        running.wait(30)
        remote.run("wait", ["sleep", "600"], seconds=600)  # type: ignore[attr-defined]

    def interrupt() -> None:
        running.wait(30)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)  # type: ignore[arg-type]

    thread = threading.Thread(target=interrupt)
    thread.start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        crew.gather(work)
    thread.join()
    assert time.monotonic() - began < 60
    with pytest.raises(Exception):  # noqa: B017 - Stopped: nothing starts any more
        crew.remotes[0].run("later", ["echo"], seconds=30)


def test_unknown_nodes_are_refused(world: World) -> None:
    with pytest.raises(InputError, match="use one of spark1, spark2, spark3"):
        Crew.of(world.plan, nodes=["spark9"])


def test_each_raises_once_with_every_failure(world: World) -> None:
    world.set("spark1", "gone")
    world.set("spark3", "gone")
    with pytest.raises(FleetError) as caught:
        world.crew().each(lambda remote: remote.run("say", ["true"], seconds=30))
    assert list(caught.value.failures) == ["spark1", "spark3"]


def test_commands_that_are_followed_are_written_down(world: World, tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "runs", "test", world.plan, [])
    remote = world.crew(folder).remotes[0]
    with remote.lines("to the end", ["echo", "one"], seconds=30) as lines:
        assert list(lines) == ["one"]
    with remote.lines("left", ["sh", "-c", "echo one; sleep 600"], seconds=30) as lines:
        assert next(lines) == "one"
    with (
        pytest.raises(StepError, match="spark1: bad: no"),
        remote.lines("bad", ["sh", "-c", "echo no >&2; exit 3"], seconds=30) as lines,
    ):
        list(lines)
    with (
        pytest.raises(NodeGoneError),
        remote.lines("late", ["sleep", "600"], seconds=0.3) as lines,
    ):
        list(lines)
    world.set("spark1", "gone")
    with pytest.raises(NodeGoneError), remote.lines("lost", ["true"], seconds=30) as lines:
        list(lines)
    written = [json.loads(x) for x in (folder.path / "commands.jsonl").read_text().splitlines()]
    assert [(x["step"], x["status"]) for x in written] == [
        ("to the end", 0),
        ("left", None),
        ("bad", 3),
        ("late", None),
        ("lost", 255),
    ]
    assert written[0]["argv"] == list(remote.host.argv(["echo", "one"]))
    assert [x["error"] is None for x in written] == [True, True, True, False, False]
    assert "not finished after 0.3 s" in written[3]["error"]
    assert (folder.path / written[2]["stderr"]).read_text() == "no\n"
    assert all(x["seconds"] >= 0 and "stdout" not in x for x in written)
