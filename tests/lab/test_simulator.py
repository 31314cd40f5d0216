"""The simulator's clock, speeds and costs are exact, and every policy ends every job in it."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice

import pytest

from lightning_dlrover.colocate.policies import POLICIES, make_policy
from lightning_dlrover.lab.simulate.simulator import (
    Arrival,
    Finished,
    Fragility,
    NodeLoss,
    SimulationError,
    draw_losses,
    simulate,
)
from lightning_dlrover.tuning.cluster import Allocation, Device, Job, Policy, PolicySettings, Profile, State

GB = 10**9


def devices(count: int, places: int = 2) -> list[Device]:
    return [Device(f"gpu{i}", "gpu", f"node{i // 4}", 16 * GB, {"gpu": 1.0}, places) for i in range(count)]


def arrival(name: str, at_s: float, seconds: float, **fields: object) -> Arrival:
    """A job of two steps/s that takes `seconds` alone."""
    job = Job(name, {"gpu": Profile(4 * GB, 2.0, {"gpu": 0.6})}, submitted_s=at_s)
    return Arrival(replace(job, **fields), 2.0 * seconds)  # type: ignore[arg-type]


def halves(job: Job, on: Sequence[Device], others: Mapping[str, Sequence[Job]]) -> float:
    """Neighbours divide a device evenly; devices add up."""
    return sum(job.profiles[d.kind].steps_per_s / (1 + len(others[d.name])) for d in on)


def ends(arrivals: Sequence[Arrival], on: Sequence[Device], policy: Policy, **options: object) -> dict[str, float]:
    outcome = simulate(arrivals, on, policy, halves, **options)  # type: ignore[arg-type]
    return {done.job.name: done.ended_s for done in outcome.finished}


def test_one_device_runs_jobs_one_after_the_other() -> None:
    outcome = simulate([arrival("a", 0, 10), arrival("b", 2, 5)], devices(1), make_policy("sequential"), halves)
    assert [(done.job.name, done.started_s, done.ended_s) for done in outcome.finished] == [("a", 0, 10), ("b", 10, 15)]
    assert (outcome.start_s, outcome.end_s, outcome.busy_device_s) == (0, 15, 15)
    assert outcome.mean_completion_s == (10 + 13) / 2


def test_speeds_change_when_a_neighbour_comes_and_goes() -> None:
    # a runs alone for 4 s, then shares: b needs 2 * 3 s, a has 3 left at 10 s.
    assert ends([arrival("a", 0, 10), arrival("b", 4, 3)], devices(1), make_policy("fifo")) == {"b": 10, "a": 13}


def test_a_start_costs_its_seconds_without_a_step() -> None:
    assert ends([arrival("a", 0, 10, start_s=4)], devices(1), make_policy("fifo")) == {"a": 14}


def elastic(state: State) -> Allocation:
    """All devices to the first job; a second one gets half of them."""
    jobs = sorted([*state.waiting, *(r.job for r in state.running)], key=lambda job: job.submitted_s)
    names = [device.name for device in state.devices]
    return {job.name: tuple(names[i :: len(jobs)]) for i, job in enumerate(jobs)}


def test_elastic_jobs_change_their_devices_at_a_cost() -> None:
    arrivals = [arrival("a", 0, 40, max_devices=4, change_s=1), arrival("b", 5, 10, max_devices=4, change_s=1)]
    outcome = simulate(arrivals, devices(4), elastic, halves)
    # a: 5 s on 4 devices do 20 of 40; from 6 on 2 devices; b ends at 10 with a at 28; from 11 on 4 devices: 3 s.
    assert {done.job.name: (done.ended_s, done.changes) for done in outcome.finished} == {"b": (10, 0), "a": (14, 2)}
    assert outcome.changes_per_job == 1.0


def test_new_devices_idle_until_they_have_joined_and_the_others_go_on() -> None:
    # a: 5 s on 4 devices do 40 of 80 steps; from 6 on 2 devices; b ends at 10 with a at 56. The two that come back have joined
    # at 13, with a at 68, and cost 1 s; the last 12 steps take 1.5 s.
    arrivals = [arrival("a", 0, 40, max_devices=4, join_s=3.0, change_s=1), arrival("b", 5, 10, max_devices=4, change_s=1)]
    assert ends(arrivals, devices(4), elastic) == {"b": 10, "a": 15.5}
    # It may end before they have joined.
    arrivals = [arrival("a", 0, 33, max_devices=4, join_s=3.0), arrival("b", 5, 10, max_devices=4)]
    assert ends(arrivals, devices(4), elastic) == {"b": 10, "a": 11.5}


def test_a_job_that_keeps_no_device_waits_for_all_to_join() -> None:
    def moves(state: State) -> Allocation:
        names = [device.name for device in state.devices]
        return {run.job.name: (names[1],) for run in state.running} | {job.name: (names[0],) for job in state.waiting}

    assert ends([arrival("a", 0, 20, join_s=3.0, start_s=2.0)], devices(2), moves, every_s=5.0) == {"a": 2 + 3 + 20}


def shortest_first(state: State) -> Allocation:
    """Preempts: one device, to the job with the fewest steps left."""
    jobs = [*state.waiting, *(r.job for r in state.running)]
    return {min(jobs, key=lambda job: job.steps_left or 0).name: (state.devices[0].name,)} if jobs else {}


@pytest.mark.parametrize(
    "told, left, expected",
    [
        (1.0, 20.0, {0.0: 20.0, 5.0: 10.0, 7.0: 10.0}),
        (2.0, 40.0, {0.0: 40.0, 5.0: 30.0, 7.0: 30.0}),
        (0.5, 10.0, {0.0: 10.0, 5.0: None, 7.0: None}),  # it has outlived its length
        (1.0, None, {0.0: None, 5.0: None, 7.0: None}),
    ],
)
def test_policies_see_the_length_that_they_are_told(
    told: float, left: float | None, expected: dict[float, float | None]
) -> None:
    """The job is paused at 5 s for two seconds."""
    seen: dict[float, float | None] = {}

    def policy(state: State) -> Allocation:
        jobs = (*state.waiting, *(run.job for run in state.running))
        seen.update((state.now_s, job.steps_left) for job in jobs if state.now_s in expected)
        return {} if 5 <= state.now_s < 7 else {job.name: (state.devices[0].name,) for job in jobs}

    late = replace(arrival("a", 0, 10, steps_left=left), length_factor=told)
    assert ends([late], devices(1), policy, every_s=1.0) == {"a": 12}
    assert seen == expected


def test_preempted_jobs_keep_their_progress() -> None:
    arrivals = [arrival("long", 0, 10, steps_left=20.0), arrival("short", 4, 3, steps_left=6.0)]
    outcome = simulate(arrivals, devices(1), shortest_first, halves)
    assert {done.job.name: (done.ended_s, done.starts) for done in outcome.finished} == {"short": (7, 1), "long": (13, 2)}
    assert outcome.finished[1].served_device_s == 10


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_ends_all_jobs_and_repeats_itself(name: str) -> None:
    rng = random.Random(3)
    arrivals = [
        arrival(f"j{i}", rng.uniform(0, 100), rng.uniform(1, 30), start_s=0.5, priority=rng.randrange(2)) for i in range(60)
    ]
    policy = make_policy(name, PolicySettings(max_wait_s=200.0, most_together=2))
    outcome = simulate(arrivals, devices(4), policy, halves)
    assert {done.job.name for done in outcome.finished} == {a.job.name for a in arrivals}
    assert all(done.started_s >= done.job.submitted_s and done.ended_s > done.started_s for done in outcome.finished)
    assert outcome == simulate(arrivals[::-1], devices(4), policy, halves)


def test_what_cannot_be_simulated_is_refused_with_its_name() -> None:
    fifo = make_policy("fifo")
    with pytest.raises(SimulationError, match="the name 'a'"):
        simulate([arrival("a", 0, 1)] * 2, devices(1), fifo, halves)
    with pytest.raises(SimulationError, match="'big' needs 3 devices"):
        simulate([arrival("big", 0, 1, num_devices=3)], devices(2), fifo, halves)
    with pytest.raises(SimulationError, match=r"'a' has -2\.0 steps"):
        simulate([arrival("a", 0, -1)], devices(1), fifo, halves)
    with pytest.raises(SimulationError, match="wait for ever"):
        simulate([arrival("a", 0, 1)], devices(1), lambda state: {}, halves)
    with pytest.raises(SimulationError, match=r"'gpu0'.*places"):
        simulate([arrival(n, 0, 1) for n in "abc"], devices(1), lambda s: dict.fromkeys("abc", ("gpu0",)), halves)


DEVICES = (Device("d0", "core", "n0", 1), Device("d1", "core", "n1", 1))
JOB = Job("job", {"core": Profile(0, 1.0)}, steps_left=100)


def run(fragility: Fragility, *losses: NodeLoss) -> Finished:
    def first_device(state: State) -> Allocation:
        return {job.name: ("d0",) for job in (*state.waiting, *(r.job for r in state.running))}

    arrival = Arrival(JOB, 100, fragility)
    (ended,) = simulate([arrival], DEVICES, first_device, lambda *_: 1.0, losses=losses).finished
    return ended


def test_a_job_repeats_the_steps_since_its_checkpoint_and_restarts() -> None:
    ended = run(Fragility(checkpoint_s=30, restart_s=5), NodeLoss(50, "n0"))
    assert ended.ended_s == pytest.approx(100 + 20 + 5)
    assert ended.is_whole


def test_checkpoints_are_counted_from_the_restart() -> None:
    ended = run(Fragility(checkpoint_s=30, restart_s=5), NodeLoss(50, "n0"), NodeLoss(95, "n0"))
    # 30 steps at the first loss, then 40 s of steps of which 10 are lost.
    assert ended.ended_s == pytest.approx(95 + 5 + 100 - 60)


def test_a_live_job_loses_no_step() -> None:
    assert run(Fragility(restart_s=2), NodeLoss(50, "n0")).ended_s == pytest.approx(102)


def test_the_loss_of_another_node_does_not_touch_a_job() -> None:
    assert run(Fragility(checkpoint_s=30, restart_s=5), NodeLoss(50, "n1")).ended_s == pytest.approx(100)


def test_a_job_fails_at_one_loss_too_many() -> None:
    ended = run(Fragility(most_losses=1), NodeLoss(20, "n0"), NodeLoss(40, "n0"))
    assert not ended.is_whole
    assert [ended.ended_s, ended.steps] == pytest.approx([40, 40])


def test_a_job_fails_where_its_memory_ends() -> None:
    ended = run(Fragility(fails_at_steps=60))
    assert not ended.is_whole
    assert [ended.ended_s, ended.steps] == pytest.approx([60, 60])


def test_a_negative_figure_is_refused() -> None:
    with pytest.raises(ValueError, match="negative"):
        Fragility(restart_s=-1)


def test_losses_come_at_the_rate_of_all_nodes_together() -> None:
    losses = list(islice(draw_losses(["a", "b", "c", "d"], 0.5, random.Random(1)), 4000))
    assert losses[-1].at_s / 3600 == pytest.approx(4000 / (4 * 0.5), rel=0.05)
    assert {loss.node for loss in losses} == {"a", "b", "c", "d"}
    assert list(draw_losses(["a"], 0.0, random.Random(1))) == []
