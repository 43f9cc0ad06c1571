"""What the added part of a tensor holds."""

from __future__ import annotations

import pytest
import torch
from spark_tp_pad.padding import grow
from spark_tp_pad.rules import PaddingRefusedError
from spark_tp_pad.tensors import NEVER_CHOSEN, Fill, Growth


@pytest.mark.parametrize(
    ("dtype", "fill", "expected"),
    [
        (torch.float8_e4m3fn, Fill.ZERO, 0.0),
        (torch.bfloat16, Fill.ZERO, 0.0),
        (torch.float32, Fill.ZERO, 0.0),
        (torch.int8, Fill.ZERO, 0),
        (torch.float8_e8m0fnu, Fill.ONE, 1.0),
        (torch.float32, Fill.ONE, 1.0),
        # A loader that hands E8M0 on as bytes: exponent 127 is 1.0.
        (torch.uint8, Fill.ONE, 127),
        (torch.float32, Fill.NEVER, NEVER_CHOSEN),
    ],
)
@pytest.mark.parametrize("axis", [0, 1])
def test_fill(dtype, fill, expected, axis):
    raw = torch.randint(1, 100, (4, 6), dtype=torch.uint8)
    tensor = raw.view(dtype) if dtype.itemsize == 1 else raw.to(dtype)
    grown = grow(tensor, Growth(axis, tensor.shape[axis], 9, fill), "t")
    assert grown.dtype == dtype
    assert grown.shape[axis] == 9
    kept = grown.narrow(axis, 0, tensor.shape[axis]).contiguous()
    assert torch.equal(kept.view(torch.uint8), tensor.contiguous().view(torch.uint8))
    added = grown.narrow(axis, tensor.shape[axis], 9 - tensor.shape[axis]).float()
    assert torch.equal(added, torch.full_like(added, expected))


def test_the_added_bias_is_finite_and_below_every_score_in_bf16_too():
    bias = grow(torch.zeros(3, dtype=torch.bfloat16), Growth(0, 3, 4, Fill.NEVER), "t")
    assert torch.isfinite(bias).all()
    assert bias[3] < -1e29


@pytest.mark.parametrize(
    ("tensor", "how"),
    [
        (torch.zeros(4, 4, dtype=torch.float8_e4m3fn), Growth(0, 4, 8, Fill.ONE)),
        (torch.zeros(4, 4, dtype=torch.int32), Growth(0, 4, 8, Fill.ZERO)),
        (torch.zeros(4, dtype=torch.float16), Growth(0, 4, 8, Fill.NEVER)),
        (torch.zeros(4, dtype=torch.uint8), Growth(0, 4, 8, Fill.NEVER)),
    ],
)
def test_dtypes_that_cannot_hold_the_fill_are_refused(tensor, how):
    with pytest.raises(PaddingRefusedError, match="cannot hold the value"):
        grow(tensor, how, "t")


@pytest.mark.parametrize("shape", [(3, 4), (8, 4), ()])
def test_wrong_shapes_are_refused(shape):
    with pytest.raises(PaddingRefusedError, match="do not belong together"):
        grow(torch.zeros(shape), Growth(0, 4, 8, Fill.ZERO), "layers.0.attn.attn_sink")
