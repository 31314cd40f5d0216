"""A running job: its supervisor and processes, their reports, and measurements of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from lightning_dlrover.codec import from_fields
from lightning_dlrover.colocate import supervisor
from lightning_dlrover.colocate.admission_client import AdmissionReport, has_reported, read_reports
from lightning_dlrover.colocate.devices import GpuSums, TreeUse, tree_use
from lightning_dlrover.colocate.journal import JobSpec, Span
from lightning_dlrover.colocate.tenants import Holding, Memory, Phase, Tenant, Where

RESULT = "result.json"
OUTPUT = "output.log"
LAST_LINES = 3
MAX_TAIL_BYTES = 8_192


@dataclass(frozen=True)
class Outcome:
    """How a job's command has ended.

    Args:
        code: exit code. None: the supervisor was killed, and the job with it.
        signal: number of the signal that ended the command; 0: none did.
        asked_to_end: an `end` had been sent.
    """

    code: int | None
    signal: int
    asked_to_end: bool
    cpu_s: float
    largest_process_bytes: int
    began_s: float = 0.0  # seconds since the epoch
    ended_s: float = 0.0

    @property
    def succeeded(self) -> bool:
        return self.code == 0 and not self.signal

    @property
    def text(self) -> str:
        """Human-readable exit status."""
        if self.code is None:
            return "its supervisor was killed"
        if self.code == supervisor.EXIT_NOT_STARTED:
            return f"exit code {self.code}, as of a command that cannot be started"
        if self.signal:
            known = {each.value: each.name for each in signal.Signals}
            return f"killed by {known.get(self.signal, f'signal {self.signal}')}"
        return f"exit code {self.code}"

    @property
    def exit_code(self) -> int:
        """The exit code as a shell states it."""
        if self.code is None:
            return 128 + signal.SIGKILL
        return 128 + self.signal if self.signal else self.code


def read_outcome(folder: Path) -> Outcome | None:
    """Return how the job of a folder has ended; None if no end is recorded."""
    with suppress(OSError, ValueError):
        return from_fields(Outcome, json.loads((folder / RESULT).read_bytes()), str(folder / RESULT))
    return None


class SupervisedJob:
    """Start a command under a supervisor.

    Args:
        folder: a new folder for the job's output and result.
        working_folder: working folder of the command.
        environment: all variables of the command.
        cores: cores that all its processes are bound to.

    Raises:
        OSError: no process can be started.
    """

    def __init__(
        self,
        command: Sequence[str],
        folder: Path,
        working_folder: str,
        environment: Mapping[str, str],
        cores: Collection[int] = (),
    ) -> None:
        self._folder = folder
        self._output = folder / OUTPUT
        program = [sys.executable, "-I", "-S", supervisor.__file__, str(folder / RESULT), str(self._output), *command]
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, cores or before)  # children inherit it from their first instruction on
        try:
            self._supervisor = subprocess.Popen(
                program,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                cwd=working_folder,
                env=dict(environment),
                start_new_session=True,
            )
        finally:
            os.sched_setaffinity(0, before)
        self.end_descriptor: int | None = None
        """Descriptor that can be read once the supervisor has ended; None where the kernel or this Python has none."""
        with suppress(AttributeError, OSError):
            self.end_descriptor = os.pidfd_open(self._supervisor.pid)

    def close(self) -> None:
        """Close the descriptor. The job has ended."""
        if self.end_descriptor is not None:
            os.close(self.end_descriptor)
            self.end_descriptor = None

    @property
    def supervisor_pid(self) -> int:
        return self._supervisor.pid

    def pause(self) -> None:
        """Stop all processes of the job."""
        self._order(b"pause\n")

    def resume(self) -> None:
        """Continue all processes of the job."""
        self._order(b"resume\n")

    def end(self, grace_s: float) -> None:
        """Send SIGTERM to all processes, and SIGKILL after the grace period to those that remain."""
        self._order(f"end {grace_s:g}\n".encode())

    def outcome(self) -> Outcome | None:
        """Return how the job has ended; None while a process of it may live."""
        if self._supervisor.poll() is None:
            return None
        if self._supervisor.stdin is not None:
            with suppress(OSError):
                self._supervisor.stdin.close()
        if (outcome := read_outcome(self._folder)) is not None:
            return outcome
        # A supervisor that could not write the result ends with the command's exit code.
        code = self._supervisor.returncode
        return Outcome(code if code >= 0 else None, 0, False, 0.0, 0)

    def last_words(self) -> str:
        """Return the last lines of the job's output."""
        with suppress(OSError), self._output.open("rb") as stream:
            stream.seek(max(0, os.fstat(stream.fileno()).st_size - MAX_TAIL_BYTES))
            lines = [line.strip() for line in stream.read().decode(errors="replace").splitlines() if line.strip()]
            return " | ".join("".join(c if c.isprintable() else " " for c in line)[:200] for line in lines[-LAST_LINES:])
        return ""

    def _order(self, order: bytes) -> None:
        assert self._supervisor.stdin is not None
        with suppress(OSError):  # the supervisor has ended; `outcome` has the reason
            self._supervisor.stdin.write(order)
            self._supervisor.stdin.flush()


