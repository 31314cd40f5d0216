"""Cost of changing the workers of a job with sharded embedding tables: our exchange in memory, against a stop and a restart.

    python benchmarks/reshard.py [--rounds N] [--mib 1024] [--quick]

One live job of real processes (stock torchrun agents, etcd) trains 1 GiB of row-wise tables, their optimizer's state included,
with snapshots in memory switched on. In each round the plan asks for 3 workers instead of 2, and one of them is killed by
SIGKILL. Once its replacement is ready, the plan asks for 3 workers, then for 2.

    stall_s          time without a step, the longer way: from the end of a survivor's last step before the change to the end
                     of its first one after it, less a usual (median) step; beside it the figure of the job's own history
    bytes_ratio      bytes that all workers received over the least that any change to equal shares moves
    bandwidth_ratio  these bytes by the seconds of the exchange (the longest of all workers', waiting for each other included),
                     over those of a raw gloo send and recv of the same bytes between as many processes, into touched memory
    extra_memory     a survivor's peak of anonymous memory during the change, less its need before or after, whichever is more,
                     over the bytes of its shards, also the larger of before and after
    kill_s           from SIGKILL until all survivors have repeated the newest step of that time, less a usual step for each
                     repeated one. They keep their processes

The same run also measures the stock way: torchrun, torchrec's DistributedModelParallel and torch.distributed.checkpoint. The
job saves at its last step and ends, and one of the other size starts from there, all in one agent. `ratio`: from the end of
the last step to the end of the first, over our stall (the longer of both ways over the shorter of theirs).
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import random
import re
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from jobs import (
    START_TIMEOUT_S,
    STEP_TIMEOUT_S,
    BenchmarkError,
    LiveJob,
    Step,
    Workspace,
    describe_machine,
    result_line,
    stock_agent,
)
from tables_training import DIM, RoundLine, SnapshotLine, Tables, lines_in, snapshot_memory

from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.server import EmbeddedEtcd
from lightning_dlrover.rdzv.etcd.types import EtcdConfig
from lightning_dlrover.rdzv.job.records import EventRecord, Keys, decode
from lightning_dlrover.tables.layout import layout_of, plan_from_dict, plan_moves

SCRIPT = Path(__file__).resolve().parent / "tables_training.py"

SETTLING_STEPS = 3
"""Number of first steps of a round that are ignored, because they are not typical."""

SAMPLE_S = 0.003
ANONYMOUS = re.compile(rb"^RssAnon:\s*(\d+) kB$", re.MULTILINE)
CHUNK_BYTES = 4 << 20
RAW_REPEATS = 5

Traffic = dict[tuple[int, int], int]
"""Bytes by (sender, receiver). The receivers are numbered first."""


def least_bytes(new_workers: Sequence[str], total_bytes: float, bytes_by_worker: Mapping[str, float]) -> float:
    """Return the least bytes that any change to equal shares over `new_workers` sends: the sum of their missing shares."""
    share = total_bytes / len(new_workers)
    return sum(max(0.0, share - bytes_by_worker.get(worker, 0.0)) for worker in new_workers)


@dataclass(frozen=True)
class Size:
    tables: Tables
    batch_size: int
    steady_steps: int
    snapshot_s: float

    def arguments(self, records: Path) -> list[str]:
        return [f"--records={records}", f"--batch-size={self.batch_size}", *self.tables.arguments]


@dataclass(frozen=True)
class Change:
    """Measurements of a planned change of the number of workers."""

    workers_before: int
    workers_after: int
    stall_s: float
    told_s: float  # seconds reported by the job's history
    usual_step_s: float
    moved_bytes: int
    least_bytes: float
    exchange_s: float
    began_apart_s: float  # seconds between the first and the last member's start of the exchange
    extra_memory: float
    traffic: Traffic

    @property
    def way(self) -> str:
        return f"{self.workers_before} -> {self.workers_after}"

    def __str__(self) -> str:
        return (
            f"{self.way}  stall {self.stall_s:6.3f} s (history {self.told_s:.3f}, usual step {self.usual_step_s:.3f}), "
            f"moved {self.moved_bytes / 2**20:.0f} MiB of at least {self.least_bytes / 2**20:.0f} in {self.exchange_s:.3f} s "
            f"(begun {self.began_apart_s:.3f} s apart), extra memory {self.extra_memory:.3f}"
        )


@dataclass(frozen=True)
class Loss:
    """One worker of three killed."""

    seconds: float  # seconds until the newest step was reached again, less those of repeated steps
    stall_s: float  # seconds until the first step was made
    made_again: int
    usual_step_s: float

    def __str__(self) -> str:
        return (
            f"killed  {self.seconds:6.3f} s (first step after {self.stall_s:.3f}, {self.made_again} steps made again, "
            f"usual step {self.usual_step_s:.3f})"
        )


class MemoryWatch:
    """Samples the anonymous memory of some processes. Shared memory, such as snapshots, is not part of it."""

    def __init__(self, pids: Sequence[int]) -> None:
        self.samples: dict[int, list[tuple[float, int]]] = {pid: [] for pid in pids}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory-watch", daemon=True)

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(SAMPLE_S):
            for pid, samples in self.samples.items():
                with contextlib.suppress(OSError):  # it has ended
                    text = Path(f"/proc/{pid}/status").read_bytes()
                    samples += [(time.monotonic(), int(kib) << 10) for kib in ANONYMOUS.findall(text)]

    def extra_bytes(self, pid: int, from_s: float, to_s: float) -> int:
        """Peak between two moments, less the usual value before or after, whichever is more."""
        before = [held for at, held in self.samples[pid] if at < from_s]
        during = [held for at, held in self.samples[pid] if from_s <= at <= to_s]
        after = [held for at, held in self.samples[pid] if at > to_s]
        if not before or not during or not after:
            raise BenchmarkError(f"process {pid}: its memory was looked at too rarely")
        return max(during) - max(round(statistics.median(before)), round(statistics.median(after)))


class Resharding:
    """One live job that is resized and loses workers."""

    def __init__(self, job: LiveJob, etcd: EmbeddedEtcd, size: Size, dice: random.Random) -> None:
        self.changes: list[Change] = []
        self.losses: list[Loss] = []
        self._job = job
        self._etcd = etcd
        self._size = size
        self._dice = dice

    def run(self) -> None:
        self._job.plan(2)
        for _ in range(3):
            self._job.start_worker()
        self._job.wait_for_steps(self._size.steady_steps, 2)
        self._await_spare()
        self._resize(3)
        self._kill()  # its agent restarts it as the next spare
        self._resize(3)
        self._resize(2)

    # --- changes ----------------------------------------------------------------------------------------------------------

    def _await_spare(self) -> None:
        """Wait until a spare is ready, and the others train undisturbed again."""
        self._job.wait_for_ready(1)
        self._await_snapshots(1)
        size = len(self._job.member_pids())
        self._job.wait_for_steps(self._size.steady_steps, size, since_s=time.monotonic(), timeout_s=STEP_TIMEOUT_S)

    def _resize(self, num_workers: int) -> None:
        job, size = self._job, self._size
        former = self._round_number
        before = job.member_pids()
        with MemoryWatch(before) as watch:
            time.sleep(1.0 + self._dice.uniform(0.0, 0.3))  # a change comes at any moment of a step
            job.plan(num_workers)
            job.wait_for_steps(size.steady_steps + SETTLING_STEPS, num_workers, since_s=time.monotonic())
            time.sleep(0.5)
        after = job.member_pids()
        survivors = [pid for pid in before if pid in after]
        if len(survivors) != 2:
            raise BenchmarkError(f"resize to {num_workers}: of the processes {before} only {survivors} are left in {after}")
        self._await_snapshots(1)
        by_pid = self._steps()
        spans = {
            pid: (
                [s for s in by_pid[pid] if s.round_number == former][-1].ended_s,
                next(s for s in by_pid[pid] if s.round_number > former).ended_s,
            )
            for pid in survivors
        }
        usual_step_s = self._usual_step_s(after, former)
        lines = {number: self._round(number) for number in (former, self._round_number)}
        old, new = lines[former], lines[self._round_number]
        shard_bytes = {w: max(lines[n][w].shard_bytes for n in lines if w in lines[n]) for w in (*old, *new)}
        traffic = self._traffic(old, new)
        moved = sum(line.received_bytes for line in new.values())
        if moved != sum(traffic.values()):
            raise BenchmarkError(f"workers received {moved} bytes, the plan says {sum(traffic.values())}")
        held = {line.worker: float(line.shard_bytes) for line in old.values()}
        change = Change(
            workers_before=len(before),
            workers_after=num_workers,
            stall_s=max(end - begin for begin, end in spans.values()) - usual_step_s,
            told_s=float(self._event("stall").data["seconds"]),
            usual_step_s=usual_step_s,
            moved_bytes=moved,
            least_bytes=least_bytes([line.worker for line in new.values()], sum(held.values()), held),
            exchange_s=max(line.exchange_s for line in new.values()),
            began_apart_s=max(line.began_s for line in new.values()) - min(line.began_s for line in new.values()),
            extra_memory=max(
                watch.extra_bytes(line.pid, *spans[line.pid]) / shard_bytes[line.worker]
                for line in new.values()
                if line.pid in survivors
            ),
            traffic=traffic,
        )
        self.changes.append(change)
        print(change, flush=True)

    def _kill(self) -> None:
        """SIGKILL one of three. Its agent restarts it as a spare."""
        job = self._job
        self._await_snapshots(2)  # makes the first one count
        time.sleep(self._dice.uniform(0.3, 1.3))
        former, before = self._round_number, job.member_pids()
        victim = before[self._dice.randrange(3)]
        os.kill(victim, signal.SIGKILL)
        killed_s = time.monotonic()
        survivors = [pid for pid in before if pid != victim]

        def since() -> dict[int, list[Step]] | None:
            found = {pid: [s for s in steps if s.round_number > former] for pid, steps in self._steps().items()}
            return found if all(found.get(pid) for pid in survivors) else None

        def again() -> dict[int, list[Step]] | None:
            found = since()
            return found if found and all(found[pid][-1].number >= newest for pid in survivors) else None

        job.wait_for("a step after the loss", since, STEP_TIMEOUT_S)
        newest = max(s.number for s in job.steps() if s.ended_s <= killed_s)
        job.plan(2)  # keeps it from rejoining before enough steps are measured
        made = job.wait_for("the step before the loss to be made again", again, STEP_TIMEOUT_S)
        self._await_spare()
        if sorted(job.member_pids()) != sorted(survivors):
            raise BenchmarkError(f"kill: the survivors were {survivors}, those who train are {job.member_pids()}")
        reached = {pid: next(s for s in made[pid] if s.number >= newest) for pid in survivors}
        made_again = newest - min(steps[0].number for pid, steps in made.items() if pid in survivors) + 1
        usual_step_s = self._usual_step_s(survivors, former, last=self._size.steady_steps)
        loss = Loss(
            seconds=max(s.ended_s for s in reached.values()) - killed_s - made_again * usual_step_s,
            stall_s=max(made[pid][0].ended_s for pid in survivors) - killed_s,
            made_again=made_again,
            usual_step_s=usual_step_s,
        )
        self.losses.append(loss)
        print(loss, flush=True)

    # --- records of the job ----------------------------------------------------------------------------------------------

    @property
    def _round_number(self) -> int:
        view = self._job.view()
        assert view.round is not None
        return view.round.number

    def _steps(self) -> dict[int, list[Step]]:
        by_pid: dict[int, list[Step]] = defaultdict(list)
        for step in self._job.steps():
            by_pid[step.pid].append(step)
        return by_pid

    def _usual_step_s(self, pids: Sequence[int], former: int, last: int = 0) -> float:
        """Median duration of these workers' steps since a round, or of the last ones."""
        by_pid = self._steps()
        since = [[s for s in by_pid[pid] if s.round_number > former][SETTLING_STEPS - 1 :][-last:] for pid in pids]
        return statistics.median(b.ended_s - a.ended_s for steps in since for a, b in pairwise(steps))

    def _lines(self, kind: type[Any]) -> list[Any]:
        return list(lines_in(self._job.folder / "records", kind))

    def _round(self, number: int) -> dict[str, RoundLine]:
        """Lines of a round's members, by their ids, in rank order."""
        found = {line.worker: line for line in self._lines(RoundLine) if line.round_number == number}
        members = next(iter(found.values())).members
        return {worker: found[worker] for worker in members}

    def _await_snapshots(self, num_snapshots: int) -> None:
        """Wait until `num_snapshots` were taken in this round: all but the last one count."""
        if not self._size.snapshot_s:
            return

        def look() -> bool | None:
            found: dict[int, int] = defaultdict(int)
            number = self._round_number
            for line in self._lines(SnapshotLine):
                if line.round_number == number:
                    found[line.pid] += 1
            return True if max(found.values(), default=0) >= num_snapshots else None

        self._job.wait_for(f"{num_snapshots} snapshots", look, STEP_TIMEOUT_S, poll_s=0.05)

    def _traffic(self, old: Mapping[str, RoundLine], new: Mapping[str, RoundLine]) -> Traffic:
        """Bytes that each worker had to send to each other one, from the plans of two rounds."""
        plans = [plan_from_dict(next(iter(lines.values())).plan) for lines in (old, new)]
        workers = list(dict.fromkeys([*new, *old]))
        found: Traffic = defaultdict(int)
        for move in plan_moves(layout_of(plans[0]), layout_of(plans[1])):
            if move.source != move.target:
                width = 4 * DIM + self._size.tables.state_bytes_per_row
                found[workers.index(move.source), workers.index(move.target)] += move.region.num_rows * width
        return dict(found)

    def _event(self, kind: str) -> EventRecord:
        """Newest event of a kind in the job's history; it is written within a second."""
        keys = Keys(self._job.name)
        number = self._round_number

        def look() -> EventRecord | None:
            for entry in client.get_prefix(keys.events)[1]:
                event = decode(EventRecord, entry.value, entry.key)
                if event.kind == kind and event.data.get("round") == number:
                    return event
            return None

        client = EtcdClient(EtcdConfig(self._etcd.endpoint))
        try:
            return self._job.wait_for(f"the event {kind} of round {number}", look, 20.0, poll_s=0.05)
        finally:
            client.close()


