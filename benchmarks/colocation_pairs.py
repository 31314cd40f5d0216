"""Slowdowns predicted, and pairs chosen, on pairs that were measured on one device; and the time of a decision."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from gavel_traces import MeasuredPairs
from numpy.typing import NDArray

from lightning_dlrover.colocate.policies import POLICIES, make_policy
from lightning_dlrover.colocate.slowdown import Observation, SlowdownModel
from lightning_dlrover.tuning.cluster import Floats, Job, PolicySettings, Running, State

Pair = tuple[str, str]

NUM_QUEUED = 1000
NUM_DEVICES = 32


@dataclass(frozen=True)
class Errors:
    """Absolute relative errors of relative speeds."""

    of: str
    values: tuple[float, ...]
    trees: tuple[float, ...]  # errors of boosted trees, for comparison


@dataclass(frozen=True)
class Choice:
    """Throughput of one queue in pairs that were chosen from predictions, by an oracle, and at random."""

    ours: float
    oracle: float
    random: float


def unordered(pairs: MeasuredPairs) -> list[Pair]:
    return sorted({(min(p), max(p)) for p in pairs.speeds})


def quarter(pairs: MeasuredPairs, seed: int) -> tuple[list[Pair], list[Pair]]:
    """A random quarter of the pairs that fit, and the rest."""
    shuffled = unordered(pairs)
    random.Random(seed).shuffle(shuffled)
    return shuffled[: len(shuffled) // 4], shuffled[len(shuffled) // 4 :]


def learn(pairs: MeasuredPairs, known: Sequence[Pair]) -> SlowdownModel:
    return SlowdownModel.fit(
        [Observation(pairs.device, (pairs.jobs[a], pairs.jobs[b]), (pairs.speeds[a, b], pairs.speeds[b, a])) for a, b in known]
    )


def known_errors(pairs: MeasuredPairs, num_seeds: int) -> Iterator[Errors]:
    """A quarter of the pairs known, the rest predicted, for each seed."""
    for seed in range(num_seeds):
        known, rest = quarter(pairs, seed)
        yield _errors(f"seed {seed}", pairs, known, rest)


def left_out_errors(pairs: MeasuredPairs) -> Iterator[Errors]:
    """All pairs of a model, in all its batch sizes, predicted from the others, for each model."""
    family = {name: job.family for name, job in pairs.jobs.items()}
    for model in sorted(set(family.values())):
        known = [(a, b) for a, b in unordered(pairs) if model not in (family[a], family[b])]
        rest = [(a, b) for a, b in unordered(pairs) if model in (family[a], family[b])]
        if rest:
            yield _errors(model, pairs, known, rest)


def choose_sets(pairs: MeasuredPairs, model: SlowdownModel, num_queues: int, num_jobs: int, seed: int) -> Iterator[Choice]:
    """The sets of our policy on half as many devices as jobs: jobs over device time, 1 where each has a device alone.

    A job may stay alone here, and waits for a device then; random pairs are as many as fit.
    """
    policy = make_policy("complementary", PolicySettings(model, most_together=2))
    devices = tuple(replace(pairs.device, name=f"device-{i}") for i in range(num_jobs // 2))
    for names, rng in _queues(pairs, num_queues, num_jobs, seed):
        queue = [replace(pairs.jobs[name], name=f"{name}#{i}") for i, name in enumerate(names)]
        costs = np.array([[_device_time(pairs, a, b) for b in names] for a in names])
        allocation = policy(State(0.0, devices, tuple(queue)))
        sets: dict[str, list[int]] = {}
        for index, job in enumerate(queue):
            if job.name in allocation:
                sets.setdefault(allocation[job.name][0], []).append(index)
        ours = [(group[0], group[1]) for group in sets.values() if len(group) == 2]
        # Pairs that memory would allow and that were found not to fit take turns, which is no gain.
        savings = np.where(np.isfinite(costs), 2 - costs, 0.0)
        chosen = (ours, _best(savings), _random_pairs(np.isfinite(costs), rng))
        yield Choice(*(num_jobs / (num_jobs - sum(savings[pair] for pair in some)) for some in chosen))


def choose_pairs(pairs: MeasuredPairs, model: SlowdownModel, num_queues: int, num_jobs: int, seed: int) -> Iterator[Choice]:
    """As many pairs as fit, with the largest sum of steps/s as the traces have them."""
    names = sorted(pairs.jobs)
    alone = np.array([pairs.jobs[name].profiles[pairs.device.kind].steps_per_s for name in names])
    guessed = model.relative_speeds([_jobs(pairs, a, b) for a in names for b in names], pairs.device)
    predicted = np.array(guessed).reshape(len(names), len(names), 2) * np.stack(
        np.broadcast_arrays(alone[:, None], alone), axis=2
    )
    measured = np.array([[pairs.speeds.get((a, b), 0.0) for b in names] for a in names]) * alone[:, None]
    for queue, rng in _queues(pairs, num_queues, num_jobs, seed):
        at = np.ix_(*[[names.index(name) for name in queue]] * 2)
        true = measured[at] + measured.T[at]
        fit = true > 0
        expected = np.where(fit, predicted.sum(axis=2)[at], 0.0)
        # A constant above every sum: more pairs count before better ones.
        most = 100 * max(true.max(), expected.max())
        chosen = (_best(np.where(fit, table + most, 0.0)) for table in (expected, true))
        yield Choice(*(sum(float(true[pair]) for pair in some) for some in (*chosen, _random_pairs(fit, rng))))


def decision_times_ms(pairs: MeasuredPairs, model: SlowdownModel, num_decisions: int) -> dict[str, tuple[float, float, float]]:
    """Milliseconds of CPU time of a decision with 1,000 queued: median and largest after a job has ended, and the first."""
    times = {}
    for name in POLICIES:
        policy = make_policy(name, PolicySettings(model, most_together=2, max_wait_s=1e9))
        rng = random.Random(0)
        devices = tuple(replace(pairs.device, name=f"device-{i}") for i in range(NUM_DEVICES))
        names = rng.choices(sorted(pairs.jobs), k=NUM_QUEUED + num_decisions + 2 * NUM_DEVICES)
        coming = [replace(pairs.jobs[n], name=f"{n}#{i}", submitted_s=float(i)) for i, n in enumerate(names)]
        waiting, rest = coming[:NUM_QUEUED], coming[NUM_QUEUED:]
        running: tuple[Running, ...] = ()
        taken: list[float] = []
        for _ in range(num_decisions + 1):
            started = time.process_time()
            allocation = policy(State(1e6, devices, tuple(waiting), running))
            taken.append(1000 * (time.process_time() - started))
            by_name = {job.name: job for job in (*waiting, *(r.job for r in running))}
            running = tuple(Running(by_name[job], given) for job, given in allocation.items())
            gone = rng.randrange(len(running))
            running = running[:gone] + running[gone + 1 :]
            waiting = [job for job in waiting if job.name not in allocation]
            refill = NUM_QUEUED - len(waiting)
            waiting, rest = waiting + rest[:refill], rest[refill:]
        times[name] = (statistics.median(taken[1:]), max(taken[1:]), taken[0])
    return times


def _errors(of: str, pairs: MeasuredPairs, known: Sequence[Pair], rest: Sequence[Pair]) -> Errors:
    model = learn(pairs, known)
    errors: list[float] = []
    for (a, b), (one, other) in zip(
        rest, model.relative_speeds([_jobs(pairs, a, b) for a, b in rest], pairs.device), strict=True
    ):
        errors.append(abs(float(one) / pairs.speeds[a, b] - 1))
        if a != b:
            errors.append(abs(float(other) / pairs.speeds[b, a] - 1))
    return Errors(of, tuple(errors), _errors_of_trees(pairs, known, rest))


def _errors_of_trees(pairs: MeasuredPairs, known: Sequence[Pair], rest: Sequence[Pair]) -> tuple[float, ...]:
    """Errors of scikit-learn's gradient boosting with its defaults on model, batch size and speed alone of both jobs."""
    from sklearn.ensemble import GradientBoostingRegressor

    models = sorted({job.family for job in pairs.jobs.values()})

    def directions(some: Sequence[Pair]) -> tuple[Floats, Floats]:
        both = sorted({direction for a, b in some for direction in ((a, b), (b, a))})
        rows = [[value for name in pair for value in _columns(pairs.jobs[name])] for pair in both]
        return np.array(rows), np.array([pairs.speeds[pair] for pair in both])

    def _columns(job: Job) -> tuple[float, float, float]:
        return float(models.index(job.family)), job.batch_size, job.profiles[pairs.device.kind].steps_per_s

    trees = GradientBoostingRegressor(random_state=0).fit(*directions(known))
    columns, speeds = directions(rest)
    return tuple(np.abs(trees.predict(columns) / speeds - 1).tolist())


