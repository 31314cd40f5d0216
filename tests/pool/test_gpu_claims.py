"""Runs of one machine claim its GPUs."""

from __future__ import annotations

import os
import socket
import time

import pytest

from lightning_dlrover.components.targets.machine import MachineShares
from lightning_dlrover.components.targets.target import NodeSize, NotTakenError
from lightning_dlrover.pool.admission import GpuClaims, PoolTicket
from lightning_dlrover.pool.view import MemberRecord, PoolKeys
from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.job.records import Keys
from tests.support.stored import entry_at
from tests.support.waiting import eventually


@pytest.fixture
def pool(run_id: str) -> PoolKeys:
    return PoolKeys(run_id, prefix=f"/{run_id}")


def place(client: EtcdClient, pool: PoolKeys, name: str) -> PoolTicket:
    ask = MemberRecord(socket.gethostname(), os.getpid(), 1, 2, submitted_at=time.time(), gpus=1)
    return PoolTicket(client, pool, Keys(name, pool.prefix), ask)


def gpu_of(machine: MachineShares, node: str) -> str:
    return machine.take(node, NodeSize(1))[1]["CUDA_VISIBLE_DEVICES"]


def test_runs_of_one_machine_use_different_gpus_and_give_them_back(
    client: EtcdClient, pool: PoolKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b,GPU-c")
    other_pool = PoolKeys("other", pool.prefix)
    with place(client, pool, "a") as first, place(client, other_pool, "b") as second:
        a, b = MachineShares(gpus=1, claims=first.gpus), MachineShares(gpus=2, claims=second.gpus)
        assert gpu_of(a, "a1") == "GPU-a"
        assert gpu_of(b, "b1") == "GPU-b,GPU-c"
        with pytest.raises(NotTakenError, match="a2 needs 1 GPUs, and 0 are free on this machine: b has GPU-b, b has GPU-c"):
            a.take("a2", NodeSize(1))
        b.end("b1")
        b.settle(())
        assert gpu_of(a, "a2") == "GPU-b"
        with pytest.raises(NotTakenError, match="b2 needs 2 GPUs, and 1 are free on this machine: a has GPU-a, a has GPU-b"):
            b.take("b2", NodeSize(1))
        assert gpu_of(a, "a3") == "GPU-c"  # the refused node has kept none
    assert client.get_prefix(pool.pools)[1] == []


def test_gpus_of_a_run_that_lost_its_lease_are_claimed_again(client: EtcdClient, pool: PoolKeys) -> None:
    with place(client, pool, "a") as kept, place(client, pool, "b") as other:
        assert kept.gpus.take(["GPU-a"], 1) == ["GPU-a"]
        entry = entry_at(client, pool.members + "a")
        client.leases.revoke(entry.lease_id)  # like its expiry in an outage

        def is_back() -> bool:
            kept.keep()
            return client.get(pool.gpu("GPU-a")) is not None

        eventually(is_back, "the claim", 15.0)
        assert other.gpus.take(["GPU-a", "GPU-b"], 2) == ["GPU-b"]


def test_claim_with_a_lost_answer_is_the_runs_own(client: EtcdClient, pool: PoolKeys) -> None:
    with place(client, pool, "a") as made:
        made.gpus.take(["GPU-a"], 1)
        again = GpuClaims(client, pool, "a", made._tenure)
        assert again.take(["GPU-a"], 1) == ["GPU-a"]


def test_numbers_name_gpus_of_one_host_only(pool: PoolKeys, client: EtcdClient) -> None:
    with place(client, pool, "a") as made:
        assert made.gpus.take(["0"], 1) == ["0"]
        assert client.get(pool.gpu(f"{socket.gethostname()}:0")) is not None
