"""A Trainer beside other jobs of a dispatcher: it asks for memory before the first step, and reports steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from lightning_dlrover.live.lightning_names import combined_loader
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
    """Return the estimated peak of this process; zero bytes and the reason if there is none."""
    # Imported here: jobs that run by themselves start faster without.
    from lightning_dlrover.observe.peak_memory import LoaderShape, Unknown, estimate_peak, report_of, step_of

    if module.device.type != "cpu":
        return report_of(Unknown(f"the peak of a model on {module.device.type} is not estimated"), trainer.world_size)
    combined = combined_loader(trainer.fit_loop)
    workers = [getattr(loader, "num_workers", 0) for loader in combined.flattened] if combined is not None else []
    ahead = [getattr(loader, "prefetch_factor", None) or 2 for loader in combined.flattened] if combined is not None else []
    loader = LoaderShape(sum(workers), max(ahead, default=2))
    step = step_of(module, trainer.optimizers)
    return report_of(estimate_peak(module, trainer.optimizers, batch, step, loader=loader), trainer.world_size)
