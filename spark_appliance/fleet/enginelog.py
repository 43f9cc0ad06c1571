"""What a rank is doing, read from the lines of its journal.

The messages are those of sglang 0.5.23 (file:line beside each pattern, below ``srt/``), of our
own node programs and of systemd. A line that nothing matches changes nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Final, Literal

from spark_appliance.names import FABRIC, GUARD, READY

Stage = Literal[
    "starting",
    "fabric",
    "prepare",
    "init",
    "weights",
    "kv-pool",
    "tuning",
    "graphs",
    "warm-up",
    "up",
    "ready",
    "draining",
    "failed",
]

TITLES: Final[dict[Stage, str]] = {
    "starting": "starting",
    "fabric": "fabric",
    "prepare": "checking files",
    "init": "joining the group",
    "weights": "loading weights",
    "kv-pool": "KV pool",
    "tuning": "tuning kernels",
    "graphs": "capturing graphs",
    "warm-up": "warming up",
    "up": "engine is up",
    "ready": "ready",
    "draining": "finishing requests",
    "failed": "failed",
}


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a rank is. ``share`` is of the stage; ``failure`` is the first line that says why."""

    stage: Stage = "starting"
    detail: str = ""
    share: float | None = None
    kv_tokens: int | None = None
    failure: str | None = None


_PREFIX: Final = re.compile(r"^\[[0-9-]+ [0-9:.]+(?: [A-Z0-9 ]+)?\] ")
"""common.py:2630: '[2026-11-30 16:00:00 TP2] message'."""

_SHARDS: Final = re.compile(
    # weight_utils.py:1166, 1306, 1371; tqdm draws it with carriage returns
    r"(?:Loading safetensors checkpoint shards|Loading safetensors using Fastsafetensor loader"
    r"|Multi-thread loading shards).*?(\d+)/(\d+) "
)
_WEIGHTS_BEGIN: Final = re.compile(
    r"Load weight begin\. avail mem=([0-9.]+) GB"
)  # model_runner:1274
_WEIGHTS_END: Final = re.compile(  # model_runner.py:1373
    r"Load weight end\. elapsed=([0-9.]+) s.*mem usage=([0-9.]+) GB"
)
_POOL: Final = re.compile(r"DSV4 memory calculation: .*full_token=(\d+)")  # pool_configurator:1689
_TOTAL: Final = re.compile(r"max_total_num_tokens=(\d+), ")  # managers/scheduler.py:1269
_GRAPH_BEGIN: Final = re.compile(r"Capture (.+?) (?:CUDA graph|\S+ graph) begin\.")
_GRAPH_END: Final = re.compile(  # cuda_graph_setup.py:695, 787
    r"Capture (.+?) (?:CUDA graph|\S+ graph) end\..*elapsed=([0-9.]+) s"
)
_CAPTURING: Final = re.compile(  # runner/decode_cuda_graph_runner.py:1343, in a tqdm bar
    r"Capturing batches \(bs=(\d+).*?(\d+)/(\d+) "
)
_REMAINING: Final = re.compile(r"Remaining number of requests (\d+)\.")  # tokenizer_manager:3533
_GUARD: Final = re.compile(r"MemAvailable .* is below the threshold .*: killed ")
_PACKING: Final = re.compile(r"(engram-l\d+-r\d+of\d+\.bin) \[[#.]*\] +([0-9.]+) %")

_FAILURES: Final = (
    re.compile(r"Scheduler hit an exception: (?P<why>.*)"),  # managers/scheduler.py:6372
    re.compile(r"(?P<why>Received sigquit from a child process\..*)"),  # engine.py:1978
    re.compile(r"(?P<why>.*torch\.(?:cuda\.)?OutOfMemoryError.*)"),
    re.compile(r"(?P<why>.*NCCL (?:error|WARN .*(?:[Ee]rror|failed)).*)"),
    re.compile(r"(?P<why>Loaded weights leave no GPU memory.*)"),  # kv_cache_configurator
    re.compile(r"(?P<why>(?:\w+\.)*[A-Z]\w*(?:Error|Exception): .+)"),  # end of a traceback
    re.compile(
        r"spark-engine\.service: "
        r"(?P<why>(?:Main|Control) process exited, code=(?!exited, status=0).*)"
    ),
    re.compile(r"spark-[a-z-]+\.service: (?P<why>Failed with result .*)"),
)


def read_line(progress: Progress, unit: str, line: str) -> Progress:
    """Return where the rank is after a line of ``unit`` (the unit that wrote it)."""
    last = line.rstrip("\r\n").split("\r")[-1] or line
    text = _PREFIX.sub("", last)
    if unit == READY and text.startswith("ready after "):
        return Progress("ready", text, None, progress.kv_tokens)
    failure = _failure(text)
    if failure is not None and progress.failure is None:
        return replace(progress, stage="failed", detail=failure, share=None, failure=failure)
    if _GUARD.search(text) and unit == GUARD:
        return replace(progress, stage="failed", detail=text, share=None, failure=text)
    if unit == FABRIC or text.startswith(("waiting: ", "fabric ready")):
        if progress.stage in ("starting", "fabric"):
            return Progress("fabric", text, None, progress.kv_tokens)
        return progress
    return _engine_line(progress, text)


def _engine_line(progress: Progress, text: str) -> Progress:
    tokens = progress.kv_tokens
    if found := _PACKING.search(text):
        return Progress("prepare", f"packing {found[1]}", float(found[2]) / 100, tokens)
    if "Init parallel begin." in text:
        return Progress("init", "waiting for the other ranks", None, tokens)
    if "Init parallel ends." in text:
        return Progress("init", "all ranks are there", None, tokens)
    if found := _WEIGHTS_BEGIN.search(text):
        return Progress("weights", f"{found[1]} GB free", None, tokens)
    if found := _SHARDS.search(text):
        done, of = int(found[1]), int(found[2])
        return Progress("weights", f"shard {done} of {of}", done / of if of else None, tokens)
    if found := _WEIGHTS_END.search(text):
        return Progress("weights", f"{found[2]} GB in {found[1]} s", 1.0, tokens)
    if found := _POOL.search(text):
        count = int(found[1])
        return Progress("kv-pool", f"{count:,} tokens", None, count)
    if "FlashInfer autotune with cache" in text:
        return Progress("tuning", "FlashInfer", None, tokens)
    if found := _CAPTURING.search(text):
        done, of = int(found[2]), int(found[3])
        share = done / of if of else None
        return Progress("graphs", f"batch size {found[1]}, {done} of {of}", share, tokens)
    if found := _GRAPH_BEGIN.search(text):
        return Progress("graphs", found[1], None, tokens)
    if found := _GRAPH_END.search(text):
        return Progress("graphs", f"{found[1]} in {found[2]} s", 1.0, tokens)
    if found := _TOTAL.search(text):
        count = int(found[1])
        return Progress("warm-up", f"{count:,} KV tokens", None, count)
    if "The server is fired up and ready to roll!" in text:  # http_server.py:2600
        return Progress("up", "waiting for a right answer", None, tokens)
    if found := _REMAINING.search(text):
        return Progress("draining", f"{found[1]} requests", None, tokens)
    return progress


def _failure(text: str) -> str | None:
    for pattern in _FAILURES:
        if found := pattern.search(text):
            return found["why"].strip()[:300]
    return None
