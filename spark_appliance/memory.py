"""The memory model of a node: every constant with unit and source, the budget, and what to turn.

GB10 shares 121.69 GiB between CPU and GPU, so one sum covers weights, KV cache, CUDA, the
operating system and the page cache. The model is for planning: it is calibrated on published
measurements (marked below) and leaves a reserve for what they vary by.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

from spark_appliance.model.facts import GIB, ModelFacts
from spark_appliance.model.findings import Finding, Path
from spark_appliance.parallel import Parallelism

TOTAL_GIB: Final = 121.69
"""Memory of a GB10 as Linux sees it (MiaAI-Lab GLM-EXL3#47)."""

SYSTEM_GIB: Final = 5.7
"""Kernel, driver, firmware and services of an idle headless node: 121.69 less the MemAvailable of
116 GiB seen idle (unslothai/unsloth PR#10705)."""

RUNTIME_GIB: Final = 4.0
"""CUDA context (0.6), NCCL (0.14 with the plan's buffers), Python processes, workspaces.
Inferred: it closes the gap between the sum of the other parts and the 4.3-4.7 GB of MemAvailable
left at TP 3 during a 256k-token prompt (MiaAI-Lab DeepSeek-v4.1-Flash#25)."""

HEAD_GIB: Final = 1.3
"""HTTP server, tokenizer and detokenizer, on rank 0 only (MiaAI-Lab README)."""

GRAPH_GIB_PER_REQUEST: Final = 5.6e9 / 16 / GIB
"""CUDA graphs: about 5.6 GB at batch size 16 (knapcio TP4 notes); linear in the batch size."""

TRANSIENT_BYTES: Final = 14.0
"""Prefill transient in bytes per (chunk token x prefix token): the indexer's scores
(MiaAI-Lab docs/chunked-prefill-memory.md, measured on the engine's preview branch)."""

TRANSIENT_CAP_GIB: Final = 3.0
"""sglang 0.5.23 scores in row chunks of 1 GiB whose transients run at about three times that
(``layers/attention/dsv4/v41_indexer/scoring.py``), so the transient stops growing there."""

RESERVE_GIB: Final = 3.0
"""Left free at all times: the steady threshold of the memory guard (christopherowen,
spark-ds41f)."""

START_RESERVE_GIB: Final = 5.0
"""The guard's threshold while weights are loaded (same source)."""

SWA_WINDOW: Final = 128
"""Sliding window of the encoder layers, tokens."""

SWA_BYTES_PER_TOKEN: Final = 23_985
"""Sliding-window KV over 40 layers and the draft: 585 * 40 * 41/40 (sglang 0.5.23
``model_executor/pool_configurator.py``)."""

BEFORE_LOAD_GIB: Final = 107.0
"""Free memory that the engine sees before it loads weights. At TP 4 a fraction of 0.80 gave 10.0 M
and 0.90 gave 16.7 M tokens (MiaAI-Lab README): 0.1 of it holds 6.7 M tokens. Agrees with TP 3,
where 101 GiB of weights and a fraction of 0.944 left nothing: 101 / 0.944."""

_LARGEST_FRACTION: Final = 0.97
"""More than any published recipe uses (0.95)."""

POOL_TOLERANCE_GIB: Final = 1.5
"""How far the engine's own pool size is off the prediction: the page cache alone moves it by 0.5 GB
from boot to boot (MiaAI-Lab README), and the free memory after loading was measured once."""


@dataclass(frozen=True, slots=True)
class Workload:
    """The engine arguments that decide the memory; sizes in tokens."""

    context: int
    chunk: int
    kv_tokens: int
    running: int
    graph_batch: int
    draft_tokens: int
    fraction: float
    prefix_tails: int | None = None
    ep: int = 1


@dataclass(frozen=True, slots=True)
class Part:
    """One row of the budget, GiB, with a word on where it comes from."""

    name: str
    gib: float
    why: str


@dataclass(frozen=True, slots=True)
class Budget:
    """The memory of one node at its worst moment."""

    parts: tuple[Part, ...]
    total_gib: float = TOTAL_GIB
    reserve_gib: float = RESERVE_GIB

    @property
    def used_gib(self) -> float:
        """Sum of all parts."""
        return sum(part.gib for part in self.parts)

    @property
    def free_gib(self) -> float:
        """What is left, before the reserve."""
        return self.total_gib - self.used_gib

    @property
    def missing_gib(self) -> float:
        """How much is lacking to keep the reserve; zero or less when the plan fits."""
        return self.reserve_gib - self.free_gib

    def of(self, name: str) -> float:
        """Return the size of one part, 0 when it has no row."""
        return sum(part.gib for part in self.parts if part.name == name)


def resident_weights_gib(facts: ModelFacts, parallelism: Parallelism) -> float:
    """Return the weights of one rank, GiB, with the padding it needs."""
    tp = parallelism.tp
    if tp in facts.weights_gib:
        return facts.weights_gib[tp] + parallelism.expert_padding_bytes / GIB
    if not facts.expert_bytes:
        return facts.dense_bytes / tp / GIB
    return (facts.expert_bytes / tp + facts.dense_bytes + parallelism.padding_bytes) / GIB


def budget(
    facts: ModelFacts,
    parallelism: Parallelism,
    work: Workload,
    *,
    head: bool,
    cache_gib: float = 0.0,
) -> Budget:
    """Return the budget of a rank. ``cache_gib`` is the Engram row cache, GiB."""
    parts = [
        Part("system", SYSTEM_GIB, "kernel, driver, services"),
        Part("weights", resident_weights_gib(facts, parallelism), f"one of {parallelism.tp} ranks"),
        Part("runtime", RUNTIME_GIB, "CUDA context, NCCL, workspaces"),
        Part(
            "KV cache", _kv_gib(facts, parallelism.tp, work.kv_tokens), f"{work.kv_tokens:,} tokens"
        ),
    ]
    if facts.deepseek_v41:
        parts.append(
            Part("sliding window", _swa_gib(work), f"{work.running} requests and prefixes")
        )
    parts += [
        Part(
            "CUDA graphs",
            GRAPH_GIB_PER_REQUEST * work.graph_batch,
            f"batch sizes up to {work.graph_batch}",
        ),
        Part(
            "prefill", _transient_gib(facts, work), f"chunk {work.chunk} at {work.context:,} tokens"
        ),
    ]
    if cache_gib:
        parts.append(Part("Engram cache", cache_gib, "row cache in host memory"))
    if head:
        parts.append(Part("head", HEAD_GIB, "HTTP, tokenizer, detokenizer"))
    return Budget(tuple(parts))


def check_budget(
    facts: ModelFacts, parallelism: Parallelism, work: Workload, worst: Budget, path: Path
) -> list[Finding]:
    """Judge the budget of the fullest node; the remedy names a knob and its value."""
    findings = []
    if worst.missing_gib > 0:
        findings.append(
            Finding(
                "memory.does-not-fit",
                path,
                f"a node needs {worst.used_gib:.1f} GiB and {worst.reserve_gib:g} GiB of reserve "
                f"({_sum(worst)}), it has {worst.total_gib:g} GiB: {worst.missing_gib:.1f} GiB are "
                "missing",
                _remedy(facts, parallelism, work, worst),
            )
        )
    floor = fraction_floor(facts, parallelism)
    if floor is not None and work.fraction < floor:
        findings.append(
            Finding(
                "memory.fraction-too-low",
                path,
                f"--mem-fraction-static {work.fraction:g} leaves no KV cache at TP "
                f"{parallelism.tp}: SGLang keeps back {1 - work.fraction:.3f} of the memory that "
                "was free before loading",
                f"set mem-fraction-static to {floor:.3f} or more",
            )
        )
    elif worst.missing_gib <= 0:
        findings += _check_pool(facts, parallelism, work, worst, path)
    if work.kv_tokens < work.context:
        findings.append(
            Finding(
                "memory.pool-below-context",
                path,
                f"the KV pool of {work.kv_tokens:,} tokens cannot hold one request of "
                f"{work.context:,} tokens",
                "raise max-total-tokens or lower context-length",
            )
        )
    return findings


def fraction_floor(facts: ModelFacts, parallelism: Parallelism) -> float | None:
    """Return the smallest ``--mem-fraction-static`` that leaves a KV pool, rounded up.

    None where the free memory after loading was not measured.
    """
    after = _free_after_load(facts, parallelism)
    if after is None or after <= 0:
        return None
    return math.ceil((1 - after / BEFORE_LOAD_GIB) * 1000) / 1000


def _free_after_load(facts: ModelFacts, parallelism: Parallelism) -> float | None:
    measured = facts.free_after_load_gib.get(parallelism.tp)
    return None if measured is None else measured - parallelism.expert_padding_bytes / GIB


def _check_pool(
    facts: ModelFacts, parallelism: Parallelism, work: Workload, worst: Budget, path: Path
) -> list[Finding]:
    """Predict whether SGLang clamps the pool; it does so with a log line only."""
    after = _free_after_load(facts, parallelism)
    if after is None:
        return []
    pool = after - (1 - work.fraction) * BEFORE_LOAD_GIB - worst.of("sliding window")
    wanted = worst.of("KV cache")
    if pool <= 0 or wanted - pool <= POOL_TOLERANCE_GIB:
        return []
    tokens = max(0, round(pool * GIB / facts.kv_bytes_per_token, -5))
    fraction = math.ceil((work.fraction + (wanted - pool) / BEFORE_LOAD_GIB) * 100) / 100
    choices = []
    if fraction <= _LARGEST_FRACTION:
        choices.append(f"mem-fraction-static to {fraction:g}")
    if tokens >= work.context:
        choices.append(f"max-total-tokens to {tokens:.0f}")
    remedy = f"set {' or '.join(choices)}" if choices else "lower context-length, or use more nodes"
    return [
        Finding(
            "memory.pool-clamped",
            path,
            f"with --mem-fraction-static {work.fraction:g} SGLang probably holds only about "
            f"{tokens:,.0f} KV tokens instead of {work.kv_tokens:,}, and only log it",
            remedy,
            "warning",
        )
    ]


def _kv_gib(facts: ModelFacts, tp: int, tokens: int) -> float:
    share = tp if facts.kv_sharded else 1
    return facts.kv_bytes_per_token * tokens / share / GIB


def _shrink(facts: ModelFacts, parallelism: Parallelism, work: Workload, worst: Budget) -> str:
    """Turn knob after knob to its small end until the sum fits; return what was turned.

    Empty when even the smallest settings do not fit.
    """
    page = max(facts.page_size, 1)
    cache = worst.of("Engram cache")
    changes: dict[str, int] = {}
    batch = min(4, work.running, work.graph_batch)
    steps: list[tuple[dict[str, int], Workload]] = []
    small = replace(work, kv_tokens=-(-work.context // page) * page)
    steps.append(({"max-total-tokens": small.kv_tokens}, small))
    small = replace(small, running=batch, graph_batch=batch, prefix_tails=None)
    names = {"max-running-requests": batch, "cuda-graph-max-bs-decode": batch}
    steps.append((names, small))
    small = replace(small, chunk=min(work.chunk, 3 * page))
    steps.append(({"chunked-prefill-size": small.chunk}, small))
    context = min(work.context, 32 * 1024)
    small = replace(small, context=context, kv_tokens=context)
    steps.append(({"context-length": context, "max-total-tokens": context}, small))
    small = replace(small, running=1, graph_batch=1, chunk=min(work.chunk, page))
    names = {"max-running-requests": 1, "cuda-graph-max-bs-decode": 1}
    steps.append((names | {"chunked-prefill-size": small.chunk}, small))
    for names, candidate in steps:
        changes |= names
        if budget(facts, parallelism, candidate, head=True, cache_gib=cache).missing_gib <= 0:
            return ", ".join(f"{name} to {value}" for name, value in changes.items())
    return ""


_SWA_PAGE: Final = 256


def prefix_tails_gib(count: int) -> float:
    """Return what ``count`` more cached prefix tails take, GiB."""
    return count * (SWA_WINDOW + _SWA_PAGE) * SWA_BYTES_PER_TOKEN / GIB


def _swa_gib(work: Workload) -> float:
    """Return the sliding-window pool: requests, two chunks in flight, cached prefix tails."""
    tokens = 2 * work.chunk + _SWA_PAGE
    if work.prefix_tails is not None:
        tokens += work.prefix_tails * (SWA_WINDOW + _SWA_PAGE)
    return tokens * SWA_BYTES_PER_TOKEN / GIB + work.running * _swa_request_gib(work)


def _swa_request_gib(work: Workload) -> float:
    """Return what one more request takes: its window, its draft, and four tails by default."""
    tokens = SWA_WINDOW + SWA_WINDOW * work.draft_tokens + _SWA_PAGE
    if work.prefix_tails is None:
        tokens += 4 * (SWA_WINDOW + _SWA_PAGE)
    return tokens * SWA_BYTES_PER_TOKEN / GIB


def _transient_gib(facts: ModelFacts, work: Workload) -> float:
    if not facts.deepseek_v41:
        return 0.5  # a small dense model: activations of one chunk, an upper guess
    return min(TRANSIENT_BYTES * work.chunk * work.context / GIB, TRANSIENT_CAP_GIB)


def _sum(worst: Budget) -> str:
    return " + ".join(f"{part.name} {part.gib:.1f}" for part in worst.parts)


def _remedy(facts: ModelFacts, parallelism: Parallelism, work: Workload, worst: Budget) -> str:
    """Name the first knob whose turning alone is enough, else say that none is."""
    missing = worst.missing_gib
    page = facts.page_size
    cache = worst.of("Engram cache")
    if cache >= missing:
        return f"set engram_cache_gib to {math.floor(10 * (cache - missing)) / 10:g}"
    per_token = _kv_gib(facts, parallelism.tp, 1)
    tokens = math.floor((work.kv_tokens - missing / per_token) / page) * page
    if tokens >= work.context:
        return f"set max-total-tokens to {tokens} (or lower)"
    request = GRAPH_GIB_PER_REQUEST + _swa_request_gib(work) * facts.deepseek_v41
    batch = math.floor(min(work.graph_batch, work.running) - missing / request)
    if batch >= 1:
        return f"set cuda-graph-max-bs-decode and max-running-requests to {batch}"
    prefill = worst.of("prefill") - missing
    if facts.deepseek_v41 and prefill > 0:
        chunk = math.floor(prefill * GIB / TRANSIENT_BYTES / work.context / page) * page
        if chunk >= page:
            return f"set chunked-prefill-size to {chunk}"
    if tokens >= page:
        return f"set context-length and max-total-tokens to {tokens} (or lower)"
    together = _shrink(facts, parallelism, work, worst)
    if together:
        return f"set {together}"
    for nodes in range(parallelism.tp + 1, 9):
        smaller = facts.weights_gib.get(nodes)
        if smaller is not None and facts.weights_gib.get(parallelism.tp, 1e9) - smaller > missing:
            return f"no setting helps: use {nodes} nodes, where weights take {smaller:g} GiB each"
    return "no setting helps: use more nodes or a smaller model"
