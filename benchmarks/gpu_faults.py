"""Whether a job whose workers share one GPU survives changes of its world over NCCL, and for how long they stop its steps.

    python benchmarks/gpu_faults.py [--device cuda|cpu] [--backend NAME] [--workers N...]

Each worker has an agent of its own, which is a host of its own to NCCL. A job of N workers goes through:

    grow     N-1 workers train, and one more joins
    kill     SIGKILL of the worker with the last rank; its agent starts another, which joins
    again    the same, so that rank 0 has lived through two losses
    kill0    SIGKILL of rank 0; its agent starts another, which joins
    leave    SIGTERM to rank 0, which hands over and ends with its agent

Then the others train to the last step. The pause of a change is the longest time between two steps of a worker that lived
through it. The last line has the pauses of each N in seconds, and sums over all jobs, which must be 0:

    lost_workers    workers that were gone after a change that did not concern them
    lost_steps      steps that no worker made, that one worker made twice, or that a later round began with once more
    unequal_steps   steps after which workers had different parameters

A job that stops on its way has `failed=1`, and the next one starts.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections import defaultdict
from itertools import pairwise

from jobs import BenchmarkError, LiveJob, Step, Workspace, add_device_options, describe_machine, device_arguments, result_line

from lightning_dlrover.rdzv.etcd.server import EmbeddedEtcd
from tests.support.processes import ends_of_logs

MAX_STEPS = 4000
CHANGE_TIMEOUT_S = 60.0  # longer than a stuck abort, which ends a worker
SETTLED_STEPS = 20
"""Number of steps of each worker before the next change."""


class Faults:
    """One job of `num_workers` workers, and what its changes cost."""

    def __init__(self, job: LiveJob, num_workers: int) -> None:
        self.pauses_s: dict[str, float] = {}
        self.lost_workers = 0
        self._job = job
        self._num_workers = num_workers
        self._members: list[int] = []  # process ids in rank order

    def run(self) -> None:
        num_workers = self._num_workers
        for _ in range(num_workers - 1):
            self._job.start_worker()
        self._settle(num_workers - 1, 0.0)
        self._change("grow", [], num_workers, starts_worker=True)
        self._change("kill", [(self._members[-1], signal.SIGKILL)], num_workers)
        self._change("again", [(self._members[-1], signal.SIGKILL)], num_workers)
        self._change("kill0", [(self._members[0], signal.SIGKILL)], num_workers)
        self._change("leave", [(self._members[0], signal.SIGTERM)], num_workers - 1)
        self._job.hurry()
        if any(codes := self._job.wait_until_ended(CHANGE_TIMEOUT_S)):
            raise BenchmarkError(f"agents ended with {codes}")

    def _change(self, name: str, signals: list[tuple[int, int]], num_after: int, starts_worker: bool = False) -> None:
        gone = {pid for pid, _ in signals}
        stay = [pid for pid in self._members if pid not in gone]
        began_s = time.monotonic()
        if starts_worker:
            self._job.start_worker()
        for pid, number in signals:
            os.kill(pid, number)
        self._settle(num_after, began_s)
        lost = [pid for pid in stay if pid not in self._members]
        self.lost_workers += len(lost)
        by_pid = steps_by_pid(self._job.steps())
        pauses = [b.ended_s - a.ended_s for pid in stay for a, b in pairwise(by_pid[pid]) if b.ended_s >= began_s]
        self.pauses_s[name] = max(pauses, default=float("nan"))
        print(f"{name:6} {len(stay) + len(gone)} -> {num_after} workers: pause {self.pauses_s[name]:.3f} s", end="", flush=True)
        print(f", workers lost: {lost}" if lost else "", flush=True)

    def _settle(self, num_workers: int, since_s: float) -> None:
        """Wait until a world of this size has made steps since then; the worker that starts last decides."""

        def look() -> bool | None:
            made: dict[tuple[int, int], list[Step]] = defaultdict(list)
            for step in self._job.steps():
                if step.ended_s > since_s and step.world_size == num_workers:
                    made[step.round_number, step.pid].append(step)
            newest = max((round_number for round_number, _ in made), default=0)
            of_newest = [steps for (round_number, _), steps in made.items() if round_number == newest]
            return True if sum(len(steps) >= SETTLED_STEPS for steps in of_newest) == num_workers else None

        what = f"{SETTLED_STEPS} steps of {num_workers} workers"
        self._job.wait_for(what, look, CHANGE_TIMEOUT_S, poll_s=0.02)
        self._members = self._job.member_pids()


def steps_by_pid(steps: list[Step]) -> dict[int, list[Step]]:
    found: dict[int, list[Step]] = defaultdict(list)
    for step in steps:
        found[step.pid].append(step)
    return found


def lost_steps(steps: list[Step]) -> int:
    """Number of steps that no worker made, that one worker made twice, or that a later round made once more.

    A worker that missed the last step of a round records it in the next one.
    """
    made: dict[int, set[int]] = defaultdict(set)  # numbers of steps by round
    for step in steps:
        made[step.round_number].add(step.number)
    numbers = set().union(*made.values())
    missing = max(numbers, default=0) - len(numbers)
    twice = sum(b.number <= a.number for own in steps_by_pid(steps).values() for a, b in pairwise(own))
    again = sum(max(0, max(made[a]) - min(made[b])) for a, b in pairwise(sorted(made)))
    return missing + twice + again


def unequal_steps(steps: list[Step]) -> int:
    """Number of steps after which not all workers had the same parameters."""
    digests: dict[int, set[str]] = defaultdict(set)
    for step in steps:
        digests[step.number].add(step.digest)
    return sum(len(found) > 1 for found in digests.values())


def faults_of(space: Workspace, etcd: EmbeddedEtcd, num_workers: int, options: argparse.Namespace) -> dict[str, float | int]:
    """Run one job; return its figures."""
    print(f"{num_workers} workers:", flush=True)
    arguments = [*device_arguments(options), "--digests", "--step-floor-s=0.03", "--batch-size=12", f"--max-steps={MAX_STEPS}"]
    failed = 0
    with space.live_job(f"faults-{num_workers}", etcd, f"1:{num_workers}", arguments) as job:
        job.environment["NCCL_DEBUG"] = "WARN"
        faults = Faults(job, num_workers)
        try:
            faults.run()
        except BenchmarkError as error:
            failed = 1
            space.keep()
            job.save_evidence()
            print(ends_of_logs(job.folder, 60), f"FAILED: {error}", sep="\n", flush=True)
        steps = job.steps()
    figures: dict[str, float | int] = {f"{name}_{num_workers}_s": seconds for name, seconds in faults.pauses_s.items()}
    figures |= {"failed": failed, "lost_workers": faults.lost_workers}
    return figures | {"lost_steps": lost_steps(steps), "unequal_steps": unequal_steps(steps)}


SUMMED = ("failed", "lost_workers", "lost_steps", "unequal_steps")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_device_options(parser)
    parser.set_defaults(device="cuda")
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 3], help="sizes of the jobs (default: 2 3)")
    parser.add_argument("--keep", action="store_true", help="keep logs and records")
    options = parser.parse_args()
    if min(options.workers) < 2:
        parser.error("--workers: a job needs at least 2 workers, of which one can be lost")
    print(describe_machine(), flush=True)
    totals: dict[str, float | int] = dict.fromkeys(SUMMED, 0)
    with Workspace("gpu-faults", options.keep) as space:
        etcd = space.etcd()
        for num_workers in options.workers:
            figures = faults_of(space, etcd, num_workers, options)
            totals |= {name: totals.get(name, 0) + value for name, value in figures.items()}
            print(result_line(totals), flush=True)
    return 1 if any(totals[name] for name in SUMMED) else 0


if __name__ == "__main__":
    sys.exit(main())
