"""Loader workers, prefetching and threads change while real workers train. The training itself does not change."""

from __future__ import annotations

import dataclasses
import os
import random
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest

from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.job.records import Keys, PlanRecord, encode
from tests.e2e.forked_jobs import MakeJob
from tests.e2e.harness import Job, violations
from tests.e2e.toy_job import ToySettings

TOY = ToySettings(num_rows=203, max_epochs=2, step_s=0.05)

PLAN = PlanRecord(2, "user", "a test says so", binding=False)
"""A plan that can only set the workers' settings: no controller adds or ends nodes here."""


class Planner:
    """Writes one plan after the other."""

    def __init__(self, job: Job, client: EtcdClient) -> None:
        self._job = job
        self._client = client

    def __call__(self, **settings: Any) -> None:
        self._client.put(Keys(self._job.run_id).plan, encode(dataclasses.replace(PLAN, **settings)))

    def wait_until_in_force(self, loader_workers: int, threads: int, num_workers: int) -> None:
        """Wait until the newest step of `num_workers` workers ran with these settings."""

        def look() -> bool:
            step = self._job.step
            now = [r for r in self._job.records("done") if r["step"] == step]
            alike = all((r["loader_workers"], r["threads"]) == ([loader_workers], threads) for r in now)
            return len(now) == num_workers and alike

        self._job.wait_until(look, f"{num_workers} workers with {loader_workers} loader workers and {threads} threads")

    def wait_for_changes(self, number: int) -> None:
        self._job.wait_until(lambda: len(self._job.events("settings")) >= number, f"{number} changes on record")


@pytest.fixture
def planner_of(client: EtcdClient) -> Callable[[Job], Planner]:
    return lambda job: Planner(job, client)


def losses(job: Job) -> list[float]:
    """Mean loss of every global batch."""
    sums: dict[int, list[tuple[float, int]]] = defaultdict(list)
    for r in job.records("done"):
        sums[r["step"]].append((r["loss"], r["weight"]))
    return [sum(a * n for a, n in each) / sum(n for _, n in each) for _, each in sorted(sums.items())]


def modes(job: Job) -> set[tuple[int, int]]:
    """Pairs of loader workers and threads of all steps."""
    return {(r["loader_workers"][0], r["threads"]) for r in job.records("done")}


@pytest.mark.parametrize("loader_workers", [0, 2])
def test_settings_changed_in_mid_epoch_leave_the_losses_unchanged(
    loader_workers: int, make_job: MakeJob, planner_of: Callable[[Job], Planner]
) -> None:
    toy = dataclasses.replace(TOY, loader_workers=loader_workers)
    unchanged = make_job(dataclasses.replace(toy, step_s=0.0))
    unchanged.start()
    assert unchanged.finish() == [0]

    job = make_job(toy)
    job.start_all(2)
    job.wait_for_world(2, since=0)
    plan = planner_of(job)
    for number, (loaders, threads, ahead) in enumerate([(1, 2, 2), (2, 1, 4), (2, 2, 1), (0, 1, 0)]):
        plan(loader_workers=loaders, intra_op_threads=threads, prefetch_factor=ahead)
        plan.wait_until_in_force(loaders, threads, num_workers=2)
        plan.wait_for_changes(number + 1)
    assert job.finish() == [0, 0]
    assert violations(job, toy) == []
    assert losses(job) == pytest.approx(losses(unchanged), rel=1e-3)
    events = job.events("settings")
    found = [(e.data["loader_workers"], e.data["intra_op_threads"], e.data["prefetch_factor"]) for e in events]
    assert found == [([1], 2, [2]), ([2], 1, [4]), ([2], 2, [1]), ([0], 1, [0])]
    assert all(0 < e.data["seconds"] < 5 for e in events)


def test_a_worker_that_is_killed_while_settings_change_costs_no_sample(
    make_job: MakeJob, planner_of: Callable[[Job], Planner]
) -> None:
    toy = dataclasses.replace(TOY, loader_workers=1, max_epochs=4, streams=True)  # lanes change hands with loader workers
    job = make_job(toy)
    toy.write_streams(job.folder)
    victims = [job.start() for _ in range(3)]
    job.wait_for_world(3, since=0)
    plan, dice = planner_of(job), random.Random(3)
    for number, victim in enumerate(victims[:2]):
        loaders = 2 * (1 - number)
        plan(loader_workers=loaders, intra_op_threads=1 + number)
        job.wait_for_step(job.step + dice.randint(0, 3))  # anywhere in the handover
        victim.kill()
        plan.wait_until_in_force(loaders, 1 + number, num_workers=2)
        if number == 0:
            job.start()
            job.wait_for_world(3)
    assert job.finish()[2:] == [0, 0]
    assert violations(job, toy) == []


