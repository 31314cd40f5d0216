"""What a decision is based on: what is known about a running job, the model of its steps, and the rules."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from lightning_dlrover.perf import Configuration, Prediction
from lightning_dlrover.perf.samples import StepProfile
from lightning_dlrover.planner.plan import Decision
from lightning_dlrover.planner.warm_start import Suggestion

__all__ = ["DEFAULT_RULES", "Model", "Rules", "Situation"]


class Model(Protocol):
    """What predicts step times: `StepTimeModel`, or another one it is compared with."""

    def predict_many(self, configurations: Sequence[Configuration]) -> Sequence[Prediction]: ...


@dataclass(frozen=True)
class Situation:
    """What is known about a running job.

    Args:
        windows: of rank 0, oldest first; the last one is of what runs now.
        node_cores: cores of one node, all its workers together; 0: unknown.
        remaining_samples: that the whole job has still to train on; None if nobody knows.
        resize_cost_s: seconds the whole job stands still when workers change, as measured.
        retune_cost_s: seconds it stands still when the other settings change, as measured.
        age_s: seconds since the job's start.
        spent: money until now; None: unknown.
        past: earlier decisions of this job, in any order; they keep the planner from going back and forth.
        suggestion: where jobs like this one have ended; None: there were none.
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
            raise ValueError(f"remaining_samples is {left!r}; pass None if nobody knows how many are left")
        for name in ("resize_cost_s", "retune_cost_s", "age_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)!r}, not a finite time of 0 s or more")

    @property
    def current(self) -> StepProfile:
        return self.windows[-1]


@dataclass(frozen=True)
class Rules:
    """For how much the planner moves. Shares are of the time, or cost, that is left."""

    min_gain: float = 0.02  # that a change has to bring; doubles with each time that the planner itself left those settings
    min_explore_gain: float = 0.005  # expected improvement that untried settings have to promise
    max_explore_cost: float = 0.05  # that a trial may cost
    max_trials: int = 5
    max_stretch: float = 4.0  # untried workers are at most so many times what was tried, and at least that part of it
    trial_s: float = 10.0  # until untried settings are judged
    horizon_s: float = 3600.0  # time left that is assumed when nobody knows when the job ends


DEFAULT_RULES = Rules()
