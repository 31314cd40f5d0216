"""The membership protocol as a pure function: invariants of every view, then the cases one by one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dlrover.rdzv.job.records import AgentRecord, EndNotice, JobRecord, PlanRecord, RoundRecord, WorkerRecord
from lightning_dlrover.rdzv.membership.rounds import (
    JobView,
    RoundTimeouts,
    awaited,
    cause,
    lacks_workers,
    losses,
    next_round,
    waits,
)
from tests.rdzv.present import present

JOB = JobRecord(phase="training", live=True, min_workers=1, max_workers=4, version="1")
TWO, THREE = (replace(JOB, min_workers=number) for number in (2, 3))
NAMES = [f"w{i}" for i in range(7)]


def worker(name: str, state: str = "active", number: int = 1) -> WorkerRecord:
    return WorkerRecord(name, f"agent-{name}", "host", 1, 0, "127.0.0.1", 1000 + int(name[1:]), state, number)  # type: ignore[arg-type]


def view(members: str = "", others: str = "", gone: str = "", **changes: object) -> JobView:
    """Members of round 1 and others by digit. `gone` members have no record; others are ready."""
    workers = {f"w{i}": worker(f"w{i}") for i in members if i not in gone}
    workers |= {f"w{i}": worker(f"w{i}", "ready", 0) for i in others}
    round_ = RoundRecord(1, [f"w{i}" for i in members], "", "grow", planned=True) if members else None
    return replace(JobView(job=JOB, round=round_, workers=workers), **changes)  # type: ignore[arg-type]


def digits(names: Iterable[str]) -> str:
    return "".join(name[1:] for name in names)


def after(seen: JobView, waited_s: float = 0.0) -> tuple[str, str] | None:
    """Digits of the next round's members, and its kind."""
    successor = next_round(seen, waited_s)
    return (digits(successor.members), successor.kind) if successor is not None else None


def named(members: str) -> frozenset[str]:
    return frozenset(f"w{i}" for i in members)


def wanted(num_workers: int, reason: str = "", binding: bool = True) -> PlanRecord:
    return PlanRecord(num_workers, "user", reason, binding)


def reporting(seen: JobView, state: str, *members: str, number: int = 1) -> JobView:
    """The view with some workers in another state."""
    return replace(seen, workers={**seen.workers, **{f"w{i}": worker(f"w{i}", state, number) for i in members}})


def test_joiners_wait_until_a_left_out_member_has_handed_over() -> None:
    seen = view("01", "2")
    assert next_round(seen, 0.0) is not None
    leaver = {"w3": worker("w3", "active", 0)}
    handing_over = replace(seen, workers={**seen.workers, **leaver})
    assert awaited(handing_over) == ["w3"]
    assert next_round(handing_over, 119.0) is None
    assert next_round(handing_over, 120.0) is not None  # it hangs in the script, and keeps its lease
    assert next_round(view("01", "2", gone="1", workers={"w0": worker("w0"), **leaver}), 0.0) is not None


def noticed(**deadlines: float) -> dict[str, EndNotice]:
    return {worker: EndNotice("spot", taken_at) for worker, taken_at in deadlines.items()}


@pytest.mark.parametrize(
    "seen, expected",
    [
        (view("012", drains=named("1"), notices=noticed(w1=9.0), job=TWO), ("02", "shrink")),
        (view("01", drains=named("1"), notices=noticed(w1=9.0), job=TWO), None),
        (view("01", "2", drains=named("1"), notices=noticed(w1=9.0), job=TWO), ("02", "replace")),
        # As many as may leave do: those that are taken away first.
        (view("012", drains=named("12"), notices=noticed(w1=9.0, w2=5.0), job=TWO), ("01", "shrink")),
        (view("012", drains=named("12"), notices=noticed(w1=9.0, w2=0.0), job=TWO), ("02", "shrink")),
        (view("012", drains=named("12"), notices=noticed(w1=9.0), job=TWO), ("01", "shrink")),
        (view("012", drains=named("012"), notices=noticed(w0=9.0, w1=9.0, w2=5.0), job=TWO), ("", "stop")),
        # Replaced ones go in the same order.
        (view("012", "3", replacements=named("012"), notices=noticed(w2=5.0, w1=0.0)), ("013", "replace")),
        (view("012", "3", replacements=named("01"), notices=noticed(w1=0.0)), ("032", "replace")),
    ],
)
def test_workers_leave_in_the_order_of_their_deadlines_and_not_below_the_minimum(
    seen: JobView, expected: tuple[str, str] | None
) -> None:
    assert after(seen) == expected


