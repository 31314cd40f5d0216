"""Rows of a growing table in one worker's memory: found by their ids, created, trained, evicted, and packed for other workers.

An id is mixed into a 64-bit key by a bijection, so that keys are spread evenly whatever the ids are. The keys' top bits divide
them into `SECTIONS` sections; a worker owns whole sections. `Rows` keeps its rows in the order of their arrival, without gaps:
a row's slot is its index in every column. Ids without a row of their own share one row for each section: slots 0 to
`SECTIONS` - 1.

All operations are vectorised over ids. Of the libraries with hash tables, torch has none, fbgemm's are read-only on CPU, and
those of pandas and PyArrow are built for every call.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lightning_dlrover.tables.exchange import Addresses
from lightning_dlrover.tables.growing_optimizers import RowOptimizer

SECTION_BITS = 10
SECTIONS = 1 << SECTION_BITS
"""Ranges of keys that workers own, and rows that ids without a row of their own share."""

FILTER_CELLS = 1 << 12
"""Counters of each section for ids that have no row yet, of one byte each."""

MAX_COUNT = 255

_EMPTY = -(1 << 63)  # key of a free place in the index
_REMOVED = _EMPTY + 1
_MAX_LOAD = 0.6
_BYTES_IN_INDEX = 12 / (0.75 * _MAX_LOAD)
_EVICTED_SHARE = 0.1
"""Fraction of a full table's rows that leave at once: to find them costs a pass over the table."""

_HUGE_FROM = 32 << 20
"""Bytes of a column from which on huge pages are worth their size."""

_CHUNK = 1 << 16
"""Rows initialised at once."""

KEPT = 4
"""Flag of a row whose former values are kept for a copy."""


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


_MULTIPLIERS = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_M1, _M2 = map(_signed, _MULTIPLIERS)
_I1, _I2 = (_signed(pow(each, -1, 1 << 64)) for each in _MULTIPLIERS)
_GOLDEN = _signed(0x9E3779B97F4A7C15)


