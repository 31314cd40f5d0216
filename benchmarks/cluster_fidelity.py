"""How close the simulator comes to real jobs: eight of them in a pool of this machine's cores, and the same ones simulated.

    python benchmarks/cluster.py --fidelity

First the inputs are measured with jobs of two lengths. The difference is the time of steps, and the rest is the start: two
jobs of one worker side by side, and one job of two workers. Then eight jobs come one after the other and `dlrover brain`
divides two cores among them. The simulator gets the arrivals, the steps, these inputs, and the brain's own decision code. It
knows nothing of the real run's course.

A worker that joins starts beside the others, which train on meanwhile. The simulator knows no such delay, so it is charged as
a pause of the same loss, half on the growth and half on the shrink that follows.

The last line has the largest and the median error of a job's completion time, and whether the jobs ended in the same order.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from cluster_pool import Arrival, Ended, PoolOfJobs
from jobs import Workspace

from lightning_dlrover.planner.cluster import Device, Job, Profile, State
from lightning_dlrover.planner.cluster import simulator as simulated
from lightning_dlrover.planner.cluster.jobs import Allocation
from lightning_dlrover.planner.cluster.pool.elastic_policy import elastic_divider
from lightning_dlrover.planner.cluster.pool.jobs import PoolJob, Rate
from lightning_dlrover.planner.cluster.pool.resources import Resources
from lightning_dlrover.planner.cluster.pool.sizes import wanted_sizes

__all__ = ["JOBS", "Inputs", "fidelity", "simulated_times"]

CORES = 2
SHORT, LONG = 200, 1400
JOBS = tuple(
    Arrival(name, at_s, steps)
    for name, at_s, steps in (
        *(("a", 0.0, 2600), ("b", 10.0, 900), ("c", 25.0, 1800), ("d", 45.0, 700)),
        *(("e", 60.0, 3200), ("f", 80.0, 1200), ("g", 95.0, 2200), ("h", 120.0, 1000)),
    )
)
LEARNS_S = 5.0  # seconds of training until a job's planner has published its speed
RESIZE_S = 0.5
MAX_WAIT_S = 3600.0
END_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Inputs:
    """Measured figures of a job."""

    start_s: float  # until its first step, and after its last one, beside another job
    steps_per_s: tuple[float, float]  # alone on one core beside another job; two workers

    @property
    def change_s(self) -> float:
        slow, fast = self.steps_per_s
        return RESIZE_S + max(0.0, 1 - slow / fast) * self.start_s / 2


def fidelity() -> dict[str, float]:
    """Measure, run and simulate the jobs, print a line for each, and return the figures of the last line."""
    with Workspace("fidelity") as space:
        endpoint = space.etcd().endpoint
        inputs = _measure(space, endpoint)
        slow, fast = inputs.steps_per_s
        print(f"start {inputs.start_s:.1f} s, {slow:.1f} steps/s with one worker, {fast:.1f} with two", flush=True)
        ends = _run(space, endpoint, "pool", JOBS, "ours")
    real = {end.name: end.jct_s for end in ends}
    expected = simulated_times(inputs)
    errors = []
    for job in JOBS:
        errors.append(abs(expected[job.name] / real[job.name] - 1))
        print(f"{job.name}: real {real[job.name]:6.1f} s, simulated {expected[job.name]:6.1f} s, {errors[-1]:.1%} apart")
    order = [sorted(times, key=lambda name: _arrival(name).at_s + times[name]) for times in (real, expected)]
    print(f"order of ends: real {' '.join(order[0])}, simulated {' '.join(order[1])}")
    return {
        "worst_error": max(errors),
        "median_error": statistics.median(errors),
        "same_order": int(order[0] == order[1]),
    }


def _arrival(name: str) -> Arrival:
    return next(job for job in JOBS if job.name == name)


def _measure(space: Workspace, endpoint: str) -> Inputs:
    def mean_s(name: str, steps: int, workers: str, count: int) -> float:
        jobs = [Arrival(f"{name}-{number}", 0.0, steps, workers) for number in range(count)]
        return statistics.fmean(end.jct_s for end in _run(space, endpoint, name, jobs, "as-requested"))

    side_by_side = [mean_s(f"two-{steps}", steps, "1", CORES) for steps in (SHORT, LONG)]
    together = [mean_s(f"one-{steps}", steps, str(CORES), 1) for steps in (SHORT, LONG)]
    speeds = [(LONG - SHORT) / (long_s - short_s) for short_s, long_s in (side_by_side, together)]
    return Inputs(side_by_side[0] - SHORT / speeds[0], (speeds[0], speeds[1]))


def _run(space: Workspace, endpoint: str, name: str, jobs: Sequence[Arrival], policy: str) -> list[Ended]:
    with PoolOfJobs(space.folder / name, endpoint, CORES) as pool:
        pool.start_brain(policy)
        began = time.monotonic()
        for job in jobs:
            time.sleep(max(0.0, began + job.at_s - time.monotonic()))
            pool.submit(job)
        pool.wait_for(f"the end of {len(jobs)} jobs", lambda: len(pool.ended()) == len(jobs), END_TIMEOUT_S)
        return pool.ended()


def simulated_times(inputs: Inputs) -> dict[str, float]:
    """Return the completion time of each job by the simulator."""
    slow, _ = inputs.steps_per_s
    devices = tuple(Device(f"core-{number}", "core", "here", 1, places=1) for number in range(CORES))
    arrivals = [
        simulated.Arrival(
            Job(job.name, {"core": Profile(0, slow)}, job.steps, job.at_s, min_devices=1, max_devices=2, change_s=0.0),
            job.steps,
        )
        for job in JOBS
    ]
    outcome = simulated.simulate(
        arrivals,
        devices,
        _BrainsPolicy(inputs),
        lambda job, given, beside: inputs.steps_per_s[len(given) - 1],
        costs=simulated.Costs(start_s=inputs.start_s, change_s=inputs.change_s),
        every_s=1.0,
    )
    return {ended.job.name: ended.completion_s for ended in outcome.finished}


class _BrainsPolicy:
    """The decisions of a pool's brain, as a policy of the simulator."""

    def __init__(self, inputs: Inputs) -> None:
        self._divide = elastic_divider("ours", MAX_WAIT_S)
        self._inputs = inputs
        self._rates = tuple(
            Rate(n, speed, speed, speed, is_measured=True) for n, speed in enumerate(inputs.steps_per_s, start=1)
        )

    def __call__(self, state: State) -> Allocation:
        known_after_s = self._inputs.start_s + LEARNS_S
        jobs = [
            self._job(run.job, len(run.devices), run.since_s, run.job.served_device_s > known_after_s) for run in state.running
        ]
        jobs += [self._job(job, 0, job.submitted_s, is_known=False) for job in state.waiting]
        wanted = wanted_sizes(jobs, Resources(cores=float(CORES)), self._divide, state.now_s, MAX_WAIT_S)
        return _placed(state, wanted)

    def _job(self, job: Job, held: int, since_s: float, is_known: bool) -> PoolJob:
        return PoolJob(
            job.name,
            Resources(cores=1.0),
            job.fewest_devices,
            job.most_devices,
            granted=held,
            planned=held,
            alive=held,
            rates=self._rates if is_known else (),
            samples_left=job.steps_left,
            submitted_s=job.submitted_s,
            since_s=since_s,
        )


def _placed(state: State, wanted: dict[str, int]) -> Allocation:
    """Keep as many cores of each running job as it may, then give the free ones away."""
    kept = {run.job.name: run.devices[: wanted.get(run.job.name, len(run.devices))] for run in state.running}
    free = [device.name for device in state.devices if not any(device.name in names for names in kept.values())]
    for job in (*(run.job for run in state.running), *state.waiting):
        more = min(wanted.get(job.name, 0) - len(kept.get(job.name, ())), len(free))
        if more > 0:
            kept[job.name] = (*kept.get(job.name, ()), *free[:more])
            free = free[more:]
    return kept
