"""Time of a step, by its parts."""

from __future__ import annotations

from dataclasses import dataclass

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
