"""The audits on the real wheels (4.1 GB): the committed results are what comes out.

`SGLANG_ENV_WHEELS` names the folder; with `RELOCK_INDEX` (a simple index) what it lacks is fetched.
"""

from __future__ import annotations

import os
import shutil

import pytest

pytestmark = pytest.mark.slow

for module in ("elftools", "pypi_simple", "cyclonedx"):
    pytest.importorskip(module, reason=f"the Python module {module} is not installed")

from audit.__main__ import main  # noqa: E402


@pytest.fixture(scope="module")
def wheels() -> str:
    folder = os.environ.get("SGLANG_ENV_WHEELS")
    if not folder:
        pytest.skip("$SGLANG_ENV_WHEELS is not set: no folder for the wheels")
    if index := os.environ.get("RELOCK_INDEX"):
        assert main(["download", "--wheels", folder, "--index", index]) == 0
    return folder


@pytest.mark.parametrize("part", ["elf", "files", "licences"])
def test_the_result_is_as_committed(part: str, wheels: str) -> None:
    assert main([part, "--wheels", wheels, "--check"]) == 0


def test_gpu_code_is_as_committed(wheels: str) -> None:
    cuobjdump = os.environ.get("CUOBJDUMP") or shutil.which("cuobjdump")
    if cuobjdump is None:
        pytest.skip("cuobjdump is not on PATH and $CUOBJDUMP is not set")
    assert main(["gpu", "--wheels", wheels, "--cuobjdump", cuobjdump, "--check"]) == 0


def test_the_index_still_has_every_file() -> None:
    index = os.environ.get("RELOCK_INDEX")
    if not index:
        pytest.skip("$RELOCK_INDEX is not set: no package index to ask")
    assert main(["index", "--index", index, "--check"]) == 0
