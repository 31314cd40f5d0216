"""Every write into etcd as a place where a process can be killed, stopped, delayed or refused.

`Caller.call` is wrapped inside the process, because every request of the real code passes through it. A write is
identified by its operation and record, `put round:grow` for example, and by its count in the process.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from lightning_dlrover.rdzv.etcd.connection import Caller
from lightning_dlrover.rdzv.etcd.types import EtcdUnavailableError

Action = Literal["kill", "stop", "delay", "fail", "lose"]
ACTIONS: tuple[Action, ...] = ("kill", "stop", "delay", "fail", "lose")

DELAY_S = 3.0
STOP_S = 3.5  # seconds, longer than the leases of stopped processes


@dataclass(frozen=True)
class Failpoint:
    """Fault at the nth write of one name in one process.

    kill: SIGKILL before it. stop: SIGSTOP before it, for longer than the lease. delay: the write is late. fail: it is not made.
    lose: it is made, but its answer is lost.
    """

    slot: str
    write: str
    nth: int
    action: Action


def disturb_writes(point: Failpoint | None, note: Callable[..., None]) -> None:
    """Report every write of this process to `note` from now on, and the moment of a disturbance."""
    original: Callable[..., Any] = Caller.call
    made: Counter[str] = Counter()
    lock = threading.Lock()

    def call(caller: Caller, action: str, service: str, method: str, request: Any, *args: Any, **kwargs: Any) -> Any:
        name = _name_of(method, request)
        if name is None:
            return original(caller, action, service, method, request, *args, **kwargs)
        with lock:
            made[name] += 1
            nth = made[name]
        note("write", name=name, nth=nth)
        if point is None or (name, nth) != (point.write, point.nth):
            return original(caller, action, service, method, request, *args, **kwargs)
        note("failpoint", action=point.action)
        if point.action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif point.action == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif point.action == "delay":
            time.sleep(DELAY_S)
        elif point.action == "fail":
            raise EtcdUnavailableError(f"cannot {action}: a failpoint")
        answer = original(caller, action, service, method, request, *args, **kwargs)
        if point.action == "lose":
            raise EtcdUnavailableError(f"cannot {action}: a failpoint has lost the answer")
        return answer

    Caller.call = call  # type: ignore[assignment, method-assign]


def _name_of(method: str, request: Any) -> str | None:
    """Name of a request's write; None for a request that only reads."""
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
    """Short name of a record: `live/workers/host-12-ab` becomes `workers/own` or `workers/other`. Its state follows a colon."""
    parts = key.decode().split("/")[3:]  # skips prefix and run id
    if parts[0] == "live":
        parts = parts[2:] if parts[1] == "shared" else parts[1:]
    name = parts[0]
    if name in ("workers", "drains", "addresses") and len(parts) > 1:
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
