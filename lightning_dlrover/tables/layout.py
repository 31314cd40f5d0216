"""Layout of embedding tables: the rectangle that each worker holds, and the moves when the workers change. Pure.

`row_wise` tables are cut by rows, `column_wise` ones by columns, `table_wise` ones not at all. The optimizer's states follow
the weights. A full-width state (Adagrad, Adam) has the rectangle's shape, a row-wise one (row-wise Adagrad) one value per row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from lightning_dlrover.codec import from_fields


class LayoutError(ValueError):
    """No worker holds some rows of a table."""


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
        """Return the rest of this rectangle, as rectangles as wide as possible."""
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

    Rows that their owner already has stay; the rest comes from the worker that sends least. All workers compute the same moves.

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


TOLERANCE = 0.1
"""Minimum imbalance that moves a shard, as a fraction of the mean load."""

KINDS = ("row_wise", "column_wise", "data_parallel", "table_wise", "table_row_wise", "table_column_wise")
"""torchrec's kinds of sharding that can be reassigned."""

HASH_RANGES = "hash_ranges"
"""Kind of growing tables: their rows are sections of keys, see `growing_rows.py`."""

WHOLE_KINDS = ("table_wise", "table_row_wise", "table_column_wise")
"""Kinds with one owner per table. The "node" within which torchrec splits it further is one worker in an elastic job."""


class PlanError(ValueError):
    """Tables cannot be placed."""


@dataclass(frozen=True)
class TablePlan:
    """Sharding of one table."""

    kind: str  # torchrec's name of the sharding type
    kernel: str  # torchrec's name of the compute kernel
    rows: int  # of the whole table
    cols: int
    shards: tuple[Shard, ...]  # in torchrec's order


Plan = Mapping[str, TablePlan]
"""Plan of all tables, by `{module}.{table}`."""


def layout_of(plan: Plan) -> Layout:
    return {name: table.shards for name, table in plan.items()}


def replan(plan: Plan, members: Sequence[str]) -> dict[str, TablePlan]:
    """Return the plan for other workers: little data to send, and an even load.

    The first plan of a job is torchrec's own. Later ones keep each table's kind and the cuts of its columns, and only reassign
    owners. Shards stay with their owner where the balance allows.

    Args:
        members: worker ids in rank order.

    Raises:
        PlanError: there are no workers, or a table's kind cannot be reassigned.
    """
    if not members:
        raise PlanError("no worker can hold the tables")
    bundles: dict[tuple[str, int], list[Shard]] = {}
    for name, table in sorted(plan.items()):
        if table.kind in WHOLE_KINDS:
            bundles[name, 0] = list(table.shards)
        elif table.kind == "column_wise":
            bundles.update({(name, i): [shard] for i, shard in enumerate(table.shards)})
        elif table.kind not in (*KINDS, HASH_RANGES):
            raise PlanError(_not_placeable(name, table.kind))
    owners = _balance(bundles, members)
    new: dict[str, TablePlan] = {}
    for name, table in plan.items():
        if table.kind in ("row_wise", HASH_RANGES):
            shards = _row_blocks(table, members)
        elif table.kind == "data_parallel":
            shards = [Shard(worker, Region(0, table.rows, 0, table.cols)) for worker in members]
        elif table.kind in WHOLE_KINDS:
            shards = [replace(shard, owner=owners[name, 0]) for shard in table.shards]
        else:
            shards = [replace(shard, owner=owners[name, i]) for i, shard in enumerate(table.shards)]
        new[name] = replace(table, shards=tuple(shards))
    return new


def check_kinds(kinds: Mapping[str, Sequence[str]]) -> None:
    """Raise `PlanError` if a kind that a script allows for a table cannot be reassigned."""
    for table, allowed in kinds.items():
        for kind in allowed:
            if kind not in KINDS:
                raise PlanError(_not_placeable(table, kind))


def _not_placeable(table: str, kind: str) -> str:
    return (
        f"table {table!r}: kind {kind!r} cannot be reassigned when the workers change; set "
        f"sharding_constraints={{{table.split('.')[-1]!r}: ParameterConstraints(sharding_types=[...])}} to some of "
        f"{', '.join(KINDS)}"
    )


def _row_blocks(table: TablePlan, members: Sequence[str]) -> list[Shard]:
    """Return equal blocks of rows in rank order, as torchrec requires."""
    block = math.ceil(table.rows / len(members))
    return [
        Shard(worker, Region(min(i * block, table.rows), min((i + 1) * block, table.rows), 0, table.cols))
        for i, worker in enumerate(members)
    ]


def _balance(bundles: Mapping[tuple[str, int], Sequence[Shard]], members: Sequence[str]) -> dict[tuple[str, int], str]:
    """Return the owner of each bundle of shards that stay together."""
    costs = _costs(bundles)
    owners = {key: shards[0].owner for key, shards in bundles.items() if shards[0].owner in members}
    loads = dict.fromkeys(members, 0.0)
    for key, worker in owners.items():
        loads[worker] += costs[key]
    for key in sorted((k for k in bundles if k not in owners), key=lambda k: (-costs[k], k)):
        worker = min(members, key=lambda w: (loads[w], members.index(w)))
        owners[key] = worker
        loads[worker] += costs[key]
    mean = sum(costs.values()) / len(members)
    while True:
        highest = max(members, key=lambda w: (loads[w], -members.index(w)))
        lowest = min(members, key=lambda w: (loads[w], members.index(w)))
        excess = loads[highest] - mean
        # Without the margin, a bundle as large as the gap would move back and forth.
        most = loads[highest] - loads[lowest] - TOLERANCE * mean
        movable = [k for k, w in owners.items() if w == highest and costs[k] <= most]
        if not movable or excess <= TOLERANCE * mean:
            return owners
        wanted = min(excess, mean - loads[lowest])
        key = min(movable, key=lambda k: (abs(costs[k] - wanted), k))
        owners[key] = lowest
        loads[highest] -= costs[key]
        loads[lowest] += costs[key]


def _costs(bundles: Mapping[tuple[str, int], Sequence[Shard]]) -> dict[tuple[str, int], float]:
    """Return each bundle's load: the mean of its shares of all memory and of the values that a sample's lookups read."""
    values = {key: sum(s.region.num_values for s in shards) for key, shards in bundles.items()}
    widths = {key: sum(s.region.num_cols for s in shards) for key, shards in bundles.items()}
    all_values, all_widths = sum(values.values()) or 1, sum(widths.values()) or 1
    return {key: 0.5 * values[key] / all_values + 0.5 * widths[key] / all_widths for key in bundles}


def plan_to_dict(plan: Plan) -> dict[str, Any]:
    """Return the plan as strings and numbers only."""
    return {name: asdict(table) for name, table in plan.items()}


def plan_from_dict(data: Mapping[str, Any]) -> dict[str, TablePlan]:
    """Return the plan that `plan_to_dict` encoded. Raises `PlanError` for data of another form."""
    try:
        return {name: from_fields(TablePlan, table, f"the plan of table {name!r}") for name, table in dict(data).items()}
    except (TypeError, ValueError) as error:
        raise PlanError(f"not a plan of tables: {error}") from error
