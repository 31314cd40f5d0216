"""The rows of a worker's tables that were looked up, and so trained, since the start of a snapshot."""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.hooks import RemovableHandle

from lightning_dlrover.tables.block import Block
from lightning_dlrover.tables.layout import Region
from lightning_dlrover.tables.torchrec_parts import held_by, key_of, region_of

__all__ = ["TouchedRows"]

KEPT = 4
"""Flag of a row with a former value kept for a copy."""

MAX_CHANGED = 0.3
"""Maximum fraction of a table's rows to be copied one by one. Beyond it, copying all is faster and needs no list of rows."""

NUM_NOTED = 64
"""Number of steps with rows flagged in one pass."""


class TouchedRows:
    """The rows of a worker's shards that were trained since each of two moments, called 0 and 1. One byte per row.

    Optimizers in the backward pass change only rows that are looked up. Training may therefore go on while a thread copies the
    shards as they are at one moment, from `begin_copy` to `end_copy`: a row's former value is kept before it is trained.

    Args:
        kernels: torchrec's kernels, each with the path of its collection.
        blocks: their memory.
    """

    def __init__(self, kernels: Sequence[tuple[str, Any]], blocks: Sequence[Block]) -> None:
        self._masks: dict[tuple[str, Region], tuple[torch.Tensor, set[int]]] = {}
        self._kernels: list[_OfKernel] = []
        self._hooks: list[RemovableHandle] = []
        self._kept: list[tuple[Block, torch.Tensor, torch.Tensor]] | None = None  # not None while a copy is being made
        self._lock = threading.Lock()  # held while the training thread keeps rows, because another thread ends the copy
        held: dict[tuple[str, Region], list[Block]] = {}
        for block in blocks:
            held.setdefault((block.table, block.region), []).append(block)
        for path, kernel in kernels:
            tables = []
            for config in kernel.config.embedding_tables:
                num_rows = 0  # none tracked: its optimizer may change all rows
                if config.local_metadata is not None:
                    num_rows = region_of(config.local_metadata).num_rows
                tables.append(_Tracked(held[key_of(path, config.name), held_by(config)], num_rows, config.num_features()))
            of_kernel = _OfKernel(tables)
            self._kernels.append(of_kernel)
            for config, mask, moments in zip(kernel.config.embedding_tables, of_kernel.masks, of_kernel.followed, strict=True):
                if config.local_metadata is not None:
                    self._masks[key_of(path, config.name), region_of(config.local_metadata)] = mask, moments
            self._hooks.append(kernel.register_forward_pre_hook(functools.partial(self._note, of_kernel)))

    def close(self) -> None:
        """Stop tracking."""
        for hook in self._hooks:
            hook.remove()

    def _note(self, tables: _OfKernel, kernel: Any, arguments: tuple[Any, ...]) -> None:
        if not torch.is_grad_enabled():
            return
        with self._lock:
            if self._kept is None:
                tables.note(arguments[0])
                return
            rows = tables.rows_of(arguments[0])
            new: torch.Tensor = torch.unique(rows[tables.flags[rows] < KEPT])
            for block, of_block in tables.split(new):
                self._kept.append((block, of_block, block.values.detach()[of_block.to(block.values.device)]))
            tables.flags.index_fill_(0, rows, 3 | KEPT)

    def is_tracked(self, block: Block) -> bool:
        """Return whether the trained rows of the block are tracked."""
        return (block.table, block.region) in self._masks

    def begin_copy(self) -> None:
        """Begin a copy of the blocks in their present state."""
        self._catch_up()
        with self._lock:
            for mask, _ in self._masks.values():
                mask &= 3
            self._kept = []

    def end_copy(self) -> list[tuple[Block, torch.Tensor, torch.Tensor]]:
        """End the copy; return rows, of shape ``(n,)``, that were trained since `begin_copy`, and their former values."""
        with self._lock:
            kept, self._kept = self._kept or [], None
            return kept

    def since(self, moment: int, block: Block) -> torch.Tensor | None:
        """Return the block's rows, from its first, that were trained since a moment; None if unknown or too many."""
        self._catch_up()
        mask, moments = self._masks.get((block.table, block.region), (None, set()))
        if mask is None or moment not in moments or _are_too_many(mask, moment):
            return None
        return (mask & (1 << moment)).nonzero().flatten()

    def mark(self, moment: int) -> None:
        """Set the moment to now."""
        self._catch_up()
        for mask, moments in self._masks.values():
            mask &= 0xFF ^ (1 << moment)
            moments.add(moment)

    def _catch_up(self) -> None:
        with self._lock:
            for kernel in self._kernels:
                kernel.catch_up()


