"""Choose a job's settings from a model, limits and the remaining work. Pure: no torch, no clock, no network."""

from lightning_dlrover.planner.autoscale import plan
from lightning_dlrover.planner.objective import Objective, Prices
from lightning_dlrover.planner.plan import Candidate, Decision, Outcome, Settings, outcome
from lightning_dlrover.planner.plan_request import PlanRequest, Rules
from lightning_dlrover.planner.space import Limits

__all__ = [
    "Candidate",
    "Decision",
    "Limits",
    "Objective",
    "Outcome",
    "PlanRequest",
    "Prices",
    "Rules",
    "Settings",
    "outcome",
    "plan",
]
