"""Pools: no sequence of decisions exceeds the budget, however late processes start and end."""

from __future__ import annotations

from dataclasses import astuple, replace

from hypothesis import given
from hypothesis import strategies as st

from lightning_dlrover.pool.budget import Divider, PoolJob, Rate, Resources, held_by, next_moves, wanted_sizes
from lightning_dlrover.pool.decisions import elastic_divider
from lightning_dlrover.pool.policies import POOL_POLICIES

MAX_WAIT_S = 100.0
DIVIDERS = {name: elastic_divider(name, MAX_WAIT_S) for name in POOL_POLICIES}


def rates(gains: list[float], fewest: int = 1) -> tuple[Rate, ...]:
    """Throughput by number of workers, from the gain of each further worker."""
    found, total = [], 0.0
    for number, gain in enumerate(gains, start=fewest):
        total += gain
        found.append(Rate(number, total, 0.9 * total, 1.1 * total))
    return tuple(found)


@st.composite
def new_jobs(draw: st.DrawFn, name: str) -> PoolJob:
    fewest = draw(st.integers(1, 3))
    most = draw(st.integers(fewest, 6))
    gpus = draw(st.sampled_from([0, 0, 1]))
    return PoolJob(
        name=name,
        needs=Resources(draw(st.sampled_from([1.0, 2.0, 0.5])), gpus, draw(st.sampled_from([0, 1000, 4000]))),
        min_workers=fewest,
        max_workers=most,
        rates=rates(draw(st.lists(st.floats(0.1, 10.0), min_size=most, max_size=most))),
        submitted_s=draw(st.floats(0, 200)),
        priority=draw(st.integers(0, 2)),
        weight=draw(st.floats(0.1, 10.0)),
        samples_left=draw(st.none() | st.floats(0, 1e4)),
    )


class Pool:
    """Jobs whose processes follow their grants sooner or later, as real ones do."""

    def __init__(self, data: st.DataObject, divide: Divider) -> None:
        self.data = data
        self.divide = divide
        self.budget = Resources(
            data.draw(st.integers(1, 12), "cores"), data.draw(st.integers(0, 4)), data.draw(st.sampled_from([2000, 8000, 1e9]))
        )
        self.jobs: dict[str, PoolJob] = {}
        self.now_s = 200.0

    def decide(self, may_grow: bool = True) -> None:
        jobs = list(self.jobs.values())
        wanted = wanted_sizes(jobs, self.budget, self.divide, self.now_s, MAX_WAIT_S)
        before = held_by(jobs)
        for move in next_moves(jobs, self.budget, wanted, may_grow):
            job = self.jobs[move.name]
            assert move.before == job.granted
            assert job.min_workers <= move.after <= job.max_workers or job.is_by_hand
            self.jobs[move.name] = replace(job, granted=move.after, planned=job.planned if job.is_by_hand else move.after)
        after = held_by(self.jobs.values())
        # Where a person has exceeded one resource, decisions still give the others away.
        most = (max(pair) for pair in zip(astuple(self.budget), astuple(before), strict=True))
        assert after.fits(Resources(*most))

    def event(self) -> None:
        """Anything that happens between two decisions."""
        names = sorted(self.jobs)
        kind = self.data.draw(st.sampled_from(["submit", "follow", "follow", "end", "by hand", "kill"]))
        if kind == "submit" or not names:
            name = f"job{len(self.jobs)}"
            self.jobs[name] = self.data.draw(new_jobs(name))
            return
        name = self.data.draw(st.sampled_from(names))
        job = self.jobs[name]
        if kind == "follow":
            low, high = sorted((job.alive, max(job.planned, job.alive) if job.alive > job.planned else job.planned))
            self.jobs[name] = replace(job, alive=self.data.draw(st.integers(min(low, job.planned), high)))
        elif kind == "end":
            self.jobs[name] = replace(job, alive=0, planned=0, granted=0, is_present=False)
        elif kind == "kill":
            self.jobs[name] = replace(job, is_present=False)
        elif job.held:
            self.jobs[name] = replace(
                job, is_by_hand=True, planned=self.data.draw(st.integers(job.min_workers, job.max_workers))
            )


@given(st.data(), st.sampled_from([*DIVIDERS.values()]))
def test_no_decision_exceeds_the_budget_whatever_happens_in_between(data: st.DataObject, divide: Divider) -> None:
    pool = Pool(data, divide)
    for _ in range(data.draw(st.integers(1, 12))):
        pool.event()
        pool.now_s += data.draw(st.sampled_from([1.0, 150.0]))
        pool.decide(data.draw(st.sampled_from([True, True, False])))


@given(st.data(), st.sampled_from([*DIVIDERS.values()]))
def test_decisions_settle_once_processes_follow(data: st.DataObject, divide: Divider) -> None:
    """Every job that should grow does, after as many looks as there are changes: nothing waits for itself."""
    pool = Pool(data, divide)
    for number in range(data.draw(st.integers(1, 5))):
        pool.jobs[f"job{number}"] = data.draw(new_jobs(f"job{number}"))
        pool.decide()
    for _ in range(20):
        pool.jobs = {name: replace(job, alive=job.granted) for name, job in pool.jobs.items()}
        before = dict(pool.jobs)
        pool.decide()
        if pool.jobs == before:
            break
    wanted = wanted_sizes(list(pool.jobs.values()), pool.budget, divide, pool.now_s, MAX_WAIT_S)
    assert {name: job.granted for name, job in pool.jobs.items()} == wanted


def test_job_grows_only_after_the_other_has_shrunk() -> None:
    slow = PoolJob("slow", Resources(1.0), 1, 2, 2, 2, 2, rates=rates([10.0, 0.1]))
    fresh = PoolJob("fresh", Resources(1.0), 1, 2, submitted_s=1.0)
    budget = Resources(2.0)
    wanted = wanted_sizes([slow, fresh], budget, DIVIDERS["jct"], 2.0)
    assert wanted == {"slow": 1, "fresh": 1}
    moves = next_moves([fresh, slow], budget, wanted)
    assert [(move.name, move.after) for move in moves] == [("slow", 1)]
    slow = replace(slow, granted=1, planned=1)
    assert next_moves([fresh, slow], budget, wanted) == []
    slow = replace(slow, alive=1)
    assert [(move.name, move.after) for move in next_moves([fresh, slow], budget, wanted)] == [("fresh", 1)]


def test_nothing_grows_while_records_may_be_missing() -> None:
    fresh = PoolJob("fresh", Resources(1.0), 1, 2)
    assert next_moves([fresh], Resources(2.0), {"fresh": 1}, may_grow=False) == []
