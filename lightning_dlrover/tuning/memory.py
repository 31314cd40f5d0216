"""Predict when a worker's memory reaches its limit, and choose a remedy before that. Pure.

Memory grows with the steps made: table rows touched for the first time, or a list that keeps growing. The forecast therefore
extrapolates over steps, by the median slope of all pairs of windows and its interval. A few odd windows do not move that median
(Theil, 1950; Sen, JASA 63(324), 1968).

The right remedy depends on the part that grows, and only a trial shows which it is. A leak ends with its process: a replacement
starts small. State that is handed over starts as large as it was and needs a larger node, if the job may request one. If that
state is split over the workers, more of them need less each. Where none of these helps, or nothing starts workers, a checkpoint
saves the progress.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from lightning_dlrover.perf.samples import AGENT_BYTES, StepProfile

Floats = NDArray[np.float64]

__all__ = [
    "Act",
    "GrowthSituation",
    "MemoryForecast",
    "Remedy",
    "choose_remedy",
    "forecast_memory",
    "inherited_forecast",
    "least_workers",
    "node_memory_bytes",
]

NUM_SETTLING = 2
"""Number of first windows of a round that are left out, because buffers are allocated then."""

MIN_WINDOWS = 5

MIN_SPAN_S = 8.0
"""Minimum training time that the windows cover. Loading and caching at the start end within seconds."""

MAX_WINDOWS = 60

CONFIDENCE = 0.9

MIN_GROWTH = 0.02
"""Minimum growth over the windows, as a fraction of the limit. Less is noise."""

RESERVE = 0.05
"""Fraction of the limit that stays free: peaks within a window may be higher than those observed."""

LEADS = 3.0
"""Lead of a remedy: it begins when the limit may be reached within this multiple of the time that it takes."""

MARGIN = 1.2
"""Memory of a larger node relative to the forecast, which follows only the slope so far."""

NODE_MEMORY_STEP = 256 * 2**20
"""Bytes by which node sizes differ, or a multiple. A smaller difference is not worth a replacement."""

UNKNOWN_END_FACTOR = 2.0
"""Memory of a larger node relative to the present one, where the number of remaining steps is unknown."""

Act = Literal["none", "wait", "replace", "enlarge", "add_workers", "checkpoint"]


@dataclass(frozen=True)
class MemoryForecast:
    """When a worker reaches its limit, if nothing changes."""

    level_bytes: int  # highest recent use
    grown_bytes: int  # over the windows considered
    limit_bytes: int
    bytes_per_step: float
    steps_left: float  # steps until the limit, less a reserve
    earliest_steps_left: float  # the same at the upper bound of the slope
    step_time_s: float

    @property
    def seconds_left(self) -> float:
        return self.steps_left * self.step_time_s

    @property
    def earliest_seconds_left(self) -> float:
        return self.earliest_steps_left * self.step_time_s

    @property
    def text(self) -> str:
        return (
            f"{self.level_bytes / 2**20:.0f} MiB of {self.limit_bytes / 2**20:.0f} used, growing by "
            f"{self.bytes_per_step / 2**20:.3g} MiB a step: the limit is reached in {self.seconds_left:.0f} s "
            f"({self.earliest_seconds_left:.0f} s at the earliest)"
        )


@dataclass(frozen=True)
class GrowthSituation:
    """The remedies at hand."""

    remaining_steps: float | None  # remaining steps of the job; None if unknown
    lead_s: float  # time between the request for a worker and its first step
    num_workers: int
    max_workers: int
    can_add: bool  # workers can be started, and the size was not set by hand
    can_replace: bool  # workers can be started
    has_sharded_tables: bool
    max_memory_bytes: int = 0  # largest node that can be requested; 0: no larger one
    tried: Sequence[Act] = ()  # remedies that this job tried without success
    workers_per_node: int = 1  # workers that are added together


@dataclass(frozen=True)
class Remedy:
    """A remedy and its reason."""

    act: Act
    reason: str
    num_workers: int = 0  # only for `add_workers`
    node_memory_bytes: int = 0  # only for `enlarge`


def forecast_memory(windows: Sequence[StepProfile]) -> MemoryForecast | None:
    """Forecast when the worker reaches its memory limit, from its windows so far, oldest first; None if it does not grow.

    Only the newest windows of one round and of equal settings count, because another split of the work or other loader workers
    take other memory. Memory taken at once, such as by a first validation run, is no growth either.

    Raises:
        ValueError: the windows belong to several workers.
    """
    if len({w.worker_id for w in windows}) > 1:
        raise ValueError(f"windows of several workers were given: {sorted({w.worker_id for w in windows})}")
    alike = list(itertools.takewhile(lambda w: _ways(w) == _ways(windows[-1]), reversed(windows)))[::-1]
    recent = alike[NUM_SETTLING:][-MAX_WINDOWS:]
    if len(recent) < MIN_WINDOWS or recent[-1].memory_limit_bytes <= 0:
        return None
    if sum(w.num_steps * w.step_time_s for w in recent) < MIN_SPAN_S:
        return None
    limit = recent[-1].memory_limit_bytes
    steps = np.array([w.first_step + w.num_steps for w in recent], dtype=np.float64)
    used = np.array([w.memory_bytes for w in recent], dtype=np.float64)
    if len(set(steps)) < MIN_WINDOWS:
        return None
    from scipy.stats import theilslopes  # import takes 0.7 s, which no worker needs to pay before it trains

    slope, intercept, low, high = (float(value) for value in theilslopes(used, steps, CONFIDENCE))
    grown = slope * (steps[-1] - steps[0])
    if low <= 0 or grown < MIN_GROWTH * limit or _is_one_jump(steps, used):
        return None
    # The line's end, or the highest value observed: a peak inside of a step counts, too.
    level = max(intercept + slope * steps[-1], *(max(w.peak_memory_bytes, w.memory_bytes) for w in recent[-3:]))
    room = max(0.0, limit * (1 - RESERVE) - level)
    return MemoryForecast(
        level_bytes=int(level),
        grown_bytes=int(grown),
        limit_bytes=limit,
        bytes_per_step=slope,
        steps_left=room / slope,
        earliest_steps_left=room / high,
        step_time_s=recent[-1].step_time_s,
    )


def _ways(window: StepProfile) -> tuple[int, ...]:
    """Return the settings of a window that determine its memory."""
    return window.round_number, window.loader_workers, window.prefetch_factor, window.intra_op_threads


def _is_one_jump(steps: Floats, used: Floats) -> bool:
    """Return whether two levels, one up to some window and one after it, describe the windows much better than a line."""

    def squares(values: Floats) -> float:
        return float(((values - values.mean()) ** 2).sum())

    line = used - np.polyval(np.polyfit(steps - steps[0], used, 1), steps - steps[0])
    return min(squares(used[:i]) + squares(used[i:]) for i in range(1, len(used))) < float((line**2).sum()) / 2


def inherited_forecast(window: StepProfile, earlier: MemoryForecast) -> MemoryForecast | None:
    """Return the replaced worker's forecast from the new worker's present level; None if that level is lower, so it helped.

    There may be no time to observe the growth again.
    """
    level = max(window.memory_bytes, window.peak_memory_bytes)
    if level <= earlier.level_bytes - earlier.grown_bytes / 2 or window.memory_limit_bytes <= 0:
        return None
    room = max(0.0, window.memory_limit_bytes * (1 - RESERVE) - level)
    return replace(
        earlier,
        level_bytes=level,
        limit_bytes=window.memory_limit_bytes,
        steps_left=room / earlier.bytes_per_step,
        earliest_steps_left=room / earlier.bytes_per_step * earlier.earliest_steps_left / max(1e-9, earlier.steps_left),
        step_time_s=window.step_time_s,
    )


def choose_remedy(forecast: MemoryForecast, situation: GrowthSituation) -> Remedy:
    """Choose a remedy for growing memory.

    Raises:
        ValueError: the time that a remedy takes is not a finite time of 0 s or more.
    """
    if not 0 <= situation.lead_s < math.inf:
        raise ValueError(f"lead_s is {situation.lead_s!r}, not a finite time of 0 s or more")
    remaining = situation.remaining_steps
    if remaining is not None and forecast.earliest_steps_left > remaining:
        return Remedy("none", f"{forecast.text}; the job ends before, in {remaining:.0f} steps")
    if forecast.earliest_seconds_left > LEADS * situation.lead_s:
        return Remedy("wait", f"{forecast.text}; time enough, a new worker takes {situation.lead_s:.0f} s")
    # A larger node costs no more than a new one, unlike more workers.
    order: tuple[Act, ...] = ("enlarge", "add_workers", "replace")
    if not situation.has_sharded_tables:
        order = ("replace", "enlarge", "add_workers")
    larger = _enough_memory(forecast, situation)
    possible = {
        "replace": situation.can_replace,
        "enlarge": situation.can_replace and larger > forecast.limit_bytes + AGENT_BYTES,
        "add_workers": situation.can_add and situation.num_workers < situation.max_workers,
    }
    failed = f"; {' and '.join(_NAMES[act] for act in situation.tried)} did not help" if situation.tried else ""
    for act in order:
        if act in situation.tried or not possible[act]:
            continue
        if act == "replace":
            return Remedy(act, f"{forecast.text}{failed}; a new worker takes its place, which starts without what has leaked")
        if act == "enlarge":
            size = f"a node of {larger / 2**20:.0f} instead of {forecast.limit_bytes / 2**20:.0f} MiB"
            return Remedy(act, f"{forecast.text}{failed}; a new worker takes its place, on {size}", node_memory_bytes=larger)
        number = _enough_workers(forecast, situation)
        text = f"{forecast.text}{failed}; {number} instead of {situation.num_workers} workers hold less each"
        return Remedy(act, text, number)
    why = "nobody starts workers" if not situation.can_replace else "nothing else is left to try"
    return Remedy("checkpoint", f"{forecast.text}{failed}; a checkpoint is written, {why}: give each worker more memory")


_NAMES: dict[Act, str] = {
    "replace": "a new worker in its place",
    "enlarge": "a larger node",
    "add_workers": "more workers",
}


def least_workers(remedies: Iterable[tuple[str, int]]) -> int:
    """Return how many workers the job needs so that each has enough memory, by earlier remedies; 0 if any number does.

    Args:
        remedies: act and number of workers of each.
    """
    return max((num_workers for act, num_workers in remedies if act == "add_workers"), default=0)


def node_memory_bytes(worker_bytes: float, max_bytes: int) -> int:
    """Return the bytes that a node needs for one worker of that size and its agent, with a reserve; at most `max_bytes`."""
    needed = worker_bytes / (1 - RESERVE) + AGENT_BYTES
    return min(max_bytes, NODE_MEMORY_STEP * math.ceil(needed / NODE_MEMORY_STEP))


def _enough_memory(forecast: MemoryForecast, situation: GrowthSituation) -> int:
    """Return the bytes that one worker's node needs until the job's end, within the limit for nodes."""
    needed = UNKNOWN_END_FACTOR * (1 - RESERVE) * forecast.limit_bytes
    if situation.remaining_steps is not None:
        needed = MARGIN * (forecast.level_bytes + forecast.bytes_per_step * situation.remaining_steps)
    return node_memory_bytes(needed, situation.max_memory_bytes)


def _enough_workers(forecast: MemoryForecast, situation: GrowthSituation) -> int:
    """Return how many workers can share the growth until the end; the maximum if the remaining steps are unknown."""
    if situation.remaining_steps is None:
        return situation.max_workers
    growth = forecast.bytes_per_step * situation.remaining_steps * situation.num_workers  # growth of all workers together
    # The growth so far is redistributed as well.
    spread = forecast.grown_bytes * situation.num_workers + growth
    fixed = forecast.level_bytes - forecast.grown_bytes
    room = forecast.limit_bytes * (1 - RESERVE) - fixed
    needed = math.ceil(spread / room) if room > 0 else situation.max_workers
    num_nodes = math.ceil(max(situation.num_workers + 1, needed) / situation.workers_per_node)
    return min(situation.max_workers, num_nodes * situation.workers_per_node)
