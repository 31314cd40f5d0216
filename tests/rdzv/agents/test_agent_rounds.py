from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dlrover.rdzv.agents.rounds import (
    AgentView,
    Limits,
    SeenAgent,
    candidates,
    is_urgent,
    members_of_next_round,
    next_notice,
    participants,
    waits,
)
from lightning_dlrover.rdzv.job.records import AgentNotice, AgentRecord, AgentRound, JobRecord


def _agent(name: str, state: Literal["waiting", "running", "finished"], round_number: int = 0, since: int = 0) -> SeenAgent:
    record = AgentRecord(name, "host", 1, 1, "waiting", round_number=round_number)
    return SeenAgent(replace(record, state=state), since)


def _view(round_: AgentRound | None, *agents: SeenAgent, is_confirmed: bool = True) -> AgentView:
    confirmed = AgentNotice(1, confirmed_round=round_.number) if round_ is not None and is_confirmed else None
    return AgentView({seen.record.agent_id: seen for seen in agents}, round_, confirmed)


def _job(phase: Literal["training", "finished"], live: bool) -> JobRecord:
    return JobRecord(phase, live, 1, 2, "0")


ONE_TO_TWO = Limits(1, 2)


@settings(max_examples=200)
@given(
    num_steps=st.integers(1, 60),
    choices=st.data(),
    limits=st.tuples(st.integers(1, 3), st.integers(0, 2)).map(lambda t: Limits(t[0], t[0] + t[1])),
)
def test_no_round_starts_while_another_runs(num_steps: int, choices: st.DataObject, limits: Limits) -> None:
    """Agents come, enter, leave and die in any order, and any of them coordinates from the records alone. Rounds that have
    started never overlap, respect the limits and have all their members inside when they start."""
    view = _view(None)
    started: dict[str, int] = {}  # round whose workers each agent runs, as the agent sees it
    for step in range(num_steps):
        agents = dict(view.agents)
        action = choices.draw(st.sampled_from(["come", "enter", "enter", "leave", "die", "coordinate", "coordinate", "start"]))
        members = [agent for agent in (view.round.agents if view.round else []) if agent in agents]
        if action == "come" and len(agents) < 6:
            agents[f"a{step}"] = _agent(f"a{step}", "waiting", view.round_number, step)
        elif action == "enter" and (late := [a for a in members if agents[a].record.round_number < view.round_number]):
            agents[late[0]] = _agent(late[0], "running", view.round_number, agents[late[0]].since_revision)
        elif action == "leave" and members:
            agent = choices.draw(st.sampled_from(members))
            agents[agent] = _agent(agent, "waiting", view.round_number, agents[agent].since_revision)
            started.pop(agent, None)
        elif action == "die" and agents:
            agent = choices.draw(st.sampled_from(sorted(agents)))
            del agents[agent]
            started.pop(agent, None)
        elif action == "start" and view.is_confirmed:
            inside = [agent for agent in members if agents[agent].record.state == "running"]
            started |= dict.fromkeys(inside, view.round_number)
        view = replace(view, agents=agents)
        if action == "coordinate":
            notice = next_notice(view, step)
            if notice.confirmed_round == view.round_number and not view.is_confirmed and view.round is not None:
                assert all(agents[a].record.round_number == view.round_number for a in view.round.agents)
            next_members = members_of_next_round(view, limits, choices.draw(st.booleans()))
            if next_members:
                assert not started
                assert limits.min_nodes <= len(next_members) <= limits.max_nodes
                assert len(set(next_members)) == len(next_members)
                view = replace(view, round=AgentRound(view.round_number + 1, next_members, "complete"))
                assert participants(view) == next_members
            else:
                view = replace(view, notice=notice)
        assert len(set(started.values())) <= 1


