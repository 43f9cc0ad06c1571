"""What happens inside SGLang: rewrite the sizes of the configuration, pad the weight stream.

Two functions of the engine are wrapped (see DESIGN.md, "Hooks"):

- `ModelConfig.from_server_args`: the configuration that the engine checks and sizes itself by.
- `model_loader.loader._initialize_model`: the point where the ranks are known and the model is
  built; its `load_weights` is wrapped on the instance.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, Final

from spark_tp_pad.rules import (
    ModelSizes,
    Padding,
    PaddingRefusedError,
    ParallelSizes,
    pad,
)

logger = logging.getLogger("spark_tp_pad")

#: Marks a rewritten configuration and keeps the checkpoint's sizes.
ORIGINALS: Final = "spark_tp_pad_originals"

_MODEL_TYPE: Final = "deepseek_v41"
_TARGET: Final = "DeepseekV4ForCausalLM"
_DRAFT: Final = "DeepseekV4ForCausalLMDSpark"
_PART: Final = {_TARGET: "layers", _DRAFT: "mtp"}

#: Load formats that hand full checkpoint tensors to `load_weights`. The others read tensors that
#: were cut before, or write into the parameters without asking the model.
LOAD_FORMATS: Final = (
    "auto",
    "safetensors",
    "fastsafetensors",
    "instanttensor",
    "runai_streamer",
    "pt",
)

#: Keys of the configuration that can change.
_KEYS: Final = (
    "num_attention_heads",
    "o_groups",
    "moe_intermediate_size",
    "n_routed_experts",
    "dspark_n_routed_experts",
)


def _configs(model_config: Any) -> list[Any]:
    """List the configuration objects of a ModelConfig, without repetition."""
    found = [model_config.hf_config]
    text = getattr(model_config, "hf_text_config", None)
    if text is not None and text is not found[0]:
        found.append(text)
    return found


def _as_mapping(hf_config: Any) -> dict[str, Any]:
    """Read the sizes of the checkpoint, with the plugin's own changes undone."""
    keys = (
        *_KEYS,
        "head_dim",
        "q_lora_rank",
        "o_lora_rank",
        "hidden_size",
        "vocab_size",
        "n_shared_experts",
        "num_hidden_layers",
        "dspark_target_layer_ids",
        "quantization_config",
    )
    values = {key: getattr(hf_config, key, None) for key in keys}
    return {**values, **getattr(hf_config, ORIGINALS, {})}


def is_padded_family(model_config: Any) -> bool:
    """Whether this is the model the rules were made for."""
    return getattr(model_config.hf_config, "model_type", None) == _MODEL_TYPE


def rewrite_config(model_config: Any, parallel: ParallelSizes) -> Padding:
    """Give the engine the padded sizes. Idempotent, and undoes an earlier rewrite first.

    Raises:
        PaddingRefusedError: not DeepSeek-V4.1, or the sizes cannot be padded exactly.

    """
    if not is_padded_family(model_config):
        raise PaddingRefusedError(
            "tp-pad: SPARK_TP_PAD=1 is for model_type 'deepseek_v41', found "
            f"{getattr(model_config.hf_config, 'model_type', None)!r}; unset the variable"
        )
    values = _as_mapping(model_config.hf_config)
    padding = pad(ModelSizes.from_config(values), parallel)
    originals = {key: values[key] for key in _KEYS if values[key] is not None}
    for config in _configs(model_config):
        for key, size in {**originals, **padding.config_overrides()}.items():
            setattr(config, key, size)
        setattr(config, ORIGINALS, originals)
    model_config.num_attention_heads = padding.heads
    return padding


