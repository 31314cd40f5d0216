"""Cost of snapshots in memory for training with sharded embedding tables.

    python benchmarks/snapshot.py [--cycles N] [--mib 1024] [--folder FOLDER] [--quick]

Two live jobs of two workers are alive at once: one takes snapshots at the default interval, the other none. They train in
turn, a few seconds each, so that other load on the machine affects both alike. The waiting one is stopped by SIGSTOP. A cycle
has as many turns as fill the interval between two snapshots, so each cycle holds a snapshot of the first job.

    throughput_ratio  steps with snapshots over steps without, by the second: the median over the cycles
    stall_ratio       seconds for which the training thread copies, the slowest worker's, over those of `torch.save` of as much
                      state by as many processes into a folder on disk in the same run; beside it `torch.distributed.checkpoint`
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from jobs import START_TIMEOUT_S, BenchmarkError, LiveJob, Step, Workspace, describe_machine, result_line, stock_agent
from tables_training import SaveLine, SnapshotLine, Tables, lines_in, snapshot_memory

from lightning_dlrover.rdzv.etcd.server import EmbeddedEtcd
from lightning_dlrover.tables.snapshots import SnapshotConfig

SCRIPT = Path(__file__).resolve().parent / "tables_training.py"
NUM_WORKERS = 2
WARM_UP_SNAPSHOTS = 2
"""Number of ignored first snapshots, each of which touches memory for the first time."""

TURN_S = 3.0


@dataclass
class Cycle:
    """Results of one job in its turns."""

    num_steps: int = 0
    seconds: float = 0.0

    @property
    def steps_per_s(self) -> float:
        return self.num_steps / self.seconds


class Contestant:
    """One job that makes steps only during its turn."""

    def __init__(self, name: str, job: LiveJob) -> None:
        self.name = name
        self.cycles: list[Cycle] = []
        self._job = job
        self._pids: list[int] = []

    def start(self, num_snapshots: int) -> None:
        """Train until `num_snapshots` were taken, then stop."""
        self._job.plan(NUM_WORKERS)
        for _ in range(NUM_WORKERS):
            self._job.start_worker()
        self._job.wait_for_steps(20, NUM_WORKERS)
        self._pids = self._job.member_pids()
        what = f"{num_snapshots} snapshots of job {self.name}"
        self._job.wait_for(what, lambda: True if len(self.snapshots()) >= num_snapshots else None, START_TIMEOUT_S, poll_s=0.1)
        self._job.wait_for_steps(20, NUM_WORKERS, since_s=time.monotonic())
        self._signal(signal.SIGSTOP)

    def take_turn(self, seconds: float) -> None:
        began_s = time.monotonic()
        self._signal(signal.SIGCONT)
        time.sleep(seconds)
        self._signal(signal.SIGSTOP)
        ended_s = time.monotonic()
        if self._job.member_pids() != self._pids:
            raise BenchmarkError(f"job {self.name}: the workers are not those that it began with any more")
        self.cycles[-1].num_steps += sum(began_s < step.ended_s < ended_s for step in self.steps())
        self.cycles[-1].seconds += ended_s - began_s

    def steps(self) -> list[Step]:
        """Steps of one worker: all make them together."""
        return [step for step in self._job.steps() if step.pid == self._pids[0]]

    def snapshots(self) -> list[list[SnapshotLine]]:
        """Every worker's line of each snapshot, once all have written theirs."""
        by_pid: dict[int, list[SnapshotLine]] = defaultdict(list)
        for line in lines_in(self._job.folder / "records", SnapshotLine):
            by_pid[line.pid].append(line)
        of_all = [by_pid[pid] for pid in self._pids]
        return [list(lines) for lines in zip(*of_all, strict=False)]

    def _signal(self, number: signal.Signals) -> None:
        for pid in self._pids:
            os.kill(pid, number)


@contextlib.contextmanager
def contestants(space: Workspace, etcd: EmbeddedEtcd, tables: Tables, interval_s: float) -> Iterator[list[Contestant]]:
    with contextlib.ExitStack() as stack:
        memory = stack.enter_context(snapshot_memory())
        found = []
        # Time continues while a job is stopped, which is half of the time.
        for name, snapshot_s, num_snapshots in (("with", 2 * interval_s, 1), ("without", 0.0, 0)):
            arguments = ["--strategy=dlrover", f"--records={space.folder / name / 'records'}", f"--snapshot-s={snapshot_s}"]
            arguments.append(f"--memory={memory}")
            job = stack.enter_context(space.live_job(name, etcd, f"1:{NUM_WORKERS}", [*arguments, *tables.arguments], SCRIPT))
            # A stopped worker cannot renew its lease.
            job.environment["DLROVER_LEASE_TTL_S"] = "300"
            found.append(Contestant(name, job))
            found[-1].start(num_snapshots)
        yield found


