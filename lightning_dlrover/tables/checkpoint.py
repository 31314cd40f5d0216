"""Sharded tables on disk, in the format of `torch.distributed.checkpoint`. Each worker writes and reads its own part.

A table's weights, and every full-width state of its optimizer, are one tensor each. A row-wise state is one tensor for each set
of columns that had a value of its own, so that a checkpoint can be read into any other plan. `exchange` describes how these
values change where columns are cut differently. A growing table has a set of tensors for each worker that wrote it, named after
the first of that worker's sections.

A checkpoint's folder may come from the job's records, so nothing in it is trusted: its list of parts is read without executing
code that it names, and parts that are not tensors are refused.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from lightning_dlrover.rdzv.transport import transfer
from lightning_dlrover.rdzv.transport.data_unpickler import DataUnpickler
from lightning_dlrover.tables.exchange import Block
from lightning_dlrover.tables.growing_rows import pack
from lightning_dlrover.tables.layout import TablePlan
from lightning_dlrover.tables.sharded import ShardedTables

_COUNTER, _SECTIONS = "counter/", "sections"
_COLUMNS = re.compile(r"^(?P<name>.*)\[(?P<col0>\d+):(?P<col1>\d+)\]$")


class CheckpointError(RuntimeError):
    """A checkpoint of tables cannot be read into this model."""


@dataclass(frozen=True)
class _Chunk:
    offsets: tuple[int, ...]
    values: torch.Tensor


class _Values:
    """One worker's part of a large tensor, for the planners below."""

    def __init__(self, shape: Sequence[int], chunks: Sequence[_Chunk]) -> None:
        self.shape = torch.Size(shape)
        self.chunks = list(chunks)

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(name, torch.Size(chunk.offsets)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(torch.Size(chunk.offsets), chunk.values.size()),
                    properties=TensorProperties.create_from_tensor(chunk.values),
                    size=self.shape,
                ),
            )
            for chunk in self.chunks
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(chunk.offsets), chunk.values.size()) for chunk in self.chunks]

    def find(self, index: MetadataIndex) -> torch.Tensor:
        assert index.offset is not None
        return next(chunk.values for chunk in self.chunks if torch.Size(chunk.offsets) == index.offset)


class _SavePlanner(DefaultSavePlanner):
    def lookup_object(self, index: MetadataIndex) -> Any:
        values = self.state_dict[index.fqn]
        return values.find(index) if isinstance(values, _Values) else super().lookup_object(index)


class _LoadPlanner(DefaultLoadPlanner):
    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        # The original replaces values of types that it does not support.
        self.original_state_dict = self.state_dict = state_dict
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise AssertionError("the original unpickles them, and load_tables refuses them")

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        values = self.state_dict[index.fqn]
        return values.find(index) if isinstance(values, _Values) else super().lookup_tensor(index)


class _Reader(FileSystemReader):
    """Torch's reader, which would unpickle the list of parts."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._list = folder / ".metadata"

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the list of parts; raises `CheckpointError` if it is damaged, or names classes foreign to checkpoints."""
        content = self._list.read_bytes()
        try:
            found = DataUnpickler(io.BytesIO(content)).load()
        except transfer.RefusedError as error:
            raise CheckpointError(
                f"{self._list} holds {error.name}, which no checkpoint of tables does; it was written by another program"
            ) from error
        except Exception as error:  # garbage can lead to any error
            raise CheckpointError(f"{self._list} is damaged ({error}); choose another checkpoint") from error
        if not isinstance(found, Metadata):
            raise CheckpointError(f"{self._list} is not the list of a checkpoint's parts; choose another checkpoint")
        found.storage_meta = found.storage_meta or StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found


def save_tables(tables: ShardedTables, folder: Path) -> None:
    """Write all tables. All workers of the default group must call this, and see the same folder."""
    assert tables.plan is not None
    state = {name: _Values(shape, chunks) for name, (shape, chunks) in _named(tables.blocks(), tables.plan).items()}
    counters = {_COUNTER + name: torch.tensor(n) for name, n in tables.counters().items() if not name.endswith("/slots")}
    for name, values in _growing(tables).items():
        state[name] = _Values(values.shape, [_Chunk((0,) * values.dim(), values)])
    save({**state, **counters}, checkpoint_id=folder, planner=_SavePlanner(), no_dist=dist.get_world_size() == 1)


