"""Choose the next changes of a pool, and predict the effect of a hypothetical change. Pure."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_dlrover.output import counted
from lightning_dlrover.pool.budget import (
    Divider,
    Move,
    Owners,
    PoolJob,
    Rate,
    Resources,
    Wait,
    next_moves,
    queue_in_order,
    queue_of,
    wanted_sizes,
    why_never,
)
from lightning_dlrover.pool.policies import POOL_POLICIES, make_policy
from lightning_dlrover.tuning.cluster import Device, Job, Policy, PolicySettings, Profile, Running, Speeds, State, turn_of
from lightning_dlrover.tuning.plan import Candidate, Decision

GUESSED_EXPONENT = 0.8
"""Throughput of a job with unknown speed: the number of its workers to this power."""

GUESSED_SPREAD = 0.3
"""Deviation of the logarithm of a guessed speed."""

SIGMAS_OF_INTERVAL = 2 * 1.645
"""Width of an interval of 90 %, in standard deviations."""

NODE = "pool"
MEMORY_BYTES = 1 << 40  # memory of each device; a pool counts memory separately


def elastic_divider(name: str, max_wait_s: float) -> Divider:
    """Return the divider that decides as the policy with that name.

    A device is a core, or a GPU; a pool's jobs on GPUs are divided first, then the others on the remaining cores. The
    schedulers place devices, so they count as one node here, and only the number of each job's devices is used.

    Raises:
        ValueError: the policy is unknown.
    """
    policy = make_policy(name, PolicySettings(max_wait_s=max_wait_s, may_pause=False))
    # The needs of a new job are learned by running it, so it starts with its minimum as soon as others can make room. A rigid
    # policy makes none.
    waits_longer_s = 0.0 if POOL_POLICIES[name].rigid else 2 * max_wait_s

    def divide(jobs: Sequence[PoolJob], free: Resources, now_s: float) -> Mapping[str, int]:
        on_gpus = [job for job in jobs if job.needs.gpus]
        others = [job for job in jobs if not job.needs.gpus]
        sizes = _divided(policy, on_gpus, "gpus", free.gpus, now_s, waits_longer_s)
        for job in on_gpus:
            free -= job.needs.times(sizes.get(job.name, 0))
        return sizes | _divided(policy, others, "cores", free.cores, now_s, waits_longer_s)

    return divide


def as_asked(jobs: Sequence[PoolJob], budget: Resources, owners: Owners) -> list[PoolJob]:
    """Return jobs as a rigid policy treats them: one that waits needs its most workers, and one that runs gives none back.

    Where its maximum exceeds the budget, or the quota of its owner, a job needs its minimum.
    """

    def asked(job: PoolJob) -> int:
        if not job.is_waiting:
            return job.present
        most = job.needs.times(job.max_workers)
        return job.max_workers if most.fits(budget) and most.fits(owners.quota(job.owner)) else job.min_workers

    return [replace(job, min_workers=asked(job)) for job in jobs]


@dataclass(frozen=True)
class RateScaling:
    """The speed of a pool's job by its devices, in samples/s."""

    rates: tuple[Rate, ...]
    units: int  # devices of each worker

    def speeds(self, num_devices: NDArray[np.integer[Any]], num_nodes: NDArray[np.integer[Any]]) -> Speeds:
        """Return speeds in a straight line between known numbers of workers, and as the last known one beyond them."""
        known = np.array([rate.num_workers for rate in self.rates], dtype=float)
        workers = np.asarray(num_devices, dtype=np.int64) // self.units
        samples = np.interp(workers, known, [rate.samples_per_s for rate in self.rates])
        slower = np.minimum(workers / known[0], 1.0)  # fewer workers than known are slower in proportion
        spread = np.interp(workers, known, [_spread(rate) for rate in self.rates])
        return Speeds(np.where(workers > 0, samples * slower, 0.0), spread)


def _spread(rate: Rate) -> float:
    if rate.is_measured or not 0 < rate.low_per_s < rate.high_per_s:
        return 0.0
    return math.log(rate.high_per_s / rate.low_per_s) / SIGMAS_OF_INTERVAL


@functools.lru_cache(maxsize=4096)
def _scaling(rates: tuple[Rate, ...], units: int, most: int) -> RateScaling:
    """Return the same object for equal arguments: policies remember their questions to it."""
    if rates:
        return RateScaling(rates, units)
    factor = math.exp(GUESSED_SPREAD * SIGMAS_OF_INTERVAL / 2)
    guessed = [(workers, workers**GUESSED_EXPONENT) for workers in range(1, most + 1)]
    return RateScaling(tuple(Rate(n, speed, speed / factor, speed * factor) for n, speed in guessed), units)


