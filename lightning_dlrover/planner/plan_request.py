"""What a decision is based on: the state of a running job, the model of its steps, and the rules."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from lightning_dlrover.perf import Configuration, Prediction
from lightning_dlrover.perf.samples import StepProfile
from lightning_dlrover.planner.plan import Decision
from lightning_dlrover.planner.warm_start import Suggestion

__all__ = ["DEFAULT_RULES", "Model", "PlanRequest", "Rules"]


class Model(Protocol):
    """A predictor of step times: `StepTimeModel`, or another one it is compared with."""

    def predict_many(self, configurations: Sequence[Configuration]) -> Sequence[Prediction]: ...


@dataclass(frozen=True)
class PlanRequest:
    """The state of a running job.

    Args:
        windows: windows of rank 0, oldest first; the last one shows the present settings.
        node_cores: cores of one node, all its workers together; 0: unknown.
        remaining_samples: samples that the whole job has still to train on; None if unknown.
        resize_cost_s: seconds that the whole job pauses when workers change, as measured.
        retune_cost_s: seconds that it pauses when the other settings change, as measured.
        age_s: seconds since the job's start.
        spent: money spent so far; None: unknown.
        past: earlier decisions of this job, in any order; they keep the planner from going back and forth.
        suggestion: final settings of similar jobs; None: there were none.

    Example:
        >>> request = PlanRequest(windows, node_cores=4, remaining_samples=1e6)  # `windows`: step profiles of one job
        >>> request.current.num_workers
        2
    """

    windows: Sequence[StepProfile]
    node_cores: float = 0.0
    remaining_samples: float | None = None
    resize_cost_s: float = 0.5
    retune_cost_s: float = 0.1
    age_s: float = 0.0
    spent: float | None = None
    past: Sequence[Decision] = ()
    suggestion: Suggestion | None = None

    def __post_init__(self) -> None:
        if not self.windows:
            raise ValueError("cannot plan without a window of the job; wait for its first profile")
        left = self.remaining_samples
        if left is not None and not 0 <= left < math.inf:
            raise ValueError(f"remaining_samples is {left!r}; pass None if the number is unknown")
        for name in ("resize_cost_s", "retune_cost_s", "age_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)!r}, not a finite time of 0 s or more")

    @property
    def current(self) -> StepProfile:
        return self.windows[-1]


@dataclass(frozen=True)
class Rules:
    """Thresholds of the planner. Shares are of the remaining time or cost.

    Example:
        >>> Rules(max_trials=0).max_trials  # never try settings that were not measured
        0
    """

    min_gain: float = 0.02  # minimum gain of a change; doubles with each time that the planner itself left those settings
    min_explore_gain: float = 0.005  # minimum expected improvement of untried settings
    max_explore_cost: float = 0.05  # maximum cost of a trial
    max_trials: int = 5
    max_stretch: float = 4.0  # maximum ratio of untried to tried numbers of workers, in either direction
    trial_s: float = 10.0  # time until untried settings are judged
    horizon_s: float = 3600.0  # remaining time assumed when the job's end is unknown


DEFAULT_RULES = Rules()
