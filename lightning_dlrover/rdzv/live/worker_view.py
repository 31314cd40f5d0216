"""What each worker of a job sees: the shared records, and what the coordinator's notice says of the other workers.

Only the coordinator follows the records of all workers. It writes what the others must know into one notice: with each round,
and whenever the notice would change. So a change costs a job of n workers a few writes and n notifications each, instead of n
writes of which each notifies n workers.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from functools import cached_property

from lightning_dlrover.rdzv.job.records import JobRecord, Notice, PlanRecord, RoundRecord
from lightning_dlrover.rdzv.live.rounds import JobView, lacks_workers

__all__ = ["WorkerView", "notice_of", "worker_view_of"]

MAX_NAMED = 2
"""Workers that a notice names where readers ask only whether there is another one beside themselves."""


@dataclass(frozen=True)
class WorkerView:
    """One worker's view of its job."""

    job: JobRecord | None = None
    round: RoundRecord | None = None
    plan: PlanRecord | None = None
    notice: Notice | None = None
    term: int = 0  # create revision of the election key; 0: there is no coordinator
    leaver: str = ""  # id of the worker that looks, once it has asked to leave itself

    @property
    def is_told(self) -> bool:
        """Whether the coordinator in office has written the notice. The notice of an earlier one may be long out of date."""
        return self.notice is not None and self.notice.term == self.term

    @property
    def is_past_start(self) -> bool:
        """Whether a worker is past the start: it trains, or builds its model to join or start later."""
        return self.notice is not None and self.is_told and self.notice.is_past_start

    @property
    def given_up(self) -> Sequence[str]:
        """Members that report the current round as not formed or broken: all, or some of them."""
        return self._of_round.given_up if self._of_round is not None else ()

    @property
    def keepers(self) -> Sequence[str]:
        """Those of `given_up` that have the job's state and were not asked to leave: all, or some of them."""
        return self._of_round.keepers if self._of_round is not None else ()

    @property
    def lost(self) -> Sequence[str]:
        """Members of the current round that are gone."""
        return self._of_round.lost if self._of_round is not None else ()

    @property
    def leavers(self) -> Sequence[str]:
        """Workers outside of the current round that still take part in a hand-over to it."""
        return self._of_round.leavers if self._of_round is not None else ()

    @cached_property
    def drains(self) -> Set[str]:
        """Workers that were asked to leave."""
        told = self.notice.drains if self.notice is not None else ()
        return frozenset((*told, self.leaver) if self.leaver else told)

    @cached_property
    def replacements(self) -> Set[str]:
        """Workers that were asked to leave once another worker can replace them."""
        return frozenset(self.notice.replacements) if self.notice is not None else frozenset()

    @property
    def lacks_workers(self) -> bool:
        """Whether the present workers cannot form a further round, however long they wait."""
        return self.notice is not None and self.is_told and self.notice.lacks_workers

    @property
    def _of_round(self) -> Notice | None:
        """The notice, if it refers to the current round."""
        is_current = self.notice is not None and self.round is not None and self.notice.round_number == self.round.number
        return self.notice if is_current else None


def notice_of(view: JobView, term: int) -> Notice:
    """Return the notice that tells the other workers what `view` shows.

    Args:
        term: create revision of the coordinator's election key.
    """
    failed, holders = view.failed, set(view.holders)
    return Notice(
        term=term,
        round_number=view.round.number if view.round is not None else 0,
        is_past_start=bool(view.survivors or view.in_state("standby", "ready")),
        given_up=failed[:MAX_NAMED],
        keepers=[w for w in failed if w in holders and w not in view.drains][:MAX_NAMED],
        lost=[w for w in view.lost if w not in view.addresses],  # the others may come back
        leavers=view.in_state("active"),
        drains=sorted(view.drains),
        replacements=sorted(view.replacements),
        lacks_workers=lacks_workers(view),
    )


def worker_view_of(view: JobView) -> WorkerView:
    """Return the view of workers whose coordinator sees `view`."""
    return WorkerView(view.job, view.round, view.plan, notice_of(view, 0))
