"""Measure how fast jobs run, alone and side by side.

A window begins once the set of running jobs on a device has been the same for a moment. It ends when it is long enough and each
job has made some steps in it, or when the set changes. Alone, a window gives the job's profile. Side by side, it gives each
job's speed relative to alone. A job's part of a window lasts from the end of one step to the end of another, so that a few long
steps give a speed as well as many short ones.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from lightning_dlrover.colocate.journal import Profiled, Rates
from lightning_dlrover.colocate.places import CPU
from lightning_dlrover.colocate.watched import Moment

__all__ = ["ALONE_S", "WARMUP_STEPS", "Alone", "CoRunner", "InterferenceMeter"]

SETTLE_S = 0.3
"""Caches and threads of the former set have gone by then."""
GPU_SETTLE_S = 1.2
"""A GPU's busy time is that of up to a second before (NVML, `nvmlDeviceGetUtilizationRates`)."""
ALONE_S = 1.0
TOGETHER_S = 4.0
LEAST_S = 0.8
LEAST_STEPS = 3
MOST = 1e15
"""Larger figures are nonsense that a job has reported."""
WARMUP_STEPS = 2
"""First steps allocate memory and compile; their times differ from those of later ones."""


@dataclass(frozen=True)
class CoRunner:
    """A job that runs, as seen at one look."""

    name: str
    kind: str
    moment: Moment
    step_bytes: int = 0  # memory that a step reads and writes; 0: unknown
    reports: bool = True  # a command that reports no steps is measured by its CPU time

    @property
    def is_warm(self) -> bool:
        return not self.reports or self.moment.num_steps >= WARMUP_STEPS


Alone: TypeAlias = Mapping[tuple[str, bool], float]
"""Speed alone by kind, and whether it is in steps: in steps per second, or in cores of a command that reports no steps."""


class InterferenceMeter:
    """The jobs that run on one device at the moment.

    Args:
        device: the device's name.
        device_kind: key of the profiles. Devices of one kind are equally fast.
    """

    def __init__(self, device: str, device_kind: str) -> None:
        self._device, self._device_kind = device, device_kind
        self._settle_s = SETTLE_S if device_kind == CPU else GPU_SETTLE_S
        self._members: tuple[str, ...] = ()
        self._since_s = 0.0
        self._first: dict[str, Moment] = {}  # by name; a job is absent until its part of the window has begun
        self._newest: Mapping[str, CoRunner] = {}

    def look(self, now: float, running: Sequence[CoRunner], alone: Alone) -> list[Profiled | Rates]:
        """Return the results of the windows that end with this look.

        Args:
            running: all jobs that run on the device, those that start included.
            alone: known speeds alone.
        """
        found: list[Profiled | Rates] = []
        members = tuple(sorted(co_runner.name for co_runner in running))
        if members != self._members:
            found = self._close(alone)
            self._members, self._since_s, self._first = members, now, {}
        self._newest = {co_runner.name: co_runner for co_runner in running}
        if now - self._since_s >= self._settle_s and all(co_runner.is_warm for co_runner in running):
            for co_runner in running:
                # An older report is that of a step that ran, or was paused, beside the former set.
                if co_runner.moment.at_s >= self._since_s:
                    self._first.setdefault(co_runner.name, co_runner.moment)
        if members and self._has_measured(ALONE_S if len(members) == 1 else TOGETHER_S):
            found += self._close(alone)
        return found

    def _has_measured(self, least_s: float) -> bool:
        """Whether every job has made enough steps in a window of this length."""
        return len(self._first) == len(self._members) and all(
            now.moment.at_s - then.at_s >= least_s and (not now.reports or now.moment.num_steps - then.num_steps >= LEAST_STEPS)
            for now, then in ((self._newest[name], then) for name, then in self._first.items())
        )

    def _close(self, alone: Alone) -> list[Profiled | Rates]:
        is_measured = bool(self._first) and self._has_measured(LEAST_S)
        pairs = [(self._newest[name], then) for name, then in self._first.items()]
        self._first = {}
        if not is_measured:
            return []
        if len(pairs) == 1:
            return [self._profile(*pairs[0])]
        if any(not alone.get((now.kind, now.reports)) for now, _ in pairs):
            return []
        speeds = defaultdict(list)
        for now, then in pairs:
            speeds[now.kind].append(_speed(now, then) / alone[now.kind, now.reports])
        seconds = min(now.moment.at_s - then.at_s for now, then in pairs)
        means = {kind: sum(each) / len(each) for kind, each in speeds.items()}
        kinds = tuple(sorted(now.kind for now, _ in pairs))
        return [Rates(self._device, means, kinds, seconds, self._device_kind)]

    def _profile(self, now: CoRunner, then: Moment) -> Profiled:
        moment = now.moment
        seconds = max(1e-3, moment.measured_s - then.measured_s)
        step_s = moment.step_s - then.step_s
        speed = _speed(now, then)
        use = {
            "cores": (moment.cpu_s - then.cpu_s) / seconds,
            "input": (moment.data_wait_s - then.data_wait_s) / step_s if step_s > 0 else 0.0,
            "memory_bandwidth": now.step_bytes * speed if now.reports else 0.0,
            **moment.gpu.rates_since(then.gpu),
        }
        return Profiled(
            now.kind, self._device_kind, {name: min(max(0.0, amount), MOST) for name, amount in use.items()}, speed, now.reports
        )


def _speed(now: CoRunner, then: Moment) -> float:
    """Return steps per second, or the cores in use of a command that reports no steps."""
    moment = now.moment
    if now.reports:
        return min(MOST, max(1e-9, (moment.num_steps - then.num_steps) / max(1e-3, moment.at_s - then.at_s)))
    return max(1e-9, (moment.cpu_s - then.cpu_s) / max(1e-3, moment.measured_s - then.measured_s))
