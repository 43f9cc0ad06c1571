from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from spark_appliance import node_zipapp
from spark_appliance.node.errors import NodeError
from spark_appliance.node.generations import cli, disk, store, switch
from spark_appliance.node.generations.store import Store
from spark_appliance.node.process import Completed


def bundle(tree: dict[str, str], label: str = "a", **extra: Any) -> str:
    contents = {hashlib.sha256(t.encode()).hexdigest(): t.encode() for t in tree.values()}
    return json.dumps(
        {
            "version": 1,
            "label": label,
            "files": [
                {
                    "path": path,
                    "kind": "link" if text.startswith("->") else "file",
                    "sha256": hashlib.sha256(text.encode()).hexdigest(),
                    "mode": "0644",
                    "owner": "root",
                    "group": "root",
                }
                for path, text in tree.items()
            ],
            "actions": [],
            "watches": [],
            "contents": {name: base64.b64encode(c).decode() for name, c in contents.items()},
            **extra,
        }
    )


ONE = {"/etc/a/one": "1\n", "/etc/a/b/two": "2\n", "/usr/local/x": "x\n", "/etc/l": "->a/one"}
TWO = {"/etc/a/one": "11\n", "/etc/c/three": "3\n", "/usr/local/x": "x\n"}


class Calls:
    """A runner that records, and fails for words that the test names."""

    def __init__(self, *failing: str) -> None:
        self.argvs: list[tuple[str, ...]] = []
        self.failing = failing

    def __call__(self, argv: Sequence[str], *, seconds: float) -> Completed:
        assert seconds > 0
        self.argvs.append(tuple(argv))
        failed = any(word in argv for word in self.failing)
        return Completed(tuple(argv), 1 if failed else 0, "", "no" if failed else "")


def call(root: Path, *words: str, runner: Calls | None = None) -> dict[str, Any]:
    args = cli._parser().parse_args(["--root", str(root), *words])
    return cli.execute(args, runner or Calls())


def apply(root: Path, tree: dict[str, str], *words: str, **extra: Any) -> dict[str, Any]:
    path = root.parent / "bundle.json"
    path.write_text(bundle(tree, **extra))
    return call(root, "apply", "--bundle", str(path), *words)


def tree(root: Path) -> dict[str, str]:
    result = {}
    for top in ("etc", "usr"):
        for path in sorted((root / top).rglob("*")):
            name = "/" + str(path.relative_to(root))
            if path.is_symlink():
                result[name] = str(path.readlink())
            elif path.is_file():
                result[name] = path.read_text()
    return result


@pytest.fixture(autouse=True)
def _no_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    # a crash is an exception here: the disk keeps everything, flushed or not
    monkeypatch.setattr(disk.os, "fsync", lambda _: None)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "root"
    (path / "etc").mkdir(parents=True)
    return path


def test_apply_writes_exactly_the_files(root: Path) -> None:
    answer = apply(root, ONE)
    assert tree(root) == ONE
    assert (answer["current"], answer["confirmed"]) == (1, 1)
    assert {c["path"]: c["change"] for c in answer["changes"]} == dict.fromkeys(ONE, "create")
    assert (root / "etc/a/one").stat().st_mode & 0o7777 == 0o644


def test_applying_the_same_again_changes_nothing(root: Path) -> None:
    apply(root, ONE)
    before = {p: p.stat().st_mtime_ns for p in (root / "etc").rglob("*") if p.is_file()}
    answer = apply(root, ONE, label="another label")
    assert answer["changes"] == []
    assert answer["current"] == 1
    assert before == {p: p.stat().st_mtime_ns for p in before}


def test_what_the_next_generation_lacks_is_removed_and_rollback_brings_it_back(root: Path) -> None:
    apply(root, ONE)
    apply(root, TWO)
    assert tree(root) == TWO
    call(root, "rollback")
    assert tree(root) == ONE
    assert call(root, "list")["current"] == 1
    with pytest.raises(NodeError, match="no earlier generation"):
        call(root, "rollback")
    call(root, "rollback", "--to", "2")
    assert tree(root) == TWO


