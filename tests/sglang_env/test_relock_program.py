"""`python -m relock` as a user runs it, with a stand-in for Poetry that is really started."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

tomlkit = pytest.importorskip("tomlkit", reason="tomlkit is not installed: relock writes with it")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from relock import poetry  # noqa: E402
from relock.__main__ import main  # noqa: E402
from relock.lockfile import content_hash, dump, header_version, read  # noqa: E402
from relock.target import Target  # noqa: E402

FAKE = """
import json, os, pathlib, sys
here = pathlib.Path(__file__).parent
lock, project = pathlib.Path("poetry.lock"), pathlib.Path("pyproject.toml")
with (here / "calls").open("a") as log:
    log.write(json.dumps({
        "argv": sys.argv[1:],
        "pyproject": project.read_text() if "--version" not in sys.argv else "",
        "seed": lock.read_text() if lock.exists() else "",
        "stubs": sorted(str(p) for p in pathlib.Path("stubs").rglob("*.toml")),
        "in_project": os.environ.get("POETRY_VIRTUALENVS_IN_PROJECT"),
        "hash_seed": os.environ.get("PYTHONHASHSEED"),
    }) + "\\n")
if "--version" in sys.argv:
    print("Poetry (version 9.9.9)")
elif sys.argv[1] == "lock":
    if (here / "fail").exists():
        print("no such package"); sys.exit(1)
    if (here / "fail-once").exists():
        (here / "fail-once").unlink(); sys.exit(1)
    lock.write_text((here / "answer").read_text())
"""

PYPROJECT = """
[tool.poetry]
name = "env"
version = "1"

[tool.poetry.dependencies]
python = "~3.13"
a = "*"
b = { version = "~2", extras = ["x"] }

[tool.relock.target]
python = "3.13"
machine = "aarch64"
glibc = "2.41"

