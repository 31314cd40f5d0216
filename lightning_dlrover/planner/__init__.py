"""Turns a model, limits and the work that is left into a decision. Pure: no torch, no clock, no network."""

from lightning_dlrover.planner.autoscale import Limits, plan_workers
from lightning_dlrover.planner.plan import Candidate, Decision, Outcome, Settings, outcome

__all__ = ["Candidate", "Decision", "Limits", "Outcome", "Settings", "outcome", "plan_workers"]
