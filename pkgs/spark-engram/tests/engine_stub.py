"""The real Engram files of the sglang wheel, without the rest of the engine.

`install(root)` makes ``import sglang...`` give the real files named in `REAL`. Everything else
they import is a stub: importing the whole engine needs its compiled kernels, a GPU and dozens of
packages. What the stubs replace is listed in `STUBS`, and nothing under test is among it: the
embedding, its hashing, gathering and gating kernels, the plugin loader, the hook registry and
the breakable graph are the engine's own.
"""

from __future__ import annotations

import ast
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from pathlib import Path

import torch

REAL = {
    "sglang.kernels.ops.embeddings.engram_gate",
    "sglang.kernels.ops.embeddings.engram_gather",
    "sglang.kernels.ops.embeddings.engram_hash",
    "sglang.kernels.ops.quantization.fp4_fake_quant",
    "sglang.srt.environ",
    "sglang.srt.layers.engram",
    "sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph",
    "sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph.breakable_cuda_graph",
    "sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph.context",
    "sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph.cuda_utils",
    "sglang.srt.plugins",
    "sglang.srt.plugins.hook_registry",
}
MODEL = "sglang.srt.models.deepseek_v4"


class Bag(types.SimpleNamespace):
    """A configuration namespace."""


class ReplicatedLinear(torch.nn.Module):
    """Stands for the engine's linear layer: an unquantised product, result and bias."""

    def __init__(self, inputs: int, outputs: int, **_named: object) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(inputs)
        weight = torch.randn(outputs, inputs, generator=generator, device="cpu") / inputs**0.5
        self.weight = torch.nn.Parameter(weight.to(torch.bfloat16), requires_grad=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return torch.nn.functional.linear(x, self.weight), None


class Engine:
    """The installed stub engine; `parallel`, `model` and `schedule` are its configuration."""

    def __init__(self) -> None:
        self.parallel = Bag(
            tp_size=1, tp_rank=0, attn_dp_size=1, attn_cp_size=1, attn_cp_rank=0, tp_group=None
        )
        self.model = Bag(
            model_path="", revision=None, load_format="auto",
            weight_loader_disable_mmap=False, weight_loader_prefetch_checkpoints=False,
        )  # fmt: skip
        self.schedule = Bag(chunked_prefill_size=64, max_prefill_tokens=64)
        self.forward_context = Bag(forward_batch=None)
        self.stubs: dict[str, dict[str, object]] = {}


class _Stub(types.ModuleType):
    """A module of which any capitalised or lower-case name may be imported."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        inner = f"{self.__name__}.{name}"
        if any(real == inner or real.startswith(inner + ".") for real in REAL):
            return importlib.import_module(inner)
        value = type(name, (), {"__module__": self.__name__})
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, root: Path, engine: Engine) -> None:
        self.root = root
        self.engine = engine

    def find_spec(self, name, path=None, target=None):  # noqa: ARG002
        if name != "sglang" and not name.startswith("sglang."):
            return None
        if name in REAL:
            base = self.root.joinpath(*name.split("."))
            file = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
            if file.exists():
                inside = [str(base)] if base.is_dir() else None
                return importlib.util.spec_from_file_location(
                    name, file, submodule_search_locations=inside
                )
            raise ImportError(f"{file} is not in the wheel: its layout changed")
        spec = importlib.machinery.ModuleSpec(name, self, is_package=True)
        spec.submodule_search_locations = []
        return spec

    def create_module(self, spec):
        return _Stub(spec.name)

    def exec_module(self, module):
        for name, value in self.engine.stubs.get(module.__name__, {}).items():
            setattr(module, name, value)
        if module.__name__ == MODEL:
            _load_model_functions(module, self.root, self.engine)


def _load_model_functions(module, root: Path, engine: Engine) -> None:
    """Cut the two functions of the model that hash between graph segments out of the real file."""
    tree = ast.parse((root / "sglang/srt/models/deepseek_v4.py").read_text())
    wanted = {"deepseek_v4_engram_hash_ids", "bcg_deepseek_v4_engram_hash_ids"}
    kept = [
        node
        for node in tree.body
        if getattr(node, "name", None) in wanted
        or (isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) in wanted)
    ]
    assert len(kept) == 2, "the model no longer hashes between graph segments: see prefetch.py"
    from sglang.srt.model_executor.runner_backend_utils import breakable_cuda_graph

    module.torch = torch
    module.get_tc_piecewise_forward_context = lambda: engine.forward_context
    module.eager_on_graph = breakable_cuda_graph.eager_on_graph
    exec(compile(ast.Module(kept, []), "deepseek_v4.py", "exec"), module.__dict__)  # noqa: S102


def install(root: Path) -> Engine:
    """Install the stub engine with the real files below ``root``; returns its configuration."""
    engine = Engine()
    cuda = torch.cuda.is_available()
    yes, no = (lambda: cuda), (lambda: False)
    utils = {
        "is_cuda": yes, "is_hip": no, "is_xpu": no, "is_npu": no, "is_musa": no,
        "is_gfx95_supported": no, "get_device_module": lambda: torch.cuda,
        "add_prefix": lambda name, prefix: f"{prefix}.{name}" if prefix else name,
    }  # fmt: skip
    engine.stubs = {
        "sglang.srt.utils": utils,
        "sglang.srt.utils.common": utils,
        "sglang.srt.runtime_context": {
            "get_parallel": lambda: engine.parallel,
            "get_model": lambda: engine.model,
            "get_schedule": lambda: engine.schedule,
            "get_serving": lambda: Bag(),
        },
        # One process: the sum over ranks is taken by the tests.
        "sglang.srt.distributed": {"tensor_model_parallel_all_reduce": lambda values: values},
        "sglang.srt.layers.linear": {"ReplicatedLinear": ReplicatedLinear},
        "sglang.srt.managers.schedule_batch": {"MM_PAD_SHIFT_VALUE": 1_000_000},
        "sglang.srt.model_executor.cuda_graph_config": {"Backend": Bag(BREAKABLE="breakable")},
        "sglang.srt.model_executor.runner_backend_utils": {
            "PREFILL_CUDA_GRAPH_CAPTURE_FAILED_MSG": "{backend} {suggestions}"
        },
        # The engine's weak references need its compiled kernels; strong ones behave the same.
        "sglang.srt.model_executor.runner_backend_utils.weak_ref_tensor": {
            "weak_ref_tensors": lambda tensors: tensors
        },
        "sglang.srt.model_executor.runner_backend_utils.tc_piecewise_cuda_graph": {
            "get_tc_piecewise_forward_context": lambda: engine.forward_context
        },
    }
    if importlib.util.find_spec("triton") is None:
        _stub_triton()
    sys.meta_path.insert(0, _Finder(root, engine))
    return engine


def _stub_triton() -> None:
    """Let the kernel files be imported where there is no GPU and no Triton."""

    def jit(function=None, **_named):
        return (lambda inner: inner) if function is None else function

    triton, language = _Stub("triton"), _Stub("triton.language")
    extra = _Stub("triton.language.extra")
    triton.jit, triton.language = jit, language
    language.extra = extra
    for module in (triton, language, extra):
        sys.modules[module.__name__] = module
