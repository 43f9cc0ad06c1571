"""What a run needs to know, and what it comes to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from spark_appliance.bench import speed
from spark_appliance.bench.endpoint import Address
from spark_appliance.bench.metrics import Prompt
from spark_appliance.bench.nodes import MIN_INTERVAL_S
from spark_appliance.bench.result import Failure, Mode, PromptKind, Result
from spark_appliance.bench.wire import Limits
from spark_appliance.ssh import Host


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything that a run needs to know; ``lengths`` is (concurrency, tokens) pairs."""

    address: Address
    mode: Mode
    out: Path
    prompts: Mapping[PromptKind, Prompt] = field(default_factory=dict)
    concurrency: tuple[int, ...] = (1,)
    lengths: tuple[tuple[int, int], ...] = ()
    text_kind: PromptKind = "code"
    text_folders: tuple[Path, ...] = ()
    rounds: int = speed.ROUNDS
    warmup: int = speed.WARMUP
    max_tokens: int = speed.MAX_TOKENS
    model: str | None = None
    key: SecretStr | None = None
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    allowed_cached: int = 0
    limits: Limits = field(default_factory=Limits)
    check: bool | None = None  # True: must be known to be idle; None: refuse when busy; False: no
    wait_s: float = 0.0
    hosts: tuple[tuple[str, Host], ...] = ()
    interval_s: int = MIN_INTERVAL_S
    plan_sha256: str | None = None
    image_digest: str | None = None
    resume: Result | None = None
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result, and why it is partial: a failure of the endpoint or the user's Ctrl-C."""

    result: Result
    failure: Failure | None = None
    interrupted: bool = False
