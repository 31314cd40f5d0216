"""Jobs of real workers without agents: forked from one warm process, followed through their records.

Every worker is a separate process with real gloo and etcd connections. Only the seconds for importing torch and lightning
are saved. A replaced worker is simply one more worker.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

import psutil

from lightning_dlrover.data import Stream
from lightning_dlrover.data.lane_plan import share, speeds_for
from lightning_dlrover.live.order import epoch_order
from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.types import EtcdConfig, Put
from lightning_dlrover.rdzv.job.journal import Journal
from lightning_dlrover.rdzv.job.records import DrainRecord, EventRecord, Keys, RoundRecord, StacksRecord, decode, encode
from lightning_dlrover.rdzv.membership.worker_records import read_stacks
from tests.e2e.iterables import order_of
from tests.e2e.toy_job import PATIENCE_S, SEED, Place, Script, ToySettings, run_worker, streamed, train_toy
from tests.support.processes import JsonLines, environment
from tests.support.waiting import eventually
from tests.support.warm_tree import PADDING

T = TypeVar("T")

Record = dict[str, Any]  # a line of a worker's file; see the `write` calls of toy_job.py

DEADLINE_S = 60.0
"""Seconds after which a job counts as hung."""

POLL_S = 0.02
"""Seconds between looks at a job. Each reads the records of all its workers."""

_PROCESSES = threading.Lock()  # multiprocessing polls all processes whenever it starts one, and its polling is not thread-safe


OURS = ("tests.e2e.toy_job", "tests.e2e.table_job", "tests.support.warm_tree", "tests.support.frozen_heap")
"""Modules that the fork server imports last."""


def _fork_server() -> Any:
    context = multiprocessing.get_context("forkserver")
    # Planner and history import the first two lazily. The server skips modules that cannot be imported.
    context.set_forkserver_preload(["sklearn.ensemble", "sqlalchemy", "torch.distributed.run", *OURS, PADDING])
    return context


def start_fork_server() -> None:
    """Start the process that forks workers. It must inherit no thread, etcd client or process group."""
    from multiprocessing import forkserver

    with environment({"OMP_NUM_THREADS": "1", "PADDING": PADDING}):
        stop_fork_server()  # a server started by a data loader's test has not preloaded our modules
        _fork_server()
        forkserver.ensure_running()


def stop_fork_server() -> None:
    from multiprocessing import forkserver

    forkserver._forkserver._stop()  # type: ignore[attr-defined]


class Worker:
    """One forked worker and its records so far."""

    def __init__(self, place: Place, script: Script, settings: Any, variables: Mapping[str, str] | None = None) -> None:
        self.place = place
        self.doomed = False  # true once the test has asked the worker to leave or to die
        self.killed = False
        self._records: JsonLines[Record] = JsonLines(Path(place.records), dict)
        context = _fork_server() if variables is None else multiprocessing.get_context("spawn")
        self.process: BaseProcess = context.Process(target=run_worker, args=(place, script, settings))
        with _PROCESSES, environment(variables or {}):
            self.process.start()

    @property
    def name(self) -> str:
        return self.place.agent_id

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    @property
    def exit_code(self) -> int | None:
        with _PROCESSES:
            return self.process.exitcode

    def records(self, kind: str = "") -> list[Record]:
        """Lines written so far."""
        return [r for r in self._records.read() if not kind or r["kind"] == kind]

    @property
    def step(self) -> int:
        return max((r["step"] for r in self.records("done")), default=0)

    @property
    def output(self) -> str:
        return self.place.output.read_text() if self.place.output.exists() else ""

    def terminate(self) -> None:
        """Ask the worker to leave, as an agent or a preemption notice does."""
        self.doomed = True
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self.doomed = self.killed = True
        self._signal(signal.SIGKILL)

    def stop(self) -> None:
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def arm(self, moment: str) -> None:
        """Let the worker kill itself when it reaches the moment, see `Recorder.moment`."""
        self.doomed = self.killed = True
        fresh = self.place.armed.with_suffix(".tmp")
        fresh.write_text(moment)
        fresh.rename(self.place.armed)

    def wait(self, timeout_s: float = DEADLINE_S) -> int:
        eventually(lambda: self.exit_code is not None, f"worker {self.name} to end", timeout_s)
        assert self.exit_code is not None
        return self.exit_code

    def stacks(self) -> str:
        """Stack traces of all its threads, and of its loader workers."""
        for process in (psutil.Process(self.pid), *psutil.Process(self.pid).children()):
            process.send_signal(signal.SIGUSR1)
        time.sleep(0.3)
        return self.output

    def _signal(self, signum: int) -> None:
        if self.exit_code is None:
            with contextlib.suppress(ProcessLookupError):  # the process has just ended
                os.kill(self.pid, signum)


class Job:
    """Workers of one run id, and their files in one folder."""

    def __init__(
        self,
        endpoint: str,
        run_id: str,
        folder: Path,
        settings: Any,
        script: Script = train_toy,
        min_workers: int = 1,
        max_workers: int = 4,
        lease_ttl_s: int = 30,  # long, so that no lease expires on a busy machine
        environment: Mapping[str, str] | None = None,  # variables for workers started afresh instead of forked
    ) -> None:
        self.run_id = run_id
        self.folder = folder
        self.max_workers = max_workers
        self.workers: list[Worker] = []
        self._endpoint = endpoint
        self._client = EtcdClient(EtcdConfig(endpoint))
        self._settings = settings
        self._script = script
        self._environment = environment
        self._limits = (min_workers, max_workers, lease_ttl_s)
        folder.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.workers:
            worker.kill()
        for worker in self.workers:
            worker.wait(10)
        self._client.close()

    def start(self, script: Script | None = None, settings: Any = None, endpoint: str = "") -> Worker:
        """Fork one more worker, which reaches etcd at `endpoint` if that is given."""
        place = Place(endpoint or self._endpoint, self.run_id, f"w{len(self.workers)}", str(self.folder), *self._limits)
        self.workers.append(
            Worker(place, script or self._script, self._settings if settings is None else settings, self._environment)
        )
        return self.workers[-1]

    def start_all(self, number: int) -> list[Worker]:
        """Fork several workers, which train together once all have come."""
        return [self.start() for _ in range(number)]

    def grow_to(self, num_workers: int, after_step: int = 3) -> None:
        """Start workers one by one: the second after some steps of the first, the next ones after a step of all before."""
        self.start()
        self.wait_for_step(after_step)
        for size in range(2, num_workers + 1):
            self.start()
            self.wait_for_world(size)

    def records(self, kind: str = "") -> list[Record]:
        return [r for worker in self.workers for r in worker.records(kind)]

    @property
    def step(self) -> int:
        """Newest step that any worker has completed."""
        return max((worker.step for worker in self.workers), default=0)

    def wait_for_step(self, step: int) -> None:
        self.wait_until(lambda: self.step >= step, f"step {step}")

    def wait_for_world(self, size: int, since: int | None = None, patience_s: float = PATIENCE_S) -> int:
        """Wait until `size` workers have completed a step; return its number.

        If that takes long, steps take longer, or the job would end before a busy machine has made the change.

        Args:
            patience_s: seconds until then; 0 where workers have little time to join.
        """
        after, dawdle = self.step if since is None else since, self.folder / "dawdle"
        patient_until = time.monotonic() + patience_s

        def look() -> int | None:
            if time.monotonic() > patient_until and not dawdle.exists():
                dawdle.touch()
            return next((r["step"] for r in self.records("done") if r["world"] == size and r["step"] > after), None)

        try:
            return self.wait_until(look, f"a step of {size} workers after step {after}")
        finally:
            dawdle.unlink(missing_ok=True)

    def events(self, kind: str) -> list[EventRecord]:
        """Events of this kind in the job's history, oldest first."""
        entries = sorted(self._client.get_prefix(Keys(self.run_id).events)[1], key=lambda entry: entry.key)
        events = [decode(EventRecord, entry.value, entry.key) for entry in entries]
        return [event for event in events if event.kind == kind]

    def stacks(self) -> dict[str, StacksRecord]:
        """Stack traces of each worker at the last request."""
        return read_stacks(Journal(self._client, Keys(self.run_id)))

    @property
    def round_number(self) -> int:
        """Number of the newest round in etcd, whether formed or not."""
        return self._round.number

    @property
    def members(self) -> list[str]:
        """Worker ids of that round in rank order."""
        return self._round.members

    @property
    def coordinator(self) -> str:
        """Id of the worker that coordinates."""
        entry = self._client.get(Keys(self.run_id).coordinator)
        return entry.value.decode() if entry is not None else ""

    @property
    def _round(self) -> RoundRecord:
        entry = self._client.get(Keys(self.run_id).round)
        return decode(RoundRecord, entry.value, entry.key) if entry else RoundRecord(0, [], "", "start", planned=True)

    def wait_until(self, found: Callable[[], T | None], what: str, timeout_s: float = DEADLINE_S) -> T:
        return eventually(found, what, timeout_s, POLL_S, ended=self._all_ended, report=self.report)

    def _all_ended(self) -> str:
        return "all workers have ended" if all(worker.exit_code is not None for worker in self.workers) else ""

    def drain(self) -> None:
        """Ask all registered workers to leave, at the same moment."""
        keys = Keys(self.run_id)
        workers = [entry.key.removeprefix(keys.workers) for entry in self._client.get_prefix(keys.workers)[1]]
        assert workers, "no worker is on record"
        requests = [Put(keys.drains + worker, encode(DrainRecord(worker, "all shall leave"))) for worker in workers]
        self._client.txn([], requests)

    @property
    def num_registered(self) -> int:
        """Number of registered workers, in any state."""
        return len(self._client.get_prefix(Keys(self.run_id).workers)[1])

    @contextlib.contextmanager
    def at_full_speed(self) -> Iterator[None]:
        """Let steps take no longer than they need, see `Recorder.pace`."""
        hurry = self.folder / "hurry"
        hurry.touch()
        yield
        hurry.unlink()

    def end(self) -> list[int]:
        """End the plain loop with its next step; return the exit codes of all workers once they have ended."""
        (self.folder / "end").touch()
        return self.finish()

    def finish(self, timeout_s: float = DEADLINE_S, hurry: bool = True) -> list[int]:
        """Return the exit codes of all workers once they have ended.

        Steps take no longer than they need from now on, unless `hurry` is false. So wait for the effect of each change before:
        the job may end within a moment.
        """
        if hurry:
            (self.folder / "hurry").touch()
        eventually(self._all_ended, "all workers to end", timeout_s, POLL_S, report=self.report)
        return [w.exit_code for w in self.workers if w.exit_code is not None]

    def report(self) -> str:
        """Readable summary: stack traces of every running worker and the end of its output."""
        entries = self._client.get_prefix(Keys(self.run_id).live)[1]
        texts = [f"{entry.key}@{entry.mod_revision}: {entry.value.decode()}" for entry in entries]
        for worker in self.workers:
            output = worker.stacks() if worker.exit_code is None else worker.output
            last = worker.records()[-1:]
            texts.append(f"--- {worker.name} pid {worker.pid} exit {worker.exit_code} last {last}\n{output[-20000:]}")
        return "\n".join(texts)