def _jobs(pairs: MeasuredPairs, a: str, b: str) -> tuple[Job, Job]:
    return pairs.jobs[a], pairs.jobs[b]


def _queues(pairs: MeasuredPairs, num_queues: int, num_jobs: int, seed: int) -> Iterator[tuple[list[str], random.Random]]:
    rng = random.Random(seed)
    for _ in range(num_queues):
        yield rng.choices(sorted(pairs.jobs), k=num_jobs), rng


def _device_time(pairs: MeasuredPairs, a: str, b: str) -> float:
    """Device time of a pair, where each alone has 1; infinite where the two do not fit."""
    total = pairs.speeds.get((a, b), 0.0) + pairs.speeds.get((b, a), 0.0)
    return 2 / total if total > 0 else np.inf


def _best(weights: Floats) -> list[tuple[int, int]]:
    """The matching with the largest sum, exactly."""
    import networkx

    graph = networkx.Graph()
    for i, j in zip(*np.nonzero(np.triu(weights, 1) > 0), strict=True):
        graph.add_edge(int(i), int(j), weight=float(weights[i, j]))
    return [(int(i), int(j)) for i, j in networkx.max_weight_matching(graph)]


def _random_pairs(fit: NDArray[np.bool_], rng: random.Random) -> list[tuple[int, int]]:
    """Pairs of jobs that fit, as many as come about when each in turn takes a random partner."""
    free = list(range(len(fit)))
    rng.shuffle(free)
    chosen = []
    while free:
        job = free.pop()
        partners = [other for other in free if fit[job, other]]
        if partners:
            partner = rng.choice(partners)
            free.remove(partner)
            chosen.append((job, partner))
    return chosen
