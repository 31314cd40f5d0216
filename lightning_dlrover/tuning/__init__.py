"""Models of a job's steps and memory, and the plans that follow from them. Does not import torch."""

from lightning_dlrover.tuning.autoscale import plan
from lightning_dlrover.tuning.candidates import PlanRequest, Rules
from lightning_dlrover.tuning.memory import MemoryModel, MemoryPrediction
from lightning_dlrover.tuning.plan import Candidate, Decision, Limits, Objective, Outcome, Prices, Settings, outcome
from lightning_dlrover.tuning.population import Population
from lightning_dlrover.tuning.prior import PhysicalPrior
from lightning_dlrover.tuning.samples import STEP_PARTS, Columns, Configuration, StepProfile, configuration_of
from lightning_dlrover.tuning.step_time import Prediction, StepTimeModel, population_of

__all__ = [
    "STEP_PARTS",
    "Candidate",
    "Columns",
    "Configuration",
    "Decision",
    "Limits",
    "MemoryModel",
    "MemoryPrediction",
    "Objective",
    "Outcome",
    "PhysicalPrior",
    "PlanRequest",
    "Population",
    "Prediction",
    "Prices",
    "Rules",
    "Settings",
    "StepProfile",
    "StepTimeModel",
    "configuration_of",
    "outcome",
    "plan",
    "population_of",
]
