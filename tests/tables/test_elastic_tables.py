"""A worker's handling of its tables when a round or a `fit` begins or ends."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torchrec", reason="sharded tables need torchrec")

import torch

from lightning_dlrover.rdzv.job.events import Event, SnapshotLost
from lightning_dlrover.tables import elastic as module
from lightning_dlrover.tables.elastic import ElasticTables
from lightning_dlrover.tables.exchange import Block
from lightning_dlrover.tables.growing import GrowingTables
from lightning_dlrover.tables.layout import Region
from lightning_dlrover.tables.snapshot_store import PartHeader, SnapshotStore, part_header
from lightning_dlrover.tables.snapshots import SnapshotConfig


def elastic_with(headers: list[PartHeader], worker_id: str, **world: Any) -> tuple[ElasticTables, list[str]]:
    """Return tables whose snapshots have parts with these headers, and a list of the snapshots' stops."""
    stops: list[str] = []
    parts = [SimpleNamespace(header=header, is_in_memory=True) for header in headers]
    elastic = ElasticTables.__new__(ElasticTables)
    elastic._world = SimpleNamespace(worker_id=worker_id, num_fits=1, **world)  # type: ignore[assignment]
    elastic._fit, elastic._first_round = 1, 0
    elastic._snapshots = SimpleNamespace(  # type: ignore[assignment]
        store=SimpleNamespace(parts=lambda: parts), stop=lambda: stops.append("stop")
    )
    return elastic, stops


def test_unfinished_copy_stops_before_a_rollback(monkeypatch: pytest.MonkeyPatch) -> None:
    elastic, calls = elastic_with([part_header(5, 1, ["a"], "a", {}, [], 0)], "a")

    def replan(*_: object) -> None:
        calls.append("replan")
        raise RuntimeError("far enough")

    monkeypatch.setattr(module, "replan", replan)
    formation: Any = SimpleNamespace(round=SimpleNamespace(members=["a"], number=2), size=1, rank=0)
    with pytest.raises(RuntimeError, match="far enough"):
        elastic.roll_back(formation)
    assert calls == ["stop", "replan"]


def test_snapshot_with_lost_parts_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    events: list[tuple[Event, str]] = []
    headers = [part_header(5, 1, ["a", "b", "c"], owner, {}, [], 0) for owner in ("a", "b")]
    config = SimpleNamespace(run_id="r")
    elastic, _ = elastic_with(headers, "d", config=config, event=lambda event, text: events.append((event, text)))
    formation: Any = SimpleNamespace(round=SimpleNamespace(members=["d"], number=2), size=1, rank=0)
    assert elastic.roll_back(formation) is None
    text = "the snapshot of batch 5 cannot be used: no worker holds the parts of c"
    assert events == [(SnapshotLost(2, 5, ["c"]), text)]
    assert text in caplog.text


def test_workers_initialise_tables_the_same_way_with_any_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "all_gather", lambda formation, mine: [[3, ["t"]], mine])
    monkeypatch.setattr(module.dist, "group", SimpleNamespace(WORLD=None))  # type: ignore[attr-defined]
    seeds: list[tuple[Any, ...]] = []
    tables: Any = SimpleNamespace(
        is_built=False,
        first_plan=lambda members: {},
        build=lambda *_: None,
        given=list,
        initialise=lambda *arguments: seeds.append(arguments),
        blocks=list,
    )
    elastic = ElasticTables.__new__(ElasticTables)
    elastic.tables, elastic._wrap_dense = tables, lambda module, ignored: module
    elastic._snapshots, elastic._is_warm = None, True
    elastic._world = SimpleNamespace(worker_id="b", num_fits=1)  # type: ignore[assignment]
    formation: Any = SimpleNamespace(round=SimpleNamespace(members=["a", "b"], number=1), size=2, rank=1)
    elastic.start(formation, 4)
    assert seeds == [(3, ["t"], None, ["a", "b"], "b")]


def tables_of(rows: torch.Tensor) -> Any:
    """Simulates `ShardedTables` with one table of one worker, without lookups."""
    block = Block("t", "weight", Region(0, len(rows), 0, rows.shape[1]), rows)
    touched = SimpleNamespace(
        is_tracked=lambda block: False,
        begin_copy=lambda blocks: None,
        end_copy=list,
        since=lambda *_: None,
        mark=lambda moment: None,
        close=lambda: None,
    )
    return SimpleNamespace(
        track=lambda: touched,
        blocks=lambda: [block],
        growing=GrowingTables(torch.nn.Module()),
        counters=dict,
        forget_given=lambda: None,
        parameter_names=set,
        module=torch.nn.Linear(1, 1),
        plan={},
        num_bytes=rows.nbytes,
        device=torch.device("cpu"),
    )


def test_loss_in_a_later_fit_does_not_lead_back_into_the_earlier(tmp_path: Path) -> None:
    """A later `fit` in the same round counts its batches from 0: the earlier one's snapshots must not compare as newer."""
    record = SimpleNamespace(members=["w0"], number=1, kind="start")
    formation: Any = SimpleNamespace(round=record, size=1, rank=0)
    view = SimpleNamespace(job=SimpleNamespace(created_at=1.0), round=record)
    world: Any = SimpleNamespace(
        worker_id="w0",
        num_fits=0,
        config=SimpleNamespace(max_workers=1, prefix="p", run_id="r"),
        membership=SimpleNamespace(view=view, on_this_host=dict, shared=SimpleNamespace(put_snapshot=lambda record: None)),
        formation=formation,
        wishes=[],
        event=lambda *_: None,
    )
    disk = tmp_path / "disk"
    disk.mkdir()
    config = SnapshotConfig(interval_s=1e-6, memory=tmp_path, disk=disk, disk_interval_s=0.0)
    elastic = ElasticTables(tables_of(torch.zeros(4, 2)), world, config, lambda module, ignored: module)
    elastic._is_whole(formation)

    def vote(batch: int) -> bool:
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            world.wishes = elastic.wishes()
            if elastic.voted(batch, lambda: b"state"):
                return True
            time.sleep(0.01)
        return False

    def batches() -> set[int]:
        assert elastic._snapshots is not None
        return {part.header.batch for part in elastic._snapshots.store.parts()}

    world.num_fits = 1
    assert vote(100)
    assert vote(200)
    last_vote = [2, 1, 1, 0, 0]  # its result arrives in the next fit
    elastic._snapshots._work.result(10)  # type: ignore[union-attr]
    assert batches() == {100, 200}
    world.num_fits, world.wishes = 2, last_vote
    assert not elastic.voted(0, lambda: b"state")
    assert batches() == set()
    assert elastic.roll_back(formation) is None
    assert vote(3)
    assert vote(5)
    elastic._snapshots._work.result(10)  # type: ignore[union-attr]
    assert batches() == {3, 5}
    other = SnapshotStore("p/r", "w1", 1 << 28, disk, tmp_path, "1.0")  # store of a process that is still in the first fit
    assert other.parts() == []
    assert batches() == {3, 5}
    elastic._snapshots.close(lambda: True)  # type: ignore[union-attr]
