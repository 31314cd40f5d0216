"""Choose the measured windows to write to etcd: every lasting change at once, and few otherwise.

Each worker of a job produces a window every two seconds, for weeks. Writing all of them would fill an etcd that many jobs
share. On a machine with other load the windows of an unchanged job differ as well, so a change counts only if two windows in a
row show it, and `write_budget.py` bounds what is left of the noise. Pure: no clock, no connection.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lightning_dlrover.codec import to_json
from lightning_dlrover.learn.write_budget import FIRST_WINDOWS, PROFILES, WINDOWS, WriteBudget, stored_bytes
from lightning_dlrover.perf.samples import StepProfile
from lightning_dlrover.planner.space import settings_of

__all__ = ["PublishedProfile", "WindowLog", "merged", "rounded"]

SETTLED_S = 30.0
"""Seconds after which the first window of a round and setting, in which steps may be slower, is replaced by another one."""

PUBLISH_EVERY_S = 600.0
"""Seconds between later publications of a worker's newest window without a change."""

CHANGE = 0.25
"""Relative change of a figure above which its window is published or logged at once, if the next window shows it, too."""

NUM_LOGGED_SINGLY = 10
"""Number of windows of one round and setting that are logged individually, as input for the planner's first judgement."""

LOG_EVERY_S = 180.0
"""Seconds of later windows that are merged into one."""

DIGITS = 5
"""Significant digits of a window's figures."""

_MEANS = (
    "step_time_s",
    "data_wait_s",
    "forward_s",
    "backward_s",
    "communication_s",
    "optimizer_s",
    "other_s",
    "cpu_percent",
    "gpu_percent",
)
_HIGHEST = ("memory_bytes", "peak_memory_bytes", "gpu_memory_bytes")


class PublishedProfile:
    """The published state of one worker's windows."""

    def __init__(self) -> None:
        self._last: StepProfile | None = None
        self._published_at = 0.0
        self._lasts_s = 0.0  # time for which the published window holds without a change
        self._differed = (0, 0, 0)  # how the newest window differed from the published one, see `_differences`
        self._budget = WriteBudget(PROFILES)

    def is_due(self, window: StepProfile, num_bytes: int, now: float) -> bool:
        """Whether a window is to be published. If so, it counts as published.

        Args:
            num_bytes: bytes that it takes in etcd.
            now: seconds of a monotonic clock; the window's own time is wall-clock time.
        """
        last = self._last
        if last is None or _place(last) != _place(window):
            self._budget.charge(num_bytes, now)
            self._lasts_s = SETTLED_S
        else:
            before, self._differed = self._differed, _differences(last, window)
            has_changed = any(was == now_is != 0 for was, now_is in zip(before, self._differed, strict=True))
            is_old = now - self._published_at >= self._lasts_s
            if not (has_changed or is_old) or not self._budget.take(num_bytes, now):
                return False
            self._lasts_s = PUBLISH_EVERY_S
        self._last, self._published_at, self._differed = window, now, (0, 0, 0)
        return True

    def was_lost(self) -> None:
        """Publish the next window, because etcd has not taken the newest one."""
        self._last = None


class WindowLog:
    """Windows of rank 0 that become events of the job's history: contiguous, and merged while nothing changes."""

    def __init__(self) -> None:
        self._stretch: StepProfile | None = None  # windows before the newest two, merged, not logged yet
        self._newest: list[StepProfile] = []  # windows that may begin a change, not logged yet, at most two
        self._num_in_place = 0
        self._place: object = None
        self._firsts, self._others = WriteBudget(FIRST_WINDOWS), WriteBudget(WINDOWS)

    def add(self, window: StepProfile, now: float) -> list[StepProfile]:
        """Return the windows to be logged now.

        Args:
            now: seconds of a monotonic clock.
        """
        due: list[StepProfile] = []
        place = _place(window)
        if place != self._place:
            due = self.flush()
            self._others.charge(sum(map(_size, due)), now)
            self._place, self._num_in_place = place, 0
        self._num_in_place += 1
        is_first = self._num_in_place <= NUM_LOGGED_SINGLY and not self._pending
        if is_first and self._firsts.take(_size(window), now):
            return [*due, window]
        return [*due, *self._merge(window, now)]

    def flush(self) -> list[StepProfile]:
        """Return the windows not logged yet, merged."""
        pending = self._pending
        self._stretch, self._newest = None, []
        return [merged(pending)] if pending else []

    @property
    def _pending(self) -> list[StepProfile]:
        return [*([self._stretch] if self._stretch is not None else []), *self._newest]

    def _merge(self, window: StepProfile, now: float) -> list[StepProfile]:
        """Keep a window until it is logged with others, and return those to be logged now."""
        self._newest.append(window)
        if len(self._newest) > 2:
            oldest = self._newest.pop(0)
            self._stretch = oldest if self._stretch is None else merged([self._stretch, oldest])
        if (before := self._stretch) is not None:
            first, second = (_difference(before.step_time_s, newest.step_time_s) for newest in self._newest)
            if first == second != 0 and self._others.take(_size(before), now):
                self._stretch = None
                return [before]
        lasted_s = sum(each.num_steps * each.step_time_s for each in self._pending)
        if lasted_s >= LOG_EVERY_S and self._others.take(_size(window), now):
            return self.flush()
        return []


def merged(windows: Sequence[StepProfile]) -> StepProfile:
    """Merge consecutive windows into one: means weighted by steps, and the highest memory use."""
    num_steps = sum(window.num_steps for window in windows)
    weights = [window.num_steps / num_steps if num_steps else 1 / len(windows) for window in windows]
    figures: dict[str, Any] = {
        name: sum(getattr(window, name) * weight for window, weight in zip(windows, weights, strict=True)) for name in _MEANS
    }
    figures |= {name: max(getattr(window, name) for window in windows) for name in _HIGHEST}
    step_time_s = figures["step_time_s"]
    figures["samples_per_s"] = windows[-1].global_batch / step_time_s if step_time_s else 0.0
    return replace(windows[-1], first_step=windows[0].first_step, num_steps=num_steps, **figures)


def _place(window: StepProfile) -> object:
    return window.worker_id, window.round_number, settings_of(window), window.global_batch


def rounded(window: StepProfile) -> StepProfile:
    """Return the window with its figures rounded to their precision, and its time to milliseconds."""
    figures: dict[str, Any] = {
        name: round(value, 3) if name == "at" else float(f"{value:.{DIGITS}g}")
        for name, value in vars(window).items()
        if isinstance(value, float)
    }
    return replace(window, **figures)


def _size(window: StepProfile) -> int:
    return stored_bytes(to_json(rounded(window)))


def _differences(before: StepProfile, now: StepProfile) -> tuple[int, int, int]:
    """Return the direction of change of step time, memory and peak memory."""
    return (
        _difference(before.step_time_s, now.step_time_s),
        _difference(before.memory_bytes, now.memory_bytes),
        _difference(before.peak_memory_bytes, now.peak_memory_bytes),
    )


def _difference(before: float, now: float) -> int:
    """Return 1 if a figure is much larger than before, -1 if it is much smaller, else 0."""
    if abs(now - before) <= CHANGE * max(abs(before), abs(now)):
        return 0
    return 1 if now > before else -1
