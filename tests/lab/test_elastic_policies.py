"""Whatever the queue, each policy of sizes keeps devices, limits, fixed jobs and the bound on waiting."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from lightning_dlrover.lab.simulate.baselines import ELASTIC_POLICIES, make_elastic
from lightning_dlrover.lab.simulate.simulator import Arrival, simulate
from lightning_dlrover.pool.allocation import SpeedTables
from lightning_dlrover.tuning.cluster import Job, PolicySettings, Profile, Running, Speeds, State
from lightning_dlrover.tuning.plan import ALL_SIZES_UP_TO, sizes_to_consider
from tests.support.elastic_jobs import GB, Amdahl, check_allocation, cluster, job, numbers, running, spread_speed

PREEMPTING = [name for name, policy in ELASTIC_POLICIES.items() if policy.preempts]


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    fewest = draw(st.integers(1, 5))
    asked = fewest + draw(st.integers(0, 4))
    return job(
        f"job-{draw(st.integers(0, 10**9))}",
        profiles={"gpu": Profile(draw(st.sampled_from([GB, GB, 20 * GB])), draw(st.floats(0.1, 10)))},
        steps_left=draw(st.none() | st.floats(0.1, 1e6)),
        submitted_s=draw(st.floats(0, 4000)),
        priority=draw(st.integers(0, 2)),
        weight=draw(st.floats(0.5, 4)),
        owner=draw(st.sampled_from(["", "ads", "search"])),
        num_devices=asked,
        min_devices=fewest,
        max_devices=asked + draw(st.integers(0, 12)),
        served_device_s=draw(st.floats(0, 1e6)),
        restarts=draw(st.integers(0, 9)),
        start_s=draw(st.sampled_from([0.0, 30.0])),
        change_s=draw(st.sampled_from([0.0, 0.5, 30.0])),
        join_s=draw(st.sampled_from([0.0, 30.0])),
        deadline_s=draw(st.none() | st.floats(0, 1e5)),
        scaling=draw(
            st.none()
            | st.builds(
                Amdahl, st.floats(0.1, 100), st.floats(0, 0.5), st.sampled_from([0.0, 0.1]), st.sampled_from([0.0, 1.0])
            )
        ),
    )


def devices_of_two_sizes(num_nodes: int, per_node: int) -> tuple[Any, ...]:
    """The last node's devices have more memory."""
    devices = cluster(num_nodes, per_node)
    return tuple(
        dataclasses.replace(device, memory_bytes=32 * GB) if device.node == f"node{num_nodes - 1}" else device
        for device in devices
    )


@settings(max_examples=40, deadline=None)
@given(
    st.lists(jobs(), max_size=12, unique_by=lambda one: one.name),
    st.integers(1, 4),
    st.integers(1, 5),
    st.booleans(),
    st.lists(st.booleans(), min_size=12, max_size=12),
    st.sampled_from([5030.0, 9000.0]),
)
def test_allocations_of_every_policy_keep_devices_limits_and_fixed_jobs(
    queue: list[Job], num_nodes: int, per_node: int, may_pause: bool, stay: list[bool], later_s: float
) -> None:
    """All policies on each queue: queues take most of the time."""
    devices = devices_of_two_sizes(num_nodes, per_node)
    for name, kind in ELASTIC_POLICIES.items():
        note(f"policy {name}")
        policy = make_elastic(name, PolicySettings(owner_weights={"ads": 3.0}, may_pause=may_pause))
        state = State(5000.0, devices, tuple(queue))
        first = dict(policy(state))
        check_allocation(state, first)
        assert first == policy(State(5000.0, devices, tuple(reversed(queue))))
        stays = [one for one, may_stay in zip(queue, stay, strict=False) if may_stay and one.name in first]
        later = State(
            later_s,
            devices,
            tuple(one for one in queue if one not in stays),
            tuple(Running(one, first[one.name], 5000.0) for one in stays),
        )
        second = dict(policy(later))
        check_allocation(later, second)
        for one in stays:
            if one.fewest_devices == one.most_devices:
                assert second[one.name] == first[one.name]
            if not may_pause or not kind.preempts:
                assert one.name in second


@pytest.mark.parametrize("name", ELASTIC_POLICIES)
def test_no_job_waits_beyond_the_bound_in_a_flood_of_others(name: str) -> None:
    """A large job stands against a stream of short ones of a higher priority."""
    arrivals = [
        Arrival(job(f"small-{i}", submitted_s=10.0 * i, steps_left=40.0, priority=1, num_devices=2), 40.0) for i in range(150)
    ]
    wide = job("wide", submitted_s=1.0, steps_left=200.0, num_devices=8, min_devices=6, max_devices=8)
    fixed = job("fixed", submitted_s=2.0, steps_left=100.0, num_devices=5, min_devices=5, max_devices=5)
    policy = make_elastic(name, PolicySettings(max_wait_s=200.0))
    outcome = simulate([*arrivals, Arrival(wide, 200.0), Arrival(fixed, 100.0)], cluster(2), policy, spread_speed, every_s=30.0)
    started = {done.job.name: done.started_s for done in outcome.finished}
    assert len(started) == 152
    # The bound, then jobs that started before and cannot be stopped, and the other one of the two.
    assert max(started["wide"], started["fixed"]) < 800, started


@pytest.mark.parametrize("name", ELASTIC_POLICIES)
def test_all_jobs_end_in_overload_and_equal_runs_are_equal(name: str) -> None:
    rng = random.Random(5)
    arrivals = []
    for i in range(40):
        steps = 10 ** rng.uniform(1, 3.5)
        size = rng.choice([1, 2, 4, 8])
        one = job(f"j{i}", submitted_s=rng.uniform(0, 600), steps_left=steps, num_devices=size, start_s=5.0, change_s=5.0)
        arrivals.append(Arrival(one, steps))
    results = [
        simulate(order, cluster(3), make_elastic(name, PolicySettings(seed=1)), spread_speed, every_s=60.0)
        for order in (arrivals, arrivals[::-1])
    ]
    assert len(results[0].finished) == 40
    assert results[0] == results[1]


