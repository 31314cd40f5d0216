"""A clock that only a test moves."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ManualClock"]


@dataclass
class ManualClock:
    now_s: float = 1000.0

    def __call__(self) -> float:
        return self.now_s

    def advance_s(self, seconds: float) -> None:
        self.now_s += seconds
