"""The order of a stream's rows: each once, equal for all readers, and lanes that stay with their readers."""

from __future__ import annotations

import time
import tracemalloc
from collections import Counter
from itertools import chain, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dlrover.data.lane_plan import CYCLE, LanePlan, Layout, Piece, rows_of_block, share

layouts = st.builds(Layout, st.integers(1, 40), st.integers(1, 6), st.integers(1, 6), st.integers(1, 9))
shards = st.lists(st.one_of(st.just(0), st.integers(0, 30)), min_size=1, max_size=8)
seeds = st.one_of(st.none(), st.integers(0, 2**40))


def rows(plan: LanePlan, start: int = 0, stop: int | None = None) -> list[tuple[int, int]]:
    """Return shard and row of each position, read by pieces as a reader does."""
    found = []
    for piece in plan.pieces(start, plan.num_rows if stop is None else stop):
        for at in range(piece.first, piece.stop):
            number = plan.block_of(piece.lane, at)
            first, after = plan.block(piece.lane, number)
            assert first <= at < after
            order = plan.order(piece.lane, number)
            in_lane = at if order is None else first + int(order[at - first])
            ((shard, begin, end),) = plan.intervals(piece.lane, in_lane, in_lane + 1)
            assert end == begin + 1
            found.append((shard, begin))
    return found


@settings(max_examples=100)
@given(shards, seeds, layouts)
def test_every_row_has_exactly_one_position(lengths: list[int], seed: int | None, layout: Layout) -> None:
    plan = LanePlan(lengths, seed, layout)
    found = rows(plan)
    assert sorted(found) == [(shard, row) for shard, length in enumerate(lengths) for row in range(length)]
    for position, (shard, row) in enumerate(found):
        assert [numbers.tolist() for numbers in plan.rows_between(position, position + 1)] == [[shard], [row]]
        place = plan.place_of(shard, row)
        assert place.batch * layout.batch_size + place.offset == position
    assert list(zip(*(numbers.tolist() for numbers in plan.rows_between(0, plan.num_rows)), strict=True)) == found


@settings(max_examples=200)
@given(shards, seeds, layouts, st.integers(0, 30))
def test_used_rows_of_a_shard_are_between_its_bounds(
    lengths: list[int], seed: int | None, layout: Layout, num_batches: int
) -> None:
    plan = LanePlan(lengths, seed, layout)
    used = Counter(shard for shard, _ in rows(plan, 0, min(num_batches * layout.batch_size, plan.num_rows)))
    certain, possible = (numbers.tolist() for numbers in plan.rows_used(num_batches))
    assert all(low <= used[shard] <= high for shard, (low, high) in enumerate(zip(certain, possible, strict=True)))
    if seed is None or num_batches >= plan.num_batches:
        assert certain == possible
    if num_batches == 0:
        assert not any(possible)


@settings(max_examples=100)
@given(shards, seeds, layouts, st.data())
def test_positions_have_the_same_rows_in_any_pieces(
    lengths: list[int], seed: int | None, layout: Layout, data: st.DataObject
) -> None:
    plan = LanePlan(lengths, seed, layout)
    cuts = sorted({0, plan.num_rows, *data.draw(st.lists(st.integers(0, plan.num_rows), max_size=5))})
    assert list(chain.from_iterable(rows(plan, a, b) for a, b in pairwise(cuts))) == rows(plan)


@given(shards, seeds, layouts)
def test_a_lane_is_read_from_its_first_row_to_its_last(lengths: list[int], seed: int | None, layout: Layout) -> None:
    plan = LanePlan(lengths, seed, layout)
    reached: Counter[int] = Counter()
    for piece in plan.pieces(0, plan.num_rows):
        assert piece.first == reached[piece.lane]
        reached[piece.lane] = piece.stop
    assert all(reached[lane] == plan.lane_length(lane) for lane in range(layout.num_lanes))


def test_shards_without_a_seed_keep_their_order_in_one_lane() -> None:
    plan = LanePlan([3, 0, 2], None, Layout(2, slots=1, cycle=1))
    assert rows(plan) == [(0, 0), (0, 1), (0, 2), (2, 0), (2, 1)]


