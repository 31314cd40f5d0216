"""How close the simulator comes to real jobs: eight of them in a pool of this machine's cores, and the same ones simulated.

    python benchmarks/cluster.py --fidelity

The jobs scale: most of a step is a sleep that their workers share, so two workers are faster than one on two cores.

First the inputs are measured: two jobs of one worker, the second of which starts while the first trains, and one job of two
workers. Each tells its steps/s, and the rest of its completion time is the start. Then one job grows and shrinks while others
end and come: its history shows how long a worker takes to join, and to leave, and how long training pauses for each.

Then eight jobs come one after the other and `dlrover pool run` divides two cores among them. The simulator gets the arrivals,
the steps, these inputs, and the brain's own decision code. It knows nothing of the real run's course. While a worker joins, its
job trains on at its old speed and holds the core; then it pauses, and has the new one.

The last line has the largest and the median error of a job's completion time, whether the jobs ended in the same order, how
much faster two workers are, and how many changes of size there were, real and simulated.
"""

from __future__ import annotations

import math
import re
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster_pool import Arrival, Ended, PoolOfJobs
from jobs import BenchmarkError, Workspace

from lightning_dlrover.lab.simulate import simulator as simulated
from lightning_dlrover.pool.budget import PoolJob, Rate, Resources
from lightning_dlrover.pool.decisions import Rules, choose
from lightning_dlrover.rdzv.job.events import SizeGiven, TrainingStalled, events_of
from lightning_dlrover.rdzv.job.records import EventRecord
from lightning_dlrover.report.status import EVENTS_FILE, read_event_file
from lightning_dlrover.tuning.cluster import Allocation, Device, Job, Profile, State

CORES = 2
MEASURED, BRIEF = 200, 40  # steps
STEP_S, SAMPLE_S = 0.005, 0.12 / 240  # one worker sleeps 125 ms in a step of 240 samples, two 65 ms
WIDTH = 64


def _job(name: str, at_s: float, steps: int, workers: str = "1:2") -> Arrival:
    return Arrival(name, at_s, steps, workers, WIDTH, STEP_S, SAMPLE_S)


JOBS = tuple(
    _job(name, at_s, steps)
    for name, at_s, steps in (
        *(("a", 0.0, 650), ("b", 30.0, 220), ("c", 75.0, 450), ("d", 90.0, 180)),
        *(("e", 130.0, 600), ("f", 175.0, 300), ("g", 185.0, 400), ("h", 240.0, 250)),
    )
)
APART_S = 15.0  # seconds between the starts of jobs that are measured, as jobs of the pool seldom start together
LEARNS_S = 5.0  # seconds of training until a job's planner has published its speed
END_TIMEOUT_S = 600.0
RULES = Rules(Resources(cores=float(CORES)), "jct")


@dataclass(frozen=True)
class Inputs:
    """Measured figures of a job."""

    start_s: float  # until its first step, and after its last one, beside another job
    steps_per_s: tuple[float, float]  # alone on one core beside another job; two workers
    join_s: float  # from the decision to grow until training pauses for the new worker
    leave_s: float  # the same of a decision to shrink
    pause_s: float  # of a change


def fidelity() -> dict[str, float]:
    """Measure, run and simulate the jobs, print a line for each, and return the figures of the last line."""
    with Workspace("fidelity") as space:
        endpoint = space.etcd().endpoint
        inputs = _measure(space, endpoint)
        slow, fast = inputs.steps_per_s
        print(
            f"start {inputs.start_s:.1f} s, {slow:.1f} steps/s with one worker, {fast:.1f} with two, a worker joins in "
            f"{inputs.join_s:.1f} s and leaves in {inputs.leave_s:.1f} s, with a pause of {inputs.pause_s:.2f} s",
            flush=True,
        )
        ends = _run(space, endpoint, "pool", JOBS, "jct")
        changes = sum(len(_sizes(space.folder / "pool", job.name)) for job in JOBS)
    real = {end.name: end.jct_s for end in ends}
    expected, expected_changes = simulated_times(inputs)
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
        "speedup": fast / slow,
        "changes": changes,
        "simulated_changes": expected_changes,
    }


def _arrival(name: str) -> Arrival:
    return next(job for job in JOBS if job.name == name)


def _measure(space: Workspace, endpoint: str) -> Inputs:
    def measured(name: str, workers: str, count: int) -> tuple[float, float]:
        """Mean completion time and mean steps/s."""
        jobs = [_job(f"{name}-{n}", n * APART_S, MEASURED, workers) for n in range(count)]
        ends = _run(space, endpoint, name, jobs, "as-requested")
        return statistics.fmean(end.jct_s for end in ends), statistics.fmean(_speed(space.folder / name, e.name) for e in ends)

    jct_s, slow = measured("side-by-side", "1", CORES)
    _, fast = measured("together", str(CORES), 1)
    grows, shrinks = _measure_changes(space, endpoint)
    pauses_s = [pause_s for _, pause_s in (*grows, *shrinks)]
    return Inputs(
        jct_s - MEASURED / slow,
        (slow, fast),
        statistics.median(delay_s for delay_s, _ in grows),
        statistics.median(delay_s for delay_s, _ in shrinks),
        statistics.median(pauses_s),
    )


def _speed(folder: Path, name: str) -> float:
    """Return the steps/s that a job has told."""
    told = re.findall(r"([\d.]+) steps/s", (folder / f"{name}.log").read_text(errors="replace"))
    if not told:
        raise BenchmarkError(f"job {name} has not told its steps/s: see {folder / name}.log")
    return statistics.fmean(map(float, told))


