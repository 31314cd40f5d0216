"""Grow and shrink one job of many real workers on this machine.

    python benchmarks/large_world.py [--workers 200] [--quick]

Each worker is a process with the package's own `World`, real gloo groups, its own connection to etcd, and at most 1024 open
files. All are forked from one warm process (`large_world_workers.py`). A step reduces one number and then pauses, so that a few
cores can carry all workers. The changes:

    start   until all workers have made their first step; from the moment when the last of them is started
    grow    one worker more: from the moment when it is ready until all have made a step in the new round
    loss    one worker gets SIGKILL: from that moment until all others have made a step in the new round

Every other worker must keep its process, and the job's history must name no other loss. For comparison, as many ranks of plain
torch connect with `init_process_group` and reduce one number, without any membership: `stock`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import psutil
from jobs import BenchmarkError, Workspace, describe_machine, result_line

from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.types import EtcdConfig
from lightning_dlrover.rdzv.job.records import AgentRecord, EventRecord, Keys, WorkerRecord, decode, encode
from tests.support.processes import JsonLines
from tests.support.waiting import eventually

T = TypeVar("T")

NUM_WORKERS = 200
NUM_QUICK = 40
PAUSE_S = 0.5
SETTLED_STEPS = 3
MAX_FILES = 1024
AT_ONCE = 10  # workers that are started together, as the nodes of a cluster do not all come in the same millisecond
START_TIMEOUT_S = 300.0
CHANGE_TIMEOUT_S = 120.0
WITHOUT_NAME_SERVER = {"RES_OPTIONS": "attempts:0"}
"""Settings of glibc, see resolv.conf(5). Torch looks up the name of each store that it connects to. A name server that leaves
one of hundreds of simultaneous questions without an answer would add its timeout of 5 s, with plain torch as well.
"""

NURSERY = Path(__file__).with_name("large_world_workers.py")


@dataclass(frozen=True)
class Made:
    """One step that a worker has made."""

    at: float  # seconds since the epoch
    pid: int
    step: int
    round: int
    size: int


@dataclass(frozen=True)
class Change:
    """One change of the world, as its workers saw it."""

    name: str
    seconds: float  # until the last worker has made a step in the new round
    stall_s: float  # longest time of a worker between its last step before and its first step after the change
    cpu_s: float  # CPU time of all workers during the change
    num_workers: int  # workers after the change

    def __str__(self) -> str:
        per_worker = 1000 * self.cpu_s / self.num_workers
        return (
            f"{self.name:8}{self.num_workers:6} workers{self.seconds:9.2f} s, "
            f"longest pause between two steps {self.stall_s:.2f} s, {per_worker:.0f} ms of CPU time per worker"
        )


class Workers:
    """Forked workers and their records."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder = folder
        self.pids: dict[int, int] = {}  # process id by index
        self._steps: dict[int, JsonLines[Made]] = {}
        environment = {**os.environ, **WITHOUT_NAME_SERVER, "OMP_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
        command = [sys.executable, str(NURSERY), str(folder)]
        self._nursery = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True
        )
        if self._answer() != "ready":
            raise BenchmarkError("the process that forks workers has not started")

    def close(self) -> None:
        """Kill all workers and the process that has forked them."""
        for pid in self.pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._nursery.kill()
        self._nursery.wait(30.0)
        eventually(lambda: self.dead() == list(self.pids), "the end of killed workers", 30.0, 0.05, error=BenchmarkError)

    def fork(self, kind: str, index: int, *arguments: object) -> int:
        assert self._nursery.stdin is not None
        self._nursery.stdin.write(" ".join(map(str, [kind, index, *arguments])) + "\n")
        self._nursery.stdin.flush()
        self.pids[index] = int(self._answer())
        self._steps[index] = JsonLines(self._folder / f"{index}.steps", lambda fields: Made(**fields))
        return self.pids[index]

    def _answer(self) -> str:
        assert self._nursery.stdout is not None
        return self._nursery.stdout.readline().strip()

    def steps(self, index: int) -> list[Made]:
        return self._steps[index].read()

    def output(self, index: int) -> str:
        with contextlib.suppress(FileNotFoundError):
            return (self._folder / f"{index}.out").read_text()[-3000:]
        return ""

    def dead(self) -> list[int]:
        return [index for index, pid in self.pids.items() if not psutil.pid_exists(pid)]

    def cpu_s(self) -> float:
        return sum(_cpu_s(pid) for pid in self.pids.values())

    def wait_for(self, found: Callable[[], T | None], what: str, timeout_s: float, may_be_dead: int = -1) -> T:
        def ended() -> str:
            dead = [index for index in self.dead() if index != may_be_dead]
            return f"workers {dead} have ended: {self.output(dead[0])}" if dead else ""

        return eventually(found, what, timeout_s, 0.1, ended=ended, error=BenchmarkError)


