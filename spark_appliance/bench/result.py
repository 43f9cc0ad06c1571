"""The result file: every model here is a part of the documented JSON Schema.

Times are in seconds, rates in tokens per second, power in watts, unless a name says otherwise.
``spark-appliance bench schema`` prints the schema that pydantic derives from ``Result``.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

SCHEMA_ID: Literal["spark-appliance.bench/1"] = "spark-appliance.bench/1"

# What each number means. A change of any formula changes this word, and `bench compare` then
# refuses to compare: decode = (completion_tokens - 1) / (last - first token time), counts from
# the endpoint's usage; prefill = prompt_tokens / TTFT; both aggregates as in metrics.py.
DEFINITIONS = "usage-first-to-last/1"

PromptKind = Literal["prose", "code", "structured", "json", "file"]
Mode = Literal["speed", "sweep", "context", "longcheck"]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
# nvidia-smi's answer for what a GB10 does not report; it is never turned into a number.
Reading = float | Literal["N/A"]


class Record(BaseModel):
    """Base: immutable, and unknown fields are an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Failure(Record):
    """Why a request gave no sample."""

    kind: str = Field(description="stable identifier, for example `refused` or `cut`")
    message: str
    remedy: str = ""


class Acceptance(Record):
    """Speculative decoding as the engine reports it."""

    accept_rate: float | None = Field(description="accepted / proposed draft tokens, 0..1")
    accept_length: float | None = Field(description="tokens per verification step, with the bonus")
    source: str = Field(description="the engine's field or counter, and what it covers")


class Needle(Record):
    """A sentence hidden in a long prompt, and whether the answer had it."""

    depth: float = Field(description="position in the prompt, 0 start .. 1 end")
    expected: str
    found: bool
    where: Literal["content", "reasoning", "nowhere"]


class Timings(Record):
    """Raw client times of one request, on the client's monotonic clock.

    All are seconds since the round's first request was started.
    """

    start: float = Field(description="just before the request was handed to the HTTP client")
    connected: float | None = Field(description="when a new connection stood; null: reused")
    first: float | None = Field(description="arrival of the first event with generated text")
    last: float | None = Field(description="arrival of the last event with generated text")
    finish: float | None = Field(description="arrival of the event with the finish reason")
    end: float = Field(description="end of the response")
    chunk_us: list[int] = Field(
        description="arrival of every event with generated text, microseconds after `start`"
    )


class Sample(Record):
    """One streaming request."""

    stream: int = Field(description="0-based number within the round")
    status: Literal["ok", "failed"]
    failure: Failure | None = None
    nonce: str = Field(description="unique first line of this request's prompt")
    prompt_sha256: Sha256 = Field(description="of the prompt without the nonce line, UTF-8")
    output_sha256: Sha256 | None = Field(description="of reasoning + content, UTF-8")
    finish_reason: str | None
    prompt_tokens: int | None
    completion_tokens: int | None
    cached_tokens: int | None = Field(description="null: the endpoint does not report it")
    reasoning_tokens: int | None
    chunks: int = Field(description="events with generated text; not a token count")
    ttft_s: float | None
    prefill_tok_s: float | None
    decode_tok_s: float | None
    acceptance: Acceptance | None = None
    needle: Needle | None = None
    timings: Timings


class Round(Record):
    """The requests that were started together."""

    status: Literal["ok", "failed", "interrupted"] = Field(
        description="only rounds that are `ok` enter the summary"
    )
    started_s: float = Field(description="seconds since the run began")
    ended_s: float
    samples: list[Sample]
    aggregate_wall_tok_s: float | None
    aggregate_window_tok_s: float | None
    acceptance: Acceptance | None = Field(
        default=None, description="from engine counters before and after the round"
    )


class Summary(Record):
    """One metric over the rounds of a group (one value a round)."""

    n: int
    median: float
    mean: float
    min: float
    max: float
    stddev: float | None = Field(description="sample standard deviation (n - 1); null for n < 2")
    ci95: tuple[float, float] | None = Field(
        description="95 % confidence interval of the mean, Student's t; null for n < 2"
    )


