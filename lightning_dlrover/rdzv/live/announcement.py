"""The lines of a job's history about a new round."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass

from lightning_dlrover.output import counted
from lightning_dlrover.rdzv.etcd.operations import Put
from lightning_dlrover.rdzv.job.events import RoundFormed, WorkerLost, record_of
from lightning_dlrover.rdzv.job.journal import Journal
from lightning_dlrover.rdzv.job.records import EventRecord, RoundRecord
from lightning_dlrover.rdzv.live.outbox import Outbox
from lightning_dlrover.rdzv.live.rounds import JobView, cause, losses

__all__ = ["Announcement", "Announcer", "lines_about"]

log = logging.getLogger(__name__)

MANY = 100
"""Members of a round above which its line in the history names only those that came or went."""

MAX_LINES = 100
"""Maximum number of lines in one transaction. etcd allows 128 operations (--max-txn-ops), and a round needs two of them."""


@dataclass(frozen=True)
class Announcement:
    """The lines about one round."""

    round: RoundRecord
    puts: tuple[Put, ...]  # writes for the round's own transaction
    others: tuple[EventRecord, ...]  # lines that the transaction has no room for: losses beyond `MAX_LINES`


class Announcer:
    """Reports rounds in the transactions that write them.

    Written later, the lines would be missing if the coordinator were killed before, or if etcd's answer were lost.

    Args:
        outbox: takes lines that a transaction has no room for.
        worker_id: the coordinator.
        buried: workers that the coordinator itself has buried.
    """

    def __init__(self, journal: Journal, outbox: Outbox, worker_id: str, buried: Collection[str]) -> None:
        self._journal = journal
        self._outbox = outbox
        self._worker_id = worker_id
        self._buried = buried

    def of(self, view: JobView, round_: RoundRecord, decided_s: float) -> Announcement:
        """Return the lines about a round that is about to be written."""
        lines = lines_about(view, round_, round(decided_s, 3), self._buried)
        puts = self._journal.puts(lines[-MAX_LINES:], self._worker_id)
        return Announcement(round_, tuple(puts), tuple(lines[:-MAX_LINES]))

    def made(self, announcement: Announcement) -> None:
        """Note that the round was written."""
        round_ = announcement.round
        log.info(
            "run %s: round %d: %s, %d workers",
            *(self._journal.keys.run_id, round_.number, round_.reason, len(round_.members)),
        )
        for line in announcement.others:
            self._outbox.add(line)
        self._journal.note_appended(len(announcement.puts))


def lines_about(view: JobView, round_: RoundRecord, decided_s: float, buried: Collection[str]) -> list[EventRecord]:
    """Return the lines about the workers lost before a round, and last the one about the round.

    Args:
        view: the view on which the round was decided.
        decided_s: seconds from the last change of the records to this decision.
        buried: workers that the coordinator itself has buried.
    """
    lines = []
    for worker_id in losses(view, round_):
        how = _evidence(view, worker_id, buried)
        lost = WorkerLost(worker_id, round_.number - 1, how, decided_s)
        lines.append(record_of(lost, f"worker {worker_id} is gone: {how}"))
    formed = RoundFormed(
        number=round_.number,
        members=round_.members if len(round_.members) <= MANY else [],
        num_members=len(round_.members),
        kind=round_.kind,
        planned=round_.planned,
        reason=round_.reason,
        cause=cause(view, round_),
        decided_s=decided_s,
    )
    text = f"round {round_.number}: {counted(len(round_.members), 'worker')}, {round_.reason}"
    return [*lines, record_of(formed, text)]


def _evidence(view: JobView, worker_id: str, buried: Collection[str]) -> str:
    """Describe the coordinator's evidence that a worker is lost."""
    if worker_id in view.workers:
        return "it did not answer, or cannot be reached"
    if worker_id in buried:
        return "its port refuses connections"
    if worker_id in view.addresses:
        return "its lease ended, and it did not come back in time"
    return "its agent or another worker found its process gone"