class LargeWorld:
    """One job of many workers."""

    def __init__(self, workers: Workers, endpoint: str, size: int) -> None:
        self.workers = workers
        self.size = size
        self._endpoint = endpoint
        self._run_id = f"large-{os.getpid()}"
        self._keys = Keys(self._run_id)
        self._client = EtcdClient(EtcdConfig(endpoint))
        self._victim = -1

    def close(self) -> None:
        self._client.close()

    def start(self) -> Change:
        for index in range(self.size):  # announced, so that the first round waits for all of them
            self._client.put(f"{self._keys.agents}a{index}", encode(AgentRecord(f"a{index}", "host", 1, 1, "running")))
        for index in range(self.size):
            if index % AT_ONCE == 0:
                self.workers.wait_for(self._registered(index), f"{index} workers to register", START_TIMEOUT_S)
            self._fork(index)
        began, cpu_s = time.time(), self.workers.cpu_s()
        first = self._first_steps(1, self.size, range(self.size), "the first step of all workers", START_TIMEOUT_S)
        return Change("start", max(s.at for s in first) - began, 0.0, self.workers.cpu_s() - cpu_s, self.size)

    def grow(self) -> Change:
        before = self._newest_round()
        self._fork(self.size)
        ready_at = self.workers.wait_for(self._joiner_is_ready, "the joiner to be ready", CHANGE_TIMEOUT_S)
        cpu_s = self.workers.cpu_s()
        change = self._measure("grow", before, self.size + 1, range(self.size + 1), ready_at, cpu_s)
        self.size += 1
        return change

    def lose(self, index: int) -> Change:
        before, cpu_s = self._newest_round(), self.workers.cpu_s()
        cpu_s -= _cpu_s(self.workers.pids[index])
        self._victim, began = index, time.time()
        os.kill(self.workers.pids[index], signal.SIGKILL)
        others = [i for i in range(self.size) if i != index]
        return self._measure("loss", before, self.size - 1, others, began, cpu_s)

    def settle(self) -> None:
        """Let all workers make some steps, so that changes come while nothing else happens."""
        newest, others = self._newest_round(), [i for i in self.workers.pids if i != self._victim]

        def found() -> bool | None:
            made = ([s for s in self.workers.steps(i) if s.round == newest] for i in others)
            return True if all(len(steps) > SETTLED_STEPS for steps in made) else None

        self.workers.wait_for(found, f"{SETTLED_STEPS} steps of all workers", CHANGE_TIMEOUT_S, self._victim)
        time.sleep(random.uniform(0.0, PAUSE_S))

    def check_losses(self, num_lost: int) -> None:
        """Raise an error unless the history names as many losses, and every process but the victim's lives."""
        events = [decode(EventRecord, entry.value, entry.key) for entry in self._client.get_prefix(self._keys.events)[1]]
        losses = [event.text for event in events if event.kind == "loss"]
        dead = [index for index in self.workers.dead() if index != self._victim]
        if len(losses) != num_lost or dead:
            raise BenchmarkError(f"{num_lost} workers were to be lost; the history names {losses}, and {dead} have ended")

    def most_files_and_threads(self) -> tuple[int, int]:
        """Return the most open files, and the most threads, that one worker has."""
        pids = [pid for index, pid in self.workers.pids.items() if index != self._victim]
        files = max(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids)
        return files, max(len(os.listdir(f"/proc/{pid}/task")) for pid in pids)

    def memory_gib(self) -> float:
        """Return the memory of all workers, pages that they share counted once, in GiB."""
        pss = (psutil.Process(pid).memory_full_info().pss for i, pid in self.workers.pids.items() if i != self._victim)
        return float(sum(pss)) / 2**30

    def _fork(self, index: int) -> None:
        self.workers.fork("live", index, self._endpoint, self._run_id, PAUSE_S, self.size + 1)

    def _registered(self, num_workers: int) -> Callable[[], bool | None]:
        return lambda: True if len(self._client.get_prefix(self._keys.workers)[1]) >= num_workers else None

    def _newest_round(self) -> int:
        return max(steps[-1].round for i in self.workers.pids if (steps := self.workers.steps(i)))

    def _joiner_is_ready(self) -> float | None:
        for entry in self._client.get_prefix(self._keys.workers)[1]:
            record = decode(WorkerRecord, entry.value, entry.key)
            if record.agent_id == f"a{self.size}" and record.state in ("ready", "active"):
                return record.since
        return None

    def _measure(self, name: str, before: int, size: int, members: range | list[int], began: float, cpu_s: float) -> Change:
        first = self._first_steps(before + 1, size, members, f"a step of {size} workers after the {name}", CHANGE_TIMEOUT_S)
        used_s = self.workers.cpu_s() - cpu_s
        pauses = []
        for index in members:
            last = [s.at for s in self.workers.steps(index) if s.round <= before]
            if last:
                pauses.append(next(s.at for s in self.workers.steps(index) if s.round > before) - last[-1])
        return Change(name, max(s.at for s in first) - began, max(pauses), used_s, size)

    def _first_steps(self, round_: int, size: int, members: range | list[int], what: str, timeout_s: float) -> list[Made]:
        """Return each member's first step in a round of `size` workers, not before `round_`."""

        def found() -> list[Made] | None:
            made: list[Made] = []
            for index in members:
                first = next((s for s in self.workers.steps(index) if s.round >= round_ and s.size == size), None)
                if first is None:
                    return None
                made.append(first)
            return made

        return self.workers.wait_for(found, what, timeout_s, self._victim)