@settings(max_examples=200)
@given(
    entered=st.lists(st.booleans(), min_size=1, max_size=5),
    dead=st.sets(st.integers(0, 4)),
    is_confirmed=st.booleans(),
    limits=st.tuples(st.integers(1, 3), st.integers(0, 2)).map(lambda t: Limits(t[0], t[0] + t[1])),
)
def test_a_coordinator_that_takes_over_in_any_state_comes_to_rest(
    entered: list[bool], dead: set[int], is_confirmed: bool, limits: Limits
) -> None:
    """Members enter the rounds assigned to them. At the end all living agents are in a started round, or too few are left."""
    names = [f"a{i}" for i in range(len(entered))]
    round_ = AgentRound(3, names, "complete")
    agents = [
        _agent(name, *(("running", 3) if entered[i] or is_confirmed else ("waiting", 2)), since=i)
        for i, name in enumerate(names)
        if i not in dead
    ]
    view = _view(round_, *agents, is_confirmed=is_confirmed)
    for _ in range(6):
        members = members_of_next_round(view, limits, last_call_is_over=True)
        if members:
            view = replace(view, round=AgentRound(view.round_number + 1, members, "complete"))
        inside = participants(view)
        everyone = {a: _agent(a, "running", view.round_number) if a in inside else seen for a, seen in view.agents.items()}
        view = replace(view, agents=everyone)
        view = replace(view, notice=next_notice(view, term=7))
    assert next_notice(view, term=7) == view.notice
    if participants(view):
        assert view.is_confirmed
    else:
        assert len(candidates(view)) < limits.min_nodes


WAITING = [_agent(name, "waiting") for name in "ab"]
LAST = AgentRound(1, ["c", "b", "a"], "complete")
LEFT = [_agent(name, "waiting", 1, since) for since, name in enumerate("abc")]  # members of the last round
NEW = _agent("new", "waiting", 1, 9)
LOST_B = _view(AgentRound(1, ["a", "b"], "complete"), _agent("a", "waiting", 1))
LOST_BOTH = _view(AgentRound(1, ["a", "b"], "complete"), NEW)


@pytest.mark.parametrize(
    "situation, view, limits, last_call_is_over, members",
    [
        ("a round waits for the last call", _view(None, WAITING[0]), ONE_TO_TWO, False, []),
        ("and forms after it", _view(None, WAITING[0]), ONE_TO_TWO, True, ["a"]),
        ("a full round does not wait", _view(None, *WAITING), ONE_TO_TWO, False, ["a", "b"]),
        ("survivors keep their order, before newcomers", _view(LAST, NEW, *LEFT), Limits(1, 3), True, ["c", "b", "a"]),
        ("a dead member does not delay the next round", _view(LAST, LEFT[1]), ONE_TO_TWO, True, ["b"]),
        ("members of the last round alone do not wait", _view(LAST, LEFT[0], LEFT[2]), Limits(1, 4), False, ["c", "a"]),
        ("but wait with a newcomer", _view(LAST, LEFT[0], LEFT[2], NEW), Limits(1, 4), False, []),
        ("a closed run forms no round", _view(AgentRound(1, [], "closed"), LEFT[1]), ONE_TO_TWO, True, []),
        ("a live job forms none", replace(_view(None, *WAITING), job=_job("training", True)), ONE_TO_TWO, True, []),
        ("nor does a finished one", replace(_view(None, *WAITING), job=_job("finished", False)), ONE_TO_TWO, True, []),
        ("a newcomer replaces members that are lost", LOST_BOTH, ONE_TO_TWO, True, ["new"]),
        ("but not while all of them may return", replace(LOST_BOTH, returning={"a", "b"}), ONE_TO_TWO, True, []),
        ("a waiting member does not wait for a lost one", replace(LOST_B, returning={"b"}), ONE_TO_TWO, True, ["a"]),
    ],
)
def test_members_of_the_next_round(
    situation: str, view: AgentView, limits: Limits, last_call_is_over: bool, members: list[str]
) -> None:
    assert members_of_next_round(view, limits, last_call_is_over) == members, situation


def test_running_agents_learn_of_a_late_one() -> None:
    round_ = AgentRound(1, ["a"], "complete")
    late = next_notice(_view(round_, _agent("a", "running", 1), _agent("b", "waiting", 1)), term=2)
    assert (late.round_number, late.num_inside, late.num_waiting, late.num_members_waiting) == (1, 1, 1, 0)


def test_admitted_agent_belongs_to_the_round_before_it_notices() -> None:
    round_ = AgentRound(2, ["a", "b"], "complete")
    view = _view(round_, _agent("a", "running", 2), _agent("b", "waiting", 1))
    assert participants(view) == ["a", "b"]
    assert candidates(view) == []


