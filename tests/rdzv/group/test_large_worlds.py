"""A job with more workers than are all connected to, and probed by, each other."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.server import EmbeddedEtcd
from lightning_dlrover.rdzv.group.forming import FEW
from lightning_dlrover.rdzv.job.records import AgentRecord, EventRecord, Keys, decode, encode
from tests.support.waiting import eventually
from tests.support.warm_process import WarmProcess, run_code

pytestmark = pytest.mark.usefixtures("fork_server")

NUM_WORKERS = 20

MEMBER = """
import json, os, sys, time
import torch
import torch.distributed as dist
from lightning_dlrover.rdzv import World

with World.from_environment() as world:
    for step in world.steps(1_000_000, model=torch.nn.Linear(2, 2)):
        with step:
            total = torch.ones(1)
            dist.all_reduce(total)
            assert total == step.size
            time.sleep(0.1)
        if step.was_made:
            num_files = len(os.listdir("/proc/self/fd"))
            print(json.dumps([step.number, step.size, step.rank, num_files]), flush=True)
"""


class Members:
    """Workers of one job, each with an agent that is only announced."""

    def __init__(self, etcd: EmbeddedEtcd, client: EtcdClient, keys: Keys, folder: Path) -> None:
        self.processes: list[WarmProcess] = []
        self._etcd, self._client, self._keys, self._folder = etcd, client, keys, folder

    def announce(self, number: int) -> None:
        self._client.put(f"{self._keys.agents}a{number}", encode(AgentRecord(f"a{number}", "host", 1, 1, "running")))

    def start(self) -> None:
        number = len(self.processes)
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "DLROVER_RUN_ID": self._keys.run_id,
            "DLROVER_ENDPOINT": self._etcd.endpoint,
            "DLROVER_MIN_NODES": "1",
            "DLROVER_MAX_NODES": str(NUM_WORKERS + 1),
            "DLROVER_AGENT_ID": f"a{number}",
            "DLROVER_LEASE_TTL_S": "30",  # no lease expires on a busy machine
        }
        self.processes.append(WarmProcess(run_code, [MEMBER], environment, self._folder / f"{number}.out"))

    def steps(self, number: int) -> list[list[int]]:
        lines = (self._folder / f"{number}.out").read_text().splitlines()
        return [json.loads(line) for line in lines if line.startswith("[") and line.endswith("]")]

    def await_world(self, size: int, members: list[int]) -> None:
        def found() -> bool:
            ended = [number for number in members if self.processes[number].returncode is not None]
            assert not ended, (self._folder / f"{ended[0]}.out").read_text()
            return all(any(step[1] == size for step in self.steps(number)[-5:]) for number in members)

        eventually(found, f"a step of all {size} workers", 60.0, 0.2)

    def losses(self) -> list[str]:
        events = [decode(EventRecord, entry.value, entry.key) for entry in self._client.get_prefix(self._keys.events)[1]]
        return [event.text for event in events if event.kind == "loss"]


@pytest.mark.timeout(240)
def test_large_world_grows_and_loses_several_workers_and_no_others(
    etcd: EmbeddedEtcd, client: EtcdClient, keys: Keys, tmp_path: Path
) -> None:
    assert NUM_WORKERS - 2 > FEW
    members = Members(etcd, client, keys, tmp_path)
    everyone = list(range(NUM_WORKERS))
    try:
        for number in everyone:
            members.announce(number)
        for _ in everyone:
            members.start()
        members.await_world(NUM_WORKERS, everyone)
        members.start()
        everyone.append(NUM_WORKERS)
        members.await_world(NUM_WORKERS + 1, everyone)
        by_rank = sorted(everyone, key=lambda number: members.steps(number)[-1][2])
        # Gloo connects a worker with two neighbours, and those at distances of powers of two, not with all 20.
        files = [members.steps(number)[-1][3] for number in by_rank[1:]]  # rank 0 serves the store
        victims = by_rank[6:8]  # the first one's death is found by a worker that the second one's does not stop
        for number in victims:
            members.processes[number].kill()
        survivors = [number for number in everyone if number not in victims]
        members.await_world(NUM_WORKERS - 1, survivors)
        assert [members.processes[number].returncode for number in survivors] == [None] * len(survivors)
        assert len(members.losses()) == len(victims)
    finally:
        for process in members.processes:
            process.kill()
        for process in members.processes:
            process.wait(30)
    assert max(files) < 100, files
