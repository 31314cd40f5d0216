"""When a list is requested, and what it counts for."""

from __future__ import annotations

import pytest

from lightning_dlrover.components.targets.target import Polling, TargetError
from tests.support.manual_clock import ManualClock


class Scheduler:
    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock
        self.answer: str | TargetError = "list"
        self.takes_s = 0.0

    def request(self) -> str:
        self.clock.advance_s(self.takes_s)
        if isinstance(self.answer, TargetError):
            raise self.answer
        return self.answer


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def scheduler(clock: ManualClock) -> Scheduler:
    return Scheduler(clock)


@pytest.fixture
def polling(scheduler: Scheduler, clock: ManualClock) -> Polling[str]:
    return Polling(scheduler.request, "nothing", 2.0, clock)


def test_last_list_holds_until_there_is_a_new_one(polling: Polling[str], scheduler: Scheduler, clock: ManualClock) -> None:
    assert polling.newest == "nothing"
    assert polling.refresh()
    scheduler.answer = TargetError("no answer")
    clock.advance_s(2.0)
    assert not polling.refresh()
    assert polling.newest == "list"
    with pytest.raises(TargetError, match="no answer"):
        polling.raise_trouble()
    scheduler.answer = "another"
    clock.advance_s(4.0)
    assert polling.refresh()
    assert polling.newest == "another"
    polling.raise_trouble()


@pytest.mark.parametrize("demanded_s, waited_s", [(1.0, 4.0), (30.0, 30.0), (3600.0, 60.0)])
def test_scheduler_may_demand_a_longer_pause_of_up_to_a_minute(
    polling: Polling[str], scheduler: Scheduler, clock: ManualClock, demanded_s: float, waited_s: float
) -> None:
    scheduler.answer = TargetError("slow down")
    scheduler.answer.retry_after_s = demanded_s
    assert not polling.refresh()
    scheduler.answer = "list"
    clock.advance_s(waited_s - 0.1)
    assert not polling.refresh()
    clock.advance_s(0.1)
    assert polling.refresh()


def test_pause_begins_when_a_slow_request_has_failed(polling: Polling[str], scheduler: Scheduler, clock: ManualClock) -> None:
    scheduler.answer, scheduler.takes_s = TargetError("no answer within 30 s"), 30.0
    assert not polling.refresh()
    scheduler.answer, scheduler.takes_s = "list", 0.0
    clock.advance_s(3.9)
    assert not polling.refresh()
    clock.advance_s(0.1)
    assert polling.refresh()


def test_list_counts_for_nodes_that_were_started_before_it(
    polling: Polling[str], scheduler: Scheduler, clock: ManualClock
) -> None:
    assert not polling.covers("node1")
    assert polling.refresh()
    assert polling.covers("node1")  # started by an earlier controller
    clock.advance_s(2.0)
    polling.note_start("node2")
    assert polling.has_started("node2")
    assert not polling.covers("node2")
    clock.advance_s(2.0)
    assert polling.refresh()
    assert polling.covers("node2")
    scheduler.answer = TargetError("no answer")
    clock.advance_s(2.0)
    assert not polling.refresh()
    assert not polling.covers("node2")


def test_scheduler_is_asked_less_often_while_nothing_changes(scheduler: Scheduler, clock: ManualClock) -> None:
    polling = Polling(scheduler.request, "nothing", 2.0, clock, steady_s=10.0)

    def num_requests(seconds: int) -> int:
        num = 0
        for _ in range(10 * seconds):
            num += polling.refresh()
            clock.advance_s(0.1)
        return num

    assert num_requests(60) == pytest.approx(30, abs=2)
    assert num_requests(600) == pytest.approx(60, abs=2)
    scheduler.answer = "another"
    assert num_requests(40) >= 15
    num_requests(100)
    polling.note_start("node2")
    assert num_requests(3) >= 1
    num_requests(100)
    polling.hasten()
    assert num_requests(1) == 1