def test_foreign_files_are_refused_then_adopted_then_given_back(root: Path) -> None:
    (root / "etc/a").mkdir()
    (root / "etc/a/one").write_text("the owner's\n")
    (root / "etc/a/one").chmod(0o600)
    with pytest.raises(NodeError, match="/etc/a/one: is not ours"):
        apply(root, ONE)
    assert tree(root) == {"/etc/a/one": "the owner's\n"}
    apply(root, ONE, "--adopt")
    assert tree(root) == ONE
    call(root, "uninstall")
    assert tree(root) == {"/etc/a/one": "the owner's\n"}
    assert (root / "etc/a/one").stat().st_mode & 0o7777 == 0o600
    assert not (root / "var/lib/spark/generations").exists()


def test_an_adopted_file_comes_back_when_a_later_generation_drops_it(root: Path) -> None:
    (root / "etc/a/b").mkdir(parents=True)
    (root / "etc/a/b/two").write_text("the owner's\n")
    apply(root, ONE, "--adopt")
    apply(root, TWO)
    assert tree(root) == {**TWO, "/etc/a/b/two": "the owner's\n"}


def test_files_that_were_there_with_our_content_stay(root: Path) -> None:
    (root / "etc/l").symlink_to("->a/one")
    apply(root, ONE)
    call(root, "uninstall")
    assert tree(root) == {"/etc/l": "->a/one"}


def test_edited_files_are_refused_and_uninstall_puts_them_aside(root: Path) -> None:
    apply(root, ONE)
    (root / "etc/a/one").write_text("edited\n")
    assert call(root, "list")["drift"] == [
        {"path": "/etc/a/one", "change": "replace", "foreign": False}
    ]
    with pytest.raises(NodeError, match="edited on the node"):
        apply(root, TWO)
    assert tree(root)["/etc/a/one"] == "edited\n"
    call(root, "uninstall")
    assert tree(root) == {"/etc/a/one.spark-saved": "edited\n"}


def test_folders_of_ours_go_and_folders_of_others_stay(root: Path) -> None:
    (root / "etc/a").mkdir()
    apply(root, ONE)
    call(root, "uninstall")
    assert sorted(p.name for p in (root / "etc").iterdir()) == ["a"]
    assert not (root / "usr").exists()


def test_the_diff_says_what_would_change(root: Path) -> None:
    apply(root, ONE)
    path = root.parent / "bundle.json"
    path.write_text(bundle(TWO))
    answer = call(root, "diff", "--bundle", str(path))
    assert {c["path"]: c["change"] for c in answer["changes"]} == {
        "/etc/a/one": "replace",
        "/etc/a/b/two": "remove",
        "/etc/c/three": "create",
        "/etc/l": "remove",
    }
    assert "-1\n+11\n" in answer["diff"]
    assert tree(root) == ONE


def test_contradicting_files_of_others_are_named(root: Path) -> None:
    (root / "etc/netplan").mkdir()
    (root / "etc/netplan/40-cx7.yaml").write_text("ethernets:\n  enp1s0f0np0: {}\n")
    watch = {"pattern": "/etc/netplan/*.yaml", "words": ["enp1s0f0np0"], "advice": "remove it"}
    answer = apply(root, ONE, watches=[watch])
    assert answer["warnings"] == ["/etc/netplan/40-cx7.yaml names enp1s0f0np0: remove it"]


