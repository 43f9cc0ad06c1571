"""The one Triton kernel of the plugin."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 256


@triton.jit(do_not_specialize=["stride_row", "count", "row_lo", "row_hi"])  # type: ignore[untyped-decorator]
def _publish_ids_kernel(  # type: ignore[no-untyped-def] # noqa: ANN202
    ids_ptr,  # noqa: ANN001
    stride_row,  # noqa: ANN001
    stride_col,  # noqa: ANN001
    columns,  # noqa: ANN001
    count,  # noqa: ANN001
    row_lo,  # noqa: ANN001
    row_hi,  # noqa: ANN001
    host_ids,  # noqa: ANN001
    slots_ptr,  # noqa: ANN001
    BLOCK: tl.constexpr,  # noqa: N803
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    row = at // columns
    source = row.to(tl.int64) * stride_row + (at - row * columns) * stride_col
    ids = tl.load(ids_ptr + source, mask=inside, other=-1).to(tl.int64)
    # The host function reads the ids here; a kernel's writes are visible to later stream work.
    tl.store(host_ids.to(tl.int64).to(tl.pointer_type(tl.int64)) + at, ids, mask=inside)
    owned = (ids >= row_lo) & (ids < row_hi)
    tl.store(slots_ptr + at, tl.where(owned, at, -1), mask=inside)


def publish_ids(
    ids: torch.Tensor, row_lo: int, row_hi: int, host_ids: torch.Tensor, slots: torch.Tensor
) -> None:
    """Copy ``ids`` [T, C] (any strides) to pinned ``host_ids`` [>= T * C] int64 and set ``slots``.

    ``slots`` [>= T * C] int32 on the device gets, for each id, its own position if its row is in
    ``[row_lo, row_hi)`` and -1 if not: the ids with which ``engram_gather`` reads the staging.
    """
    tokens, columns = ids.shape
    count = tokens * columns
    assert host_ids.is_pinned() and slots.is_cuda  # noqa: S101 - programming errors only
    assert count <= min(host_ids.numel(), slots.numel())  # noqa: S101
    _publish_ids_kernel[(triton.cdiv(count, _BLOCK),)](
        ids,
        ids.stride(0),
        ids.stride(1),
        columns,
        count,
        row_lo,
        row_hi,
        host_ids.data_ptr(),
        slots,
        BLOCK=_BLOCK,
    )
