"""One decision for a large cluster: time, memory, and distance from the optimum where an integer program finds it."""

from __future__ import annotations

import random
import statistics
import time
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np

from lightning_dlrover.lab.simulate.baselines import ELASTIC_POLICIES, make_elastic
from lightning_dlrover.lab.simulate.knowledge import PerfectKnowledge
from lightning_dlrover.lab.simulate.simulator import Cluster, elastic_workload
from lightning_dlrover.lab.simulate.traces import USUAL_BATCHES, MeasuredApplication, Submission, read_applications
from lightning_dlrover.pool.allocation import Ints, Share, jct, values
from lightning_dlrover.pool.placement import with_placement
from lightning_dlrover.pool.policies import solved
from lightning_dlrover.tuning.cluster import Job, Policy, PolicySettings, Running, State

LARGE_JOBS, LARGE = 1000, Cluster(2500, 4)
SOLVED = ((20, Cluster(16, 4)), (60, Cluster(16, 4)), (200, Cluster(125, 4)), (LARGE_JOBS, LARGE))
"""Numbers of jobs and clusters for which the optimum is computed."""
NOW_S = 4 * 3600.0


def scale(speeds: Path, *, quick: bool) -> dict[str, float | int]:
    """Time decisions, compare them with the optimum, and return the figures of the last line.

    Raises:
        ValueError: a file of step times cannot be used.
    """
    applications = read_applications(speeds)
    times = []
    for seed in range(2 if quick else 5):
        state = _state(applications, LARGE_JOBS, LARGE, seed)
        policy = make_elastic("jct", PolicySettings())
        for _ in range(2):  # the first decision fills tables that later ones use
            began_s = time.perf_counter()
            policy(state)
            times.append(time.perf_counter() - began_s)
    first_s, later_s = statistics.median(times[::2]), statistics.median(times[1::2])
    print(f"{LARGE_JOBS} jobs on {LARGE.num_devices} GPUs: {first_s:.2f} s, each later decision {later_s:.2f} s")
    tracemalloc.start()
    make_elastic("jct", PolicySettings())(state)
    peak_mb = tracemalloc.get_traced_memory()[1] / 1e6
    tracemalloc.stop()
    worst = 1.0
    for num_jobs, cluster in SOLVED:
        for seed in range(1 if quick else 3):
            ratio = _optimality(_state(applications, num_jobs, cluster, seed))
            print(f"{num_jobs} jobs on {cluster.num_devices} GPUs, seed {seed}: {ratio:.5f} of the optimum")
            worst = min(worst, ratio)
    return {"decision_s": first_s, "decision_mb": peak_mb, "optimality": worst}


def _optimality(state: State) -> float:
    """Return the value of the sizes that `jct` chooses over that of the integer program's optimum."""
    seen: list[tuple[Share, Ints]] = []

    def choose(share: Share) -> Ints:
        numbers = jct(share)
        seen.append((share, numbers))
        return numbers

    policy: Policy = with_placement(replace(ELASTIC_POLICIES["jct"], choose=choose), PolicySettings())
    policy(state)
    chosen = best = 0.0
    for share, numbers in seen:
        worth = values(share)
        rows = np.arange(len(share.jobs))
        chosen += float(worth[rows, share.columns_of(numbers)].sum())
        best += float(worth[rows, solved(-worth, share.sizes, share.num_devices)].sum())
    return chosen / best


def _state(applications: dict[str, MeasuredApplication], num_jobs: int, cluster: Cluster, seed: int) -> State:
    """Return a cluster in the middle of its work: some of each job is done, and half of the jobs run as their users asked."""
    rng = random.Random(seed)
    choices = [(name, batch) for name in sorted(USUAL_BATCHES) if name in applications for batch in USUAL_BATCHES[name]]
    submissions = []
    for number in range(num_jobs):
        name, batch = rng.choice(choices)
        devices = rng.randint(1, min(16, applications[name].most_devices(batch)))
        submissions.append(Submission(f"job-{number:04d}", name, rng.uniform(0, NOW_S), devices, batch))
    workload = elastic_workload(submissions, applications, cluster)
    knowledge = PerfectKnowledge(workload.families, cluster)
    jobs: list[Job] = [
        replace(a.job, scaling=knowledge.scaling(a.job), steps_left=a.steps * rng.uniform(0.05, 1.0)) for a in workload.arrivals
    ]
    free = [device.name for device in cluster.devices()]
    running, waiting = [], []
    for job in jobs:
        if len(free) >= job.num_devices and rng.random() < 0.5:
            running.append(Running(job, tuple(free[: job.num_devices]), rng.uniform(job.submitted_s, NOW_S)))
            free = free[job.num_devices :]
        else:
            waiting.append(job)
    return State(NOW_S, cluster.devices(), tuple(waiting), tuple(running))
