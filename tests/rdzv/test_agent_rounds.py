from __future__ import annotations

import dataclasses

from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dlrover.rdzv.agent_rounds import (
    AgentView,
    Limits,
    SeenAgent,
    candidates,
    members_of_next_round,
    num_waiting,
    participants,
    waits,
)
from lightning_dlrover.rdzv.records import AgentRecord, AgentRound


def _agent(name: str, state: str, round_number: int = 0, since: int = 0) -> SeenAgent:
    record = AgentRecord(name, "host", 1, 1, "waiting", round_number=round_number)
    return SeenAgent(dataclasses.replace(record, state=state), since)


def _view(round_: AgentRound | None, *agents: SeenAgent) -> AgentView:
    return AgentView({seen.record.agent_id: seen for seen in agents}, round_, 1 if round_ else 0, None)


ONE_TO_TWO = Limits(1, 2)


@settings(max_examples=200)
@given(
    num_steps=st.integers(1, 40),
    choices=st.data(),
    limits=st.tuples(st.integers(1, 3), st.integers(0, 2)).map(lambda t: Limits(t[0], t[0] + t[1])),
)
def test_whatever_agents_do_no_round_forms_beside_a_running_one(num_steps: int, choices: st.DataObject, limits: Limits) -> None:
    """Agents come, enter, leave and die in any order; rounds never overlap and keep to the limits."""
    view = _view(None)
    for step in range(num_steps):
        agents = dict(view.agents)
        action = choices.draw(st.sampled_from(["come", "enter", "leave", "die", "form"]))
        inside = participants(view)
        if action == "come" and len(agents) < 6:
            agents[f"a{step}"] = _agent(f"a{step}", "waiting", view.round_number, step)
        elif action == "enter" and inside:
            agents[inside[0]] = _agent(inside[0], "running", view.round_number, agents[inside[0]].since_revision)
        elif action == "leave" and inside:
            agents[inside[-1]] = _agent(inside[-1], "waiting", view.round_number, agents[inside[-1]].since_revision)
        elif action == "die" and agents:
            del agents[choices.draw(st.sampled_from(sorted(agents)))]
        view = dataclasses.replace(view, agents=agents)
        members = members_of_next_round(view, limits, choices.draw(st.booleans()))
        if members:
            assert not participants(view)
            assert limits.min_nodes <= len(members) <= limits.max_nodes
            assert len(set(members)) == len(members)
            assert set(members) <= set(candidates(view))
            if action == "form":
                round_ = AgentRound(view.round_number + 1, members, "complete")
                view = dataclasses.replace(view, round=round_, round_revision=step)
                assert participants(view) == members


def test_a_round_waits_for_last_call_unless_it_is_full() -> None:
    view = _view(None, _agent("a", "waiting"))
    assert members_of_next_round(view, ONE_TO_TWO, last_call_is_over=False) == []
    assert members_of_next_round(view, ONE_TO_TWO, last_call_is_over=True) == ["a"]
    full = _view(None, _agent("a", "waiting"), _agent("b", "waiting"))
    assert members_of_next_round(full, ONE_TO_TWO, last_call_is_over=False) == ["a", "b"]


def test_running_agents_restart_for_a_late_one_but_not_when_the_round_is_full() -> None:
    round_ = AgentRound(1, ["a"], "complete")
    late = _view(round_, _agent("a", "running", 1), _agent("b", "waiting", 1))
    assert num_waiting(late, Limits(1, 2)) == 1
    assert num_waiting(late, Limits(1, 1)) == 0


def test_survivors_keep_their_order_and_come_before_newcomers() -> None:
    round_ = AgentRound(1, ["c", "b", "a"], "complete")
    left = [_agent(name, "waiting", 1, since) for since, name in enumerate("abc")]
    view = _view(round_, _agent("new", "waiting", 1, 9), *left)
    assert members_of_next_round(view, Limits(1, 3), last_call_is_over=True) == ["c", "b", "a"]


def test_an_admitted_agent_that_has_not_noticed_yet_still_belongs_to_the_round() -> None:
    round_ = AgentRound(2, ["a", "b"], "complete")
    view = _view(round_, _agent("a", "running", 2), _agent("b", "waiting", 1))
    assert participants(view) == ["a", "b"]
    assert num_waiting(view, ONE_TO_TWO) == 0


def test_a_dead_member_does_not_hold_up_the_next_round() -> None:
    round_ = AgentRound(2, ["dead", "b"], "complete")
    view = _view(round_, _agent("b", "waiting", 2))
    assert members_of_next_round(view, ONE_TO_TWO, last_call_is_over=True) == ["b"]


def test_a_closed_run_forms_no_round() -> None:
    view = _view(AgentRound(2, [], "closed"), _agent("b", "waiting", 2))
    assert members_of_next_round(view, ONE_TO_TWO, last_call_is_over=True) == []


def test_each_waiting_agent_says_what_it_waits_for() -> None:
    first, second = _agent("a", "waiting"), _agent("b", "waiting")
    first = dataclasses.replace(first, record=dataclasses.replace(first.record, min_nodes=3))
    assert waits(_view(None, first)) == {"a": "waits for 2 more nodes of at least 3"}
    assert waits(_view(None, first, second))["a"] == "waits for 1 more node of at least 3"
    running = AgentRound(1, ["c"], "complete")
    assert waits(_view(running, _agent("c", "running", 1), second)) == {"c": "", "b": "waits for 1 running node to make room"}
    assert waits(_view(AgentRound(1, [], "closed"), second)) == {"b": "the run is closed: about to end"}
