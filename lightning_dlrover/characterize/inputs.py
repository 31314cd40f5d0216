"""Batches of a point: ids with a power law, in memory or behind a DataLoader in several formats."""

from __future__ import annotations

import itertools
import math
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_dlrover.characterize.parent import die_with_parent
from lightning_dlrover.characterize.point import Point

__all__ = ["Batch", "Batches", "draw_ids"]

MIN_BATCHES, MAX_BATCHES = 4, 64
DATASET_ROWS = 4001
DATASET_LENGTH = 10_000_000
FETCH_S = 0.5e-3
"""Simulated time until a packed row arrives from a store."""

PACKED_BYTES = 120_000
"""Size of an unpacked row, from which a small record is computed."""


@dataclass(frozen=True)
class Batch:
    """One worker's share of a batch."""

    dense: Tensor  # (samples, dense features)
    ids: Tensor  # (tables, samples, lookups)
    labels: Tensor  # (samples, 1)

    def to(self, dense: torch.device, tables: torch.device) -> Batch:
        return Batch(self.dense.to(dense), self.ids.to(tables), self.labels.to(dense))


def draw_ids(shape: tuple[int, ...], rows: int, skew: float, generator: torch.Generator) -> Tensor:
    """Draw ids in [0, rows) with probabilities that fall as a power of their rank; hot ids are spread over the table."""
    if skew == 0:
        return torch.randint(rows, shape, generator=generator)
    uniform = torch.rand(shape, generator=generator, dtype=torch.float64)
    # The inverse of the continuous power law's distribution function on [1, rows + 1).
    if abs(skew - 1) < 1e-9:
        ranks = torch.exp(uniform * math.log(rows + 1))
    else:
        ranks = (uniform * ((rows + 1) ** (1 - skew) - 1) + 1) ** (1 / (1 - skew))
    return ((ranks.long().clamp(1, rows) - 1) * 2654435761) % rows


class _Rows(Dataset[tuple[Tensor, Tensor, Tensor]]):
    """Rows in memory, fetched one by one, as most users' datasets are."""

    def __init__(self, point: Point) -> None:
        generator = torch.Generator().manual_seed(0)
        self._dense = torch.randn(DATASET_ROWS, point.num_dense, generator=generator)
        shape = DATASET_ROWS, point.num_sparse, point.lookups
        self._ids = draw_ids(shape, point.rows, point.skew, generator)

    def __len__(self) -> int:
        return DATASET_LENGTH

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        row = self._dense[index % DATASET_ROWS]
        return row, self._ids[index % DATASET_ROWS], (row[:1] > 0).float()


class _Packed(_Rows):
    """The same rows from a simulated remote store: each one takes a while to arrive, and is then unpacked."""

    def __init__(self, point: Point) -> None:
        super().__init__(point)
        generator = torch.Generator().manual_seed(0)
        noise = torch.randint(256, (97, 4000), generator=generator, dtype=torch.uint8)
        self._packed = [zlib.compress(bytes([i]) * PACKED_BYTES + noise[i].numpy().tobytes(), 1) for i in range(97)]

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        time.sleep(FETCH_S)  # simulates a store's latency
        unpacked = torch.frombuffer(bytearray(zlib.decompress(self._packed[index % len(self._packed)])), dtype=torch.uint8)
        dense, ids, _ = super().__getitem__(index)
        width = len(dense)
        row = unpacked[: width * (PACKED_BYTES // width)].view(width, -1).float().mean(1) / 255
        return row, ids, (dense[:1] > 0).float()


class _Parquet(Dataset[tuple[Tensor, Tensor, Tensor]]):
    """Batches of a Parquet file, one row group each."""

    def __init__(self, point: Point, local_batch: int, folder: Path) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        self._path = folder / f"{point.num_dense}-{point.num_sparse}-{point.lookups}-{local_batch}.parquet"
        self._point, self._num_groups = point, max(1, DATASET_ROWS // local_batch)
        self._file: Any = None
        if self._path.exists():  # an earlier visit has written it
            return
        rows = _Rows(point)
        samples = [rows[i] for i in range(self._num_groups * local_batch)]
        columns = {f"n{i}": torch.stack([s[0] for s in samples])[:, i].numpy() for i in range(point.num_dense)}
        ids = torch.stack([s[1] for s in samples]).flatten(1)
        columns |= {f"c{i}": ids[:, i].numpy() for i in range(ids.shape[1])}
        pq.write_table(pa.table(columns), self._path, row_group_size=local_batch)

    def __len__(self) -> int:
        return DATASET_LENGTH

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        import pyarrow.parquet as pq

        self._file = self._file or pq.ParquetFile(self._path)
        table = self._file.read_row_group(index % self._num_groups, use_threads=False)
        columns = [torch.from_numpy(column.to_numpy().copy()) for column in table.columns]
        dense = torch.stack(columns[: self._point.num_dense], 1)
        ids = columns[self._point.num_dense :]
        shape = len(dense), self._point.num_sparse, self._point.lookups
        return (
            dense,
            torch.stack(ids, 1).view(shape) if ids else torch.zeros(shape, dtype=torch.int64),
            (dense[:, :1] > 0).float(),
        )


def _die_with_parent(_: int) -> None:
    die_with_parent()


class Batches:
    """An endless iterator over one worker's batches. `close` ends its loader workers.

    Args:
        folder: place for input files.
    """

    def __init__(self, point: Point, local_batch: int, global_rank: int, folder: Path) -> None:
        self._loader: Iterator[Any] | None = None
        if point.data == "memory":
            self._prepared = itertools.cycle(_prepare(point, local_batch, global_rank))
            return
        options: dict[str, Any] = {"num_workers": point.loader_workers, "shuffle": False}
        if point.loader_workers:
            options |= {"multiprocessing_context": "fork", "worker_init_fn": _die_with_parent}
        if point.data == "parquet":
            self._loader = iter(DataLoader(_Parquet(point, local_batch, folder), None, **options))
        else:
            rows = _Rows(point) if point.data == "rows" else _Packed(point)
            self._loader = iter(DataLoader(rows, local_batch, **options))

    def __next__(self) -> Batch:
        if self._loader is None:
            return next(self._prepared)
        dense, ids, labels = next(self._loader)
        return Batch(dense, ids.transpose(0, 1).contiguous(), labels)

    def __iter__(self) -> Batches:
        return self

    def close(self) -> None:
        loader: Any = self._loader
        if hasattr(loader, "_shutdown_workers"):  # dropping the iterator does the same, but later
            loader._shutdown_workers()
        self._loader = None


def _prepare(point: Point, local_batch: int, global_rank: int) -> list[Batch]:
    """Make enough batches that their ids cover the tables, as far as time and memory allow."""
    generator = torch.Generator().manual_seed(global_rank)
    per_batch = max(1, local_batch * point.lookups)
    count = min(MAX_BATCHES, max(MIN_BATCHES, 2 * point.rows // per_batch)) if point.num_sparse else MIN_BATCHES
    count = max(1, min(count, int(5e7 / (local_batch * (point.num_dense + point.num_sparse * point.lookups)))))
    found = []
    for _ in range(count):
        dense = torch.randn(local_batch, point.num_dense, generator=generator)
        ids = draw_ids((point.num_sparse, local_batch, point.lookups), point.rows, point.skew, generator)
        found.append(Batch(dense, ids, (dense[:, :1] > 0).float()))
    return found
