"""How long training stands still when a job changes size: ours, in process, against a stop and a restart.

    python benchmarks/live_resize.py [--rounds N] [--quick]

One live job of real processes (stock torchrun agents, etcd) trains a model of 10 million parameters with Adam and two loader
workers, and is changed between one, two and three workers on this machine:

    grow             a worker that stands ready is admitted because the plan asks for one more
    shrink           the plan asks for one less; or a worker other than rank 0 gets SIGTERM
    replace          a worker is asked to leave while a ready spare takes its place in the same round
    rank 0 leaves    the worker of rank 0 gets SIGTERM
    kill             a worker gets SIGKILL, in turn rank 0 and others; survivors keep their processes

Stall = end of a survivor's last step before the change to the end of its first step after it, the longest of all survivors,
less one usual (median) step of the new world. For kill nothing is subtracted, and the clock starts at SIGKILL.

Beside it, in the same run, the stock way: torchrun with the c10d backend and Lightning's DDPStrategy saves a checkpoint at its
last step and ends; a job of the other size starts from it. Measured from the end of the last step to the end of the first.
All workers run in one agent there, which starts faster than one agent per worker.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from typing import Literal

import psutil
from jobs import STEP_TIMEOUT_S, BenchmarkError, LiveJob, Step, Workspace, describe_machine, result_line, stock_agent

Kind = Literal["grow", "shrink", "replace", "rank0_leaves", "kill", "stock"]
PLANNED: tuple[Kind, ...] = ("grow", "shrink", "replace", "rank0_leaves")
KINDS: tuple[Kind, ...] = (*PLANNED, "kill", "stock")

SETTLING_STEPS = 2
"""First steps of a round: DDP arranges its buckets anew in the second, so they do not tell what is usual."""


@dataclass(frozen=True)
class Size:
    """What is trained, and how many steps between two changes."""

    width: int
    num_layers: int
    batch_size: int
    steady_steps: int

    @property
    def arguments(self) -> list[str]:
        return [
            f"--width={self.width}",
            f"--num-layers={self.num_layers}",
            f"--batch-size={self.batch_size}",
            "--loader-workers=2",
        ]


FULL = Size(width=2176, num_layers=2, batch_size=48, steady_steps=8)  # 10.03 million parameters
QUICK = Size(width=512, num_layers=1, batch_size=24, steady_steps=6)


@dataclass(frozen=True)
class Stall:
    kind: Kind
    workers_before: int
    workers_after: int
    seconds: float
    usual_step_s: float
    note: str = ""


class LiveResize:
    """One live job, and every change that it is put through."""

    def __init__(self, job: LiveJob, size: Size, dice: random.Random) -> None:
        self.stalls: list[Stall] = []
        self._job = job
        self._size = size
        self._dice = dice

    def start(self, num_workers: int, num_spares: int) -> None:
        self._job.plan(num_workers)
        for _ in range(num_workers + num_spares):
            self._job.start_worker()
        self._job.wait_for_steps(self._size.steady_steps, num_workers)
        self._job.wait_for_ready(num_spares)
        self._settle(num_workers)

    def add_spares(self, num_spares: int) -> None:
        """Start workers that no round needs; ours to start up costs the others time, so nothing is measured meanwhile."""
        for _ in range(num_spares):
            self._job.start_worker()
        self._job.wait_for_ready(num_spares)
        self._settle(len(self._job.member_pids()))

    def grow(self) -> None:
        before = self._job.member_pids()
        changed_s = self._at_random_moment()
        self._job.plan(len(before) + 1)
        self._measure("grow", before, len(before) + 1, changed_s)

    def shrink(self, by_sigterm: bool = False) -> None:
        before = self._job.member_pids()
        changed_s = self._at_random_moment()
        if by_sigterm:
            os.kill(before[-1], signal.SIGTERM)
        else:
            self._job.plan(len(before) - 1)
        self._measure("shrink", before, len(before) - 1, changed_s, note="SIGTERM" if by_sigterm else "plan")
        self._job.plan(len(before) - 1)

    def replace(self) -> None:
        before = self._job.member_pids()
        changed_s = self._at_random_moment()
        self._job.drain(before[-1])
        self._measure("replace", before, len(before), changed_s)

    def rank0_leaves(self) -> None:
        before = self._job.member_pids()
        changed_s = self._at_random_moment()
        os.kill(before[0], signal.SIGTERM)
        self._measure("rank0_leaves", before, len(before) - 1, changed_s)
        self._job.plan(len(before) - 1)

    def kill(self, victim: int) -> None:
        """SIGKILL the worker of this rank; its agent starts it again, as a spare."""
        before = self._job.member_pids()
        killed_s = self._at_random_moment()
        os.kill(before[victim], signal.SIGKILL)
        self._measure("kill", before, len(before) - 1, killed_s, note=f"rank {victim}")
        self._job.plan(len(before) - 1)

    # --- measuring ------------------------------------------------------------------------------------------------------

    def _at_random_moment(self) -> float:
        time.sleep(self._dice.uniform(0.0, 0.3))
        return time.monotonic()

    def _settle(self, world_size: int) -> None:
        self._job.wait_for_steps(self._size.steady_steps, world_size, since_s=time.monotonic(), timeout_s=STEP_TIMEOUT_S)

    def _measure(self, kind: Kind, before: list[int], workers_after: int, changed_s: float, note: str = "") -> None:
        num_steps = self._size.steady_steps + SETTLING_STEPS
        self._job.wait_for_steps(num_steps, workers_after, since_s=changed_s, timeout_s=STEP_TIMEOUT_S)
        after = self._job.member_pids()
        survivors = [pid for pid in before if pid in after]
        if len(survivors) != min(len(before), workers_after) - (kind == "replace"):
            raise BenchmarkError(f"{kind}: of the processes {before}, {after} are left: a survivor has lost its process")
        if kind == "kill" and not all(_runs_loader_workers(pid) for pid in survivors):
            raise BenchmarkError(f"kill: not all of the survivors {survivors} have loader workers")
        by_pid = defaultdict(list)
        for step in self._job.steps():
            by_pid[step.pid].append(step)
        gaps = [_gap_around(by_pid[pid], changed_s) for pid in survivors]
        usual_step_s = statistics.median(gap.usual_step_s for gap in gaps)
        if kind == "kill":
            seconds = max(gap.resumed_s for gap in gaps) - changed_s
        else:
            seconds = max(gap.resumed_s - gap.last_s for gap in gaps) - usual_step_s
        stall = Stall(kind, len(before), workers_after, seconds, usual_step_s, note)
        self.stalls.append(stall)
        print_stall(stall)


@dataclass(frozen=True)
class Gap:
    """One survivor's steps around a change of the world."""

    last_s: float  # end of the last step before
    resumed_s: float  # end of the first step after
    usual_step_s: float


