"""Place the shards of embedding tables after a change of workers: little data to send, and an even load. Pure.

The first plan of a job is torchrec's own. Later ones keep each table's kind and the cuts of its columns, and only reassign
owners. Shards stay with their owner where the balance allows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from lightning_dlrover.codec import from_fields
from lightning_dlrover.tables.layout import Layout, Region, Shard

__all__ = ["Plan", "PlanError", "TablePlan", "check_kinds", "layout_of", "plan_from_dict", "plan_to_dict", "replan"]

TOLERANCE = 0.1
"""Minimum imbalance that moves a shard, as a fraction of the mean load."""

KINDS = ("row_wise", "column_wise", "data_parallel", "table_wise", "table_row_wise", "table_column_wise")
"""Kinds that can be reassigned."""

WHOLE_KINDS = ("table_wise", "table_row_wise", "table_column_wise")
"""Kinds with one owner per table. The "node" within which torchrec splits it further is one worker in an elastic job."""


class PlanError(ValueError):
    """Tables that cannot be placed."""


@dataclass(frozen=True)
class TablePlan:
    """Sharding of one table.

    Attributes:
        kind: torchrec's name of the sharding type.
        kernel: torchrec's name of the compute kernel.
        rows, cols: size of the whole table.
        shards: all shards in torchrec's order.
    """

    kind: str
    kernel: str
    rows: int
    cols: int
    shards: tuple[Shard, ...]


Plan = Mapping[str, TablePlan]
"""Plan of all tables, by `{module}.{table}`."""


def layout_of(plan: Plan) -> Layout:
    return {name: table.shards for name, table in plan.items()}


def replan(plan: Plan, members: Sequence[str]) -> dict[str, TablePlan]:
    """Return the plan for other workers.

    Args:
        members: worker ids in rank order.

    Raises:
        PlanError: there is no worker, or a kind that cannot be reassigned.
    """
    if not members:
        raise PlanError("there is no worker to hold the tables")
    bundles: dict[tuple[str, int], list[Shard]] = {}
    for name, table in sorted(plan.items()):
        if table.kind in WHOLE_KINDS:
            bundles[name, 0] = list(table.shards)
        elif table.kind == "column_wise":
            bundles.update({(name, i): [shard] for i, shard in enumerate(table.shards)})
        elif table.kind not in KINDS:
            raise PlanError(_not_placeable(name, table.kind))
    owners = _balance(bundles, members)
    new: dict[str, TablePlan] = {}
    for name, table in plan.items():
        if table.kind == "row_wise":
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
    """Check the kinds that a script allows for each table.

    Raises:
        PlanError: one of them cannot be reassigned.
    """
    for table, allowed in kinds.items():
        for kind in allowed:
            if kind not in KINDS:
                raise PlanError(_not_placeable(table, kind))


def _not_placeable(table: str, kind: str) -> str:
    return (
        f"table {table!r}: kind {kind!r} cannot be placed again when the workers change; set "
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
    """Return each bundle's load: half its share of all memory, half its share of the values that a sample's lookups read."""
    values = {key: sum(s.region.num_values for s in shards) for key, shards in bundles.items()}
    widths = {key: sum(s.region.num_cols for s in shards) for key, shards in bundles.items()}
    all_values, all_widths = sum(values.values()) or 1, sum(widths.values()) or 1
    return {key: 0.5 * values[key] / all_values + 0.5 * widths[key] / all_widths for key in bundles}


# --- as plain data ------------------------------------------------------------------------------------------------------------


def plan_to_dict(plan: Plan) -> dict[str, Any]:
    """Return the plan as strings and numbers only."""
    return {name: asdict(table) for name, table in plan.items()}


def plan_from_dict(data: Mapping[str, Any]) -> dict[str, TablePlan]:
    """Return the plan that `plan_to_dict` encoded.

    Raises:
        PlanError: the data has another form.
    """
    try:
        return {name: from_fields(TablePlan, table, f"the plan of table {name!r}") for name, table in dict(data).items()}
    except (TypeError, ValueError) as error:
        raise PlanError(f"not a plan of tables: {error}") from error
