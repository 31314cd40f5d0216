"""A worker's handling of its snapshots when a round ends."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torchrec", reason="sharded tables need torchrec")

import torch
from torch._C._distributed_c10d import HashStore
from torch.distributed import ProcessGroupGloo

from lightning_dlrover.rdzv.job.events import Event, SnapshotCompleted, SnapshotFailed
from lightning_dlrover.rdzv.job.folders import short
from lightning_dlrover.rdzv.job.records import Notice, SnapshotRecord
from lightning_dlrover.rdzv.membership.rounds import WorkerView
from lightning_dlrover.tables import snapshot_store as snapshot_module
from lightning_dlrover.tables import snapshot_store as store_module
from lightning_dlrover.tables import snapshots as module
from lightning_dlrover.tables.exchange import Block
from lightning_dlrover.tables.growing import GrowingTables
from lightning_dlrover.tables.layout import Region
from lightning_dlrover.tables.snapshot_store import SnapshotError, SnapshotStore, part_header
from lightning_dlrover.tables.snapshots import SnapshotConfig, Snapshots

ROWS = 100_000


class EverythingTracked:
    """Simulates `TouchedRows` without any row trained meanwhile."""

    def is_tracked(self, block: Block) -> bool:
        return True

    def end_copy(self) -> list[tuple[Block, torch.Tensor, torch.Tensor]]:
        return []


@pytest.fixture
def snapshots(tmp_path: Path) -> Snapshots:
    world: Any = SimpleNamespace(worker_id="w0")
    return Snapshots(world, SnapshotStore("job", "w0", 1 << 28, root=tmp_path), SnapshotConfig(memory=tmp_path))


def test_stopped_copy_writes_nothing_into_the_next_rounds_memory(snapshots: Snapshots, monkeypatch: pytest.MonkeyPatch) -> None:
    block = Block("t", "weight", Region(0, ROWS, 0, 64), torch.ones(ROWS, 64))
    writer = snapshots.store.begin(part_header(1, 1, ["w0"], "w0", {}, [block], 0))
    snapshots._changed = [None]
    copy, is_copying = snapshot_module._copy, threading.Event()

    def slow_copy(there: torch.Tensor, here: torch.Tensor) -> None:
        is_copying.set()
        time.sleep(0.3)  # simulates cores that are busy with training
        copy(there, here)

    monkeypatch.setattr(snapshot_module, "_copy", slow_copy)
    touched: Any = EverythingTracked()
    work = snapshots._begin(snapshots._complete, 1, writer, [block], touched, snapshots._neighbours, snapshots._stopping)
    assert is_copying.wait(10)
    snapshots.stop()
    again = snapshots.store.begin(part_header(1, 2, ["w0"], "w0", {}, [block], 0))
    assert again.values.data_ptr() == writer.values.data_ptr()
    again.values.fill_(7)
    assert work.exception(10) is not None
    assert bool((again.values == 7).all())
    assert snapshots.store.parts() == []


def test_memory_being_touched_at_the_end_is_given_back(snapshots: Snapshots, monkeypatch: pytest.MonkeyPatch) -> None:
    is_touching, may_go_on = threading.Event(), threading.Event()

    def slow_touch(mapping: object) -> None:
        is_touching.set()
        assert may_go_on.wait(10)

    monkeypatch.setattr(store_module, "touch", slow_touch)
    tables: Any = SimpleNamespace(parameter_names=dict, module=torch.nn.Linear(2, 2))
    work = snapshots._begin(snapshots.make_room, tables, 1000)  # both slots, one after the other
    assert is_touching.wait(10)
    snapshots.close(lambda: True)
    may_go_on.set()
    work.result(10)
    assert not snapshots.store.folder.exists()


def test_job_that_ends_while_a_leaver_copies_to_disk_leaves_nothing(tmp_path: Path) -> None:
    world: Any = SimpleNamespace(worker_id="w1")
    disk = tmp_path / "disk"
    leaver = Snapshots(world, SnapshotStore("job", "w1", 1 << 28, disk, tmp_path), SnapshotConfig(memory=tmp_path, disk=disk))
    leaver.store.reserve("w1", 1000)
    (source,) = list(leaver.store.folder.glob("*-0"))
    answers = iter([False, True])

    def has_finished() -> bool:
        # Before the copy the job trains. After it the other worker has already cleaned up.
        if not (answer := next(answers)):
            leaver._persister.persist(source, disk / leaver.store.folder.name / "1-1" / source.name)
        else:
            assert (disk / leaver.store.folder.name / "1-1" / source.name).exists()
        return answer

    leaver.close(has_finished)
    assert not (disk / leaver.store.folder.name).exists()
    assert not leaver.store.folder.exists()


def test_every_group_of_neighbours_has_a_name_of_its_own_in_its_round(
    snapshots: Snapshots, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[tuple[int, str]] = []
    snapshots._world.connect = lambda round_, name, members: names.append((round_.number, name))  # type: ignore[assignment, method-assign, return-value]
    monkeypatch.setattr(module, "all_gather", lambda formation, host: [host] * 2)
    tables: Any = SimpleNamespace(
        track=lambda: None, blocks=list, parameter_names=set, module=SimpleNamespace(named_parameters=list)
    )
    for number in (1, 1, 2, 3, 3):
        formation: Any = SimpleNamespace(round=SimpleNamespace(members=["w0", "w1"], number=number), size=2, rank=0)
        snapshots.enter(formation, tables)
    assert len(set(names)) == 5


def test_memory_of_waiting_workers_stays_and_of_departed_ones_goes(snapshots: Snapshots, tmp_path: Path) -> None:
    for holder in ("gone", "spare"):
        SnapshotStore("job", holder, 1 << 28, root=tmp_path).reserve(holder, 1000)
    snapshots.store.reserve("w0", 1000)
    snapshots._world.membership = SimpleNamespace(  # type: ignore[assignment]
        on_this_host=lambda: {"w0": SimpleNamespace(state="active"), "spare": SimpleNamespace(state="ready")},
        shared=SimpleNamespace(put_snapshot=lambda record: None),
    )
    snapshots._world.event = lambda *_: None  # type: ignore[method-assign]
    snapshots._formation = SimpleNamespace(  # type: ignore[assignment]
        round=SimpleNamespace(members=["w0"], number=1), rank=0
    )
    snapshots._counted, snapshots._keep = 1, (1, 1)
    snapshots._counts(has_recovered=False)
    holders = {path.name.split("-")[0] for path in snapshots.store.folder.glob("*-*-*")}
    assert holders == {short(name) for name in ("w0", "spare")}


def workers_of_a_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int = 2, interval_s: float = 0.01
) -> tuple[list[Snapshots], Any, list[Event]]:
    """Workers of one round, each on its own host, with a table each and real connections; and what they report."""
    monkeypatch.setattr(module, "all_gather", lambda formation, host: [f"host{rank}" for rank in range(size)])
    events: list[Event] = []
    connections = HashStore()
    block = Block("t", "weight", Region(0, 100, 0, 8), torch.ones(100, 8))
    untracked = SimpleNamespace(
        is_tracked=lambda block: False,
        begin_copy=lambda blocks: None,
        end_copy=list,
        mark=lambda moment: None,
        since=lambda *_: None,
        close=lambda: None,
    )
    tables: Any = SimpleNamespace(
        track=lambda: untracked,
        blocks=lambda: [block],
        growing=GrowingTables(torch.nn.Module()),
        counters=dict,
        parameter_names=set,
        module=torch.nn.Linear(1, 1),
        plan={},
    )
    workers = []
    for rank in range(size):
        membership = SimpleNamespace(on_this_host=dict, shared=SimpleNamespace(put_snapshot=events.append), view=WorkerView())
        world: Any = SimpleNamespace(
            worker_id=f"w{rank}",
            event=lambda event, text: events.append(event),
            membership=membership,
            connect=lambda round_, name, members, rank=rank: ProcessGroupGloo(connections, rank, size, timedelta(seconds=10)),
        )
        root = tmp_path / f"host{rank}"
        root.mkdir()
        config = SnapshotConfig(interval_s=interval_s, memory=root)
        workers.append(Snapshots(world, SnapshotStore("job", f"w{rank}", 1 << 28, root=root), config))
    record = SimpleNamespace(members=[f"w{rank}" for rank in range(size)], number=1)
    formations: list[Any] = [SimpleNamespace(round=record, size=size, rank=rank) for rank in range(size)]
    with ThreadPoolExecutor(size) as pool:
        list(pool.map(lambda worker, formation: worker.enter(formation, tables), workers, formations))
    return workers, tables, events


def vote_until(workers: Sequence[Snapshots], tables: Any, is_done: Callable[[], bool]) -> None:
    """Vote, as the workers do between two steps, until something has happened."""
    for batch in itertools.count(1):
        wishes = [min(each) for each in zip(*(worker.wishes() for worker in workers), strict=True)]
        for worker in workers:
            worker.voted(wishes[0], bool(wishes[1]), False, batch, tables, lambda: b"state", wishes[3] == -wishes[4])
        if is_done():
            return
        assert batch < 3000, [vars(worker) for worker in workers]
        time.sleep(0.005)  # a step


def test_snapshots_are_tried_again_after_memory_was_full_on_one_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workers, tables, events = workers_of_a_round(tmp_path, monkeypatch)
    vote_until(workers, tables, lambda: all(worker._counted >= 2 for worker in workers))
    counted, taken = workers[0]._counted, workers[1].store.max_bytes
    workers[1].store.max_bytes = 1000
    vote_until(workers, tables, lambda: workers[1]._num_failures >= 3)
    assert [worker._counted for worker in workers] <= [counted + 1] * 2
    assert not any(worker._stopping.is_set() for worker in workers)
    failed = [event for event in events if isinstance(event, SnapshotFailed)]
    assert [(event.worker_id, "max_bytes" in event.problem) for event in failed] == [("w1", True)]
    workers[1].store.max_bytes = taken
    last = workers[0]._number
    vote_until(workers, tables, lambda: all(worker._counted > last for worker in workers))
    assert isinstance(events[-2], SnapshotCompleted)
    assert isinstance(events[-1], SnapshotRecord)
    assert events[-1].batch == workers[0]._keep[1]  # type: ignore[index]
    for worker in workers:  # every part has a copy on the other host
        assert {p.header.owner for p in worker.store.parts() if p.header.name == worker._keep} == {"w0", "w1"}
        worker.stop()


def owners_of_parts(worker: Snapshots) -> set[str]:
    """Owners of the parts of the newest snapshot that counts which a worker holds."""
    return {part.header.owner for part in worker.store.parts() if part.header.name == worker._keep}


def test_parts_are_copied_to_workers_that_stay_before_another_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workers, tables, _ = workers_of_a_round(tmp_path, monkeypatch, size=3, interval_s=1000.0)
    vote_until(workers, tables, lambda: all(worker._counted == 1 for worker in workers))
    assert [owners_of_parts(worker) for worker in workers] == [{"w0", "w2"}, {"w1", "w0"}, {"w2", "w1"}]
    see_leave(workers[:2], replacements=["w2"])
    assert [worker.wishes()[1] for worker in workers] == [1, 1, 0]  # the third has not seen it yet
    see_leave(workers, replacements=["w2"])
    vote_until(workers, tables, lambda: all(worker._counted == 2 for worker in workers))
    assert [owners_of_parts(worker) for worker in workers] == [{"w0", "w1", "w2"}, {"w1", "w0"}, {"w2"}]
    assert [worker.wishes()[1] for worker in workers] == [0, 0, 0]
    see_leave(workers)  # it does not leave after all
    vote_until(workers, tables, lambda: all(worker._counted == 3 for worker in workers))
    assert [owners_of_parts(worker) for worker in workers] == [{"w0", "w2"}, {"w1", "w0"}, {"w2", "w1"}]
    for worker in workers:
        worker.stop()


def test_workers_that_see_different_leaves_keep_their_neighbours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workers, tables, _ = workers_of_a_round(tmp_path, monkeypatch, size=3, interval_s=1000.0)
    vote_until(workers, tables, lambda: all(worker._counted == 1 for worker in workers))
    for worker, name in zip(workers, ("w0", "w1", "w2"), strict=True):
        see_leave([worker], drains=[name])
    vote_until(workers, tables, lambda: all(worker._counted == 2 for worker in workers))
    assert [owners_of_parts(worker) for worker in workers] == [{"w0", "w2"}, {"w1", "w0"}, {"w2", "w1"}]
    for worker in workers:
        worker.stop()


def test_one_more_snapshot_is_taken_right_before_a_node_is_taken_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LAST_S", 0.6)
    workers, tables, _ = workers_of_a_round(tmp_path, monkeypatch, interval_s=1000.0)
    vote_until(workers, tables, lambda: all(worker._counted == 1 for worker in workers))
    at = time.time() + 1.2
    see_leave(workers, taken_at={"w1": at})
    vote_until(workers, tables, lambda: all(worker._counted == 2 for worker in workers))  # at the notice
    assert time.time() < at - 0.6
    vote_until(workers, tables, lambda: all(worker._counted == 3 for worker in workers))
    assert at - 0.6 <= time.time() < at
    assert [worker.wishes()[1] for worker in workers] == [0, 0]
    for worker in workers:
        worker.stop()


def see_leave(workers: Sequence[Snapshots], **seen: Any) -> None:
    for worker in workers:
        membership: Any = worker._world.membership
        membership.view = WorkerView(notice=Notice(1, **seen))


def test_wait_before_the_next_try_doubles_up_to_a_limit(snapshots: Snapshots) -> None:
    waits = []
    snapshots._formation = SimpleNamespace(round=SimpleNamespace(number=1))  # type: ignore[assignment]
    snapshots._world.event = lambda *_: None  # type: ignore[method-assign]
    for _ in range(9):
        before = time.monotonic()
        snapshots._failed(SnapshotError("no memory"))
        waits.append(round(snapshots._retry_at - before))
    assert waits == [5, 10, 20, 40, 80, 160, 300, 300, 300]
    assert not snapshots._stopping.is_set()
    snapshots._failed(RuntimeError("connection reset"))
    assert snapshots._stopping.is_set()


def test_rows_are_noted_once_across_two_fits_of_the_same_tables(
    snapshots: Snapshots,
) -> None:
    following: set[int] = set()

    made: list[int] = []

    def track() -> Any:
        made.append(number := len(made))
        following.add(number)
        return SimpleNamespace(close=lambda: following.discard(number))

    tables: Any = SimpleNamespace(track=track, blocks=list, parameter_names=set, module=torch.nn.Linear(1, 1))
    formation: Any = SimpleNamespace(round=SimpleNamespace(members=["w0"], number=1), size=1, rank=0)
    snapshots.enter(formation, tables)
    snapshots.forget(2)
    snapshots.enter(formation, tables)
    assert following == {1}