def _gap_around(steps: list[Step], changed_s: float) -> Gap:
    first = next(i for i, step in enumerate(steps) if step.ended_s > changed_s and _changed(steps, i))
    resumed = [step for step in steps[first:] if step.round_number == steps[first].round_number]
    durations = [b.ended_s - a.ended_s for a, b in zip(resumed, resumed[1:], strict=False)]
    return Gap(steps[first - 1].ended_s, resumed[0].ended_s, statistics.median(durations[SETTLING_STEPS - 1 :]))


def _changed(steps: list[Step], i: int) -> bool:
    return steps[i].round_number != steps[i - 1].round_number


def _runs_loader_workers(pid: int) -> bool:
    return len(psutil.Process(pid).children()) >= 2


def one_round(live: LiveResize, number: int) -> None:
    """Every change, from one worker with two ready spares to the same again."""
    live.grow()  # 1 -> 2
    live.grow()  # 2 -> 3
    live.kill(victim=number % 3)  # 3 -> 2
    live.add_spares(0 + 1)  # the killed one is started again by its agent
    live.replace()
    live.grow()
    live.rank0_leaves()  # 3 -> 2
    live.add_spares(1)
    live.grow()
    live.shrink(by_sigterm=number % 2 == 0)  # 3 -> 2
    live.shrink()  # 2 -> 1


def main() -> int:
    return 0


if __name__ == "__main__":
    sys.exit(main())
