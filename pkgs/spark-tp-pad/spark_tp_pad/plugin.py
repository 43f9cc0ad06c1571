"""Entry point of the engine's plugin group `sglang.srt.plugins`.

SGLang's `load_plugins` logs exceptions of a plugin and goes on, and `HookRegistry.apply_hooks`
does the same for a hook that does not fit. Either would leave an engine that only looks padded.
So every failure here is a `SystemExit`, which `except Exception` does not catch, and the hooks are
put in place and looked at before this function returns. They do not go through `apply_hooks`,
which takes each target once: hooks of another plugin on the same target would be left out.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

from spark_tp_pad import engine
from spark_tp_pad.engine import StartRefused
from spark_tp_pad.rules import ACTIVATION_VARIABLE

logger = logging.getLogger("spark_tp_pad")

#: Engine versions whose sources the rules were read from.
SUPPORTED_ENGINES: Final = ("0.5.23",)

_MARK: Final = "_spark_tp_pad"


@dataclass(frozen=True)
class Hook:
    """One wrapped function: dotted path, first parameters it must have, and the wrapper."""

    target: str
    parameters: tuple[str, ...]
    wrapper: Callable[..., Any]


HOOKS: Final = (
    Hook(
        "sglang.srt.configs.model_config.ModelConfig.from_server_args",
        ("server_args",),
        engine.from_server_args,
    ),
    Hook(
        "sglang.srt.model_loader.loader._initialize_model",
        ("model_config", "load_config"),
        engine.initialize_model,
    ),
)


def is_active(environment: Mapping[str, str]) -> bool:
    """Whether the plan asked for padding.

    Raises:
        StartRefused: the variable has a value that means neither yes nor no.

    """
    value = environment.get(ACTIVATION_VARIABLE, "")
    if value in ("", "0"):
        return False
    if value == "1":
        return True
    raise StartRefused(f"tp-pad: {ACTIVATION_VARIABLE}={value!r} must be 1, 0 or unset")


def _engine_version() -> str:
    try:
        return version("sglang")
    except PackageNotFoundError:
        return "unknown"


def _resolve(target: str) -> tuple[Any, str]:
    """Owner and attribute of a dotted path, importing the module."""
    parts = target.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        try:
            owner: Any = import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:-1]:
            owner = getattr(owner, part)
        return owner, parts[-1]
    raise ModuleNotFoundError(target)


def check_hook(hook: Hook) -> None:
    """Make sure that the engine has the function and that it takes what the wrapper hands on.

    Raises:
        StartRefused: the engine is not the one that the hook was written for.

    """
    try:
        owner, attribute = _resolve(hook.target)
        names = tuple(inspect.signature(getattr(owner, attribute)).parameters)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise StartRefused(f"tp-pad: SGLang has no usable {hook.target}: {error}") from error
    if names[: len(hook.parameters)] != hook.parameters:
        raise StartRefused(
            f"tp-pad: {hook.target} takes {names}, expected to begin with {hook.parameters}"
        )


def apply_hook(hook: Hook, plugins: Any) -> None:
    """Wrap the function, once, with `plugins`, the engine's module of hooks.

    Raises:
        StartRefused: the wrapper is not in place afterwards.
    """
    owner, attribute = _resolve(hook.target)
    if hasattr(getattr(owner, attribute), _MARK):
        return
    source = plugins.HookSource("spark_tp_pad", "spark-tp-pad")
    try:
        plugins.HookRegistry._apply_target(
            hook.target, [(plugins.HookType.AROUND, hook.wrapper, source)]
        )
        wrapped = getattr(owner, attribute)
        if wrapped.__wrapped__ is None:
            raise AttributeError("nothing is wrapped")
        # Wrappers of other plugins copy the mark, so it is found again below them.
        setattr(wrapped, _MARK, True)
    except (AttributeError, TypeError, ValueError) as error:
        raise StartRefused(
            f"tp-pad: SGLang did not apply the hook on {hook.target}: {error}"
        ) from error


def register() -> None:
    """Register and apply the hooks, or do nothing when the plan did not ask for padding.

    Raises:
        StartRefused: padding was asked for and cannot be guaranteed.

    """
    if not is_active(os.environ):
        logger.info("tp-pad: inactive (%s is not 1)", ACTIVATION_VARIABLE)
        return
    found = _engine_version()
    if found not in SUPPORTED_ENGINES:
        raise StartRefused(
            f"tp-pad: SGLang {found} is installed; the rules were read from "
            f"{', '.join(SUPPORTED_ENGINES)} and may not fit another version"
        )
    plugins = import_module("sglang.srt.plugins.hook_registry")
    for hook in HOOKS:
        check_hook(hook)
    for hook in HOOKS:
        apply_hook(hook, plugins)
    logger.info("tp-pad: active")
