"""The image itself, under qemu-user: the small profiles, and with SPARK_IMAGE a full one.

    SPARK_IMAGE=DIR pytest tests/image/test_image_emulated.py    # DIR: image build -o DIR

``SPARK_IMAGE_ROOT`` names a folder that keeps the full image unpacked between runs (9 GB), and
``CUOBJDUMP`` NVIDIA's program of that name for this machine (wheel nvidia-cuda-cuobjdump).
"""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import image_download as real
import pytest
from elftools.elf.elffile import ELFFile
from image_emulated import Emulated, unpacked
from packaging.utils import canonicalize_name

from spark_appliance.image import build, check, oci
from spark_appliance.image.store import Store

TESTS = Path(__file__).parents[1]
SGLANG_ENV = real.ROOT / "pkgs" / "sglang-env"
sys.path[:0] = [str(TESTS / "engine"), str(SGLANG_ENV)]

from audit import gpu_rules, gpu_scan  # noqa: E402
from rendered import rendered  # noqa: E402

PYTHON = "/opt/sglang/bin/python3"
SITE = "opt/sglang/lib/python3.13/site-packages"
pytestmark = pytest.mark.slow


def built(profile: str, store: Store, folder: Path) -> AbstractContextManager[Emulated]:
    real.fetch(store, profile)
    build.build(real.request(profile, store), store, folder / "image")
    return unpacked(folder / "image", folder / "root")


@pytest.fixture(scope="module")
def smoke(downloaded: Store, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Emulated]:
    with built("smoke", downloaded, tmp_path_factory.mktemp("smoke")) as image:
        yield image


@pytest.fixture(scope="module")
def tools(downloaded: Store, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Emulated]:
    with built("tools", downloaded, tmp_path_factory.mktemp("tools")) as image:
        yield image


@pytest.fixture(params=["smoke", "tools"])
def small(request: pytest.FixtureRequest) -> Emulated:
    image: Emulated = request.getfixturevalue(request.param)
    return image


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Emulated]:
    given = os.environ.get("SPARK_IMAGE")
    if not given:
        pytest.skip("SPARK_IMAGE does not name a built full image")
    if kept := os.environ.get("SPARK_IMAGE_ROOT"):
        yield Emulated(Path(given), Path(kept))
        return
    with unpacked(Path(given), tmp_path_factory.mktemp("full") / "root") as image:
        yield image


def assert_cache_is_ldconfigs(image: Emulated) -> None:
    image.run("/usr/sbin/ldconfig", "-X", "-C", "/cache/real")
    real_cache = image.run("/usr/sbin/ldconfig", "-p", "-C", "/cache/real").splitlines()
    ours = image.run("/usr/sbin/ldconfig", "-p").splitlines()
    assert [line for line in ours if "=>" in line] == [line for line in real_cache if "=>" in line]


def assert_python_and_certificates(image: Emulated) -> None:
    code = (
        "import json, ssl, sys; print(json.dumps([sys.prefix, sys.path[-1],"
        " len(ssl.create_default_context().get_ca_certs())]))"
    )
    prefix, site, certificates = json.loads(image.run(PYTHON, "-c", code))
    assert prefix == "/opt/sglang"
    assert site == f"/{SITE}"
    bundle = image.root / "etc/ssl/certs/ca-certificates.crt"
    assert certificates == bundle.read_text().count("BEGIN CERTIFICATE") > 100


def assert_nothing_to_hide(image: Emulated) -> None:
    """No set-id files, no world-writable paths, no secrets, no library that would be missing."""
    expected = check.expected_libraries(SGLANG_ENV)
    assert [str(p) for p in check.problems(check.read(image.layout), expected)] == []


# ---- the small profiles -------------------------------------------------------------------------


def test_the_cache_is_what_ldconfig_writes(small: Emulated) -> None:
    assert_cache_is_ldconfigs(small)


def test_python_finds_its_environment_and_certificates(small: Emulated) -> None:
    assert_python_and_certificates(small)


def test_the_small_images_have_nothing_to_hide(small: Emulated) -> None:
    assert_nothing_to_hide(small)


