"""Clocks that a test moves."""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass
class ManualClock:
    """A clock that advances only when a test moves it."""

    now_s: float = 1000.0

    def __call__(self) -> float:
        return self.now_s

    def advance_s(self, seconds: float) -> None:
        self.now_s += seconds


@dataclass
class ShiftedClock:
    """The real clock, moved ahead by a test."""

    ahead_s: float = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead_s
