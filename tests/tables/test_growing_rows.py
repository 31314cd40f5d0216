"""Rows of growing tables, against a dictionary in Python."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_dlrover.tables.growing_optimizers import Adagrad, Adam, Ftrl, RowOptimizer, RowWiseAdagrad, Sgd
from lightning_dlrover.tables.growing_rows import SECTIONS, Growth, Index, Init, Rows, ids_of, keys_of, pack, sections_of
from tests.support.growing_reference import SEED, make_rows, run_schedule

OPTIMIZERS: list[RowOptimizer] = [Sgd(0.1), Adagrad(0.1), RowWiseAdagrad(0.1), Adam(0.1), Ftrl(0.1, l1=0.01, l2=0.01)]
ANY_ID = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63), 12345678901234567])


@pytest.mark.parametrize("number", range(25))
def test_workers_hold_the_rows_of_a_dictionary_after_changes_and_losses(number: int) -> None:
    assert run_schedule(number, OPTIMIZERS[number % len(OPTIMIZERS)]) == []


def test_keys_lead_back_to_their_ids() -> None:
    ids = torch.cat([ANY_ID, torch.randint(-(2**63), 2**63 - 1, (10_000,))])
    assert (ids_of(keys_of(ids)) == ids).all()


def test_consecutive_ids_spread_over_all_sections() -> None:
    counts = torch.bincount(sections_of(keys_of(torch.arange(100 * SECTIONS))), minlength=SECTIONS)
    assert len(counts) == SECTIONS
    assert counts.min() > 50
    assert counts.max() < 150


def test_index_finds_what_was_inserted_moved_and_not_removed() -> None:
    index, keys = Index(), keys_of(torch.arange(50_000))
    index.rebuild(keys[:1000], 7)
    for first in range(1000, 50_000, 1000):
        part = keys[first : first + 1000]
        if index.has_room(1000):
            index.insert(part, torch.arange(first + 7, first + 1007, dtype=torch.int32))
        else:
            index.rebuild(keys[: first + 1000], 7)
    assert (index.find(keys) == torch.arange(7, 50_007)).all()
    index.remove(keys[::2])
    index.move(keys[1::2], torch.arange(25_000))
    assert (index.find(keys[::2]) == -1).all()
    assert (index.find(keys[1::2]) == torch.arange(25_000)).all()
    assert (index.find(keys_of(torch.arange(-100, 0))) == -1).all()


def test_first_weights_depend_on_nothing_but_seed_and_id() -> None:
    init = Init("uniform", -0.1, 0.1)
    keys = keys_of(torch.arange(1000))
    whole = init.drawn(keys, 8, SEED)
    assert (init.drawn(keys[500:501], 8, SEED) == whole[500]).all()
    assert (init.drawn(keys, 8, SEED + 1) != whole).any()
    assert abs(float(whole.mean())) < 0.01
    assert float(whole.min()) >= -0.1
    assert float(whole.max()) <= 0.1
    normal = Init("normal", 1.0, 2.0).drawn(keys, 8, SEED)
    assert abs(float(normal.mean()) - 1.0) < 0.1
    assert abs(float(normal.std()) - 2.0) < 0.1


@pytest.mark.parametrize(
    "optimizer, stock",
    [
        (Sgd(0.1), lambda p: torch.optim.SGD(p, 0.1)),
        (Adagrad(0.1, eps=1e-10), lambda p: torch.optim.Adagrad(p, 0.1, eps=1e-10)),
        (Adam(0.1), lambda p: torch.optim.Adam(p, 0.1)),
    ],
    ids=["sgd", "adagrad", "adam"],
)
def test_optimizer_equals_torchs(optimizer: RowOptimizer, stock: object) -> None:
    torch.manual_seed(1)
    weights = torch.randn(5, 3)
    parameter = nn.Parameter(weights.clone())
    theirs = stock([parameter])  # type: ignore[operator]
    states = [torch.zeros(5, width) for width in optimizer.widths(3)]
    optimizer.begin(weights, states)
    for _ in range(10):
        grads = torch.randn(5, 3)
        optimizer.update(weights, states, grads)
        parameter.grad = grads.clone()
        theirs.step()
    assert torch.allclose(weights, parameter, atol=1e-5)


def test_ftrl_begins_at_the_first_weights_and_makes_idle_ones_zero() -> None:
    optimizer = Ftrl(0.5, l1=0.3)
    weights = torch.tensor([[0.4, -0.2, 0.0]])
    states = [torch.zeros(1, 3), torch.zeros(1, 3)]
    optimizer.begin(weights, states)
    first = weights.clone()
    optimizer.update(weights, states, torch.zeros(1, 3))
    assert torch.allclose(weights, first, atol=1e-6)
    for _ in range(200):
        optimizer.update(weights, states, torch.tensor([[0.01, -0.01, 0.01]]) * (1 if _ % 2 else -1))
    assert weights[0, 2] == 0.0


def trained(num_steps: int, growth: Growth) -> Rows:
    rows = make_rows(4, Sgd(0.1), growth)
    rows.begin(SEED)
    for step in range(num_steps):
        keys = keys_of(torch.arange(step * 10, step * 10 + 20)).sort().values
        counts = torch.ones(len(keys), dtype=torch.int64)
        rows.train(rows.slots_of(keys, counts), torch.ones(len(keys), 4), counts)
        rows.evict()
    return rows


def ids_in(rows: Rows) -> set[int]:
    return set(ids_of(rows.columns["key"][SECTIONS : rows.num_slots]).tolist())


def test_a_full_table_drops_the_least_recently_trained_rows() -> None:
    rows = trained(50, Growth(max_rows=100))
    assert rows.num_rows <= 100
    ids = ids_in(rows)
    assert set(range(490, 510)) <= ids  # of the last step
    assert min(ids) >= 390
    found = rows.slots_of(keys_of(torch.tensor(sorted(ids))))
    assert (found >= SECTIONS).all()


def test_a_full_table_keeps_its_most_frequent_rows_under_lfu() -> None:
    rows = make_rows(4, Sgd(0.1), Growth(max_rows=60, policy="lfu"))
    rows.begin(SEED)
    popular = torch.arange(30)
    for step in range(40):
        keys = keys_of(torch.cat([popular, torch.arange(100 + step * 10, 110 + step * 10)])).sort().values
        counts = torch.ones(len(keys), dtype=torch.int64)
        rows.train(rows.slots_of(keys, counts), torch.ones(len(keys), 4), counts)
        rows.evict()
    assert set(range(30)) <= ids_in(rows)
    assert rows.num_rows <= 60
    assert rows.num_evicted > 300


def test_rows_that_are_not_trained_leave_at_their_age_but_for_the_floor() -> None:
    assert min(ids_in(trained(100, Growth(max_age=16)))) >= (100 - 16 - 4) * 10
    assert len(ids_in(trained(100, Growth(max_age=16, min_rows=500)))) >= 500


def test_old_rows_leave_whatever_the_number_of_lookups_in_a_step() -> None:
    rows = make_rows(4, Sgd(0.1), Growth(max_age=16))
    rows.begin(SEED)
    once = torch.tensor([1])
    rows.train(rows.slots_of(keys_of(torch.tensor([1])), once), torch.ones(1, 4), once)
    for step in range(60):
        for _ in range(2):  # two lookups, and one search for old rows
            rows.train(rows.slots_of(keys_of(torch.tensor([2])), once), torch.ones(1, 4), once)
        if step == 0:
            rows.train(rows.slots_of(keys_of(torch.tensor([2])), once), torch.ones(1, 4), once)
        rows.evict()
    assert ids_in(rows) == {2}


def test_counts_that_a_full_table_has_halved_are_copied_again() -> None:
    rows = trained(30, Growth(max_rows=100, policy="lfu"))
    rows.mark(0)
    before = rows.columns["count"].clone()
    keys = keys_of(torch.arange(9000, 9100)).sort().values
    counts = torch.ones(len(keys), dtype=torch.int64)
    rows.train(rows.slots_of(keys, counts), torch.ones(len(keys), 4), counts)
    rows.evict()
    changed = (rows.columns["count"][: rows.num_slots] != before[: rows.num_slots]).nonzero().flatten().tolist()
    since = rows.since(0)
    assert since is not None
    assert set(changed) <= set(since.tolist())


def test_bytes_of_a_full_table_stay_within_its_budget() -> None:
    rows = trained(300, Growth(max_bytes=40_000))
    assert rows.num_rows * rows.row_bytes <= 40_000
    assert rows.num_rows > 300


def test_ids_have_no_row_before_they_occurred_often_enough() -> None:
    rows = make_rows(4, Sgd(0.1), Growth(min_count=3))
    rows.begin(SEED)
    keys, once = keys_of(torch.tensor([5])), torch.tensor([1])
    assert int(rows.slots_of(keys, once)) < SECTIONS
    assert int(rows.slots_of(keys)) < SECTIONS  # outside of training nothing is counted
    assert int(rows.slots_of(keys, once)) < SECTIONS
    assert int(rows.slots_of(keys, once)) >= SECTIONS
    other = keys_of(torch.tensor([6]))
    assert int(rows.slots_of(other, torch.tensor([3]))) >= SECTIONS


def test_a_copy_holds_the_rows_as_they_were_when_it_began() -> None:
    rows = trained(10, Growth(max_rows=80))
    before = {column: values[: rows.num_slots].clone() for column, values in rows.columns.items()}
    rows.mark(0)
    rows.begin_copy()
    evicted = rows.num_evicted
    for step in range(10, 20):
        keys = keys_of(torch.arange(step * 10, step * 10 + 20)).sort().values
        counts = torch.ones(len(keys), dtype=torch.int64)
        rows.train(rows.slots_of(keys, counts), torch.ones(len(keys), 4), counts)
        rows.evict()
    assert rows.num_evicted == evicted  # rows of a copy stay in their places
    copied = {column: values[: len(before["key"])].clone() for column, values in rows.columns.items()}
    for slots, former in rows.end_copy():
        for column, values in former.items():
            here = slots < len(before["key"])
            copied[column][slots[here]] = values[here]
    assert all((copied[column] == values).all() for column, values in before.items())
    since = rows.since(0)
    assert since is not None
    changed = set(since.tolist())
    now = rows.columns["weight"][: rows.num_slots]
    differing = (now[: len(before["key"])] != before["weight"]).any(1).nonzero().flatten().tolist()
    assert changed == {*differing, *range(len(before["key"]), rows.num_slots)}
    rows.evict()
    assert rows.num_rows <= 80


def test_packed_rows_of_another_size_are_refused() -> None:
    rows = make_rows(4, Sgd(0.1), Growth())
    rows.begin(SEED)
    packed = pack(rows.columns, rows.num_slots, rows.filter, 0, SECTIONS)
    with pytest.raises(ValueError, match="no rows of sections"):
        make_rows(4, Sgd(0.1), Growth()).take(packed[:-1], 0, SECTIONS)


@pytest.mark.parametrize(
    "arguments", [{"min_count": 0}, {"min_count": 256}, {"max_rows": 0}, {"max_bytes": -1}, {"max_age": 0}, {"policy": "fifo"}]
)
def test_growth_refuses_values_out_of_range(arguments: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(arguments))):
        Growth(**arguments)  # type: ignore[arg-type]