def test_each_waiting_agent_shows_the_reason() -> None:
    first, second = _agent("a", "waiting"), _agent("b", "waiting")
    first = replace(first, record=replace(first.record, min_nodes=3))
    assert waits(_view(None, first)) == {"a": "waits for 2 more nodes of at least 3"}
    assert waits(_view(None, first, second))["a"] == "waits for 1 more node of at least 3"
    running = AgentRound(1, ["c"], "complete")
    assert waits(_view(running, _agent("c", "running", 1), second)) == {"c": "", "b": "waits for 1 running node to make room"}
    assert waits(_view(AgentRound(1, [], "closed"), second)) == {"b": "the run is closed: about to end"}


def test_round_is_confirmed_once_all_have_entered() -> None:
    first = SeenAgent(AgentRecord("a", "host", 1, 1, "running", round_number=2, address="10.0.0.1", port=99), 0)
    round_ = AgentRound(2, ["a", "b"], "complete")
    notice = next_notice(_view(round_, first, _agent("b", "waiting", 1), is_confirmed=False), term=5)
    assert notice.confirmed_round == 0
    notice = next_notice(_view(round_, first, _agent("b", "running", 2), is_confirmed=False), term=5)
    assert (notice.confirmed_round, notice.master_address, notice.master_port, notice.term) == (2, "10.0.0.1", 99, 5)


def test_round_with_a_loss_before_confirmation_is_void() -> None:
    view = _view(
        AgentRound(2, ["dead", "b", "c"], "complete"), _agent("b", "running", 2), _agent("c", "waiting", 1), is_confirmed=False
    )
    assert participants(view) == []
    assert members_of_next_round(view, Limits(2, 3), last_call_is_over=True) == ["b", "c"]
    assert members_of_next_round(view, Limits(3, 3), last_call_is_over=True) == []


def test_confirmed_round_continues_without_a_member_that_died() -> None:
    view = _view(AgentRound(2, ["dead", "b"], "complete"), _agent("b", "running", 2), _agent("c", "waiting", 2))
    assert participants(view) == ["b"]
    assert members_of_next_round(view, ONE_TO_TWO, last_call_is_over=True) == []
    assert next_notice(view, term=1).num_inside == 1


def test_all_agents_learn_when_the_last_living_member_has_finished() -> None:
    round_ = AgentRound(1, ["a", "dead", "c"], "complete")
    assert next_notice(_view(round_, _agent("a", "finished", 1), _agent("c", "running", 1)), term=1).num_unfinished == 1
    assert next_notice(_view(round_, _agent("a", "finished", 1), _agent("c", "finished", 1)), term=1).num_unfinished == 0


def test_agents_learn_of_lost_members_but_not_of_departed_ones() -> None:
    round_ = AgentRound(1, ["a", "b", "c"], "complete")
    view = _view(round_, _agent("a", "running", 1), _agent("b", "running", 1))
    assert next_notice(view, term=1).num_lost == 1
    notice = next_notice(replace(view, signed_off={"c"}), term=1)
    assert notice.num_lost == 0
    assert next_notice(replace(view, notice=notice), term=2).num_lost == 0  # the notice is gone by now
    assert next_notice(replace(view, round=replace(round_, state="closed")), term=1).num_lost == 0


def test_agents_learn_of_actionable_changes_at_once_and_counts_later() -> None:
    told = AgentNotice(1, confirmed_round=3, num_agents=9, num_inside=9)
    assert is_urgent(told, None)
    assert is_urgent(replace(told, confirmed_round=4), told)
    assert is_urgent(replace(told, num_waiting=1), told)
    assert is_urgent(replace(told, num_lost=1), told)
    assert is_urgent(replace(told, over="has finished"), told)
    assert not is_urgent(replace(told, num_agents=10, num_unfinished=8), told)
    one_waits = replace(told, num_waiting=1)
    assert not is_urgent(replace(one_waits, num_waiting=2), one_waits)
    assert not is_urgent(told, one_waits)


def test_lost_member_counts_only_when_its_time_to_return_is_over() -> None:
    round_ = AgentRound(1, ["a", "b"], "complete")
    view = _view(round_, _agent("a", "running", 1))
    assert next_notice(view, 1).num_lost == 1
    awaiting = next_notice(replace(view, returning={"b"}), 1)
    assert (awaiting.num_lost, awaiting.num_inside) == (0, 2)  # a node that waits gets no room


def test_member_that_may_return_has_not_finished() -> None:
    round_ = AgentRound(1, ["a", "b"], "complete")
    view = _view(round_, _agent("a", "finished", 1))
    assert next_notice(replace(view, returning={"b"}), 1).num_unfinished == 1
    assert next_notice(view, 1).num_unfinished == 0