# --- raw sends ----------------------------------------------------------------------------------------------------------------


class RawSenders:
    """Processes that only send and receive. Forked here, before there are threads, so that they need not import."""

    def __init__(self, num_processes: int) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="dlrover-raw-"))
        self._num_measured = 0
        context = multiprocessing.get_context("fork")
        pipes = [context.Pipe() for _ in range(num_processes)]
        self._connections = [ours for ours, _ in pipes]
        parent = os.getpid()
        self._processes = [
            context.Process(target=_serve_raw, args=(rank, theirs, parent), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process in self._processes:
            process.start()

    def __enter__(self) -> RawSenders:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        shutil.rmtree(self._folder, ignore_errors=True)

    def seconds(self, traffic: Traffic) -> float:
        """Median seconds for sending this traffic between as many processes, each into touched memory."""
        size = 1 + max(max(pair) for pair in traffic)
        self._num_measured += 1
        for connection in self._connections[:size]:
            connection.send((size, traffic, str(self._folder / str(self._num_measured))))
        spans: list[list[tuple[float, float]]] = []
        for connection in self._connections[:size]:
            if not connection.poll(START_TIMEOUT_S):
                raise BenchmarkError("the raw send and recv did not end")
            spans.append(connection.recv())
        taken = (max(ended for _, ended in of_all) - min(began for began, _ in of_all) for of_all in zip(*spans, strict=True))
        return float(statistics.median(taken))


def _serve_raw(rank: int, connection: Any, parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the benchmark alone, which then ends this process
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    while os.getppid() == parent:
        if connection.poll(1.0):
            connection.send(_send_raw(rank, *connection.recv()))


def _send_raw(rank: int, size: int, traffic: Traffic, store: str) -> list[tuple[float, float]]:
    group: Any = dist.ProcessGroupGloo(dist.FileStore(store, size), rank, size, timedelta(seconds=60))  # type: ignore[attr-defined]
    sent = {to: torch.ones(num, dtype=torch.uint8) for (source, to), num in traffic.items() if source == rank}
    received = {source: torch.ones(num, dtype=torch.uint8) for (source, to), num in traffic.items() if to == rank}
    spans = []
    for _ in range(RAW_REPEATS):
        group.barrier().wait()
        began_s = time.monotonic()
        work = [group.recv([part], peer, 0) for peer, values in received.items() for part in values.split(CHUNK_BYTES)]  # type: ignore[no-untyped-call]
        work += [group.send([part], peer, 0) for peer, values in sent.items() for part in values.split(CHUNK_BYTES)]  # type: ignore[no-untyped-call]
        for each in work:
            each.wait()
        spans.append((began_s, time.monotonic()))
    group.barrier().wait()
    return spans


# --- the stock way ------------------------------------------------------------------------------------------------------------


def stock_restarts(space: Workspace, name: str, size: Size, worlds: Sequence[int], disk: Path) -> dict[str, float]:
    """Train with `worlds[0]` workers, save, stop, resume with `worlds[1]`, and so on; return seconds by way."""
    found: dict[str, float] = {}
    arguments = ["--strategy=stock", *size.arguments(space.folder / name / "records")]
    checkpoints = [disk / f"{name}-{i}" for i in range(len(worlds))]
    with space.job(name, arguments, SCRIPT) as job:
        for i, world_size in enumerate(worlds):
            stopped_at, max_steps = i * size.steady_steps, (i + 1) * size.steady_steps
            if i > 0:
                # A stock job reads and writes one place, so the checkpoint was moved here outside the measured time.
                checkpoints[i - 1].rename(checkpoints[i])
            agent = job.start_agent(stock_agent(world_size), [f"--max-steps={max_steps}", f"--checkpoint={checkpoints[i]}"])
            if any(job.wait_until_ended(3 * START_TIMEOUT_S)):
                raise BenchmarkError(f"job {name}: the stock torchrun with {world_size} workers ended with {agent.returncode}")
            if i > 0:
                ended_s = {n: max(s.ended_s for s in job.steps() if s.number == n) for n in (stopped_at, stopped_at + 1)}
                way = f"{worlds[i - 1]} -> {world_size}"
                found[way] = ended_s[stopped_at + 1] - ended_s[stopped_at]
                print(f"{way}  stock {found[way]:6.3f} s", flush=True)
    shutil.rmtree(checkpoints[-1], ignore_errors=True)
    return found


# --- results ------------------------------------------------------------------------------------------------------------------


def summary(
    changes: Sequence[Change], losses: Sequence[Loss], raw: Mapping[str, Sequence[float]], stock: Mapping[str, Sequence[float]]
) -> dict[str, float | int]:
    """Print a table by way; return the worse of both ways."""

    def by_way(value: Callable[[Change], float]) -> dict[str, float]:
        ways = sorted({change.way for change in changes})
        return {way: statistics.median(value(change) for change in changes if change.way == way) for way in ways}

    stall, told = by_way(lambda c: c.stall_s), by_way(lambda c: c.told_s)
    bytes_ratio = by_way(lambda c: c.moved_bytes / c.least_bytes)
    exchange_s, moved = by_way(lambda c: c.exchange_s), by_way(lambda c: c.moved_bytes)
    memory = by_way(lambda c: c.extra_memory)
    raw_s = {way: statistics.median(raw[way]) for way in stall}
    stock_s = {way: statistics.median(found) for way, found in stock.items()}
    print("workers  stall s  history s  stock s  bytes/least  exchange s  GB/s  raw GB/s  extra memory")
    for way in stall:
        print(
            f"{way:7}{stall[way]:9.3f}{told[way]:11.3f}{stock_s.get(way, 0.0):9.2f}{bytes_ratio[way]:13.3f}"
            f"{exchange_s[way]:12.3f}{moved[way] / exchange_s[way] / 1e9:6.2f}{moved[way] / raw_s[way] / 1e9:10.2f}"
            f"{memory[way]:14.3f}"
        )
    stall_s = max(stall.values())
    figures: dict[str, float | int] = {
        "stall_s": stall_s,
        "ratio": min(stock_s.values()) / stall_s,
        "bytes_ratio": max(bytes_ratio.values()),
        "bandwidth_ratio": min(raw_s[way] / exchange_s[way] for way in stall),
        "extra_memory": max(memory.values()),
    }
    if losses:
        figures["kill_s"] = statistics.median(loss.seconds for loss in losses)
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="repetitions of each change")
    parser.add_argument("--mib", type=int, default=1024, help="size of the tables and their optimizers' state, in MiB")
    parser.add_argument("--num-tables", type=int, default=8)
    parser.add_argument("--kind", default="row_wise", help="torchrec's sharding type of all tables")
    parser.add_argument("--optimizer", choices=("rowwise_adagrad", "adagrad"), default="rowwise_adagrad")
    parser.add_argument("--snapshot-s", type=float, default=5.0, help="seconds between two snapshots")
    parser.add_argument("--folder", type=Path, help="folder for the stock checkpoints (default: a temporary one)")
    parser.add_argument("--no-stock", action="store_true", help="leave the stock way out")
    parser.add_argument("--quick", action="store_true", help="one round with small tables, under 60 s")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", action="store_true", help="keep logs and records")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.mib, options.num_tables, options.snapshot_s = 1, 16, 4, 0.5
    tables = Tables(options.mib, options.num_tables, options.kind, options.optimizer)
    size = Size(tables, batch_size=510, steady_steps=10 if options.quick else 30, snapshot_s=options.snapshot_s)
    dice = random.Random(options.seed)
    changes: list[Change] = []
    losses: list[Loss] = []
    raw: dict[str, list[float]] = defaultdict(list)
    stock: dict[str, list[float]] = defaultdict(list)
    print(describe_machine(), flush=True)
    with RawSenders(3) as senders, Workspace("reshard", options.keep) as space:
        etcd = space.etcd()
        disk = options.folder or space.folder
        for number in range(options.rounds):
            # A new job every time, so that ours and the stock way alternate under the same load of the machine.
            name = f"live-{number}"
            arguments = ["--strategy=dlrover", *size.arguments(space.folder / name / "records")]
            # Remove the snapshots that a killed job leaves in memory for its next start.
            with snapshot_memory() as memory:
                arguments += [f"--snapshot-s={options.snapshot_s}", f"--memory={memory}"]
                with space.live_job(name, etcd, "1:4", arguments, SCRIPT) as job:
                    resharding = Resharding(job, etcd, size, dice)
                    resharding.run()
            changes += resharding.changes
            losses += resharding.losses
            for way in sorted({change.way for change in resharding.changes}):
                traffic = next(change.traffic for change in resharding.changes if change.way == way)
                raw[way].append(senders.seconds(traffic))
            if not options.no_stock:
                worlds = [1, 2] if options.quick else [2, 3, 2]
                for way, seconds in stock_restarts(space, f"stock-{number}", size, worlds, disk).items():
                    stock[way].append(seconds)
        print(result_line(summary(changes, losses, raw, stock)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