def test_wait_names_the_end_of_the_node() -> None:
    seen = view("01", drains=named("1"), replacements=named("0"), notices=noticed(w0=0.0, w1=0.0), job=TWO)
    assert waits(seen) == {
        "w0": "to be replaced, its node will be taken away soon (spot): leaves when another worker is ready",
        "w1": "asked to leave, its node will be taken away soon (spot): stays until it is replaced, as the job needs 2 workers",
    }


LATER = replace(JOB, phase="finished", fits_begun=2, fits_finished=1)


@pytest.mark.parametrize(
    "seen, members",
    [
        (view("012", gone="1", job=LATER), ("02", "loss")),
        (view("012", "3", gone="1", job=LATER), ("02", "loss")),
        (view("012", drains=named("0"), job=LATER), ("12", "shrink")),
        (view("01", "2", job=LATER), None),
        (view("01", "2", gone="01", job=LATER), None),
        (view("012", gone="1", job=replace(LATER, fits_finished=2)), None),
    ],
)
def test_later_fits_lose_workers_and_gain_none(seen: JobView, members: tuple[str, str] | None) -> None:
    assert after(seen, 1e9) == members


NAMED = st.sampled_from(NAMES)
ASKED = st.lists(NAMED, unique=True, max_size=3)
REGISTERED = st.lists(
    st.tuples(NAMED, st.sampled_from(["starting", "standby", "ready", "active", "reforming"]), st.integers(0, 2)),
    unique_by=lambda each: each[0],
    max_size=len(NAMES),
)
"""Workers in any order: name, state, and the round of the state: none, the last one or this one."""


@st.composite
def views(draw: st.DrawFn) -> JobView:
    low = draw(st.integers(1, 3))
    job = replace(JOB, min_workers=low, max_workers=draw(st.integers(low, 5)))
    number = draw(st.integers(1, 9))
    kind = draw(st.sampled_from(["start", "grow", "loss", "retry"]))
    members = draw(st.lists(NAMED, unique=True, max_size=5))
    round_ = RoundRecord(number, members, "", kind, planned=kind in ("start", "grow")) if members else None  # type: ignore[arg-type]
    workers = {name: worker(name, state, (0, number - 1, number)[of]) for name, state, of in draw(REGISTERED)}
    plan = PlanRecord(draw(st.integers(1, 6)), "planner", "", binding=draw(st.booleans())) if draw(st.booleans()) else None
    drains = frozenset(draw(ASKED))
    replacements = frozenset(draw(ASKED))
    agents = {name: AgentRecord(f"agent-{name}", "host", 1, 1, "running") for name in workers}
    dismissals = dict.fromkeys(drains, number) if draw(st.booleans()) else {}
    deadlines = draw(st.dictionaries(NAMED, st.sampled_from([0.0, 5.0, 9.0]), max_size=3))
    notices = {name: EndNotice("spot", deadlines[name]) for name in {*drains, *replacements} & {*deadlines}}
    return JobView(job, round_, plan, workers, agents, drains, replacements - drains, dismissals, notices=notices)


@settings(max_examples=800)
@given(views(), st.sampled_from([0.0, 1e9]))
def test_every_round_and_every_wait_follows_the_rules(seen: JobView, waited_s: float) -> None:
    """All rules on each view: views take most of the time."""
    proposal = next_round(seen, waited_s)
    assert proposal == next_round(seen, waited_s)
    every_awaited_worker_is_named(seen)
    if proposal is None:
        return
    new_round_has_living_members_and_the_next_number(seen, proposal)
    rank_0_held_the_state_if_any_member_did(seen, proposal)
    joiners_never_take_the_round_above_the_maximum(seen, proposal)
    every_change_of_the_members_has_one_cause(seen, proposal)


@st.composite
def views_of_pairs(draw: st.DrawFn) -> JobView:
    """Views of a job whose nodes have two workers each: w0 and w1, w2 and w3, and so on."""
    seen = draw(views())
    assert seen.job is not None
    fewest = draw(st.sampled_from([2, 4]))
    job = replace(seen.job, min_workers=fewest, max_workers=draw(st.sampled_from([4, 6])), workers_per_node=2)
    agents = {name: replace(agent, labels={"node": pair_of(name)}) for name, agent in seen.agents.items()}
    return replace(seen, job=job, agents=agents).with_requests_to_nodes()


