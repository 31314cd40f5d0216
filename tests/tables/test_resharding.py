"""Tables, states and training stay bit for bit equal to stock torchrec's when workers come and go, in real processes."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest
import torch

from tests.tables.first_weights_oracle import WAYS, WeightsCase, play_first_weights, play_outside_of_a_job
from tests.tables.resharding_oracle import (
    BAG_KINDS,
    CHANGING_BAGS,
    SHIFTS,
    Case,
    Outcome,
    exchange_with_a_death,
    first_values,
    play,
)
from tests.tables.worker_pool import WORKERS, WorkerPool

SIZES = [1, 1, 2, 2, 3, 3, 4, 4, 1, 3, 1, 4, 2, 4, 3, 2, 1]
OPTIMIZERS = ["sgd", "rowwise_adagrad", "adagrad"]


pytestmark = pytest.mark.leaks  # A test may replace workers of the pool, which serve the tests after it.


@pytest.fixture(scope="module")
def pool(fork_server: None) -> Iterator[WorkerPool]:
    for module in ("fbgemm_gpu", "torchrec"):
        pytest.importorskip(module, reason="sharded tables need torchrec", exc_type=ImportError)
    workers = WorkerPool()
    yield workers
    workers.close()


def walk(seed: int) -> tuple[tuple[str, ...], ...]:
    """Worlds of all sizes, in which at least one worker always stays and ranks are shuffled."""
    choose = random.Random(seed)
    worlds: list[tuple[str, ...]] = []
    for size in SIZES:
        members = choose.sample(WORKERS, size)
        while worlds and not set(members) & set(worlds[-1]):
            members = choose.sample(WORKERS, size)
        worlds.append(tuple(members))
    return tuple(worlds)


def check(outcomes: dict[str, Outcome]) -> set[str]:
    """Check the outcomes; return the kinds of tables that occurred."""
    failures = sorted({failure for outcome in outcomes.values() for failure in outcome.failures})
    assert not failures, "\n".join(failures)
    stats = [outcome.stats for outcome in outcomes.values()]
    assert sum(s.sent_bytes for s in stats) == sum(s.received_bytes for s in stats) > 0
    return {kind for outcome in outcomes.values() for kind in outcome.kinds}


def test_walks_cover_all_pairs_of_sizes_and_departures_of_leaders() -> None:
    for seed in range(len(OPTIMIZERS)):
        changes = list(itertools.pairwise(walk(seed)))
        assert {(len(a), len(b)) for a, b in changes} == set(itertools.product([1, 2, 3, 4], repeat=2))
        assert any(old[0] not in new for old, new in changes)
        assert any(len(old) == len(new) and set(old) != set(new) for old, new in changes)
        assert any(new[0] not in old for old, new in changes)


def test_plans_by_hand_turn_every_kind_into_every_other() -> None:
    turned = {
        (BAG_KINDS[(i + a) % 5], BAG_KINDS[(i + b) % 5])
        for a, b in itertools.pairwise(SHIFTS)
        for i, table in enumerate(CHANGING_BAGS)
        if not table.kind
    }
    assert turned == set(itertools.product(BAG_KINDS, repeat=2))


@pytest.mark.parametrize(
    "optimizer", ["rowwise_adagrad", *(pytest.param(o, marks=pytest.mark.on_demand) for o in ("sgd", "adagrad"))]
)
def test_states_and_next_step_equal_stock_torchrec_for_every_resize(pool: WorkerPool, optimizer: str) -> None:
    kinds = check(pool.play(play, Case(optimizer, "constrained", walk(OPTIMIZERS.index(optimizer)))))
    assert kinds == {*BAG_KINDS, "data_parallel"}


def test_states_and_next_step_equal_stock_torchrec_with_its_own_planner(pool: WorkerPool) -> None:
    worlds = (("w0", "w1"), ("w0", "w2", "w1"), ("w3", "w2"), ("w2",), ("w1", "w3", "w2", "w0"), ("w0", "w3", "w1"))
    check(pool.play(play, Case("rowwise_adagrad", "planner", worlds)))


@pytest.mark.parametrize(
    "optimizer", ["sgd", *(pytest.param(o, marks=pytest.mark.on_demand) for o in ("rowwise_adagrad", "adagrad"))]
)
def test_states_and_next_step_equal_stock_torchrec_across_kinds(pool: WorkerPool, optimizer: str) -> None:
    worlds = (("w0", "w1"), ("w1", "w2", "w3"), ("w3", "w0"), ("w2", "w3", "w1", "w0"), ("w0",), ("w1", "w0", "w2"))
    kinds = check(pool.play(play, Case(optimizer, "by_hand", worlds)))
    assert kinds == {*BAG_KINDS, "data_parallel"}


def test_first_values_do_not_depend_on_how_tables_are_sharded(pool: WorkerPool) -> None:
    alone = pool.play(first_values, Case("sgd", "constrained", (("w0",),)))["w0"]
    for worlds in ((("w2", "w1", "w3"),), (tuple(WORKERS),)):
        together = pool.play(first_values, Case("sgd", "constrained", worlds))[worlds[0][0]]
        assert together.keys() == alone.keys()
        assert all(torch.equal(together[key], values) for key, values in alone.items())
    assert all(values.unique().numel() > values.numel() // 2 for values in alone.values())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_given_weights_train_as_without_sharding_before_and_after_a_change(pool: WorkerPool, optimizer: str) -> None:
    """Weights set by assignment or loaded, by `init_fn` for whole tables, or from whole tables of a checkpoint."""
    failures: set[str] = set()
    worlds = [tuple(WORKERS[:size]) for size in range(1, 5)]
    changes = [((worlds[0]), worlds[1]), (worlds[1], worlds[2]), (worlds[2], ("w1", "w0")), (worlds[3], ("w2",))]
    for way, change in itertools.product(WAYS, changes):
        for found in pool.play(play_first_weights, WeightsCase(optimizer, "constrained", change, way)).values():
            failures |= set(found)
    assert not failures, "\n".join(sorted(failures))


@pytest.mark.parametrize("way", ["given", "init_fn"])
def test_given_weights_are_the_first_workers_outside_of_a_job_too(pool: WorkerPool, way: str) -> None:
    case = WeightsCase("sgd", "constrained", (tuple(WORKERS[1:]),), way)
    assert [failure for failures in pool.play(play_outside_of_a_job, case).values() for failure in failures] == []


# Last, because these cases end the pool's processes.
@pytest.mark.parametrize(
    "message_bytes, after_messages",
    [(128 << 10, None), (128 << 10, 9), (8 << 20, 0)],
    ids=["before it", "between messages", "in the middle of a message"],
)
def test_death_in_an_exchange_is_an_error_of_all_within_seconds(
    pool: WorkerPool, message_bytes: int, after_messages: int | None
) -> None:
    raised = pool.play(exchange_with_a_death, "w3", message_bytes, after_messages, timeout_s=30.0, may_die=["w3"])
    assert sorted(raised) == ["w0", "w1", "w2"]
    errors = sorted(name for name, _ in raised.values())
    # The one message that has left may be all that its receiver still needs.
    has_all = message_bytes == 8 << 20 and errors[-1] == "nothing"
    assert errors == ["RuntimeError"] * (3 - has_all) + ["nothing"] * has_all
    assert max(seconds for _, seconds in raised.values()) < 8.0
