"""Builds the core with sanitizers and runs the native self-test under them."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from spark_engram import native

PACKAGE = Path(__file__).parents[1]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=["address,undefined", "thread"])
def selftest(request, tmp_path_factory):
    for tool in ("cmake", "ninja", "g++"):
        if shutil.which(tool) is None:
            pytest.skip(f"needs {tool} to build the self-test")
    build = tmp_path_factory.mktemp("build")
    configure = [
        "cmake", "-S", str(PACKAGE), "-B", str(build), "-G", "Ninja",
        "-DCMAKE_BUILD_TYPE=RelWithDebInfo", "-DSPARK_ENGRAM_TESTS=ON",
        f"-DSPARK_ENGRAM_SANITIZE={request.param}",
    ]  # fmt: skip
    make = ["cmake", "--build", str(build), "--target", "spark_engram_selftest", "-j", "2"]
    for argv in (configure, make):
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return request.param, build / "spark_engram_selftest"


@pytest.mark.parametrize("backend", ["pread", "io_uring"])
def test_the_core_is_clean(selftest, backend, tmp_path):
    sanitizer, program = selftest
    if backend == "io_uring" and "io_uring" not in native.backends():
        pytest.skip("this build has no io_uring backend")
    environment = {
        **os.environ,
        "ASAN_OPTIONS": "detect_leaks=1:abort_on_error=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "TSAN_OPTIONS": "halt_on_error=1",
    }
    done = subprocess.run(
        [str(program), str(tmp_path), backend],
        capture_output=True, text=True, check=False, env=environment,
    )  # fmt: skip
    if "unexpected memory mapping" in done.stderr:
        pytest.skip(f"{sanitizer}: this kernel's address layout is not supported by the runtime")
    if "io_uring refused" in done.stderr:
        pytest.skip("this kernel or container refuses io_uring")
    assert (done.returncode, done.stdout) == (0, "OK\n"), done.stderr[-4000:]


def test_fuzzing_the_row_pages_finds_nothing(tmp_path):
    for tool in ("cmake", "ninja", "clang++"):
        if shutil.which(tool) is None:
            pytest.skip(f"needs {tool} to build the libFuzzer target")
    configure = [
        "cmake", "-S", str(PACKAGE), "-B", str(tmp_path), "-G", "Ninja",
        "-DCMAKE_C_COMPILER=clang", "-DCMAKE_CXX_COMPILER=clang++", "-DSPARK_ENGRAM_FUZZ=ON",
        "-DSPARK_ENGRAM_SANITIZE=address,undefined",
    ]  # fmt: skip
    make = ["cmake", "--build", str(tmp_path), "--target", "spark_engram_fuzz", "-j", "2"]
    for argv in (configure, make):
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        if "libclang_rt" in done.stderr + done.stdout:
            pytest.skip("needs clang's sanitizer runtime (Debian: libclang-rt-14-dev)")
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    done = subprocess.run(
        [str(tmp_path / "spark_engram_fuzz"), "-runs=30000", "-max_len=12288", "-seed=1"],
        capture_output=True, text=True, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
