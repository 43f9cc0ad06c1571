"""Activation, and the ways a start is refused."""

from __future__ import annotations

import logging
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from spark_tp_pad import engine, plugin
from spark_tp_pad.engine import StartRefused
from spark_tp_pad.rules import ModelSizes, PaddingRefusedError, ParallelSizes, pad


@pytest.mark.parametrize(
    ("value", "active"), [(None, False), ("", False), ("0", False), ("1", True)]
)
def test_activation(value, active):
    environment = {} if value is None else {"SPARK_TP_PAD": value}
    assert plugin.is_active(environment) is active


@pytest.mark.parametrize("value", ["yes", "true", "2", " 1"])
def test_activation_must_be_plain(value):
    with pytest.raises(StartRefused, match="must be 1, 0 or unset"):
        plugin.is_active({"SPARK_TP_PAD": value})


def test_inactive_touches_nothing(monkeypatch, caplog):
    monkeypatch.delenv("SPARK_TP_PAD", raising=False)
    monkeypatch.setattr(plugin, "import_module", lambda name: pytest.fail(f"imported {name}"))
    with caplog.at_level(logging.INFO, "spark_tp_pad"):
        plugin.register()
    assert caplog.messages == ["tp-pad: inactive (SPARK_TP_PAD is not 1)"]


def test_a_refusal_passes_an_except_exception():
    # This is how SGLang's load_plugins guards plugins.
    with pytest.raises(SystemExit):
        try:
            raise StartRefused("text")
        except Exception:
            pytest.fail("swallowed")


def test_unknown_engine_version_is_refused(monkeypatch):
    monkeypatch.setenv("SPARK_TP_PAD", "1")
    monkeypatch.setattr(plugin, "_engine_version", lambda: "0.5.24")
    with pytest.raises(StartRefused, match=r"SGLang 0\.5\.24 is installed"):
        plugin.register()


def _install(monkeypatch, **functions):
    module = ModuleType("fake_engine")
    for name, function in functions.items():
        setattr(module, name, function)
    monkeypatch.setitem(sys.modules, "fake_engine", module)
    return module


def test_missing_hook_target_is_refused(monkeypatch):
    _install(monkeypatch)
    with pytest.raises(StartRefused, match=r"no usable fake_engine\.build"):
        plugin.check_hook(plugin.Hook("fake_engine.build", ("config",), print))
    with pytest.raises(StartRefused, match="no usable no_such_package"):
        plugin.check_hook(plugin.Hook("no_such_package.x", (), print))


def test_changed_signature_is_refused(monkeypatch):
    _install(monkeypatch, build=lambda settings: settings)
    with pytest.raises(StartRefused, match="expected to begin with"):
        plugin.check_hook(plugin.Hook("fake_engine.build", ("config",), print))


def _registry(apply):
    return SimpleNamespace(
        HookSource=lambda *names: names,
        HookType=SimpleNamespace(AROUND="around"),
        HookRegistry=SimpleNamespace(_apply_target=apply),
    )


def test_hook_that_was_not_applied_is_refused(monkeypatch):
    def fail(*_):
        raise TypeError("does not fit")

    _install(monkeypatch, build=lambda config: config)
    hook = plugin.Hook("fake_engine.build", ("config",), print)
    for apply in (lambda *_: None, fail):
        with pytest.raises(StartRefused, match="did not apply the hook"):
            plugin.apply_hook(hook, _registry(apply))


def _model_config(**changes):
    values = {
        "model_type": "deepseek_v41",
        "num_attention_heads": 64,
        "o_groups": 8,
        "head_dim": 512,
        "q_lora_rank": 1280,
        "o_lora_rank": 1024,
        "hidden_size": 5120,
        "vocab_size": 129280,
        "moe_intermediate_size": 2304,
        "n_routed_experts": 384,
        "n_shared_experts": 1,
        "num_hidden_layers": 40,
        "dspark_n_routed_experts": 128,
        "dspark_target_layer_ids": [37, 38, 39],
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [32, 32]},
    }
    config = SimpleNamespace(**{**values, **changes})
    return SimpleNamespace(hf_config=config, hf_text_config=config, num_attention_heads=64)


def test_config_is_rewritten_and_can_be_rewritten_again():
    model_config = _model_config()
    config = model_config.hf_config
    engine.rewrite_config(model_config, ParallelSizes(3, 3))
    assert (config.num_attention_heads, config.o_groups) == (96, 12)
    assert config.dspark_n_routed_experts == 129
    assert model_config.num_attention_heads == 96
    # Final ranks may differ from the arguments' first reading.
    engine.rewrite_config(model_config, ParallelSizes(5))
    assert (config.num_attention_heads, config.o_groups) == (80, 10)
    assert config.dspark_n_routed_experts == 128
    assert config.moe_intermediate_size == 2560
    engine.rewrite_config(model_config, ParallelSizes(2))
    assert (config.num_attention_heads, config.o_groups, config.moe_intermediate_size) == (
        64,
        8,
        2304,
    )
    assert model_config.num_attention_heads == 64


