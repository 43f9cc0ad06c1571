"""The lines are made of the format strings of sglang 0.5.23, filled in by hand."""

from __future__ import annotations

from functools import reduce

import pytest

from spark_appliance.fleet.enginelog import Progress, read_line

E = "spark-engine.service"
STAMP = "[2026-11-30 16:00:00 TP1] "


def after(*lines: str, unit: str = E) -> Progress:
    return reduce(lambda progress, line: read_line(progress, unit, line), lines, Progress())


@pytest.mark.parametrize(
    ("line", "stage", "detail", "share"),
    [
        ("Init parallel begin.", "init", "waiting for the other ranks", None),
        ("Init parallel ends. elapsed=12.31 s", "init", "all ranks are there", None),
        ("Load weight begin. avail mem=115.20 GB", "weights", "115.20 GB free", None),
        (
            (
                "\rLoading safetensors checkpoint shards:   0% Completed | 0/48 [00:00<?, ?it/s]"
                "\rLoading safetensors checkpoint shards:  25% Completed | 12/48 [00:21<01:03]"
            ),
            "weights",
            "shard 12 of 48",
            0.25,
        ),
        (
            "Multi-thread loading shards:  50% Completed | 24/48 [00:21<00:20, 1.1it/s]",
            "weights",
            "shard 24 of 48",
            0.5,
        ),
        (
            (
                "Load weight end. elapsed=241.07 s, type=DeepseekV41ForCausalLM, quant=fp8, "
                "avail mem=12.94 GB, mem usage=101.00 GB."
            ),
            "weights",
            "101.00 GB in 241.07 s",
            1.0,
        ),
        (
            (
                "DSV4 memory calculation: unified=True, unified_fp8=True, dspark_draft_bf16=False, "
                "bytes_per_full_token=1673.31, available_bytes=1.60 GB, c128_state_fixed=0.00 GB, "
                "c2_state_fixed=0.01 GB, swa_fixed=0.28 GB, swa_ring_fixed=0.00 GB, "
                "c4_state_fixed=0.00 GB, full_token=750080"
            ),
            "kv-pool",
            "750,080 tokens",
            None,
        ),
        (
            "Running FlashInfer autotune with cache: /var/cache/spark-engine/autotune",
            "tuning",
            "FlashInfer",
            None,
        ),
        (
            (
                "Capture target decode CUDA graph begin. backend=full, num_tokens_per_req=6, "
                "avail mem=6.10 GB"
            ),
            "graphs",
            "target decode",
            None,
        ),
        (
            (
                "\rCapturing batches (bs=4 avail_mem=6.02 GB):   0%|     | 0/4 [00:00<?]"
                "\rCapturing batches (bs=2 avail_mem=5.90 GB):  50%|#####     | 2/4 [00:03<00:03]"
            ),
            "graphs",
            "batch size 2, 2 of 4",
            0.5,
        ),
        (
            (
                "Capture draft decode CUDA graph end. bs=[1, 2, 4], elapsed=31.22 s, "
                "mem usage=0.40 GB, avail mem=5.60 GB."
            ),
            "graphs",
            "draft decode in 31.22 s",
            1.0,
        ),
        (
            (
                "max_total_num_tokens=750080, chunked_prefill_size=768, max_prefill_tokens=16384, "
                "max_running_requests=4, context_len=500000, available_gpu_mem=5.10 GB"
            ),
            "warm-up",
            "750,080 KV tokens",
            None,
        ),
        ("The server is fired up and ready to roll!", "up", "waiting for a right answer", None),
        (
            (
                "Gracefully exiting... Remaining number of requests 3. Remaining requests "
                "remaining_rids=['a', 'b', 'c']."
            ),
            "draining",
            "3 requests",
            None,
        ),
    ],
)
def test_each_message_gives_its_stage(
    line: str, stage: str, detail: str, share: float | None
) -> None:
    found = after(STAMP + line if not line.startswith("\r") else line)
    assert (found.stage, found.detail, found.share) == (stage, detail, share)
    assert found.failure is None


def test_the_pool_s_size_is_kept() -> None:
    line = "DSV4 memory calculation: unified=True, full_token=750080"
    assert after(line, "The server is fired up and ready to roll!").kv_tokens == 750080


@pytest.mark.parametrize(
    ("unit", "line", "why"),
    [
        (E, STAMP + "Scheduler hit an exception: Traceback (most recent call last):", "Traceback"),
        (E, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", "OutOfMemory"),
        (E, "ValueError: Loaded weights leave no GPU memory for the KV cache", "leave no GPU"),
        (E, "spark2:12:34 [0] NCCL WARN Call to ibv_modify_qp failed with error 61", "ibv_modify"),
        (E, "Received sigquit from a child process. It usually means the child failed.", "sigquit"),
        (
            E,
            "spark-engine.service: Main process exited, code=killed, status=9/KILL",
            "code=killed, status=9/KILL",
        ),
        (
            "spark-fabric.service",
            "spark-fabric.service: Failed with result 'exit-code'.",
            "exit-code",
        ),
        (
            "spark-guard.service",
            "MemAvailable 2.90 GiB is below the threshold 3.00 GiB (serving): killed the engine",
            "below the threshold",
        ),
    ],
)
def test_failures_are_named(unit: str, line: str, why: str) -> None:
    found = read_line(Progress("weights"), unit, line)
    assert found.stage == "failed"
    assert found.failure is not None
    assert why in found.failure


@pytest.mark.parametrize(
    "line",
    [
        "spark-engine.service: Main process exited, code=exited, status=0/SUCCESS",
        "[2026-11-30 16:00:00 TP0] Decode batch, #running-req: 1, gen throughput (token/s): 71.20",
        "UserWarning: 'python -m sglang.launch_server' is still supported",
        "",
    ],
)
def test_other_lines_change_nothing(line: str) -> None:
    assert read_line(Progress("weights", "x"), E, line) == Progress("weights", "x")


def test_only_the_first_failure_of_a_rank_counts() -> None:
    found = after("ValueError: the cause", "spark-engine.service: Failed with result 'exit-code'.")
    assert found.failure == "ValueError: the cause"


def test_the_fabric_s_wait_is_shown() -> None:
    line = "waiting: enp1s0f0np0: no carrier"
    found = read_line(Progress(), "spark-fabric.service", line)
    assert (found.stage, found.detail) == ("fabric", line)


def test_ready_comes_from_the_probe_not_from_a_word() -> None:
    ready = "spark-ready.service"
    assert read_line(Progress("up"), ready, "waiting: /health answers 503").stage == "up"
    text = "ready after 731 s: a generation gave the right answer"
    assert read_line(Progress("up"), ready, text).stage == "ready"