def test_the_compiled_library_packs_and_reads(tools: Emulated) -> None:
    folder = tools.root / "cache"
    (folder / "packed").mkdir()
    program = (PYTHON, "-m", "spark_engram")
    tools.run(
        *(*program, "fake-checkpoint", "--layer", "1", "--rows-per-column", "200"),
        "/cache/checkpoint",
    )
    tools.run(
        *(*program, "pack", "--checkpoint", "/cache/checkpoint", "--output", "/cache/packed"),
        *("--tp", "2", "--rank", "1"),
    )
    packed = "/cache/packed/engram-l1-r1of2.bin"
    tools.run(*program, "verify", "--checkpoint", "/cache/checkpoint", packed)
    read = json.loads(
        tools.run(
            *(*program, "bench", "--backend", "pread", "--seconds", "0.1", "--ids", "8"),
            *("--no-fio", "--json", packed),
        )
    )
    assert "pread" in json.dumps(read)
    # one byte of a row changes: the native code must see it
    file = folder / "packed" / "engram-l1-r1of2.bin"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    assert tools.complete(*program, "verify", packed).returncode not in (0, 2)


def test_the_entry_point_of_the_tools(tools: Emulated) -> None:
    tools.needs_programs()  # the kernel starts the interpreter of the script
    assert "pack" in tools.run(*tools.config["Entrypoint"], *tools.config["Cmd"])


# ---- the full image -----------------------------------------------------------------------------


def test_the_cache_of_the_full_image(full: Emulated) -> None:
    assert_cache_is_ldconfigs(full)


def test_python_of_the_full_image(full: Emulated) -> None:
    assert_python_and_certificates(full)


def test_the_full_image_has_nothing_to_hide(full: Emulated) -> None:
    assert_nothing_to_hide(full)


def test_the_full_image_runs_as_a_user_without_rights(full: Emulated) -> None:
    assert full.config["User"] == "10001:10001"
    assert "Entrypoint" not in full.config


def driver_stand_in(image: Emulated) -> dict[str, str]:
    """Compile a libcuda.so.1, which comes with the driver, for what sgl_kernel links from it.

    Each function of it answers that there is no device. Returns the variables that make it found.
    """
    image.needs_programs()
    wanted = set()
    for library in (image.root / SITE / "sgl_kernel").rglob("*.so"):
        with library.open("rb") as file:
            symbols = ELFFile(file).get_section_by_name(".dynsym").iter_symbols()
            wanted |= {s.name for s in symbols if s["st_shndx"] == "SHN_UNDEF"}
    functions = sorted(name for name in wanted if re.match("cu[A-Z]", name))
    assert functions
    folder = image.root / "cache" / "driver"
    folder.mkdir(exist_ok=True)
    (folder / "driver.c").write_text(
        "".join(f"int {name}(void) {{ return {NO_DEVICE}; }}\n" for name in functions)
    )
    image.run(
        *("/usr/bin/gcc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1"),
        *("-o", "/cache/driver/libcuda.so.1", "/cache/driver/driver.c"),
    )
    return {"LD_LIBRARY_PATH": "/cache/driver"}


NO_DEVICE = 100
"""CUDA_ERROR_NO_DEVICE (CUDA Driver API, CUresult)."""


def test_the_engine_imports_with_our_plugins(full: Emulated) -> None:
    code = """
import json, torch, sglang, flashinfer, sgl_kernel
from importlib.metadata import entry_points
from spark_engram import native
points = [e for e in entry_points(group="sglang.srt.plugins") if "spark" in e.name]
print(json.dumps({
    "torch": torch.__version__, "cuda": torch.version.cuda, "archs": torch._C._cuda_getArchFlags(),
    "sglang": sglang.__version__, "flashinfer": flashinfer.__version__,
    "sgl_kernel": sgl_kernel.__version__, "backends": native.backends(),
    "plugins": [e.name for e in points], "registers": [callable(e.load()) for e in points],
}))
"""
    found = json.loads(
        full.run(PYTHON, "-c", code, timeout=3600, variables=driver_stand_in(full)).splitlines()[-1]
    )
    assert (found["torch"], found["cuda"]) == ("2.14.1+cu130", "13.0")
    assert "sm_120" in found["archs"]
    assert (found["sglang"], found["flashinfer"]) == ("0.5.23", "0.7.2")
    versions = {wheel.name: wheel.version for wheel in real.WHEELS}
    assert found["sgl_kernel"] == versions["sglang-kernel"]
    assert found["backends"] == ["io_uring", "pread"]
    assert found["plugins"] == ["spark_engram", "spark_tp_pad"]
    assert found["registers"] == [True, True]