def test_joiner_follows_the_plan_from_its_first_step(make_job: MakeJob, planner_of: Callable[[Job], Planner]) -> None:
    toy = dataclasses.replace(TOY, max_epochs=3, streams=True)
    job = make_job(toy)
    toy.write_streams(job.folder)
    job.start()
    job.wait_for_step(1)
    plan = planner_of(job)
    plan(loader_workers=1, intra_op_threads=2)
    plan.wait_until_in_force(1, 2, num_workers=1)
    joiner = job.start()
    job.wait_for_world(2)
    # The plan changes again while another worker joins, about half of the time in the same instant.
    job.start()
    job.wait_until(lambda: job.workers[2].records("fit_start"), "the third worker to come")
    plan(loader_workers=2, intra_op_threads=1)
    job.wait_for_world(3)
    plan.wait_until_in_force(2, 1, num_workers=3)
    assert job.finish() == [0, 0, 0]
    assert violations(job, toy) == []
    first = joiner.records("done")[0]
    assert (first["loader_workers"], first["threads"]) == ([1], 2)


def test_settings_outlive_all_workers(make_job: MakeJob, planner_of: Callable[[Job], Planner]) -> None:
    job = make_job(dataclasses.replace(TOY, max_epochs=30), lease_ttl_s=3)
    first = job.start()
    job.wait_for_step(1)
    plan = planner_of(job)
    plan(loader_workers=1, intra_op_threads=2)
    plan.wait_until_in_force(1, 2, num_workers=1)
    first.kill()
    first.wait()
    second = job.start()
    job.wait_until(lambda: second.records("done"), "a step of the second worker")
    assert {(r["loader_workers"][0], r["threads"]) for r in second.records("done")} == {(1, 2)}


@pytest.mark.parametrize(
    "settings",
    [{"loader_workers": -1}, {"intra_op_threads": 100_000}, {"prefetch_factor": "many"}, {"threads": 2}],
)
def test_impossible_plan_is_named_and_ignored(settings: dict[str, Any], make_job: MakeJob, client: EtcdClient) -> None:
    job = make_job(TOY)
    worker = job.start()
    job.wait_for_step(1)
    raw = encode(PLAN)[:-1] + b"".join(f',"{name}":{value!r}'.replace("'", '"').encode() for name, value in settings.items())
    document = raw.decode().replace(f'"{next(iter(settings))}":null,', "").replace(f',"{next(iter(settings))}":null', "")
    client.put(Keys(job.run_id).plan, f"{document}}}".encode())
    job.wait_until(lambda: next(iter(settings)) in worker.output, "the warning")
    job.wait_for_step(job.step + 5)
    assert job.finish() == [0]
    assert violations(job, TOY) == []
    assert modes(job) == {(0, 1)}


def test_a_plan_made_for_larger_nodes_is_cut_to_the_cores_of_this_one(
    make_job: MakeJob, planner_of: Callable[[Job], Planner]
) -> None:
    job = make_job(dataclasses.replace(TOY, loader_workers=1))
    job.start()
    job.wait_for_step(1)
    plan = planner_of(job)
    plan(source="planner", intra_op_threads=512, loader_workers=512)
    cores = len(os.sched_getaffinity(0))
    plan.wait_until_in_force(cores, cores, num_workers=1)
    assert job.finish() == [0]
    assert violations(job, TOY) == []


def test_planner_adds_loader_workers_to_a_stream_that_training_waits_for(make_job: MakeJob) -> None:
    toy = dataclasses.replace(TOY, num_rows=812, max_epochs=3, step_s=0.0, streams=True, row_s=0.05, is_tuned=True)
    job = make_job(toy)
    toy.write_streams(job.folder)
    job.start_all(2)
    job.wait_for_world(2, since=0)

    def with_more() -> bool:
        step = job.step
        return any(r["step"] >= step - 1 and r["world"] == 2 and r["loader_workers"] != [0] for r in job.records("done"))

    job.wait_until(with_more, "loader workers")
    job.start()
    job.wait_for_world(3)
    assert job.finish(100.0) == [0, 0, 0]  # nine processes compute here, on as few as two cores
    assert violations(job, toy) == []
    assert any(event.data["loader_workers"][0] > 0 for event in job.events("settings"))
