"""Distribution of the tables' rows and columns over workers, and the data to send when it changes. Pure.

A table is cut into rectangles: `row_wise` tables by rows, `column_wise` ones by columns, `table_wise` ones not at all. The
states of its optimizer follow its weights. A full-width state (Adagrad, Adam) has the rectangle's shape, a row-wise one
(row-wise Adagrad) one value per row of the rectangle.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Layout", "LayoutError", "Move", "Region", "Shard", "least_bytes", "plan_moves"]


class LayoutError(ValueError):
    """Rows of a table that no worker holds."""


@dataclass(frozen=True, order=True)
class Region:
    """A rectangle of a table: rows `row0` to `row1`, columns `col0` to `col1`, both half-open."""

    row0: int
    row1: int
    col0: int
    col1: int

    @property
    def num_rows(self) -> int:
        return max(0, self.row1 - self.row0)

    @property
    def num_cols(self) -> int:
        return max(0, self.col1 - self.col0)

    @property
    def num_values(self) -> int:
        return self.num_rows * self.num_cols

    def overlap(self, other: Region) -> Region | None:
        """Return the intersection of both, or None."""
        both = Region(
            max(self.row0, other.row0), min(self.row1, other.row1), max(self.col0, other.col0), min(self.col1, other.col1)
        )
        return both if both.num_values else None

    def without(self, other: Region) -> list[Region]:
        """Return the rest of this rectangle, as rectangles of the greatest possible width."""
        both = self.overlap(other)
        if both is None:
            return [self]
        rest = [
            Region(self.row0, both.row0, self.col0, self.col1),
            Region(both.row0, both.row1, self.col0, both.col0),
            Region(both.row0, both.row1, both.col1, self.col1),
            Region(both.row1, self.row1, self.col0, self.col1),
        ]
        return [part for part in rest if part.num_values]


@dataclass(frozen=True)
class Shard:
    """A rectangle of a table and the worker that holds it."""

    owner: str
    region: Region


Layout = Mapping[str, Sequence[Shard]]
"""Shards of every table, by its name. Several workers may hold the same rectangle: replicas."""


@dataclass(frozen=True)
class Move:
    """A rectangle that `target` needs and takes from `source`, which may be itself."""

    table: str
    region: Region
    source: str
    target: str
    into: Region  # the target's shard that contains it


def plan_moves(old: Layout, new: Layout) -> list[Move]:
    """Return how every shard of `new` is filled from `old`.

    Rows that their owner has already stay; the rest comes from the worker that sends least. The result is the same on all
    workers.

    Raises:
        LayoutError: a table, or a part of one, is not in `old`.
    """
    moves: list[Move] = []
    sent: dict[str, int] = {}
    for table in sorted(new):
        holders = sorted(old.get(table, ()), key=lambda shard: (shard.region, shard.owner))
        for shard in new[table]:
            missing = [shard.region] if shard.region.num_values else []
            for own in (h for h in holders if h.owner == shard.owner):
                missing = _take(table, missing, own, shard, moves)
            while missing:
                found = [h for h in holders if any(h.region.overlap(part) for part in missing)]
                if not found:
                    raise LayoutError(
                        f"table {table!r}: no worker has rows {missing[0].row0} to {missing[0].row1 - 1}, columns "
                        f"{missing[0].col0} to {missing[0].col1 - 1}"
                    )
                source = min(found, key=lambda h: (sent.get(h.owner, 0), h.owner, h.region))
                before = len(moves)
                missing = _take(table, missing, source, shard, moves)
                sent[source.owner] = sent.get(source.owner, 0) + sum(m.region.num_values for m in moves[before:])
    return moves


def _take(table: str, missing: list[Region], source: Shard, shard: Shard, moves: list[Move]) -> list[Region]:
    """Return the missing rectangles left after `source` has given its part of them."""
    rest: list[Region] = []
    for part in missing:
        both = part.overlap(source.region)
        if both is not None:
            moves.append(Move(table, both, source.owner, shard.owner, shard.region))
        rest += part.without(source.region)
    return rest


def least_bytes(new_workers: Sequence[str], total_bytes: float, bytes_by_worker: Mapping[str, float]) -> float:
    """Return the least bytes that any change to equal shares over `new_workers` sends: the sum of their missing shares."""
    share = total_bytes / len(new_workers)
    return sum(max(0.0, share - bytes_by_worker.get(worker, 0.0)) for worker in new_workers)
