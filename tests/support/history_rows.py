"""Rows of a job's history, for tests of records and reports."""

from __future__ import annotations

from dataclasses import replace

from lightning_dlrover.tuning.candidates import Descriptor
from lightning_dlrover.tuning.history import JobEntry
from lightning_dlrover.tuning.plan import Candidate, Decision, Settings
from lightning_dlrover.tuning.samples import StepProfile
from tests.support import windows

SETTINGS = Settings(1, 0, 1, 0)
DESCRIPTOR = Descriptor(1e6, 4e6, 0.0, 0.0, 512.0, "cpu", 4.0)
CANDIDATE = Candidate(SETTINGS, 0.08, 0.075, 0.085, 800.0, 0.0, measured=True, feasible=True, note="runs now")


def entry(key: str, at: float = 1000.0, descriptor: Descriptor = DESCRIPTOR) -> JobEntry:
    return JobEntry(key, key.partition("@")[0], 900.0, at, "running", descriptor)


def window(at: float, workers: int = 1, step_time_s: float = 0.1) -> StepProfile:
    """Window of a job whose steps consist of the forward pass alone."""
    made = windows.window(workers, step_time_s, global_batch=512, cores=4.0, dense_bytes=0)
    return replace(made, num_steps=20, local_batch=512 // workers, forward_s=step_time_s, backward_s=0.0, at=at)


def decision(number: int) -> Decision:
    return Decision(number, 1000.0 + number, SETTINGS, SETTINGS, "stay", (CANDIDATE,), 0.08, 0.08, explored=False)
