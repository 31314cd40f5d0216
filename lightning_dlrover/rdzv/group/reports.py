"""Report why a worker waits or fails: in its output, to its agent, and in the job's history."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
import traceback

from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from lightning_dlrover.rdzv.etcd.errors import EtcdError
from lightning_dlrover.rdzv.group.failures import is_group_failure
from lightning_dlrover.rdzv.job.events import WorkerFailed, events_of
from lightning_dlrover.rdzv.live import rounds
from lightning_dlrover.rdzv.live.member import EvictedError, HasFormation, MembershipError, WorldError
from lightning_dlrover.rdzv.live.membership import Membership

__all__ = ["Reports"]

log = logging.getLogger(__name__)

MANY = 100
"""Members of a round above which they do not all read each other's records for a text."""


class Reports:
    """Reports of one worker's waits and errors for people.

    Args:
        worker: has the round that this worker formed last.
    """

    def __init__(self, membership: Membership, run_id: str, worker: HasFormation) -> None:
        self._membership = membership
        self._run_id = run_id
        self._worker = worker

    def error(self, error: BaseException) -> None:
        """See `World.report_error`."""
        if isinstance(error, WorldError | MembershipError) and (first := self._first_failure()) is not None:
            text, failed = first
            _add_note(error, f"\nThe first to fail was {text.partition(': ')[0]}:\n{failed.traceback}")
        if is_group_failure(error) and (lost := self._lost_members()):
            _add_note(
                error,
                f"\nThis worker failed because the job has lost {', '.join(lost)}, in whose collective it was: "
                "see why that one has ended. Outside of a training loop a loss ends the other workers, too",
            )
        get_error_handler().record_exception(error)
        text = "".join(traceback.format_exception(error))
        worker_id, formation = self._membership.worker_id, self._worker.formation
        with contextlib.suppress(EtcdError):
            failed = WorkerFailed(worker_id, formation.rank if formation is not None else 0, text[-20000:], time.time())
            self._membership.shared.event(failed, f"worker {worker_id}: {type(error).__name__}: {error}"[:500])
            self._membership.shared.outbox.write()

    def wait(self, what: str) -> None:
        """Log the reason for this worker's wait, and the failure that led to it."""
        worker_id = self._membership.worker_id
        waits_for = ""
        with contextlib.suppress(EtcdError):
            if (round_ := self._membership.view.round) is None or len(round_.members) <= MANY:
                waits_for = rounds.waits(self._membership.all_records()).get(worker_id, "")
        waits_for = waits_for or f"waits for {what}"
        first = self._first_failure()
        log.warning(
            "run %s: worker %s %s%s",
            self._run_id,
            worker_id,
            waits_for,
            f"; the first to fail was {first[0]}" if first is not None else "",
        )

    def _lost_members(self) -> list[str]:
        """Return dead members of the round that this worker formed last."""
        if (formation := self._worker.formation) is None:
            return []
        members = formation.round.members
        with contextlib.suppress(EtcdError):
            self._membership.bury_the_dead(members)
            with contextlib.suppress(TimeoutError, EvictedError):  # another worker may be burying them, which takes a moment
                number = formation.round.number
                self._membership.wait_for(
                    lambda view: True if view.lost or (view.round and view.round.number > number) else None,
                    1.0,
                    "the loss of a worker",
                )
            if len(members) <= MANY:
                present = self._membership.workers.present(members)
                return [member for member in members if member not in present]
        return [member for member in members if member in self._membership.view.lost]

    def _first_failure(self) -> tuple[str, WorkerFailed] | None:
        """Return text and report of the first peer that failed with an error."""
        formation = self._worker.formation
        if formation is not None and formation.size > MANY and formation.rank != 0:
            return None  # rank 0 reads the history: a thousand workers that wait for one would keep etcd from their leases
        peers = set(formation.round.members) - {self._membership.worker_id} if formation is not None else set()
        with contextlib.suppress(EtcdError):
            events = self._membership.shared.journal.events() if peers else []
            return next(((r.text, failed) for r, failed in events_of(events, WorkerFailed) if failed.worker_id in peers), None)
        return None


def _add_note(error: BaseException, note: str) -> None:
    if sys.version_info >= (3, 11):
        error.add_note(note)
    elif error.args and isinstance(error.args[0], str):  # Python 3.10 prints no notes
        error.args = (f"{error.args[0]}\n{note}", *error.args[1:])