def test_separate_text_config_is_rewritten_too():
    model_config = _model_config()
    model_config.hf_text_config = _model_config().hf_config
    engine.rewrite_config(model_config, ParallelSizes(3))
    assert model_config.hf_text_config.o_groups == model_config.hf_config.o_groups == 12


def test_another_model_is_refused():
    with pytest.raises(PaddingRefusedError, match="is for model_type 'deepseek_v41'"):
        engine.rewrite_config(_model_config(model_type="llama"), ParallelSizes(3))


def _runtime(**changes):
    values = {"attn_cp_size": 1, "dcp_size": 1, "lora": False, "redundant": 0, "fusion": False}
    values |= changes
    return SimpleNamespace(
        get_parallel=lambda: SimpleNamespace(
            attn_cp_size=values["attn_cp_size"], dcp_size=values["dcp_size"]
        ),
        get_lora=lambda: SimpleNamespace(enable_lora=values["lora"], lora_paths=None),
        get_exec=lambda: SimpleNamespace(
            moe=SimpleNamespace(
                ep_num_redundant_experts=values["redundant"],
                enforce_shared_experts_fusion=values["fusion"],
            )
        ),
    )


THREE = pad(ModelSizes(), ParallelSizes(3))
THREE_EP = pad(ModelSizes(), ParallelSizes(3, 3))
TWO = pad(ModelSizes(), ParallelSizes(2))


@pytest.mark.parametrize(
    ("padding", "load_format", "changes", "text"),
    [
        (THREE, "sharded_state", {}, "--load-format sharded_state"),
        (THREE, "dummy", {}, "--load-format dummy"),
        (THREE, "auto", {"attn_cp_size": 3}, "context parallelism"),
        (THREE, "auto", {"dcp_size": 3}, "context parallelism"),
        (THREE, "auto", {"lora": True}, "LoRA"),
        (THREE_EP, "auto", {"redundant": 3}, "redundant experts"),
        (THREE_EP, "auto", {"fusion": True}, "shared-expert fusion"),
    ],
)
def test_refused_features(padding, load_format, changes, text):
    with pytest.raises(PaddingRefusedError, match=text):
        engine.check_features(padding, load_format, _runtime(**changes))


@pytest.mark.parametrize(
    ("padding", "load_format", "changes"),
    [
        (THREE, "auto", {}),
        (THREE, "safetensors", {"fusion": True, "redundant": 3}),
        (TWO, "dummy", {"lora": True, "attn_cp_size": 2}),
    ],
)
def test_allowed_features(padding, load_format, changes):
    engine.check_features(padding, load_format, _runtime(**changes))


class DeepseekV4ForCausalLM:
    """Stands in for the engine's class: the wrapper goes by the name."""

    def load_weights(self, weights):
        return {name: tuple(tensor.shape) for name, tensor in weights}


def test_weights_are_checked_for_completeness_once():
    padding = pad(ModelSizes(layers=1, draft_stages=0), ParallelSizes(3))
    shapes = {
        "wq_b.weight": (32768, 1280),
        "wq_b.scale": (1024, 40),
        "attn_sink": (64,),
        "wo_a.weight": (8192, 4096),
        "wo_a.scale": (256, 128),
        "wo_b.weight": (5120, 8192),
        "wo_b.scale": (160, 256),
    }

    def stream(names):
        for name in names:
            dtype = torch.float8_e8m0fnu if name.endswith("scale") else torch.bfloat16
            yield f"layers.0.attn.{name}", torch.empty(shapes[name], dtype=dtype, device="meta")

    model = DeepseekV4ForCausalLM()
    engine.wrap_load_weights(model, padding)
    with pytest.raises(StartRefused, match=r"first layers\.0\.attn\.wo_b\.scale"):
        model.load_weights(stream(list(shapes)[:-1]))
    loaded = model.load_weights(stream(shapes))
    assert loaded["layers.0.attn.wq_b.weight"] == (49152, 1280)
    # Later updates may bring single tensors.
    assert model.load_weights(stream(["attn_sink"])) == {"layers.0.attn.attn_sink": (96,)}
    with pytest.raises(StartRefused, match="no rule for checkpoint tensor"):
        model.load_weights([("layers.0.attn.new.weight", torch.zeros(1))])


def test_unknown_model_class_is_refused():
    with pytest.raises(PaddingRefusedError, match="model class SimpleNamespace"):
        engine.wrap_load_weights(SimpleNamespace(load_weights=print), THREE)