def parallel_of_arguments(server_args: Any) -> ParallelSizes:
    """Ranks as the (possibly still unresolved) server arguments say."""
    view = import_module("sglang.srt.arg_groups.overrides").resolving_view(server_args)
    tp = int(view.tp_size)
    split = max(1, int(view.attn_dp_size or 1)) * max(1, int(view.attn_cp_size or 1))
    return ParallelSizes(tp, max(1, int(view.ep_size or 1)), max(1, tp // split))


def parallel_of_process() -> ParallelSizes:
    """Ranks of the running process."""
    parallel = import_module("sglang.srt.runtime_context").get_parallel()
    return ParallelSizes(
        int(parallel.tp_size), int(parallel.moe_ep_size), int(parallel.attn_tp_size)
    )


def check_features(padding: Padding, load_format: str, engine: Any) -> None:
    """Refuse what padding was not shown to be exact with.

    Args:
        padding: The deployment.
        load_format: The engine's load format.
        engine: `sglang.srt.runtime_context`.

    Raises:
        PaddingRefusedError: names the option to change.

    """
    if not padding.active:
        return
    if load_format not in LOAD_FORMATS:
        raise PaddingRefusedError(
            f"tp-pad: --load-format {load_format} does not hand full checkpoint tensors to the "
            f"model, so they cannot be padded; use one of {', '.join(LOAD_FORMATS)}"
        )
    parallel = engine.get_parallel()
    if int(parallel.attn_cp_size) != 1 or int(getattr(parallel, "dcp_size", 1)) != 1:
        raise PaddingRefusedError(
            "tp-pad: context parallelism splits the attention heads a second time and is not "
            "padded; unset --attn-cp-size, --dcp-size and --enable-prefill-cp"
        )
    lora = engine.get_lora()
    if lora.enable_lora or lora.lora_paths:
        raise PaddingRefusedError(
            "tp-pad: LoRA adapters have the unpadded sizes; unset --enable-lora and --lora-paths"
        )
    more_experts = (
        padding.experts != padding.model.experts
        or padding.draft_experts != padding.model.draft_experts
    )
    moe = engine.get_exec().moe
    if more_experts and (moe.ep_num_redundant_experts or moe.enforce_shared_experts_fusion):
        raise PaddingRefusedError(
            "tp-pad: redundant experts and shared-expert fusion number the experts after the "
            "routed ones, where padding puts its own; unset --ep-num-redundant-experts and "
            "--enforce-shared-experts-fusion, or use --ep-size 1"
        )


def wrap_load_weights(model: Any, padding: Padding) -> None:
    """Pad what `model.load_weights` reads, and check that all of it came.

    The wrapped method raises StartRefused: on a tensor without a rule or with a wrong shape, and
    after the first load when a padded tensor was missing.

    Raises:
        PaddingRefusedError: the class is unknown.

    """
    from spark_tp_pad.padding import Tally, pad_stream

    part = _PART.get(type(model).__name__)
    if part is None:
        raise PaddingRefusedError(
            f"tp-pad: model class {type(model).__name__} is not known to load from padded "
            f"tensors; known are {', '.join(_PART)}"
        )
    original: Callable[..., Any] = model.load_weights
    count = padding.model.layers if part == "layers" else padding.model.draft_stages
    complete = False

    def load_weights(weights: Iterable[Any], *args: Any, **kwargs: Any) -> Any:
        # Later calls may update single tensors, so only the first has to bring all of them.
        nonlocal complete
        tally = Tally()
        with _ending_the_process():
            padded = pad_stream(weights, padding, frozenset({part}), tally)
            result = original(padded, *args, **kwargs)
            missing = [] if complete else tally.missing(range(count), padding, part)
            if missing:
                raise PaddingRefusedError(
                    f"tp-pad: {len(missing)} padded tensors are not in the checkpoint, first "
                    f"{missing[0]}; their padding would be whatever the memory held"
                )
        complete = True
        return result

    model.load_weights = load_weights


class StartRefused(SystemExit):
    """Ends the process; the text is the exit message. Not an `Exception`, so nobody swallows it."""


@contextmanager
def _ending_the_process() -> Iterator[None]:
    """Turn a refusal into the end of the process, with one line instead of a traceback."""
    try:
        yield
    except PaddingRefusedError as refusal:
        logger.error("%s", refusal)
        raise StartRefused(str(refusal)) from refusal


def from_server_args(
    original: Callable[..., Any], server_args: Any, *args: Any, **kwargs: Any
) -> Any:
    """Around `ModelConfig.from_server_args`: the engine sizes itself by the padded config.

    Raises:
        StartRefused: the model cannot be padded exactly on these ranks.

    """
    model_config = original(server_args, *args, **kwargs)
    with _ending_the_process():
        rewrite_config(model_config, parallel_of_arguments(server_args))
    return model_config


def initialize_model(
    original: Callable[..., Any], model_config: Any, load_config: Any, *args: Any, **kwargs: Any
) -> Any:
    """Around `_initialize_model`: final sizes from the ranks of this process, then the stream.

    Raises:
        StartRefused: the model cannot be padded exactly on these ranks, or not with these options.

    """
    with _ending_the_process():
        padding = rewrite_config(model_config, parallel_of_process())
        load_format = getattr(load_config.load_format, "value", load_config.load_format)
        check_features(padding, str(load_format), import_module("sglang.srt.runtime_context"))
    for line in padding.describe():
        logger.info(line)
    model = original(model_config, load_config, *args, **kwargs)
    if padding.active:
        with _ending_the_process():
            wrap_load_weights(model, padding)
    return model