# --- invariants ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Window:
    """The batches of one optimizer update."""

    epoch: int
    batches: range


def _windows(settings: ToySettings) -> Iterator[_Window]:
    for epoch in range(settings.max_epochs):
        for first in range(0, settings.batches_per_epoch, settings.accumulate):
            yield _Window(epoch, range(first, min(first + settings.accumulate, settings.batches_per_epoch)))


def _order(job: Job, settings: ToySettings, epoch: int) -> list[int]:
    """Return the ids of an epoch's rows, in training order."""
    if settings.streams:
        return streamed_order(streamed(job.folder / "train", settings.shuffle), epoch, settings.batch_size, job.max_workers)
    if settings.iterable:
        return order_of(settings.iterable, settings.num_rows, settings.shuffle, SEED, epoch)
    return epoch_order(settings.num_rows, settings.shuffle, SEED, epoch).tolist()


def streamed_order(data: Stream, epoch: int, global_batch_size: int, max_workers: int) -> list[int]:
    """Return the ids of an epoch's rows, in the training order of a job of so many workers."""
    plan = data.plan(SEED + epoch, data.layout_for(global_batch_size, max_workers))
    firsts = [0, *itertools.accumulate(shard.rows for shard in data.shards)]
    shards, rows = plan.rows_between(0, plan.num_rows)
    return [firsts[shard] + row for shard, row in zip(shards.tolist(), rows.tolist(), strict=True)]


