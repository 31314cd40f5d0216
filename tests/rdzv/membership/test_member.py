"""Decisions of a worker after the loss of its round at the very end of a job."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from lightning_dlrover.rdzv.job.records import JobRecord, RoundRecord, WorkerRecord
from lightning_dlrover.rdzv.membership.member import Formation, LeftOutError, Member, WorldError, run_blocking
from lightning_dlrover.rdzv.membership.rounds import JobView, WorkerView, notice_of

ROUND = RoundRecord(5, ["a", "b"], "test", "grow", planned=True)


def view_of(phase: Any, *workers: str) -> JobView:
    records = {w: WorkerRecord(w, "agent", "host", 1, 0, "address", 1, "active", 5) for w in workers}
    return JobView(JobRecord(phase, True, 1, 2, "1"), ROUND, None, records, {}, frozenset())


def worker_view_of(view: JobView) -> WorkerView:
    """The workers' view if their coordinator sees `view`."""
    return WorkerView(view.job, view.round, view.plan, notice_of(view, 0))


class Backend:
    """A worker that finds its round broken.

    Args:
        later: what it sees once it waits. None: no further event occurs.
    """

    worker_id = "a"

    def __init__(self, view: JobView, later: JobView | None = None) -> None:
        self.view = worker_view_of(view)
        self.probed: list[str] = []
        self.written: list[object] = []
        self._later = later

    async def until(
        self, found: Callable[[WorkerView], Any], what: str, timeout_s: float | None = None, probe: Sequence[str] = ()
    ) -> Any:
        self.probed += probe
        if self._later is not None:
            self.view = worker_view_of(self._later)
        result = found(self.view)
        assert result is not None, f"waits for {what}"
        return result

    async def write(self, *args: object, **kwargs: object) -> None:
        self.written.append(args)

    async def evict_dead(self, workers: Sequence[str]) -> None:
        self.probed += workers

    async def destroy(self) -> None: ...


@pytest.mark.parametrize("phase, error", [("finished", LeftOutError), ("failed", WorldError)])
def test_round_broken_in_the_last_step_leaves_nothing_to_do(phase: str, error: type[Exception]) -> None:
    member = Member(Backend(view_of(phase, "a")))  # type: ignore[arg-type]
    member.formation = Formation(ROUND, {}, 0)
    with pytest.raises(error, match=phase) as raised:
        run_blocking(member.regroup(b"state"))
    assert type(raised.value) is error


def test_loss_in_a_later_fit_awaits_the_next_round() -> None:
    view = view_of("finished", "a")
    assert view.job is not None
    following = RoundRecord(6, ["a"], "lost b", "loss", planned=False)
    view = replace(view, job=replace(view.job, fits_begun=2, fits_finished=1), round=following)
    member = Member(Backend(view))  # type: ignore[arg-type]
    member.formation = Formation(ROUND, {}, 0)
    assert run_blocking(member._next_after(ROUND)) == following


def test_worker_that_was_handing_over_is_probed_when_the_round_breaks() -> None:
    view = view_of("training", "a", "b", "leaver")
    following = RoundRecord(6, ["a", "b"], "test", "retry", planned=False)
    backend = Backend(view, later=replace(view, round=following))
    assert run_blocking(Member(backend)._next_after(ROUND)) == following  # type: ignore[arg-type]
    assert backend.probed == 2 * ["a", "b", "leaver"]  # at once and while it waits
    assert backend.written == [("reforming", 5)]


def test_worker_that_sees_the_next_round_reports_nothing_of_the_broken_one() -> None:
    following = RoundRecord(6, ["a"], "lost b", "loss", planned=False)
    backend = Backend(replace(view_of("training", "a"), round=following))
    assert run_blocking(Member(backend)._next_after(ROUND)) == following  # type: ignore[arg-type]
    assert backend.written == []


def test_drained_worker_leaves_a_broken_round_to_the_others() -> None:
    members = RoundRecord(5, ["a", "b", "c"], "test", "grow", planned=True)
    view = view_of("training", "a", "c")
    assert view.job is not None
    answers = {name: replace(record, state="reforming") for name, record in view.workers.items()}
    view = replace(view, round=members, workers=answers, job=replace(view.job, min_workers=3))
    leaving = replace(view, drains=frozenset({"a"}))
    with pytest.raises(LeftOutError, match="while c wait"):
        run_blocking(Member(Backend(leaving))._next_after(members))  # type: ignore[arg-type]
    silent = replace(leaving, workers={**answers, "c": replace(answers["c"], state="active")})  # the silent worker may be dead
    for waits in (view, silent, replace(view, drains=frozenset({"c"}))):
        with pytest.raises(AssertionError, match="waits for the round after round 5"):
            run_blocking(Member(Backend(waits))._next_after(members))  # type: ignore[arg-type]


def test_dismissed_worker_leaves_whether_it_knows_of_its_dismissal_or_not() -> None:
    undone = RoundRecord(6, ["b"], "a step failed", "undo", planned=False)
    member = Member(Backend(replace(view_of("training", "a", "b"), round=undone)))  # type: ignore[arg-type]
    member.formation = Formation(ROUND, {}, 0)
    with pytest.raises(LeftOutError, match="a step failed"):
        run_blocking(member.regroup(b"state"))


def test_drained_worker_does_not_wait_for_the_first_round() -> None:
    view = replace(view_of("starting", "a"), round=None, drains=frozenset({"a"}))
    with pytest.raises(LeftOutError, match="before the first round"):
        run_blocking(Member(Backend(view)).start("starting"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "phase, workers, is_useless",
    [
        ("training", "ab", False),
        ("training", "a", False),
        ("finished", "ab", False),
        ("finished", "a", True),
        ("failed", "a", True),
    ],
)
def test_a_round_whose_members_have_ended_with_the_job_is_not_waited_for(phase: str, workers: str, is_useless: bool) -> None:
    view = view_of(phase, *workers)
    assert Member(Backend(view)).will_never_form(worker_view_of(view), 5) == is_useless  # type: ignore[arg-type]
