"""Shares by speed: two workers, one at half speed, and two equal ones, each with shares by speed and with equal shares.

    python benchmarks/uneven.py                      # 3 rounds of 4 jobs
    python benchmarks/uneven.py --work device        # simulates a device per worker: steps take no core
    python benchmarks/uneven.py --quick

The slow worker is stopped and continued a hundred times a second, as a quota of half a core would do. Nothing can replace it:
the job has no controller. `gain` is the throughput with shares by speed over that with equal shares, `even` is the same ratio
where no worker is slow; both are ratios of medians over the rounds. With shares proportional to speed, `gain` can be 1.5 at
most.
"""

from __future__ import annotations

import argparse
import contextlib
from itertools import pairwise
from statistics import median

from jobs import STEP_TIMEOUT_S, LiveJob, Workspace, describe_machine, result_line
from stragglers import Pulses

SETTLED_STEPS = 60
"""Steps before the measurement: the workers have to find their shares, and the first steps of a process are slower."""

WORK = {
    "cpu": ["--width=1024", "--num-layers=2", "--batch-size=256"],
    "device": ["--width=64", "--batch-size=32", "--sample-s=0.0015"],
}


def step_s(workspace: Workspace, endpoint: str, name: str, shares: str, is_slow: bool, work: str, num_steps: int) -> float:
    """Run one job of two workers; return the median time of its steps, in seconds."""
    with workspace.live_job(name, endpoint, "2:2", [*WORK[work], f"--shares={shares}"]) as job:
        job.environment["OMP_NUM_THREADS"] = "1"
        job.start_worker()
        job.start_worker()
        wait_for_step(job, 5)
        with contextlib.ExitStack() as stack:
            if is_slow:
                stack.enter_context(Pulses(job.member_pids()[1]))
            first = newest_step(job) + SETTLED_STEPS
            wait_for_step(job, first + num_steps)
        ended = sorted({step.number: step.ended_s for step in job.steps()}.items())
        times = [ended_s for number, ended_s in ended if first <= number <= first + num_steps]
        changes = [event.text for event in job.events("shares")]
        found = median(after - before for before, after in pairwise(times))
        print(f"  {name:22}{1e3 * found:8.1f} ms a step  {'; '.join(changes)}", flush=True)
        return found


def newest_step(job: LiveJob) -> int:
    return max((step.number for step in job.steps()), default=0)


def wait_for_step(job: LiveJob, number: int) -> None:
    job.wait_for(f"step {number}", lambda: True if newest_step(job) >= number else None, 3 * STEP_TIMEOUT_S, poll_s=0.05)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="jobs of each kind (default: 3)")
    parser.add_argument("--steps", type=int, default=150, help="steps that are measured in each job (default: 150)")
    parser.add_argument("--work", choices=WORK, default="cpu", help="what a step is made of (default: cpu)")
    parser.add_argument("--quick", action="store_true", help="one round of short jobs")
    parser.add_argument("--keep", action="store_true", help="do not remove logs and records")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.steps = 1, 40
    print(describe_machine(), flush=True)
    times: dict[tuple[bool, str], list[float]] = {}
    with Workspace("uneven", options.keep) as workspace:
        endpoint = workspace.etcd().endpoint
        for number in range(options.rounds):
            print(f"round {number + 1}")
            for is_slow in (True, False):
                for shares in ("equal", "by-speed"):
                    name = f"{'slow' if is_slow else 'even'}-{shares}-{number}"
                    found = step_s(workspace, endpoint, name, shares, is_slow, options.work, options.steps)
                    times.setdefault((is_slow, shares), []).append(found)
    ratios = {is_slow: median(times[is_slow, "equal"]) / median(times[is_slow, "by-speed"]) for is_slow in (True, False)}
    print(result_line({"gain": ratios[True], "even": ratios[False]}))


if __name__ == "__main__":
    main()