def violations(job: Job, settings: ToySettings) -> list[str]:
    """Problems found in a finished job. Empty if every sample was trained on exactly once and all workers agreed.

    A batch counts in the round in which at least one worker completed its window's update. All shares of that round count,
    including those of a worker that was killed before it could record the end of its batch.
    """
    bad: list[str] = []
    done: dict[tuple[int, int], list[Record]] = defaultdict(list)
    shares: dict[tuple[int, int, int], dict[int, Record]] = defaultdict(dict)
    for r in job.records("done"):
        done[r["epoch"], r["batch"]].append(r)
    for r in job.records("share"):
        shares[r["epoch"], r["batch"], r["round"]][r["rank"]] = r
    step = 0
    for window in _windows(settings):
        step += 1
        closing = done[window.epoch, window.batches[-1]]
        name = f"epoch {window.epoch} batch {window.batches[-1]}"
        if not closing:
            bad.append(f"{name}: never completed")
            continue
        for field in ("step", "round", "world", "parameters", "optimizer", "lr"):
            if len({str(r[field]) for r in closing}) > 1:
                bad.append(f"{name}: {field} differs: {[(r['pid'], r['rank'], r['round'], r[field]) for r in closing]}")
        if closing[0]["step"] != step:
            bad.append(f"{name}: global_step is {closing[0]['step']}, not {step}")
        if len({r["rank"] for r in closing}) != len(closing):
            bad.append(f"{name}: a rank twice in {[(r['pid'], r['rank'], r['round']) for r in closing]}")
        number, world = closing[0]["round"], closing[0]["world"]
        for batch in window.batches:
            bad += _bad_split(settings, window.epoch, batch, number, world, shares[window.epoch, batch, number])
    for epoch in range(settings.max_epochs):
        trained: list[int] = []
        order = _order(job, settings, epoch)
        for window in (w for w in _windows(settings) if w.epoch == epoch and done[w.epoch, w.batches[-1]]):
            number = done[epoch, window.batches[-1]][0]["round"]
            for batch in window.batches:
                length = min(settings.batch_size, settings.num_rows - batch * settings.batch_size)
                for rank, r in sorted(shares[epoch, batch, number].items()):
                    start, stop = share(length, rank, r["world"], speeds_for(r["speeds"], length, settings.batch_size))
                    trained += r["ids"][: stop - start]
            first = window.batches[0] * settings.batch_size
            if trained[first:] != order[first : first + len(trained) - first]:
                bad.append(
                    f"epoch {epoch} batches {window.batches}: {trained[first:]} instead of {order[first : len(trained)]}"
                )
        if sorted(trained) != list(range(settings.num_rows)):
            doubled = sorted({i for i in trained if trained.count(i) > 1})
            missing = sorted(set(range(settings.num_rows)) - set(trained))
            bad.append(f"epoch {epoch}: samples doubled {doubled}, missing {missing}")
    for worker in job.workers:
        places = [r["epoch"] * settings.batches_per_epoch + r["batch"] for r in worker.records("done")]
        if places and places != list(range(places[0], places[0] + len(places))):
            bad.append(f"{worker.name}: went through batches {places}")
    return [*bad, *_bad_validation(job, settings)]


