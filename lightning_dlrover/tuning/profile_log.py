"""The measurements and decisions that a job publishes, within a budget of writes. Pure: no clock, no connection.

etcd keeps each superseded value until it is compacted, and refuses all writes once it is full. So each kind of record that
noise can cause has a budget. Rank 0 writes all five kinds, 3 MB a day at most, and every other worker its profiles alone.
Beyond that only real changes cost bytes: rounds, losses, checkpoints, plans that are carried out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from lightning_dlrover.codec import to_json
from lightning_dlrover.tuning.plan import Candidate, Decision, settings_of
from lightning_dlrover.tuning.samples import STEP_PARTS, StepProfile

OVERHEAD_BYTES = 300  # key, revision and lease of a value in etcd's database, and the entry that marks its removal
DAY_S = 86_400.0


@dataclass(frozen=True)
class Rate:
    """Maximum bytes written in any period: `burst_bytes`, plus `bytes_per_day` for each day of it."""

    bytes_per_day: int
    burst_bytes: int

    def within(self, seconds: float) -> float:
        """Return the maximum bytes in so many seconds."""
        return self.burst_bytes + self.bytes_per_day * seconds / DAY_S


# A profile or window takes a kilobyte, a decision six, and a record of progress half a one.
PROFILES = Rate(bytes_per_day=400_000, burst_bytes=3_500)  # a worker's, except the first one of each round and setting
WINDOWS = Rate(bytes_per_day=800_000, burst_bytes=3_500)  # rank 0's, except the first ones and the last one of each of these
FIRST_WINDOWS = Rate(bytes_per_day=200_000, burst_bytes=60_000)  # rank 0's first windows of each, logged one by one
DECISIONS = Rate(bytes_per_day=400_000, burst_bytes=40_000)  # rank 0's that change nothing, and plans only recommended
PROGRESS = Rate(bytes_per_day=1_000_000, burst_bytes=150_000)  # rank 0's: every 8 s for 45 minutes, then every 40 s


class WriteBudget:
    """A token bucket of bytes, full at first."""

    def __init__(self, rate: Rate) -> None:
        self._rate = rate
        self._left = float(rate.burst_bytes)
        self._at: float | None = None

    def take(self, num_bytes: int, now: float) -> bool:
        """Return whether so many bytes may be written. If so, they count as written.

        Args:
            now: seconds of a monotonic clock.
        """
        self._refill(now)
        if num_bytes > self._left:
            return False
        self._left -= num_bytes
        return True

    def charge(self, num_bytes: int, now: float) -> None:
        """Count bytes that are written in any case. They leave less for others, but the budget never falls below 0."""
        self._refill(now)
        self._left = max(0.0, self._left - num_bytes)

    def _refill(self, now: float) -> None:
        passed_s = max(0.0, now - self._at) if self._at is not None else 0.0
        self._at = now
        self._left = min(float(self._rate.burst_bytes), self._left + self._rate.bytes_per_day * passed_s / DAY_S)


def stored_bytes(payload: bytes) -> int:
    """Return the bytes that a value takes in etcd until it is compacted."""
    return len(payload) + OVERHEAD_BYTES


# Choose the measured windows to write to etcd: every lasting change at once, and few otherwise.
#
# Each worker of a job produces a window every two seconds, for weeks. Writing all of them would fill an etcd that many jobs
# share. On a machine with other load the windows of an unchanged job differ as well, so a change counts only if two windows
# in a row show it, and the budget bounds the remaining noise.

SETTLED_S = 30.0  # seconds until the first window of a round and setting, whose steps may be slower, is replaced
PUBLISH_EVERY_S = 600.0  # seconds between later publications of a worker's newest window without a change
CHANGE = 0.25  # relative change of a figure above which its window is written at once, if the next window shows it, too
NUM_LOGGED_SINGLY = 10  # windows of a round and setting that are logged one by one, for the planner's first judgement
LOG_EVERY_S = 180.0  # seconds of later windows that are merged into one
DIGITS = 5  # significant digits of a window's figures

_MEANS = ("step_time_s", *(f"{part}_s" for part in STEP_PARTS), "cpu_percent", "gpu_percent")
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
    return replace(window, **{**_rounded_floats(window), "at": round(window.at, 3)})


def _size(window: StepProfile) -> int:
    return stored_bytes(to_json(rounded(window)))


def _differences(before: StepProfile, now: StepProfile) -> tuple[int, int, int]:
    """Return the direction of change of step time, memory and peak memory."""
    names = ("step_time_s", "memory_bytes", "peak_memory_bytes")
    step, memory, peak = (_difference(getattr(before, name), getattr(now, name)) for name in names)
    return step, memory, peak


def _difference(before: float, now: float) -> int:
    """Return 1 if a figure is much larger than before, -1 if it is much smaller, else 0."""
    if abs(now - before) <= CHANGE * max(abs(before), abs(now)):
        return 0
    return 1 if now > before else -1


# Choose the planner's decisions to write to etcd: every one that is carried out, and few others. The planner decides every few
# seconds, mostly to stay, and a decision with its candidates takes several kilobytes.

REPEAT_EVERY_S = 1800.0  # minimum seconds between records of equal decisions that are not carried out


class DecisionLog:
    """Rank 0's decisions that become events of the job's history."""

    def __init__(self) -> None:
        self._last: Decision | None = None
        self._was_carried_out = False
        self._recorded_at = 0.0
        self._budget = WriteBudget(DECISIONS)

    def is_due(self, decision: Decision, num_bytes: int, now: float, *, is_carried_out: bool) -> bool:
        """Whether a decision is to be recorded. If so, it counts as recorded.

        Args:
            num_bytes: bytes that it takes in etcd.
            now: seconds of a monotonic clock.
            is_carried_out: whether it changes the job; otherwise it stays, or only recommends.
        """
        if is_carried_out or self._was_carried_out:  # the decision after a change ends it, for readers and for the planner
            self._budget.charge(num_bytes, now)
        else:
            last = self._last
            is_repeated = last is not None and (last.current, last.chosen) == (decision.current, decision.chosen)
            if is_repeated and now - self._recorded_at < REPEAT_EVERY_S:
                return False
            if not self._budget.take(num_bytes, now):
                return False
        self._last, self._was_carried_out, self._recorded_at = decision, is_carried_out, now
        return True

    def may_recommend(self, num_bytes: int, now: float) -> bool:
        """Whether a plan may be written that only recommends. If so, it counts as written.

        Noise may make two numbers of workers alternate as the better one.
        """
        return self._budget.take(num_bytes, now)


def rounded_candidates(decision: Decision) -> Decision:
    """Return the decision with its candidates' figures rounded to their precision, because its record is stored in etcd."""

    return replace(decision, candidates=tuple(replace(each, **_rounded_floats(each)) for each in decision.candidates))


def _rounded_floats(record: Candidate | StepProfile) -> dict[str, Any]:
    """Return the fields of a record that are floats, rounded to their precision."""
    return {name: float(f"{value:.{DIGITS}g}") for name, value in vars(record).items() if isinstance(value, float)}