def pair_of(name: str) -> str:
    return f"node{int(name[1:]) // 2}"


@settings(max_examples=800)
@given(views_of_pairs(), st.sampled_from([0.0, 1e9]))
def test_planned_rounds_of_pairs_give_back_whole_nodes(seen: JobView, waited_s: float) -> None:
    proposal = next_round(seen, waited_s)
    every_awaited_worker_is_named(seen)
    if proposal is None or seen.round is None:
        return
    new_round_has_living_members_and_the_next_number(seen, proposal)
    rank_0_held_the_state_if_any_member_did(seen, proposal)
    joiners_never_take_the_round_above_the_maximum(seen, proposal)
    if proposal.planned and not seen.dismissals and seen.survivors:
        gone = {pair_of(name) for name in seen.round.members if name not in proposal.members}
        assert not gone & {pair_of(name) for name in proposal.members}


def pairs(members: str, others: str = "", standby: str = "", plan: int = 4, **changes: object) -> JobView:
    """A job of two-worker nodes; digits as for `view`. Workers in `standby` build their model."""
    seen = view(members, others)
    workers = {**seen.workers, **{f"w{i}": worker(f"w{i}", "standby", 0) for i in standby}}
    agents = {w: AgentRecord(f"agent-{w}", "host", 1, 1, "running", {"node": pair_of(w)}) for w in workers}
    job = replace(JOB, min_workers=2, max_workers=8, workers_per_node=2)
    made = replace(seen, job=job, workers=workers, agents=agents, plan=PlanRecord(plan, "user", "", True), **changes)  # type: ignore[arg-type]
    return made.with_requests_to_nodes()


@pytest.mark.parametrize(
    "situation, seen, members",
    [
        ("the middle node is given back", pairs("012345"), "0145"),
        ("ranks of a node need not follow each other", pairs("0213", plan=2), "01"),
        ("a plan between two sizes keeps no half of a node", pairs("012345", plan=5), "0145"),
        ("and adds none", pairs("01", "2", plan=3), None),
        ("a node without one of its workers goes first if it is in the middle", pairs("01345", plan=4), "0145"),
        ("no node goes whose loss would leave too few", pairs("023", plan=2), None),
        ("it goes once the restarted worker of the other is back", pairs("023", "1", plan=2), "01"),
        ("the first worker of a node waits for the second", pairs("01", "2"), None),
        ("also while that builds its model", pairs("01", "2", standby="3"), None),
        ("unless all others leave", pairs("01", "2", drains=named("0")), "012"),
        ("both join", pairs("01", "23"), "0231"),
        ("a worker that was restarted joins its node alone", pairs("013", "2"), "0123"),
        ("one drained worker takes its neighbour along", pairs("0123", drains=named("2")), "01"),
        ("one replaced worker waits for two others", pairs("01", "2", plan=2, replacements=named("1")), None),
        ("and goes with its neighbour then", pairs("01", "23", plan=2, replacements=named("1")), "0123"),
        ("a replaced node leaves once its successors have the state", pairs("0123", plan=2, replacements=named("1")), "23"),
        ("a dismissed worker goes alone", pairs("0123", drains=named("3"), dismissals={"w3": 0}), "012"),
    ],
)
def test_workers_of_a_node_come_and_go_together(situation: str, seen: JobView, members: str | None) -> None:
    found = after(seen)
    assert (found[0] if found is not None else None) == members, situation


SIZED = replace(JOB, min_workers=1, max_workers=8, sizes=[1, 2, 4])


