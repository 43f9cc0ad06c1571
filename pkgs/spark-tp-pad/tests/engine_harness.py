"""Builds the real model classes of SGLang 0.5.23 on one CPU, one rank at a time.

No process group is started: the ranks are stated to the engine's own `get_parallel()`, weights are
loaded by the engine's own loaders, and collectives are left to the caller. Nothing of SGLang is
copied here; the tests that use this skip by name when the wheel is not installed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from manifest import Checkpoint
from torch import nn

DTYPES = {
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I8": torch.int8,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
}


def require_engine() -> None:
    """Skip, by name, unless the wheel and its imports are there.

    With SPARK_ENGINE_REQUIRED=1, as in CI, a missing engine is a failure instead.
    """
    required = os.environ.get("SPARK_ENGINE_REQUIRED") == "1"
    give_up = pytest.fail if required else pytest.skip
    _let_torchvision_import()
    reason = (
        "needs the sglang 0.5.23 wheel (pip install --no-deps) and the imports of "
        "pkgs/spark-tp-pad/tests/requirements-engine.txt: "
    )
    try:
        import sglang
        import sglang.srt.model_loader.loader
        import sglang.srt.models.deepseek_v4
        import sglang.srt.models.deepseek_v4_dspark
    except ImportError as error:
        give_up(reason + str(error))
    if getattr(sglang, "__version__", "") != "0.5.23":
        give_up(reason + f"found version {getattr(sglang, '__version__', 'unknown')}")


def _let_torchvision_import() -> None:
    # transformers imports torchvision, whose PyPI wheel is linked against a CUDA torch; with the
    # CPU torch its operators are missing and the import fails on their shape functions. Declaring
    # them is enough, nothing here calls them.
    try:
        import torchvision  # noqa: F401

        return
    except (ImportError, RuntimeError):
        pass
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        try:
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        except RuntimeError:
            return
    _KEEP.append(library)


_KEEP: list[Any] = []


def config_json(ckpt: Checkpoint) -> dict[str, Any]:
    """A config.json of the real form for these sizes (values: DeepSeek-V4.1-Flash config.json)."""
    m = ckpt.sizes
    text = {
        "model_type": "deepseek_v41_text",
        "vocab_size": m.vocabulary,
        "hidden_size": m.hidden,
        "moe_intermediate_size": m.expert_width,
        "num_hidden_layers": m.layers,
        "num_attention_heads": m.heads,
        "num_key_value_heads": 1,
        "head_dim": m.head_dim,
        "qk_rope_head_dim": m.head_dim // 8,
        "q_lora_rank": m.q_lora_rank,
        "o_lora_rank": m.o_lora_rank,
        "o_groups": m.groups,
        "rms_norm_eps": 1e-20,
        "max_position_embeddings": 1048576,
        "n_routed_experts": m.experts,
        "n_shared_experts": m.shared_experts,
        "num_experts_per_tok": min(6, m.experts),
        "sliding_window": 128,
        "compress_ratios": list(ckpt.compress_ratios),
        "kv_source_layer_ids": list(ckpt.kv_sources),
        "index_source_layer_ids": list(ckpt.index_sources),
        "index_n_heads": ckpt.index_heads,
        "index_head_dim": ckpt.index_dim,
        "index_topk": 512,
        "candidate_source_layer_id": ckpt.kv_sources[-1],
        "candidate_topk_blocks": 2048,
        "candidate_block_size": 8,
        "hc_mult": ckpt.hc_mult,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "num_nextn_predict_layers": m.draft_stages,
        "dspark_block_size": 5,
        "dspark_target_layer_ids": list(range(m.layers - m.draft_stages, m.layers)),
        "dspark_n_routed_experts": m.draft_experts,
        "dspark_num_experts_per_tok": min(3, m.draft_experts),
        "dspark_markov_rank": ckpt.markov_rank,
        "dspark_noise_token_id": m.vocabulary - 1,
        "image_token_id": m.vocabulary - 2,
        "tie_word_embeddings": False,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "swiglu_limit": 10.0,
        "hidden_act": "silu",
        "rope_theta": 10000.0,
        "compress_rope_theta": 160000.0,
        "n_group": 1,
        "topk_group": 1,
        "rope_scaling": {
            "type": "yarn",
            "factor": 16,
            "original_max_position_embeddings": 65536,
            "beta_fast": 32,
            "beta_slow": 1,
        },
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    if ckpt.engram_rows:
        text |= {
            "engram_layer_ids": [layer for layer, _ in ckpt.engram_rows],
            "engram_num_embeddings": [rows for _, rows in ckpt.engram_rows],
            "engram_max_ngram_size": 4,
            "engram_vocab_size": 16000000,
            "engram_n_heads": 8,
            "engram_head_dim": ckpt.engram_dim,
            "engram_pad_token_id": 2,
            "engram_compressed_vocab_size": 99092,
        }
    config: dict[str, Any] = {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "torch_dtype": "bfloat16",
        "text_config": text,
        "expert_dtype": "fp4",
        "quantization_config": {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [m.block, m.block],
            "scale_fmt": "ue8m0",
        },
    }
    if ckpt.vision_blocks:
        config["vision_config"] = {
            "model_type": "deepseek_v41_vision",
            "num_hidden_layers": ckpt.vision_blocks,
            "hidden_size": ckpt.vision_dim,
            "num_attention_heads": 16,
            "intermediate_size": ckpt.vision_inner,
            "patch_size": ckpt.vision_patch,
            "rope_theta": 10000.0,
            "downsample_ratio": ckpt.vision_downsample,
            "max_image_tokens": 1024,
            "min_pixels": 295936,
        }
    return config


def load_plugin(monkeypatch: pytest.MonkeyPatch, *, active: bool) -> None:
    """Let the engine find and load the plugin, as it does in each of its processes."""
    import sglang.srt.plugins as plugins

    monkeypatch.setenv("SPARK_TP_PAD", "1" if active else "0")
    monkeypatch.setattr(plugins, "_plugins_loaded", False)
    plugins.load_plugins()


def _group(size: int, rank: int) -> SimpleNamespace:
    return SimpleNamespace(
        world_size=size,
        rank_in_group=rank,
        rank=rank,
        is_first_rank=rank == 0,
        is_last_rank=rank == size - 1,
        ranks=list(range(size)),
        device_group=None,
        cpu_group=None,
    )


@dataclass
class Rank:
    """The engine as one rank sees it."""

    server_args: Any
    tp: int
    rank: int

    def model_config(self, *, draft: bool) -> Any:
        from sglang.srt.configs.model_config import ModelConfig

        return ModelConfig.from_server_args(self.server_args, is_draft_model=draft)

    def build(self, *, draft: bool = False, device: str = "cpu") -> Any:
        """The model, its parameters uninitialised."""
        from sglang.srt.configs.load_config import LoadConfig
        from sglang.srt.model_loader import loader

        model_config = self.model_config(draft=draft)
        load_config = LoadConfig(load_format="safetensors")
        quant_config = loader._get_quantization_config(model_config, load_config)
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            with torch.device(device):
                model = loader._initialize_model(model_config, load_config, quant_config)
        finally:
            torch.set_default_dtype(before)
        # Kernel set-up and table registration that needs a device or a group; no weights.
        model.post_load_weights = lambda *_, **__: None
        model._prewarm_mhc_kernels = lambda *_, **__: None
        if not draft:
            for layer in model.model.layers:
                if layer.engram is not None:
                    layer.engram.embed.finish_load = lambda *_, **__: None
        return model


@contextmanager
def engine_rank(
    folder: Path,
    ckpt: Checkpoint,
    *,
    tp: int,
    ep: int = 1,
    rank: int = 0,
    device: str = "cpu",
    start_groups: Callable[[], None] | None = None,
) -> Iterator[Rank]:
    """State one rank of a deployment to the engine.

    Args:
        folder: Where config.json is written.
        ckpt: Sizes.
        tp: Tensor-parallel ranks.
        ep: Expert-parallel ranks.
        rank: This rank.
        device: "cpu" or "cuda".
        start_groups: Starts real process groups; without it the ranks are only stated.
    """
    from sglang.srt.layers import engram
    from sglang.srt.layers.moe.utils import initialize_moe_config
    from sglang.srt.models import deepseek_v4
    from sglang.srt.runtime_context import SpawnRanks, get_parallel, publish, reset_context
    from sglang.srt.server_args import ServerArgs

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_json(ckpt)))
    arguments = ServerArgs(
        model_path=str(folder),
        skip_tokenizer_init=True,
        device=device,
        tp_size=tp,
        ep_size=ep,
        load_format="safetensors",
        # Not --speculative-algorithm: the engine takes DSPARK on accelerators only. The draft class
        # is chosen from the checkpoint all the same.
    )
    arguments.resolve_once()
    reset_context()
    publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=rank))
    initialize_moe_config()
    groups = {
        "tp_group": _group(tp, rank),
        "attn_tp_group": _group(tp, rank),
        "pp_group": _group(1, 0),
        "moe_tp_group": _group(tp // ep, rank % (tp // ep)),
        "moe_ep_group": _group(ep, rank // (tp // ep)),
    }
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        # The hasher needs a tokenizer and the rotary tables have no CPU form; neither has weights.
        patch.setattr(engram.EngramHasher, "from_config", classmethod(lambda *_, **__: nn.Module()))
        patch.setattr(deepseek_v4, "get_rope_wrapper", lambda *_, **__: nn.Module())
        if start_groups is None:
            stack.enter_context(get_parallel().override(**groups))
        else:
            start_groups()
        yield Rank(arguments, tp, rank)
