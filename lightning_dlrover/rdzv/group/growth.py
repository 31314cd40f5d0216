"""Undo a growth with which the script cannot continue.

A script may be right with n workers and wrong with more: it gathers shares of one size, or a share has a single sample, or a
joiner's host is broken. A job that has trained must not end by that. So for some steps after workers have joined, an error of
the script is taken as theirs: they are dismissed, and the others form the next round without them and make the step again. An
error there is the script's own.

    open        a planned round with joiners has formed
    -> over     `TRIAL_STEPS` steps were made, or no joiner is left
    -> failed   a step has failed on this worker; if it fails once more, the growth before is undone, too, if it is still open
    -> over     the step was made; or it has failed without any joiners, so the number of workers is not to blame

Each worker follows this by itself, in its main thread. Several may find the failure; what each of them writes is the same.
"""

from __future__ import annotations

import dataclasses
import logging
import textwrap
import time
import traceback

from lightning_dlrover.output import counted
from lightning_dlrover.rdzv.etcd.errors import EtcdError
from lightning_dlrover.rdzv.job.events import GrowthFailed
from lightning_dlrover.rdzv.job.records import JobRecord, PlanRecord, RecordError
from lightning_dlrover.rdzv.live.member import Formation, MembershipError
from lightning_dlrover.rdzv.live.membership import Membership
from lightning_dlrover.rdzv.live.requests import dismiss

__all__ = ["TRIAL_STEPS", "Growth"]

log = logging.getLogger(__name__)

TRIAL_STEPS = 20
"""Steps after a growth within which an error of the script undoes it."""

MAX_CHARS = 300
"""Maximum length of a reason on record."""


@dataclasses.dataclass
class _Growth:
    joiners: list[str]
    first_step: int | None = None  # first step after it


class Growth:
    """One worker's view of the job's newest growths."""

    def __init__(self, membership: Membership, run_id: str) -> None:
        self._membership = membership
        self._run_id = run_id
        self._open: list[_Growth] = []  # oldest first
        self._size = self._round = 0  # of the newest round
        self._step = 0  # next step, as far as this worker knows
        self._failed: list[int] = []  # numbers of workers with which a step has failed, until it is made
        self._failed_step = 0

    def formed(self, formation: Formation) -> None:
        """Note that a round was formed."""
        members, hellos = formation.round.members, formation.hellos
        self._size, self._round = len(members), formation.round.number
        if formation.round.kind in ("grow", "replace"):
            self._open.append(_Growth([w for w in members if not hellos.get(w)]))  # only workers without the state send none
        for growth in self._open:
            growth.joiners = [worker for worker in growth.joiners if worker in members]
        self._open = [growth for growth in self._open if growth.joiners]

    def step_begins(self, number: int) -> None:
        """Note the number of the next step; called before some of the steps."""
        self._step = number
        for growth in self._open:
            growth.first_step = number if growth.first_step is None else growth.first_step
        self._open = [each for each in self._open if each.first_step is None or number - each.first_step < TRIAL_STEPS]
        if number > self._failed_step:
            self._failed = []

    def undo(self, error: BaseException) -> bool:
        """Dismiss the newest joiners because of an error in a step. Return False if it is the script's own.

        If this returns True, the caller has to recover, as after a loss.
        """
        job = self._membership.view.job
        if not self._open or self._former < (job.min_workers if job is not None else 1):
            self._acquit()
            return False
        reason = self._reason(error)
        # Indented, so that nobody takes it for the error that has ended this process.
        trace = textwrap.indent("".join(traceback.format_exception(error)), "  | ")
        log.error("run %s: %s; the job goes back to %s\n%s", self._run_id, reason, counted(self._former, "worker"), trace)
        if not self._put_on_record(reason):
            return False
        self._failed.append(self._size)
        self._failed_step = self._step
        return True

    def ends_by(self, error: BaseException) -> None:
        """Keep the job from another growth to this size if this worker, a joiner, is about to end by an error."""
        if self._open and self._membership.worker_id in self._open[-1].joiners:
            self._put_on_record(self._reason(error))

    @property
    def _former(self) -> int:
        return self._size - len(self._open[-1].joiners)

    def _reason(self, error: BaseException) -> str:
        text = f"{counted(self._size, 'worker')} failed where {self._former} had trained: {type(error).__name__}: {error}"
        return " ".join(text.split())[:MAX_CHARS]

    def _put_on_record(self, reason: str) -> bool:
        try:
            self._record(reason)
        except (EtcdError, RecordError, MembershipError) as trouble:
            log.error("run %s: the growth cannot be undone, as etcd took no record of it: %s", self._run_id, trouble)
            return False
        return True

    def _record(self, reason: str) -> None:
        shared, size, former = self._membership.shared, str(self._size), self._former
        is_first = False

        def failed(job: JobRecord) -> JobRecord:
            nonlocal is_first
            is_first = size not in job.failed_sizes
            return dataclasses.replace(job, failed_sizes={**job.failed_sizes, size: reason}) if is_first else job

        def smaller(plan: PlanRecord | None) -> PlanRecord | None:
            if plan is None or plan.num_workers <= former:
                return None
            return dataclasses.replace(plan, num_workers=former, reason=reason, created_at=time.time())

        shared.update_job(failed)  # first: no growth to this size may come in between
        for worker in self._open[-1].joiners:
            dismiss(shared.journal, worker, self._round, reason)
        shared.journal.swap(PlanRecord, shared.journal.keys.plan, smaller)
        if is_first:
            shared.event(GrowthFailed(self._size, former, self._membership.worker_id, reason), f"goes back: {reason}")

    def _acquit(self) -> None:
        """Let the job grow to all sizes again with which the present step has failed: fewer workers have failed in it, too."""
        sizes, self._failed = {str(size) for size in self._failed}, []
        if not sizes:
            return
        try:
            self._membership.shared.update_job(lambda job: job.trying_again(sizes))
        except (EtcdError, RecordError, MembershipError) as trouble:
            log.warning("run %s: the failure with %s workers stays on record: %s", self._run_id, ", ".join(sizes), trouble)
