"""cuda-home.sh: the CUDA_HOME tree, made up and (slow) with the real compiler."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

BASH = shutil.which("bash")
COMPILER = (
    "nvidia-cuda-cccl",
    "nvidia-cuda-crt",
    "nvidia-cuda-nvcc",
    "nvidia-cuda-runtime",
    "nvidia-nvvm",
)

PROGRAM = """
#include <cuda.h>
#include <cuda_fp16.h>
#include <cub/cub.cuh>
__global__ void total(float *x) {
  using Reduce = cub::BlockReduce<float, 128>;
  __shared__ typename Reduce::TempStorage memory;
  float sum = Reduce(memory).Sum(x[threadIdx.x]);
  if (threadIdx.x == 0) x[0] = sum;
}
int main() {
  total<<<1, 128>>>(nullptr);
  return cuInit(0) + static_cast<int>(cudaDeviceSynchronize());
}
"""


def make(env_dir: Path, out: Path, driver: Path, *sites: Path) -> subprocess.CompletedProcess[str]:
    if BASH is None:
        pytest.skip("bash is not installed: cuda-home.sh needs it")
    return subprocess.run(
        [BASH, env_dir / "cuda-home.sh", out, driver, *sites],
        capture_output=True,
        text=True,
        check=False,
    )


def site(folder: Path, *paths: str) -> Path:
    for path in paths:
        file = folder / "nvidia" / "cu13" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(path)
    return folder


def test_the_tree_merges_the_wheels_and_adds_what_they_lack(env_dir: Path, tmp_path: Path) -> None:
    nvcc = site(tmp_path / "nvcc", "bin/nvcc", "include/nvcc.h")
    runtime = site(
        tmp_path / "runtime",
        "lib/libcudart.so.13",
        "lib/libnvrtc-builtins.so.13.0",
        "lib/libnvperf_host.so",
        "lib/libcudadevrt.a",
        "include/cuda.h",
    )
    driver = tmp_path / "driver"
    out = tmp_path / "out"
    done = make(env_dir, out, driver, nvcc, runtime)
    assert done.returncode == 0, done.stderr
    tree = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_symlink()}
    assert tree == {
        "bin/nvcc",
        "include/nvcc.h",
        "include/cuda.h",
        "lib64",
        "lib/libcudart.so.13",
        "lib/libcudart.so",
        "lib/libnvrtc-builtins.so.13.0",
        "lib/libnvrtc-builtins.so",
        "lib/libnvperf_host.so",
        "lib/libcudadevrt.a",
        "lib/stubs/libcuda.so",
    }
    assert (out / "lib64" / "libcudart.so").read_text() == "lib/libcudart.so.13"
    assert (out / "lib" / "libcudart.so").readlink() == Path("libcudart.so.13")
    assert (out / "lib" / "stubs" / "libcuda.so").readlink() == driver / "libcuda.so.1"
    assert not (out / "bin").is_symlink()


def test_two_wheels_with_one_file_are_an_error(env_dir: Path, tmp_path: Path) -> None:
    sites = [site(tmp_path / name, "include/cuda.h", "lib/libx.so.1") for name in "ab"]
    done = make(env_dir, tmp_path / "out", tmp_path, *sites)
    assert done.returncode != 0
    assert "include/cuda.h" in done.stderr


@pytest.mark.slow
def test_the_locked_compiler_builds_cub_for_sm_121a(
    env_dir: Path, tmp_path: Path, lock: dict[str, Any]
) -> None:
    """Same versions as locked, for the machine of this test (100 MB)."""
    if platform.machine() not in {"x86_64", "aarch64"} or sys.platform != "linux":
        pytest.skip(f"NVIDIA has no compiler wheels for {sys.platform} {platform.machine()}")
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed: nvcc needs a host compiler")
    versions = {entry["name"]: entry["version"] for entry in lock["package"]}
    wanted = [f"{name}=={versions[name]}" for name in COMPILER]
    wheels = tmp_path / "wheels"
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", wheels]
    fetched = subprocess.run([*pip, *wanted], capture_output=True, text=True, check=False)
    if fetched.returncode:
        last = (fetched.stderr.strip() or "no message").splitlines()[-1]
        pytest.skip(f"pip cannot fetch the compiler's wheels: {last}")
    sites = []
    for number, wheel in enumerate(sorted(wheels.glob("*.whl"))):
        folder = tmp_path / f"site{number}"
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
        for program in (*folder.glob("nvidia/cu13/bin/*"), *folder.glob("nvidia/cu13/nvvm/bin/*")):
            program.chmod(0o755)
        sites.append(folder)
    driver = tmp_path / "driver"
    driver.mkdir()
    stub = tmp_path / "stub.c"
    stub.write_text("int cuInit(unsigned x) { return (int)x; }\n")
    subprocess.run(["g++", "-x", "c", "-shared", "-o", driver / "libcuda.so.1", stub], check=True)
    home = tmp_path / "home"
    done = make(env_dir, home, driver, *sites)
    assert done.returncode == 0, done.stderr
    source = tmp_path / "total.cu"
    source.write_text(PROGRAM)
    nvcc = home / "bin" / "nvcc"
    subprocess.run([nvcc, "-arch=sm_121a", "-c", source, "-o", tmp_path / "total.o"], check=True)
    # The way FlashInfer links: the host compiler, lib64 and the driver's stub.
    subprocess.run(
        [
            "g++",
            tmp_path / "total.o",
            f"-L{home}/lib64",
            f"-L{home}/lib64/stubs",
            "-lcudart",
            "-lcuda",
            "-o",
            tmp_path / "total",
        ],
        check=True,
    )
    needed = subprocess.run(
        ["readelf", "-d", tmp_path / "total"], capture_output=True, text=True, check=True
    ).stdout
    assert "libcudart.so.13" in needed
