"""A job's side of co-location: it reports its progress to a dispatcher, and waits until its memory fits.

The dispatcher names a folder in the job's environment. Each process of the job writes a file there, `progress-RANK`, and
reads the dispatcher's `answer`. Both files are replaced atomically. Without the variable this module does nothing.
"""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from lightning_dlrover import variables
from lightning_dlrover.codec import RecordError, from_fields, to_json
from lightning_dlrover.files import atomic_write

ANSWER, PROGRESS = "answer", "progress-"
REPORT_S = 0.2
"""Minimum seconds between two reports."""
LOOK_S, FIRST_LOOK_S = 0.05, 0.005
"""Seconds between two checks for the answer; the second one just after the request, when the answer often comes."""
MAX_BYTES = 65_536
ADMISSION_S = 7 * 86_400.0
"""Deadline for admission. A job may wait for others for days. Jobs exit with their dispatcher, so no job waits forever."""


class NotAdmittedError(TimeoutError):
    """The dispatcher did not give this job the memory that it needs."""


@dataclass(frozen=True)
class AdmissionReport:
    """Work of one process of a job since its first step. All are sums, so two reports give the rates between them."""

    process_id: int
    at_s: float  # time.monotonic(), which all processes of a machine share
    num_processes: int = 1  # processes of the job that report
    min_processes: int = 0  # minimum number of them to continue; 0: the number never changes
    request: int = 0  # number of the request for memory; a script may fit more than once
    waits: bool = False  # the answer to the estimate is awaited
    estimate_bytes: int = 0  # peak of this process; 0: not estimated
    estimate_margin_bytes: int = 0
    estimate_note: str = ""
    gpu_estimate_bytes: int = 0  # peak of this process on its GPU; 0: not estimated
    gpu_estimate_margin_bytes: int = 0
    gpu_bytes: int = 0  # memory on its GPU, at present and at its peak
    gpu_peak_bytes: int = 0
    step_bytes: int = 0  # memory that a step reads and writes, by arithmetic; 0: unknown
    num_steps: int = 0
    steps_left: int | None = None  # None: unknown
    step_s: float = 0.0  # time in steps, waiting for data included
    data_wait_s: float = 0.0
    threads: int = 0


@dataclass(frozen=True)
class Answer:
    """The dispatcher's grant."""

    admitted: bool = False
    request: int = 0  # the newest request that it answers
    threads: int = 0  # intra-op threads per process; 0: as the script has them
    memory_known: bool = False  # the first request needs no estimate
    most_processes: int = 0  # maximum number of processes of an elastic job; 0: any number