BUSY = 0.05
"""Minimum fraction of time, and minimum seconds, that a job keeps a core or its GPU busy if it does not hang."""
LEAST_BUSY_S = 0.2
SHRINK_S = 60.0
"""Deadline, in seconds, for an elastic job to give up a process."""
MEASURE_S = 0.25
"""Minimum seconds between two measurements of a job's memory and CPU time."""


@dataclass(frozen=True)
class Moment:
    """Work and use of a job up to a moment. All are sums, so two moments give the rates between them."""

    at_s: float  # moment of the newest report, else of the newest measurement
    measured_s: float
    cpu_s: float
    num_steps: int
    step_s: float
    data_wait_s: float
    gpu: GpuSums = field(default_factory=GpuSums)  # sums of the device: the job's own only while it runs alone


@dataclass
class WatchedJob:
    """One attempt of a job.

    Args:
        at_s: moment of its start on the dispatcher's clock.
        charges: bytes set aside for it, of each memory of its device.
    """

    spec: JobSpec
    attempt: int
    device: str
    supervised: SupervisedJob
    admission: Path
    submitted_s: float
    at_s: float
    charges: dict[Memory, int]
    phase: Phase = "starting"
    paused_from: Phase = "running"
    short_of: set[Memory] = field(default_factory=set)  # memories where it has outgrown its charge
    most_processes: int = 0  # limit of an elastic job that was asked to shrink
    asked_to_shrink_s: float = 0.0
    peaks: dict[Memory, int] = field(default_factory=dict)
    gpu_bytes: int = 0
    gpu_sums: GpuSums = field(default_factory=GpuSums)
    use: TreeUse = field(default_factory=lambda: TreeUse(0.0, 0, 0, 0))
    reports: list[AdmissionReport] = field(default_factory=list)
    answered: int = 0  # number of the request for memory that was granted
    has_reported: bool = False  # whether there was a report of its first process, readable or not
    threads: int = 0
    cores: float = 0.0  # cores that it kept busy between the last two measurements
    guessed: set[Memory] = field(default_factory=set)  # memories with an unknown peak
    probed: dict[Memory, int] = field(default_factory=dict)  # peaks of a command that reports nothing, after its probe
    end_reason: str = ""
    end_result: str = ""
    grace_over_s: float = 0.0
    spans: list[Span] = field(default_factory=list)  # on the dispatcher's clock
    phase_since_s: float = 0.0
    moved_s: float = 0.0  # when it last made a step, or used its share of a core
    _moved: tuple[int, float] = (0, 0.0)
    _gpu_busy_s: float = 0.0  # busy time of its GPU when it last moved
    _measured_s: float = -1.0
    _looked_s: float = 0.0

    def __post_init__(self) -> None:
        self.phase_since_s = self.moved_s = self.at_s

    def look(self, now: float, pids: list[int]) -> None:
        """Read the reports, and measure the processes if that was not done a moment ago."""
        self._looked_s = now
        self.has_reported = self.has_reported or has_reported(self.admission)
        if self.phase != "paused" or not self.reports:
            reports = read_reports(self.admission)
            # Those of processes that are gone do not count, unless process ids differ here and there.
            self.reports = [report for report in reports if report.process_id in pids] or reports
        if now - self._measured_s >= MEASURE_S:
            former, former_s = self.use, self._measured_s
            self._measured_s = now
            self.use = tree_use(pids)
            self.cores = max(0.0, self.use.cpu_s - former.cpu_s) / (now - former_s) if former_s >= 0 else 0.0
            self._note_peak("host", self.use.peak_bytes)
        steps, cpu_s = self._moved
        used_s = self.use.cpu_s - cpu_s
        # Threads that look for something a few times a second use less.
        is_busy = used_s >= LEAST_BUSY_S and used_s >= BUSY * (now - self.moved_s)
        if self.num_steps > steps or is_busy or self.phase in ("paused", "asks"):
            self._has_moved()

    def look_at_gpu(self, sums: GpuSums, gpu_bytes: int) -> None:
        """Take the newest measurement of its GPU, and its own memory there."""
        self.gpu_sums, self.gpu_bytes = sums, gpu_bytes
        # The host may sleep during a kernel. NVML does not report which process runs a kernel: next to other jobs a hung
        # command is found late.
        if not self.reports and sums.busy_s - self._gpu_busy_s >= max(LEAST_BUSY_S, BUSY * (self._looked_s - self.moved_s)):
            self._has_moved()
        self._note_peak("gpu", max(gpu_bytes, sum(report.gpu_peak_bytes for report in self.reports)))

    def _has_moved(self) -> None:
        self._moved, self._gpu_busy_s, self.moved_s = (self.num_steps, self.use.cpu_s), self.gpu_sums.busy_s, self._looked_s

    def _note_peak(self, memory: Memory, peak_bytes: int) -> None:
        self.peaks[memory] = max(self.peaks.get(memory, 0), peak_bytes)

    @property
    def where(self) -> Where:
        """Type of its device."""
        return "gpu" if "gpu" in self.charges else "cpu"

    @property
    def is_active(self) -> bool:
        """Whether its processes may use their cores: they start, or train."""
        return self.phase in ("starting", "running")

    def resident_bytes(self, memory: Memory) -> int:
        """Return the bytes that it has now."""
        return self.gpu_bytes if memory == "gpu" else self.use.resident_bytes

    def enter(self, phase: Phase, now: float) -> None:
        """Begin another phase."""
        self.spans.append(Span(self.phase, self.phase_since_s, now))
        self.phase, self.phase_since_s = phase, now

    @property
    def asks(self) -> bool:
        """Whether all of its processes that report wait for an answer that was not given."""
        # A report is marked as waiting until its process has seen the answer.
        is_new = self.request > self.answered
        return is_new and len(self.reports) >= self.num_processes and all(report.waits for report in self.reports)

    @property
    def request(self) -> int:
        """Number of the newest request for memory."""
        return max((report.request for report in self.reports), default=0)

    def estimate(self, memory: Memory) -> tuple[int, int]:
        """Return the estimated peak of all its processes, and its margin; zeros if one of them does not know its own."""
        if self.probed.get(memory):
            return self.probed[memory], 0
        if memory == "gpu":
            found = [(report.gpu_estimate_bytes, report.gpu_estimate_margin_bytes) for report in self.reports]
        else:
            found = [(report.estimate_bytes, report.estimate_margin_bytes) for report in self.reports]
        if not all(estimate for estimate, _ in found):
            return 0, 0
        return sum(estimate for estimate, _ in found), sum(margin for _, margin in found)

    @property
    def num_steps(self) -> int:
        return self.reports[0].num_steps if self.reports else 0

    @property
    def steps_left(self) -> int | None:
        return self.reports[0].steps_left if self.reports else None

    def moment(self) -> Moment:
        """Return the sums of the newest measurement and report."""
        if self.reports:
            first = self.reports[0]
            steps = first.num_steps, first.step_s, first.data_wait_s
            return Moment(first.at_s, self._measured_s, self.use.cpu_s, *steps, self.gpu_sums)
        return Moment(self._measured_s, self._measured_s, self.use.cpu_s, 0, 0.0, 0.0, self.gpu_sums)

    def tenant(self, needs: Mapping[Memory, int]) -> Tenant:
        """Return the job as decisions see it."""
        is_shrinking = 0 < self.most_processes < self.num_processes
        is_late = self._looked_s - self.asked_to_shrink_s > SHRINK_S
        return Tenant(
            name=self.spec.name,
            kind=self.spec.kind,
            phase=self.phase,
            device=self.device,
            priority=self.spec.priority,
            submitted_s=self.submitted_s,
            started_s=self.at_s,
            holdings={
                memory: Holding(
                    charge, self.resident_bytes(memory), needs[memory], memory in self.short_of, memory in self.guessed
                )
                for memory, charge in self.charges.items()
            },
            is_admitted=(self.paused_from if self.phase == "paused" else self.phase) == "running",
            since_s=self.phase_since_s,
            owner=self.spec.owner,
            num_processes=self.num_processes,
            # One that has not shrunk in time cannot.
            min_processes=0 if is_shrinking and is_late else min((r.min_processes for r in self.reports), default=0),
            is_shrinking=is_shrinking,
            steps_left=self.steps_left,
            num_steps=self.num_steps,
        )

    @property
    def num_processes(self) -> int:
        """Number of its processes that report."""
        return max((report.num_processes for report in self.reports), default=1)

    def paused_s(self, now: float) -> float:
        """Return the seconds that it has been paused so far."""
        spans = [*self.spans, Span(self.phase, self.phase_since_s, now)]
        return sum(span.ended - span.began for span in spans if span.phase == "paused")
