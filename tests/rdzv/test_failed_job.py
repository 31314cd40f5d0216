"""Messages to users of a bare torchrun when a worker of their live job has failed."""

from __future__ import annotations

import time

from tests.support.torchrun_agent import StartAgent

SOURCE = """
import dataclasses, os, time
import torch
import torch.distributed as dist
from lightning_dlrover.rdzv import World, WorldConfig

config = WorldConfig.from_environment(os.environ, "1")
with World(dataclasses.replace(config, wait_timeout_s=7.0)) as world:
    for step in world.steps(100_000):
        with step:
            if step.number == 5 and step.rank == 1:
                print("failed at", time.time(), flush=True)
                raise ArithmeticError("a mistake of the user's")
            dist.all_reduce(torch.ones(1))
"""
CAUSE = "ArithmeticError: a mistake of the user's"


def test_every_node_shows_the_first_failure_last(start_agent: StartAgent) -> None:
    agents = [start_agent(SOURCE, nnodes="2:2", conf="live=1") for _ in range(2)]
    ended_at: dict[int, float] = {}
    deadline = time.monotonic() + 120
    while len(ended_at) < 2:
        assert time.monotonic() < deadline, [agent.output for agent in agents]
        for index, agent in enumerate(agents):
            if agent.process.poll() is not None:
                ended_at.setdefault(index, time.time())
        time.sleep(0.02)
    [failed] = [index for index, agent in enumerate(agents) if agent.lines("failed at")]
    failed_at = float(agents[failed].lines("failed at")[0].split()[2])
    assert ended_at[failed] - failed_at < 5.0
    for agent in agents:
        assert agent.process.returncode != 0
        *_, cause = [line.strip() for line in agent.output.splitlines() if "Error: " in line]
        assert cause.endswith(CAUSE), agent.output
    [told] = [line for line in agents[1 - failed].output.splitlines() if "waits for 1 more worker of at least 2" in line]
    assert told.endswith(CAUSE)
