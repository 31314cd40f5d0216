"""What every target promises to a controller: those for this machine, Slurm and Kubernetes, and the tests' own fake."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from lightning_dlrover.components.targets.target import App, NodeSize, NotTakenError, Target, TargetError
from tests.support.places import ALL, FAILING, MARK, POLL_S, POLLED, FailingPlace, Place, PolledPlace
from tests.support.waiting import eventually

LIVING = ("pending", "running")


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    made: Place = request.param(tmp_path, monkeypatch)
    yield made
    made.close()


@pytest.fixture
def target(place: Place) -> Target:
    made = place.make_target()
    made.open(MARK)
    return made


def at(places: Sequence[type[Place]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("place", places, ids=lambda place: place.__name__.removesuffix("Place"), indirect=True)


def at_each_failure(
    places: Sequence[type[FailingPlace]], failures: Callable[[type[FailingPlace]], Sequence[str]]
) -> pytest.MarkDecorator:
    cases = [
        pytest.param(each, f, id=f"{each.__name__.removesuffix('Place')}-{f[:40]}") for each in places for f in failures(each)
    ]
    return pytest.mark.parametrize("place, failure", cases, indirect=["place"])


def living(target: Target) -> list[str]:
    return [app.node for app in target.apps() if app.is_living]


def wait_for_status(place: Place, target: Target, handle: str, *wanted: str) -> None:
    def look() -> bool:
        place.clock.advance_s(POLL_S)
        return target.status(handle) in wanted

    eventually(look, f"{handle} to be {wanted}", 15.0)


@at(ALL)
def test_started_node_is_listed_until_it_ends(place: Place, target: Target) -> None:
    assert target.apps() == []
    place.clock.advance_s(POLL_S)
    handle = target.start("node1", NodeSize(1))
    assert target.status(handle) in LIVING
    place.clock.advance_s(POLL_S)
    assert list(target.apps()) == [App("node1", handle, True)]
    place.run("node1")
    wait_for_status(place, target, handle, "running")
    assert list(target.apps()) == [App("node1", handle, True)]
    assert not target.ran_out_of_memory(handle)
    assert target.notice(handle) is None
    assert all(file.exists() for file in target.logs(handle))
    place.end("node1", 0)
    wait_for_status(place, target, handle, "succeeded")
    assert living(target) == []


@at(ALL)
def test_exit_code_tells_how_a_node_has_ended(place: Place, target: Target) -> None:
    handles = [target.start("node1"), target.start("node2"), target.start("node3")]
    for number in (1, 2, 3):
        place.run(f"node{number}")
    place.end("node1", 0)
    place.end("node2", 1)
    wait_for_status(place, target, handles[0], "succeeded")
    wait_for_status(place, target, handles[1], "failed")
    wait_for_status(place, target, handles[2], "running")
    assert living(target) == ["node3"]


@at(ALL)
def test_only_nodes_of_this_job_are_listed(place: Place, target: Target) -> None:
    other = place.make_target()
    other.open("9876543210")
    other.start("node7")
    handle = target.start("node1")
    assert list(target.apps()) == [App("node1", handle, True)]
    assert living(other) == ["node7"]


@at(ALL)
def test_handle_belongs_to_one_node_of_one_job(place: FailingPlace, target: Target) -> None:
    handle = target.start("node1")
    assert target.owns("node1", handle)
    assert not target.owns("node2", handle)
    assert [other for other in place.foreign_handles if target.owns("node1", other)] == []


@at(ALL)
def test_cancelled_nodes_end_and_others_do_not(place: Place, target: Target) -> None:
    handles = [target.start(f"node{number}") for number in (1, 2, 3)]
    for number in (1, 2, 3):
        place.run(f"node{number}")
    for handle in handles:
        wait_for_status(place, target, handle, "running")
    target.cancel(handles[:2])
    place.end_cancelled("node1")
    place.end_cancelled("node2")
    for handle in handles[:2]:
        wait_for_status(place, target, handle, "failed", "cancelled")
    assert target.status(handles[2]) == "running"
    assert living(target) == ["node3"]
    target.cancel(handles[:2])
    target.cancel(handles[:1])
    target.cancel([])
    assert living(target) == ["node3"]


@at(ALL)
def test_node_that_has_ended_may_be_cancelled(place: Place, target: Target) -> None:
    handle = target.start("node1")
    place.run("node1")
    place.end("node1", 0)
    wait_for_status(place, target, handle, "succeeded")
    target.cancel([handle])
    place.clock.advance_s(POLL_S)
    assert target.status(handle) == "succeeded"


@at(ALL)
def test_closing_ends_the_nodes_unless_they_outlive_their_controller(place: Place, target: Target) -> None:
    handle = target.start("node1")
    place.run("node1")
    target.close()
    target.close()
    if target.outlives_controller:
        later = place.make_target()
        later.open(MARK)
        assert list(later.apps()) == [App("node1", handle, True)]
    else:
        assert target.status(handle) not in LIVING


@at(FAILING)
def test_next_controller_finds_and_ends_the_nodes(place: FailingPlace, target: Target) -> None:
    handle = target.start("node1")
    place.run("node1")
    later = place.make_target()
    later.open(MARK)
    assert later.name == target.name
    assert later.owns("node1", handle)
    assert list(later.apps()) == [App("node1", handle, True)]
    assert later.status(handle) == "running"
    later.cancel([handle])
    place.end_cancelled("node1")
    for each in (later, target):
        wait_for_status(place, each, handle, "failed", "cancelled")


@at(FAILING)
def test_refused_node_is_not_listed(place: FailingPlace, target: Target) -> None:
    place.refuse()
    with pytest.raises(NotTakenError):
        target.start("node1")
    assert target.apps() == []
    place.mend()
    place.clock.advance_s(POLL_S)
    target.start("node2")
    assert living(target) == ["node2"]


@at(FAILING)
@pytest.mark.parametrize("is_accepted", [True, False])
def test_list_settles_a_request_whose_answer_was_lost(place: FailingPlace, target: Target, is_accepted: bool) -> None:
    place.lose_answer(is_accepted)
    with pytest.raises(TargetError) as raised:
        target.start("node1")
    assert raised.type is TargetError
    listed = target.apps()
    assert [(app.node, app.is_living, target.owns("node1", app.handle)) for app in listed] == [
        ("node1", True, True)
    ] * is_accepted


@at_each_failure(FAILING, lambda place: place.list_failures)
def test_no_node_has_ended_because_listing_fails(place: FailingPlace, target: Target, failure: str) -> None:
    handle = target.start("node1")
    place.run("node1")
    assert target.status(handle) == "running"
    place.clock.advance_s(POLL_S)
    place.break_lists(failure)
    with pytest.raises(TargetError):
        target.apps()
    assert target.status(handle) == "running"
    place.clock.advance_s(100.0)
    assert target.status(handle) == "running"
    place.mend()
    place.end("node1", 0)
    place.clock.advance_s(100.0)
    wait_for_status(place, target, handle, "succeeded")
    assert living(target) == []


@at_each_failure(FAILING, lambda place: place.cancel_failures)
def test_cancellation_that_fails_is_reported_and_may_be_repeated(place: FailingPlace, target: Target, failure: str) -> None:
    handles = [target.start("node1"), target.start("node2")]
    for node in ("node1", "node2"):
        place.run(node)
    assert [target.status(handle) for handle in handles] == ["running", "running"]
    place.break_cancel(failure)
    with pytest.raises(TargetError):
        target.cancel(handles)
    place.mend()
    target.cancel(handles)
    for node, handle in zip(("node1", "node2"), handles, strict=True):
        place.end_cancelled(node)
        wait_for_status(place, target, handle, "failed", "cancelled")


@at(POLLED)
def test_failing_scheduler_is_asked_ever_more_rarely_but_once_a_minute(place: PolledPlace, target: Target) -> None:
    began_s, asked_at = place.clock.now_s, []

    def look() -> bool:
        before = place.num_queries
        try:
            target.apps()
            return True
        except TargetError:
            return False
        finally:
            asked_at.extend([place.clock.now_s - began_s] * (place.num_queries - before))

    place.break_lists(place.list_failures[0])
    while place.clock.now_s - began_s < 200.0:
        assert not look()
        place.clock.advance_s(1.0)
    assert asked_at == [0.0, 4.0, 12.0, 28.0, 60.0, 120.0, 180.0]
    place.mend()
    while not look():
        place.clock.advance_s(1.0)
    place.clock.advance_s(POLL_S)
    look()
    assert asked_at[-2:] == [240.0, 240.0 + POLL_S]


@at(POLLED)
def test_scheduler_is_asked_once_for_all_nodes_and_at_intervals(place: PolledPlace, target: Target) -> None:
    handles = [target.start(f"node{number}") for number in range(5)]
    for _ in range(3):
        assert len(target.apps()) == 5
        assert {target.status(handle) for handle in handles} == {"pending"}
    assert place.num_queries == 1
    place.clock.advance_s(POLL_S)
    assert len(target.apps()) == 5
    assert place.num_queries == 2


@at(POLLED)
def test_list_from_before_a_start_does_not_settle_the_node(place: PolledPlace, target: Target) -> None:
    assert target.apps() == []
    assert target.status(target.start("node1")) == "pending"
    assert place.num_queries == 1


@at(POLLED)
def test_nodes_are_listed_soon_after_a_cancellation(place: PolledPlace, target: Target) -> None:
    handle = target.start("node1")
    place.run("node1")
    assert target.status(handle) == "running"
    target.cancel([handle])
    place.clock.advance_s(0.4)
    target.apps()
    assert place.num_queries == 1
    place.clock.advance_s(0.1)
    target.apps()
    assert place.num_queries == 2


@at(POLLED)
@pytest.mark.parametrize("has_run", [True, False])
def test_node_that_was_deleted_has_failed_for_good(place: PolledPlace, target: Target, has_run: bool) -> None:
    handle = target.start("node1")
    if has_run:
        place.run("node1")
    assert target.status(handle) == ("running" if has_run else "pending")
    place.remove("node1")
    wait_for_status(place, target, handle, "failed")
    assert target.apps() == []
    place.break_lists(place.list_failures[0])
    place.clock.advance_s(POLL_S)
    assert target.status(handle) == "failed"
