"""Licences, shared paths and the index, on small made-up wheels."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
from audit import files, libraries
from audit.errors import AuditError
from audit.metadata import Licence, read_licence, read_licences
from audit.wheels import LockedWheel, locked_wheels, members, open_wheel


def wheel(folder: Path, name: str, contents: dict[str, str]) -> LockedWheel:
    file = f"{name}-1-py3-none-any.whl"
    with zipfile.ZipFile(folder / file, "w") as archive:
        for path, text in contents.items():
            archive.writestr(path, text)
    return LockedWheel(name, "1", file, "0" * 64)


def table(stray: dict[str, list[str]]) -> libraries.Libraries:
    fields = ("providers", "directories", "links", "opens", "absent", "foreign")
    empty: dict[str, Any] = {field: {} for field in fields}
    target = {"machine": "m", "interpreter": "i"}
    return libraries.parse(empty | {"target": target, "stray": stray, "cuda_home": []})


@pytest.mark.parametrize(
    ("fields", "licence"),
    [
        ("License-Expression: Apache-2.0\n", Licence("Apache-2.0", None, (), ())),
        ("License: BSD\n", Licence(None, "BSD", (), ())),
        ("License: UNKNOWN\n", Licence(None, None, (), ())),
        (f"License: {'long text ' * 20}\n", Licence(None, None, (), ())),
        (
            """Classifier: License :: OSI Approved :: MIT License
Classifier: License :: OSI Approved
Classifier: Typing :: Typed
""",
            Licence(None, None, ("MIT License",), ()),
        ),
    ],
)
def test_licences_are_read_in_every_spelling(tmp_path: Path, fields: str, licence: Licence) -> None:
    one = wheel(tmp_path, "a", {"a-1.dist-info/METADATA": f"Name: a\n{fields}\nLicense: in body\n"})
    assert read_licences(tmp_path, [one]) == {"a": licence}
    assert licence.stated is bool(licence.as_data())
    assert Licence.from_data(licence.as_data()) == licence


def test_licence_files_are_listed_without_folders(tmp_path: Path) -> None:
    contents = {
        "a-1.dist-info/METADATA": "Name: a\n",
        "a-1.dist-info/licenses/": "",
        "a-1.dist-info/licenses/x/LICENSE": "",
        "a-1.dist-info/COPYING": "",
        "a-1.dist-info/RECORD": "",
    }
    one = wheel(tmp_path, "a", contents)
    with open_wheel(tmp_path, one) as archive:
        assert read_licence(archive).files == ("COPYING", "licenses/x/LICENSE")


def test_a_wheel_without_metadata_is_an_error(tmp_path: Path) -> None:
    one = wheel(tmp_path, "a", {"a/x.py": ""})
    with open_wheel(tmp_path, one) as archive, pytest.raises(AuditError, match="0 METADATA files"):
        read_licence(archive)


def test_platlib_and_purelib_are_site_packages(tmp_path: Path) -> None:
    contents = {"a/x.py": "", "a-1.data/platlib/a/y.so": "", "a-1.data/scripts/run": ""}
    with open_wheel(tmp_path, wheel(tmp_path, "a", contents)) as archive:
        assert [path for path, _ in members(archive)] == [
            "a/x.py",
            "a/y.so",
            "a-1.data/scripts/run",
        ]


def test_a_missing_wheel_says_how_to_get_it(tmp_path: Path) -> None:
    gone = LockedWheel("a", "1", "a-1-py3-none-any.whl", "0")
    with pytest.raises(AuditError, match="not downloaded; run `python -m audit download"):
        open_wheel(tmp_path, gone)


def test_a_path_in_two_wheels_is_a_problem_unless_it_is_a_stray(tmp_path: Path) -> None:
    wheels = [wheel(tmp_path, name, {"shared.py": "12", f"{name}.py": "3"}) for name in "ab"]
    result = files.judge(files.scan(tmp_path, wheels), table({}))
    assert result == {"files": 4, "bytes": 6, "problems": ["shared.py: in a and b"]}
    both = table({"a": ["shared.py"], "b": ["shared.py"]})
    assert files.judge(files.scan(tmp_path, wheels), both)["problems"] == []


def test_a_stray_that_does_not_exist_is_a_problem(tmp_path: Path) -> None:
    wheels = [wheel(tmp_path, "a", {"a.py": ""})]
    assert files.judge(files.scan(tmp_path, wheels), table({"a": ["x.py"]}))["problems"] == [
        "libraries.json: stray a x.py: no such file"
    ]


def test_a_lock_with_two_files_a_package_is_refused(tmp_path: Path) -> None:
    lock = tmp_path / "poetry.lock"
    lock.write_text('[[package]]\nname = "a"\nversion = "1"\nfiles = []\n')
    with pytest.raises(AuditError, match="a has 0 files, want 1"):
        locked_wheels(lock)


def test_the_index_is_judged_by_presence_hash_and_yanking() -> None:
    index = pytest.importorskip(
        "audit.index", reason="pypi-simple is not installed: it speaks to the index"
    )
    good, gone, other, yanked = (LockedWheel(name, "1", f"{name}.whl", "00") for name in "abcd")
    result = index.judge(
        [
            index.IndexFile(good, listed=True, sha256="00", size=5, yanked=False),
            index.IndexFile(gone, listed=False, sha256=None, size=None, yanked=False),
            index.IndexFile(other, listed=True, sha256="11", size=7, yanked=False),
            index.IndexFile(yanked, listed=True, sha256="00", size=None, yanked=True),
        ]
    )
    assert result["bytes"] == 12
    assert result["problems"] == [
        "b: b.whl: not on the index",
        "c: c.whl: the index says sha256 11",
        "d: d.whl: yanked",
    ]


def test_the_bill_of_materials_is_complete_and_stable() -> None:
    sbom = pytest.importorskip(
        "audit.sbom", reason="cyclonedx-python-lib is not installed: it writes the document"
    )
    file = {"file": "a-1-py3-none-any.whl", "hash": "sha256:" + "ab" * 32}
    one = {"name": "a-b", "version": "1", "description": "d", "files": [file]}
    other = one | {"name": "c", "dependencies": {"A_B": "*"}}
    lock = {"package": [one, other]}
    project = {
        "name": "env",
        "version": "1",
        "description": "e",
        "dependencies": {"python": "~3.13", "c": "*"},
    }
    licences = {
        "a-b": Licence("MIT OR Apache-2.0", None, (), ()),
        "c": Licence(None, "BSD", ("BSD License",), ()),
    }
    text = sbom.build(lock, project, licences)
    assert sbom.build(lock, project, licences) == text
    document = json.loads(text)
    first, second = document["components"]
    assert first["purl"] == "pkg:pypi/a-b@1"
    assert first["hashes"] == [{"alg": "SHA-256", "content": "ab" * 32}]
    assert first["licenses"] == [{"expression": "MIT OR Apache-2.0"}]
    assert [one["license"]["name"] for one in second["licenses"]] == ["BSD", "BSD License"]
    assert {"ref": "c@1", "dependsOn": ["a-b@1"]} in document["dependencies"]
    assert {"ref": "env", "dependsOn": ["c@1"]} in document["dependencies"]
