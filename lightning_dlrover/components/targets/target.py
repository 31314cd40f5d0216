"""The interface between the controller and a place where nodes run, and the parts that all targets share: logs and polling."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, Literal, Protocol, TypeVar, runtime_checkable

from lightning_dlrover import variables
from lightning_dlrover.rdzv.job.records import EndNotice, EventRecord
from lightning_dlrover.spares import Spares

AppStatus = Literal["pending", "running", "succeeded", "failed", "cancelled", "gone"]


@dataclass(frozen=True)
class NodeSize:
    """Resources of one node; 0 leaves a value to its scheduler."""

    cpus: int = 0
    memory_mb: int = 0  # MiB

    def is_at_least(self, other: NodeSize) -> bool:
        return self.cpus >= other.cpus and self.memory_mb >= other.memory_mb

    def __str__(self) -> str:
        parts = [f"{self.cpus} cores"] * bool(self.cpus) + [f"{self.memory_mb} MiB"] * bool(self.memory_mb)
        return ", ".join(parts) or "no size of its own"


ANY_SIZE = NodeSize()


@dataclass(frozen=True)
class NodeSpec:
    """Command and settings shared by every node of a job."""

    script: str  # `-m` if the first argument is the name of a module, `--no-python` if it is another program
    script_args: tuple[str, ...]
    endpoint: str
    run_id: str
    prefix: str
    min_workers: int
    max_workers: int
    max_restarts: int = 0
    workers_per_node: int = 1
    sizes: tuple[int, ...] = ()  # numbers of workers that may be requested; empty: any
    has_spares: bool = False  # workers are forked from processes that have imported their modules
    notices: str = ""  # cloud whose notices the nodes' agents read: aws, gcp or azure
    access: Mapping[str, str] = field(default_factory=dict)  # etcd user and paths of credential files
    environment: Mapping[str, str] = field(default_factory=dict)  # extra variables of the nodes
    # seconds, by the keys of --rdzv-conf; missing keys have defaults
    timeouts: Mapping[str, float] = field(default_factory=dict)


class TargetError(RuntimeError):
    """The place's scheduler could not be reached, or its answer is malformed. The request may have been carried out."""

    retry_after_s = 0.0  # seconds until the next request, as the scheduler demands


class NotTakenError(TargetError):
    """The scheduler has certainly not accepted a node.

    Args:
        kind: text shared by all refusals for this reason, whose messages may differ; default: derived from the message.
    """

    def __init__(self, message: str, kind: str = "") -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True)
class App:
    """One node as its scheduler lists it."""

    node: str
    handle: str
    is_living: bool


@dataclass(frozen=True)
class Resize:
    """Progress of a request to change a running node's size."""

    # asked: the change is under way. waiting: there is no room for it now. refused: it cannot be made in place.
    state: Literal["asked", "waiting", "done", "refused"]
    why: str = ""  # reason of the scheduler


class Target(Protocol):
    """A place that runs one-node apps; implemented in `local.py`, `slurm.py` and `kubernetes.py`."""

    name: str
    outlives_controller: bool  # nodes survive the end of the process that started them

    @property
    def resizes_in_place(self) -> bool:
        """Whether running nodes may get another size without a new process. False once the scheduler forbids it."""

    @property
    def spares(self) -> Spares | None:
        """The spare process of this host that nodes are forked from; None if there is none."""

    def open(self, mark: str) -> None:
        """Select a job's nodes: `mark` is part of each one's name and of no other job's. Must be called first."""

    def start(self, node: str, size: NodeSize = ANY_SIZE) -> str:
        """Start a node of that size and return its app's handle.

        Raises:
            NotTakenError: the scheduler refused it.
            TargetError: the scheduler may have accepted it; `apps` lists it in that case.
        """

    def owns(self, node: str, handle: str) -> bool:
        """Whether `handle`, read from a record, has the form that `start` gives this job's node. Call after `open`."""

    def apps(self) -> Sequence[App]:
        """Return the job's nodes that the scheduler lists, those of earlier controllers included. Ended ones may be missing.

        Raises:
            TargetError: the scheduler does not answer.
        """

    def status(self, handle: str) -> AppStatus:
        """Return the newest known state, also while the scheduler is unreachable."""

    def cancel(self, handles: Iterable[str]) -> None:
        """End all these apps. Where `outlives_controller`, the call may return before they have ended; see `status`.

        Raises:
            TargetError: the request did not reach the scheduler.
        """

    def resize(self, handle: str, size: NodeSize) -> Resize:
        """Give a running node this size in place, and return the progress. Call again until it is done or refused.

        The caller changes either cores or memory at a time. Repeated calls request the same size once.

        Raises:
            TargetError: the scheduler does not answer. It may have accepted the request.
        """

    def ran_out_of_memory(self, handle: str) -> bool:
        """Whether a failed node was killed for exceeding its memory."""

    def notice(self, handle: str) -> EndNotice | None:
        """Return the scheduler's announcement that this node will be taken away; None if there is none, or no newer answer."""

    def logs(self, handle: str) -> list[Path]:
        """Return the files with the node's output, stderr last."""

    def release(self, handle: str) -> bool:
        """Let the scheduler forget an app whose end is recorded in etcd. Return False to be called again."""

    def close(self) -> None:
        """Release this process's resources. End everything it started, unless nodes outlive the controller."""