def lanes_of(plan: LanePlan, rank: int, size: int, batches: range) -> set[int]:
    layout = plan.layout
    found = set()
    for batch in batches:
        start, stop = share(layout.batch_size, rank, size)
        found |= {piece.lane for piece in plan.pieces(batch * layout.batch_size + start, batch * layout.batch_size + stop)}
    return found


@pytest.mark.parametrize("size", [1, 2, 4])
def test_each_worker_has_lanes_of_its_own(size: int) -> None:
    plan = LanePlan([5000, 5000], 1, Layout(64, slots=4))
    found = [lanes_of(plan, rank, size, range(40)) for rank in range(size)]
    assert sum(map(len, found)) == plan.layout.num_lanes


def test_workers_that_do_not_divide_the_slots_share_a_lane_at_each_border() -> None:
    plan = LanePlan([5000, 5000], 1, Layout(64, slots=4))
    found = [lanes_of(plan, rank, 3, range(40)) for rank in range(3)]
    assert sum(map(len, found)) == plan.layout.num_lanes + 2 * CYCLE


@pytest.mark.parametrize("loader_workers", [1, 2, 3, 4, 6, 12])
@pytest.mark.parametrize("first", [0, 7])
def test_no_two_loader_workers_read_the_same_lane(loader_workers: int, first: int) -> None:
    plan = LanePlan([5000, 5000], 1, Layout(64, slots=4))
    found = [lanes_of(plan, 1, 2, range(first + worker, 100, loader_workers)) for worker in range(loader_workers)]
    assert sum(map(len, found)) == plan.layout.num_lanes // 2


def test_epochs_differ_and_one_epoch_is_always_the_same() -> None:
    layout = Layout(32)
    first, again, second = (rows(LanePlan([100] * 5, seed, layout)) for seed in (3, 3, 4))
    assert first == again
    assert first != second


def test_blocks_of_lanes_do_not_all_begin_in_the_same_batches() -> None:
    layout = Layout(64, slots=4, block_rows=128)
    plan = LanePlan([200_000], None, layout)
    begins = Counter(
        batch
        for batch in range(1000, 1000 + 8 * CYCLE)
        for piece in plan.pieces(batch * 64, batch * 64 + 64)
        if plan.block_of(piece.lane, piece.first - 1) != plan.block_of(piece.lane, piece.stop - 1)
    )
    assert sum(begins.values()) == pytest.approx(layout.num_lanes, abs=4)
    assert max(begins.values()) <= 2


@pytest.mark.parametrize("start, stop", [(-1, 2), (0, 11), (3, 2)])
def test_positions_outside_of_the_epoch_are_refused(start: int, stop: int) -> None:
    with pytest.raises(IndexError, match="10 rows"):
        list(LanePlan([10], None, Layout(4)).pieces(start, stop))


@pytest.mark.parametrize("value", [0, -1, True, 1.5])
def test_layout_names_a_wrong_value(value: object) -> None:
    with pytest.raises(ValueError, match="batch_size of a layout of rows is"):
        Layout(value)  # type: ignore[arg-type]


def test_plan_of_a_hundred_thousand_files_and_ten_thousand_million_rows_is_cheap() -> None:
    lengths = np.random.default_rng(0).integers(50_000, 150_000, 100_000)
    tracemalloc.start()
    began = time.perf_counter()
    plan = LanePlan(lengths, 7, Layout(65_536, slots=64))
    pieces = list(plan.pieces(plan.num_rows // 2, plan.num_rows // 2 + 65_536))
    seconds, (_, peak) = time.perf_counter() - began, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert sum(piece.stop - piece.first for piece in pieces) == 65_536
    assert isinstance(pieces[0], Piece)
    assert seconds < 2.0
    assert peak < 200 * 2**20


@pytest.mark.parametrize(
    "row_bytes, most, expected",
    [(100, 8192, 8192), (2_048, 8192, 8192), (2_049, 8192, 4096), (100_000, 8192, 128), (100_000, 64, 64), (10**9, 64, 8)],
)
def test_blocks_of_large_rows_are_bounded_by_bytes(row_bytes: int, most: int, expected: int) -> None:
    assert rows_of_block(1000, 1000 * row_bytes, most) == expected
