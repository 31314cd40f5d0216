"""The lines of a job's history about a new round."""

from __future__ import annotations

from collections.abc import Callable, Collection

from lightning_dlrover.output import counted
from lightning_dlrover.rdzv.job.events import Event, RoundFormed, WorkerLost
from lightning_dlrover.rdzv.job.records import RoundRecord
from lightning_dlrover.rdzv.live.rounds import View, cause, losses

__all__ = ["announce"]


def announce(
    view: View,
    round_: RoundRecord,
    decided_s: float,
    buried: Collection[str],
    event: Callable[[Event, str], None],
) -> None:
    """Report a round, and which workers were lost before it.

    Args:
        view: the view on which the round was decided.
        decided_s: seconds from the last change of the records to the write of this round.
        buried: workers that the convener itself has buried.
        event: receives each line and its text.
    """
    for worker_id in losses(view, round_):
        how = _evidence(view, worker_id, buried)
        event(WorkerLost(worker_id, round_.number - 1, how, decided_s), f"worker {worker_id} is gone: {how}")
    formed = RoundFormed(
        number=round_.number,
        members=round_.members,
        kind=round_.kind,
        planned=round_.planned,
        reason=round_.reason,
        cause=cause(view, round_),
        decided_s=decided_s,
    )
    event(formed, f"round {round_.number}: {counted(len(round_.members), 'worker')}, {round_.reason}")


def _evidence(view: View, worker_id: str, buried: Collection[str]) -> str:
    """Describe the convener's evidence that a worker is lost."""
    if worker_id in view.workers:
        return "it did not answer, or cannot be reached"
    if worker_id in buried:
        return "its port refuses connections"
    return "its lease ended, or its agent or another worker found its process gone"