class AdmissionClient:
    """One process's reports to a dispatcher, and the dispatcher's answers.

    Args:
        folder: the job's folder for reports and the answer.
        rank: global rank of this process.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder = folder
        self._path = folder / f"{PROGRESS}{rank}"
        self._estimate = AdmissionReport(os.getpid(), time.monotonic())
        self._request = read_answer(folder).request
        self._num_steps = self._threads = 0
        self._steps_left: int | None = None
        self._step_s = self._data_wait_s = 0.0
        self._last_s = self._reported_s = time.monotonic()
        self._answer = Answer()
        self._answer_of: tuple[int, int] | None = None  # inode and time of the answer that was read

    @classmethod
    def from_environment(cls, environ: Mapping[str, str], rank: int) -> AdmissionClient | None:
        """Return this process's client, or None if no dispatcher has started it."""
        folder = environ.get(variables.SEAT)
        return cls(Path(folder), rank) if folder else None

    def ask(self, estimate: AdmissionReport, timeout_s: float = ADMISSION_S) -> Answer:
        """Report the estimated peak of this process, and wait until the dispatcher admits the job.

        Args:
            estimate: its fields `estimate_...`, `gpu_...` and `step_bytes` count.

        Raises:
            NotAdmittedError: no answer within `timeout_s`.
        """
        self._estimate = estimate
        self._request += 1
        self._report(waits=True)
        asked = time.monotonic()
        deadline = asked + timeout_s
        while not ((answer := self.answer()).admitted and answer.request >= self._request):
            if time.monotonic() > deadline:
                raise NotAdmittedError(
                    f"the dispatcher of {self._folder} has not admitted this job within {timeout_s:.0f} s; it needs "
                    f"{(estimate.estimate_bytes + estimate.estimate_margin_bytes) >> 20} MiB; run it alone, or make it smaller"
                )
            time.sleep(LOOK_S if time.monotonic() - asked > LOOK_S else FIRST_LOOK_S)
        self._last_s = time.monotonic()
        self._report()
        return answer

    def step_ended(self, data_wait_s: float) -> None:
        """Count a step.

        Args:
            data_wait_s: seconds of it spent waiting for its batch.
        """
        now = time.monotonic()
        self._step_s += now - self._last_s
        self._last_s = now
        self._num_steps += 1
        self._data_wait_s += max(0.0, data_wait_s)

    @property
    def needs_no_estimate(self) -> bool:
        """Whether the dispatcher has measured the peak of an earlier job of this kind."""
        return self.answer().memory_known

    @property
    def is_due(self) -> bool:
        """Whether the newest report is old enough for another one."""
        return self._last_s - self._reported_s >= REPORT_S

    def report(
        self,
        steps_left: int | None,
        threads: int,
        num_processes: int = 0,
        min_processes: int = 0,
        gpu_bytes: tuple[int, int] = (0, 0),
    ) -> None:
        """Report the steps so far.

        Args:
            steps_left: None where the end is unknown.
            threads: intra-op threads of this process.
            num_processes: processes of the job that report; 0: as many as before.
            min_processes: see `AdmissionReport`.
            gpu_bytes: memory on its GPU, at present and at its peak.
        """
        self._steps_left, self._threads = steps_left, threads
        now_bytes, peak_bytes = gpu_bytes
        self._estimate = replace(self._estimate, gpu_bytes=now_bytes, gpu_peak_bytes=peak_bytes)
        if num_processes:
            self._estimate = replace(self._estimate, num_processes=num_processes, min_processes=min_processes)
        self._report()

    def answer(self) -> Answer:
        """Return the dispatcher's newest answer."""
        with suppress(OSError):
            status = (self._folder / ANSWER).stat()
            if (of := (status.st_ino, status.st_mtime_ns)) != self._answer_of:
                self._answer, self._answer_of = read_answer(self._folder), of
        return self._answer

    def _report(self, waits: bool = False) -> None:
        self._reported_s = time.monotonic()
        report = replace(
            self._estimate,
            at_s=self._reported_s,
            waits=waits,
            request=self._request,
            num_steps=self._num_steps,
            steps_left=self._steps_left,
            step_s=self._step_s,
            data_wait_s=self._data_wait_s,
            threads=self._threads,
        )
        with suppress(OSError):  # a full disk must not stop training; the dispatcher then has older figures
            atomic_write(self._path, to_json(report))


def has_reported(folder: Path) -> bool:
    """Whether the first process of a job has written a report."""
    return os.path.exists(f"{folder}/{PROGRESS}0")  # asked a hundred times a second, and a Path costs five times as much


def read_reports(folder: Path) -> list[AdmissionReport]:
    """Return the reports of all processes of a job, in the order of their ranks. Unreadable ones are skipped."""
    found = []
    for path in sorted(folder.glob(f"{PROGRESS}*"), key=lambda path: path.name):
        with suppress(OSError, ValueError, RecursionError):
            found.append(from_fields(AdmissionReport, _document(path), str(path)))
    return found


def read_answer(folder: Path) -> Answer:
    """Return the dispatcher's answer; an empty one if it has not answered."""
    with suppress(OSError, ValueError, RecursionError):
        return from_fields(Answer, _document(folder / ANSWER), str(folder / ANSWER))
    return Answer()


def write_answer(folder: Path, answer: Answer) -> None:
    """Replace the dispatcher's answer in a job's folder.

    Raises:
        OSError: the folder cannot be written.
    """
    atomic_write(folder / ANSWER, to_json(answer))


def _document(path: Path) -> object:
    # A job may have put anything there. A pipe without a writer would block, and a device has no end.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    with os.fdopen(descriptor, "rb") as stream:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise RecordError(f"{path} is not a file")
        text = stream.read(MAX_BYTES)
    try:
        return json.loads(text)
    except ValueError as error:
        raise RecordError(f"{path} is not JSON: {error}") from error