class Group(Record):
    """All rounds of one prompt kind, concurrency and prompt length."""

    prompt_kind: PromptKind
    concurrency: int = Field(ge=1)
    target_tokens: int | None = Field(default=None, description="intended prompt length")
    rounds: list[Round]
    summary: dict[str, Summary]
    ttft_p50_s: float | None = Field(default=None, description="over all streams of all rounds")
    ttft_p95_s: float | None = None
    prompt_sample: str = Field(default="", description="first 2000 characters, without nonce")
    output_sample: str = Field(default="", description="first 4000 characters of one output")


class Protocol(Record):
    """What was asked for: `bench compare` refuses two results that differ here."""

    mode: Mode
    definitions: str = DEFINITIONS
    prompts: dict[str, Sha256] = Field(
        description="prompt kind -> sha256 of the canonical prompt or, where prompts are cut "
        "from real text, of the text source"
    )
    concurrency: list[int]
    target_tokens: list[int] = Field(default_factory=list)
    max_tokens: int
    warmup: int = Field(description="untimed rounds before the first timed one")
    rounds: int = Field(description="timed rounds of each group")
    temperature: float = 0.0
    allowed_cached_tokens: int = 0
    extra_body: dict[str, Any] = Field(default_factory=dict)


class NodeSample(Record):
    """One reading of one node; `t` is the client's clock, seconds since the run began."""

    t: float
    sm_utilization_pct: Reading
    power_w: Reading
    temperature_c: Reading
    sm_clock_mhz: Reading
    memory_clock_mhz: Reading
    gpu_memory_used_mib: Reading
    mem_available_kib: Reading


class NodeUse(Record):
    """Means over the readings taken while a timed round ran and SM utilisation was >= 50 %."""

    readings: int
    power_w: Reading
    sm_clock_mhz: Reading
    temperature_c: Reading
    gpu_memory_used_mib: Reading
    mem_available_kib: Reading
    mem_available_min_kib: Reading


class Node(Record):
    """A node's facts and its readings."""

    name: str
    facts: dict[str, str] = Field(description="kernel, driver, firmware, clocks: as printed")
    samples: list[NodeSample] = Field(default_factory=list)
    use: NodeUse | None = None
    error: str | None = Field(default=None, description="why facts or readings are missing")


class Client(Record):
    """The machine that measured."""

    system: str
    python: str
    http_library: str
    cpus: int | None
    on_serving_machine: bool


class LoadReading(Record):
    """Requests inside the engine, read during the run."""

    t: float
    running: int
    waiting: int


class Evidence(Record):
    """What the numbers were measured on."""

    client: Client
    engine: str | None = Field(description="name and version where the endpoint says so")
    server_info: dict[str, Any] | None = Field(description="secrets replaced by `***`")
    models: dict[str, Any] | None = Field(description="the model's entry of /v1/models")
    engine_load: list[LoadReading] = Field(default_factory=list)
    plan_sha256: Sha256 | None = None
    image_digest: str | None = None
    text_source: dict[str, Any] | None = Field(
        default=None, description="folder names, file count and sha256 of the real text"
    )
    nodes: list[Node] = Field(default_factory=list)


class Endpoint(Record):
    """Where the requests went; never contains a credential."""

    url: str
    model: str


class Result(Record):
    """A run of `spark-appliance bench`."""

    schema_id: Literal["spark-appliance.bench/1"] = SCHEMA_ID
    tool_version: str
    status: Literal["complete", "partial"]
    problems: list[str] = Field(default_factory=list, description="warnings and what is missing")
    started: str = Field(description="UTC, ISO 8601")
    finished: str
    resumed: list[str] = Field(default_factory=list, description="start of each later session")
    endpoint: Endpoint
    protocol: Protocol
    groups: list[Group]
    evidence: Evidence
