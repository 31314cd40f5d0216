"""An estimate, as a job reports it to a dispatcher."""

from __future__ import annotations

import os
import time
from dataclasses import replace

from lightning_dlrover.observe.admission_client import AdmissionReport
from lightning_dlrover.observe.peak_memory.estimate import MemoryEstimate, Unknown

__all__ = ["report_of"]


def report_of(estimate: MemoryEstimate | Unknown, num_processes: int = 1, on_gpu: bool = False) -> AdmissionReport:
    """Return the report; one without an estimate has zero bytes and the reason.

    Args:
        on_gpu: the estimate is that of the GPU's memory.
    """
    report = AdmissionReport(os.getpid(), time.monotonic(), num_processes)
    if isinstance(estimate, Unknown):
        return replace(report, estimate_note=estimate.reason[:400])
    report = replace(report, estimate_note=estimate.source)
    if on_gpu:
        return replace(report, gpu_estimate_bytes=estimate.total_bytes, gpu_estimate_margin_bytes=estimate.margin_bytes)
    parts = estimate.parts
    # Forward and backward read each parameter and activation twice or write it, and the optimizer reads and writes its part.
    step_bytes = 3 * parts.parameters + 2 * (parts.activations + parts.optimizer_state + parts.gradients)
    return replace(
        report, estimate_bytes=estimate.total_bytes, estimate_margin_bytes=estimate.margin_bytes, step_bytes=step_bytes
    )