@pytest.mark.parametrize(
    "situation, seen, expected",
    [
        ("one joiner does not lead from 2 to 3 workers", view("01", "2", job=SIZED), None),
        ("two lead to 4", view("01", "23", job=SIZED), ("0231", "grow")),
        ("the fifth worker waits", view("0123", "4", job=SIZED), None),
        ("one joiner leads from 1 to 2", view("0", "1", job=SIZED), ("01", "grow")),
        ("of two joiners one is enough to lead from 1 to 2", view("0", "12", job=SIZED), ("01", "grow")),
        ("a plan between two sizes is rounded down", view("0123", job=SIZED, plan=wanted(3)), ("03", "shrink")),
        ("the survivors of a loss continue, all of them", view("0123", gone="2", job=SIZED), ("013", "loss")),
        ("and keep their size", view("012", job=SIZED, plan=wanted(4)), None),
        ("until a worker comes", view("012", "3", job=SIZED, plan=wanted(4)), ("0132", "grow")),
        ("or less is requested", view("012", job=SIZED, plan=wanted(2)), ("02", "shrink")),
        ("after a loss each worker that comes helps", view("012", "3", job=replace(SIZED, sizes=[1, 2, 6])), ("0132", "grow")),
        ("a drained worker leaves without another one", view("0123", drains=named("1"), job=SIZED), ("023", "shrink")),
        ("a drained worker is replaced", view("0123", "4", drains=named("1"), job=SIZED), ("0423", "replace")),
        ("half of a replacement is better than none", view("0123", "4", drains=named("12"), job=SIZED), ("043", "replace")),
        ("one of two workers is replaced by one of two", view("01", "23", drains=named("1"), job=SIZED), ("02", "replace")),
        ("a failed size is not tried", view("01", "23", job=replace(SIZED, failed_sizes={"4": "broken"})), None),
    ],
)
def test_planned_rounds_have_a_listed_size_and_losses_waste_no_worker(
    situation: str, seen: JobView, expected: tuple[str, str] | None
) -> None:
    for waited_s in (0.0, 1e9):
        assert after(seen, waited_s) == expected, situation


@pytest.mark.parametrize(("sizes", "fewest", "members"), [([1, 2, 4], 1, "01"), ([4, 6], 2, "012"), ([], 1, "012")])
def test_job_starts_with_a_listed_size_if_it_has_the_workers(sizes: list[int], fewest: int, members: str) -> None:
    starting = {f"w{i}": worker(f"w{i}", "starting", 0) for i in range(3)}
    seen = view(workers=starting, job=replace(SIZED, min_workers=fewest, sizes=sizes))
    assert after(seen, 1e9) == (members, "start")


def test_joiner_that_waits_for_a_size_names_it() -> None:
    assert waits(view("01", "2", job=SIZED))["w2"] == "waits for 1 more worker: the job's sizes are 1, 2 or 4"
    assert waits(view("01", "23", job=SIZED))["w2"] == "about to be admitted"
    assert waits(view("0123", "4", job=SIZED))["w4"].startswith("spare: waits for a plan that admits it")


@st.composite
def sized_views(draw: st.DrawFn) -> JobView:
    seen = draw(views())
    assert seen.job is not None
    sizes = draw(st.lists(st.integers(seen.job.min_workers, seen.job.max_workers), unique=True, min_size=1))
    return replace(seen, job=replace(seen.job, sizes=sorted(sizes)))


@settings(max_examples=800)
@given(sized_views(), st.sampled_from([0.0, 1e9]))
def test_no_view_leads_from_a_listed_size_to_a_larger_one_that_is_not(seen: JobView, waited_s: float) -> None:
    proposal = next_round(seen, waited_s)
    every_awaited_worker_is_named(seen)
    if proposal is None or seen.round is None or not proposal.planned or not seen.survivors or seen.job is None:
        return
    before, then = len(seen.round.members), len(proposal.members)
    hands_over = bool(set(proposal.members) & (seen.drains | seen.replacements))
    assert then <= before or then in seen.job.sizes or before not in seen.job.sizes or hands_over


def new_round_has_living_members_and_the_next_number(seen: JobView, proposal: RoundRecord) -> None:
    assert seen.job is not None
    assert proposal.number == (seen.round.number + 1 if seen.round else 1)
    assert len(set(proposal.members)) == len(proposal.members)
    assert set(proposal.members) <= set(seen.workers)
    if proposal.kind == "stop":
        assert proposal.members == []
        assert set(seen.survivors) <= seen.drains
        return
    first = seen.workers[proposal.members[0]]
    assert (proposal.store_address, proposal.store_port) == (first.address, first.port)


def rank_0_held_the_state_if_any_member_did(seen: JobView, proposal: RoundRecord) -> None:
    if not proposal.members or not seen.holders:
        return
    assert set(proposal.members) & set(seen.holders)
    if proposal.planned and seen.survivors:
        assert proposal.members[0] in seen.holders


def joiners_never_take_the_round_above_the_maximum(seen: JobView, proposal: RoundRecord) -> None:
    if seen.round is None or not proposal.planned:
        return
    added = [w for w in proposal.members if w not in seen.round.members]
    leaving_later = bool(set(proposal.members) & (seen.drains | seen.replacements))
    assert len(proposal.members) <= max(seen.cap, 0 if added else len(seen.round.members)) or leaving_later


