"""What the engine behind the endpoint says of itself.

Routes and fields are those of SGLang 0.5.23 (entrypoints/http_server.py, entrypoints/v1_loads.py,
observability/metrics_collector.py), with older SGLang, vLLM and llama.cpp where they differ.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from spark_appliance.bench.client import Client, EndpointError
from spark_appliance.bench.failures import from_status
from spark_appliance.bench.result import Acceptance, Failure

_SECRET_NAME = re.compile(
    r"(?:^|_)(?:api_?key|keyfile_password|secret|password|passwd|credentials?|token)$",
    re.IGNORECASE,
)
_SECRET_FLAG = re.compile(r"--[a-z-]*(?:api-key|password|secret|-token)\Z")
_SECRET_IN_COMMAND = re.compile(r"(--[a-z-]*(?:api-key|password|secret|-token)(?:=|\s+))(\S+)")
_MASK = "***"

# Prometheus names of (running, waiting) requests.
_LOAD_METRICS = (
    ("sglang:num_running_reqs", "sglang:num_queue_reqs"),
    ("vllm:num_requests_running", "vllm:num_requests_waiting"),
    ("llamacpp:requests_processing", "llamacpp:requests_deferred"),
)
_SAMPLE_LINE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{[^}]*\})?\s+([-+0-9.eE]+|NaN)")


@dataclass(frozen=True, slots=True)
class Engine:
    """The engine's identity; ``server_info`` has its secrets masked."""

    model: str
    name: str | None = None
    server_info: dict[str, Any] | None = None
    card: dict[str, Any] | None = None
    models: tuple[str, ...] = ()

    @property
    def is_sglang(self) -> bool:
        """Whether SGLang's request extensions may be used."""
        return bool(self.name and self.name.startswith("sglang "))

    @property
    def context_length(self) -> int | None:
        """Tokens of prompt and answer together, where the endpoint says so."""
        value = (self.card or {}).get("max_model_len")
        return value if isinstance(value, int) else None


@dataclass(frozen=True, slots=True)
class Load:
    """Requests that the engine works on or holds in its queue."""

    running: int
    waiting: int
    source: str


@dataclass(frozen=True, slots=True)
class SpecCounters:
    """vLLM's counters since it started."""

    drafts: float
    proposed: float
    accepted: float


async def identify(client: Client, model: str | None, secrets: tuple[str, ...] = ()) -> Engine:
    """Ask /v1/models and /server_info; the first model is used unless one is named.

    Raises EndpointError for an endpoint that cannot be used.
    """
    url = client.address.api + "/models"
    status, body = await client.get("/v1/models")
    if status != 200 and not (status == 404 and model is not None):
        raise EndpointError(from_status(status, body, url))
    try:
        listing = json.loads(body)
    except ValueError:
        listing = None
    cards = listing.get("data") if isinstance(listing, dict) else None
    cards = [c for c in cards or [] if isinstance(c, dict) and isinstance(c.get("id"), str)]
    names = tuple(str(c["id"]) for c in cards)
    if not names and model is None:
        raise EndpointError(
            Failure(
                kind="not-found",
                message=f"{url} lists no model",
                remedy="check the URL, or name the model with --model",
            )
        )
    chosen = model or names[0]
    card = next((c for c in cards if c["id"] == chosen), None)
    info = await _server_info(client)
    version = (info or {}).get("version")
    name = f"sglang {version}" if info is not None and version else None
    if name is None and card is not None and card.get("owned_by") == "vllm":
        answer = await client.get_json("/version")
        name = (
            f"vllm {answer['version']}"
            if isinstance(answer, dict) and "version" in answer
            else None
        )
    if name is None and card is not None:
        name = str(card["owned_by"]) if card.get("owned_by") else None
    return Engine(
        model=chosen,
        name=name,
        server_info=redact(info, secrets) if info is not None else None,
        card=redact(card, secrets) if card is not None else None,
        models=names,
    )


async def _server_info(client: Client) -> dict[str, Any] | None:
    # /get_server_info is the deprecated name, and the only one in older releases.
    for path in ("/server_info", "/get_server_info"):
        info = await client.get_json(path)
        if isinstance(info, dict) and ("internal_states" in info or "launch_command" in info):
            return info
    return None


