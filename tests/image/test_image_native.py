"""How a native library is compiled, with a stand-in for the compiler (a script in a wheel)."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import pytest

from spark_appliance.image import native
from spark_appliance.image.errors import HashMismatchError
from spark_appliance.image.recipe import Compiler, Native
from spark_appliance.image.store import Store
from spark_appliance.process import ProcessError

GOOD = """\
#!/bin/sh
for word in "$@"; do last=$word; done
echo "$@" > "$last"
echo x >> "$(dirname "$0")/../../../../runs"
"""
BREAKS_OFF = """\
#!/bin/sh
for word in "$@"; do last=$word; done
printf half > "$last"
echo "No space left on device" >&2
exit 1
"""


class Project:
    """A project with one source, a cache, and a compiler whose program is a given script."""

    def __init__(self, folder: Path, script: str) -> None:
        self.cache, self.folder = folder / "cache", folder / "project"
        (self.folder / "src").mkdir(parents=True)
        (self.folder / "src" / "a.cc").write_text("int a;\n")
        seeds = folder / "seeds"
        seeds.mkdir()
        self.wheel = seeds / "fake-1.0-py3-none-any.whl"
        with zipfile.ZipFile(self.wheel, "w") as archive:
            archive.writestr("fake/program", script)
        digest = hashlib.sha256(self.wheel.read_bytes()).hexdigest()
        self.compiler = Compiler(machine="any", file=self.wheel.name, sha256=digest)
        self.native = Native(
            compiler="fake==1.0", compilers=(self.compiler,), command=("fake/program", "c++"),
            target="aarch64-linux-gnu", sources=("src",), flags=("-O2",), exports=("a_*",),
            library="liba.so", debian=(), archives=(),
        )  # fmt: skip
        self.store = Store(self.cache, [seeds])

    def build(self) -> Path:
        return native.build(self.native, self.compiler, self.folder, (), self.store)

    def left(self) -> list[str]:
        """Return the files below the cache."""
        return sorted(path.name for path in self.cache.rglob("*") if path.is_file())


def test_the_compiler_of_the_wheel_runs_once_for_the_same_inputs(tmp_path: Path) -> None:
    project = Project(tmp_path, GOOD)
    library = project.build()
    words = library.read_text().split()
    assert words[:3] == ["c++", "-target", "aarch64-linux-gnu"]
    assert str(project.folder / "src/a.cc") in words
    assert project.build() == library
    assert project.left() == ["liba.so", "liba.so.sha256", "runs"]
    (runs,) = project.cache.rglob("runs")
    assert runs.read_text() == "x\n"
    (project.folder / "src" / "a.cc").write_text("int b;\n")
    assert project.build() != library
    assert len(list(project.cache.rglob("liba.so"))) == 2


def test_a_header_a_subfolder_and_the_compiler_count(tmp_path: Path) -> None:
    project = Project(tmp_path, GOOD)
    header = project.folder / "src" / "inner" / "a.h"
    header.parent.mkdir()
    made = {project.build()}
    for text in ("int a();\n", "int b();\n"):
        header.write_text(text)
        made.add(project.build())
    header.rename(header.with_name("b.h"))
    made.add(project.build())
    assert len(made) == 4
    with zipfile.ZipFile(project.wheel, "a") as archive:
        archive.writestr("fake/more", "x")
    digest = hashlib.sha256(project.wheel.read_bytes()).hexdigest()
    other = project.compiler.model_copy(update={"sha256": digest})
    assert native.build(project.native, other, project.folder, (), project.store) not in made


@pytest.mark.parametrize("damaged", ["liba.so", "liba.so.sha256"])
def test_a_damaged_library_is_compiled_again(tmp_path: Path, damaged: str) -> None:
    project = Project(tmp_path, GOOD)
    library = project.build()
    library.with_name(damaged).write_bytes(b"\xff")
    assert project.build() == library
    assert library.read_text().startswith("c++ -target")
    assert project.build() == library
    (runs,) = project.cache.rglob("runs")
    assert runs.read_text() == "x\nx\n"


def test_half_a_library_is_never_used(tmp_path: Path) -> None:
    project = Project(tmp_path, BREAKS_OFF)
    for _ in range(2):  # the second time too: nothing of the first was kept
        with pytest.raises(ProcessError, match="No space left on device"):
            project.build()
        assert project.left() == []


def test_a_compiler_with_other_bytes_is_not_run(tmp_path: Path) -> None:
    project = Project(tmp_path, GOOD)
    with zipfile.ZipFile(project.wheel, "a") as archive:
        archive.writestr("fake/more", "x")
    with pytest.raises(HashMismatchError, match="the lock says"):
        project.build()
    assert project.left() == []
