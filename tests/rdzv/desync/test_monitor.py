"""Fingerprints of collectives, and comparisons that workers make before and while they wait, without workers.

See also tests/e2e/test_mismatches.py.
"""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch.distributed as dist

from lightning_dlrover.rdzv.desync import (
    NUM_RECENT,
    CollectiveCall,
    CollectiveCounts,
    CollectiveMonitor,
    DesyncReport,
    LoneCollectiveError,
    OutsideOfLoops,
    Place,
    difference,
    may_progress,
    place_of,
    shown,
)
from lightning_dlrover.rdzv.membership.member import RoundEndedError, WorldError

USER = Place("/home/me/train.py:3 in main", "", "train.py:3")


def seen(compared: int, begun: int, waits_for: str = "") -> DesyncReport:
    return DesyncReport(CollectiveCounts(compared, begun), "", waits_for)


# --- positions that can go on -------------------------------------------------------------------------------------------------


def test_workers_of_one_program_may_progress_wherever_they_are() -> None:
    program = random.Random(0).choices(["compared", "gradients", "buffers"], k=40)
    places = [seen(0, 0)]
    for kind in program:
        counts = places[-1].counts
        compared = counts.compared + (kind == "compared")
        begun = counts.begun + (kind != "compared")
        places.append(seen(compared, begun, "" if kind == "compared" else kind))
    assert all(may_progress(one, other) for one, other in itertools.product(places, repeat=2))


@pytest.mark.parametrize(
    "one, other",
    [
        (seen(4, 7), seen(3, 8, "gradients")),  # each worker is ahead of the other
        (seen(2, 9, "gradients"), seen(2, 9, "buffers")),  # same place, different calls
        (seen(3, 9, "torch.distributed.all_reduce"), seen(2, 9, "buffers")),  # one of them was compared
    ],
)
def test_crossed_workers_cannot_go_on(one: DesyncReport, other: DesyncReport) -> None:
    assert not may_progress(one, other)
    assert not may_progress(other, one)


# --- workers that have reached a place ----------------------------------------------------------------------------------------


@pytest.fixture
def monitors() -> Iterator[list[CollectiveMonitor]]:
    """Meetings of two workers with one store."""
    store = dist.HashStore()  # type: ignore[attr-defined]

    def make(rank: int) -> CollectiveMonitor:
        group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=5))  # type: ignore[attr-defined]
        return CollectiveMonitor(
            group, rank, 2, 4, lambda: 0, lambda: store, cast(Any, SimpleNamespace(place=OutsideOfLoops())), lambda: None
        )

    made = [make(0), make(1)]
    yield made
    for monitor in made:
        monitor.close()
        monitor.join(5)


def test_workers_that_come_to_one_place_go_on_from_it(monitors: list[CollectiveMonitor]) -> None:
    with ThreadPoolExecutor() as pool:
        answers = [pool.submit(each.all_reach, "here", lambda: False, 5.0) for each in monitors]
        assert [answer.result(5) for answer in answers] == [True, True]


@pytest.mark.parametrize("is_applied", [True, False])
def test_workers_go_on_from_a_place_although_the_answers_to_their_arrivals_are_lost(
    monitors: list[CollectiveMonitor], is_applied: bool
) -> None:
    class LossyStore:
        """A store that loses what the workers ask it to count, or its answers."""

        def __init__(self, store: Any) -> None:
            self._store = store

        def __getattr__(self, name: str) -> Any:
            return getattr(self._store, name)

        def add(self, key: str, amount: int) -> int:
            if is_applied:
                self._store.add(key, amount)
            raise RuntimeError("connection reset by peer")

    store: Any = LossyStore(monitors[0]._connect())
    for each in monitors:
        each._connect = lambda: store
    with ThreadPoolExecutor() as pool:
        answers = [pool.submit(each.all_reach, "here", lambda: False, 3.0) for each in monitors]
        assert [answer.result(5) for answer in answers] == [True, True]


def test_worker_gets_no_answer_after_the_round(monitors: list[CollectiveMonitor]) -> None:
    with pytest.raises(RoundEndedError, match="waited for the others at here"):
        monitors[0].all_reach("here", lambda: True, 5.0)


