"""Ours lets two jobs share their devices where that pays, and keeps all limits."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from elastic_jobs import Table, cluster, job, running
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from lightning_dlrover.planner.cluster import Allocation, Job, PolicySettings, Running, State
from lightning_dlrover.planner.cluster.beside import BesideSpeeds
from lightning_dlrover.planner.cluster.elastic import ELASTIC_POLICIES, make_elastic

NODE = [device.name for device in cluster(1)]
LINEAR = Table(tuple(float(n) for n in range(1, 65)))
FLAT = Table((1.0, 1.02, 1.04, 1.06, 1.07, 1.08, 1.09, 1.1))


@dataclass(frozen=True)
class Equal:
    """Every job has this speed beside any other, but for pairs that do not fit at all."""

    speed: float
    spread: float = 0.0
    unfit: frozenset[str] = field(default=frozenset())

    def may_share(self, one: Job) -> bool:
        return one.name not in self.unfit

    def speeds(self, one: Job, other: Job, num_devices: NDArray[np.integer[Any]]) -> BesideSpeeds:
        shape = 2, len(num_devices)
        fits = not {one.name, other.name} & self.unfit
        return BesideSpeeds(np.full(shape, self.speed if fits else 0.0), np.full(shape, self.spread))


def decide(beside: Equal, waiting: list[Job], runs: list[Running], num_nodes: int = 1, **fields: Any) -> Allocation:
    state = State(1000.0, cluster(num_nodes), tuple(waiting), tuple(runs), beside)
    return make_elastic("ours", PolicySettings(**fields))(state)


def couples(allocation: Allocation) -> set[frozenset[str]]:
    on: dict[str, set[str]] = {}
    for name, devices in allocation.items():
        for device in devices:
            on.setdefault(device, set()).add(name)
    return {frozenset(names) for names in on.values() if len(names) > 1}


def pair(change_s: float = 0.0, **fields: Any) -> list[Job]:
    return [job(name, scaling=LINEAR, max_devices=4, change_s=change_s, **fields) for name in ("a", "b")]


def test_jobs_share_all_devices_where_they_hardly_slow_each_other() -> None:
    found = decide(Equal(0.9), pair(), [])
    assert couples(found) == {frozenset("ab")}
    assert found["a"] == found["b"]
    assert len(found["a"]) == 4


def test_jobs_share_nothing_where_they_take_turns_on_the_device() -> None:
    assert not couples(decide(Equal(0.5), pair(), []))


def test_uncertain_speed_beside_another_job_counts_less() -> None:
    assert couples(decide(Equal(0.8, spread=0.1), pair(), []))
    assert not couples(decide(Equal(0.8, spread=1.0), pair(), []))


def test_jobs_that_do_not_fit_together_never_share() -> None:
    jobs = [job(name, scaling=LINEAR, max_devices=4) for name in "abc"]
    assert couples(decide(Equal(0.95, unfit=frozenset("c")), jobs, [])) == {frozenset("ab")}


def test_gain_that_does_not_pay_for_the_change_changes_nothing() -> None:
    # Four shared devices at 0.8 of their speed are 60 % more than two alone. A change takes as long as it is expected to last.
    dear, free = (
        [running(one, NODE[2 * n : 2 * n + 2]) for n, one in enumerate(pair(change_s=change_s))] for change_s in (300.0, 0.0)
    )
    assert decide(Equal(0.8), [], dear) == {run.job.name: run.devices for run in dear}
    assert couples(decide(Equal(0.8), [], free)) == {frozenset("ab")}


def test_job_that_is_joined_stays_where_it_is() -> None:
    host, guest = pair(change_s=0.5)
    found = decide(Equal(0.95), [guest], [running(host, NODE)])
    assert found == {"a": tuple(NODE), "b": tuple(NODE)}


def test_couple_stays_while_it_pays_and_parts_when_it_does_not() -> None:
    now = [running(one, NODE) for one in pair(change_s=1.0)]
    assert decide(Equal(0.9), [], now) == {"a": tuple(NODE), "b": tuple(NODE)}
    assert not couples(decide(Equal(0.5), [], now))


def test_partner_with_devices_enough_for_all_is_given_its_own() -> None:
    jobs = [job(name, scaling=FLAT) for name in "ab"]
    assert not couples(decide(Equal(0.9), jobs, [], num_nodes=4))


def test_job_that_has_waited_too_long_gets_devices_of_its_own() -> None:
    late = replace(pair()[0], submitted_s=0.0)
    found = decide(Equal(0.99), [late, pair(submitted_s=999.0)[1]], [], max_wait_s=500.0)
    assert not couples(found)
    assert found["a"]


@pytest.mark.parametrize("fields", [{"exclusive": True}, {"min_devices": 2, "max_devices": 2}])
def test_exclusive_jobs_and_those_of_one_size_share_nothing(fields: dict[str, Any]) -> None:
    one = job("a", **{"scaling": LINEAR, "max_devices": 4, **fields})
    assert not couples(decide(Equal(0.99), [one, pair()[1]], []))


def test_running_jobs_that_may_not_be_paused_share_nothing() -> None:
    assert not couples(decide(Equal(0.99), pair(), [], may_pause=False))


@pytest.mark.parametrize("name", sorted(set(ELASTIC_POLICIES) - {"ours"}))
def test_no_other_policy_lets_jobs_share(name: str) -> None:
    waiting = tuple(job(f"j{i}", scaling=LINEAR) for i in range(6))
    state = State(1000.0, cluster(1), waiting)
    assert make_elastic(name)(replace(state, beside=Equal(0.99))) == make_elastic(name)(state)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_whatever_the_queue_two_jobs_share_all_devices_or_none(data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    num_nodes = int(rng.integers(1, 4))
    devices = cluster(num_nodes)
    jobs = [
        job(
            f"j{i}",
            scaling=Table(tuple(np.arange(1, 17) ** rng.uniform(0.3, 1.0))),
            num_devices=int(fewest),
            min_devices=int(fewest),
            max_devices=int(fewest + rng.integers(0, 9)),
            steps_left=float(rng.uniform(1, 1e5)),
            priority=int(rng.integers(0, 2)),
            submitted_s=float(rng.uniform(0, 1000)),
            change_s=float(rng.choice([0.0, 0.5, 30.0])),
            exclusive=bool(rng.random() < 0.2),
            deadline_s=float(rng.uniform(1000, 1e5)) if rng.random() < 0.2 else None,
        )
        for i, fewest in enumerate(rng.integers(1, 4, size=rng.integers(1, 9)))
    ]
    beside = Equal(float(rng.uniform(0.4, 1.0)), float(rng.choice([0.0, 0.3])))
    policy = make_elastic("ours", PolicySettings(max_wait_s=float(rng.choice([200.0, 3600.0]))))
    state = State(1000.0, devices, tuple(jobs), (), beside)
    for step in range(3):
        found = policy(state)
        _check(found, {one.name: one for one in jobs}, {device.name for device in devices})
        assert policy(state) == found
        kept = [one for one in jobs if one.name in found]
        late = [one for one in jobs if one.name not in found]
        runs = tuple(Running(one, found[one.name], 900.0 + step) for one in kept)
        state = State(1010.0 + step, devices, tuple(late), runs, replace(beside, speed=float(rng.uniform(0.4, 1.0))))


def _check(found: Allocation, jobs: dict[str, Job], devices: set[str]) -> None:
    taken = Counter(name for names in found.values() for name in names)
    assert set(taken) <= devices
    assert max(taken.values(), default=0) <= 2
    for names in found.values():
        assert len(set(names)) == len(names)
    for one, other in map(sorted, couples(found)):
        assert found[one] == found[other]
        assert not jobs[one].exclusive
        assert not jobs[other].exclusive
    for name, names in found.items():
        assert jobs[name].fewest_devices <= len(names) <= jobs[name].most_devices
