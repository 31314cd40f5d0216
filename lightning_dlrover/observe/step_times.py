"""Where the time of a step goes."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["StepTimes"]


@dataclass
class StepTimes:
    """Seconds that the parts of the steps since the last `reset` took, added up."""

    forward_s: float = 0.0
    backward_s: float = 0.0
    communication_s: float = 0.0  # blocked in a collective during forward and backward, which do not count it
    run_s: float = 0.0  # all of these, and the optimizer's step
    data_wait_s: float = 0.0

    def reset(self) -> None:
        self.forward_s = self.backward_s = self.communication_s = self.run_s = self.data_wait_s = 0.0