def every_change_of_the_members_has_one_cause(seen: JobView, proposal: RoundRecord) -> None:
    if seen.stepped_back:  # members asked again: neither lost nor gone
        return
    before = set(seen.round.members if seen.round else [])
    found = cause(seen, proposal)
    named = [worker for workers in found.values() for worker in workers]
    assert len(named) == len(set(named))
    assert set(named) == before ^ set(proposal.members)
    assert set(found["joined"]) == set(proposal.members) - before


def every_awaited_worker_is_named(seen: JobView) -> None:
    texts = waits(seen)
    assert texts.keys() == seen.workers.keys()
    if any(text.endswith(("about to start", "about to be admitted", "about to form the next one")) for text in texts.values()):
        assert next_round(seen, 0.0) is not None, texts
    for worker, text in texts.items():
        if " to answer" in text or " to come" in text:
            assert all(awaited_one in text for awaited_one in awaited(seen)), (worker, text)


def test_survivors_below_min_lack_workers_until_one_comes() -> None:
    assert lacks_workers(view("01", gone="1", job=TWO))
    assert not lacks_workers(view("01", "2", gone="1", job=TWO))
    assert not lacks_workers(view("01", gone="1"))
    assert not lacks_workers(view("01", job=TWO))


def test_starting_workers_below_min_lack_others() -> None:
    one = {"w0": worker("w0", "starting", 0)}
    assert lacks_workers(view(workers=one, job=TWO))
    assert not lacks_workers(view(workers=one))


@pytest.mark.parametrize(
    "situation, seen, expected",
    [
        ("nothing changes while all is as planned", view("012"), None),
        ("a ready worker joins in the middle of those that train", view("10", "2"), ("120", "grow")),
        ("a ready worker waits while the plan has no room", view("01", "2", plan=wanted(2)), None),
        ("a recommendation excludes no worker", view("01", "2", plan=wanted(2, binding=False)), ("021", "grow")),
        ("a smaller plan keeps the first", view("012", plan=wanted(1)), ("0", "shrink")),
        ("a spare replaces a drained one in one round", view("01", "2", drains=named("0"), plan=wanted(2)), ("12", "replace")),
        ("a replaced worker stays until another is ready", view("01", replacements=named("1"), plan=wanted(2)), None),
        ("and leaves then", view("01", "2", replacements=named("1"), plan=wanted(2)), ("02", "replace")),
        ("one new worker replaces one", view("012", "3", replacements=named("12")), ("032", "replace")),
        ("a missing worker comes before a replacement", view("01", "2", replacements=named("01"), job=THREE), ("021", "grow")),
        ("the only worker is replaced in two rounds", view("0", "1", replacements=named("0"), plan=wanted(1)), ("01", "grow")),
        ("and leaves in the second", view("01", replacements=named("0"), plan=wanted(1)), ("1", "shrink")),
        ("a smaller plan drops replaced workers first", view("012", replacements=named("0"), plan=wanted(2)), ("12", "shrink")),
        ("the only worker hands over before it leaves", view("0", "1", drains=named("0")), ("01", "grow")),
        ("the job stops when every worker was drained", view("01", drains=named("01")), ("", "stop")),
        ("also while a drained one starts", reporting(view("0", drains=named("01")), "standby", "1", number=0), ("", "stop")),
        ("the only worker awaits its replacement", reporting(view("0", drains=named("0")), "standby", "1", number=0), None),
        ("a drained worker stays when too few would be left", view("01", drains=named("1"), job=TWO), None),
        ("after a loss the others continue", view("012", gone="0"), ("12", "loss")),
        ("a loss below the minimum waits for spares", view("01", gone="0", job=TWO), None),
        ("and continues once one is there", view("01", "2", gone="0", job=TWO), ("1", "loss")),
        ("a finished job has no further rounds", view("012", "3", gone="0", job=replace(JOB, phase="finished")), None),
    ],
)
def test_next_round_of_a_view(situation: str, seen: JobView, expected: tuple[str, str] | None) -> None:
    for waited_s in (0.0, 1e9):
        assert after(seen, waited_s) == expected, situation


def test_planned_round_lets_the_step_end_and_a_loss_does_not() -> None:
    grown, lost = next_round(view("01", "2"), 0.0), next_round(view("012", gone="0"), 0.0)
    assert grown is not None
    assert lost is not None
    assert (grown.planned, lost.planned) == (True, False)


