"""Time of a step, by its parts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from lightning_dlrover.observe.pulse import OwnClock

__all__ = ["StepTimes"]


@dataclass
class StepTimes:
    """Seconds spent in each part of the steps, summed since the last `reset`."""

    forward_s: float = 0.0
    backward_s: float = 0.0
    communication_s: float = 0.0  # blocked in a collective during forward and backward; their times exclude it
    run_s: float = 0.0  # the three above and the optimizer's step
    data_wait_s: float = 0.0

    def reset(self) -> None:
        self.forward_s = self.backward_s = self.communication_s = self.run_s = self.data_wait_s = 0.0

    @contextmanager
    def measure(self, part: Literal["forward_s", "backward_s"], clock: OwnClock) -> Iterator[None]:
        """Add the time of a block to a part of the step, except for the time in which the clock is stopped."""
        started, blocked_s = time.perf_counter(), clock.blocked_s
        try:
            yield
        finally:
            blocked_s = clock.blocked_s - blocked_s
            self.communication_s += blocked_s
            setattr(self, part, getattr(self, part) + time.perf_counter() - started - blocked_s)