def _cpu_s(pid: int) -> float:
    with contextlib.suppress(psutil.NoSuchProcess):
        times = psutil.Process(pid).cpu_times()
        return float(times.user + times.system)
    return 0.0


@contextlib.contextmanager
def _workers(folder: Path) -> Iterator[Workers]:
    with contextlib.closing(Workers(folder)) as workers:
        yield workers


def stock(folder: Path, size: int) -> Change:
    """Return the time that plain ranks of gloo need to connect and to reduce one number."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with _workers(folder) as workers:
        start_at = time.time() + 2.0 + 0.02 * size
        for rank in range(size):
            workers.fork("stock", rank, size, port, start_at)
        cpu_s = workers.cpu_s()

        def found() -> list[Made] | None:
            done = [steps[1] for rank in range(size) if len(steps := workers.steps(rank)) > 1]
            return done if len(done) == size else None

        done = workers.wait_for(found, f"{size} plain ranks to connect", START_TIMEOUT_S)
        return Change("stock", max(s.at for s in done) - start_at, 0.0, workers.cpu_s() - cpu_s, size)


def measure(quick: bool = False, num_workers: int = 0, with_stock: bool = True) -> dict[str, float]:
    """Run the benchmark, print a table, and return its figures in seconds.

    Args:
        quick: with 40 workers.
        num_workers: number of workers, if another one is wanted.
        with_stock: measure plain torch, too.

    Raises:
        BenchmarkError: a change took minutes, or a worker was lost beside the one that was killed.
    """
    size = num_workers or (NUM_QUICK if quick else NUM_WORKERS)
    print(describe_machine(), flush=True)
    with Workspace("large-world") as space:
        if with_stock:
            print(stock(space.folder / "stock", size), flush=True)
        with (
            _workers(space.folder / "live") as workers,
            contextlib.closing(LargeWorld(workers, space.etcd().endpoint, size)) as world,
        ):
            print(world.start(), flush=True)
            world.settle()
            grow = world.grow()
            print(grow, flush=True)
            world.settle()
            world.check_losses(0)
            files, threads = world.most_files_and_threads()
            print(
                f"at most {files} open files and {threads} threads in a worker, {world.memory_gib():.1f} GiB in all", flush=True
            )
            if files >= MAX_FILES:
                raise BenchmarkError(f"a worker has {files} open files of at most {MAX_FILES}")
            loss = world.lose(size // 3)
            print(loss, flush=True)
            world.settle()
            world.check_losses(1)
    return {f"world_{size}_grow_s": grow.seconds, f"world_{size}_loss_s": loss.seconds}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=0, help=f"workers before the job grows (default {NUM_WORKERS})")
    parser.add_argument("--quick", action="store_true", help=f"{NUM_QUICK} workers")
    parser.add_argument("--without-stock", action="store_true", help="measure no plain torch for comparison")
    options = parser.parse_args()
    print(result_line(measure(options.quick, options.workers, not options.without_stock)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
