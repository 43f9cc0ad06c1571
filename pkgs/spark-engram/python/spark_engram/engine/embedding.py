"""``EngramEmbedding`` whose rows are in packed files instead of memory."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import torch
from sglang.kernels.ops.embeddings.engram_gather import engram_gather
from sglang.srt.environ import envs
from sglang.srt.layers import engram
from sglang.srt.runtime_context import get_model, get_parallel, get_schedule
from torch import nn

from spark_engram import check
from spark_engram import layout as geometry
from spark_engram.checkpoint import CONFIG_FILE, Checkpoint
from spark_engram.engine import prefetch, reporting
from spark_engram.engine.staging import Staging
from spark_engram.errors import MismatchError, UsageError
from spark_engram.layout import Table
from spark_engram.progress import size_text
from spark_engram.store import RowStore, StoreOptions, environment_number

logger = logging.getLogger(__name__)

_DEFAULT_TOKENS = 2048
#: Loaders that map a shard and touch only what is copied out of it.
_LAZY_FORMATS = ("auto", "safetensors", "dummy")


class PackedEngramEmbedding(engram.EngramEmbedding):  # type: ignore[misc]
    """One layer's table, read row by row from this rank's packed file.

    Everything but where the rows come from is the engine's: the row ranges, the collectives,
    the dequantisation kernel.

    Raises:
        MismatchError: no packed file, or one for another tp, rank, layout, model or revision.
        UsageError: the engine's options or the ``SPARK_ENGRAM_*`` variables do not allow it.

    """

    def __init__(
        self, num_embeddings: int, dim: int, layer_id: int, column_bounds: tuple[int, ...]
    ) -> None:
        # The engine's __init__ would allocate the table.
        nn.Module.__init__(self)
        _check_engine(dim)
        parallel = get_parallel()
        self.dim = dim
        self.layer_id = layer_id
        self.tp_size = parallel.tp_size
        self.table = Table(layer_id, num_embeddings, tuple(column_bounds))
        self.row_start, row_end = engram.shard_range(
            num_embeddings, column_bounds, parallel.tp_rank, self.tp_size
        )
        self.rows = row_end - self.row_start
        # What the engine's methods ask of a table.
        self.host_table = None
        self.peer = None
        self._sort_host_reads = False
        # In the prefill graph the lookup then runs between segments, where reads overlap.
        self.staged_by_scheduler = True

        self._options = StoreOptions.from_environment(os.environ)
        self._tokens = _max_tokens()
        self._device = _device()
        self._hash_index = -1
        self._prefetcher: prefetch.Prefetcher | None = None
        self._skipped: set[str] = set()
        self.store = self._open(parallel.tp_rank)
        self.staging = self._make_staging()
        self.weight = self._placeholder(dim, torch.float8_e4m3fn, "weight")
        self.scale = self._placeholder(dim // geometry.SCALE_BLOCK, torch.float8_e8m0fnu, "scale")

    def _open(self, rank: int) -> RowStore:
        path = check.matching(
            Path(os.environ[check.FOLDER_VARIABLE]),
            self.table,
            tp=self.tp_size,
            rank=rank,
            revision=os.environ.get(check.REVISION_VARIABLE) or None,
            config_sha256=_config_sha256(),
        )
        share = self._options.cache_bytes // max(1, _engram_layers())
        options = StoreOptions(
            **{
                **vars(self._options),
                "cache_bytes": share,
                "max_ids": max(self._tokens * self.table.columns, 1),
            }
        )
        store = RowStore(path, options)
        if (store.identity.row_start, store.identity.rows.rows) != (self.row_start, self.rows):
            raise MismatchError(
                f"{path}: holds rows {store.identity.row_start} to {store.identity.row_end}, "
                f"this engine's shard_range says {self.row_start} to {self.row_start + self.rows}"
            )
        return store

    def _make_staging(self) -> Staging | None:
        if self._device is None or self.rows == 0:
            return None
        capacity = self._tokens * self.table.columns
        return Staging(self.store, capacity, self._device, prefetch.read_queue())

    def _placeholder(self, width: int, dtype: torch.dtype, part: str) -> nn.Parameter:
        # No rows: the loader finds the parameter, and nothing is allocated.
        parameter = nn.Parameter(torch.empty(0, width, dtype=dtype), requires_grad=False)

        def skip(_parameter: nn.Parameter, loaded: torch.Tensor) -> None:
            shape = (self.table.total_rows, width)
            if tuple(loaded.shape) != shape:
                raise MismatchError(
                    f"layer {self.layer_id}: the checkpoint's {part} has shape "
                    f"{tuple(loaded.shape)}, the engine expects {shape}"
                )
            self._skipped.add(part)

        parameter.weight_loader = skip
        return parameter

    def join_prefetch(self, hash_index: int) -> None:
        """Take part in prefetching as entry ``hash_index`` of the engine's hash ids."""
        parallel = get_parallel()
        whole_batch = parallel.attn_dp_size == 1 and parallel.attn_cp_size == 1
        wanted = environment_number(os.environ, "SPARK_ENGRAM_PREFETCH", 1) != 0
        if self.staging is None or not whole_batch or not wanted:
            return
        self._hash_index = hash_index
        self._prefetcher = prefetch.prefetcher(self._device)
        self._prefetcher.add(hash_index, self.staging)

    def finish_load(self, label: str) -> None:
        """Prove the read path once and say what is in use; the engine calls it after loading."""
        self._probe()
        reporting.watch(self.store, os.environ)
        held = self.rows * geometry.ROW_BYTES
        logger.info(
            "Engram %s: rows %d to %d of %d from %s (%s, O_DIRECT%s); %s of table memory not "
            "allocated, %s pinned for staging, prefetch %s, checkpoint tensors skipped: %s",
            label,
            self.row_start,
            self.row_start + self.rows,
            self.table.total_rows,
            self.store.path,
            self.store.backend,
            f"; {self.store.note}" if self.store.note else "",
            size_text(held),
            size_text(self.staging.nbytes if self.staging is not None else 0),
            "on" if self._prefetcher is not None else "off",
            ", ".join(sorted(self._skipped)) or "none seen",
        )

    def _probe(self) -> None:
        """Look up the first and last own row both ways; also compiles the kernels."""
        if self.rows == 0:
            return
        first, last = self.row_start, self.row_start + self.rows - 1
        device = self._device if self._device is not None else torch.device("cpu")
        ids = torch.tensor([[first, last, -1]], dtype=torch.int64, device=device)
        found = self._owned_rows(ids).cpu()
        same = torch.isclose(found, self._read_now(ids.cpu()), rtol=0, atol=0, equal_nan=True)
        if not same.all():
            raise MismatchError(f"{self.store.path}: the GPU path gives other rows than the CPU's")

    def _owned_rows(self, indices: torch.Tensor) -> torch.Tensor:
        """Rows of ``indices`` [..., C] that this rank holds, zero for the rest, in bf16."""
        if self.rows == 0:
            return self.new_rows(indices).zero_()
        if not indices.is_cuda:
            return self._read_now(indices)
        staging = self.staging
        if staging is None:
            raise UsageError("spark-engram: a lookup on the GPU, but the engine runs on the CPU")
        out = self.new_rows(indices)
        flat = out.view(-1, self.dim)
        ids = indices if indices.dim() == 2 else indices.reshape(-1, indices.shape[-1])
        tokens, columns = ids.shape
        if tokens * columns == 0:
            return out
        early = self._prefetcher
        if early is not None and early.join(self._hash_index, staging, ids):
            staging.dequantise(tokens * columns, flat, engram_gather)
            return out
        # More ids than staging: piece by piece, in stream order.
        step = max(1, staging.capacity // columns)
        for at in range(0, tokens, step):
            piece = ids[at : at + step]
            staging.read(piece)
            rows = flat[at * columns : at * columns + piece.numel()]
            staging.dequantise(piece.numel(), rows, engram_gather)
        return out

    def _read_now(self, indices: torch.Tensor) -> torch.Tensor:
        """Use the engine's CPU arithmetic on rows read synchronously."""
        weights, scales = self.store.gather(indices.reshape(-1).numpy())
        rows = torch.from_numpy(weights).view(torch.float8_e4m3fn).float()
        factors = torch.from_numpy(scales).view(torch.float8_e8m0fnu).float()
        values = rows.unflatten(-1, (-1, geometry.SCALE_BLOCK)) * factors.unsqueeze(-1)
        local = indices - self.row_start
        owned = (local >= 0) & (local < self.rows)
        flat = values.flatten(-2).to(torch.bfloat16).view(*indices.shape, self.dim)
        result: torch.Tensor = flat.masked_fill(~owned.unsqueeze(-1), 0)
        return result


def _check_engine(dim: int) -> None:
    if dim != geometry.WEIGHT_BYTES:
        raise UsageError(f"Engram rows of {dim} values; packed files have {geometry.WEIGHT_BYTES}")
    for name in ("SGLANG_ENABLE_DSV41_ENGRAM_HOST_TABLE", "SGLANG_OPT_DSV41_ENGRAM_PEER_SHARDS"):
        if getattr(envs, name).get():
            raise UsageError(
                f"{name} and {check.FOLDER_VARIABLE} exclude each other; unset one of them"
            )
    model = get_model()
    load_format = getattr(model, "load_format", "auto")
    load_format = str(getattr(load_format, "value", load_format))
    if load_format not in _LAZY_FORMATS:
        raise UsageError(
            f"--load-format {load_format} would read the whole Engram tables (about 203 GB) to "
            f"throw them away; use one of {', '.join(_LAZY_FORMATS)}"
        )
    for option in ("weight_loader_disable_mmap", "weight_loader_prefetch_checkpoints"):
        if getattr(model, option, False):
            raise UsageError(
                f"--{option.replace('_', '-')} would read the whole Engram tables (about 203 GB) "
                "to throw them away; leave it out"
            )


def _config_sha256() -> str | None:
    """Return the hash of the served model's config.json; None when it is not a local folder."""
    folder = Path(str(getattr(get_model(), "model_path", "")))
    if not (folder / CONFIG_FILE).exists():
        logger.warning("%s is no local folder: the packed files' config is not compared", folder)
        return None
    return Checkpoint.read(folder).config_sha256


def _engram_layers() -> int:
    folder = Path(str(getattr(get_model(), "model_path", "")))
    return len(Checkpoint.read(folder).tables) if (folder / CONFIG_FILE).exists() else 2


def _max_tokens() -> int:
    """Return the tokens of the largest lookup that is staged at once."""
    asked = environment_number(os.environ, "SPARK_ENGRAM_MAX_TOKENS", 0)
    if asked:
        return asked
    schedule: Any = get_schedule()
    for name in ("chunked_prefill_size", "max_prefill_tokens"):
        size = getattr(schedule, name, None)
        if size is not None and size > 0:
            return int(size)
    return _DEFAULT_TOKENS


def _device() -> torch.device | None:
    if not torch.cuda.is_available():
        return None
    return torch.device("cuda", torch.cuda.current_device())