def _bad_split(
    settings: ToySettings, epoch: int, batch: int, number: int, world: int, found: dict[int, Record]
) -> Iterator[str]:
    name = f"epoch {epoch} batch {batch} round {number}"
    if sorted(found) != list(range(world)):
        yield f"{name}: shares of ranks {sorted(found)} in a world of {world}"
    if len(speeds := {tuple(r["speeds"]) for r in found.values()}) > 1:
        yield f"{name}: its workers divided it by the speeds {speeds}"
    length = min(settings.batch_size, settings.num_rows - batch * settings.batch_size)
    for rank, r in found.items():
        start, stop = share(length, rank, world, speeds_for(r["speeds"], length, settings.batch_size))
        if r["world"] != world or len(r["ids"]) != max(1, stop - start):
            yield f"{name}: rank {rank} had {len(r['ids'])} of {length} samples in a world of {r['world']}"


def _bad_validation(job: Job, settings: ToySettings) -> Iterator[str]:
    """Problems of validation runs. Each counts every sample once: on workers that ended it or died after its batches."""
    ended: dict[int, list[Record]] = defaultdict(list)
    started: dict[int, list[int]] = defaultdict(list)
    seen: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for r in job.records("val_done"):
        ended[r["step"]].append(r)
    for r in job.records("val_start"):
        started[r["step"]].append(r["pid"])
    for r in job.records("val"):
        seen[r["step"]][r["pid"]] += r["ids"]
    if settings.num_val_rows and not ended:
        yield "no validation was completed"
    for step, pids in started.items():
        if len(set(pids)) < len(pids):
            yield f"validation at step {step}: it was started twice in one of {pids}"
    for step, results in ended.items():
        if len({r["metric"] for r in results}) > 1:
            yield f"validation at step {step}: {[(r['pid'], r['round'], r['metric']) for r in results]}"
        pids = [r["pid"] for r in results]
        counted = [i for pid in pids for i in seen[step][pid]]
        of_killed = [ids for pid, ids in seen[step].items() if pid not in pids]
        choices = [
            list(itertools.chain(counted, *some))
            for n in range(len(of_killed) + 1)
            for some in itertools.combinations(of_killed, n)
        ]
        if not any(sorted(choice) == list(range(settings.num_val_rows)) for choice in choices):
            yield f"validation at step {step}: {pids} have counted {sorted(counted)}"
