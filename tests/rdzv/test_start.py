"""Time that early workers wait before a job begins."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.mirror import Mirror
from lightning_dlrover.rdzv.job.records import Keys
from tests.rdzv.test_lifetime import LIVE
from tests.support.torchrun_agent import StartAgent

AT_ONCE_S = 2.0
"""Generous limit in seconds: an agent polls every half second at worst, a worker every 0.1 s."""


class Arrivals:
    """Times at which each key first appeared."""

    def __init__(self, client: EtcdClient, keys: Keys) -> None:
        self.seen: dict[str, float] = {}
        self._keys = keys
        self._mirror = Mirror(client, keys.live, self._look)

    def _look(self) -> None:
        for key in self._mirror.snapshot():
            self.seen.setdefault(key, time.monotonic())

    def nth(self, prefix: str, number: int) -> float:
        """Time at which the key number `number` (from 1) under a prefix appeared."""
        return sorted(at for key, at in self.seen.items() if key.startswith(prefix))[number - 1]

    def close(self) -> None:
        self._mirror.close()


@pytest.fixture
def arrivals(client: EtcdClient, keys: Keys) -> Iterator[Arrivals]:
    found = Arrivals(client, keys)
    yield found
    found.close()


def test_live_workers_start_as_soon_as_the_fewest_are_there(start_agent: StartAgent, keys: Keys, arrivals: Arrivals) -> None:
    conf = "live=1,last_call_timeout=60"
    agents = [start_agent(LIVE.replace("STEPS", "3"), nnodes="2:4", conf=conf) for _ in range(2)]
    assert [agent.wait() for agent in agents] == [0, 0], agents[0].output
    assert all(agent.lines("STEP 0 2") for agent in agents)  # together from the first step on
    assert arrivals.nth(keys.agent_round, 1) - arrivals.nth(keys.agents, 2) < AT_ONCE_S
    assert arrivals.nth(keys.round, 1) - arrivals.nth(keys.workers, 2) < AT_ONCE_S


def test_plain_scripts_wait_for_the_last_call_unless_all_are_there(
    start_agent: StartAgent, keys: Keys, arrivals: Arrivals
) -> None:
    agents = [start_agent("print('RAN')", nnodes="1:2", conf="last_call_timeout=60") for _ in range(2)]
    assert [agent.wait() for agent in agents] == [0, 0], agents[0].output
    assert all(agent.lines("RAN") == ["RAN"] for agent in agents)  # no worker started twice
    assert arrivals.nth(keys.agent_round, 1) - arrivals.nth(keys.agents, 2) < AT_ONCE_S
