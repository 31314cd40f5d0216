"""Communicators that are abandoned, or that connect while the group of another round is created."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from lightning_dlrover.rdzv.job.records import RoundRecord
from lightning_dlrover.rdzv.transport import process_groups, torch_names
from lightning_dlrover.rdzv.transport.process_groups import CommunicatorError, Communicators
from lightning_dlrover.rdzv.transport.torch_names import HashStore, Store
from tests.support import nccl_stand_in
from tests.support.nccl_stand_in import NAME, Quirks
from tests.support.waiting import eventually

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cpu, "synchronize", torch.cpu.synchronize)
    nccl_stand_in.install(Quirks())
    yield
    monkeypatch.setenv("TORCH_NCCL_NONBLOCKING_TIMEOUT", "0")  # ends what still connects
    time.sleep(2 * nccl_stand_in.MAX_POLL_S)


def connecting(rank: int, open_store: Callable[[], Store]) -> Communicators:
    """Begin to connect one of two members."""
    target = RoundRecord(3, ["a", "b"], "", "grow", planned=True)
    return Communicators(target, rank, CPU, {"cpu": NAME}, open_store, None, timedelta(seconds=5))


def wait_for_backend(communicators: Communicators) -> None:
    eventually(lambda: communicators._backends, "a backend", 5)


def test_worker_lives_on_while_the_abort_of_connecting_communicators_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    monkeypatch.setattr(process_groups, "STUCK_S", 0.1)
    monkeypatch.setattr(os, "_exit", codes.append)
    communicators = connecting(0, HashStore)  # the other member never comes
    wait_for_backend(communicators)
    waiter = threading.Thread(target=communicators.wait)
    waiter.start()
    communicators.abandon()
    waiter.join(1)
    assert not waiter.is_alive()
    time.sleep(0.4)
    assert codes == []
    with pytest.raises(CommunicatorError, match="round 3: the round was given up"):
        communicators.connected()


def test_connected_communicators_that_were_abandoned_are_not_used() -> None:
    store = HashStore()
    both = [connecting(rank, lambda: store) for rank in range(2)]
    assert all(each.wait(5) for each in both)
    both[0].abandon()
    with pytest.raises(CommunicatorError, match="given up"):
        both[0].connected()
    both[1].abandon()


def test_next_rounds_backend_is_another_one_than_that_of_a_group_under_creation() -> None:
    store = HashStore()
    connected = nccl_stand_in.StandIn(store, 0, 1, timedelta(seconds=5))
    made: list[object] = []

    def make() -> None:
        made.append(torch_names.backend_beside_gloo(NAME, store, 0, 1, timedelta(seconds=5)))

    thread = threading.Thread(target=make)
    with torch_names.as_connected({NAME: connected}):
        thread.start()
        thread.join(0.2)
        dist.init_process_group(NAME, store=HashStore(), rank=0, world_size=1)
    thread.join(5)
    assert dist.group.WORLD is connected
    assert made[0] is not connected
    dist.destroy_process_group()