@pytest.mark.parametrize(
    "members, leaving, joining, cap, expected",
    [
        ("0", "", "1", 4, "01"),
        ("012", "", "34", 5, "01342"),
        ("0123", "1", "4", 4, "0423"),
        ("0123", "12", "4", 4, "043"),
        ("0123", "0", "4", 4, "1423"),  # a joiner is never rank 0
        ("012", "", "", 2, "02"),
        ("01234", "", "", 3, "014"),
        ("012", "", "", 1, "0"),
    ],
)
def test_ranks_are_arranged_so_that_blocks_of_rows_move_little(
    members: str, leaving: str, joining: str, cap: int, expected: str
) -> None:
    plan = wanted(cap)
    seen = view(members, others=joining, drains=named(leaving), plan=plan)
    assert seen.job is not None
    assert present(after(replace(seen, job=replace(seen.job, max_workers=9))))[0] == expected


@pytest.mark.parametrize(
    ("others", "drains", "replacements", "num_workers", "reason"),
    [
        ("", "1", "", 2, "w1 left when asked to"),
        ("2", "1", "", 2, "w2 joined (user: why); w1 left when asked to"),
        ("2", "", "1", 2, "w2 joined (user: why); w1 left when asked to"),
        ("", "", "", 1, "w1 left (user: why)"),
        ("", "", "1", 1, "w1 left (user: why)"),
        ("2", "", "", 3, "w2 joined (user: why)"),
    ],
)
def test_plan_is_not_the_reason_of_a_drained_worker(
    others: str, drains: str, replacements: str, num_workers: int, reason: str
) -> None:
    plan = wanted(num_workers, "why")
    seen = view("01", others, drains=named(drains), replacements=named(replacements), plan=plan)
    assert present(next_round(seen, 0.0)).reason == reason


def test_a_round_planned_by_a_pool_names_the_pool_once() -> None:
    plan = PlanRecord(1, "brain", "pool ads: 2 -> 1 workers", binding=True)
    assert present(next_round(view("01", plan=plan), 0.0)).reason == "w1 left (pool ads: 2 -> 1 workers)"


@pytest.mark.parametrize(
    "drained, members",
    [("2", None), ("12", ("12", "loss")), ("3", None)],
    ids=["one stays", "all leave", "only a joiner leaves"],
)
def test_workers_that_all_leave_finish_their_step_below_min(drained: str, members: tuple[str, str] | None) -> None:
    assert after(view("012", gone="0", job=THREE, drains=named(drained)), 1e9) == members


def test_joiners_that_lost_all_holders_still_wait_for_min() -> None:
    for drained in ("", "1"):
        few = view("01", gone="0", job=TWO, drains=named(drained))
        assert after(reporting(few, "ready", "1"), 1e9) is None


def test_failed_round_is_formed_again_once_all_report_it() -> None:
    one = reporting(view("01"), "reforming", "0")
    assert after(one) is None
    assert awaited(one) == ["w1"]
    assert after(reporting(one, "reforming", "1")) == ("01", "retry")


def dismissing(seen: JobView, failed_round: int, *reports: str) -> JobView:
    """The view once w2 was dismissed because a step of `failed_round` failed, and `reports` have reported round 1 as broken."""
    return replace(reporting(seen, "reforming", *reports), drains=named("2"), dismissals={"w2": failed_round})


def test_dismissed_worker_is_left_out_without_being_awaited() -> None:
    seen = dismissing(view("012"), 1, "0", "1")
    assert awaited(seen) == []
    proposal = present(next_round(seen, 0.0))
    assert (proposal.members, proposal.kind, proposal.planned) == (["w0", "w1"], "undo", False)
    assert losses(seen, proposal) == []
    assert cause(seen, proposal)["drained"] == ["w2"]


def test_dismissed_worker_leaves_together_with_a_lost_one() -> None:
    assert after(dismissing(view("012", gone="1"), 1)) == ("0", "loss")


def test_dismissal_waits_for_the_report_of_its_round_and_for_no_other() -> None:
    assert after(dismissing(view("012"), 1), 1e9) is None
    assert after(dismissing(view("012"), 7), 1e9) == ("01", "shrink")


def test_dismissed_worker_stays_where_the_others_are_too_few() -> None:
    assert after(dismissing(view("012", job=THREE), 1, "0", "1", "2")) == ("012", "retry")


FAILED = replace(JOB, failed_sizes={"3": "3 workers failed"})


