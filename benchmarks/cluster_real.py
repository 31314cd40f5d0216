"""The worth of a pool's brain to real jobs: four of them share two cores, and everything that can go away does.

    python benchmarks/cluster_real.py [--quick] [--scale X]

jct     Four jobs of 1 to 2 workers come one after the other. `dlrover pool run` divides two cores among them. It is killed, and
        a second one takes over; etcd stands still for 30 s; one job is killed with all its processes, and started again.
fcfs    The same jobs, the same killed job, without the other faults: the policy `as-requested`, with as many workers as a job
        may have, first come first served. Once with two workers for each job, once with one.

The last line has the sum of completion times, ours over that of first come first served with two workers, the numbers of jobs
that have finished and were submitted, the same ratio for one worker, and the longest time for which there were more workers
than cores.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from cluster_pool import Arrival, Ended, PoolOfJobs
from jobs import Workspace, describe_machine, result_line

CORES = 2
END_TIMEOUT_S = 900.0
JOBS = (
    Arrival("long", 0.0, 9000),
    Arrival("short", 15.0, 800),
    Arrival("medium", 25.0, 1500),
    Arrival("late", 60.0, 1200),
)
"""Jobs with their steps; a step takes some 30 ms on one idle core. As in traces of clusters, one job is most of the work."""


@dataclass
class Course:
    """One run of all jobs: the times of its faults, and its events."""

    pool: PoolOfJobs
    arrivals: Sequence[Arrival]
    faults: list[tuple[float, str, Callable[[], None]]] = field(default_factory=list)

    def run(self) -> list[Ended]:
        """Submit the jobs at their times, cause the faults at theirs, and wait for all ends."""
        began = time.monotonic()
        events = [(a.at_s, f"{a.name} is submitted", lambda a=a: self.pool.submit(a)) for a in self.arrivals]
        for at_s, what, act in sorted([*events, *self.faults], key=lambda event: event[0]):
            left_s = began + at_s - time.monotonic()
            if left_s > 0:
                time.sleep(left_s)
            print(f"  {time.monotonic() - began:5.0f} s: {what}; workers {self.pool.workers()}", flush=True)
            act()
        seen = 0

        def are_over() -> bool:
            nonlocal seen
            for end in (ends := self.pool.ended())[seen:]:
                text = f"{end.name} has ended with code {end.code} after {end.jct_s:.0f} s"
                print(f"  {time.monotonic() - began:5.0f} s: {text}; workers {self.pool.workers()}", flush=True)
            seen = len(ends)
            return seen == len(self.arrivals)

        self.pool.wait_for("the end of all jobs", are_over, END_TIMEOUT_S)
        return self.pool.ended()


def kill_job(pool: PoolOfJobs, name: str) -> None:
    """Kill a job's `dlrover run`, with which its nodes end, and start the job again."""
    job = pool.jobs[name]
    if job.process.poll() is None:
        job.process.kill()
        job.process.wait()
        pool.submit(job.arrival)


def measure(
    space: Workspace, name: str, arrivals: Sequence[Arrival], policy: str, with_faults: bool
) -> tuple[list[Ended], float]:
    """Run all jobs under a policy. Return their ends, and the longest time with more workers than cores."""
    print(f"{name}: policy {policy}", flush=True)
    etcd = space.etcd()
    with PoolOfJobs(space.folder / name, etcd.endpoint, CORES) as pool:
        brain = pool.start_brain(policy)
        faults: list[tuple[float, str, Callable[[], None]]] = [(35.0, "medium is killed", lambda: kill_job(pool, "medium"))]
        if with_faults:
            pool.start_brain(policy)  # stands by
            pid = etcd.pid
            assert pid is not None

            def kill_brain() -> None:
                brain.kill()
                brain.wait()

            faults += [
                (20.0, "the brain is killed", kill_brain),
                (70.0, "etcd stands still", lambda: os.kill(pid, signal.SIGSTOP)),
                (100.0, "etcd goes on", lambda: os.kill(pid, signal.SIGCONT)),
            ]
        ends = Course(pool, arrivals, faults).run()
        return ends, pool.worst_excess_s


def real(scale: float = 1.0, quick: bool = False) -> dict[str, float | int]:
    """Run all jobs under each policy, print their events, and return the figures of the last line.

    Args:
        scale: factor on the steps of all jobs.
        quick: without first come first served with one worker.
    """
    arrivals = [replace(job, steps=int(job.steps * scale)) for job in JOBS]
    results: dict[str, tuple[list[Ended], float]] = {}
    with Workspace("cluster") as space:
        results["jct"] = measure(space, "jct", arrivals, "jct", with_faults=True)
        rigid = [replace(job, workers=str(CORES)) for job in arrivals]
        results["fcfs"] = measure(space, "fcfs", rigid, "as-requested", with_faults=False)
        if not quick:
            alone = [replace(job, workers="1") for job in arrivals]
            results["fcfs-1"] = measure(space, "fcfs-1", alone, "as-requested", with_faults=False)
    sums = {name: sum(end.jct_s for end in ends) for name, (ends, _) in results.items()}
    for name, (ends, excess_s) in results.items():
        each = ", ".join(f"{end.name} {end.jct_s:.0f} s (code {end.code})" for end in ends)
        print(f"{name}: {each}; sum {sums[name]:.0f} s; {excess_s:.1f} s with too many workers")
    ends, excess_s = results["jct"]
    figures: dict[str, float | int] = {
        "jct_ratio": sums["jct"] / sums["fcfs"],
        "finished": sum(end.code == 0 for end in ends),
        "of": len(arrivals),
    }
    if "fcfs-1" in sums:
        figures["jct_ratio_1"] = sums["jct"] / sums["fcfs-1"]
    return figures | {"excess_s": excess_s}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the steps of all jobs")
    parser.add_argument("--quick", action="store_true", help="without first come first served with one worker")
    options = parser.parse_args()
    print(describe_machine())
    print(result_line(real(options.scale, options.quick)))


if __name__ == "__main__":
    main()