@pytest.mark.parametrize("name", ELASTIC_POLICIES)
def test_higher_priority_comes_first(name: str) -> None:
    low = [job(f"low-{i}", submitted_s=0.0, num_devices=4) for i in range(5)]
    high = [job(f"high-{i}", submitted_s=5.0, num_devices=4, max_devices=4, priority=1) for i in range(2)]
    started = make_elastic(name)(State(10.0, cluster(2), (*low, *high)))
    assert {"high-0", "high-1"} <= set(started)


@pytest.mark.parametrize("name", ELASTIC_POLICIES)
def test_deadline_comes_before_priority(name: str) -> None:
    others = [job(f"other-{i}", submitted_s=0.0, num_devices=4, max_devices=4, priority=1, steps_left=10.0) for i in range(4)]
    # Amdahl with 0.1: four devices make 1 / 0.325 steps/s, so 1,000 steps take 325 s.
    urgent = job("urgent", submitted_s=5.0, num_devices=4, deadline_s=10 + 1.1 * 325 + 1, min_devices=1)
    started = numbers(make_elastic(name)(State(10.0, cluster(1), (*others, urgent))))
    if ELASTIC_POLICIES[name].preempts:
        assert started == {"urgent": 4}
    else:
        assert started["urgent"] >= 1


@pytest.mark.parametrize("name", PREEMPTING)
def test_running_jobs_are_not_paused_where_that_is_forbidden(name: str) -> None:
    devices = cluster(1)
    long = running(job("long", steps_left=1e6, num_devices=4), [device.name for device in devices])
    short = [job(f"short-{i}", steps_left=10.0, submitted_s=5000.0, num_devices=1, max_devices=1) for i in range(6)]
    state = State(5000.0, devices, tuple(short), (long,))
    assert "long" in make_elastic(name, PolicySettings(may_pause=False))(state)


def test_an_unknown_policy_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'lifo'.*srtf, elastic-srtf"):
        make_elastic("lifo")


TWO_KINDS = {"gpu": Profile(GB, 2.0), "old": Profile(GB, 1.0)}


def test_waiting_jobs_spread_over_kinds_by_speed_and_load() -> None:
    devices = (*cluster(1), *cluster(1, kind="old"))
    jobs = [job(f"j{i}", profiles=TWO_KINDS, num_devices=4, submitted_s=float(i)) for i in range(3)]
    placed = make_elastic("as-requested")(State(10.0, devices, tuple(jobs)))
    # The second waits for the fast devices: half of them are as fast as all of the slow ones.
    kinds = {name: found[0][:3] for name, found in placed.items()}
    assert kinds == {"j0": "gpu", "j2": "old"}


def test_running_job_stays_with_its_kind_and_a_fixed_one_with_its_devices() -> None:
    devices = (*cluster(1), *cluster(1, kind="old"))
    elastic = running(job("elastic", profiles=TWO_KINDS), ["old0-0"])
    fixed = running(job("fixed", profiles=TWO_KINDS, num_devices=1, max_devices=1), ["gpu0-2"])
    placed = make_elastic("jct")(State(10.0, devices, (), (elastic, fixed)))
    assert placed["fixed"] == ("gpu0-2",)
    assert {name[:3] for name in placed["elastic"]} == {"old"}


def test_job_gets_devices_with_enough_memory_only() -> None:
    devices = tuple(replace(d, memory_bytes=2 * GB) if d.node == "node0" else d for d in cluster(2))
    large = job("large", profiles={"gpu": Profile(8 * GB, 1.0)}, num_devices=8)
    placed = make_elastic("jct")(State(10.0, devices, (large,)))
    assert numbers(placed) == {"large": 4}
    assert all(name.startswith("gpu1") for name in placed["large"])


def test_all_sizes_of_a_usual_cluster_are_considered_and_whole_nodes_of_a_large_one() -> None:
    assert sizes_to_consider(64, 4) == list(range(65))
    large = np.array(sizes_to_consider(10_000, 8, also=(131, 20_000)))
    assert large[: ALL_SIZES_UP_TO + 1].tolist() == list(range(ALL_SIZES_UP_TO + 1))
    assert 131 in large
    assert large[-1] == 10_000
    rest = large[large > 136]
    assert (rest % 8 == 0).all()
    assert (np.diff(rest) / rest[:-1] < 0.06).all()


def test_speeds_are_asked_for_once_while_nothing_new_is_known() -> None:
    class Counting(Amdahl):
        asked = 0

        def speeds(self, num_devices: NDArray[np.integer[Any]], num_nodes: NDArray[np.integer[Any]]) -> Speeds:
            Counting.asked += 1
            return super().speeds(num_devices, num_nodes)

    known, tables, sizes = Counting(), SpeedTables(), np.array(sizes_to_consider(8, 4))
    jobs = [job("a", scaling=known, max_devices=4), job("b", scaling=known, max_devices=4)]
    for _ in range(3):
        speeds, _ = tables.of(jobs, "gpu", sizes, 4)
    assert Counting.asked == 1
    assert speeds[0].tolist() == [0.0, *(Amdahl().at(n, 1) for n in range(1, 5)), 0.0, 0.0, 0.0, 0.0]
    tables.of([replace(jobs[0], scaling=Counting())], "gpu", sizes, 4)
    assert Counting.asked == 2
