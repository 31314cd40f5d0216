"""Time for which training stalls when a job changes size: our package, in process, against a stop and a restart.

    python benchmarks/live_resize.py [--data map|stream] [--device cpu|cuda] [--backend NAME] [--rounds N] [--quick]

One live job of real processes (stock torchrun agents, etcd) trains a model of 10 million parameters with Adam and two loader
workers, and is changed between one, two and three workers on this machine:

    grow             a ready worker is admitted because the plan asks for one more
    shrink           the plan asks for one less; or a worker other than rank 0 gets SIGTERM
    replace          a worker is asked to leave while a ready spare takes its place in the same round
    rank 0 leaves    the worker of rank 0 gets SIGTERM
    kill             a worker gets SIGKILL, in turn rank 0 and others; survivors keep their processes

Stall = end of a survivor's last step before the change to the end of its first step after it, the longest of all survivors,
less one usual (median) step of the new world. For kill nothing is subtracted, and the clock starts at SIGKILL.

The same run also measures the stock way: torchrun with the c10d backend and Lightning's DDPStrategy saves a checkpoint at its
last step and ends, and a job of the other size starts from it. Its time runs from the end of the last step to the end of the
first. All its workers run in one agent, which starts faster than one agent per worker. On a GPU, which all workers share, each
worker has an agent of its own, as NCCL takes each agent for a host of its own.

With `--data stream` the live job reads its rows from Parquet files as a stream. A second live job with map data then takes
turns with it. `stream_over_map` is the sum of the median stalls of planned changes, divided by the same sum of that job.
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
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from jobs import (
    START_TIMEOUT_S,
    STEP_TIMEOUT_S,
    BenchmarkError,
    LiveJob,
    Step,
    Workspace,
    add_device_options,
    describe_machine,
    device_arguments,
    loader_workers_of,
    result_line,
)
from training import write_rows

from lightning_dlrover.rdzv.etcd.server import EmbeddedEtcd

Kind = Literal["grow", "shrink", "replace", "rank0_leaves", "kill", "stock"]
PLANNED: tuple[Kind, ...] = ("grow", "shrink", "replace", "rank0_leaves")
KINDS: tuple[Kind, ...] = (*PLANNED, "kill", "stock")

NUM_LOADER_WORKERS = 2
PARQUET = "rows"
NUM_STREAMED = 100_000
"""Rows in Parquet files, as many as in the map data."""

SETTLING_STEPS = 2
"""Number of first steps of a round that are ignored: DDP rearranges its buckets in the second one."""


@dataclass(frozen=True)
class Size:
    """Size of the model, and number of steps between two changes."""

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
            f"--loader-workers={NUM_LOADER_WORKERS}",
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

    def __str__(self) -> str:
        return (
            f"{self.kind:14}{self.workers_before} -> {self.workers_after}  {self.seconds:8.3f} s"
            f"  (usual step {self.usual_step_s:.3f} s{', ' if self.note else ''}{self.note})"
        )


@dataclass(frozen=True)
class Change:
    """A requested change of the world."""

    kind: Kind
    round_number: int  # number of the round that the change ends
    before: list[int]  # pids in rank order
    workers_after: int
    asked_s: float
    note: str = ""

    @property
    def num_survivors(self) -> int:
        return min(len(self.before), self.workers_after) - (self.kind == "replace")

    def steps_after(self, steps: list[Step]) -> list[Step]:
        return [s for s in steps if s.round_number > self.round_number and s.world_size == self.workers_after]

    def stall(self, survivors: list[list[Step]]) -> Stall:
        """Longest time without a step of a survivor.

        Args:
            survivors: all steps of each survivor.
        """
        resumed = [self.steps_after(steps) for steps in survivors]
        durations = [b.ended_s - a.ended_s for steps in resumed for a, b in pairwise(steps[SETTLING_STEPS - 1 :])]
        usual_step_s = statistics.median(durations)
        if self.kind == "kill":
            seconds = max(steps[0].ended_s for steps in resumed) - self.asked_s
        else:
            last = [[s for s in steps if s.round_number == self.round_number][-1] for steps in survivors]
            seconds = max(new[0].ended_s - old.ended_s for old, new in zip(last, resumed, strict=True)) - usual_step_s
        return Stall(self.kind, len(self.before), self.workers_after, seconds, usual_step_s, self.note)


Data = Literal["map", "stream"]


class LiveResize:
    """One live job and all its changes."""

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
        self.await_spares(num_spares)

    def start_spare(self) -> None:
        """Start one more worker, which no round needs yet."""
        self._job.start_worker()

    def await_spares(self, num_spares: int) -> None:
        """Wait until spares are ready and the others train undisturbed again: two workers may share a core with them."""
        self._job.wait_for_ready(num_spares)
        members = self._job.member_pids()
        self._job.wait_for_steps(self._size.steady_steps, len(members), since_s=time.monotonic(), timeout_s=STEP_TIMEOUT_S)

    # --- changes --------------------------------------------------------------------------------------------------------

    def grow(self) -> None:
        change = self._begin("grow", 1)
        self._job.plan(change.workers_after)
        self._measure(change)

    def shrink(self, by_sigterm: bool = False) -> None:
        change = self._begin("shrink", -1, "SIGTERM" if by_sigterm else "plan")
        if by_sigterm:
            os.kill(change.before[-1], signal.SIGTERM)
        else:
            self._job.plan(change.workers_after)
        self._measure(change)
        self._job.plan(change.workers_after)

    def replace(self) -> None:
        change = self._begin("replace", 0)
        self._job.drain(change.before[-1])
        self._measure(change)

    def rank0_leaves(self) -> None:
        change = self._begin("rank0_leaves", -1)
        os.kill(change.before[0], signal.SIGTERM)
        self._measure(change)
        self._job.plan(change.workers_after)

    def kill(self, victim: int) -> None:
        """SIGKILL the worker of this rank. Its agent restarts it as a spare."""
        change = self._begin("kill", -1, f"rank {victim}")
        os.kill(change.before[victim], signal.SIGKILL)
        self._await_steps(change, 1)
        self._job.plan(change.workers_after)  # keeps it from rejoining before enough steps are measured
        self._measure(change)

    # --- measuring ------------------------------------------------------------------------------------------------------

    def _begin(self, kind: Kind, num_more: int, note: str = "") -> Change:
        view = self._job.view()
        assert view.round is not None
        before = self._job.member_pids()
        time.sleep(self._dice.uniform(0.0, 0.3))  # a change comes at any moment of a step
        return Change(kind, view.round.number, before, len(before) + num_more, time.monotonic(), note)

    def _await_steps(self, change: Change, num_steps: int) -> dict[int, list[Step]]:
        """All steps of every worker, once one has made `num_steps` after the change."""

        def look() -> dict[int, list[Step]] | None:
            by_pid: dict[int, list[Step]] = defaultdict(list)
            for step in self._job.steps():
                by_pid[step.pid].append(step)
            made = max(len(change.steps_after(steps)) for steps in by_pid.values())
            return by_pid if made >= num_steps else None

        what = f"{num_steps} steps of {change.workers_after} workers after {change.kind}"
        return self._job.wait_for(what, look, START_TIMEOUT_S)  # a new node may have to start first

    def _measure(self, change: Change) -> None:
        by_pid = self._await_steps(change, self._size.steady_steps + SETTLING_STEPS)
        after = self._job.member_pids()
        survivors = [pid for pid in change.before if pid in after]
        if len(survivors) != change.num_survivors:
            raise BenchmarkError(f"{change.kind}: of the processes {change.before} only {survivors} are left in {after}")
        if change.kind == "kill" and any(len(loader_workers_of(pid)) < NUM_LOADER_WORKERS for pid in survivors):
            raise BenchmarkError(f"kill: not all of the survivors {survivors} have loader workers")
        stall = change.stall([by_pid[pid] for pid in survivors])
        self.stalls.append(stall)
        print(stall, flush=True)


def every_change(live: LiveResize, number: int) -> None:
    """Run all changes between one, two and three workers, starting and ending with one."""
    live.start(num_workers=1, num_spares=2)
    live.grow()  # 1 -> 2
    live.grow()  # 2 -> 3
    live.kill(victim=number % 3)  # 3 -> 2
    live.await_spares(1)  # wait for the killed worker
    live.replace()
    live.start_spare()
    live.await_spares(1)
    live.grow()
    live.rank0_leaves()  # 3 -> 2
    live.start_spare()
    live.await_spares(1)
    live.grow()
    live.shrink(by_sigterm=number % 2 == 0)  # 3 -> 2
    live.shrink()  # 2 -> 1


def every_kind_once(live: LiveResize) -> None:
    live.start(num_workers=2, num_spares=1)
    live.grow()
    live.kill(victim=1)
    live.start_spare()
    live.await_spares(2)
    live.replace()
    live.grow()
    live.rank0_leaves()
    live.shrink()


def stock_restarts(space: Workspace, name: str, size: Size, worlds: list[int], options: argparse.Namespace) -> list[Stall]:
    """Train with `worlds[0]` workers, stop, resume from the checkpoint with `worlds[1]`, and so on."""
    stalls: list[Stall] = []
    arguments = ["--strategy=ddp", f"--checkpoint={space.folder / name}.ckpt", *size.arguments]
    arguments += device_arguments(options)
    with space.job(name, arguments) as job:
        for i, world_size in enumerate(worlds):
            stopped_at, max_steps = i * size.steady_steps, (i + 1) * size.steady_steps
            job.start_stock(world_size, options.device, [f"--max-steps={max_steps}"])
            if any(codes := job.wait_until_ended(START_TIMEOUT_S)):
                raise BenchmarkError(f"job {name}: the stock torchrun with {world_size} workers ended with {codes}")
            if i > 0:
                ended_s = {n: max(s.ended_s for s in job.steps() if s.number == n) for n in range(stopped_at, max_steps + 1)}
                usual_step_s = statistics.median(b - a for a, b in pairwise(list(ended_s.values())[SETTLING_STEPS:]))
                seconds = ended_s[stopped_at + 1] - ended_s[stopped_at]
                stalls.append(Stall("stock", worlds[i - 1], world_size, seconds, usual_step_s))
                print(stalls[-1], flush=True)
    return stalls


def table(stalls: list[Stall]) -> str:
    kinds = [kind for kind in KINDS if any(s.kind == kind for s in stalls)]
    lines = [f"{'change':14}{'workers':10}{'median s':>10}{'min s':>8}{'max s':>8}{'n':>4}{'usual step s':>14}"]
    for kind in kinds:
        of_kind = [s for s in stalls if s.kind == kind]
        ways = sorted({(s.workers_before, s.workers_after) for s in of_kind})
        groups = [(f"{a} -> {b}", [s for s in of_kind if (s.workers_before, s.workers_after) == (a, b)]) for a, b in ways]
        for label, group in [("all", of_kind), *(groups if len(groups) > 1 else [])]:
            seconds = [s.seconds for s in group]
            lines.append(
                f"{kind if label == 'all' else '':14}{label if len(groups) > 1 else groups[0][0]:10}"
                f"{statistics.median(seconds):10.3f}{min(seconds):8.3f}{max(seconds):8.3f}{len(seconds):4}"
                f"{statistics.median(s.usual_step_s for s in group):14.3f}"
            )
    return "\n".join(lines)


def live_stalls(
    space: Workspace, etcd: EmbeddedEtcd, number: int, data: Data, size: Size, dice: random.Random, options: argparse.Namespace
) -> list[Stall]:
    """Run all changes of one live job."""
    name = f"live-{data}-{number}"
    files = [f"--parquet={space.folder / PARQUET}"] if data == "stream" else []
    print(f"{name}:", flush=True)
    with space.live_job(name, etcd, "1:8", [*size.arguments, *files, *device_arguments(options)]) as job:
        live = LiveResize(job, size, dice)
        if options.quick:
            every_kind_once(live)
        else:
            every_change(live, number)
    return live.stalls


def medians_of(stalls: list[Stall], kinds: Sequence[Kind]) -> dict[Kind, float]:
    return {kind: statistics.median(s.seconds for s in stalls if s.kind == kind) for kind in kinds}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", choices=("map", "stream"), default="map", help="where the live job's rows come from")
    add_device_options(parser)
    parser.add_argument("--rounds", type=int, default=5, help="repetitions of each change")
    parser.add_argument("--quick", action="store_true", help="every kind of change once, with a small model, under 60 s")
    parser.add_argument("--without-stock", action="store_true", help="leave out the restarts of stock jobs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", action="store_true", help="keep logs and records")
    options = parser.parse_args()
    dice = random.Random(options.seed)
    stalls: list[Stall] = []
    map_stalls: list[Stall] = []
    print(describe_machine(), flush=True)
    with Workspace("live-resize", options.keep) as space:
        etcd = space.etcd()
        size = QUICK if options.quick else FULL
        if options.data == "stream":
            write_rows(space.folder / PARQUET, NUM_STREAMED)
        for number in range(1 if options.quick else options.rounds):
            # A new job every time, so that all ways alternate under the same load of the machine.
            if options.data == "stream":
                map_stalls += live_stalls(space, etcd, number, "map", size, dice, options)
            stalls += live_stalls(space, etcd, number, options.data, size, dice, options)
            worlds = [1, 2] if options.quick else [2, 3, 2] if number % 2 else [1, 2, 1]
            if not options.without_stock:
                stalls += stock_restarts(space, f"stock-{number}", size, worlds, options)
    print(table(stalls))
    medians = medians_of(stalls, [kind for kind in KINDS if kind != "stock" or not options.without_stock])
    values: dict[str, float | int] = {f"{kind}_s": seconds for kind, seconds in medians.items()}
    if not options.without_stock:
        values["ratio"] = medians["stock"] / max(medians[kind] for kind in PLANNED)
    if map_stalls:
        print(f"the same with map data:\n{table(map_stalls)}")
        of_map = medians_of(map_stalls, PLANNED)
        values["stream_over_map"] = sum(medians[kind] for kind in PLANNED) / sum(of_map.values())
    print(result_line(values))
    return 0


if __name__ == "__main__":
    sys.exit(main())
