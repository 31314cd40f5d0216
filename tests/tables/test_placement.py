"""Plans for other workers: complete, balanced, and with few moves."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dlrover.tables.layout import (
    TOLERANCE,
    WHOLE_KINDS,
    Plan,
    PlanError,
    Region,
    Shard,
    TablePlan,
    layout_of,
    plan_from_dict,
    plan_moves,
    plan_to_dict,
    replan,
)

KINDS = ["table_wise", "row_wise", "column_wise", "table_row_wise", "table_column_wise", "data_parallel"]
quick = settings(deadline=None, max_examples=50)  # no deadline, because the machine may be busy
WORKERS = [f"w{i}" for i in range(8)]


def whole(worker: str, rows: int = 100, cols: int = 8) -> TablePlan:
    return TablePlan("table_wise", "fused", rows, cols, (Shard(worker, Region(0, rows, 0, cols)),))


def columns(rows: int, cols: int, *owners: str) -> TablePlan:
    width = cols // len(owners)
    shards = tuple(Shard(w, Region(0, rows, i * width, (i + 1) * width)) for i, w in enumerate(owners))
    return TablePlan("column_wise", "fused", rows, cols, shards)


def as_torchrec_would(kind: str, rows: int, cols: int, members: list[str], first: int) -> TablePlan:
    worker = members[first % len(members)]
    table = TablePlan(kind, "dense" if kind == "data_parallel" else "fused", rows, cols, ())
    if kind in ("row_wise", "data_parallel"):
        return replan({"t": table}, members)["t"]
    if kind == "column_wise":
        return columns(rows, cols, worker, members[(first + 1) % len(members)])
    if kind == "table_column_wise":
        return TablePlan(kind, "fused", rows, cols, columns(rows, cols, worker, worker).shards)
    return TablePlan(kind, "fused", rows, cols, whole(worker, rows, cols).shards)


member_lists = st.lists(st.sampled_from(WORKERS), min_size=1, max_size=8, unique=True)


@st.composite
def plans(draw: st.DrawFn, kinds: list[str] = KINDS) -> dict[str, TablePlan]:
    members = draw(member_lists)
    return {
        f"ebc.t{i}": as_torchrec_would(
            draw(st.sampled_from(kinds)),
            draw(st.integers(1, 10_000)),
            draw(st.sampled_from([8, 16, 64])),
            members,
            draw(st.integers(0, 7)),
        )
        for i in range(draw(st.integers(1, 12)))
    }


def loads(plan: Plan, members: list[str]) -> tuple[dict[str, float], float]:
    """Load of each worker from tables that fit on one worker, by the documented measure, and the largest single one."""
    bundles: dict[tuple[str, int], list[Shard]] = {}
    for name, table in plan.items():
        if table.kind == "column_wise":
            bundles.update({(name, i): [shard] for i, shard in enumerate(table.shards)})
        elif table.kind in WHOLE_KINDS:
            bundles[name, 0] = list(table.shards)
    values = {key: sum(s.region.num_values for s in shards) for key, shards in bundles.items()}
    widths = {key: sum(s.region.num_cols for s in shards) for key, shards in bundles.items()}
    of_worker = dict.fromkeys(members, 0.0)
    largest = 0.0
    for key, shards in bundles.items():
        cost = 0.5 * values[key] / sum(values.values()) + 0.5 * widths[key] / sum(widths.values())
        of_worker[shards[0].owner] += cost
        largest = max(largest, cost)
    return of_worker, largest


@quick
@given(plans(), member_lists)
def test_the_new_plan_holds_every_value_on_members_only(plan: dict[str, TablePlan], members: list[str]) -> None:
    new = replan(plan, members)
    assert list(new) == list(plan)
    for table in new.values():
        assert {s.owner for s in table.shards} <= set(members)
        values = sum(s.region.num_values for s in table.shards)
        copies = len(members) if table.kind == "data_parallel" else 1
        assert values == table.rows * table.cols * copies
    plan_moves(layout_of(plan), layout_of(new))  # raises if a value has no owner


@quick
@given(plans(), member_lists)
def test_kinds_kernels_and_column_cuts_stay_as_torchrec_chose_them(plan: dict[str, TablePlan], members: list[str]) -> None:
    for name, table in replan(plan, members).items():
        before = plan[name]
        assert (table.kind, table.kernel, table.rows, table.cols) == (before.kind, before.kernel, before.rows, before.cols)
        if table.kind not in ("row_wise", "data_parallel"):
            assert [s.region for s in table.shards] == [s.region for s in before.shards]


@quick
@given(plans(), member_lists)
def test_planning_again_for_the_same_members_moves_nothing(plan: dict[str, TablePlan], members: list[str]) -> None:
    new = replan(plan, members)
    assert replan(new, members) == new


@quick
@given(plans([*WHOLE_KINDS, "column_wise"]), member_lists)
def test_no_worker_has_more_than_its_share_the_tolerance_and_one_table(plan: dict[str, TablePlan], members: list[str]) -> None:
    of_worker, largest = loads(replan(plan, members), members)
    mean = sum(of_worker.values()) / len(members)
    assert max(of_worker.values()) <= (1 + TOLERANCE) * mean + largest + 1e-9


@quick
@given(plans(list(WHOLE_KINDS)), member_lists)
def test_a_worker_holds_all_shards_of_a_whole_table(plan: dict[str, TablePlan], members: list[str]) -> None:
    for table in replan(plan, members).values():
        assert len({s.owner for s in table.shards}) == 1


@pytest.mark.parametrize("rows", [1, 5, 7, 8, 1000])
@pytest.mark.parametrize("num_workers", [1, 2, 3, 4, 7])
def test_row_blocks_are_equal_and_in_rank_order(rows: int, num_workers: int) -> None:
    members = WORKERS[num_workers:0:-1]
    shards = as_torchrec_would("row_wise", rows, 8, members, 0).shards
    assert [s.owner for s in shards] == members
    assert [s.region.row0 for s in shards[1:]] == [s.region.row1 for s in shards[:-1]]
    assert shards[0].region.row0 == 0
    assert shards[-1].region.row1 == rows
    full = -(-rows // num_workers)
    sizes = [s.region.num_rows for s in shards]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[: rows // full] == [full] * (rows // full)


def test_data_parallel_tables_are_whole_on_every_worker() -> None:
    plan = replan({"t": TablePlan("data_parallel", "dense", 7, 8, (Shard("w0", Region(0, 7, 0, 8)),))}, ["w2", "w0", "w1"])
    assert plan["t"].shards == tuple(Shard(w, Region(0, 7, 0, 8)) for w in ("w2", "w0", "w1"))


@pytest.mark.parametrize(
    "num_before, members, expected",
    [
        (2, ["w0", "w2", "w1"], [("w0", "w2")] * 2 + [("w1", "w2")] * 2),
        (3, ["w1", "w2"], [("w0", "w1")] * 2 + [("w0", "w2")] * 2),
        (3, ["w3", "w1", "w2"], [("w0", "w3")] * 4),
    ],
    ids=["joiner", "leaver", "replacement"],
)
def test_only_the_share_of_a_joiner_or_leaver_moves(
    num_before: int, members: list[str], expected: list[tuple[str, str]]
) -> None:
    plan = {f"t{i:02}": whole(f"w{i % num_before}") for i in range(12)}
    moves = [m for m in plan_moves(layout_of(plan), layout_of(replan(plan, members))) if m.source != m.target]
    assert sorted((m.source, m.target) for m in moves) == expected


# One of them has all tables, or, of 20 workers with 19 small tables each, one has 39, so that the mean is 20.
@pytest.mark.parametrize("tables", [[4 * n, *[0] * (n - 1)] for n in (2, 4, 16, 64)] + [[39, *[19] * 19]])
def test_a_worker_with_far_more_than_the_others_gives_some_of_it_away(tables: list[int]) -> None:
    members = [f"w{i:02}" for i in range(len(tables))]
    plan = {f"t{i:02}-{j:03}": whole(w) for i, w in enumerate(members) for j in range(tables[i])}
    of_worker, largest = loads(replan(plan, members), members)
    mean = sum(of_worker.values()) / len(members)
    assert max(of_worker.values()) <= (1 + TOLERANCE) * mean + largest


@quick
@given(plans())
def test_a_plan_survives_json(plan: dict[str, TablePlan]) -> None:
    assert plan_from_dict(json.loads(json.dumps(plan_to_dict(plan)))) == plan


def damaged(**changes: Any) -> dict[str, Any]:
    table = plan_to_dict({"t": whole("w0")})["t"]
    return {"t": {k: v for k, v in {**table, **changes}.items() if v is not ...}}


@pytest.mark.parametrize(
    "data",
    [
        7,
        "plan",
        {"t": 7},
        {"t": {}},
        {"t": None},
        damaged(shards=...),
        damaged(kind=...),
        damaged(colour="red"),
        damaged(shards=[{"owner": "w0"}]),
        damaged(shards=[{"owner": "w0", "region": {"row0": 0}}]),
        damaged(shards=[{"owner": "w0", "region": {"row0": "x", "row1": 1, "col0": 0, "col1": 1}}]),
        damaged(shards=[{"owner": "w0", "region": [0, 1, 0, 1]}]),
        damaged(shards=7),
    ],
    ids=repr,
)
def test_nonsense_is_not_a_plan(data: Mapping[str, Any]) -> None:
    with pytest.raises(PlanError, match="not a plan of tables"):
        plan_from_dict(data)


def test_no_worker_is_an_error() -> None:
    with pytest.raises(PlanError, match="no worker"):
        replan({"t": whole("w0")}, [])


def test_sharding_kind_without_a_new_place_is_an_error() -> None:
    with pytest.raises(PlanError, match="'clicks': kind 'grid_shard'"):
        replan({"clicks": TablePlan("grid_shard", "fused", 4, 8, (Shard("w0", Region(0, 4, 0, 8)),))}, ["w0"])