@runtime_checkable
class EventSink(Protocol):
    """A target that also shows a job's history where users of its scheduler look for it."""

    def publish(self, event: EventRecord) -> None:
        """Show an event there. Returns at once, and an event may be lost."""


def thread_variables(num_cores: int, num_workers: int = 1) -> dict[str, str]:
    """Return the variables for the threads of a node's workers: as in this process, else one per core that they share."""
    if (chosen := os.environ.get("OMP_NUM_THREADS")) is not None:
        return {"OMP_NUM_THREADS": chosen}
    # Without cores of its own, a node has one thread, whatever its machine has.
    follows = {variables.THREADS_PER_CORE: "1"} if num_cores else {}
    return {"OMP_NUM_THREADS": str(max(1, num_cores // num_workers)), **follows}


# Files with the nodes' output, and the new lines in them.

TAIL_BYTES = 256 * 1024
"""Bytes at a file's end to search for why a node ended: all ranks' tracebacks fit, hours of progress bars do not."""

LONG_LINE_BYTES = 64 * 1024
"""Bytes of an unfinished line above which only its newest state is kept, as for a progress bar."""

PIECE_BYTES = 256 * 1024
"""Bytes to read at once. A longer line is returned in parts."""


CANNOT_START = "its command could not start"
"""Beginning of the reason that a target appends to the output of a node whose command never ran."""


def set_aside(file: Path) -> None:
    """Rename an earlier job's file, so that its content does not count as that of a new node with the same name.

    `log_files` does not find the new name. A file that was renamed earlier is overwritten.
    """
    with contextlib.suppress(FileNotFoundError):
        file.replace(file.with_name(f"former-{file.name}"))


def existing_logs(folder: Path) -> list[Path]:
    """Return the output files in a node's folder, stderr last."""
    # Path.exists() would raise on a temporary error of a shared file system.
    return [file for name in ("stdout", "stderr") if os.path.exists(file := folder / f"{name}.log")]


def read_tail(file: Path, num_bytes: int = TAIL_BYTES) -> str:
    """Return the end of a file, from the start of a line."""
    with file.open("rb") as stream:
        size = stream.seek(0, os.SEEK_END)
        stream.seek(max(0, size - num_bytes))
        tail = stream.read(num_bytes)
    if size > num_bytes:
        tail = re.split(rb"[\r\n]", tail, maxsplit=1)[-1]
    return tail.decode(errors="replace")


def log_files(folder: Path) -> dict[str, list[Path]]:
    """Return each node's output files in a job's log folder, in the order of the nodes' start."""
    found: dict[str, list[Path]] = {}
    for name in ("stdout", "stderr"):
        for file in sorted(folder.rglob(f"{name}.log")):
            # Slurm: node3/stdout.log. TorchX's local scheduler: SESSION/node3-x1y2z3/worker/0/stdout.log.
            parts = file.relative_to(folder).parts
            node = next((match[1] for part in parts if (match := re.match(r"(node\d+)(?:-|$)", part))), None)
            if node is not None:
                found.setdefault(node, []).append(file)
    return dict(sorted(found.items(), key=lambda item: int(item[0].removeprefix("node"))))


class LogFile:
    """Read a growing file line by line."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.num_read = 0  # bytes already read

    def skip(self) -> None:
        """Skip the existing content."""
        self.num_read = self.file.stat().st_size

    def new_lines(self, whole: bool) -> Iterator[str]:
        """Yield the lines since the last call. The file is read in pieces, so it may be of any size.

        A file truncated since, such as by logrotate's `copytruncate`, is read from its start. With `whole`, the file is
        complete, and an unfinished last line is included.
        """
        with self.file.open("rb") as stream:
            if stream.seek(0, os.SEEK_END) < self.num_read:
                self.num_read = 0
                yield f"({self.file.name} was cut short, so some of its lines may be missing here)"
            stream.seek(self.num_read)
            rest = b""  # an incomplete line
            while piece := stream.read(PIECE_BYTES):
                *lines, rest = (rest + piece).split(b"\n")
                for line in lines:
                    self.num_read += len(line) + 1
                    yield _newest_state(line)
                if len(rest) > LONG_LINE_BYTES:  # otherwise each call would read it again
                    num_overwritten = rest.rfind(b"\r", 0, -1) + 1
                    self.num_read += num_overwritten
                    rest = rest[num_overwritten:]
                if len(rest) > PIECE_BYTES:
                    self.num_read += len(rest)
                    yield _newest_state(rest)
                    rest = b""
            if rest and whole:
                self.num_read += len(rest)
                yield _newest_state(rest)


def _newest_state(line: bytes) -> str:
    """Return the visible part of a line that a progress bar has overwritten."""
    return line.decode(errors="replace").rstrip("\r").rsplit("\r", 1)[-1]


T = TypeVar("T")

_MAX_BACKOFF_S = 60.0
_STEADY_AFTER_S = 60.0
"""Seconds without a change after which lists are requested less often."""

_SOON_S = 0.5
"""Maximum seconds until the next list after a change that was requested."""


class Polling(Generic[T]):
    """The newest list of a job's nodes, requested at intervals.

    A failed request never means that a node has ended. It is repeated with growing pauses, and the last list holds.

    Args:
        request: lists the nodes; raises TargetError.
        newest: list that holds before the first answer.
        poll_s: minimum interval between requests. It doubles with every failure in a row, up to a minute.
        steady_s: interval once nothing has changed for a minute; default: `poll_s`.
        listed_at: time of the newest list, where `request` may return what has changed since; default: that of the request.
    """

    def __init__(
        self,
        request: Callable[[], T],
        newest: T,
        poll_s: float,
        clock: Callable[[], float] = time.monotonic,
        steady_s: float = 0.0,
        listed_at: Callable[[], float] | None = None,
    ) -> None:
        self._request = request
        self._listed_at = listed_at
        self._poll_s = poll_s
        self._steady_s = max(poll_s, steady_s)
        self._clock = clock
        self._changed_at = clock()
        self._trouble: TargetError | None = None
        self._num_failures = 0  # consecutive ones
        self._next_at = -float("inf")
        self._started_at: dict[str, float] = {}
        self.newest = newest
        self.asked_at = -float("inf")  # request time of the newest list

    def refresh(self, has_news: bool = False) -> bool:
        """List the nodes if a request is due, or if it costs nothing and `has_news`. Return whether there is a new list."""
        now = self._clock()
        if now < self._next_at and not (has_news and self._trouble is None):
            return False
        try:
            found = self._request()
        except TargetError as error:
            self._trouble, self._num_failures = error, self._num_failures + 1
            pause_s = max(self._poll_s * 2.0 ** min(10, self._num_failures), error.retry_after_s)
            self._next_at = self._clock() + min(_MAX_BACKOFF_S, pause_s)
            return False
        if found != self.newest or self._num_failures:
            self._changed_at = now
        self.newest = found
        self._trouble, self._num_failures = None, 0
        self.asked_at = self._listed_at() if self._listed_at is not None else now
        self._next_at = now + (self._steady_s if now - self._changed_at > _STEADY_AFTER_S else self._poll_s)
        return True

    def hasten(self) -> None:
        """List the nodes soon, because a change was requested."""
        self._expect_change(min(_SOON_S, self._poll_s))

    def raise_trouble(self) -> None:
        """Raise the TargetError of the newest request, if it failed."""
        if self._trouble is not None:
            raise self._trouble

    def note_start(self, node: str) -> None:
        self._started_at[node] = self._clock()
        if self._trouble is None:
            self._expect_change(self._poll_s)

    def _expect_change(self, within_s: float) -> None:
        self._changed_at = self._clock()
        self._next_at = min(self._next_at, self._changed_at + within_s)

    def has_started(self, node: str) -> bool:
        """Whether this process has started the node."""
        return node in self._started_at

    def covers(self, node: str) -> bool:
        """Whether the newest list is valid, and newer than the node's start: a node that it lacks does not exist."""
        return self._trouble is None and self.asked_at > self._started_at.get(node, -float("inf"))
