"""The lines of a job's history about a new round."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from lightning_dlrover.rdzv.job.records import RoundRecord
from lightning_dlrover.rdzv.live.rounds import View, cause, losses

__all__ = ["announce"]


def announce(
    view: View,
    round_: RoundRecord,
    decided_s: float,
    buried: Collection[str],
    event: Callable[[str, str, dict[str, Any]], None],
) -> None:
    """Report a round, and which workers were lost before it.

    Args:
        view: the view on which the round was decided.
        decided_s: seconds from the last change of the records to the write of this round.
        buried: workers that the convener itself has buried.
        event: receives kind, text and data of each line.
    """
    for worker_id in losses(view, round_):
        how = _evidence(view, worker_id, buried)
        event(
            "loss",
            f"worker {worker_id} is gone: {how}",
            {"worker_id": worker_id, "round": round_.number - 1, "evidence": how, "decided_s": decided_s},
        )
    event(
        "round",
        f"round {round_.number}: {len(round_.members)} workers, {round_.reason}",
        {
            "number": round_.number,
            "members": round_.members,
            "kind": round_.kind,
            "planned": round_.planned,
            "reason": round_.reason,
            "cause": cause(view, round_),
            "decided_s": decided_s,
        },
    )


def _evidence(view: View, worker_id: str, buried: Collection[str]) -> str:
    """Describe the convener's evidence that a worker is lost."""
    if worker_id in view.workers:
        return "it did not answer, or cannot be reached"
    if worker_id in buried:
        return "its port refuses connections"
    return "its lease ended, or its agent or another worker found its process gone"
