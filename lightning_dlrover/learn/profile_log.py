"""Choose the measured windows to write to etcd: every change, and few otherwise.

Each worker of a job produces a window every two seconds, for weeks. Writing all of them would fill an etcd that many jobs
share. Pure: no clock, no connection.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lightning_dlrover.perf.samples import StepProfile
from lightning_dlrover.planner.space import settings_of

__all__ = ["PublishedProfile", "WindowLog"]

PUBLISH_EVERY_S = 10.0
"""Maximum seconds between publications of a worker's newest window, even without a change."""

CHANGE = 0.25
"""Relative change of a figure above which its window is published or logged at once."""

NUM_LOGGED_SINGLY = 10
"""Number of windows of one round and setting that are logged individually, as input for the planner's first judgement."""

LOG_EVERY_S = 60.0
"""Seconds of later windows that are merged into one."""

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

    def is_news(self, window: StepProfile, now: float) -> bool:
        """Whether a window adds information for others. If so, it counts as published.

        Args:
            now: seconds of a monotonic clock; the window's own time is wall-clock time.
        """
        last = self._last
        if last is not None and _place(last) == _place(window) and now - self._published_at < PUBLISH_EVERY_S:
            figures = ("step_time_s", "memory_bytes", "peak_memory_bytes")
            if not any(_differs(getattr(last, name), getattr(window, name)) for name in figures):
                return False
        self._last, self._published_at = window, now
        return True


class WindowLog:
    """Windows of rank 0 that become events of the job's history: contiguous, and merged while nothing changes."""

    def __init__(self) -> None:
        self._pending: list[StepProfile] = []
        self._num_in_place = 0
        self._place: object = None

    def add(self, window: StepProfile) -> list[StepProfile]:
        """Return the windows to be logged now."""
        due: list[StepProfile] = []
        place = _place(window)
        if place != self._place:
            due = self.flush()
            self._place, self._num_in_place = place, 0
        self._num_in_place += 1
        if self._num_in_place <= NUM_LOGGED_SINGLY:
            return [*due, window]
        if self._pending and _differs(merged(self._pending).step_time_s, window.step_time_s):
            due = self.flush()
        self._pending.append(window)
        if sum(each.num_steps * each.step_time_s for each in self._pending) >= LOG_EVERY_S:
            due += self.flush()
        return due

    def flush(self) -> list[StepProfile]:
        """Return the windows not logged yet."""
        pending, self._pending = self._pending, []
        return [merged(pending)] if pending else []


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


def _differs(before: float, now: float) -> bool:
    return abs(now - before) > CHANGE * max(abs(before), abs(now))
