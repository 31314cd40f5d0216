"""Detection and replacement of a slow worker: one of three is stopped for half of the time.

    python benchmarks/stragglers.py                        # 3 jobs with a slow worker, 10 without
    python benchmarks/stragglers.py --slow 1 --quiet 0

`dlrover run` runs every job and starts the new worker. The slow one, another in every job, is stopped and continued a hundred
times a second, as a quota of half a core would do. Its replacement is left alone. The last line holds the steps until the slow
worker was named (the worst job), the throughput after its replacement over that before it became slow (the worst job), and the
number of workers that were named in jobs without a slow one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Iterator

from jobs import BenchmarkError, ControlledJob, Workspace, describe_machine, result_line

from lightning_dlrover.rdzv.job.records import EventRecord

NUM_WORKERS = 3
NUM_MEASURED = 120  # steps of a measured rate
NUM_SETTLED = 20  # steps before the measurement: the first ones of a process are slower
NAMING_TIMEOUT_S = 90.0
REPLACING_TIMEOUT_S = 90.0
PULSE_S = 0.005  # seconds of each stop, and of each run between two stops


WORK = {
    # Simulates a device per worker: most of a step needs no core.
    "device": ["--step-floor-s", "0.1", "--width", "256", "--batch-size", "64"],
    # All workers compute on the available cores. With fewer cores than workers, the others use the time that one leaves, so
    # stopping it for half of the time costs the job less than half.
    "cpu": ["--width", "1024", "--num-layers", "2", "--batch-size", "256"],
}


class Pulses:
    """Stops a process for half of the time, until it ends or the block does."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Pulses:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._thread.join()

    def _run(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            while not self._ending.is_set():
                started = time.monotonic()
                os.kill(self._pid, signal.SIGSTOP)
                time.sleep(PULSE_S)
                os.kill(self._pid, signal.SIGCONT)
                time.sleep(time.monotonic() - started)  # on a busy machine the first sleep may have been longer
            os.kill(self._pid, signal.SIGCONT)


@contextlib.contextmanager
def _job(workspace: Workspace, endpoint: str, name: str, max_steps: int, work: str) -> Iterator[ControlledJob]:
    # A plan for other settings would change the rate, too.
    arguments = [*WORK[work], "--max-steps", str(max_steps), "--profiled", "--plan-every-s", "0"]
    with workspace.controlled_job(name, endpoint, arguments) as job:
        job.start(NUM_WORKERS, NUM_WORKERS)
        yield job


def named(job: ControlledJob) -> list[EventRecord]:
    return job.events("straggler")


def run_slow(workspace: Workspace, endpoint: str, index: int, work: str) -> tuple[int, float]:
    """Steps from the first pulse to the naming of the worker, and the share of the throughput that was recovered."""
    with _job(workspace, endpoint, f"slow{index}", 100_000, work) as job:
        job.wait_for_step(NUM_SETTLED + NUM_MEASURED)
        before = job.rate(job.newest_step() - NUM_MEASURED, NUM_MEASURED)
        view = job.view()
        victim = view.survivors[index % NUM_WORKERS]
        with Pulses(view.workers[victim].pid):
            slow_since = job.newest_step()
            event = job.wait_for("the slow worker's name", lambda: next(iter(named(job)), None), NAMING_TIMEOUT_S, 0.05)
            job.wait_for("its replacement", lambda: None if victim in job.view().survivors else True, REPLACING_TIMEOUT_S, 0.05)
        if event.data["worker_id"] != victim:
            raise BenchmarkError(f"{event.data['worker_id']} was named, {victim} is slow: {event.text}")
        replaced_at = job.newest_step()
        slow = job.rate(int(event.data["step"]), replaced_at - int(event.data["step"]))
        job.wait_for_step(replaced_at + NUM_SETTLED + NUM_MEASURED)
        after = job.rate(replaced_at + NUM_SETTLED, NUM_MEASURED)
        steps = int(event.data["step"]) - slow_since
        print(f"slow {index}: rank {event.data['global_rank']} named after {steps} steps: {event.text}")
        print(f"  {before:.2f} steps/s before, {slow:.2f} while it was slow, {after:.2f} with its replacement", flush=True)
        if len(named(job)) > 1:
            raise BenchmarkError(f"more were named: {[e.text for e in named(job)]}")
        return steps, after / before


def run_quiet(workspace: Workspace, endpoint: str, index: int, num_steps: int, work: str) -> int:
    """Number of times that a worker was named although none is slow."""
    with _job(workspace, endpoint, f"quiet{index}", num_steps, work) as job:
        codes = job.wait_until_ended(600.0)
        if any(codes):
            raise BenchmarkError(f"job {job.name} ended with {codes}")
        alarms = [event.text for event in named(job)]
        print(f"quiet {index}: {job.newest_step()} steps, {len(alarms)} named {json.dumps(alarms)}", flush=True)
        return len(alarms)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slow", type=int, default=3, help="jobs with a slow worker")
    parser.add_argument("--quiet", type=int, default=10, help="jobs without")
    parser.add_argument("--quiet-steps", type=int, default=200)
    parser.add_argument("--work", choices=WORK, default="device", help="what a step is made of (default device)")
    parser.add_argument("--quick", action="store_true", help="one job of either kind")
    parser.add_argument("--keep", action="store_true", help="do not remove logs and records")
    options = parser.parse_args()
    if options.quick:
        options.slow, options.quiet, options.quiet_steps = 1, 1, 60
    print(describe_machine(), flush=True)
    values: dict[str, float | int] = {}
    with Workspace("stragglers", options.keep) as workspace:
        endpoint = workspace.etcd().endpoint
        slow = [run_slow(workspace, endpoint, index, options.work) for index in range(options.slow)]
        if slow:
            values = {"named_steps": max(s for s, _ in slow), "recovered": min(r for _, r in slow)}
        if options.quiet:
            quiet = [run_quiet(workspace, endpoint, i, options.quiet_steps, options.work) for i in range(options.quiet)]
            values["false_alarms"] = sum(quiet)
    print(result_line(values))


if __name__ == "__main__":
    main()
