"""Measurements of kinds of jobs: their use and speed alone, their speeds side by side, their peak memory.

It comes from the queue's own journal and from those of earlier queues. Jobs with the same command, folder and variables are of
one kind.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from lightning_dlrover.colocate.company import Alone
from lightning_dlrover.colocate.jobs_file import JobSpec
from lightning_dlrover.colocate.journal import Added, Ended, Profiled, Rates, Record, read_records
from lightning_dlrover.colocate.memory import GROWTH
from lightning_dlrover.perf.memory_margin import MemoryMargin
from lightning_dlrover.planner.cluster import Device, Job, Profile
from lightning_dlrover.planner.cluster.policy import Floats, SpeedPredictor
from lightning_dlrover.planner.cluster.slowdown import Observation, SlowdownModel

__all__ = ["CPU", "Knowledge"]

SPREAD = 1.05
"""Peaks of two runs of one command differ by less."""
MAX_OBSERVATIONS = 400
CPU = "cpu"
"""Kind of device of all profiles. To a policy, each set of cores is a kind of its own, as jobs stay where they are."""


class Knowledge:
    """Collects records, and predicts from them. A `SpeedPredictor` of policies."""

    def __init__(self) -> None:
        self._specs: dict[str, JobSpec] = {}
        self._profiles: dict[tuple[str, str], Profiled] = {}
        self._peaks: dict[str, int] = {}  # key: kind; jobs that are done
        self._wanted: dict[str, int] = {}  # key: kind; jobs that were evicted
        self._estimates: list[tuple[int, int]] = []  # each with the measured peak, oldest first
        self._rates: list[Rates] = []
        self._num_rates = 0
        self._models: dict[str, tuple[int, SpeedPredictor]] = {}  # key: device; with the number of rates that it has learned

    def read(self, folder: Path) -> None:
        """Learn from another queue's folder.

        Raises:
            JournalError: it holds no readable queue.
        """
        self.recall(read_records(folder))

    def recall(self, records: Iterable[Record]) -> None:
        """Learn from records of a journal."""
        for record in records:
            if isinstance(record, Added):
                self._specs[record.spec.name] = record.spec
            elif isinstance(record, Ended) and record.job in self._specs:
                self.learn_end(self._specs[record.job], record)
            elif isinstance(record, Profiled | Rates):
                self.learn(record)

    # --- speeds --------------------------------------------------------------------------------------------------------------

    def learn(self, record: Profiled | Rates) -> bool:
        """Take a measurement; return whether it is new."""
        if isinstance(record, Rates):
            self._rates = [*self._rates, record][-MAX_OBSERVATIONS:]
            self._num_rates += 1
            return True
        key = record.job_kind, record.device_kind
        if key in self._profiles:
            return False
        self._profiles[key] = record
        return True

    @property
    def num_profiles(self) -> int:
        """Kinds that were measured alone, on each kind of device."""
        return len(self._profiles)

    def is_profiled(self, kind: str, device_kind: str) -> bool:
        return (kind, device_kind) in self._profiles

    def profile(self, kind: str, device_kind: str) -> Profile | None:
        """Return the needs of a kind of job alone, without its memory; None if it was never measured alone."""
        known = self._profiles.get((kind, device_kind))
        return Profile(0, known.steps_per_s, known.use) if known is not None else None

    def alone(self, device_kind: str) -> Alone:
        """Return the speed of each kind alone."""
        return {
            (kind, known.reports): known.steps_per_s for (kind, where), known in self._profiles.items() if where == device_kind
        }

    def reports(self, kind: str) -> bool:
        """Whether jobs of this kind are known to report their steps."""
        return any(known.reports for (of, _), known in self._profiles.items() if of == kind)

    def relative_speeds(self, groups: Sequence[Sequence[Job]], device: Device) -> list[Floats]:
        """Return predicted speeds over those alone; see `SpeedPredictor`."""
        known = self._models.get(device.name)
        if known is None or known[0] != self._num_rates:
            known = self._models[device.name] = self._num_rates, SlowdownModel.fit(self._observations(device))
        return known[1].relative_speeds(groups, device)

    def _observations(self, device: Device) -> list[Observation]:
        found = []
        for rates in self._rates:
            profiles = [self.profile(kind, CPU) for kind in rates.kinds]
            if all(profile is not None for profile in profiles):
                jobs = [
                    Job(f"{kind}-{number}", {device.kind: profile}, family=kind)
                    for number, (kind, profile) in enumerate(zip(rates.kinds, profiles, strict=True))
                    if profile is not None
                ]
                speeds = tuple(float(np.clip(rates.speeds[kind], 0.01, 1.5)) for kind in rates.kinds)
                found.append(Observation(device, tuple(jobs), speeds))
        return found

    # --- memory --------------------------------------------------------------------------------------------------------------

    def learn_end(self, spec: JobSpec, ended: Ended) -> None:
        """Take the peak of a job that has ended."""
        if ended.result == "done":
            self._peaks[spec.kind] = max(self._peaks.get(spec.kind, 0), ended.peak_bytes)
            if ended.estimate_bytes:
                self._estimates.append((ended.estimate_bytes, max(1, ended.peak_bytes)))
        elif ended.result == "evicted":
            self._wanted[spec.kind] = max(self._wanted.get(spec.kind, 0), int(GROWTH * ended.peak_bytes))

    def expected_bytes(self, spec: JobSpec) -> int:
        """Return the peak of a job that has not started, with a margin; 0: unknown."""
        wanted = self._wanted.get(spec.kind, 0)
        if (peak := self._peaks.get(spec.kind, 0)) > 0:
            return max(int(SPREAD * peak), wanted)
        return max(spec.memory_bytes, wanted)

    def need_bytes(self, spec: JobSpec, estimate_bytes: int, margin_bytes: int, resident_bytes: int, device_bytes: int) -> int:
        """Return the charge of a job that asks: its own estimate with a margin, or the peak of earlier jobs of its kind.

        Args:
            margin_bytes: the estimate's own.
            device_bytes: memory of the device that the job is on.
        """
        if (peak := self._peaks.get(spec.kind, 0)) > 0:
            # A job that has run on this device fits, whatever the margin.
            needed = max(int(SPREAD * peak), self._wanted.get(spec.kind, 0))
            return min(needed, device_bytes) if peak <= device_bytes else needed
        if not estimate_bytes:
            return max(self.expected_bytes(spec), int(GROWTH * resident_bytes))
        learned = MemoryMargin.of(self._estimates)
        # The job knows only the default margin; this process knows the errors of earlier estimates.
        margin_bytes = learned.bytes_for(estimate_bytes) if learned.num_records else margin_bytes
        return max(self._wanted.get(spec.kind, 0), estimate_bytes + margin_bytes)

    def probed_bytes(self, spec: JobSpec, peak_bytes: int) -> int:
        """Return the expected peak of a command after its probe."""
        return max(self.expected_bytes(spec), int(GROWTH * peak_bytes))
