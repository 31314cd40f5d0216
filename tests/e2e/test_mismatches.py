"""Workers that meet in different collectives end with an error that names both places, instead of waiting for each other."""

from __future__ import annotations

import pytest

from tests.e2e.forked_jobs import MakeJob
from tests.e2e.mismatch_jobs import (
    CHECK_INTERVAL_S,
    STEP,
    STOP_STEP,
    Way,
    operations,
    train_correctly,
    train_severed,
    train_to_mismatch,
    train_to_stop,
)

LIMIT_S = 2.0
"""Longest time from the deviation to the error on each worker, beside the interval of votes."""

GRADIENTS = "the reduction of gradients"


def mismatch(make_job: MakeJob, way: Way, num_workers: int = 2) -> str:
    """The text of the error with which all workers of a job end, in time."""
    job = make_job(way, script=train_to_mismatch, min_workers=num_workers, max_workers=num_workers)
    job.start_all(num_workers)
    assert all(code == 1 for code in job.finish(20)), job.report()
    errors = [worker.records("mismatch") for worker in job.workers]
    assert all(errors), job.report()
    assert len({found[0]["text"] for found in errors}) == 1, job.report()
    deviated_at = max(record["at"] for record in job.records("deviates"))
    assert max(found[0]["at"] for found in errors) - deviated_at < LIMIT_S + CHECK_INTERVAL_S
    text: str = errors[0][0]["text"]
    return text


@pytest.mark.parametrize(
    "way, odd, others",
    [
        (Way("barrier_alone"), "strategy.barrier of alone", GRADIENTS),
        (Way("raw_against_gradients"), "torch.distributed.all_reduce of 3 x float32", GRADIENTS),
        (Way("gather_in_step"), "strategy.all_gather", GRADIENTS),
        (Way("no_sync"), "the vote between two steps", "collectives begun in this round"),
        (Way("stop_iteration"), "the exchange of logged values", GRADIENTS),
        (Way("broadcast_or_reduce"), "strategy.reduce", "strategy.broadcast"),
        (Way("barrier_names"), "strategy.barrier of odd", "strategy.barrier of even"),
        (Way("reduce_lines"), "in end_reduce_lines", "in end_reduce_lines"),
        (Way("checkpoint_alone"), "saving a checkpoint", "(batch "),
        (Way("raw_or_ours"), "torch.distributed.all_reduce of 1 x float32", "strategy.reduce"),
        (Way("raw_sizes"), "all_reduce of 1000 x float32", "all_reduce of 1 x float32"),
        (Way("torchmetrics"), "torch.distributed.", "(batch "),
        (Way("validation", num_val_rows=40), "in validation run 1", "(batch "),
        (Way("async_sizes"), "all_reduce of 2 x float32", "all_reduce of 1 x float32"),
        (Way("async_alone"), "torch.distributed.all_reduce of 1 x float32", "(batch "),
        (Way("gather_shapes"), "strategy.all_gather of [3]", "strategy.all_gather of [2]"),
    ],
    ids=lambda value: value.name if isinstance(value, Way) else "",
)
def test_different_collectives_end_with_both_places(way: Way, odd: str, others: str, make_job: MakeJob) -> None:
    text = mismatch(make_job, way)
    lines = text.splitlines()[1:3]
    assert any(line.startswith("  rank 0: ") for line in lines), text
    assert any(line.startswith("  rank 1: ") for line in lines), text
    assert any(odd in line for line in lines), text
    assert any(others in line for line in lines), text
    assert all("mismatch_jobs.py:" in line for line in lines), text


def test_odd_one_of_three_workers_is_named_alone(make_job: MakeJob) -> None:
    text = mismatch(make_job, Way("checkpoint_alone"), num_workers=3)
    assert "  rank 0: " in text or "  ranks 0-1: " in text
    assert "  rank 1: " in text or "  ranks 0-1: " in text
    assert "  rank 2: saving a checkpoint" in text


def test_correct_operations_of_three_workers_are_no_mismatch(make_job: MakeJob) -> None:
    job = make_job(Way("correct", num_rows=80), script=train_correctly, min_workers=3)
    job.start_all(3)
    assert job.finish(30) == [0, 0, 0], job.report()
    names = [name for name, _ in operations(0, 3)]
    for worker in job.workers:
        assert [record["name"] for record in worker.records("ran")] == 3 * names


# --- decisions of one worker --------------------------------------------------------------------------------------------------


def stopped_at(make_job: MakeJob, way: Way) -> int:
    """The step after which all workers of a job have stopped."""
    job = make_job(way, script=train_to_stop, min_workers=2)
    job.start_all(2)
    assert job.finish(20, hurry=False) == [0, 0], job.report()  # the votes' interval is a time, the limits are steps
    steps = {record["step"] for record in job.records("after_fit")}
    assert len(steps) == 1
    step: int = steps.pop()
    return step


def test_all_stop_at_once_where_all_ask_for_it(make_job: MakeJob) -> None:
    assert stopped_at(make_job, Way("all_batch")) == STOP_STEP


def test_all_stop_at_once_though_the_round_breaks(make_job: MakeJob) -> None:
    assert stopped_at(make_job, Way("all_batch", breaks=True)) == STOP_STEP


def test_all_stop_soon_after_one_asks_for_it(make_job: MakeJob) -> None:
    assert STOP_STEP < stopped_at(make_job, Way("one_batch")) < STOP_STEP + 20


def test_all_stop_soon_after_one_asks_at_an_epochs_end(make_job: MakeJob) -> None:
    assert 5 < stopped_at(make_job, Way("one_epoch", num_rows=40)) < 25


# --- aborted reductions -------------------------------------------------------------------------------------------------------


def test_gradients_of_a_severed_round_reach_no_weights(make_job: MakeJob) -> None:
    job = make_job(Way("severed", num_rows=160), script=train_severed, min_workers=2)
    job.start_all(2)
    assert job.finish(30) == [0, 0], job.report()
    severed = [r for r in job.records("updates") if r["step"] == STEP and r["rank"] == 0]
    assert all(record["round"] > 1 for record in severed)
    by_step: dict[int, set[str]] = {}
    for record in job.records("done"):
        by_step.setdefault(record["step"], set()).add(record["parameters"])
    assert sorted(by_step) == list(range(1, 21))
    assert all(len(parameters) == 1 for parameters in by_step.values())
