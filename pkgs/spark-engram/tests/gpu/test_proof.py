"""Runs proof.py where there is a CUDA GPU."""

import subprocess
import sys
from pathlib import Path

import pytest
from engine_files import engine_root

pytestmark = [pytest.mark.gpu, pytest.mark.engine]


def test_packed_tables_equal_the_engines_on_the_gpu(tmp_path):
    torch = pytest.importorskip("torch", reason="needs torch with CUDA")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("proof.py")),
         "--sglang", str(engine_root(tmp_path / "wheel")), "--work", str(tmp_path / "work"),
         "--rows-per-column", "2000", "--no-measure"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert done.stdout.count("PASS ") == 5
