"""The records of the localmaxxing client (``lmx``): a run payload and hardware.json.

Fields, limits and required ones follow field notes section 7.6 (LMX README,
skill/references/speed-tests.md and hardware-and-setups.md). Nothing is sent anywhere:
``lmx speed-test`` validates and submits.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from spark_appliance.bench.result import Group, Node, Result
from spark_appliance.errors import InputError, Location, read_failure

_PROMPT_CHARS = 2000
_OUTPUT_CHARS = 4000
_TIMINGS_BYTES = 8192
# A DGX Spark as sold: 128 GB of LPDDR5X shared by CPU and GPU (NVIDIA's data sheet).
_SPARK_MEMORY_GB = 128.0
_SPARK_THREADS = 20
_GPU_NAME = "NVIDIA GB10"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Gpu(_Strict):
    """One entry of ``gpus``."""

    gpuName: str  # noqa: N815 - the site's names
    vramGb: float | None = None  # noqa: N815


class Hardware(_Strict):
    """hardware.json. Which fields are needed depends on ``hwClass``."""

    hwClass: Literal["DISCRETE_GPU", "UNIFIED", "CPU_ONLY"]  # noqa: N815
    gpuName: str | None = None  # noqa: N815
    gpuCount: Annotated[int, Field(ge=1)] | None = None  # noqa: N815
    vramGb: float | None = None  # noqa: N815
    gpus: list[Gpu] | None = None
    totalVramGb: float | None = None  # noqa: N815
    chipVendor: str | None = None  # noqa: N815
    chipFamily: str | None = None  # noqa: N815
    chipVariant: str | None = None  # noqa: N815
    unifiedMemoryGb: float | None = None  # noqa: N815
    cpu: str | None = None
    cpuThreads: int | None = None  # noqa: N815
    ramGb: float | None = None  # noqa: N815
    os: str | None = None
    powerWatts: float | None = None  # noqa: N815
    gpuPowerWatts: float | None = None  # noqa: N815

    @model_validator(mode="after")
    def _class_fields(self) -> Hardware:
        needed = {
            "DISCRETE_GPU": ("gpuName", "gpuCount", "vramGb"),
            "UNIFIED": ("chipVendor", "chipFamily", "chipVariant", "unifiedMemoryGb"),
            "CPU_ONLY": ("cpu",),
        }[self.hwClass]
        missing = [name for name in needed if getattr(self, name) is None]
        if missing:
            raise ValueError(f"hwClass {self.hwClass} needs {', '.join(missing)}")
        return self


class EngineFlags(_Strict):
    """``engineFlags`` of the payload."""

    commandSnippet: str | None = None  # noqa: N815
    tensorParallel: int | None = None  # noqa: N815
    concurrency: int | None = None
    temperature: float | None = None
    gpuMemUtil: float | None = None  # noqa: N815
    kvCacheDtype: str | None = None  # noqa: N815
    prefixCaching: bool | None = None  # noqa: N815
    chunkedPrefill: bool | None = None  # noqa: N815
    prefillChunkSize: int | None = None  # noqa: N815
    maxRunningSeqs: int | None = None  # noqa: N815
    specDraftTokens: int | None = None  # noqa: N815
    specAcceptedTokens: float | None = None  # noqa: N815
    specAcceptanceRate: float | None = None  # noqa: N815
    specMeanAcceptedLength: float | None = None  # noqa: N815


class Payload(_Strict):
    """The run payload of POST /api/speed-tests."""

    hfId: Annotated[str, Field(pattern=r"^[\w.-]+/[\w.-]+$")]  # noqa: N815
    hardware: Hardware
    engineName: str  # noqa: N815
    quantization: str
    tokSOut: float  # noqa: N815
    tokSPrefill: float | None = None  # noqa: N815
    tokSTotal: float | None = None  # noqa: N815
    ttftMs: float | None = None  # noqa: N815
    peakVramGb: float | None = None  # noqa: N815
    modelRevision: str | None = None  # noqa: N815
    backend: str | None = None
    promptTokens: int | None = None  # noqa: N815
    outputTokens: int | None = None  # noqa: N815
    prefillTokens: int | None = None  # noqa: N815
    contextLength: int | None = None  # noqa: N815
    notes: str | None = None
    engineVersion: str | None = None  # noqa: N815
    engineRepository: str | None = None  # noqa: N815
    engineBuild: str | None = None  # noqa: N815
    engineCommit: str | None = None  # noqa: N815
    engineFlags: EngineFlags | None = None  # noqa: N815
    promptSha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None  # noqa: N815
    promptSample: Annotated[str, Field(max_length=_PROMPT_CHARS)] | None = None  # noqa: N815
    outputSha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None  # noqa: N815
    outputSample: Annotated[str, Field(max_length=_OUTPUT_CHARS)] | None = None  # noqa: N815
    engineTimingsRaw: str | None = None  # noqa: N815
    samples: list[dict[str, float]] | None = None
    sampleStats: dict[str, dict[str, float]] | None = None  # noqa: N815

    @model_validator(mode="after")
    def _rules(self) -> Payload:
        alternatives = (self.tokSPrefill, self.tokSTotal, self.ttftMs, self.peakVramGb)
        if all(value is None for value in alternatives):
            raise ValueError("one of tokSPrefill, tokSTotal, ttftMs, peakVramGb is needed")
        if self.engineTimingsRaw and len(self.engineTimingsRaw.encode()) > _TIMINGS_BYTES:
            raise ValueError(f"engineTimingsRaw is longer than {_TIMINGS_BYTES} bytes")
        return self


@dataclass(frozen=True, slots=True)
class Facts:
    """What a result does not know: the model's hub id, its quantization, the hardware."""

    hf_id: str
    quantization: str
    hardware: Hardware | None = None
    hardware_class: Literal["DISCRETE_GPU", "UNIFIED"] = "DISCRETE_GPU"


