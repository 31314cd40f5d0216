"""Values of tables on a GPU go through the host's memory, because gloo sends no others."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_dlrover.tables import exchange as module
from lightning_dlrover.tables.exchange import Block, ExchangeStats, exchange
from lightning_dlrover.tables.layout import Region, Shard, plan_moves

WORKERS = ["a", "b"]
ROWS, COLS = 300, 8
WEIGHTS = torch.arange(ROWS * COLS, dtype=torch.float32).view(ROWS, COLS)

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]

by_rows = [Shard("a", Region(0, 200, 0, COLS)), Shard("b", Region(200, ROWS, 0, COLS))]
by_cols = [Shard("a", Region(0, ROWS, 0, 3)), Shard("b", Region(0, ROWS, 3, COLS))]


class HostGroup:
    """A gloo group that refuses tensors outside the host memory reserved for messages."""

    def __init__(self, group: Any, tables: list[torch.Tensor]) -> None:
        self._group = group
        self._tables = {tensor.untyped_storage().data_ptr() for tensor in tables}

    def _check(self, tensors: list[torch.Tensor]) -> None:
        assert all(t.device.type == "cpu" for t in tensors)
        assert all(t.untyped_storage().data_ptr() not in self._tables for t in tensors)

    def allreduce(self, tensors: list[torch.Tensor]) -> Any:
        self._check(tensors)
        return self._group.allreduce(tensors)

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        self._check(tensors)
        return self._group.send(tensors, rank, tag)

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        self._check(tensors)
        return self._group.recv(tensors, rank, tag)


def blocks(shards: list[Shard], me: str, device: str, is_filled: bool) -> list[Block]:
    """Weights and a row-wise state, which is the same in all columns."""
    found = []
    for region in (shard.region for shard in shards if shard.owner == me):
        weights, state = WEIGHTS[region.row0 : region.row1, region.col0 : region.col1], WEIGHTS[region.row0 : region.row1, 0]
        for what, values in (("weight", weights), ("state0", state)):
            mine = values.clone() if is_filled else torch.full_like(values, -1.0)
            found.append(Block("t", what, region, mine.to(device)))
    return found


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("source", ["device", "host"])
@pytest.mark.parametrize("old, new", [(by_rows, by_cols), (by_cols, by_rows)])
def test_values_reach_a_device_through_the_host(
    old: list[Shard], new: list[Shard], source: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device == "cpu":
        monkeypatch.setattr(module, "_is_on_host", lambda values: False)  # the CPU simulates the GPU
    monkeypatch.setattr(module, "CHUNK_BYTES", 1 << 10)
    store = dist.HashStore()  # type: ignore[attr-defined]

    def work(me: str) -> tuple[ExchangeStats, list[Block]]:
        group = dist.ProcessGroupGloo(store, WORKERS.index(me), 2)  # type: ignore[call-arg]
        mine = blocks(old, me, device if source == "device" else "cpu", is_filled=True)  # a snapshot is in the host's memory
        wanted = blocks(new, me, device, is_filled=False)
        host: Any = HostGroup(group, [block.values for block in (*mine, *wanted)])
        return exchange(host, WORKERS, me, plan_moves({"t": old}, {"t": new}), mine, wanted), wanted

    with ThreadPoolExecutor(2) as threads:
        results = list(threads.map(work, WORKERS, timeout=60))
    for me, (stats, found) in zip(WORKERS, results, strict=True):
        assert stats.sent_bytes > 0
        for block, expected in zip(found, blocks(new, me, "cpu", is_filled=True), strict=True):
            assert block.values.device.type == device
            torch.testing.assert_close(block.values.cpu(), expected.values)
