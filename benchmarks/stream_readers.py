"""Readers of Parquet files that `stream.py` compares: ours, those one writes by hand, and those of other libraries.

All decode the same row groups into dictionaries with a tensor for each column, and transform nothing.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from lightning_dlrover.data import parquet, stream
from lightning_dlrover.data.parquet_source import ROWS_AT_ONCE

BATCH_SIZE = 512


class PlainParquet(IterableDataset[dict[str, torch.Tensor]]):
    """The reader one writes by hand: files split over loader workers, decoded in order, cut into batches."""

    def __init__(self, paths: Sequence[str], writable: bool) -> None:
        self._paths = list(paths)
        self._writable = writable

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        info = get_worker_info()
        mine = self._paths[info.id :: info.num_workers] if info is not None else self._paths
        return chain.from_iterable(plain_batches(path, self._writable) for path in mine)


def plain_batches(path: str, writable: bool) -> Iterator[dict[str, torch.Tensor]]:
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        for decoded in file.iter_batches(ROWS_AT_ONCE, use_threads=False):
            for first in range(0, decoded.num_rows, BATCH_SIZE):
                views = tensors(decoded.slice(first, BATCH_SIZE))
                yield {name: view.clone() for name, view in views.items()} if writable else views


def tensors(batch: Any) -> dict[str, torch.Tensor]:
    """Return the columns of a record batch or of a table without a copy."""
    return {name: torch.from_numpy(column.to_numpy()) for name, column in zip(batch.schema.names, batch.columns, strict=True)}


def plain(paths: Sequence[str], num_workers: int, writable: bool = False) -> Any:
    return DataLoader(PlainParquet(paths, writable), batch_size=None, num_workers=num_workers)


def ours(shuffle_rows: int, paths: Sequence[str], num_workers: int) -> Any:
    return DataLoader(stream(parquet(paths), shuffle_rows=shuffle_rows), batch_size=BATCH_SIZE, num_workers=num_workers)


def ours_in_threads(shuffle_rows: int, paths: Sequence[str], num_threads: int) -> Any:
    return DataLoader(stream(parquet(paths), shuffle_rows=shuffle_rows, threads=num_threads), batch_size=BATCH_SIZE)


def hugging_face_rows(paths: Sequence[str], num_workers: int) -> Any:
    """Return what the documentation of `datasets` shows: a streaming dataset in a DataLoader that collates rows."""
    from datasets import load_dataset

    data = load_dataset("parquet", data_files=list(paths), split="train", streaming=True).with_format("torch")
    return DataLoader(data, batch_size=BATCH_SIZE, num_workers=num_workers)


class ArrowBatches(IterableDataset[dict[str, torch.Tensor]]):
    """Batches of a streaming dataset of `datasets` as Arrow tables, which is its fastest way."""

    def __init__(self, paths: Sequence[str]) -> None:
        from datasets import load_dataset

        self._data = load_dataset("parquet", data_files=list(paths), split="train", streaming=True).with_format("arrow")

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        info = get_worker_info()
        data = self._data if info is None else self._data.shard(info.num_workers, info.id)
        return map(tensors, data.iter(BATCH_SIZE))


def hugging_face_arrow(paths: Sequence[str], num_workers: int) -> Any:
    return DataLoader(ArrowBatches(paths), batch_size=None, num_workers=num_workers)


def torchdata_nodes(paths: Sequence[str], num_workers: int) -> Any:
    """Return torchdata's nodes: row groups are decoded by threads, as many as there would be loader workers."""
    import pyarrow.parquet as pq
    from torchdata.nodes import IterableWrapper, Loader, Mapper, ParallelMapper, Unbatcher

    groups = [(path, group) for path in paths for group in range(pq.ParquetFile(path).num_row_groups)]
    source = IterableWrapper(groups)
    decoded = (
        ParallelMapper(source, decoded_group, num_workers, method="thread") if num_workers else Mapper(source, decoded_group)
    )
    return Loader(Unbatcher(decoded))


def decoded_group(place: tuple[str, int]) -> list[dict[str, torch.Tensor]]:
    import pyarrow.parquet as pq

    path, group = place
    table = pq.ParquetFile(path).read_row_group(group, use_threads=False)
    return [tensors(table.slice(first, BATCH_SIZE)) for first in range(0, table.num_rows, BATCH_SIZE)]


def litdata_parquet(paths: Sequence[str], num_workers: int) -> Any:
    """Return litData's stream of Parquet files, which it indexes first."""
    from litdata import StreamingDataLoader, StreamingDataset, index_parquet_dataset
    from litdata.streaming.item_loader import ParquetLoader

    folder = str(Path(paths[0]).parent)
    if not (Path(folder) / "index.json").exists():
        index_parquet_dataset(folder)
    return StreamingDataLoader(
        StreamingDataset(folder, item_loader=ParquetLoader()),
        batch_size=BATCH_SIZE,
        num_workers=num_workers,
        multiprocessing_context="spawn" if num_workers else None,  # it refuses to fork, because it reads with polars
    )


Reader = Callable[[Sequence[str], int], Any]
"""Makes a loader of the files with so many helpers."""


@dataclass(frozen=True)
class Entrant:
    """A reader that takes part, and how much of an epoch it reads. Slow ones read a part of it."""

    reader: Reader
    share: float = 1.0
    max_rows_helped: int = 50_000  # before `share` is taken; with helpers most are slow, and start-up counts
    needs_helpers: bool = False
    packages: tuple[str, ...] = ()  # needed beside ours

    @property
    def is_installed(self) -> bool:
        return all(map(importlib.util.find_spec, self.packages))

    def rows(self, num_rows: int, num_helpers: int) -> int:
        return int(self.share * (min(num_rows, self.max_rows_helped) if num_helpers else num_rows))


ALL = sys.maxsize
READERS: dict[str, Entrant] = {
    "plain": Entrant(plain),
    "plain, writable": Entrant(partial(plain, writable=True)),
    "stream": Entrant(partial(ours, 0), max_rows_helped=ALL),
    "stream, shuffled": Entrant(partial(ours, 100_000), max_rows_helped=ALL),
    "stream, threads": Entrant(partial(ours_in_threads, 0), max_rows_helped=ALL, needs_helpers=True),
    "stream, threads, shuffled": Entrant(partial(ours_in_threads, 100_000), max_rows_helped=ALL, needs_helpers=True),
}
OURS = ("stream", "stream, threads")
OTHERS: dict[str, Entrant] = {
    "torchdata nodes": Entrant(torchdata_nodes, max_rows_helped=ALL, packages=("torchdata",)),
    "datasets, arrow batches": Entrant(hugging_face_arrow, packages=("datasets",)),
    "datasets, torch rows": Entrant(hugging_face_rows, share=0.001, packages=("datasets",)),
    "litdata": Entrant(litdata_parquet, share=0.02, packages=("litdata", "polars")),
}
