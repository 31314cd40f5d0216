"""Every write into etcd as a place where a worker can be killed, stopped, delayed or refused.

`EtcdClient._call` is wrapped inside of the worker, where all requests of the real code come by. A write is known by what it
does to which record, `put round:grow` for example, and by how often the worker has made such a write before.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from harness import Job, Worker
from plain_loop import PlainSettings, run_plain_loop
from toy_job import Recorder

from lightning_dlrover.rdzv.client import EtcdClient, EtcdUnavailableError

__all__ = ["ACTIONS", "Action", "Failpoint", "FailpointSettings", "Scenario", "run_with_failpoint"]

Action = Literal["kill", "stop", "delay", "fail", "lose"]
ACTIONS: tuple[Action, ...] = ("kill", "stop", "delay", "fail", "lose")

DELAY_S = 3.0
STOP_S = 3.5  # longer than the lease
LEASE_TTL_S = 2


@dataclass(frozen=True)
class Failpoint:
    """What happens at the nth write of one name of one worker.

    kill: SIGKILL before it. stop: SIGSTOP before it, for longer than the lease. delay: it is made late. fail: it is not made.
    lose: it is made, its answer gets lost.
    """

    slot: str
    write: str
    nth: int
    action: Action


@dataclass(frozen=True)
class FailpointSettings:
    plain: PlainSettings
    point: Failpoint | None = None


def run_with_failpoint(recorder: Recorder, settings: FailpointSettings) -> None:
    """The plain loop, with all its writes on record and one of them disturbed."""
    _wrap(recorder, settings.point)
    run_plain_loop(recorder, settings.plain)


def _wrap(recorder: Recorder, point: Failpoint | None) -> None:
    original: Callable[..., Any] = EtcdClient._call
    made: Counter[str] = Counter()
    lock = threading.Lock()

    def call(client: EtcdClient, action: str, service: str, method: str, request: Any, *args: Any, **kwargs: Any) -> Any:
        name = _name_of(method, request)
        if name is None:
            return original(client, action, service, method, request, *args, **kwargs)
        with lock:
            made[name] += 1
            nth = made[name]
        recorder.write("write", name=name, nth=nth)
        if point is None or (name, nth) != (point.write, point.nth):
            return original(client, action, service, method, request, *args, **kwargs)
        recorder.write("failpoint", action=point.action)
        if point.action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif point.action == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif point.action == "delay":
            time.sleep(DELAY_S)
        elif point.action == "fail":
            raise EtcdUnavailableError(f"cannot {action}: a failpoint")
        answer = original(client, action, service, method, request, *args, **kwargs)
        if point.action == "lose":
            raise EtcdUnavailableError(f"cannot {action}: a failpoint has lost the answer")
        return answer

    EtcdClient._call = call  # type: ignore[method-assign]


def _name_of(method: str, request: Any) -> str | None:
    """What a request writes; None for one that only reads."""
    if method in ("LeaseGrant", "LeaseRevoke", "LeaseKeepAlive"):
        return method
    if method == "Put":
        return f"put {_record(request.key, request.value)}"
    if method == "DeleteRange":
        return f"delete {_record(request.key)}"
    if method != "Txn":
        return None
    for op in request.success:
        if op.WhichOneof("request") == "request_put":
            return f"put {_record(op.request_put.key, op.request_put.value)}"
        if op.WhichOneof("request") == "request_delete_range":
            return f"delete {_record(op.request_delete_range.key)}"
    return None


def _record(key: bytes, value: bytes = b"") -> str:
    """`live/workers/host-12-ab` becomes `workers/own` or `workers/other`; what a record says about itself follows a colon."""
    parts = key.decode().split("/")[3:]  # behind prefix and run id
    if parts[0] == "live":
        parts = parts[1:]
    name = parts[0]
    if name in ("workers", "drains") and len(parts) > 1:
        own = f"-{os.getpid()}-" in parts[1]
        name += "/own" if own else "/other"
    try:
        record = json.loads(value)
    except ValueError:
        return name
    said = next((record[field] for field in ("state", "phase") if field in record), None) if isinstance(record, dict) else None
    if name == "round":
        said = record["kind"]
    return f"{name}:{said}" if said else name


class Scenario:
    """A job that starts, grows, shrinks, grows, loses a worker and ends; each of its slots is what an agent would keep alive.

    A worker that ends unasked is followed by another one in its slot; one that a failpoint has stopped goes on after a while.
    """

    def __init__(self, job: Job, point: Failpoint | None) -> None:
        self.job = job
        self.point = point
        self.slots: dict[str, Worker] = {}
        self.ended: list[Worker] = []  # unasked
        self._stopped_at: dict[str, float] = {}
        self._plain = PlainSettings(num_steps=1_000_000)

    def play(self) -> None:
        self._start("first")
        self._until(lambda: any(name == "put convener" for _, name in self.writes), "a convener")
        self._start("second")
        self._world(2)
        self._start("third")
        self._world(3)
        self.slots["second"].terminate()
        self._world(2)
        self._start("fourth")
        self._world(3)
        self.slots["third"].kill()
        self._world(2)
        (self.job.folder / "end").touch()
        self._until(lambda: all(w.exit_code is not None for w in self.job.workers), "the end")

    @property
    def has_fired(self) -> bool:
        return bool(self.job.records("failpoint"))

    @property
    def writes(self) -> Iterator[tuple[str, str]]:
        """Slot and name of every write."""
        for slot, worker in self.slots.items():
            for record in worker.records("write"):
                yield slot, record["name"]

    def _start(self, slot: str) -> None:
        is_first = slot not in self.slots
        point = self.point if is_first and self.point is not None and self.point.slot == slot else None
        self.slots[slot] = self.job.start(settings=FailpointSettings(self._plain, point))

    def _world(self, size: int) -> None:
        # Not any step of so many workers, but one of those that are there now: a change may be under way.
        after = self.job.step
        living = [w for w in self.slots.values() if not w.doomed]
        assert len(living) == size

        def look() -> bool:
            pids = {w.pid for w in self.slots.values() if not w.doomed}
            newest = [r for r in self.job.records("done") if r["world"] == size and r["step"] > after]
            return {r["pid"] for r in newest if r["step"] == newest[-1]["step"]} == pids if newest else False

        self._until(look, f"a step of {size} workers after step {after}")

    def _until(self, found: Callable[[], bool], what: str) -> None:
        self.job.wait_until(lambda: self._tend() or found(), f"{what} ({self.point})", 90.0)

    def _tend(self) -> None:
        for slot, worker in list(self.slots.items()):
            if worker.records("failpoint") and self.point is not None and self.point.action == "stop":
                since = self._stopped_at.setdefault(worker.name, time.monotonic())
                if time.monotonic() - since > STOP_S and worker.exit_code is None:
                    os.kill(worker.pid, signal.SIGCONT)
            is_over = (self.job.folder / "end").exists() and worker.exit_code == 0
            if not worker.doomed and worker.exit_code is not None and not is_over:
                self.ended.append(worker)
                self._start(slot)
