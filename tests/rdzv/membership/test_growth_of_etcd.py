"""A job's writes over hours take neither more and more keys nor a larger and larger database."""

from __future__ import annotations

import dataclasses
import os
import socket
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import pytest

from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.connection import etcdrpc
from lightning_dlrover.rdzv.etcd.server import EmbeddedEtcd
from lightning_dlrover.rdzv.etcd.types import EtcdConfig
from lightning_dlrover.rdzv.job import journal
from lightning_dlrover.rdzv.job.events import WindowMeasured
from lightning_dlrover.rdzv.job.records import CheckpointRecord, PlanRecord, StacksRecord, encode
from lightning_dlrover.rdzv.membership.membership import Membership, MembershipConfig
from lightning_dlrover.tuning.samples import StepProfile

NUM_WORKERS = 2
MAX_EVENTS = 200
MINUTES = 120
MINUTE_S = 0.06
"""Seconds in which a minute's writes are made, at the least."""
EVENTS_A_MINUTE = 34
"""Lines of the history that a job of two workers has written in a minute, while the planner tried settings."""


@dataclass
class BusyJob:
    """Workers that write as in training, without the pauses."""

    workers: list[Membership]
    client: EtcdClient
    minute: int = 0
    keys: set[int] = field(default_factory=set)  # numbers of keys, one for each minute
    sizes: list[int] = field(default_factory=list)  # bytes of etcd's database after each minute

    def train_for_a_minute(self) -> None:
        self.minute += 1
        for worker in self.workers:
            for window in range(6):
                worker.shared.put_profile(encode(profile_of(worker, 10 * self.minute + window)))
        rank_0 = self.workers[0]
        for line in range(EVENTS_A_MINUTE):
            rank_0.shared.event(WindowMeasured(dataclasses.asdict(profile_of(rank_0, line))), "")
        rank_0.shared.outbox.write()
        plan = PlanRecord(NUM_WORKERS, "planner", f"minute {self.minute}" * 20, False, self.minute)
        rank_0.shared.update_plan(lambda _: plan)
        rank_0.shared.put_checkpoint(CheckpointRecord(f"/checkpoints/{self.minute}.ckpt", self.minute))
        rank_0.shared.update_job(lambda job: dataclasses.replace(job, global_batch_size=8))
        for rank, worker in enumerate(self.workers):
            stacks = StacksRecord(worker.worker_id, self.minute, rank, "host", 1, "step", 0.0, False, "", "stack\n" * 1000)
            worker.shared.put_stacks(stacks)
        self.keys.add(self.client.count(rank_0.keys.root))
        self.sizes.append(self._status().dbSize)

    def _status(self) -> etcdrpc.StatusResponse:
        return self.client.caller.call("read the status", "Maintenance", "Status", etcdrpc.StatusRequest())


def profile_of(worker: Membership, number: int) -> StepProfile:
    counts = {"round_number": 1, "global_rank": 0, "num_workers": 2, "num_nodes": 1, "first_step": number, "num_steps": 9}
    sizes = {"global_batch": 16, "local_batch": 8, "loader_workers": 2, "intra_op_threads": 1, "memory_bytes": 1 << 30}
    times: dict[str, Any] = {f.name: 0.012345 for f in dataclasses.fields(StepProfile) if f.name.endswith("_s")}
    return StepProfile(
        worker_id=worker.worker_id, cores=1.0, device="cpu", cpu_percent=98.7, at=time.time(), **counts, **sizes, **times
    )


@pytest.mark.slow
def test_keys_and_database_stay_bounded_over_hours(run_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "MAX_EVENTS", MAX_EVENTS)
    with ExitStack() as stack:
        # Superseded values are kept for eight minutes of the job, a little longer than in practice.
        server = stack.enter_context(EmbeddedEtcd(superseded_s=8 * MINUTE_S))
        client = stack.enter_context(EtcdClient(EtcdConfig(server.endpoint)))
        workers = []
        for rank in range(NUM_WORKERS):
            port = stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
            config = MembershipConfig(run_id, "/dlrover", f"agent-{rank}", 0, 2, 2, "1", "127.0.0.1", port)
            workers.append(Membership(stack.enter_context(EtcdClient(EtcdConfig(server.endpoint))), config))
            stack.callback(workers[-1].close)
            workers[-1].register()
        job = BusyJob(workers, client)
        began = time.monotonic()
        for minute in range(MINUTES):
            time.sleep(max(0.0, began + minute * MINUTE_S - time.monotonic()))  # a quick machine would write more in the time
            job.train_for_a_minute()

        others = max(job.keys) - MAX_EVENTS - journal.TRIM_EVERY
        assert others < 20, job.keys
        assert client.count(workers[0].keys.events) >= MAX_EVENTS  # the bound was reached
        # Values of an hour without compaction take several times as much as those of the first quarter of an hour.
        settled = max(job.sizes[: MINUTES // 4])
        assert job.sizes[-1] < 1.5 * settled, job.sizes
        assert server.data_dir is not None
        assert os.path.getsize(server.data_dir / "data/member/snap/db") == job.sizes[-1]