def read_hardware(path: Path) -> Hardware:
    """Read a user's hardware.json. Raises InputError naming each wrong field."""
    try:
        return Hardware.model_validate_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise read_failure(path, error) from None
    except ValidationError as error:
        raise _invalid(error, Location(str(path))) from None


def payloads(result: Result, facts: Facts) -> list[tuple[str, Payload]]:
    """Return (name, payload) for each finished group; the site's record holds one.

    Raises InputError when the result has nothing to export or a field is not acceptable.
    """
    hardware = facts.hardware or hardware_of(result.evidence.nodes, facts.hardware_class)
    found = [
        (
            f"{g.prompt_kind}-c{g.concurrency}"
            + (f"-{g.target_tokens}" if g.target_tokens else ""),
            g,
        )
        for g in result.groups
        if "decode_tok_s" in g.summary
    ]
    if not found:
        raise InputError.one(
            "bench.lmx", "no finished group to export", "finish the measurement with --resume"
        )
    try:
        return [(name, _payload(result, group, facts, hardware)) for name, group in found]
    except ValidationError as error:
        raise _invalid(error, None) from None


def hardware_of(nodes: list[Node], hardware_class: Literal["DISCRETE_GPU", "UNIFIED"]) -> Hardware:
    """Describe the nodes; GB10's nvidia-smi has no memory size, so DGX Spark's is used.

    Raises InputError without nodes, or for nodes that are not GB10.
    """
    sparks = [n for n in nodes if "GB10" in n.facts.get("gpu.name", "")]
    if not sparks or len(sparks) != len(nodes):
        raise InputError.one(
            "bench.lmx-hardware",
            "the result does not say that it was measured on DGX Sparks"
            if not nodes
            else "not every node of the result reports a GB10",
            "write a hardware.json (check it with `lmx hardware validate`) and give it with "
            "--hardware",
        )
    count = len(sparks)
    powers = [n.use.power_w for n in sparks if n.use is not None and n.use.power_w != "N/A"]
    common: dict[str, Any] = {
        "cpuThreads": _SPARK_THREADS,
        "os": sparks[0].facts.get("os"),
        "gpuPowerWatts": round(sum(powers), 1) if len(powers) == count else None,
    }
    if hardware_class == "UNIFIED":
        return Hardware(
            hwClass="UNIFIED",
            chipVendor="NVIDIA",
            chipFamily="GB10",
            chipVariant=f"DGX Spark x{count}" if count > 1 else "DGX Spark",
            unifiedMemoryGb=_SPARK_MEMORY_GB * count,
            **common,
        )
    return Hardware(
        hwClass="DISCRETE_GPU",
        gpuName=_GPU_NAME,
        gpuCount=count,
        vramGb=_SPARK_MEMORY_GB,
        gpus=[Gpu(gpuName=_GPU_NAME, vramGb=_SPARK_MEMORY_GB)] * count,
        totalVramGb=_SPARK_MEMORY_GB * count,
        ramGb=_SPARK_MEMORY_GB * count,
        **common,
    )


def dumps(record: BaseModel) -> str:
    """Return a record's JSON; fields without a value are left out."""
    return json.dumps(record.model_dump(mode="json", exclude_none=True), indent=2) + "\n"


