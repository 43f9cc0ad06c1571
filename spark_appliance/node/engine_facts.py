"""What the engine says about itself, asked on its own node: the key never leaves it."""

from __future__ import annotations

import http.client
import json
import re
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from spark_appliance.node.plan import NodeContext

SECONDS: Final = 5.0
MAX_BODY: Final = 4 * 2**20

METRICS: Final = {
    "gen_throughput": "tokens_per_second",
    "num_running_reqs": "running",
    "num_queue_reqs": "waiting",
    "token_usage": "kv_use",
    "kv_used_tokens": "kv_used_tokens",
    "max_total_num_tokens": "kv_tokens",
    "cache_hit_rate": "cache_hit_rate",
    "spec_accept_length": "accept_length",
    "spec_accept_rate": "accept_rate",
}
"""Gauges of sglang 0.5.23 (srt/observability/metrics_collector.py) -> our names."""

_LINE: Final = re.compile(r"^sglang:(\w+)(?:\{[^\n]*\})? ([0-9.eE+-]+|NaN)$", re.MULTILINE)

_SERVER_INFO: Final = (
    "version",
    "served_model_name",
    "tp_size",
    "ep_size",
    "context_length",
    "max_running_requests",
    "max_total_num_tokens",
    "mem_fraction_static",
    "chunked_prefill_size",
    "speculative_algorithm",
    "startup_time",
)
"""What is passed on of /server_info; the whole of it holds the key."""


def engine_facts(context: NodeContext) -> dict[str, Any]:
    """Return readiness, gauges and version of the engine; on a worker only whether it lives."""
    if not context.is_head:
        # ranks above 0 answer their health route once their weights are loaded, on loopback alone
        port = context.plan.view("ports").integer("api")
        status, _ = _ask(f"http://127.0.0.1:{port}/health", None)
        return {"health": status, "metrics": {}, "server": {}}
    url = urlsplit(context.plan.view("health").text("live_url"))
    base = f"{url.scheme}://{url.netloc}"
    ready, _ = _ask(f"{base}/ready", None)
    status, raw = _ask(f"{base}/metrics", None)
    metrics = parse_metrics(raw.decode(errors="replace")) if status == 200 else {}
    server: dict[str, Any] = {}
    if ready is not None:
        status, raw = _ask(f"{base}/server_info", _key(context))
        server = pick_server_info(raw) if status == 200 else {"refused": status}
    return {"health": ready, "metrics": metrics, "server": server}


def parse_metrics(text: str) -> dict[str, float]:
    """Return the gauges we show; of several series the largest, which is the busiest rank's."""
    result: dict[str, float] = {}
    for name, value in _LINE.findall(text):
        ours = METRICS.get(name)
        number = float(value)
        if ours is not None and number == number:
            result[ours] = max(result.get(ours, number), number)
    return result


def pick_server_info(raw: bytes) -> dict[str, Any]:
    """Return the harmless part of /server_info."""
    try:
        data = json.loads(raw)
    except ValueError:
        return {}
    return {name: data[name] for name in _SERVER_INFO if name in data} if data else {}


def router_facts(context: NodeContext) -> dict[str, Any] | None:
    """Return how many replicas the router of this node counts as healthy; None without one."""
    # only the head's own plan says something of a router
    router = context.plan.optional_view("router") if context.is_head else None
    if router is None:
        return None
    status, raw = _ask(router.text("readiness_url"), None)
    try:
        data = json.loads(raw) if status == 200 else {}
    except ValueError:
        data = {}
    of = len(router.views("replicas"))
    healthy = data.get("healthy_workers", 0) if isinstance(data, dict) else 0
    return {"answers": status == 200, "healthy": healthy, "of": of}


def _key(context: NodeContext) -> str | None:
    name = context.plan.view("api").optional_text("key_file")
    if name is None:
        return None
    try:
        return context.path(name).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None


def _ask(url: str, key: str | None) -> tuple[int | None, bytes]:
    request = urllib.request.Request(url)  # noqa: S310 - http URL of the plan
    if key is not None:
        request.add_header("Authorization", f"Bearer {key}")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=SECONDS) as answer:
            return answer.status, answer.read(MAX_BODY)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, b""
    except (OSError, http.client.HTTPException):
        return None, b""


def loading(context: NodeContext, cgroups: tuple[str, ...]) -> dict[str, Any] | None:
    """Return which shard of the checkpoint the engine's processes hold open or mapped.

    The engine's own progress bar rewrites one line and is drawn on rank 0 alone (sglang 0.5.23
    srt/model_loader/weight_utils.py:1155), so a journal shows it when loading is over.
    """
    folder = context.plan.view("model").text("path").rstrip("/") + "/"
    seen: set[str] = set()
    processes = 0
    for group in cgroups:
        for file in [*context.path(group).rglob("cgroup.procs")]:
            try:
                pids = file.read_text().split()
            except OSError:
                continue
            processes += len(pids)
            for pid in pids:
                seen |= _shards(context.path(f"/proc/{pid}"), folder)
    if not processes:
        return None
    of = context.plan.view("model").integer("shards")
    return {"processes": processes, "shard": max(map(_index, seen), default=None), "of": of}


def _shards(process: Path, folder: str) -> set[str]:
    names: set[str] = set()
    try:
        with (process / "maps").open(encoding="utf-8", errors="replace") as file:
            for line in file:
                start = line.find(folder)
                if start >= 0 and line.rstrip().endswith(".safetensors"):
                    names.add(line[start + len(folder) :].rstrip())
        for link in (process / "fd").iterdir():
            target = str(link.readlink())
            if target.startswith(folder) and target.endswith(".safetensors"):
                names.add(target[len(folder) :])
    except OSError:
        return names
    return names


def _index(name: str) -> int:
    """Return N of 'model-0000N-of-00048.safetensors', 0 for another name."""
    found = re.search(r"-(\d+)-of-\d+\.safetensors$", name)
    return int(found[1]) if found else 0
