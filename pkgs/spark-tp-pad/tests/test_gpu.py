"""The real modules on a CUDA device: padded on three ranks against unpadded on one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from engine_harness import require_engine

pytestmark = pytest.mark.gpu

#: Bitwise: nothing is summed across ranks, each output comes from the same dot product.
BITWISE = ("embedding", "q_latent", "wq_b", "router", "top_k", "draft_tokens")
#: Sums across ranks round to BF16 once for each rank.
TOLERANCE = 0.02


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    require_engine()
    from gpu_worker import WIDE
    from safetensors.torch import save_file
    from shares import checkpoint

    path = tmp_path_factory.mktemp("wide") / "model.safetensors"
    save_file(checkpoint(WIDE), path)
    return path


def launch(weights: Path, folder: Path, devices: list[int], backend: str) -> list[dict]:
    folder.mkdir(parents=True)
    spec = {
        "folder": str(folder / "model"),
        "weights": str(weights),
        "tp": len(devices),
        "devices": devices,
        "backend": backend,
        "store": str(folder / "store"),
        "out": str(folder / "out"),
    }
    (folder / "spec.json").write_text(json.dumps(spec))
    worker = Path(__file__).with_name("gpu_worker.py")
    logs = [(folder / f"log.{rank}").open("w+") for rank in range(len(devices))]
    ranks = [
        subprocess.Popen(
            [sys.executable, str(worker), str(folder / "spec.json"), str(rank)],
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        for rank, log in enumerate(logs)
    ]
    try:
        codes = [process.wait(timeout=280) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    for log in logs:
        log.seek(0)
    assert codes == [0] * len(devices), "\n".join(log.read()[-4000:] for log in logs)
    return [torch.load(f"{spec['out']}.{rank}") for rank in range(len(devices))]


@pytest.fixture(scope="module")
def whole(weights, tmp_path_factory):
    return launch(weights, tmp_path_factory.mktemp("one") / "run", [0], "gloo")[0]


def compare(ranks: list[dict], whole: dict) -> None:
    for name, reason in whole["absent"].items():
        print(f"not run here: {name}: {reason}")
    assert {"embedding", "layer.wq_b", "layer.wo_b", "stage.wo_b", "logits"} <= set(
        whole["values"]
    ), whole["absent"]
    for rank, result in enumerate(ranks):
        assert result["absent"].keys() == whole["absent"].keys(), result["absent"]
        assert result["values"].keys() == whole["values"].keys()
        for name, expected in whole["values"].items():
            found = result["values"][name]
            assert found.shape == expected.shape, name
            if name.rsplit(".", 1)[-1] in BITWISE:
                assert torch.equal(found, expected), name
            scale = float(expected.abs().max())
            error = float((found - expected).abs().max()) / max(scale, 1e-9)
            print(f"rank {rank} {name}: largest value {scale:.4g}, relative error {error:.2e}")
            assert scale > 0, name
            assert error < TOLERANCE, (name, error)


def test_three_ranks_on_one_device(weights, whole, tmp_path):
    # NCCL refuses several ranks on one device, so they speak over gloo.
    compare(launch(weights, tmp_path / "run", [0, 0, 0], "gloo"), whole)


def test_two_devices(weights, whole, tmp_path):
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs two CUDA devices, found {torch.cuda.device_count()}")
    compare(launch(weights, tmp_path / "run", [0, 1], "nccl"), whole)


def test_three_devices(weights, whole, tmp_path):
    if torch.cuda.device_count() < 3:
        pytest.skip(f"needs three CUDA devices, found {torch.cuda.device_count()}")
    compare(launch(weights, tmp_path / "run", [0, 1, 2], "nccl"), whole)
