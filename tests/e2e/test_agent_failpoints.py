"""A job of nodes ends as if undisturbed, whichever fault disturbs an elastic agent at any of its writes into etcd.

Stock agents run scripts that do not use our package. By default a spread of writes and actions is tested;
DLROVER_ALL_FAULTS=1 in the environment tests every action at every write.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lightning_dlrover.rdzv.etcd.server import EmbeddedEtcd
from lightning_dlrover.rdzv.job.records import AgentRound, Keys, decode
from tests.e2e.history import Change, History
from tests.support.disturbed_writes import ACTIONS, STOP_S, Failpoint
from tests.support.elastic_agents import ElasticAgents, Node, Nursery, RunningAgent
from tests.support.waiting import eventually

NUM_AT_ONCE = 4
DEADLINE_S = 90.0
MOST_OF_A_KIND = 2  # disturbances per kind of write that an agent repeats


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    made = Nursery()
    yield made
    made.close()


class Scenario:
    """Two nodes start, a third joins and is lost, and all end. A node that dies unasked is replaced by another one."""

    def __init__(self, nursery: Nursery, etcd: EmbeddedEtcd, run_id: str, folder: Path, point: Failpoint | None) -> None:
        self.point = point
        self.agents = ElasticAgents(nursery, etcd.endpoint, run_id, folder)
        self.slots: dict[str, RunningAgent] = {}
        self.disturbed: RunningAgent | None = None
        self._history = History(etcd.endpoint, run_id)
        self._stopped_at = 0.0

    def play(self) -> str | None:
        """Return the failure, or None."""
        try:
            self._play()
            problems = agent_history_violations(self._history.finish(), self._history.keys)
            assert not problems, problems
        except AssertionError as error:
            return f"{self.point}: {error}"
        finally:
            self.agents.close()
            self._history.close()
        return None

    def _play(self) -> None:
        self._start("first")
        self._until(lambda: any("agent_convener" in write["name"] for write in self.slots["first"].writes()), "a coordinator")
        self._start("second")
        self._until(lambda: self._are_together(2), "a round of two nodes")
        self._start("third")
        self._until(lambda: self._are_together(3), "a round of three nodes")
        self.agents.kill_node(self.slots.pop("third"))
        self._until(lambda: self._are_together(2), "a round of the two that are left")
        self.agents.leave("done")
        for agent in self.slots.values():
            if agent is not self.disturbed:
                outcome = agent.wait(DEADLINE_S)
                assert outcome.state == "SUCCEEDED", f"{agent}: {outcome}; its output:\n{agent.output}"

    @property
    def has_fired(self) -> bool:
        return self.disturbed is not None and bool(self.disturbed.writes("failpoint"))

    def _start(self, slot: str) -> None:
        point = self.point if self.disturbed is None and self.point is not None and self.point.slot == slot else None
        # A disturbed node may cost the others a restart; this test does not count restarts.
        node = Node("me.wait_for('done')", min_nodes=2, max_nodes=3, max_restarts=9, with_writes=True, point=point)
        self.slots[slot] = self.agents.start_one(node)
        if point is not None:
            self.disturbed = self.slots[slot]

    def _are_together(self, num_nodes: int) -> bool:
        """Return whether exactly the current nodes run the workers of one round."""
        newest = {start.agent: start for start in self.agents.starts()}
        found = [newest.get(agent.number) for agent in self.slots.values()]
        sizes = {(start.world_size, start.master) for start in found if start is not None}
        return None not in found and len(sizes) == 1 and sizes.pop()[0] == num_nodes == len(self.slots)

    def _until(self, found: Callable[[], bool], what: str) -> None:
        def report() -> str:
            return "\n".join([f"{slot} is {agent}" for slot, agent in self.slots.items()] + [self.agents.report()])

        def look() -> bool:
            self._tend()
            return found()

        eventually(look, what, DEADLINE_S, 0.05, report=report)

    def _tend(self) -> None:
        for slot, agent in list(self.slots.items()):
            if not agent.is_running:
                self.agents.kill_node(agent)  # kill its workers
                self._start(slot)
            elif agent is self.disturbed and self.has_fired and self.point is not None and self.point.action == "stop":
                self._stopped_at = self._stopped_at or time.monotonic()
                if time.monotonic() - self._stopped_at > STOP_S:
                    agent.signal(signal.SIGCONT)


def agent_history_violations(changes: Iterable[Change], keys: Keys) -> list[str]:
    """Violations: two rounds with one number, a gap, a round not written by the coordinator, a duplicate member."""
    bad: list[str] = []
    number, coordinator = 0, ""
    for change in changes:
        if change.key == keys.agent_coordinator:
            coordinator = change.value.decode() if change.value is not None else ""
        elif change.key == keys.agent_round and change.value is not None:
            found = decode(AgentRound, change.value, change.key)
            if found.state == "closed":
                continue  # closing rewrites the current round
            if found.number != number + 1:
                bad.append(f"revision {change.revision}: round {found.number} follows round {number}")
            number = found.number
            if found.written_by != coordinator:
                bad.append(
                    f"revision {change.revision}: round {number} is {found.written_by}'s, {coordinator or 'nobody'} coordinates"
                )
            if len(set(found.agents)) != len(found.agents):
                bad.append(f"revision {change.revision}: round {number} has a member twice: {found.agents}")
    return bad


def play_all(scenarios: list[Scenario]) -> None:
    with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        failures = [failure for failure in pool.map(Scenario.play, scenarios) if failure is not None]
    assert not failures, "\n\n".join(failures)


@pytest.mark.on_demand
@pytest.mark.timeout(3600)
def test_an_agent_may_be_disturbed_at_any_of_its_writes(
    nursery: Nursery, etcd: EmbeddedEtcd, run_id: str, tmp_path: Path
) -> None:
    undisturbed = Scenario(nursery, etcd, run_id, tmp_path / "undisturbed", None)
    play_all([undisturbed])
    points = [
        Failpoint(slot, write["name"], write["nth"], action)
        for slot in ("first", "second")
        for write in undisturbed.slots[slot].writes()
        if write["nth"] <= MOST_OF_A_KIND
        for action in ACTIONS
    ]
    assert {"put agent_convener", "put agent_round:complete", "put agent_notice", "put agents:waiting"} <= {
        p.write for p in points
    }
    if not os.environ.get("DLROVER_ALL_FAULTS"):
        kills = [point for point in points if point.action == "kill" and point.slot == "first"][::2]
        points = kills + [point for point in points if point not in kills][::59]  # 59 is prime to the number of actions
    scenarios = [
        Scenario(nursery, etcd, f"{run_id}-{index}", tmp_path / str(index), point) for index, point in enumerate(points)
    ]
    play_all(scenarios)
    # Some writes happen only in a slow scenario, or depend on which agent comes first.
    assert sum(scenario.has_fired for scenario in scenarios) > 0.7 * len(scenarios)
