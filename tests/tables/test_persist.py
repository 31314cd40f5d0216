"""Parts of snapshots are copied to disk completely or not at all, by a background process."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from lightning_dlrover.tables import elastic as elastic_module
from lightning_dlrover.tables import persist as module
from lightning_dlrover.tables.elastic import ElasticTables
from lightning_dlrover.tables.exchange import Block
from lightning_dlrover.tables.growing import GrowingTables
from lightning_dlrover.tables.layout import Region
from lightning_dlrover.tables.persist import NUM_KEPT, Persister, keep_newest, persist
from lightning_dlrover.tables.snapshot_store import SnapshotStore, newest_complete, part_header
from lightning_dlrover.tables.snapshots import SnapshotConfig, Snapshots
from tests.support.waiting import eventually


def write_part(store: SnapshotStore, batch: int, value: float, members: tuple[str, ...] = ("a",)) -> tuple[Path, Path]:
    """A complete part of a store, and its place on disk."""
    block = Block("t", "weight", Region(0, 100, 0, 8), torch.full((100, 8), value))
    writer = store.begin(part_header(batch, 1, members, store.holder, {}, [block], 5))
    writer.put([block], b"state")
    paths = store.on_disk(writer.commit().header.name)
    assert paths is not None
    return paths


def make_store(tmp_path: Path, holder: str = "a") -> SnapshotStore:
    (tmp_path / "memory").mkdir(exist_ok=True)
    return SnapshotStore("job", holder, 1 << 24, tmp_path / "disk", tmp_path / "memory")


def test_a_part_on_disk_is_read_when_memory_is_lost(tmp_path: Path) -> None:
    for holder in ("a", "b"):
        assert persist(*write_part(make_store(tmp_path, holder), 7, 3.0, ("a", "b")))
    for file in (tmp_path / "memory").rglob("*-*-*"):
        if file.is_file():
            file.unlink()
    parts = make_store(tmp_path, "c").parts()
    assert {p.header.owner for p in parts} == {"a", "b"}
    assert newest_complete({"c": [p.header for p in parts]}) == (1, 7)
    for part in parts:
        assert torch.equal(part.blocks()[0].values, torch.full((100, 8), 3.0))
        assert part.state().numpy().tobytes() == b"state"


def test_a_rollback_reads_nothing_from_disk_that_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stores = {holder: make_store(tmp_path, holder) for holder in ("a", "b")}
    for store in stores.values():
        assert persist(*write_part(store, 7, 3.0, ("a", "b")))
    stores["b"].clear_memory()
    write_part(stores["a"], 7, 3.0, ("a", "b"))  # only this part is in memory
    parts = make_store(tmp_path, "c").parts()
    assert sorted((p.header.owner, p.is_in_memory) for p in parts) == [("a", False), ("a", True), ("b", False)]
    read: list[int] = []

    def note(group: object, members: object, me: object, moves: object, blocks: list[Block], new: object, _: object) -> None:
        read.extend(block.values.data_ptr() for block in blocks)
        raise RuntimeError("far enough")

    monkeypatch.setattr(elastic_module, "exchange", note)
    elastic = ElasticTables.__new__(ElasticTables)
    elastic._world = SimpleNamespace(worker_id="c", num_fits=1)  # type: ignore[assignment]
    elastic._fit = 1
    elastic._first_round = 0
    elastic._snapshots = SimpleNamespace(store=SimpleNamespace(parts=lambda: parts), stop=lambda: None)  # type: ignore[assignment]
    elastic.tables = SimpleNamespace(build=lambda *_: None, blocks=list, growing=GrowingTables(torch.nn.Module()))  # type: ignore[assignment]
    elastic._wrap_dense = lambda module, ignored: module
    formation: Any = SimpleNamespace(round=SimpleNamespace(members=["c"], number=2), size=1, rank=0)
    with pytest.raises(RuntimeError, match="far enough"):
        elastic.roll_back(formation)
    wanted = [p for p in parts if p.is_in_memory or p.header.owner == "b"]
    assert sorted(read) == sorted(p.blocks()[0].values.data_ptr() for p in wanted)


def test_a_part_that_is_overwritten_while_it_is_copied_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make_store(tmp_path)
    source, target = write_part(store, 1, 1.0)
    fsync = os.fsync

    def overwrite(fd: int) -> None:
        fsync(fd)
        write_part(store, 2, 2.0)
        write_part(store, 3, 3.0)  # reuses the slot of the first one

    monkeypatch.setattr(os, "fsync", overwrite)
    assert not persist(source, target)
    assert list(target.parent.iterdir()) == []


def test_copy_killed_before_verification_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make_store(tmp_path)
    source, target = write_part(store, 1, 1.0)

    def killed(fd: int) -> None:
        raise SystemExit

    monkeypatch.setattr(os, "fsync", killed)
    with pytest.raises(SystemExit):
        persist(source, target)
    assert [path.stat().st_size for path in target.parent.iterdir()] == [source.stat().st_size]
    store.clear_memory()
    assert make_store(tmp_path, "c").parts() == []


def test_a_missing_part_is_ignored(tmp_path: Path) -> None:
    source, target = write_part(make_store(tmp_path), 1, 1.0)
    source.unlink()
    assert not persist(source, target)
    assert list(target.parent.iterdir()) == []


def test_only_the_newest_parts_stay_on_disk(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    targets = []
    for batch in range(5):
        source, target = write_part(store, batch, float(batch))
        assert persist(source, target)
        keep_newest(target)
        targets.append(target)
    assert [t.exists() for t in targets] == [False] * (5 - NUM_KEPT) + [True] * NUM_KEPT
    assert not targets[0].parent.exists()


def put_on_disk(tmp_path: Path, holder: str, batch: int, members: tuple[str, ...]) -> Path:
    source, target = write_part(make_store(tmp_path, holder), batch, float(batch), members)
    assert persist(source, target)
    keep_newest(target)
    return target.parent


def test_parts_of_departed_workers_go_once_newer_snapshots_are_complete(tmp_path: Path) -> None:
    for batch in (1, 2):
        for holder in ("gone", "a"):
            put_on_disk(tmp_path, holder, batch, ("gone", "a"))
    first, second = (put_on_disk(tmp_path, "a", batch, ("a", "b")) for batch in (3, 4))
    folders = first.parent
    assert [len(list(folder.iterdir())) for folder in sorted(folders.iterdir())] == [2, 2, 1, 1]  # b is slower
    for batch in (3, 4):
        put_on_disk(tmp_path, "b", batch, ("a", "b"))
    assert sorted(folders.iterdir()) == [first, second]


def test_slow_disk_always_leaves_a_complete_snapshot(tmp_path: Path) -> None:
    for holder in ("fast", "slow"):
        put_on_disk(tmp_path, holder, 1, ("fast", "slow"))
    for batch in range(2, 9):
        put_on_disk(tmp_path, "fast", batch, ("fast", "slow"))
    parts = [p for p in make_store(tmp_path, "c").parts() if not p.is_in_memory]
    assert newest_complete({"c": [p.header for p in parts]}) is not None
    assert sorted(p.header.batch for p in parts) == [1, 1, 7, 8]


def copying() -> list[psutil.Process]:
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):  # a process of another test is ending
            if module.__name__ in child.cmdline():
                found.append(child)
    return found


def test_the_worker_continues_while_a_process_of_low_priority_copies(tmp_path: Path) -> None:
    store, persister = make_store(tmp_path), Persister()
    source, target = write_part(store, 1, 1.0)
    started = time.perf_counter()
    persister.persist(source, target)
    assert time.perf_counter() - started < 1.0
    (process,) = copying()
    eventually(target.exists, "the copy")
    assert process.nice() == 19
    process.kill()  # another one replaces it
    process.wait(10)
    source, target = write_part(store, 2, 2.0)
    persister.persist(source, target)
    persister.persist(source, target)
    eventually(target.exists, "the copy of the second process")
    persister.close()
    assert not copying()


def test_a_persister_is_busy_until_all_parts_are_copied_and_no_longer(tmp_path: Path) -> None:
    store, persister = make_store(tmp_path), Persister()
    assert not Persister().is_busy
    persister.persist(*write_part(store, 1, 1.0))
    eventually(lambda: not persister.is_busy, "the end of the first copy")
    assert persister._process is not None
    persister._process.send_signal(signal.SIGSTOP)  # a copy may end within a millisecond
    persister.persist(*write_part(store, 2, 1.0))
    assert persister.is_busy
    persister.persist(tmp_path / "nothing", tmp_path / "disk" / "no" / "x")
    assert persister.is_busy
    persister._process.send_signal(signal.SIGCONT)
    eventually(lambda: not persister.is_busy, "the end of the copy, and of what could not be copied")
    assert len(list((tmp_path / "disk").rglob("*-*-0"))) == 2
    persister.persist(*write_part(store, 3, 1.0))
    persister._process.kill()
    eventually(lambda: not persister.is_busy, "the end of the process")
    persister.close()


def test_snapshot_being_written_to_disk_is_not_overwritten(tmp_path: Path) -> None:
    world: Any = SimpleNamespace(worker_id="a")
    config = SnapshotConfig(1e-9, memory=tmp_path, disk=tmp_path / "disk", disk_interval_s=1000.0)
    snapshots = Snapshots(world, make_store(tmp_path), config)
    persister: Any = SimpleNamespace(is_busy=True)
    snapshots._persister = persister
    snapshots._number = snapshots._counted = snapshots._number_for_disk = 5
    assert snapshots.wishes()[1] == 1  # goes into the other slot
    snapshots._number = snapshots._counted = 6
    assert snapshots.wishes()[1] == 0
    snapshots._on_disk_at -= 1001.0  # looks like a hanging copy
    assert snapshots.wishes()[1] == 1
    snapshots._on_disk_at += 1001.0
    persister.is_busy = False
    assert snapshots.wishes()[1] == 1


def test_finished_job_does_not_wait_for_a_useless_copy(tmp_path: Path) -> None:
    world: Any = SimpleNamespace(worker_id="a")
    snapshots = Snapshots(world, make_store(tmp_path), SnapshotConfig(memory=tmp_path, disk=tmp_path / "disk"))
    fifo = tmp_path / "slow"
    os.mkfifo(fifo)
    snapshots._persister.persist(fifo, tmp_path / "disk" / "1" / "x")  # blocks, because the fifo has no writer
    started = time.monotonic()
    snapshots.close(lambda: True)
    assert time.monotonic() - started < 10.0


def test_the_process_ends_with_its_worker(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from lightning_dlrover.tables.persist import Persister\n"
        "p = Persister(); p.persist(Path('nothing'), Path(sys.argv[1]) / 'x'); print(p._process.pid, flush=True); input()"
    )
    worker = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert worker.stdout is not None
    pid = int(worker.stdout.readline())
    worker.send_signal(signal.SIGKILL)
    worker.wait(10)
    eventually(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie", "the end of the process")