def _payload(result: Result, group: Group, facts: Facts, hardware: Hardware) -> Payload:
    summary = group.summary
    good = [s for r in group.rounds if r.status == "ok" for s in r.samples]
    engine = (result.evidence.engine or "unknown").split()
    info = result.evidence.server_info or {}
    ttft = summary.get("ttft_s")
    prefill = summary.get("prefill_tok_s")
    out = summary["aggregate_window_tok_s" if group.concurrency > 1 else "decode_tok_s"]
    accept_rate, accept_length = summary.get("accept_rate"), summary.get("accept_length")
    cached = [s.cached_tokens for s in good]
    return Payload(
        hfId=facts.hf_id,
        hardware=hardware,
        engineName=engine[0],
        engineVersion=engine[1] if len(engine) > 1 else None,
        engineBuild=result.evidence.image_digest,
        quantization=facts.quantization,
        backend="cuda" if hardware.hwClass != "CPU_ONLY" else None,
        tokSOut=round(out.median, 3),
        tokSPrefill=round(prefill.median, 3) if prefill else None,
        ttftMs=round(ttft.median * 1000, 3) if ttft else None,
        promptTokens=round(summary["prompt_tokens"].median),
        outputTokens=round(summary["completion_tokens"].median),
        # 0 says that the prompt met an empty cache; unknown stays unknown.
        prefillTokens=0 if cached and all(c == 0 for c in cached) else None,
        contextLength=_integer(info.get("context_length"))
        or _integer((result.evidence.models or {}).get("max_model_len")),
        engineFlags=EngineFlags(
            commandSnippet=_text(info.get("launch_command")),
            tensorParallel=_integer(info.get("tp_size")),
            concurrency=group.concurrency,
            temperature=result.protocol.temperature,
            gpuMemUtil=_float(info.get("mem_fraction_static")),
            kvCacheDtype=_text(info.get("kv_cache_dtype")),
            prefixCaching=not info["disable_radix_cache"]
            if "disable_radix_cache" in info
            else None,
            chunkedPrefill=(_integer(info.get("chunked_prefill_size")) or -1) > 0
            if "chunked_prefill_size" in info
            else None,
            prefillChunkSize=_positive(info.get("chunked_prefill_size")),
            maxRunningSeqs=_integer(info.get("max_running_requests")),
            specDraftTokens=_integer(info.get("speculative_num_draft_tokens")),
            specAcceptanceRate=round(accept_rate.median, 4) if accept_rate else None,
            specMeanAcceptedLength=round(accept_length.median, 4) if accept_length else None,
        ),
        promptSha256=good[0].prompt_sha256,
        promptSample=group.prompt_sample[:_PROMPT_CHARS] or None,
        outputSha256=good[0].output_sha256,
        outputSample=group.output_sample[:_OUTPUT_CHARS] or None,
        engineTimingsRaw=_timings(group),
        samples=[
            {
                "tokSOut": round(s.decode_tok_s, 3),
                "ttftMs": round(s.ttft_s * 1000, 3),
                "tokSPrefill": round(s.prefill_tok_s, 3),
            }
            for s in good
            if s.decode_tok_s and s.ttft_s and s.prefill_tok_s
        ],
        sampleStats={
            name: {
                "min": round(value.min, 3),
                "p50": round(value.median, 3),
                "mean": round(value.mean, 3),
                "max": round(value.max, 3),
                "stddev": round(value.stddev or 0.0, 3),
            }
            for name, value in (
                ("tokSOut", out),
                *((("tokSPrefill", prefill),) if prefill else ()),
            )
        },
        notes=f"spark-appliance {result.tool_version} bench {result.protocol.mode}, "
        f"{group.prompt_kind} prompt, {result.protocol.definitions}, {result.status}",
    )


def _timings(group: Group) -> str:
    """Return the edges of each request as JSON, as many as 8192 bytes hold."""
    edges = [
        {"start": s.timings.start, "first": s.timings.first, "last": s.timings.last,
         "completion_tokens": s.completion_tokens}
        for r in group.rounds if r.status == "ok" for s in r.samples
    ]  # fmt: skip
    while edges and len(json.dumps(edges).encode()) > _TIMINGS_BYTES:
        edges.pop()
    return json.dumps(edges)


def _invalid(error: ValidationError, where: Location | None) -> InputError:
    details = "; ".join(
        f"{'.'.join(map(str, e['loc'])) or 'record'}: {e['msg']}" for e in error.errors()
    )
    return InputError.one(
        "bench.lmx", f"not a valid lmx record: {details}", "correct the named fields", where
    )


def _integer(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _positive(value: Any) -> int | None:
    number = _integer(value)
    return number if number is not None and number > 0 else None


def _float(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _text(value: Any) -> str | None:
    if isinstance(value, list):
        return " ".join(map(str, value))
    return str(value) if value else None