@pytest.mark.parametrize(
    "seen, size",
    [
        (view("01", "2", job=FAILED), None),
        (view("01", "23", job=FAILED), 4),
        (view("01", "23", job=FAILED, plan=wanted(3)), None),
        (view("012", "3", job=FAILED, drains=named("2")), 3),  # as many as train
        (view("0123", job=FAILED, plan=wanted(3)), 3),
    ],
    ids=["one joiner", "two joiners", "two joiners and a plan", "a replacement", "fewer"],
)
def test_no_round_grows_to_a_size_that_has_failed(seen: JobView, size: int | None) -> None:
    proposal = next_round(seen, 0.0)
    assert (len(proposal.members) if proposal is not None else None) == size


def test_spare_of_a_size_that_has_failed_names_the_failure() -> None:
    assert waits(view("01", "2", job=FAILED))["w2"] == "spare: 3 workers failed"


def test_a_survivor_that_never_answers_is_left_out_when_patience_ends() -> None:
    proposal = present(next_round(reporting(view("01"), "reforming", "0"), 10.0, RoundTimeouts(regroup_s=9.0)))
    assert (proposal.members, proposal.kind) == (["w0"], "loss")


@pytest.mark.parametrize(
    "seen, lost",
    [
        (view("012", gone="0"), ["w0"]),
        (view("012", gone="012", others="3"), ["w0", "w1", "w2"]),
        (view("012", plan=wanted(2)), []),
        (view("01", drains=named("1")), []),
        (view("01", workers={"w0": worker("w0"), "w1": worker("w1", "reforming", 1)}), ["w0"]),
    ],
    ids=["one was killed", "all were killed", "the plan asks for fewer", "asked to leave", "no answer"],
)
def test_drained_members_do_not_count_as_lost(seen: JobView, lost: list[str]) -> None:
    assert losses(seen, present(next_round(seen, 1e9))) == lost


@pytest.mark.parametrize(
    "number, members",
    [(0, "02"), (1, "0")],
    ids=["a joiner on its way may have the state already", "a joiner that stepped back has not"],
)
def test_a_loss_while_a_joiner_enters_keeps_it_unless_it_stepped_back(number: int, members: str) -> None:
    assert after(reporting(view("012", gone="1"), "ready", "2", number=number)) == (members, "loss")


def apart(members: str, reports: dict[str, str], attempts: int = 2, **changes: Any) -> JobView:
    """Round 1 did not form: every member reports it, and `reports` lists the peers that each could not reach."""
    seen = view(members, **changes)
    assert seen.round is not None
    records = {
        f"w{i}": replace(worker(f"w{i}", "reforming"), unreachable=[f"w{j}" for j in reports.get(i, "")]) for i in members
    }
    return replace(seen, workers={**seen.workers, **records}, round=replace(seen.round, apart_attempts=attempts))


@pytest.mark.parametrize(
    "reports, together",
    [
        ({"0": "3", "1": "3", "2": "3"}, "012"),
        ({"3": "012"}, "012"),
        ({"0": "123"}, "123"),
        ({"0": "23", "1": "23"}, "01"),
        ({"2": "013"}, "013"),
        ({"0": "2", "2": "0"}, "013"),
    ],
    ids=["nobody reaches one", "one reaches nobody", "rank 0 reaches nobody", "two halves", "one of the middle", "one pair"],
)
def test_members_out_of_reach_are_parted_after_two_attempts(reports: dict[str, str], together: str) -> None:
    for attempts in (0, 1):
        again = present(next_round(apart("0123", reports, attempts), 0.0))
        assert (len(again.members), again.kind, again.apart_attempts) == (4, "retry", attempts + 1)
    parted = present(next_round(apart("0123", reports), 0.0))
    assert (parted.members, parted.kind) == ([f"w{i}" for i in together], "loss")
    assert set(losses(apart("0123", reports), parted)) == {"w0", "w1", "w2", "w3"} - set(parted.members)


def test_members_out_of_reach_keep_trying_if_neither_side_suffices() -> None:
    assert after(apart("0123", {"0": "23", "1": "23"}, job=THREE)) == ("0123", "retry")


def test_an_attempt_that_failed_for_another_reason_ends_the_count() -> None:
    proposal = present(next_round(apart("01", {}), 0.0))
    assert (proposal.kind, proposal.apart_attempts) == ("retry", 0)


def test_joiner_waits_until_it_reaches_every_member() -> None:
    seen = view("01", others="2")
    cut_off = replace(seen, workers={**seen.workers, "w2": replace(seen.workers["w2"], unreachable=["w1"])})
    assert next_round(cut_off, 0.0) is None
    assert next_round(seen, 0.0) is not None