def test_worker_that_does_not_come_is_named(monitors: list[CollectiveMonitor]) -> None:
    with pytest.raises(WorldError, match="waited 0 s at here for rank 1, which neither reached it nor called another"):
        monitors[0].all_reach("here", lambda: False, 0.05)


def test_collective_of_one_worker_is_refused_with_place_and_reason(monitors: list[CollectiveMonitor]) -> None:
    call = CollectiveCall("strategy.barrier", place=USER)
    with monitors[0].alone("the others train on"):
        with pytest.raises(LoneCollectiveError, match=r"strategy.barrier at .*train.py:3 in main: the others train on"):
            monitors[0].compare(call)
        with pytest.raises(LoneCollectiveError, match=r"torch.distributed.barrier at .*the others train on"):
            monitors[0].before(None, "barrier", ())


def test_places_of_unread_comparisons_are_kept(monitors: list[CollectiveMonitor]) -> None:
    monitor = monitors[0]
    for number in range(2 * NUM_RECENT):
        monitor._unread.append(monitor._reduce(CollectiveCall(f"operation {number}", place=USER), []))
    assert "operation 0" in monitor._recent[1]
    for _ in range(2):
        monitor.compare(CollectiveCall("a barrier", place=USER))  # reads all of them
    assert len(monitor._recent) == NUM_RECENT


# --- messages for people ------------------------------------------------------------------------------------------------------


def test_error_groups_ranks_by_place() -> None:
    text = difference([(0, "a barrier"), (1, "a reduction"), (2, "a reduction"), (3, "a reduction"), (5, "a reduction")])
    assert "  rank 0: a barrier\n  ranks 1-3, 5: a reduction\n" in text


def test_error_names_counts_where_only_they_differ() -> None:
    text = difference([(0, "the vote"), (1, "the vote")], [CollectiveCounts(1, 7), CollectiveCounts(1, 8)])
    assert "  rank 0: the vote [7 collectives begun in this round]\n  rank 1: the vote [8 " in text


def test_call_holds_kind_and_details() -> None:
    keys = {
        CollectiveCall("reduce").key,
        CollectiveCall("reduce", "[2]").key,
        CollectiveCall("reduce", "[3]").key,
        CollectiveCall("gather", "[3]").key,
    }
    assert len(keys) == 4
    assert all(0 <= key < 1 << 62 for key in keys)


def test_lines_of_barriers_may_differ_and_those_of_reductions_not() -> None:
    other = Place("/home/me/train.py:9 in main", "", "train.py:9")
    assert CollectiveCall("barrier", place=USER).key == CollectiveCall("barrier", place=other).key
    assert CollectiveCall("reduce", place=USER, same_line=True).key != CollectiveCall("reduce", place=other, same_line=True).key


def test_folder_of_a_script_may_differ_between_hosts() -> None:
    other = Place("/mnt/job/train.py:3 in main", "", "train.py:3")
    assert CollectiveCall("reduce", place=USER, same_line=True).key == CollectiveCall("reduce", place=other, same_line=True).key


def test_caller_within_lightning_is_compared() -> None:
    other = Place(USER.user, "lightning.pytorch.trainer.trainer.Trainer.save_checkpoint", USER.line)
    assert CollectiveCall("barrier", place=USER).key != CollectiveCall("barrier", place=other).key


def test_place_is_the_innermost_line_outside_of_libraries() -> None:
    library: dict[str, object] = {"__name__": "lightning.pytorch.core.module", "sys": sys}
    exec("def all_gather():\n    return sys._getframe()", library)
    place = place_of(library["all_gather"]())  # type: ignore[operator]
    assert place.user.endswith("in test_place_is_the_innermost_line_outside_of_libraries")
    assert place.caller == "lightning.pytorch.core.module.all_gather"
    assert place.line.startswith("test_monitor.py:")


def test_shown_place_is_not_compared() -> None:
    frame = sys._getframe()
    first = CollectiveCall("vote", place=shown(frame))
    second = CollectiveCall("vote", place=shown(frame))
    assert first.key == second.key
    assert first.place != second.place