[tool.relock.exclude.gone]
version = "0.1"
reason = "no wheel"
"""


def package(name: str, version: str, **fields: Any) -> dict[str, Any]:
    files = [
        {"file": f"{name}-{version}.tar.gz", "hash": "sha256:" + "1" * 64},
        {"file": f"{name}-{version}-py3-none-any.whl", "hash": "sha256:" + "2" * 64},
    ]
    return {"name": name, "version": version, "groups": ["main"], "files": files} | fields


RAW = {
    "package": [
        package("a", "1", source={"type": "legacy", "url": "u", "reference": "r"}),
        package("b", "2", dependencies={"a": ">=1", "gone": "==0.1"}),
        package("gone", "0.1", source={"type": "directory", "url": "stubs/gone"}),
    ],
    "metadata": {"lock-version": "2.1", "python-versions": "~3.13", "content-hash": "temporary"},
}


class Project:
    def __init__(self, folder: Path, fake: Path) -> None:
        self.folder = folder
        self.fake = fake
        self.lock = folder / "poetry.lock"
        (folder / "pyproject.toml").write_text(PYPROJECT)
        (fake / "__main__.py").write_text(FAKE)
        self.answer(RAW)

    def answer(self, lock: dict[str, Any]) -> None:
        (self.fake / "answer").write_text(tomlkit.dumps(lock))

    def run(self, *arguments: str) -> int:
        return main(["--project", str(self.folder), *arguments])

    @property
    def calls(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.fake / "calls").read_text().splitlines()]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    fake = tmp_path / "path" / "poetry"
    fake.mkdir(parents=True)
    monkeypatch.setenv("PYTHONPATH", str(fake.parent))
    monkeypatch.delenv("RELOCK_INDEX", raising=False)
    folder = tmp_path / "project"
    folder.mkdir()
    return Project(folder, fake)


def test_it_asks_poetry_once_to_lock_and_once_to_check(project: Project) -> None:
    assert project.run() == 0
    assert [call["argv"] for call in project.calls] == [
        ["lock", "--no-interaction", "--no-ansi"],
        ["--version", "--no-ansi"],
        ["check", "--lock", "--no-interaction", "--no-ansi"],
    ]
    first, _, last = project.calls
    assert (first["in_project"], first["hash_seed"]) == ("true", "0")
    assert first["stubs"] == ["stubs/gone/pyproject.toml"]
    assert last["pyproject"] == PYPROJECT
    assert last["seed"] == project.lock.read_text()


def test_poetry_sees_the_marker_the_stub_and_the_index(project: Project) -> None:
    assert project.run("--index", "there/simple/") == 0
    seen = tomlkit.parse(project.calls[0]["pyproject"])["tool"]["poetry"]
    marker = Target((3, 13), "aarch64", (2, 41)).marker
    assert seen["dependencies"] == {
        "python": "~3.13",
        "a": {"version": "*", "markers": marker},
        "b": {"version": "~2", "extras": ["x"], "markers": marker},
        "gone": {"path": "stubs/gone", "markers": marker},
    }
    assert seen["source"] == [
        {"name": "relock-index", "url": "there/simple/", "priority": "primary"}
    ]


def test_the_written_lock_is_pruned_and_carries_the_projects_hash(project: Project) -> None:
    assert project.run() == 0
    lock = read(project.lock)
    assert [one["name"] for one in lock["package"]] == ["a", "b"]
    assert all(len(one["files"]) == 1 for one in lock["package"])
    assert lock["package"][1]["dependencies"] == {"a": ">=1"}
    assert lock["metadata"]["content-hash"] == content_hash(read(project.folder / "pyproject.toml"))
    assert header_version(project.lock.read_text()) == "9.9.9"


def test_a_second_run_gives_the_same_bytes(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    assert project.run() == 0
    before = project.lock.read_bytes()
    capsys.readouterr()
    assert project.run() == 0
    assert project.lock.read_bytes() == before
    assert capsys.readouterr().out == "poetry.lock: no change\n"


def wanted(call: dict[str, Any]) -> dict[str, str]:
    dependencies = tomlkit.parse(call["pyproject"])["tool"]["poetry"]["dependencies"]
    return {
        name: spec["version"]
        for name, spec in dependencies.items()
        if isinstance(spec, dict) and "version" in spec
    }


def test_locked_versions_are_kept_unless_it_shall_update(project: Project) -> None:
    project.run()
    project.run()
    project.run("--update")
    first, second, third = [call for call in project.calls if call["argv"][0] == "lock"]
    assert wanted(first) == wanted(third) == {"a": "*", "b": "~2"}
    assert wanted(second) == {"a": "*,==1", "b": "~2,==2"}


def test_a_kept_package_that_nobody_needs_any_more_is_dropped(project: Project) -> None:
    project.answer(RAW | {"package": [*RAW["package"], package("c", "7")]})  # type: ignore[misc]
    (project.folder / "pyproject.toml").write_text(PYPROJECT.replace('a = "*"', 'a = "*"\nc = "*"'))
    project.run()
    (project.folder / "pyproject.toml").write_text(PYPROJECT)
    assert project.run() == 0
    assert wanted([call for call in project.calls if call["argv"][0] == "lock"][-1])["c"] == "==7"
    assert [one["name"] for one in read(project.lock)["package"]] == ["a", "b"]


def test_locked_versions_that_do_not_fit_are_given_up(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    project.run()
    (project.fake / "fail-once").touch()
    assert project.run() == 0
    assert (
        "could not keep the locked versions, resolving anew (poetry lock failed"
        in capsys.readouterr().err
    )
    assert wanted([call for call in project.calls if call["argv"][0] == "lock"][-1]) == {
        "a": "*",
        "b": "~2",
    }


def test_a_failing_poetry_leaves_the_lock_alone(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    project.run()
    before = project.lock.read_bytes()
    (project.fake / "fail").touch()
    assert project.run() == 1
    assert "relock: poetry lock failed (1): no such package" in capsys.readouterr().err
    assert project.lock.read_bytes() == before


def test_a_lock_that_cannot_be_pruned_leaves_the_old_one_alone(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    project.run()
    before = project.lock.read_bytes()
    project.answer(RAW | {"package": [*RAW["package"], package("a", "3")]})  # type: ignore[misc]
    assert project.run() == 1
    assert "a (1 and 3)" in capsys.readouterr().err
    assert project.lock.read_bytes() == before


def test_without_poetry_the_message_says_so(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(project.fake)
    (project.fake.parent / "poetry.py").write_text("raise SystemExit('No module named poetry')")
    assert project.run() == 1
    assert "No module named poetry" in capsys.readouterr().err


def test_check_accepts_what_relock_wrote(project: Project) -> None:
    project.run()
    assert project.run("--check") == 0
    assert len([call for call in project.calls if call["argv"][0] == "lock"]) == 1


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("py3-none-any", "cp312-cp312-win_arm64", "a 1: no wheel"),
        ('version = "1"', 'version = "1"\nsource = {type = "x"}', "a is not pruned"),
        ("# Locked by Poetry", "# Made by Poetry", "not as relock writes it"),
        ("# Locked by Poetry 9.9.9", "#", "does not name the Poetry version"),
    ],
)
def test_check_refuses_a_lock_touched_by_hand(
    project: Project, capsys: pytest.CaptureFixture[str], before: str, after: str, message: str
) -> None:
    project.run()
    text = project.lock.read_text()
    assert before in text
    project.lock.write_text(text.replace(before, after, 1))
    assert project.run("--check") == 1
    assert message in capsys.readouterr().err


def test_check_refuses_a_lock_of_another_pyproject(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    project.run()
    (project.folder / "pyproject.toml").write_text(PYPROJECT.replace("~2", "~3"))
    assert project.run("--check") == 1
    assert "pyproject.toml changed since; run `python -m relock`" in capsys.readouterr().err


def test_check_without_a_lock_says_how_to_make_one(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    assert project.run("--check") == 1
    assert "no such file; run `python -m relock`" in capsys.readouterr().err


def test_the_committed_lock_passes_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check"]) == 0, capsys.readouterr().err


def test_poetry_accepts_the_committed_pair(env_dir: Path) -> None:
    pytest.importorskip("poetry", reason="poetry is not installed: it would judge the lock")
    assert sys.executable
    poetry.verify(env_dir / "pyproject.toml", (env_dir / "poetry.lock").read_text())


TEXT = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), max_size=20)
SPECS = st.one_of(
    TEXT,
    st.fixed_dictionaries({"version": TEXT}, optional={"markers": TEXT, "optional": st.booleans()}),
)
PACKAGES = st.lists(
    st.fixed_dictionaries(
        {
            "name": TEXT,
            "optional": st.booleans(),
            "groups": st.lists(TEXT),
            "files": st.lists(st.fixed_dictionaries({"file": TEXT, "hash": TEXT}), min_size=1),
        },
        optional={
            "dependencies": st.dictionaries(
                TEXT.filter(bool), st.one_of(SPECS, st.lists(SPECS, min_size=2)), min_size=1
            ),
            "extras": st.dictionaries(TEXT.filter(bool), st.lists(TEXT, min_size=1), min_size=1),
        },
    ),
    min_size=1,
    max_size=4,
)


@given(PACKAGES)
def test_what_is_written_is_read_back(packages: list[dict[str, Any]]) -> None:
    import tomllib

    lock = {"package": packages, "metadata": {"lock-version": "2.1"}}
    assert tomllib.loads(dump(lock, "1")) == lock
