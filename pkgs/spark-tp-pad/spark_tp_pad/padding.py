"""Pads tensors on their way from the checkpoint to the engine's weight loader.

The engine's own loaders then cut the padded tensors into shares, so nothing about the way a layer
is split is repeated here. Works on any device, also "meta".
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

import torch

from spark_tp_pad.rules import Padding, PaddingRefusedError
from spark_tp_pad.tensors import (
    NEVER_CHOSEN,
    Fill,
    Growth,
    TensorName,
    added_experts,
    growth,
    parse,
)

#: 1.0 in E8M0 (an exponent with bias 127), also when a loader hands the scale on as bytes.
E8M0_ONE: Final = 127

_BYTE_FLOATS: Final = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu)
_BYTES: Final = (torch.uint8, torch.int8)


def _fill_value(dtype: torch.dtype, fill: Fill, name: str) -> tuple[torch.dtype, float]:
    """Storage dtype to write through, and the number that means `fill` in it.

    Raises:
        PaddingRefusedError: the dtype cannot hold the value.

    """
    if fill is Fill.ONE:
        if dtype in (torch.float8_e8m0fnu, torch.uint8):
            return torch.uint8, E8M0_ONE
        if dtype.is_floating_point and dtype not in _BYTE_FLOATS:
            return dtype, 1.0
    elif fill is Fill.NEVER:
        if dtype.is_floating_point and torch.finfo(dtype).min < NEVER_CHOSEN:
            return dtype, NEVER_CHOSEN
    elif dtype in (torch.float8_e4m3fn, torch.float8_e5m2, *_BYTES):
        # Zero is the zero byte in FP8 and, twice, in packed FP4.
        return torch.uint8, 0
    elif dtype.is_floating_point and dtype not in _BYTE_FLOATS:
        return dtype, 0.0
    raise PaddingRefusedError(
        f"tp-pad: '{name}' has dtype {dtype}, which cannot hold the value '{fill.value}' of its "
        "padding; this checkpoint is stored in a way that padding was not made for"
    )


def grow(tensor: torch.Tensor, how: Growth, name: str) -> torch.Tensor:
    """Copy `tensor` with axis `how.axis` grown to `how.after`.

    Raises:
        PaddingRefusedError: the axis has not the length that the configuration says, or the dtype
            cannot hold the fill.

    """
    if tensor.dim() <= how.axis or tensor.shape[how.axis] != how.before:
        raise PaddingRefusedError(
            f"tp-pad: '{name}' has shape {tuple(tensor.shape)}, axis {how.axis} must be "
            f"{how.before}; checkpoint and config.json do not belong together"
        )
    storage, value = _fill_value(tensor.dtype, how.fill, name)
    raw = tensor.view(storage)
    shape = list(raw.shape)
    shape[how.axis] = how.after
    grown = raw.new_full(shape, value)
    grown.narrow(how.axis, 0, how.before).copy_(raw)
    return grown.view(tensor.dtype)


def _absent_expert(tensor: torch.Tensor, name: TensorName) -> torch.Tensor:
    """Make the tensor of an added expert: zero weights, scales of one."""
    fill = Fill.ONE if name.tail.endswith(".scale") else Fill.ZERO
    storage, value = _fill_value(tensor.dtype, fill, name.tail)
    return tensor.view(storage).new_full(tensor.shape, value).view(tensor.dtype)


@dataclass
class Tally:
    """What passed through: for every padded family (tail) the layers or stages it was seen in."""

    seen: dict[str, set[int]] = field(default_factory=dict)

    def note(self, name: TensorName) -> None:
        """Count one padded tensor."""
        self.seen.setdefault(name.tail, set()).add(name.index)

    def missing(self, indices: Iterable[int], padding: Padding, part: str) -> list[str]:
        """Names of padded tensors that should have come for these layers or stages but did not."""
        expected = set(indices)
        return [
            f"{part}.{index}.{tail}"
            for tail in sorted(_required_tails(padding, part))
            for index in sorted(expected - self.seen.get(tail, set()))
        ]


def _required_tails(padding: Padding, part: str) -> set[str]:
    from spark_tp_pad.tensors import LAYER_RULES, STAGE_RULES

    rules = LAYER_RULES if part == "layers" else STAGE_RULES
    # The image router bias is absent from text-only checkpoints.
    return {
        tail for tail, rule in rules.items() if growth(rule, padding) and tail != "ffn.gate.bias_vl"
    }


def pad_stream(
    weights: Iterable[tuple[str, torch.Tensor]],
    padding: Padding,
    parts: frozenset[str],
    tally: Tally | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Pad a stream of checkpoint tensors, one at a time.

    Args:
        weights: Names as in the checkpoint, full (unsplit) tensors.
        padding: The deployment.
        parts: Which parts to pad: "layers" for the target, "mtp" for the draft. The engine skips
            the other part, so its tensors are handed on as they are.
        tally: Counts what was padded.

    Raises:
        PaddingRefusedError: a name has no rule, or a tensor is not what the configuration says.

    """
    for name, tensor in weights:
        parsed = parse(name)
        how = growth(parsed.rule, padding) if parsed.part in parts else None
        if how is not None:
            tensor = grow(tensor, how, name)
            if tally is not None:
                tally.note(parsed)
        yield name, tensor
        if parsed.part in parts:
            for expert in added_experts(parsed, padding):
                yield parsed.of_expert(expert), _absent_expert(tensor, parsed)