def test_the_engine_prints_its_options(full: Emulated) -> None:
    out = full.run(PYTHON, "-m", "sglang.launch_server", "--help", timeout=3600)
    assert "--model-path" in out
    assert "--fp8-gemm-backend" in out


def test_every_argv_of_the_examples_passes_the_parser_of_the_image(full: Emulated) -> None:
    nodes = {name: node for name, node in rendered().items() if name.startswith("examples/")}
    argvs = {name: list(node.argv) for name, node in nodes.items()}
    # without a control, a parser that takes everything would look the same
    argvs["control"] = ["--model-path", "/m", "--no-such-flag"]
    # nodes share their variables: each different set is judged once
    environments = {
        json.dumps(variables): variables
        for node in nodes.values()
        for variables in [{k: v for k, v in node.env.items() if k.startswith("SGLANG_")}]
    }
    answer = json.loads(
        full.run(
            *(PYTHON, "-I", "-X", "pycache_prefix=/cache/pyc", "/mnt/judge.py"),
            stdin=json.dumps({"argvs": argvs, "environments": environments}),
            binds={"/mnt": TESTS / "engine"},
            timeout=3600,
        )
    )
    assert answer["engine"] == {"sglang": "0.5.23", "torch": "2.14.1", "python": "3.13.5"}
    assert "unrecognized arguments" in answer["argvs"].pop("control")["error"]
    assert set(answer["argvs"]) == set(nodes)
    assert {name: v["error"] for name, v in answer["argvs"].items() if v["error"]} == {}
    problems = [
        f"{variable}: {verdict['problem']}"
        for verdicts in answer["environments"].values()
        for variable, verdict in verdicts.items()
        if verdict["problem"]
    ]
    assert problems == []


def test_rdma_programs_start_and_find_their_provider(full: Emulated) -> None:
    done = full.complete("/usr/bin/ibv_devices")
    # qemu-user has no RDMA netlink; a host without devices prints the empty table
    assert done.returncode == 0 or "Function not implemented" in done.stderr, done.stderr
    providers = full.root / "etc/libibverbs.d"
    assert (providers / "mlx5.driver").read_text().split() == ["driver", "mlx5"]
    code = (
        "import ctypes; [ctypes.CDLL(name) for name in"
        " ('libibverbs.so.1', 'libmlx5.so.1', 'librdmacm.so.1', 'libnccl.so.2')]; print('loaded')"
    )
    assert full.run(PYTHON, "-c", code).strip() == "loaded"


def test_ninja_builds_with_the_compiler_of_the_image(full: Emulated) -> None:
    full.needs_programs()
    folder = full.root / "cache" / "ninja"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / "build.ninja").write_text(
        "rule cxx\n command = g++ -O2 -o $out $in\nbuild program: cxx program.cc\n"
    )
    (folder / "program.cc").write_text(
        '#include <iostream>\nint main() { std::cout << "built" << std::endl; }\n'
    )
    assert "[1/1]" in full.run("/opt/sglang/bin/ninja", "-C", "/cache/ninja")
    assert full.run("/cache/ninja/program") == "built\n"


PROGRAM = """\
#include <cstdio>
#include <cub/block/block_reduce.cuh>
#include <cuda_bf16.h>

__global__ void total(const float* in, float* out) {
  using Reduce = cub::BlockReduce<float, 128>;
  __shared__ typename Reduce::TempStorage storage;
  float sum = Reduce(storage).Sum(__bfloat162float(__float2bfloat16(in[threadIdx.x])));
  if (threadIdx.x == 0) *out = sum;
}

int main() {
  total<<<1, 128>>>(nullptr, nullptr);
  std::printf("%d\\n", static_cast<int>(cudaGetLastError()));
}
"""
NO_DRIVER = 35
"""cudaErrorInsufficientDriver (CUDA Runtime API, cudaError_t): what a machine without a driver
answers."""


