"""Searches before training, and arguments of the Trainer, in a job with a changing number of workers."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest

from tests.e2e.arguments_job import BATCH_SIZE, NUM_ROWS, Arguments, search_and_train, train_with_devices
from tests.e2e.forked_jobs import MakeJob
from tests.e2e.harness import Job, Record

STEPS_PER_EPOCH = NUM_ROWS // BATCH_SIZE


def assert_all_agree(job: Job, num_epochs: int) -> None:
    """Assert that every batch ran once, on all workers of its round, with the same result."""
    steps: dict[tuple[int, int], list[Record]] = defaultdict(list)
    for record in job.records("done"):
        steps[record["epoch"], record["batch"]].append(record)
    assert sorted(steps) == [(epoch, batch) for epoch in range(num_epochs) for batch in range(STEPS_PER_EPOCH)]
    for place, records in steps.items():
        assert len({(r["parameters"], r["step"], str(r["lr"])) for r in records}) == 1, place


@pytest.mark.parametrize("name", ["tuner", "callback", "two_trainers"])
def test_search_for_a_rate_is_no_part_of_the_job(name: str, make_job: MakeJob) -> None:
    job = make_job(Arguments(name), script=search_and_train)
    first = job.start()
    job.wait_for_step(3)
    second = job.start()
    job.wait_for_world(2)
    job.start()
    job.wait_for_world(3)
    second.arm("forward")
    job.wait_for_world(2)
    first.terminate()
    job.wait_for_world(1)
    assert job.finish() == [0, -9, 0], job.report()
    assert_all_agree(job, 3)
    found = job.records("found")
    assert all({**record, "at": 0} == {**found[0], "at": 0} for record in found)
    assert len(found) == (0 if name == "callback" else 3)
    (rate,) = {record["lr"][0] for record in job.records("done")}
    assert rate not in (0.5, 0.0)
    assert {record["lr"] for record in [*found, *job.records("after_fit")]} == {rate}
    assert {record["pid"] for record in job.records("searched")} == {first.pid}  # joiners take its result


def test_first_workers_search_together(make_job: MakeJob) -> None:
    job = make_job(Arguments("tuner", epochs=2, step_s=0.02), script=search_and_train, min_workers=2)
    job.start_all(2)
    job.wait_for_world(2)
    job.start()
    job.wait_for_world(3)
    assert job.finish() == [0, 0, 0], job.report()
    assert len({str(record["losses"]) for record in job.records("found")}) == 1
    assert {record["world"] for record in job.records("searched")} == {2}


@pytest.mark.on_demand
def test_joiner_without_a_result_starts_again(make_job: MakeJob) -> None:
    job = make_job(Arguments("tuner", search_step_s=0.2), script=search_and_train, lease_ttl_s=3)
    first = job.start()
    job.wait_until(lambda: first.records("searched"), "the search to begin")
    second = job.start()
    job.wait_until(lambda: second.records("waits"), "the second worker to stand by")
    first.kill()
    assert second.wait() == 1, job.report()
    assert "the workers that searched for a learning rate were lost" in second.output
    third = job.start()
    assert third.wait() == 0, job.report()
    assert_all_agree(job, 3)


@pytest.mark.parametrize("devices, num_nodes", [(2, 1), (1, 3)])
def test_number_of_devices_without_effect_is_named(devices: Any, num_nodes: int, make_job: MakeJob) -> None:
    job = make_job(Arguments(devices=devices, num_nodes=num_nodes), script=train_with_devices)
    worker = job.start()
    assert worker.wait() == 0, job.report()
    assert f"Trainer(devices={devices!r}, num_nodes={num_nodes}) is meant for" in worker.output
    assert "it starts with 1 and may have 1 to 4" in worker.output


@pytest.mark.parametrize("devices, num_workers", [("auto", 1), (1, 2), (2, 2)])
def test_number_of_devices_that_fits_is_not_named(devices: Any, num_workers: int, make_job: MakeJob) -> None:
    job = make_job(Arguments(devices=devices), script=train_with_devices, min_workers=num_workers)
    job.start_all(num_workers)
    assert job.finish() == [0] * num_workers, job.report()
    assert not any("is meant for" in worker.output for worker in job.workers)