def test_workers_that_all_lost_their_state_start_again() -> None:
    assert after(reporting(view("01", gone="0"), "ready", "1")) == ("1", "start")


def test_the_first_round_waits_for_every_announced_agent() -> None:
    agents = {name: AgentRecord(f"agent-{name}", "host", 1, 1, "running") for name in ("w0", "w1")}
    seen = JobView(job=JOB, workers={"w0": worker("w0", "starting", 0)}, agents=agents)
    assert next_round(seen, 1.0) is None
    assert awaited(seen) == ["agent-w1"]
    assert present(next_round(seen, 61.0)).members == ["w0"]


@pytest.mark.parametrize("state", ["starting", "standby", "ready"])
@pytest.mark.parametrize("other", ["running", "waiting"])
def test_a_stopped_job_waits_for_agents_that_may_keep_its_state(state: str, other: str) -> None:
    stop = RoundRecord(4, [], "every worker was asked to leave", "stop", planned=True)
    agents = {name: AgentRecord(f"agent-{name}", "host", 1, 2, "running") for name in ("w0", "w1")}
    agents["w1"] = replace(agents["w1"], state=other)  # type: ignore[arg-type]
    leaving = worker("w1", "active", 3)
    seen = JobView(job=JOB, round=stop, workers={"w0": worker("w0", state, 0), "w1": leaving}, agents=agents)
    assert "agent-w1" in awaited(seen)
    assert next_round(seen, 1.0) is None
    with_both = replace(seen, workers={"w0": worker("w0", "ready", 0), "w1": worker("w1", "ready", 0)})
    assert present(next_round(with_both, 0.0)).members == ["w0", "w1"]
    ended = replace(seen, workers={"w0": worker("w0", "ready", 0)}, agents={"w0": agents["w0"]})
    assert next_round(ended, 0.0) is not None
    single = replace(seen, workers=ended.workers, agents={**agents, "w1": replace(agents["w1"], num_workers=1)})
    assert next_round(single, 0.0) is not None


# --- messages ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "seen, expected",
    [
        (view("01"), {"w0": "", "w1": ""}),
        (
            view("01", others="2", plan=wanted(2)),
            {"w0": "", "w1": "", "w2": "spare: waits for a plan that admits it, the plan wants 2"},
        ),
        (view("0123", others="4"), {"w4": "spare: waits for a plan that admits it, at most 4 are allowed"}),
        (view("01", drains=named("1")), {"w0": "", "w1": "asked to leave: leaves at one of the next steps"}),
        (
            view("01", workers={"w0": worker("w0", "reforming"), "w1": worker("w1")}),
            {"w0": "round 1 broke: waits for w1 to answer", "w1": "round 1 broke: has not answered"},
        ),
        (
            view("01", gone="1", job=THREE),
            {"w0": "round 1 lost w1: waits for 2 more workers of at least 3"},
        ),
        (
            view("01", workers={"w0": worker("w0"), "w1": worker("w1", number=0)}),
            {"w0": "waits for w1 to enter round 1", "w1": "enters round 1"},
        ),
        (
            JobView(
                job=JOB,
                workers={"w0": worker("w0", "starting", 0)},
                agents={"agent-w1": AgentRecord("agent-w1", "host", 1, 1, "running")},
            ),
            {"w0": "waits for agent-w1 to come"},
        ),
        (
            JobView(job=TWO, workers={"w0": worker("w0", "starting", 0)}),
            {"w0": "waits for 1 more worker of at least 2"},
        ),
        (view("0", workers={"w0": worker("w0"), "w1": worker("w1", "standby", 0)}), {"w1": "builds its model and data"}),
    ],
)
def test_each_worker_names_the_workers_it_waits_for(seen: JobView, expected: dict[str, str]) -> None:
    assert {w: text for w, text in waits(seen).items() if w in expected} == expected


def test_round_names_lost_and_drained_members() -> None:
    lost = present(next_round(view("012", gone="1"), 0.0))
    assert cause(view("012", gone="1"), lost)["lost"] == ["w1"]
    drained = view("01", others="2", drains=named("0"))
    replaced = present(next_round(drained, 0.0))
    assert {name: workers for name, workers in cause(drained, replaced).items() if workers} == {
        "joined": ["w2"],
        "drained": ["w0"],
    }