def test_nvcc_and_gcc_compile_cub_for_the_gpu_of_a_spark(full: Emulated) -> None:
    full.needs_programs()
    folder = full.root / "cache" / "nvcc"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / "total.cu").write_text(PROGRAM)
    full.run(
        *("/usr/local/cuda/bin/nvcc", "-std=c++17", "-gencode=arch=compute_121a,code=sm_121a"),
        # what FlashInfer links with
        *("-L/usr/local/cuda/lib64", "-L/usr/local/cuda/lib64/stubs", "-lcudart"),
        *("-o", "/cache/nvcc/total", "/cache/nvcc/total.cu"),
        timeout=3600,
    )
    cuobjdump = f"/{SITE}/triton/backends/nvidia/bin/cuobjdump"
    listed = full.run(cuobjdump, "--list-elf", "/cache/nvcc/total")
    assert set(re.findall(r"sm_\w+", listed)) == {"sm_121a"}
    assert full.run("/cache/nvcc/total") == f"{NO_DRIVER}\n"


def test_gpu_code_is_what_the_audit_of_the_wheels_says(full: Emulated) -> None:
    cuobjdump = os.environ.get("CUOBJDUMP") or shutil.which("cuobjdump")
    if cuobjdump is None:
        pytest.skip("cuobjdump is not on PATH and $CUOBJDUMP is not set")
    site = full.root / SITE
    folder = SGLANG_ENV / "audit"
    reasons = json.loads((folder / "gpu_exceptions.json").read_text())
    committed = json.loads((folder / "results/gpu.json").read_text())["files"]
    present = {path: why for path, why in reasons.items() if (site / path).is_file()}
    codes = list(gpu_scan.scan_root(full.root, site, Path(cuobjdump)))
    assert gpu_rules.judge(codes, present)["problems"] == []
    dropped = {path for path in committed if not (site / path).is_file()}
    assert {code.path: [code.sass, code.ptx] for code in codes} == {
        path: [one["sass"], one["ptx"]] for path, one in committed.items() if path not in dropped
    }
    rules = [drop.paths for drop in real.RECIPE.wheels_drop]
    unexplained = {path for path in dropped if not any(re.match(rule, path) for rule in rules)}
    assert unexplained == set()


def records(site: Path) -> dict[str, set[str]]:
    """Return what each installed project lists: its normal name -> paths below site-packages."""
    found = {}
    for info in site.glob("*.dist-info"):
        with (info / "RECORD").open(newline="") as file:
            paths = {os.path.normpath(row[0]) for row in csv.reader(file)}
        found[canonicalize_name(info.name.split("-")[0])] = paths
    return found


def test_every_file_is_listed_and_the_recipe_drops_the_rest(full: Emulated) -> None:
    site = full.root / SITE
    installed = records(site)
    listed = set().union(*installed.values())
    assert [path for path in listed if not (site / path).is_file()] == []
    present = {
        path.relative_to(site).as_posix()
        for path in site.rglob("*")
        if path.is_file() and not path.is_symlink()  # links are those of /usr/local/cuda
    }
    assert present - listed == set()
    for drop in real.RECIPE.wheels_drop:
        paths = installed[canonicalize_name(drop.wheel)]
        assert [path for path in paths if re.match(drop.paths, path)] == [], drop.why
    files = [
        path.relative_to(full.root).as_posix()
        for path in (full.root / "usr").rglob("*")
        if path.is_symlink() or not path.is_dir()
    ]
    for deb_drop in real.RECIPE.debian.drop:
        assert [path for path in files if re.match(deb_drop.paths, path)] == [], deb_drop.why


def test_the_bill_of_materials_lists_everything(full: Emulated) -> None:
    layout = oci.Layout(full.layout)
    index = json.loads((full.layout / "index.json").read_text())
    image, artefact = index["manifests"]
    attached = layout.json(artefact["digest"])
    assert attached["artifactType"] == "application/vnd.cyclonedx+json"
    assert attached["subject"]["digest"] == image["digest"] == oci.read_image(full.layout).manifest
    bill: dict[str, Any] = layout.json(attached["layers"][0]["digest"])
    chosen = real.chosen("full")
    listed = {(c["name"], c["version"]) for c in bill["components"]}
    assert {(d.name, d.version) for d in chosen.debs} <= listed
    assert {(w.name, w.version) for w in chosen.wheels} <= listed
    assert {"spark-engram", "spark-tp-pad"} <= {name for name, _ in listed}
    assert set(records(full.root / SITE)) <= {canonicalize_name(name) for name, _ in listed}
