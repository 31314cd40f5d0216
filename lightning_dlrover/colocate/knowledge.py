"""Measurements of kinds of jobs: their use and speed alone, their speeds side by side, their peak memory.

It comes from the queue's own journal and from those of earlier queues. Jobs of one declared kind, or with the same command,
folder and variables, are of one kind. Kinds with the same script are kin: what is not known of one is guessed from the others.
Side by side, jobs on cores are predicted by `CoreSpeeds`, and those on a GPU by `SlowdownModel`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import TypeAlias

import numpy as np

from lightning_dlrover.colocate.interference import Alone
from lightning_dlrover.colocate.jobs_file import JobSpec
from lightning_dlrover.colocate.journal import Added, Ended, Profiled, Rates, Record, read_records
from lightning_dlrover.colocate.memory import GROWTH, MEMORIES
from lightning_dlrover.colocate.places import CPU
from lightning_dlrover.colocate.tenants import Memory, Sizes, Where
from lightning_dlrover.perf.memory_margin import MemoryMargin
from lightning_dlrover.planner.cluster import Device, Job, Profile
from lightning_dlrover.planner.cluster.core_speeds import CoreSpeeds
from lightning_dlrover.planner.cluster.cores import Shares, thread_shares
from lightning_dlrover.planner.cluster.mixed import factor_of, speed_on_cores, speed_on_gpu
from lightning_dlrover.planner.cluster.policy import Floats, SpeedPredictor
from lightning_dlrover.planner.cluster.slowdown import Observation, SlowdownModel

__all__ = ["Knowledge"]

SPREAD = 1.05
"""Peaks of two runs of one command differ by less."""
MAX_OBSERVATIONS = 400
MAX_ALONE = 8
"""Windows alone of which a profile is the mean."""
ALIKE, LEAST_ALIKE = 1.2, 2
"""Kin whose uses and speeds differ by less than this factor, so many or more of them, stand for the rest."""

_OfMemory: TypeAlias = tuple[str, Where, Memory]
"""A kind of job, a type of device, and a memory there: on the host, a job on a GPU has other needs than one on cores."""


class Knowledge:
    """Collects records, and predicts from them. A `SpeedPredictor` of policies.

    Args:
        shares: threads of jobs side by side.
        device_kinds: kind of each device by its name; one that is absent has no GPU.
    """

    def __init__(self, shares: Shares = thread_shares, device_kinds: Mapping[str, str] | None = None) -> None:
        self._shares = shares
        self._device_kinds = dict(device_kinds or {})
        self._specs: dict[str, JobSpec] = {}
        self._kin: dict[str, str] = {}  # key: kind
        self._alone: dict[tuple[str, str], list[Profiled]] = {}  # key: kind and kind of device
        self._profiles: dict[tuple[str, str], Profiled] = {}  # the means of those
        self._steps: dict[str, int] = {}  # key: kind; of the newest job that is done
        self._starts_s: dict[str, float] = {}  # key: kind; the shortest time from a start to its request for memory
        self._peaks: dict[_OfMemory, int] = {}  # jobs that are done
        self._wanted: dict[_OfMemory, int] = {}  # jobs that were evicted
        # Each with the measured peak, oldest first.
        self._estimates: dict[Memory, list[tuple[int, int]]] = {memory: [] for memory in MEMORIES}
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
                self.meet(record.spec)
            elif isinstance(record, Ended) and record.job in self._specs:
                self.learn_end(self._specs[record.job], record)
            elif isinstance(record, Profiled | Rates):
                self.learn(record)

    def meet(self, spec: JobSpec) -> None:
        """Take note of a job of a queue."""
        self._specs[spec.name] = spec
        self._kin[spec.kind] = spec.kin

    # --- speeds --------------------------------------------------------------------------------------------------------------

    def learn(self, record: Profiled | Rates) -> bool:
        """Take a measurement; return whether it is new."""
        if isinstance(record, Rates):
            self._rates = [*self._rates, record][-MAX_OBSERVATIONS:]
            self._num_rates += 1
            return True
        key = record.job_kind, record.device_kind
        alone = self._alone.setdefault(key, [])
        if len(alone) >= MAX_ALONE or any(known.reports != record.reports for known in alone):
            return False
        alone.append(record)
        self._profiles[key] = _mean(alone)
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
        return self._as_profile(known) if known is not None else None

    def use(self, kind: str, device_kind: str) -> dict[str, float]:
        """Return a kind's use of a kind of device alone: as measured, or the mean of its kin, or of all kinds; may be empty."""
        if (known := self._profiles.get((kind, device_kind))) is not None:
            return known.use
        kin = self._measured_kin(kind, device_kind)
        return _mean_use(kin or [each for (_, where), each in self._profiles.items() if where == device_kind])

    def speed(self, kind: str, device_kind: str) -> float:
        """Return a kind's steps/s alone: as measured, or the mean of its kin, or as expected from another kind of device.

        Where nothing was measured, it is 1 on cores and larger on a GPU.
        """
        known = self._profiles.get((kind, device_kind))
        alike = [known] if known is not None else self._measured_kin(kind, device_kind)
        if alike:
            return fmean(each.steps_per_s for each in alike)
        factor = factor_of(
            [
                (self._as_profile(each), self._as_profile(self._profiles[of, CPU]))
                for (of, where), each in self._profiles.items()
                if where != CPU and (of, CPU) in self._profiles
            ]
        )
        elsewhere = [(where, self._as_profile(each)) for (of, where), each in self._profiles.items() if of == kind]
        if not elsewhere:
            return 1.0 if device_kind == CPU else factor
        where, profile = elsewhere[0]
        if (where == CPU) == (device_kind == CPU):
            return profile.steps_per_s
        return speed_on_cores(profile, factor) if device_kind == CPU else speed_on_gpu(profile, factor)

    def has_speed(self, kind: str) -> bool:
        """Whether a kind or its kin were measured on any device."""
        kin = self._kin.get(kind)
        return any(of == kind or (kin and self._kin.get(of) == kin) for of, _ in self._profiles)

    def num_steps(self, kind: str) -> int:
        """Return the steps of the newest job of a kind that is done; 0: unknown."""
        return self._steps.get(kind, 0)

    @staticmethod
    def _as_profile(known: Profiled) -> Profile:
        return Profile(0, known.steps_per_s, known.use)

    def is_as_its_kin(self, kind: str, device_kind: str) -> bool:
        """Whether a kind that was not measured has kin enough that were, all of them with much the same use and speed."""
        kin = self._measured_kin(kind, device_kind)
        amounts = [[each.steps_per_s, *(each.use.get(name, 0.0) + 0.1 for name in ("cores", "input", "gpu"))] for each in kin]
        return len(kin) >= LEAST_ALIKE and all(max(column) < ALIKE * min(column) for column in zip(*amounts, strict=True))

    def _measured_kin(self, kind: str, device_kind: str) -> list[Profiled]:
        kin = self._kin.get(kind)
        return [
            known for (of, where), known in self._profiles.items() if where == device_kind and kin and self._kin.get(of) == kin
        ]

    def alone(self, device_kind: str) -> Alone:
        """Return the speed of each kind alone."""
        return {
            (kind, known.reports): known.steps_per_s for (kind, where), known in self._profiles.items() if where == device_kind
        }

    def reports(self, kind: str) -> bool:
        """Whether jobs of this kind are known to report their steps."""
        return any(known.reports for (of, _), known in self._profiles.items() if of == kind)

    def idle_s(self, kind: str, device_kind: str, limits: Mapping[str, float]) -> float:
        """Return the time for which a job of a kind would leave its device idle if it ran alone, its start included.

        The resource that the job uses most counts. It is infinite where unknown, so that unknown kinds become known early.

        Args:
            limits: largest use of each resource of the device.
        """
        known, steps = self._profiles.get((kind, device_kind)), self._steps.get(kind, 0)
        if known is None or not known.reports or not steps:
            return math.inf
        used = max(known.use.get(resource, 0.0) / limit for resource, limit in limits.items())
        starting = max(0.0, 1.0 - 1.0 / limits["cores"]) * self._starts_s.get(kind, 0.0)
        return max(0.0, 1.0 - used) * steps / known.steps_per_s + starting

    def is_familiar(self, kind: str, device_kind: str) -> bool:
        """Whether both the peak of a kind of job and its needs alone were measured on a kind of device."""
        of: _OfMemory = (kind, "cpu", "host") if device_kind == CPU else (kind, "gpu", "gpu")
        return self._peaks.get(of, 0) > 0 and (kind, device_kind) in self._profiles

    def relative_speeds(self, groups: Sequence[Sequence[Job]], device: Device) -> list[Floats]:
        """Return predicted speeds over those alone; see `SpeedPredictor`."""
        known = self._models.get(device.name)
        device_kind = self._device_kinds.get(device.name, CPU)
        if known is None or known[0] != self._num_rates:
            seen = self._observations(device, device_kind)
            model: SpeedPredictor = CoreSpeeds.fit(seen, self._shares) if device_kind == CPU else SlowdownModel.fit(seen)
            known = self._models[device.name] = self._num_rates, model
        # A policy may have been given less: what a job wants beside others.
        measured = {job.name: self._as_measured(job, device, device_kind) for group in groups for job in group}
        return known[1].relative_speeds([[measured[job.name] for job in group] for group in groups], device)

    def _as_measured(self, job: Job, device: Device, device_kind: str) -> Job:
        profile = self.profile(job.family, device_kind)
        return job if profile is None else replace(job, profiles={device.kind: profile})

    def _observations(self, device: Device, device_kind: str) -> list[Observation]:
        found = []
        for rates in self._rates:
            profiles = [self.profile(kind, device_kind) for kind in rates.kinds]
            if rates.device_kind == device_kind and all(profile is not None for profile in profiles):
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
        """Take the peaks of a job that has ended."""
        peaks: Sizes = {"host": ended.peak_bytes, "gpu": ended.gpu_peak_bytes}
        if ended.result == "done":
            estimates: Sizes = {"host": ended.estimate_bytes, "gpu": ended.gpu_estimate_bytes}
            for memory, peak in peaks.items():
                of = spec.kind, ended.where, memory
                self._peaks[of] = max(self._peaks.get(of, 0), peak)
                if estimates[memory]:
                    self._estimates[memory].append((estimates[memory], max(1, peak)))
            self._steps[spec.kind] = ended.num_steps
            for start_s in [span.ended - span.began for span in ended.spans if span.phase == "starting"][:1]:
                self._starts_s[spec.kind] = min(start_s, self._starts_s.get(spec.kind, start_s))
        elif ended.result == "evicted":
            for memory, peak in peaks.items():
                of = spec.kind, ended.where, memory
                self._wanted[of] = max(self._wanted.get(of, 0), int(GROWTH * peak))

    def expected(self, spec: JobSpec, where: Where) -> Sizes:
        """Return the peaks of a job that has not started, with margins; 0: unknown."""
        return {memory: self._expected_bytes(spec, where, memory) for memory in MEMORIES}

    def _expected_bytes(self, spec: JobSpec, where: Where, memory: Memory) -> int:
        wanted = self._wanted.get((spec.kind, where, memory), 0)
        if (peak := self._peaks.get((spec.kind, where, memory), 0)) > 0:
            return max(int(SPREAD * peak), wanted)
        return max(spec.gpu_memory_bytes if memory == "gpu" else spec.memory_bytes, wanted)

    def knows(self, spec: JobSpec, where: Where, memory: Memory) -> bool:
        """Whether the peak of a job that has not started is known, from earlier ones or its owner."""
        return self._expected_bytes(spec, where, memory) > 0

    def need_bytes(
        self, spec: JobSpec, where: Where, memory: Memory, estimate: tuple[int, int], resident_bytes: int, device_bytes: int
    ) -> int:
        """Return the charge of a job that asks: its own estimate with a margin, or the peak of earlier jobs of its kind.

        Args:
            estimate: the job's own, and its margin; zeros: it has none.
            device_bytes: memory of the device that the job is on.
        """
        # What a job had on this device when it was evicted has fitted, and so does what a margin alone takes beyond the device.
        wanted = min(self._wanted.get((spec.kind, where, memory), 0), device_bytes)
        if (peak := self._peaks.get((spec.kind, where, memory), 0)) > 0:
            needed = max(int(SPREAD * peak), wanted)
            return min(needed, device_bytes) if peak <= device_bytes else needed
        estimate_bytes, margin_bytes = estimate
        if not estimate_bytes:
            return max(min(self._expected_bytes(spec, where, memory), device_bytes), int(GROWTH * resident_bytes))
        learned = MemoryMargin.of(self._estimates[memory])
        # The job knows only the default margin; this process knows the errors of earlier estimates.
        margin_bytes = learned.bytes_for(estimate_bytes) if learned.num_records else margin_bytes
        needed = max(wanted, estimate_bytes + margin_bytes)
        return min(needed, device_bytes) if estimate_bytes <= device_bytes else needed

    def probed_bytes(self, spec: JobSpec, where: Where, memory: Memory, peak_bytes: int) -> int:
        """Return the expected peak of a command after its probe."""
        return max(self._expected_bytes(spec, where, memory), int(GROWTH * peak_bytes))


def _mean(alone: Sequence[Profiled]) -> Profiled:
    """Return the mean of windows of one kind of job alone."""
    return replace(alone[0], use=_mean_use(alone), steps_per_s=fmean(each.steps_per_s for each in alone))


def _mean_use(known: Sequence[Profiled]) -> dict[str, float]:
    names = dict.fromkeys(name for each in known for name in each.use)
    return {name: fmean(each.use.get(name, 0.0) for each in known) for name in names}