def _measure_changes(space: Workspace, endpoint: str) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """Let a job grow when another one ends, and shrink when the next one comes. Return seconds until and of each pause."""
    folder = space.folder / "changes"
    with PoolOfJobs(folder, endpoint, CORES) as pool:
        pool.start_brain("jct")
        pool.submit(_job("changes", 0.0, 600))
        for name in ("first", "second"):
            pool.submit(_job(name, 0.0, BRIEF, "1"))
            pool.wait_for_end(name, END_TIMEOUT_S)
            pool.wait_for(
                "growth", lambda: any(after == CORES for _, after, *_ in _changes(folder, "changes")[-1:]), END_TIMEOUT_S
            )
            time.sleep(LEARNS_S)
        pool.wait_for("the end of the job", lambda: len(pool.ended()) == 3, END_TIMEOUT_S)
    changes = _changes(folder, "changes")
    grows = [(delay_s, pause_s) for before, after, delay_s, pause_s in changes if after > before]
    shrinks = [(delay_s, pause_s) for before, after, delay_s, pause_s in changes if after < before]
    if not grows or not shrinks:
        raise BenchmarkError(f"the job that was to grow and to shrink has made the changes {changes}; see {folder}")
    return grows, shrinks


def _sizes(folder: Path, name: str) -> list[tuple[EventRecord, SizeGiven]]:
    """Return the decisions of the brain to change the size of a job that ran."""
    records = read_event_file(folder / "runs" / name / EVENTS_FILE)
    return [(record, given) for record, given in events_of(records, SizeGiven) if given.workers_before]


def _changes(folder: Path, name: str) -> list[tuple[int, int, float, float]]:
    """Return the changes of a job: workers before and after, seconds from the decision to the pause, and of the pause.

    A change that the next decision has come before is left out.
    """
    given = _sizes(folder, name)
    ends = [*(record.at for record, _ in given[1:]), math.inf]
    found = []
    for record, stall in events_of(read_event_file(folder / "runs" / name / EVENTS_FILE), TrainingStalled):
        for (decided, size), end in zip(given, ends, strict=True):
            if decided.at < record.at < end and stall.workers_after == size.workers_after:
                delay_s = max(0.0, record.at - stall.seconds - decided.at)
                found.append((size.workers_before, size.workers_after, delay_s, stall.seconds))
    return found


def _run(space: Workspace, endpoint: str, name: str, jobs: Sequence[Arrival], policy: str) -> list[Ended]:
    with PoolOfJobs(space.folder / name, endpoint, CORES) as pool:
        pool.start_brain(policy)
        began = time.monotonic()
        for job in jobs:
            time.sleep(max(0.0, began + job.at_s - time.monotonic()))
            pool.submit(job)
        pool.wait_for(f"the end of {len(jobs)} jobs", lambda: len(pool.ended()) == len(jobs), END_TIMEOUT_S)
        return pool.ended()


def simulated_times(inputs: Inputs) -> tuple[dict[str, float], int]:
    """Return the completion time of each job by the simulator, and the number of changes of size."""
    devices = tuple(Device(f"core-{number}", "core", "here", 1, places=1) for number in range(CORES))
    arrivals = [
        simulated.Arrival(
            Job(
                job.name,
                {"core": Profile(0, inputs.steps_per_s[0])},
                job.steps,
                job.at_s,
                min_devices=1,
                max_devices=CORES,
                start_s=inputs.start_s,
                change_s=inputs.pause_s,
            ),
            job.steps,
        )
        for job in JOBS
    ]
    policy = _BrainsPolicy(inputs)
    outcome = simulated.simulate(
        arrivals,
        devices,
        policy,
        lambda job, given, others: inputs.steps_per_s[len(given) - 1],
        every_s=1.0,
    )
    return {ended.job.name: ended.completion_s for ended in outcome.finished}, policy.num_changes


@dataclass
class _Granted:
    """A job with a place: its grant, and the time from which the simulated job has that size."""

    size: int
    since_s: float
    began_s: float
    due_s: float


class _BrainsPolicy:
    """The decisions of a pool's brain, as a policy of the simulator, with the time that workers take to join and to leave."""

    def __init__(self, inputs: Inputs) -> None:
        self._inputs = inputs
        self._rates = tuple(
            Rate(n, speed, speed, speed, is_measured=True) for n, speed in enumerate(inputs.steps_per_s, start=1)
        )
        self._granted: dict[str, _Granted] = {}
        self.num_changes = 0

    def __call__(self, state: State) -> Allocation:
        now_s = state.now_s
        present = {run.job.name: len(run.devices) for run in state.running}
        self._granted = {name: granted for name, granted in self._granted.items() if name in present}
        jobs = [
            self._pool_job(job, present.get(job.name, 0), now_s) for job in (*(r.job for r in state.running), *state.waiting)
        ]
        for move in choose(jobs, RULES, now_s, may_grow=True).moves:
            before = self._granted.get(move.name)
            delay_s = 0.0
            if before is not None:
                self.num_changes += 1
                delay_s = self._inputs.join_s if move.after > present[move.name] else self._inputs.leave_s
            self._granted[move.name] = _Granted(move.after, now_s, before.began_s if before else now_s, now_s + delay_s)
        sizes = {name: granted.size if now_s >= granted.due_s else present[name] for name, granted in self._granted.items()}
        return _placed(state, sizes)

    def _pool_job(self, job: Job, present: int, now_s: float) -> PoolJob:
        granted = self._granted.get(job.name)
        is_known = granted is not None and now_s - granted.began_s > self._inputs.start_s + LEARNS_S
        return PoolJob(
            job.name,
            Resources(cores=1.0),
            job.fewest_devices,
            job.most_devices,
            granted=granted.size if granted is not None else 0,
            alive=present,
            rates=self._rates if is_known else (),
            samples_left=job.steps_left,
            submitted_s=job.submitted_s,
            since_s=granted.since_s if granted is not None else job.submitted_s,
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