def redact(value: Any, secrets: tuple[str, ...] = ()) -> Any:
    """Return a copy with every credential replaced by ``***``.

    Masked are fields whose name says so, the value after a flag such as ``--api-key`` in a
    command line (list or text), and each of ``secrets`` wherever it stands.
    """
    if isinstance(value, dict):
        return {
            key: _MASK
            if _SECRET_NAME.search(str(key)) and item not in (None, "", False)
            else redact(item, secrets)
            for key, item in value.items()
        }
    if isinstance(value, list):
        masked = []
        hide = False
        for item in value:
            masked.append(_MASK if hide else redact(item, secrets))
            hide = isinstance(item, str) and bool(_SECRET_FLAG.search(item))
        return masked
    if isinstance(value, str):
        value = _SECRET_IN_COMMAND.sub(rf"\g<1>{_MASK}", value)
        for secret in secrets:
            value = value.replace(secret, _MASK)
    return value


async def load(client: Client) -> Load | None:
    """Return how busy the engine is, or None where it does not say.

    Tried in order: /v1/loads (SGLang), /get_load (older SGLang), /metrics, /slots
    (llama.cpp). Raises EndpointError when the endpoint is gone.
    """
    answer = await client.get_json("/v1/loads")
    if isinstance(answer, dict) and isinstance(answer.get("loads"), list):
        ranks = [r for r in answer["loads"] if isinstance(r, dict)]
        return Load(
            sum(int(r.get("num_running_reqs", 0)) for r in ranks),
            sum(int(r.get("num_waiting_reqs", 0)) for r in ranks),
            "/v1/loads",
        )
    answer = await client.get_json("/get_load")
    if isinstance(answer, list) and answer and all(isinstance(r, dict) for r in answer):
        waiting = sum(int(r.get("num_waiting_reqs", 0)) for r in answer)
        total = sum(int(r.get("num_reqs", 0)) for r in answer)
        return Load(max(0, total - waiting), waiting, "/get_load")
    metrics = await read_metrics(client)
    for running, waiting_name in _LOAD_METRICS:
        if running in metrics:
            return Load(int(metrics[running]), int(metrics.get(waiting_name, 0)), "/metrics")
    answer = await client.get_json("/slots")
    if isinstance(answer, list) and answer and all(isinstance(s, dict) for s in answer):
        return Load(sum(bool(s.get("is_processing")) for s in answer), 0, "/slots")
    return None


async def read_metrics(client: Client) -> dict[str, float]:
    """Return the samples of /metrics, summed over their labels; empty where it is off."""
    status, body = await client.get("/metrics")
    if status != 200:
        return {}
    return parse_metrics(body.decode(errors="replace"))


def parse_metrics(text: str) -> dict[str, float]:
    """Read Prometheus' text format; values of one name are summed over their labels."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        match = _SAMPLE_LINE.match(line)
        if match and match[2] != "NaN":
            found[match[1]] = found.get(match[1], 0.0) + float(match[2])
    return found


async def spec_counters(client: Client) -> SpecCounters | None:
    """Return vLLM's speculative decoding counters, or None."""
    metrics = await read_metrics(client)
    names = (
        "vllm:spec_decode_num_drafts_total",
        "vllm:spec_decode_num_draft_tokens_total",
        "vllm:spec_decode_num_accepted_tokens_total",
    )
    if not all(name in metrics for name in names):
        return None
    return SpecCounters(*(metrics[name] for name in names))


def acceptance_between(
    before: SpecCounters | None, after: SpecCounters | None
) -> Acceptance | None:
    """Return the acceptance of what ran between two readings (tokens per step: 1 + accepted)."""
    if before is None or after is None or after.drafts <= before.drafts:
        return None
    drafts = after.drafts - before.drafts
    proposed = after.proposed - before.proposed
    accepted = after.accepted - before.accepted
    return Acceptance(
        accept_rate=accepted / proposed if proposed > 0 else None,
        accept_length=1 + accepted / drafts,
        source="vllm:spec_decode counters of /metrics, this round",
    )
