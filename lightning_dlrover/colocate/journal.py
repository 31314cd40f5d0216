"""The history of a queue's jobs: records as lines of JSON, each on disk before the dispatcher acts on it.

A dispatcher that was killed leaves the file as it is. The next one reads it and goes on.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from lightning_dlrover.colocate.jobs_file import JobSpec
from lightning_dlrover.colocate.tenants import Where
from lightning_dlrover.record_file import RecordFile, RecordForm, read_lines

__all__ = [
    "FILE_NAME",
    "Added",
    "Ended",
    "Journal",
    "JournalError",
    "Opened",
    "Profiled",
    "Rates",
    "Record",
    "Span",
    "Started",
    "read_records",
]

FILE_NAME = "queue.jsonl"
FORMAT = 1


class JournalError(ValueError):
    """A queue's folder that cannot be continued."""


@dataclass(frozen=True)
class Header:
    """First line of the file."""

    format: int
    queue: str  # mark of all processes of this queue's jobs


@dataclass(frozen=True)
class Opened:
    """A dispatcher began to run the queue."""

    policy: str
    cores: float  # the sum over all devices
    memory_bytes: int
    at: float


@dataclass(frozen=True)
class Span:
    """A time in which a job was in one phase (`tenants.py`)."""

    phase: str
    began: float
    ended: float


@dataclass(frozen=True)
class Added:
    """A job of the queue."""

    spec: JobSpec
    at: float  # seconds since the epoch, as everywhere in this file


@dataclass(frozen=True)
class Started:
    """A job's command was started."""

    job: str
    attempt: int  # 1 is the first
    device: str
    at: float


@dataclass(frozen=True)
class Profiled:
    """Needs and speed of a kind of job that runs alone."""

    job_kind: str
    device_kind: str
    use: dict[str, float]  # amount of each resource, mean over a step
    steps_per_s: float  # cores in use of a command that reports no steps
    reports: bool = True


@dataclass(frozen=True)
class Rates:
    """How fast jobs ran side by side, each relative to alone."""

    device: str
    speeds: dict[str, float]  # key: kind of job; a kind that occurs twice has its mean
    kinds: tuple[str, ...]  # one for each job that ran
    seconds: float
    device_kind: str = "cpu"


@dataclass(frozen=True)
class Ended:
    """A job's command has ended.

    Args:
        result: `done`, `failed`, `evicted` (it goes back to the queue), or `stopped` with the dispatcher.
        peak_bytes: of the host's memory.
        estimate_bytes: the peak that was expected; 0: none was.
        margin_bytes: by how much the peak might have been higher.
        gpu_peak_bytes: the same three of a GPU's memory.
        where: type of the device that it ran on.
    """

    job: str
    attempt: int
    result: str
    code: int
    reason: str
    at: float
    run_s: float  # paused time excluded
    paused_s: float
    cpu_s: float
    peak_bytes: int
    estimate_bytes: int = 0
    margin_bytes: int = 0
    num_steps: int = 0
    spans: tuple[Span, ...] = ()
    gpu_peak_bytes: int = 0
    gpu_estimate_bytes: int = 0
    gpu_margin_bytes: int = 0
    where: Where = "cpu"

    def __post_init__(self) -> None:
        if self.result not in ("done", "failed", "evicted", "stopped"):
            raise ValueError(f"result {self.result!r} is unknown")


Record: TypeAlias = Opened | Added | Started | Profiled | Rates | Ended
FORM = RecordForm(
    header=Header,
    records={
        "opened": Opened,
        "added": Added,
        "started": Started,
        "profiled": Profiled,
        "rates": Rates,
        "ended": Ended,
    },
    format=FORMAT,
    file_of="a queue",
    line_of="a record of a queue",
    user="dispatcher",
    error=JournalError,
)


class Journal(RecordFile[Header]):
    """The journal of one folder, which this process alone may add to. Use as a context manager.

    Raises:
        JournalError: the folder's journal is unreadable, or in use.
        OSError: the folder cannot be written.
    """

    records: list[Record]

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / FILE_NAME, FORM, Header(FORMAT, uuid.uuid4().hex))
        self.queue = self.header.queue


def read_records(folder: Path) -> list[Record]:
    """Read the journal of a queue, which may be in use. A last line without an end is ignored.

    Raises:
        JournalError: there is none, or a line is not a record.
    """
    path = folder / FILE_NAME
    try:
        data = path.read_bytes()
    except OSError as error:
        raise JournalError(f"{folder} holds no queue: {error}") from error
    return read_lines(data, path, FORM)[1]