def load_tables(tables: ShardedTables, folder: Path) -> None:
    """Read all tables, whichever workers and plan wrote them. All workers of the default group must call this.

    Raises:
        CheckpointError: a table of the model is missing or has another size.
    """
    assert tables.plan is not None
    reader = _Reader(folder)
    saved = reader.read_metadata().state_dict_metadata
    for name, entry in saved.items():
        if not isinstance(entry, TensorStorageMetadata):
            raise CheckpointError(f"checkpoint {folder}: {name} is not a tensor; it was written by another program")
    wanted: dict[str, list[_Chunk]] = {}
    shapes: dict[str, Sequence[int]] = {}
    _check_growing(tables, folder, saved)
    composed: list[tuple[Block, list[tuple[float, torch.Tensor]]]] = []
    for name, (shape, chunks) in _named(tables.blocks(), tables.plan).items():
        if _COLUMNS.match(name) is None:
            wanted.setdefault(name, []).extend(chunks)
            shapes[name] = shape
    for block in tables.blocks():
        if block.values.dim() > 1:
            continue
        parts: list[tuple[float, torch.Tensor]] = []
        for name in saved:
            found = _COLUMNS.match(name)
            if found is None or found["name"] != f"{block.table}.{block.what}":
                continue
            width = min(block.region.col1, int(found["col1"])) - max(block.region.col0, int(found["col0"]))
            if width > 0:
                part = torch.empty_like(block.values)
                parts.append((width / block.region.num_cols, part))
                wanted.setdefault(name, []).append(_Chunk((block.region.row0,), part))
                shapes[name] = (tables.plan[block.table].rows,)
        if sum(share for share, _ in parts) < 0.999:
            raise CheckpointError(
                f"checkpoint {folder}: {block.table}.{block.what} is missing for columns {block.region.col0} to "
                f"{block.region.col1 - 1}; it was written with another optimizer of its tables"
            )
        composed.append((block, parts))
    for name, shape in shapes.items():
        there = getattr(saved.get(name), "size", None)
        if there is None or tuple(there) != tuple(shape):
            what = f"has the shape {tuple(there)}" if there is not None else "is missing"
            raise CheckpointError(
                f"checkpoint {folder}: {name} {what}, this model's has the shape {tuple(shape)}; "
                "it was written by another model, or with another optimizer of its tables"
            )
    # Parts of one worker that start at the same row are read one after the other.
    while any(wanted.values()):
        state: dict[str, Any] = {}
        for name, chunks in wanted.items():
            taken = {chunk.offsets: chunk for chunk in chunks}
            wanted[name] = [chunk for chunk in chunks if chunk is not taken[chunk.offsets]]
            state[name] = _Values(shapes[name], list(taken.values()))
        load(state, storage_reader=reader, planner=_LoadPlanner(), no_dist=True)
    _load_growing(tables, reader, saved)
    counters = {name: torch.tensor(0) for table in tables.counters() if (name := _COUNTER + table) in saved}
    load(dict(counters), storage_reader=reader, planner=_LoadPlanner(), no_dist=True)
    tables.set_counters({name.removeprefix(_COUNTER): int(number) for name, number in counters.items()})
    for block, parts in composed:
        if len(parts) == 1:
            block.values.copy_(parts[0][1])
        elif parts:
            block.values.copy_(torch.stack([part * share for share, part in parts]).sum(0))


def _growing(tables: ShardedTables) -> dict[str, torch.Tensor]:
    """Return the tensors to write of this worker's growing rows."""
    found: dict[str, torch.Tensor] = {}
    for table, rows in tables.growing.rows.items():
        first, end = rows.owned
        columns = {column: values[: rows.num_slots] for column, values in rows.columns.items()}
        if rows.growth.min_count > 1:
            columns["filter"] = rows.filter
        found |= {f"{table}.{column}@{first}": values for column, values in columns.items()}
        found[f"{table}.{_SECTIONS}@{first}"] = torch.tensor([first, end])
    return found


def _check_growing(tables: ShardedTables, folder: Path, saved: Mapping[str, Any]) -> None:
    """Raise `CheckpointError` unless the checkpoint has this model's growing tables, with their columns."""
    for table, rows in tables.growing.rows.items():
        for column, values in rows.columns.items():
            found = [entry for name, entry in saved.items() if name.startswith(f"{table}.{column}@")]
            if not found:
                raise CheckpointError(
                    f"checkpoint {folder}: there is no {column} of the growing table {table}; it was written by another model, "
                    "or with another optimizer of its tables"
                )
            if (there := tuple(found[0].size)[1:]) != tuple(values.shape[1:]):
                raise CheckpointError(
                    f"checkpoint {folder}: the {column} of the growing table {table} has {there} values per row, this model's "
                    f"{tuple(values.shape[1:])}"
                )


def _load_growing(tables: ShardedTables, reader: _Reader, saved: Mapping[str, Any]) -> None:
    """Read the rows of this worker's sections, from all parts that have some of them."""

    def read(names: Mapping[str, str]) -> dict[str, torch.Tensor]:
        state = {name: torch.empty(saved[name].size, dtype=saved[name].properties.dtype) for name in names.values()}
        load(dict(state), storage_reader=reader, planner=_LoadPlanner(), no_dist=True)
        return {what: state[name] for what, name in names.items()}

    for table, rows in tables.growing.rows.items():
        rows.clear()
        prefix = f"{table}.{_SECTIONS}@"
        for suffix in (name.removeprefix(prefix) for name in saved if name.startswith(prefix)):
            first, end = read({"": prefix + suffix})[""].tolist()
            first, end = max(first, rows.owned[0]), min(end, rows.owned[1])
            if first < end:
                part = read({column: f"{table}.{column}@{suffix}" for column in rows.columns})
                has_filter = f"{table}.filter@{suffix}" in saved
                counts = read({"": f"{table}.filter@{suffix}"})[""] if has_filter else torch.zeros_like(rows.filter)
                rows.take(pack(part, len(part["key"]), counts, first, end), first, end)


def _named(blocks: Sequence[Block], plan: Mapping[str, TablePlan]) -> dict[str, tuple[Sequence[int], list[_Chunk]]]:
    """Return the tensors to write by name, each with its shape and this worker's parts."""
    found: dict[str, tuple[Sequence[int], list[_Chunk]]] = {}
    for block in blocks:
        table, region = plan[block.table], block.region
        name = f"{block.table}.{block.what}"
        if block.values.numel() == 0:
            continue
        if block.values.dim() > 1:
            _, chunks = found.setdefault(name, ((table.rows, table.cols), []))
            chunks.append(_Chunk((region.row0, region.col0), block.values))
        else:
            _, chunks = found.setdefault(f"{name}[{region.col0}:{region.col1}]", ((table.rows,), []))
            chunks.append(_Chunk((region.row0,), block.values))
    return found