def crash_after(monkeypatch: pytest.MonkeyPatch, steps: int) -> Callable[[], int]:
    """Make the n-th write or removal of the process die, as if the power went."""
    count = 0

    class Power(BaseException):
        pass

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        def call_it(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if count > steps:
                raise Power
            return function(*args, **kwargs)

        return call_it

    for module in (switch, store):
        monkeypatch.setattr(module, "put", wrap(disk.put))
    monkeypatch.setattr(switch, "remove", wrap(disk.remove))
    crash_after.error = Power  # type: ignore[attr-defined]
    return lambda: count


@pytest.mark.parametrize("steps", range(14))
@pytest.mark.parametrize("then", ["apply", "recover", "rollback", "uninstall", "other"])
def test_a_power_cut_at_any_write_is_completed_or_taken_back(
    root: Path, steps: int, then: str
) -> None:
    (root / "etc/c").mkdir()
    (root / "etc/c/three").write_text("the owner's\n")
    apply(root, ONE)
    before = tree(root)
    with pytest.MonkeyPatch.context() as patch:
        crash_after(patch, steps)
        try:
            apply(root, TWO, "--adopt", "--return-after", "60")
        except BaseException as error:
            if type(error).__name__ != "Power":
                raise
    # every file is whole, whatever was cut off
    assert set(tree(root).values()) <= {*ONE.values(), *TWO.values(), "the owner's\n"}
    if then == "apply":
        apply(root, TWO, "--adopt")
        assert tree(root) == TWO
        assert call(root, "list")["confirmed"] == call(root, "list")["current"]
        call(root, "uninstall")
        assert tree(root) == {"/etc/c/three": "the owner's\n"}
    elif then == "recover":
        call(root, "recover")
        assert tree(root) == before
        assert call(root, "list")["switching"] is None
    elif then == "rollback":
        call(root, "rollback", "--to", "1", "--adopt")
        assert tree(root) == before
    elif then == "uninstall":
        call(root, "uninstall")
        assert tree(root) == {"/etc/c/three": "the owner's\n"}
    else:
        apply(root, {"/etc/d": "d\n"}, "--adopt")
        assert tree(root) == {"/etc/d": "d\n", "/etc/c/three": "the owner's\n"}


@pytest.mark.parametrize("first", range(4, 14, 3))
@pytest.mark.parametrize("second", range(14))
@pytest.mark.parametrize("words", [["recover"], ["uninstall"]], ids=lambda w: w[0])
def test_a_second_power_cut_while_going_back_is_no_worse(
    root: Path, first: int, second: int, words: list[str]
) -> None:
    (root / "etc/c").mkdir()
    (root / "etc/c/three").write_text("the owner's\n")
    apply(root, ONE)
    before = tree(root)
    for steps, command in ((first, None), (second, words)):
        with pytest.MonkeyPatch.context() as patch:
            crash_after(patch, steps)
            try:
                if command is None:
                    apply(root, TWO, "--adopt", "--return-after", "60")
                else:
                    call(root, *command)
            except BaseException as error:
                if type(error).__name__ != "Power":
                    raise
    call(root, *words)
    after = {"/etc/c/three": "the owner's\n"} if words == ["uninstall"] else before
    assert tree(root) == after


def test_the_crash_test_reaches_the_last_write(root: Path) -> None:
    (root / "etc/c").mkdir()
    (root / "etc/c/three").write_text("the owner's\n")
    apply(root, ONE)
    with pytest.MonkeyPatch.context() as patch:
        count = crash_after(patch, 1000)
        apply(root, TWO, "--adopt", "--return-after", "60")
    assert 10 <= count() <= 14


def test_a_change_on_trial_goes_back_unless_it_is_confirmed(root: Path) -> None:
    apply(root, ONE)
    apply(root, TWO, "--return-after", "60")
    listing = call(root, "list")
    assert (listing["current"], listing["confirmed"]) == (2, 1)
    call(root, "return")
    assert tree(root) == ONE
    apply(root, TWO, "--return-after", "60")
    call(root, "confirm")
    call(root, "return")
    call(root, "recover")
    assert tree(root) == TWO


def test_a_rollback_never_leads_to_what_was_given_up(root: Path) -> None:
    apply(root, ONE)
    apply(root, TWO, "--return-after", "60")
    call(root, "return")
    apply(root, TWO)
    assert [item["number"] for item in call(root, "list")["generations"]] == [1, 3]
    call(root, "rollback")
    assert tree(root) == ONE


def test_a_first_change_on_trial_leaves_nothing_behind(root: Path) -> None:
    apply(root, ONE, "--return-after", "60")
    call(root, "recover")
    assert tree(root) == {}


def live(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    """Let a fake root count as the real one, so that commands run (through the recorder)."""
    monkeypatch.setattr(cli, "Store", lambda _: Store(root))


def live_call(*words: str, runner: Calls) -> dict[str, Any]:
    return cli.execute(cli._parser().parse_args(list(words)), runner)


ACTIONS = [
    {
        "argv": ["systemctl", "daemon-reload"],
        "paths": ["/etc/a/"],
        "needs": None,
        "seconds": 60,
        "boot": True,
    },
    {
        "argv": ["networkctl", "reload"],
        "paths": ["/usr/local/"],
        "needs": None,
        "seconds": 60,
        "boot": False,
    },
]


def test_the_timer_is_armed_before_anything_changes(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live(monkeypatch, root)
    path = root.parent / "bundle.json"
    path.write_text(bundle(ONE, actions=ACTIONS))
    runner = Calls("systemd-run")
    with pytest.raises(NodeError, match="nothing was changed"):
        live_call("apply", "--bundle", str(path), "--return-after", "300", runner=runner)
    assert tree(root) == {}
    runner = Calls()
    live_call("apply", "--bundle", str(path), "--return-after", "300", runner=runner)
    program = "PYTHONPATH=/var/lib/spark/generations/program.pyz"
    module = ("/usr/bin/python3", "-m", "spark_appliance.node.generations")
    assert runner.argvs == [
        ("systemctl", "stop", "spark-return.timer"),
        ("systemctl", "reset-failed", "spark-return.service"),
        (
            "systemd-run",
            "--unit=spark-return",
            "--on-active=300s",
            "--timer-property=AccuracySec=1s",
            "--collect",
            "--",
            "/usr/bin/env",
            program,
            *module,
            "return",
        ),
        ("systemctl", "daemon-reload"),
        ("networkctl", "reload"),
    ]


def test_the_timer_is_wound_up_only_while_something_is_on_trial(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live(monkeypatch, root)
    path = root.parent / "bundle.json"
    path.write_text(bundle(ONE))
    live_call("apply", "--bundle", str(path), "--return-after", "300", runner=Calls())
    runner = Calls()
    live_call("hold", "--return-after", "600", runner=runner)
    assert [argv[0] for argv in runner.argvs] == ["systemctl", "systemctl", "systemd-run"]
    assert "--on-active=600s" in runner.argvs[2]
    runner = Calls()
    live_call("confirm", runner=runner)
    assert runner.argvs[0] == ("systemctl", "stop", "spark-return.timer")
    with pytest.raises(NodeError, match="nothing is on trial"):
        live_call("hold", "--return-after", "600", runner=Calls())


def test_only_what_changed_is_activated_and_failures_are_repeated(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live(monkeypatch, root)
    path = root.parent / "bundle.json"
    path.write_text(bundle(ONE, actions=ACTIONS))
    with pytest.raises(NodeError, match="apply again to retry") as caught:
        live_call("apply", "--bundle", str(path), runner=Calls("networkctl"))
    assert caught.value.exit_status == 5
    assert not call(root, "list")["activated"]
    runner = Calls()
    live_call("apply", "--bundle", str(path), runner=runner)
    assert runner.argvs == [("systemctl", "daemon-reload"), ("networkctl", "reload")]
    path.write_text(bundle({**ONE, "/etc/a/one": "new\n"}, actions=ACTIONS))
    runner = Calls()
    live_call("apply", "--bundle", str(path), runner=runner)
    assert runner.argvs == [("systemctl", "daemon-reload")]


def test_going_back_stops_serves_again_and_at_boot_waits_for_nothing(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live(monkeypatch, root)
    path = root.parent / "bundle.json"
    path.write_text(bundle(ONE, actions=ACTIONS))
    live_call("apply", "--bundle", str(path), runner=Calls())
    path.write_text(bundle(TWO, actions=ACTIONS))
    live_call("apply", "--bundle", str(path), "--return-after", "9", runner=Calls())
    runner = Calls()
    live_call("return", runner=runner)
    assert runner.argvs == [
        ("systemctl", "stop", "spark.target"),
        ("systemctl", "daemon-reload"),
        ("networkctl", "reload"),
        ("systemctl", "start", "--no-block", "spark.target"),
    ]
    live_call("apply", "--bundle", str(path), "--return-after", "9", runner=Calls())
    runner = Calls()
    live_call("recover", runner=runner)
    assert runner.argvs == [("systemctl", "daemon-reload")]


def test_a_node_that_a_change_does_not_concern_serves_again_with_the_others(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live(monkeypatch, root)
    path = root.parent / "bundle.json"
    path.write_text(bundle(ONE, actions=ACTIONS))
    live_call("apply", "--bundle", str(path), runner=Calls())
    before = live_call("list", runner=Calls())
    runner = Calls()
    live_call("apply", "--bundle", str(path), "--return-after", "9", runner=runner)
    assert [argv[0] for argv in runner.argvs] == ["systemctl", "systemctl", "systemd-run"]
    assert live_call("list", runner=Calls()) == before
    runner = Calls()
    assert live_call("return", runner=runner)["changes"] == []
    assert runner.argvs == [("systemctl", "start", "--no-block", "spark.target")]
    runner = Calls()
    live_call("recover", runner=runner)
    assert runner.argvs == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 9}, "version"),
        ({"contents": {}}, "has no content"),
        ({"contents": {"0" * 64: "AAAA"}}, "another hash"),
        ({"files": 3}, "damaged"),
    ],
)
def test_damaged_bundles_are_refused(root: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(NodeError, match=message):
        apply(root, ONE, **change)
    assert tree(root) == {}


@pytest.mark.parametrize("path", ["/root/x", "/etc/../root/x", "etc/x", "/etc/a//b", "/var/x"])
def test_paths_outside_ours_are_refused(root: Path, path: str) -> None:
    with pytest.raises(NodeError, match="would write"):
        apply(root, {path: "x"})


def test_a_file_is_flushed_before_it_gets_its_name_and_its_folder_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    events: list[tuple[str, bool]] = []

    def record(handle: int) -> None:
        kind = "folder" if Path(f"/proc/self/fd/{handle}").readlink() == tmp_path else "file"
        events.append((kind, path.exists()))

    monkeypatch.setattr(disk.os, "fsync", record)
    disk.put(path, "file", b"x", 0o600, None)
    assert events == [("file", False), ("folder", True)]


def test_two_installers_exclude_each_other(root: Path) -> None:
    with Store(root).locked(), pytest.raises(NodeError, match="another install"):
        apply(root, ONE)


def test_old_generations_are_dropped_but_not_the_confirmed_one(root: Path) -> None:
    apply(root, ONE)
    for number in range(12):
        apply(root, {"/etc/a/one": f"{number}\n"}, "--return-after", "60")
    numbers = [item["number"] for item in call(root, "list")["generations"]]
    assert 1 in numbers
    assert len(numbers) == store.KEPT + 1


def test_the_archive_runs_it_with_nothing_installed(root: Path, tmp_path: Path) -> None:
    program = tmp_path / "program.pyz"
    program.write_bytes(node_zipapp.build())
    path = tmp_path / "bundle.json"
    path.write_text(bundle(ONE))
    argv = [sys.executable, "-S", "-m", "spark_appliance.node.generations", "--root", str(root)]
    done = subprocess.run(
        [*argv, "apply", "--bundle", str(path)],
        env={"PYTHONPATH": str(program), "PATH": os.defpath},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["current"] == 1
    assert tree(root) == ONE
    path.write_text("{")
    done = subprocess.run(
        [*argv, "apply", "--bundle", str(path)],
        env={"PYTHONPATH": str(program), "PATH": os.defpath},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 2
    assert done.stderr == (
        "spark-generations: error: the bundle is damaged: it was cut off or is no JSON\n"
    )
