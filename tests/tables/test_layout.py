"""Transfers when tables are cut anew: every needed value, once, and no more."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reshard import least_bytes

from lightning_dlrover.tables.layout import LayoutError, Move, Region, Shard, plan_moves

quick = settings(deadline=None, max_examples=50)  # no deadline, because the machine may be busy
WORKERS = ["w0", "w1", "w2", "w3", "w4"]
ROWS, COLS = st.integers(1, 40), st.integers(1, 16)
owners = st.sampled_from(WORKERS)
Change = tuple[dict[str, list[Shard]], dict[str, list[Shard]]]


def bytes_moved(moves: Iterable[Move], row_bytes: Mapping[str, float], value_bytes: Mapping[str, float]) -> float:
    """Return the bytes sent between workers: `value_bytes` per value and `row_bytes` per row, by table."""
    return sum(
        m.region.num_values * value_bytes[m.table] + m.region.num_rows * row_bytes[m.table]
        for m in moves
        if m.source != m.target
    )


@st.composite
def cuts(draw: st.DrawFn, length: int) -> list[int]:
    """Borders of parts, some of which may be empty."""
    return [0, *sorted(draw(st.lists(st.integers(0, length), max_size=3))), length]


@st.composite
def shardings(draw: st.DrawFn, rows: int, cols: int) -> list[Shard]:
    """A table in a grid of rectangles, some of them on several workers."""
    row_cuts, col_cuts = draw(cuts(rows)), draw(cuts(cols))
    shards = []
    for row0, row1 in itertools.pairwise(row_cuts):
        for col0, col1 in itertools.pairwise(col_cuts):
            for owner in draw(st.lists(owners, min_size=1, max_size=3, unique=True)):
                shards.append(Shard(owner, Region(row0, row1, col0, col1)))
    return shards


@st.composite
def changes(draw: st.DrawFn) -> Change:
    old, new = {}, {}
    for table in draw(st.sampled_from([["a"], ["a", "b"]])):
        rows, cols = draw(ROWS), draw(COLS)
        old[table], new[table] = draw(shardings(rows, cols)), draw(shardings(rows, cols))
    return old, new


def cells(region: Region) -> list[tuple[int, int]]:
    return [(row, col) for row in range(region.row0, region.row1) for col in range(region.col0, region.col1)]


@quick
@given(changes())
def test_every_value_of_every_new_shard_comes_exactly_once(change: Change) -> None:
    old, new = change
    filled: dict[tuple[str, str, Region], list[tuple[int, int]]] = defaultdict(list)
    for move in plan_moves(old, new):
        filled[move.table, move.target, move.into] += cells(move.region)
    for table, shards in new.items():
        for shard in shards:
            assert sorted(filled.pop((table, shard.owner, shard.region), [])) == cells(shard.region)
    assert not filled


@quick
@given(changes())
def test_every_move_takes_from_a_shard_that_its_source_holds(change: Change) -> None:
    old, new = change
    for move in plan_moves(old, new):
        assert any(s.owner == move.source and s.region.overlap(move.region) == move.region for s in old[move.table])


@quick
@given(changes())
def test_no_worker_receives_rows_that_it_holds(change: Change) -> None:
    old, new = change
    for move in plan_moves(old, new):
        if move.source != move.target:
            held = [s.region for s in old[move.table] if s.owner == move.target]
            assert not any(region.overlap(move.region) for region in held)


@quick
@given(changes())
def test_nothing_travels_when_nothing_changes(change: Change) -> None:
    old, _ = change
    assert all(move.source == move.target for move in plan_moves(old, old))


@quick
@given(changes(), st.randoms())
def test_moves_do_not_depend_on_the_order_in_which_shards_are_known(change: Change, random: object) -> None:
    old, new = change
    shuffled = {}
    for table in reversed(list(old)):
        shuffled[table] = list(old[table])
        random.shuffle(shuffled[table])  # type: ignore[attr-defined]
    assert plan_moves(shuffled, new) == plan_moves(old, new)


@quick
@given(ROWS, COLS, st.data())
def test_a_rectangle_is_its_overlap_and_the_rest(rows: int, cols: int, data: st.DataObject) -> None:
    def region() -> Region:
        row0, row1 = sorted(data.draw(st.tuples(st.integers(0, rows), st.integers(0, rows))))
        col0, col1 = sorted(data.draw(st.tuples(st.integers(0, cols), st.integers(0, cols))))
        return Region(row0, row1, col0, col1)

    one, other = region(), region()
    both = one.overlap(other)
    assert both == other.overlap(one)
    parts = [*one.without(other), *([both] if both else [])]
    assert sorted(cell for part in parts for cell in cells(part)) == cells(one)


def by_rows(workers: list[str], rows: int, cols: int = 4) -> list[Shard]:
    block = math.ceil(rows / len(workers))
    return [Shard(w, Region(min(i * block, rows), min((i + 1) * block, rows), 0, cols)) for i, w in enumerate(workers)]


def test_third_worker_receives_a_third_and_nothing_else_moves() -> None:
    old, new = {"t": by_rows(["w0", "w1"], 600)}, {"t": by_rows(["w0", "w2", "w1"], 600)}
    travels = [m for m in plan_moves(old, new) if m.source != m.target]
    into = Region(200, 400, 0, 4)
    assert travels == [
        Move("t", Region(200, 300, 0, 4), "w0", "w2", into),
        Move("t", Region(300, 400, 0, 4), "w1", "w2", into),
    ]
    moved = bytes_moved(travels, row_bytes={"t": 4}, value_bytes={"t": 4})
    total = 600 * (4 * 4 + 4)
    assert moved == total / 3 == least_bytes(["w0", "w2", "w1"], total, {"w0": total / 2, "w1": total / 2})


def test_a_joiner_at_the_end_costs_more_than_one_in_the_middle() -> None:
    old = {"t": by_rows(["w0", "w1"], 600)}
    middle, end = (
        bytes_moved(plan_moves(old, {"t": by_rows(order, 600)}), {"t": 0}, {"t": 4})
        for order in (["w0", "w2", "w1"], ["w0", "w1", "w2"])
    )
    assert middle < end


@quick
@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 500))
def test_least_bytes_is_a_lower_bound_of_any_move(before: int, after: int, rows: int) -> None:
    workers = [f"w{i}" for i in range(12)]
    old, new = {"t": by_rows(workers[:before], rows)}, {"t": by_rows(workers[:after], rows)}
    held = {s.owner: 4.0 * s.region.num_values for s in old["t"]}
    least = least_bytes(workers[:after], 16.0 * rows, held)
    # Blocks are not quite equal shares: the last ones may be short of a block.
    slack = sum(abs(16.0 * rows / after - 4.0 * s.region.num_values) for s in new["t"])
    assert least <= bytes_moved(plan_moves(old, new), {"t": 0}, {"t": 4}) + slack


def test_replicas_share_the_sending() -> None:
    whole = Region(0, 10, 0, 4)
    old = {f"t{i}": [Shard("w0", whole), Shard("w1", whole)] for i in range(4)}
    new = {f"t{i}": [Shard(w, whole) for w in ("w0", "w1", "w2")] for i in range(4)}
    senders = [m.source for m in plan_moves(old, new) if m.source != m.target]
    assert sorted(senders) == ["w0", "w0", "w1", "w1"]


@pytest.mark.parametrize(
    "held",
    [None, [], [Shard("w0", Region(0, 3, 0, 4))], [Shard("w0", Region(0, 10, 0, 3))], [Shard("w0", Region(5, 10, 0, 4))]],
    ids=["unknown", "nothing", "only its first rows", "not its last column", "only its last rows"],
)
def test_incomplete_table_is_an_error_that_names_it(held: list[Shard] | None) -> None:
    with pytest.raises(LayoutError, match=r"table 'clicks': no worker has rows (0 to 9|3 to 9|0 to 4), columns [03] to 3"):
        plan_moves({"clicks": held} if held is not None else {}, {"clicks": [Shard("w1", Region(0, 10, 0, 4))]})


def test_empty_shards_need_nothing() -> None:
    empty, whole = Region(1, 1, 0, 4), Region(0, 1, 0, 4)
    moves = plan_moves({"t": [Shard("w0", whole)]}, {"t": [Shard("w0", whole), Shard("w1", empty)]})
    assert moves == [Move("t", whole, "w0", "w0", whole)]