def saving_s(space: Workspace, tables: Tables, disk: Path, num_saves: int) -> dict[str, list[float]]:
    """Seconds of each way of saving, by the slowest of the processes."""
    records = space.folder / "saves" / "records"
    arguments = ["--strategy=stock", f"--records={records}", "--max-steps=5", f"--saves={num_saves}", f"--save-folder={disk}"]
    with space.job("saves", [*arguments, *tables.arguments], SCRIPT) as job:
        job.start_agent(stock_agent(NUM_WORKERS))
        if any(job.wait_until_ended(4 * START_TIMEOUT_S)):
            raise BenchmarkError("the stock job that saves its state has failed")
    by_way: dict[str, dict[int, list[SaveLine]]] = defaultdict(lambda: defaultdict(list))
    for line in lines_in(records, SaveLine):
        by_way[line.way][line.pid].append(line)
    return {
        way: [max(line.seconds for line in lines) for lines in zip(*by_pid.values(), strict=True)]
        for way, by_pid in by_way.items()
    }


def report(found: list[Contestant], saves: dict[str, list[float]]) -> dict[str, float | int]:
    with_snapshots, without = found
    ratios = [a.steps_per_s / b.steps_per_s for a, b in zip(with_snapshots.cycles, without.cycles, strict=True)]
    totals = [sum(cycle.num_steps for cycle in c.cycles) / sum(cycle.seconds for cycle in c.cycles) for c in found]
    print(f"ratio by cycle: {', '.join(f'{ratio:.3f}' for ratio in ratios)}; of all steps: {totals[0] / totals[1]:.4f}")
    taken = [max(line.stall_s for line in lines) for lines in with_snapshots.snapshots()[WARM_UP_SNAPSHOTS:]]
    stall_s = statistics.median(taken)
    print(f"stall of {len(taken)} snapshots: median {stall_s:.4f} s, from {min(taken):.4f} to {max(taken):.4f}")
    for way, seconds in saves.items():
        print(f"{way}: median {statistics.median(seconds):.3f} s, from {min(seconds):.3f} to {max(seconds):.3f}")
    return {"throughput_ratio": statistics.median(ratios), "stall_ratio": stall_s / statistics.median(saves["torch.save"])}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cycles", type=int, default=8, help="snapshots that are looked at")
    parser.add_argument("--saves", type=int, default=5, help="saves in each of the other ways")
    parser.add_argument("--mib", type=int, default=1024, help="size of the tables and their optimizers' state, in MiB")
    parser.add_argument("--num-tables", type=int, default=8)
    parser.add_argument("--optimizer", choices=("rowwise_adagrad", "adagrad"), default="rowwise_adagrad")
    parser.add_argument("--interval-s", type=float, default=SnapshotConfig().interval_s, help="between two snapshots")
    parser.add_argument("--folder", type=Path, help="on disk, where state is saved; a temporary one by default")
    parser.add_argument("--quick", action="store_true", help="few short turns with small tables, under 60 s")
    parser.add_argument("--keep", action="store_true", help="keep logs and records")
    options = parser.parse_args()
    tables = Tables(options.mib, options.num_tables, "row_wise", options.optimizer)
    if options.quick:
        tables = replace(tables, mib=16, num_tables=4)
        options.cycles, options.saves, options.interval_s = 2, 2, 2.0
    print(describe_machine(), flush=True)
    disk = Path(tempfile.mkdtemp(prefix="dlrover-saves-", dir=options.folder))
    try:
        with Workspace("snapshot", options.keep) as space:
            etcd = space.etcd()
            with contestants(space, etcd, tables, options.interval_s) as found:
                for cycle in range(-1, options.cycles):
                    for contestant in found:
                        contestant.cycles.append(Cycle())
                    num_turns = max(1, round(options.interval_s / TURN_S))
                    for turn in range(num_turns):
                        for contestant in found if turn % 2 == 0 else found[::-1]:
                            contestant.take_turn(options.interval_s / num_turns)
                    now = ", ".join(f"{c.cycles[-1].steps_per_s:.2f} steps/s {c.name}" for c in found)
                    print(f"cycle {cycle}: {now}" if cycle >= 0 else f"to warm up: {now}", flush=True)
                for contestant in found:
                    del contestant.cycles[0]  # the job that was stopped longer is slower at first
            saves = saving_s(space, tables, disk, options.saves)
            print(result_line(report(found, saves)))
    finally:
        shutil.rmtree(disk, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
