"""Rows of a job's history, for tests of records and reports."""

from __future__ import annotations

from typing import Any

from lightning_dlrover.tuning.candidates import Descriptor
from lightning_dlrover.tuning.history import JobEntry
from lightning_dlrover.tuning.plan import Candidate, Decision, Settings
from lightning_dlrover.tuning.samples import StepProfile

SETTINGS = Settings(1, 0, 1, 0)
DESCRIPTOR = Descriptor(1e6, 4e6, 0.0, 0.0, 512.0, "cpu", 4.0)
CANDIDATE = Candidate(SETTINGS, 0.08, 0.075, 0.085, 800.0, 0.0, measured=True, feasible=True, note="runs now")


def entry(key: str, at: float = 1000.0, descriptor: Descriptor = DESCRIPTOR) -> JobEntry:
    return JobEntry(key, key.partition("@")[0], 900.0, at, "running", descriptor)


def window(at: float, workers: int = 1, step_time_s: float = 0.1) -> StepProfile:
    parts: dict[str, Any] = dict.fromkeys(("data_wait_s", "backward_s", "communication_s", "optimizer_s", "other_s"), 0.0)
    return StepProfile(
        worker_id="w0",
        round_number=1,
        global_rank=0,
        num_workers=workers,
        num_nodes=1,
        first_step=0,
        num_steps=20,
        global_batch=512,
        local_batch=512 // workers,
        loader_workers=0,
        intra_op_threads=1,
        cores=4.0,
        device="cpu",
        step_time_s=step_time_s,
        forward_s=step_time_s,
        samples_per_s=512 / step_time_s,
        memory_bytes=1 << 28,
        cpu_percent=100.0,
        at=at,
        **parts,
    )


def decision(number: int) -> Decision:
    return Decision(number, 1000.0 + number, SETTINGS, SETTINGS, "stay", (CANDIDATE,), 0.08, 0.08, explored=False)
