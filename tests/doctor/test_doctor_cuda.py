"""The GPU programs: assembled for GB10 here, run where there is a GPU."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

from spark_appliance.doctor.probe import cuda
from spark_appliance.doctor.probe.core import ProbeError


@pytest.mark.parametrize("architecture", ["sm_90", "sm_121"])
def test_the_programs_assemble(tmp_path: Path, architecture: str):
    ptxas = shutil.which("ptxas")
    if ptxas is None:
        pytest.skip("no ptxas on this machine")
    source = tmp_path / "a.ptx"
    source.write_text(cuda.PTX)
    done = subprocess.run(
        [ptxas, f"-arch={architecture}", "-o", str(tmp_path / "a.cubin"), str(source)],
        capture_output=True,
        text=True,
        check=False,
    )
    if "is not defined for option" in done.stderr:
        pytest.skip(f"this ptxas does not know {architecture}")
    assert done.returncode == 0, done.stderr


def test_without_a_driver_it_says_so():
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        with pytest.raises(ProbeError, match=r"libcuda\.so\.1"):
            cuda.describe()
    else:
        pytest.skip("this machine has a driver")


@pytest.mark.gpu
def test_clock_and_bandwidth_of_a_real_gpu():
    try:
        device = cuda.describe()
    except ProbeError as error:
        pytest.skip(f"no GPU: {error}")
    assert device["total_bytes"] > 1 << 30
    values = cuda.load(1.0, 1 << 30)
    assert 300 < values["clock_mhz"] < 4000
    assert 50 < values["read_gbs"] < 20_000