def _divided(
    policy: Policy, jobs: Sequence[PoolJob], unit: str, amount: float, now_s: float, waits_longer_s: float
) -> dict[str, int]:
    """Return the workers of each job on devices of one kind. One of unknown speed counts as waiting `waits_longer_s` more."""
    if not jobs:
        return {}
    units = {job.name: max(1, math.ceil(getattr(job.needs, unit))) for job in jobs}
    most = sum(units[job.name] * job.max_workers for job in jobs)
    num_devices = int(min(max(amount, 0.0), most))
    present = _present(jobs, units, num_devices)
    if present is None:
        return {job.name: job.min_workers for job in jobs if job.held}
    devices = tuple(Device(f"{unit}{number}", unit, NODE, MEMORY_BYTES, places=1) for number in range(num_devices))
    running, waiting, used = [], [], 0
    for job in jobs:
        made = _job(job, units[job.name], unit, now_s)
        if size := present[job.name] * units[job.name]:
            running.append(Running(made, tuple(device.name for device in devices[used : used + size]), job.since_s))
            used += size
        elif not job.held:
            since_s = job.submitted_s - (0.0 if job.rates else waits_longer_s)
            waiting.append(replace(made, waiting_since_s=since_s))
    allocation = policy(State(now_s, devices, tuple(waiting), tuple(running)))
    return {job.name: len(allocation.get(job.name, ())) // units[job.name] for job in jobs}


def _present(jobs: Sequence[PoolJob], units: Mapping[str, int], num_devices: int) -> dict[str, int] | None:
    """Return the present sizes, smaller if they exceed the devices; None if even the minimum is too large."""
    sizes = {job.name: job.sizes.at_most(min(job.max_workers, job.held)) if job.held else 0 for job in jobs}

    def excess() -> int:
        return sum(size * units[name] for name, size in sizes.items()) - num_devices

    for job in sorted(jobs, key=lambda job: (job.priority, -job.submitted_s, job.name)):
        while excess() > 0 and sizes[job.name] > job.min_workers:
            sizes[job.name] = job.within_limits(sizes[job.name] - 1)
    return sizes if excess() <= 0 else None


def _job(job: PoolJob, units: int, kind: str, now_s: float) -> Job:
    scaling = _scaling(job.rates, units, job.max_workers)
    one = scaling.speeds(np.array([job.min_workers * units]), np.array([1])).steps_per_s[0]
    return Job(
        name=job.name,
        profiles={kind: Profile(0, max(float(one), 1e-9))},
        steps_left=job.samples_left if job.rates else None,
        submitted_s=job.submitted_s,
        priority=job.priority,
        weight=job.weight,
        owner=job.owner,
        num_devices=job.max_workers * units,
        min_devices=job.min_workers * units,
        max_devices=job.max_workers * units,
        sizes=tuple(size * units for size in job.sizes.listed),
        served_device_s=job.served_by(now_s) * units,
        scaling=scaling,
        start_s=job.change_s,
        change_s=job.change_s,
        deadline_s=job.deadline_s,
    )


DEFAULT_MAX_WAIT_S = 3600.0
DEFAULT_POLICY = "jct"


@dataclass(frozen=True)
class Rules:
    """The rules of a brain."""

    budget: Resources
    policy: str = DEFAULT_POLICY  # name of a policy for elastic jobs
    max_wait_s: float = DEFAULT_MAX_WAIT_S  # a job that has waited longer goes before all others
    owners: Owners = field(default_factory=Owners)  # their weights and quotas
    counts_others: bool = True  # whether jobs that are in no pool are charged to the budget

    @cached_property
    def divide(self) -> Divider:
        """The policy. Raise ValueError if none has that name."""
        return elastic_divider(self.policy, self.max_wait_s)

    def treated(self, jobs: Sequence[PoolJob]) -> Sequence[PoolJob]:
        """Return jobs as the policy treats them."""
        return as_asked(jobs, self.budget, self.owners) if POOL_POLICIES[self.policy].rigid else jobs


@dataclass(frozen=True)
class Choice:
    """The next actions of a brain. Mappings are keyed by the jobs' names."""

    wanted: Mapping[str, int]  # the number of workers that each job should have in the end
    moves: Sequence[Move]  # the changes to make now
    refused: Mapping[str, str]  # reasons of jobs that can never start
    gone: Collection[str]  # jobs that have disappeared
    waits: Sequence[Wait]  # the queue, in order

    def is_settled(self, jobs: Sequence[PoolJob]) -> bool:
        """Whether every job has the size that it should have, so that nothing is expected to happen soon."""
        return not self.moves and all(job.held == self.wanted.get(job.name, 0) and job.alive == job.held for job in jobs)


def choose(jobs: Sequence[PoolJob], rules: Rules, now_s: float, may_grow: bool) -> Choice:
    """Return the next changes. `may_grow`: all running processes are certain to be recorded."""
    jobs, budget, owners = rules.treated(jobs), rules.budget, rules.owners
    refused = {job.name: reason for job in jobs if job.is_waiting and (reason := why_never(job, budget, owners))}
    able = [job for job in jobs if job.name not in refused]
    wanted = wanted_sizes(able, budget, rules.divide, now_s, rules.max_wait_s, owners)
    queue = queue_in_order(able, budget, owners, now_s, rules.max_wait_s)
    running = sorted((job for job in able if not job.is_waiting), key=turn_of)
    moves = next_moves([*queue.jobs, *queue.beyond_quota, *running], budget, wanted, may_grow)
    started = {move.name for move in moves}
    waits = queue_of([job for job in able if job.name not in started], budget, now_s, rules.max_wait_s, owners)
    gone = [job.name for job in jobs if not job.is_present and not job.alive]
    return Choice(wanted, moves, refused, gone, waits)


def reason_of(job: PoolJob, move: Move, jobs: Sequence[PoolJob], wanted: Mapping[str, int]) -> str:
    """Explain a change in words: the predicted gain or loss, and the other jobs that change with it."""
    text = f"{move.before} -> {move.after} workers" if move.before else f"starts with {counted(move.after, 'worker')}"
    before, after = job.rate(move.before), job.rate(move.after)
    if move.before and before is not None and after is not None:
        text += f": {after.samples_per_s / before.samples_per_s:.2f} times the throughput"
    changed = [other for other in jobs if other.name != job.name and wanted.get(other.name, other.held) != other.held]
    if changed:
        texts = [f"{other.name} {other.held} -> {wanted[other.name]}" for other in sorted(changed, key=lambda o: o.name)]
        text += f"; with it {', '.join(texts[:4])}" + (f" and {len(texts) - 4} more" if len(texts) > 4 else "")
    return text


@dataclass(frozen=True)
class Prospect:
    """The predicted rest of a job with a number of workers."""

    num_workers: int
    samples_per_s: float
    seconds: float | None  # until its end; None: its end is unknown
    low_s: float | None  # interval of 90 %
    high_s: float | None
    cost: float | None  # money until its end; None: no prices, or an unknown end
    is_measured: bool


def prospect(job: PoolJob, decision: Decision | None, num_workers: int) -> Prospect | None:
    """Return the rest of a job with a number of workers; None if its planner has not predicted that."""
    rate = job.rate(num_workers)
    if rate is None:
        return None
    pause_s = job.change_s if num_workers != job.alive else 0.0
    left = job.samples_left

    def seconds(samples_per_s: float) -> float | None:
        return None if left is None or samples_per_s <= 0 else left / samples_per_s + pause_s

    until_end_s = seconds(rate.samples_per_s)
    price = _price(decision, num_workers)
    return Prospect(
        num_workers,
        rate.samples_per_s,
        until_end_s,
        seconds(rate.high_per_s),
        seconds(rate.low_per_s),
        price * until_end_s / 3600 if price is not None and until_end_s is not None else None,
        rate.is_measured,
    )


def sizes_if(
    jobs: Sequence[PoolJob],
    rules: Rules,
    now_s: float,
    budget: Resources,
    without: str = "",
    by_hand: str = "",
    num_workers: int = 0,
) -> tuple[dict[str, int], dict[str, int]]:
    """Return the sizes that the policy wants now, and those that it would want with another budget.

    Args:
        without: a job to leave out.
        by_hand: a job to set to `num_workers` by hand.
    """
    others = [job for job in jobs if job.name != without]
    if by_hand:
        fixed = {"is_by_hand": True, "planned": num_workers, "alive": num_workers}
        others = [replace(job, **fixed) if job.name == by_hand else job for job in others]  # type: ignore[arg-type]
    return _sizes(jobs, rules, now_s), _sizes(others, replace(rules, budget=budget), now_s)


def _sizes(jobs: Sequence[PoolJob], rules: Rules, now_s: float) -> dict[str, int]:
    return wanted_sizes(rules.treated(jobs), rules.budget, rules.divide, now_s, rules.max_wait_s, rules.owners)


def _price(decision: Decision | None, num_workers: int) -> float | None:
    """Return the price per hour of a number of workers, by the candidate with these or, in proportion, with others."""
    priced: list[Candidate] = [c for c in decision.candidates if c.cost_per_hour is not None] if decision is not None else []
    if not priced:
        return None
    nearest = min(priced, key=lambda c: abs(c.num_workers - num_workers))
    assert nearest.cost_per_hour is not None
    return nearest.cost_per_hour * num_workers / nearest.num_workers