class _Tracked(NamedTuple):
    """One table of a kernel: the blocks of its shard, the number of tracked rows, and the number of features that use it."""

    blocks: Sequence[Block]
    num_rows: int
    num_features: int


class _OfKernel:
    """One byte for every tracked row of the tables that one kernel holds, in one tensor.

    Attributes:
        followed: moments since which few enough rows were trained to list them, per table.
    """

    def __init__(self, tables: Sequence[_Tracked]) -> None:
        *starts, end = itertools.accumulate((table.num_rows for table in tables), initial=0)
        self.flags = torch.zeros(end + 1, dtype=torch.uint8)  # the last one is shared by all rows that are not tracked
        self.masks = [self.flags[start : start + table.num_rows] for start, table in zip(starts, tables, strict=True)]
        self.followed: list[set[int]] = [set() for _ in tables]
        self._noted: list[tuple[torch.Tensor, Sequence[int]]] = []  # values and lengths of steps that are not flagged yet
        self._num_unchecked = 0  # rows flagged since the last check of their number
        self._blocks = [table.blocks for table in tables]
        self._starts = [*starts, end]
        first = [start if table.num_rows else end for start, table in zip(starts, tables, strict=True)]
        by_key = torch.tensor([table.num_features for table in tables])
        self._first_of_key = torch.tensor(first).repeat_interleave(by_key)
        self._rows_of_key = torch.tensor([table.num_rows for table in tables]).repeat_interleave(by_key)

    def note(self, features: Any) -> None:
        """Record the looked-up rows for `catch_up` to flag. Flagging each step by itself would mostly wait for memory."""
        if not any(self.followed):
            return
        lengths = features.length_per_key()
        self._noted.append((features.values()[: sum(lengths)].clone(), lengths))
        if len(self._noted) >= NUM_NOTED:
            self.catch_up()

    def catch_up(self) -> None:
        """Flag the rows of all recorded steps."""
        if self._noted:
            noted, self._noted = self._noted, []
            places = self._places(noted)
            self.flags.index_fill_(0, places, 3)
            self._num_unchecked += len(places)
            if self._num_unchecked > MAX_CHANGED / 3 * len(self.flags):
                self._num_unchecked = 0
                for mask, moments in zip(self.masks, self.followed, strict=True):
                    moments -= {moment for moment in moments if _are_too_many(mask, moment)}

    def rows_of(self, features: Any) -> torch.Tensor:
        """Return the places in `flags` of all looked-up rows, of shape ``(num_values,)``."""
        lengths = features.length_per_key()
        return self._places([(features.values()[: sum(lengths)], lengths)])

    def _places(self, noted: Sequence[tuple[torch.Tensor, Sequence[int]]]) -> torch.Tensor:
        rows = torch.cat([values for values, _ in noted]).to("cpu", torch.int64)
        by_key = torch.tensor([length for _, lengths in noted for length in lengths])
        first, limit = (
            of.repeat(len(noted)).repeat_interleave(by_key, output_size=len(rows))
            for of in (self._first_of_key, self._rows_of_key)
        )
        # fbgemm uses row 0 for invalid indices.
        places: torch.Tensor = first + rows.masked_fill((rows < 0) | (rows >= limit), 0)
        return places

    def split(self, rows: torch.Tensor) -> Iterator[tuple[Block, torch.Tensor]]:
        """Split ascending places in `flags` by block, and yield each one's own rows."""
        borders = torch.searchsorted(rows, torch.tensor(self._starts)).tolist()
        for index, blocks in enumerate(self._blocks):
            of_table = rows[borders[index] : borders[index + 1]] - self._starts[index]
            if len(of_table):
                yield from ((block, of_table) for block in blocks)


def _are_too_many(mask: torch.Tensor, moment: int) -> bool:
    return int((mask & (1 << moment)).count_nonzero()) > MAX_CHANGED * len(mask)
