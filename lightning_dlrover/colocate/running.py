"""A job that runs: its processes, their reports, and measurements of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lightning_dlrover.colocate.gpus import GpuSums
from lightning_dlrover.colocate.jobs_file import JobSpec
from lightning_dlrover.colocate.journal import Span
from lightning_dlrover.colocate.supervised_job import SupervisedJob
from lightning_dlrover.colocate.tenants import Holding, Memory, Phase, Tenant, Where
from lightning_dlrover.colocate.usage import TreeUse, tree_use
from lightning_dlrover.observe.admission_client import AdmissionReport, has_reported, read_reports

__all__ = ["Moment", "WatchedJob"]

BUSY = 0.05
"""Part of the time in which a core, or its GPU, is busy with a job that does not hang; and seconds at the least."""
LEAST_BUSY_S = 0.2
SHRINK_S = 60.0
"""Seconds in which an elastic job must have given up a process."""
MEASURE_S = 0.25
"""Least seconds between two measurements of a job's memory and CPU time."""


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
    seat: Path
    submitted_s: float
    at_s: float
    charges: dict[Memory, int]
    phase: Phase = "starting"
    paused_from: Phase = "running"
    short_of: set[Memory] = field(default_factory=set)  # memories whose charge it has outgrown
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
    guessed: set[Memory] = field(default_factory=set)  # memories whose peak is unknown
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
        self.has_reported = self.has_reported or has_reported(self.seat)
        if self.phase != "paused" or not self.reports:
            reports = read_reports(self.seat)
            # Those of processes that are gone do not count, unless process ids differ here and there.
            self.reports = [report for report in reports if report.process_id in pids] or reports
        if now - self._measured_s >= MEASURE_S:
            former, former_s = self.use, self._measured_s
            self._measured_s = now
            self.use = tree_use(pids)
            self.cores = max(0.0, self.use.cpu_s - former.cpu_s) / (now - former_s) if former_s >= 0 else 0.0
            self._see("host", self.use.peak_bytes)
        steps, cpu_s = self._moved
        used_s = self.use.cpu_s - cpu_s
        # Threads that look for something a few times a second use less.
        is_busy = used_s >= LEAST_BUSY_S and used_s >= BUSY * (now - self.moved_s)
        if self.num_steps > steps or is_busy or self.phase in ("paused", "asks"):
            self._has_moved()

    def look_at_gpu(self, sums: GpuSums, gpu_bytes: int) -> None:
        """Take the newest measurement of its GPU, and its own memory there."""
        self.gpu_sums, self.gpu_bytes = sums, gpu_bytes
        # The host may sleep during a kernel. NVML does not tell whose kernel runs: beside others a hung command is found late.
        if not self.reports and sums.busy_s - self._gpu_busy_s >= max(LEAST_BUSY_S, BUSY * (self._looked_s - self.moved_s)):
            self._has_moved()
        self._see("gpu", max(gpu_bytes, sum(report.gpu_peak_bytes for report in self.reports)))

    def _has_moved(self) -> None:
        self._moved, self._gpu_busy_s, self.moved_s = (self.num_steps, self.use.cpu_s), self.gpu_sums.busy_s, self._looked_s

    def _see(self, memory: Memory, peak_bytes: int) -> None:
        self.peaks[memory] = max(self.peaks.get(memory, 0), peak_bytes)

    @property
    def where(self) -> Where:
        """Type of its device."""
        return "gpu" if "gpu" in self.charges else "cpu"

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
        # A report says that it waits until its process has seen the answer.
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
            is_admitted="running" in (self.phase, self.paused_from if self.phase == "paused" else ""),
            since_s=self.phase_since_s,
            owner=self.spec.owner,
            num_processes=self.num_processes,
            # One that has not shrunk in time cannot.
            min_processes=0 if self._has_failed_to_shrink else min((r.min_processes for r in self.reports), default=0),
            is_shrinking=0 < self.most_processes < self.num_processes,
            steps_left=self.steps_left,
            num_steps=self.num_steps,
        )

    @property
    def num_processes(self) -> int:
        """Number of its processes that report."""
        return max((report.num_processes for report in self.reports), default=1)

    @property
    def _has_failed_to_shrink(self) -> bool:
        late = self._looked_s - self.asked_to_shrink_s > SHRINK_S
        return 0 < self.most_processes < self.num_processes and late

    def paused_s(self, now: float) -> float:
        """Seconds in which it was paused so far."""
        spans = [*self.spans, Span(self.phase, self.phase_since_s, now)]
        return sum(span.ended - span.began for span in spans if span.phase == "paused")
