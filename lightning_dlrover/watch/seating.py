"""What a Trainer does beside other jobs of a dispatcher: it asks for memory before the first step, and reports steps."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

import torch

from lightning_dlrover.live.progress import remaining_batches
from lightning_dlrover.observe.seat import Seat, SeatReport

if TYPE_CHECKING:
    import lightning as L

__all__ = ["keep_seat", "take_seat"]


def take_seat(seat: Seat, trainer: L.Trainer, module: L.LightningModule, batch: Any) -> None:
    """Report the estimated peak memory of this process, and wait until the dispatcher admits the job.

    Raises:
        NotAdmittedError: it did not.
    """
    answer = seat.ask(_estimate(trainer, module, batch))
    if answer.threads:
        torch.set_num_threads(answer.threads)


def keep_seat(seat: Seat, trainer: L.Trainer, data_wait_s: float, may_set_threads: bool) -> None:
    """Count a step, and take the threads that the dispatcher grants, unless the job's own planner sets them."""
    seat.step_ended(data_wait_s)
    if not seat.is_due:
        return
    left = remaining_batches(trainer)
    seat.report(None if left is None else max(0, round(left)), torch.get_num_threads())
    threads = seat.answer().threads
    if may_set_threads and threads and threads != torch.get_num_threads():
        torch.set_num_threads(threads)


def _estimate(trainer: L.Trainer, module: L.LightningModule, batch: Any) -> SeatReport:
    return SeatReport(os.getpid(), time.monotonic(), estimate_note="not estimated")