def _shifted(values: Tensor, bits: int) -> Tensor:
    """Shift right without sign."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def _mixed(values: Tensor) -> Tensor:
    """Return the finalizer of SplitMix64 (Steele et al., OOPSLA 2014), a bijection of 64-bit integers."""
    values = (values ^ _shifted(values, 30)) * _M1
    values = (values ^ _shifted(values, 27)) * _M2
    return values ^ _shifted(values, 31)


def keys_of(ids: Tensor) -> Tensor:
    """Return the keys of ids, int64. Two keys are reserved, and their ids share the keys of two others."""
    return _mixed(ids).clamp_(min=_REMOVED + 1)


def ids_of(keys: Tensor) -> Tensor:
    """Return the ids of keys."""
    ids = (keys ^ _shifted(keys, 31) ^ _shifted(keys, 62)) * _I2
    ids = (ids ^ _shifted(ids, 27) ^ _shifted(ids, 54)) * _I1
    return ids ^ _shifted(ids, 30) ^ _shifted(ids, 60)


def sections_of(keys: Tensor) -> Tensor:
    """Return the section of each key; sorted keys have sorted sections."""
    return (keys >> (64 - SECTION_BITS)) + SECTIONS // 2


class Index:
    """A hash table from distinct keys to slots: open addressing, linear probing."""

    def __init__(self) -> None:
        self._keys, self._slots = torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int32)
        self._num_taken = 0  # places that are not empty
        self._make(1 << 12)

    def _make(self, size: int) -> None:
        self._keys, self._slots = torch.full((size,), _EMPTY), torch.empty(size, dtype=torch.int32)
        self._mask = size - 1
        self._num_taken = 0

    @property
    def num_bytes(self) -> int:
        return self._keys.nbytes + self._slots.nbytes

    def rebuild(self, keys: Tensor, first_slot: int) -> None:
        """Replace the content: each key has the slot after that of the key before it."""
        size = 1 << max(12, int(len(keys) / (0.75 * _MAX_LOAD)).bit_length())
        self._make(size)
        self.insert(keys, torch.arange(first_slot, first_slot + len(keys), dtype=torch.int32))

    def has_room(self, num: int) -> bool:
        """Whether so many keys can be inserted without rebuilding."""
        return self._num_taken + num <= _MAX_LOAD * len(self._keys)

    def _places(self, keys: Tensor) -> Tensor:
        """Return the places of keys; -1 for missing ones."""
        places = keys & self._mask
        found = self._keys[places]
        is_hit = found == keys
        result = torch.where(is_hit, places, -1)
        left = ((found != _EMPTY) & ~is_hit).nonzero().flatten()
        places, keys = places[left], keys[left]
        while len(left):
            places = (places + 1) & self._mask
            found = self._keys[places]
            is_hit = found == keys
            result[left[is_hit]] = places[is_hit]
            rest = ((found != _EMPTY) & ~is_hit).nonzero().flatten()
            left, places, keys = left[rest], places[rest], keys[rest]
        return result

    def find(self, keys: Tensor) -> Tensor:
        """Return the slots of keys, int64; -1 for missing ones."""
        places = self._places(keys)
        return torch.where(places >= 0, self._slots[places.clamp(min=0)].to(torch.int64), -1)

    def insert(self, keys: Tensor, slots: Tensor) -> None:
        """Insert distinct keys that are missing."""
        self._num_taken += len(keys)
        places = keys & self._mask
        while len(keys):
            free = (self._keys[places] == _EMPTY).nonzero().flatten()
            self._keys[places[free]] = keys[free]  # of several keys at one place, any one wins
            is_placed = self._keys[places] == keys
            placed = is_placed.nonzero().flatten()
            self._slots[places[placed]] = slots[placed]
            rest = (~is_placed).nonzero().flatten()
            keys, slots, places = keys[rest], slots[rest], (places[rest] + 1) & self._mask

    def remove(self, keys: Tensor) -> None:
        """Remove keys that are present."""
        self._keys[self._places(keys)] = _REMOVED

    def move(self, keys: Tensor, slots: Tensor) -> None:
        """Set other slots of keys that are present."""
        self._slots[self._places(keys)] = slots.to(torch.int32)


class Column:
    """One value or vector of every row, in reserved addresses: it grows without being copied.

    Attributes:
        all: shape ``(max_rows,)`` or ``(max_rows, width)``; memory is used up to the last row that was written.
    """

    def __init__(self, dtype: torch.dtype, width: int, max_rows: int) -> None:
        self._row_bytes = dtype.itemsize * max(1, width)
        self._addresses = Addresses(self._row_bytes * max_rows)
        self._addresses.use_huge_pages(_HUGE_FROM)
        values = self._addresses.values(dtype)
        self.all = values[: max_rows * width].view(max_rows, width) if width else values[:max_rows]

    def drop(self, first: int, end: int) -> None:
        """Return the memory of some rows to the system; they read as zeros."""
        self.all[first:end].zero_()  # those in the pages at both ends
        self._addresses.drop(first * self._row_bytes, end * self._row_bytes)


@dataclass(frozen=True)
class Growth:
    """When rows of a growing table appear, and when they leave.

    Attributes:
        min_count: occurrences in training after which an id gets a row; before, it shares one.
        max_rows: most rows in the whole job; None: no limit.
        max_bytes: most bytes of rows, with optimizer states and index, in the whole job; None: no limit.
        policy: rows that leave a full table: the least recently ("lru") or least frequently ("lfu") trained ones.
        max_age: steps without training after which a row leaves; None: never.
        min_rows: rows in the whole job that `max_age` leaves.

    Raises:
        ValueError: a value is out of range.

    Example:
        >>> growth = Growth(min_count=2, max_bytes=8 << 30, policy="lfu")
    """

    min_count: int = 1
    max_rows: int | None = None
    max_bytes: int | None = None
    policy: Literal["lru", "lfu"] = "lru"
    max_age: int | None = None
    min_rows: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.min_count <= MAX_COUNT:
            raise ValueError(f"Growth(min_count={self.min_count}): it must be 1 to {MAX_COUNT}")
        for name in ("max_rows", "max_bytes", "max_age"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"Growth({name}={value}): it must be at least 1, or None for no limit")
        if self.policy not in ("lru", "lfu"):
            raise ValueError(f"Growth(policy={self.policy!r}): it must be 'lru' or 'lfu'")


@dataclass(frozen=True)
class Init:
    """Distribution of first weights: uniform between `low` and `high`, or normal with this mean and standard deviation."""

    kind: Literal["uniform", "normal"]
    low: float  # or mean
    high: float  # or standard deviation

    def drawn(self, keys: Tensor, dim: int, seed: int) -> Tensor:
        """Return ``(n, dim)`` values that depend on key, column and seed only, not on when a row is created or by whom."""
        start = _mixed(keys + _mixed(torch.tensor([seed * 2 + 1]))).unsqueeze(1)
        columns = torch.arange(1, dim * (1 if self.kind == "uniform" else 2) + 1)
        bits = _mixed(start + columns * _GOLDEN)
        values = _shifted(bits, 40).to(torch.float32) * 2.0**-24
        if self.kind == "uniform":
            return values.mul_(self.high - self.low).add_(self.low)
        radius = (-2.0 * (1.0 - values[:, :dim]).log()).sqrt_()  # Box and Muller, 1958
        return radius.mul_((values[:, dim:] * (2.0 * torch.pi)).cos_()).mul_(self.high).add_(self.low)


class Rows:
    """The rows of one table on one worker.

    Args:
        name: `{module}.{table}`.
        dim: weights of each row.
        max_memory: bytes of addresses to reserve: more than the rows will ever need.

    Attributes:
        num_slots: slots in use, with the shared ones.
        step: training steps of the table.
        columns: by name: `key`, `weight`, `state0` and so on, `seen` (the last step that trained the row), `count` (times).
        filter: shape ``(SECTIONS, FILTER_CELLS)``, uint8; occurrences of ids that have no row.
        num_created, num_evicted: rows since the start of this process.
    """

    def __init__(self, name: str, dim: int, optimizer: RowOptimizer, growth: Growth, init: Init, max_memory: int) -> None:
        self.name = name
        self.dim = dim
        self.optimizer = optimizer
        self.growth = growth
        self.seed = 0
        self.step = 0
        self.num_created = self.num_evicted = 0
        self._init = init
        kinds: dict[str, tuple[torch.dtype, int]] = {"key": (torch.int64, 0), "weight": (torch.float32, dim)}
        kinds |= {f"state{i}": (torch.float32, width) for i, width in enumerate(optimizer.widths(dim))}
        kinds |= {"seen": (torch.int32, 0), "count": (torch.int32, 0)}
        self.row_bytes = sum(dtype.itemsize * max(1, width) for dtype, width in kinds.values())
        max_rows = SECTIONS + max(SECTIONS, max_memory // self.row_bytes)
        self._memory = {column: Column(*kind, max_rows) for column, kind in kinds.items()}
        self.columns = {column: memory.all for column, memory in self._memory.items()}
        self.max_slots = max_rows
        self._flags = Column(torch.uint8, 0, max_rows)
        self.filter = Column(torch.uint8, FILTER_CELLS, SECTIONS).all
        self._num_counted = 0
        self.num_slots = SECTIONS
        self._index = Index()
        self.owned = (0, SECTIONS)  # sections
        self._kept: list[tuple[Tensor, dict[str, Tensor]]] | None = None  # not None while a copy is being made
        self._num_copied = 0  # slots in that copy
        self._aged_at = 0  # step of the last search for old rows
        self._lock = threading.Lock()
        self._marked: set[int] = set()  # moments since which changes are flagged

    # --- what there is -----------------------------------------------------------------------------------------------------

    @property
    def num_rows(self) -> int:
        """Rows of single ids."""
        return self.num_slots - SECTIONS

    @property
    def num_bytes(self) -> int:
        return self.num_slots * self.row_bytes + self._index.num_bytes

    @property
    def states(self) -> list[Tensor]:
        return [values for column, values in self.columns.items() if column.startswith("state")]

    def begin(self, seed: int) -> None:
        """Empty the table, and give the shared rows their first values."""
        self.clear()
        self.seed = seed
        self._draw(torch.arange(SECTIONS, dtype=torch.int64) - (1 << 62), 0)
        self.columns["key"][:SECTIONS] = _REMOVED

    def clear(self) -> None:
        """Drop all rows, shared ones included."""
        for memory in (*self._memory.values(), self._flags):
            memory.drop(0, self.num_slots)
        self.filter.zero_()
        self.num_slots, self.step, self._aged_at = SECTIONS, 0, 0
        self._marked.clear()
        self._index = Index()

    # --- lookups -----------------------------------------------------------------------------------------------------------

    def slots_of(self, keys: Tensor, counts: Tensor | None = None) -> Tensor:
        """Return the slot of each of some distinct keys.

        Args:
            counts: occurrences of each key in a training step, whose new ids get rows; None outside of training.

        Raises:
            MemoryError: there are more rows than addresses.
        """
        slots = self._index.find(keys)
        missing = (slots < 0).nonzero().flatten()
        if not len(missing):
            return slots
        new = keys[missing]
        slots[missing] = sections_of(new)
        if counts is not None:
            if self.growth.min_count > 1:
                is_admitted = self._counted(new, counts[missing]) >= self.growth.min_count
                missing, new = missing[is_admitted], new[is_admitted]
            slots[missing] = self._create(new)
        return slots

    def _counted(self, keys: Tensor, counts: Tensor) -> Tensor:
        """Add occurrences to a counting filter, and return those of each key so far, or more: a count-min sketch of 2 rows.

        Counts are halved once they have filled the filter (as in TinyLFU, Einziger et al., ACM ToS 2017).
        """
        cells, half = self.filter.view(-1), FILTER_CELLS // 2
        first, mixed = sections_of(keys) * FILTER_CELLS, _mixed(keys + _GOLDEN)
        places = first + (mixed & (half - 1)), first + half + (_shifted(mixed, 32) & (half - 1))
        for at in places:
            cell, index = torch.unique(at, return_inverse=True)
            sums = torch.zeros(len(cell), dtype=torch.int64).index_add_(0, index, counts)
            cells[cell] = sums.add_(cells[cell]).clamp_(max=MAX_COUNT).to(torch.uint8)
        found = torch.minimum(cells[places[0]], cells[places[1]])
        self._num_counted += len(keys)
        owned = self.owned[1] - self.owned[0]
        if self._num_counted > owned * FILTER_CELLS:
            self._num_counted = 0
            self.filter >>= 1
        return found

    def _create(self, keys: Tensor) -> Tensor:
        first, end = self.num_slots, self.num_slots + len(keys)
        if end > self.max_slots:
            raise MemoryError(
                f"table {self.name}: {end} rows need more than this host's memory; set Growth(max_rows=...) or "
                "Growth(max_bytes=...), or use more workers"
            )
        self._draw(keys, first)
        self.columns["seen"][first:end] = self.step
        self.num_slots = end
        self.num_created += len(keys)
        slots = torch.arange(first, end)
        self._insert(keys, slots)
        return slots

    def _insert(self, keys: Tensor, slots: Tensor) -> None:
        """Enter the newest rows into the index."""
        if self._index.has_room(len(keys)):
            self._index.insert(keys, slots.to(torch.int32))
        else:
            self._index.rebuild(self.columns["key"][SECTIONS : self.num_slots], SECTIONS)

    def _draw(self, keys: Tensor, first: int) -> None:
        for start in range(0, len(keys), _CHUNK):
            part = keys[start : start + _CHUNK]
            rows = slice(first + start, first + start + len(part))
            self.columns["key"][rows] = part
            self.columns["weight"][rows] = self._init.drawn(part, self.dim, self.seed)
            self.optimizer.begin(self.columns["weight"][rows], [state[rows] for state in self.states])
            self._flags.all[rows] = 3

    # --- training ------------------------------------------------------------------------------------------------------------

    def train(self, slots: Tensor, grads: Tensor, counts: Tensor) -> None:
        """Update distinct slots with the gradients of a step, ``(n, dim)``; `counts` are the occurrences of each."""
        with self._lock:
            self._keep(slots)
            self.step += 1
            trained = [self.columns["weight"], *self.states]
            weights, *states = [column.index_select(0, slots) for column in trained]
            self.optimizer.update(weights, states, grads)
            for column, values in zip(trained, (weights, *states), strict=True):
                column.index_copy_(0, slots, values)
            self.columns["seen"].index_fill_(0, slots, self.step)
            self.columns["count"].index_add_(0, slots, counts.to(torch.int32))
            self._flags.all.index_fill_(0, slots, 3 | (KEPT if self._kept is not None else 0))

    def evict(self) -> int:
        """Between two steps, let rows leave that are too old, or too many. Return their number.

        None leave while the table is being copied.
        """
        growth, share = self.growth, (self.owned[1] - self.owned[0]) / SECTIONS
        limits = [growth.max_rows] if growth.max_rows is not None else []
        if growth.max_bytes is not None:
            limits.append(int(growth.max_bytes / (self.row_bytes + _BYTES_IN_INDEX)))
        limit = min(limits, default=self.max_slots) * share
        may_be_old = growth.max_age is not None and self.step - self._aged_at >= max(1, growth.max_age // 8)
        if (self.num_rows <= limit and not may_be_old) or self._kept is not None:
            return 0
        self._aged_at = self.step
        seen = self.columns["seen"][SECTIONS : self.num_slots]
        leaves = torch.zeros(len(seen), dtype=torch.bool)
        if growth.max_age is not None:
            leaves |= seen < self.step - growth.max_age
            spare = int(growth.min_rows * share) - int((~leaves).sum())
            if spare > 0:
                old = leaves.nonzero().flatten()
                leaves[old[seen[old].argsort(descending=True)[:spare]]] = False
        if len(seen) - int(leaves.sum()) > limit:
            by = seen if growth.policy == "lru" else self.columns["count"][SECTIONS : self.num_slots]
            # The rows of the last step stay: their ids are the most likely ones of the next.
            rank = by.to(torch.int64) * 2 + (seen == self.step).to(torch.int64) * (1 << 40)
            num = min(len(seen), int(len(seen) - limit * (1.0 - _EVICTED_SHARE)))
            leaves[rank.argsort()[:num]] = True
            if growth.policy == "lfu":
                self.columns["count"][SECTIONS : self.num_slots] >>= 1  # lest rows that were popular long ago stay for ever
                self._flags.all[SECTIONS : self.num_slots] |= 3
        gone = leaves.nonzero().flatten() + SECTIONS
        self.remove(gone)
        self.num_evicted += len(gone)
        return len(gone)

    def remove(self, slots: Tensor) -> None:
        """Remove rows; the last ones take their places."""
        if not len(slots):
            return
        keys = self.columns["key"]
        num_left = self.num_slots - len(slots)
        is_gone = torch.zeros(self.num_slots, dtype=torch.bool)
        is_gone[slots] = True
        holes = is_gone[:num_left].nonzero().flatten()
        tail = (~is_gone[num_left:]).nonzero().flatten() + num_left
        if len(slots) * 2 < num_left:
            self._index.remove(keys[slots])
            self._index.move(keys[tail], holes)
        for values in self.columns.values():
            values[holes] = values[tail]
        self._flags.all[holes] = 3
        for memory in (*self._memory.values(), self._flags):
            memory.drop(num_left, self.num_slots)
        self.num_slots = num_left
        if len(slots) * 2 >= num_left:
            self._index.rebuild(keys[SECTIONS:num_left], SECTIONS)

    # --- copies --------------------------------------------------------------------------------------------------------------

    def begin_copy(self) -> None:
        """Begin a copy of the table as it is now, while training continues."""
        with self._lock:
            self._flags.all[: self.num_slots] &= 3
            self._kept, self._num_copied = [], self.num_slots

    def end_copy(self) -> list[tuple[Tensor, dict[str, Tensor]]]:
        """End the copy; return slots that were trained since `begin_copy`, and their former values by column."""
        with self._lock:
            kept, self._kept = self._kept or [], None
            return kept

    def _keep(self, slots: Tensor) -> None:
        if self._kept is not None:
            # Rows that were created since are in no copy.
            new = slots[(self._flags.all[slots] < KEPT) & (slots < self._num_copied)]
            self._kept.append((new, {column: values.index_select(0, new) for column, values in self.columns.items()}))

    def mark(self, moment: int) -> None:
        """Set a moment, 0 or 1, to now."""
        self._flags.all[: self.num_slots] &= 0xFF ^ (1 << moment)
        self._marked.add(moment)

    def since(self, moment: int) -> Tensor | None:
        """Return the slots that have changed since a moment; None: unknown."""
        if moment not in self._marked:
            return None
        return (self._flags.all[: self.num_slots] & (1 << moment)).nonzero().flatten()

    # --- other workers -----------------------------------------------------------------------------------------------------

    def own(self, first: int, end: int) -> None:
        """Keep the rows of these sections only."""
        self.owned = (first, end)
        sections = sections_of(self.columns["key"][SECTIONS : self.num_slots])
        self.remove(((sections < first) | (sections >= end)).nonzero().flatten() + SECTIONS)

    def take(self, packed: Tensor, first: int, end: int) -> None:
        """Add the rows of sections that `pack` has packed."""
        num_sections = end - first
        fixed = num_sections * (self.row_bytes + FILTER_CELLS)
        num, rest = divmod(len(packed) - fixed, self.row_bytes)
        if rest or num < 0:
            raise ValueError(f"table {self.name}: {len(packed)} bytes are no rows of sections {first} to {end - 1}")
        start, at = self.num_slots, 0
        for values in self.columns.values():
            for rows in (slice(first, end), slice(start, start + num)):
                part = values[rows]
                part.copy_(packed[at : at + part.nbytes].view(values.dtype).view(part.shape))
                at += part.nbytes
        self.filter[first:end] = packed[at:].view(num_sections, FILTER_CELLS)
        self._flags.all[first:end] = 3
        self._flags.all[start : start + num] = 3
        self.num_slots += num
        self._insert(self.columns["key"][start : start + num], torch.arange(start, start + num))


def pack(columns: Mapping[str, Tensor], num_slots: int, counts: Tensor, first: int, end: int) -> Tensor:
    """Return the rows of some sections, their shared rows, and their part of the filter as bytes, shape ``(n,)``.

    Args:
        columns: `Rows.columns`, or a copy of them.
        counts: `Rows.filter`, or a copy of it.
    """
    sections = sections_of(columns["key"][SECTIONS:num_slots])
    slots = ((sections >= first) & (sections < end)).nonzero().flatten() + SECTIONS
    parts: list[Tensor] = []
    for values in columns.values():
        parts += [values[first:end], values[slots]]
    return torch.cat([part.reshape(-1).view(torch.uint8) for part in (*parts, counts[first:end])])
