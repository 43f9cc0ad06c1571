"""Shared fixtures: small fake checkpoints, packed once per session."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from spark_engram import fake, pack
from spark_engram.fake import FakeSpec
from spark_engram.layout import Layout, Table

REVISION = "fb2764a5" * 5


@dataclass(frozen=True)
class Model:
    """A fake checkpoint and what is in it."""

    folder: Path
    spec: FakeSpec
    tables: tuple[Table, ...]

    def arrays(self, layer: int) -> tuple[np.ndarray, np.ndarray]:
        table = next(table for table in self.tables if table.layer == layer)
        return fake.table_arrays(table, self.spec.seed)

    def pack(self, output: Path, *, tp: int, rank: int, **more: object) -> list[pack.Job]:
        output.mkdir(parents=True, exist_ok=True)
        options = {"revision": REVISION, "segment_pages": 16, **more}
        return pack.pack(
            pack.PackOptions(checkpoint=self.folder, output=output, tp=tp, rank=rank, **options)
        )


def make_model(folder: Path, spec: FakeSpec) -> Model:
    return Model(folder, spec, fake.write_checkpoint(folder, spec))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Two tables of about 2,600 and 4,500 rows: more than one segment for each of 8 ranks."""
    return make_model(tmp_path_factory.mktemp("model") / "ckpt", FakeSpec(rows_per_column=100))


@pytest.fixture(scope="session")
def packed_file(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Layer 1, rank 1 of 3. Do not change it: copy it."""
    output = tmp_path_factory.mktemp("packed")
    return model.pack(output, tp=3, rank=1, layers=(1,))[0].path


@pytest.fixture
def both_layouts() -> tuple[Layout, ...]:
    return (Layout.COLUMNS, Layout.ROWS)
