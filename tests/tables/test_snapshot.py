"""A part of a snapshot is complete or absent. The current one stays, and foreign files are neither read nor changed."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import struct
import time
from collections.abc import Callable
from functools import reduce
from operator import getitem
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_dlrover.rdzv.job.folders import JOB_FILE, remove_snapshots, short
from lightning_dlrover.rdzv.job.records import Keys
from lightning_dlrover.tables.elastic import ElasticTables
from lightning_dlrover.tables.exchange import Block
from lightning_dlrover.tables.layout import Region
from lightning_dlrover.tables.persist import persist
from lightning_dlrover.tables.snapshot_store import (
    Part,
    PartHeader,
    PartWriter,
    SnapshotError,
    SnapshotStore,
    holders_of,
    newest_complete,
    part_header,
)
from lightning_dlrover.tables.snapshots import SnapshotConfig

JOB = "/dlrover/job"
MEMBERS = ("w0", "w1")
PREFIX = struct.Struct("<8sQQQ")


def blocks(value: float, rows: int = 5) -> list[Block]:
    region = Region(3, 3 + rows, 0, 4)
    return [
        Block("m.t0", "weight", region, torch.full((rows, 4), value)),
        Block("m.t0", "state0", region, torch.full((rows,), value + 1)),
        Block("m.t1", "weight", Region(0, 2, 4, 8), torch.full((2, 4), value + 2, dtype=torch.float16)),
        Block("m.t2", "weight", Region(0, 0, 0, 4), torch.empty(0, 4)),
    ]


def header_of(
    batch: int, round_: int = 1, owner: str = "w0", members: tuple[str, ...] = MEMBERS, state: bytes = b"state"
) -> PartHeader:
    return part_header(batch, round_, members, owner, {"m.t0": {"kind": "row_wise"}}, blocks(0.0), len(state))


def begun(store: SnapshotStore, batch: int, keep: tuple[int, int] | None = None, **kwargs: Any) -> PartWriter:
    """A part without its final mark."""
    writer = store.begin(header_of(batch, **kwargs), keep)
    writer.put(blocks(float(batch)), b"state")
    return writer


def write(store: SnapshotStore, batch: int, keep: tuple[int, int] | None = None, **kwargs: Any) -> Part:
    return begun(store, batch, keep, **kwargs).commit()


def names(store: SnapshotStore, owner: str = "w0") -> list[tuple[int, int]]:
    return sorted(part.header.name for part in store.parts() if part.header.owner == owner)


@pytest.fixture
def new_store(tmp_path: Path) -> Callable[..., SnapshotStore]:
    def make(holder: str = "w0", job: str = JOB, max_bytes: int | None = None) -> SnapshotStore:
        return SnapshotStore(job, holder, max_bytes, root=tmp_path)

    return make


MakeStore = Callable[..., SnapshotStore]


# --- reads equal writes --------------------------------------------------------------------------------------------------


def test_a_part_is_read_by_another_process_as_it_was_written(new_store: MakeStore) -> None:
    write(new_store(), 7)
    (part,) = new_store("w9").parts()  # maps the file anew
    assert part.header == header_of(7)
    assert bytes(part.state().numpy().tobytes()) == b"state"
    for found, expected in zip(part.blocks(), blocks(7.0), strict=True):
        assert (found.table, found.what, found.region) == (expected.table, expected.what, expected.region)
        assert found.values.dtype == expected.values.dtype
        assert torch.equal(found.values, expected.values)


@pytest.mark.parametrize("state", [b"", b"x", b"x" * 100_000])
def test_a_state_of_any_length_is_kept(new_store: MakeStore, state: bytes) -> None:
    store = new_store()
    writer = store.begin(header_of(1, state=state))
    writer.put(blocks(1.0), state)
    writer.commit()
    (part,) = new_store().parts()
    assert part.state().numpy().tobytes() == state


@given(batch=st.integers(0, 2**47), round_=st.integers(0, 2**31), owner=st.text(), members=st.lists(st.text(), max_size=5))
def test_a_header_is_decoded_as_it_was_encoded(batch: int, round_: int, owner: str, members: list[str]) -> None:
    header = part_header(batch, round_, members, owner, {"t": {"kind": "row_wise", "rows": 3}}, blocks(0.0), 17)
    assert PartHeader.decode(header.encode()) == header


# --- complete or not there ---------------------------------------------------------------------------------------------------


def test_a_part_without_a_commit_is_not_found(new_store: MakeStore) -> None:
    writer = begun(new_store(), 3)
    assert new_store().parts() == []
    writer.commit()
    assert names(new_store()) == [(1, 3)]


def test_the_former_part_is_valid_until_the_next_one_is(new_store: MakeStore) -> None:
    store = new_store()
    write(store, 1)
    write(store, 2)
    writer = begun(store, 3)
    assert names(new_store()) == [(1, 2)]
    writer.commit()
    assert names(new_store()) == [(1, 2), (1, 3)]


def test_an_owner_has_two_slots_however_many_parts_it_writes(new_store: MakeStore) -> None:
    store = new_store()
    for batch in range(1, 20):
        write(store, batch)
        assert names(store) == [(1, b) for b in (batch - 1, batch) if b]
    assert len(list(store.folder.glob("*-*-*"))) == 2


def test_copies_of_other_parts_and_other_holders_have_slots_of_their_own(new_store: MakeStore) -> None:
    first, second = new_store("w0"), new_store("w1")
    for batch in (1, 2):
        for store in (first, second):
            for owner in MEMBERS:
                write(store, batch, owner=owner)
    for owner in MEMBERS:
        assert names(new_store(), owner) == [(1, 1), (1, 1), (1, 2), (1, 2)]


def test_the_snapshot_that_counts_stays_though_there_is_a_newer_one(new_store: MakeStore) -> None:
    store = new_store()
    write(store, 10)  # the current snapshot
    write(store, 20)  # the others did not complete it, so all have gone back to the previous one
    write(store, 11, keep=(1, 10), round_=2)
    assert names(store) == [(1, 10), (2, 11)]


@given(
    written=st.lists(st.tuples(st.booleans(), st.booleans(), st.integers(0, 2)), max_size=12),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
def test_interruptions_never_damage_the_valid_snapshot(tmp_path: Path, written: list[tuple[bool, bool, int]]) -> None:
    """Each entry: is it committed, does it then count, do all change to another round."""
    store = SnapshotStore(f"{JOB}/{time.monotonic_ns()}", "w0", root=tmp_path)
    keep, round_ = None, 1
    for batch, (is_committed, counts, rounds) in enumerate(written, 1):
        round_ += rounds
        writer = begun(store, batch, keep, round_=round_)
        assert keep is None or keep in names(store)
        if is_committed:
            writer.commit()
            keep = (round_, batch) if counts or keep is None else keep
        assert keep is None or keep in names(store)
    store.clear()


def test_a_part_grows_when_a_worker_is_given_more_rows(new_store: MakeStore) -> None:
    store = new_store()
    for batch, rows in enumerate([5, 5000, 50_000, 3], 1):
        header = part_header(batch, 1, MEMBERS, "w0", {}, blocks(0.0, rows), 5)
        writer = store.begin(header)
        writer.put(blocks(float(batch), rows), b"state")
        writer.commit()
        part = next(p for p in new_store().parts() if p.header.batch == batch)
        assert torch.equal(part.blocks()[0].values, torch.full((rows, 4), float(batch)))


def test_reserved_part_is_invisible_and_needs_no_more_room(new_store: MakeStore) -> None:
    store = new_store()
    store.reserve("w0", 100_000)
    reserved = store.num_bytes
    assert store.parts() == []
    write(store, 1)
    write(store, 2)
    assert names(new_store()) == [(1, 1), (1, 2)]
    assert store.num_bytes == reserved


def test_reserving_room_keeps_the_parts_that_are_there(new_store: MakeStore) -> None:
    write(new_store(), 1)
    again = new_store()  # the same worker in another round, or another one with the same name
    again.reserve("w0", 1 << 20)
    assert names(again) == [(1, 1)]
    assert torch.equal(again.parts()[0].blocks()[0].values, blocks(1.0)[0].values)


# --- invalid parts ---------------------------------------------------------------------------------------------------------


@given(content=st.binary(max_size=300) | st.binary(max_size=300).map(lambda tail: PREFIX.pack(b"DLRSNAP1", 1, 20, 64) + tail))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
def test_garbage_is_not_a_part_and_harms_no_other(tmp_path: Path, content: bytes) -> None:
    store = SnapshotStore(f"{JOB}/{time.monotonic_ns()}", "w0", root=tmp_path)
    write(store, 1)
    (store.folder / "a-b-0").write_bytes(content)
    assert names(store) == [(1, 1)]
    write(store, 2)
    store.clear()
    assert not store.folder.exists()


NUMBERS = st.integers(-(2**64), 2**64) | st.sampled_from([0, -1, 2**63 - 1, 2**64 - 1])
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=5), children, max_size=3),
    max_leaves=5,
)


IN_BLOCK = ["table", "what", "shape", "dtype", "offset"]
DTYPES = st.sampled_from(["float64", "nn", "load", "complex64", "int1", "quint4x2"])
CHANGES = st.one_of(
    st.tuples(st.sampled_from([(f.name,) for f in dataclasses.fields(PartHeader) if f.name != "counters"]), JSON),
    st.tuples(st.sampled_from([("blocks", 0, name) for name in IN_BLOCK]), JSON | DTYPES | st.lists(NUMBERS, max_size=3)),
    st.tuples(st.sampled_from([("blocks", 0, "region", name) for name in ("row0", "row1", "col0", "col1")]), JSON),
)


@given(CHANGES)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=260)
def test_header_with_any_content_is_refused_or_readable(tmp_path: Path, change: tuple[tuple[Any, ...], object]) -> None:
    (*path, last), value = change
    data = dataclasses.asdict(header_of(1))
    reduce(getitem, path, data)[last] = value
    encoded = json.dumps(data).encode()
    start = -(-(PREFIX.size + len(encoded)) // 4096) * 4096
    content = (PREFIX.pack(b"DLRSNAP1", 1, len(encoded), start) + encoded).ljust(start, b"\0") + bytes(1024)
    _assert_file_refused_or_readable(tmp_path, content)


@given(length=st.integers(0, 2**64 - 1), start=st.integers(0, 2**64 - 1), is_complete=st.integers(0, 2**64 - 1))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
def test_file_with_any_header_is_refused_or_readable(tmp_path: Path, length: int, start: int, is_complete: int) -> None:
    encoded = header_of(1).encode()
    _assert_file_refused_or_readable(tmp_path, PREFIX.pack(b"DLRSNAP1", is_complete, length, start) + encoded + bytes(4096))


def _assert_file_refused_or_readable(tmp_path: Path, content: bytes) -> None:
    store = SnapshotStore(f"{JOB}/{time.monotonic_ns()}", "w0", root=tmp_path)
    write(store, 5)
    (store.folder / "a-b-0").write_bytes(content)
    parts = store.parts()
    assert (1, 5) in [part.header.name for part in parts]
    held = {"w0": [part.header for part in parts]}
    newest_complete(held)
    for part in parts:
        part.state()
        for block in part.blocks():
            flat = block.values.reshape(-1)  # values of any type
            assert flat.view(torch.uint8).numel() == block.values.nbytes
    store.clear()


def test_a_part_that_was_cut_short_is_not_a_part(new_store: MakeStore) -> None:
    store = new_store()
    write(store, 1)
    (path,) = store.folder.glob("*-*-*")
    content = path.read_bytes()
    for length in range(0, len(content), 97):
        path.write_bytes(content[:length])
        assert new_store().parts() == [], length


def test_other_files_in_the_folder_are_ignored(new_store: MakeStore) -> None:
    store = new_store()
    write(store, 1)
    (store.folder / "README").write_text("not ours")
    (store.folder / "x-y-z").mkdir()
    assert names(new_store()) == [(1, 1)]
    store.drop_others(["w0"], [])
    assert names(new_store()) == [(1, 1)]


# --- memory ----------------------------------------------------------------------------------------------------------------


def test_part_beyond_the_limit_is_refused(new_store: MakeStore) -> None:
    store = new_store(max_bytes=50_000)
    write(store, 1)
    header = part_header(2, 1, MEMBERS, "w0", {}, blocks(0.0, 10_000), 0)
    with pytest.raises(SnapshotError, match="max_bytes"):
        store.begin(header)
    assert names(store) == [(1, 1)]
    assert names(new_store()) == [(1, 1)]


def test_the_limit_holds_for_all_that_a_worker_holds(new_store: MakeStore) -> None:
    one = new_store("w8")
    write(one, 1, owner="w8")
    store = new_store(max_bytes=int(3.5 * one.num_bytes))
    for owner in ("w0", "w1", "w2"):
        write(store, 1, owner=owner)
    with pytest.raises(SnapshotError, match="max_bytes"):
        store.begin(header_of(2))
    assert store.num_bytes <= store.max_bytes
    assert names(store) == [(1, 1)]


def test_a_worker_that_has_given_rows_away_has_room_for_copies_of_others(new_store: MakeStore) -> None:
    store = new_store(max_bytes=100 << 20)

    def write_rows(owner: str, batch: int, mib: int) -> None:
        rows = [Block("t", "weight", Region(0, mib << 14, 0, 16), torch.full((mib << 14, 16), float(batch)))]
        writer = store.begin(part_header(batch, 1, MEMBERS, owner, {}, rows, 0))
        writer.put(rows)
        writer.commit()

    for batch in (1, 2):
        write_rows("w0", batch, 48)
    for batch in (3, 4, 5):
        for owner in ("w0", "w1", "w2"):
            write_rows(owner, batch, 12)
    assert store.num_bytes < 80 << 20
    for part in new_store("w9").parts():
        assert bool((part.blocks()[0].values == float(part.header.batch)).all())
        assert part.header.batch in (4, 5)


@pytest.mark.parametrize(
    "max_bytes, num_bytes, message", [(10 << 20, 8 << 20, "max_bytes"), (1 << 60, 1 << 50, "shared memory")]
)
def test_room_that_is_not_allowed_or_available_is_refused(
    new_store: MakeStore, max_bytes: int, num_bytes: int, message: str
) -> None:
    store = new_store(max_bytes=max_bytes)
    with pytest.raises(SnapshotError, match=message):
        store.reserve("w0", num_bytes)
    assert store.num_bytes == 0


def test_limit_is_half_of_the_free_memory_by_default(new_store: MakeStore, tmp_path: Path) -> None:
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    assert abs(new_store().max_bytes - free // 2) < 1 << 30
    assert new_store(max_bytes=5).max_bytes == 5


# --- ownership of a folder -----------------------------------------------------------------------------------------------


def test_a_folder_that_others_may_write_to_is_refused(new_store: MakeStore) -> None:
    folder = new_store().folder
    for path in (folder, folder.parent):
        path.chmod(0o770)
        with pytest.raises(SnapshotError, match="remove it"):
            new_store()
        path.chmod(0o700)
    new_store()


def test_a_link_or_file_in_the_place_of_the_folder_is_refused(new_store: MakeStore, tmp_path: Path) -> None:
    folder = new_store().folder
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    shutil.rmtree(folder)
    folder.symlink_to(elsewhere)
    with pytest.raises(SnapshotError, match="remove it"):
        new_store()
    folder.unlink()
    folder.write_text("")
    with pytest.raises(SnapshotError, match="remove it"):
        new_store()
    assert list(elsewhere.iterdir()) == []


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_another_user_is_refused(new_store: MakeStore) -> None:
    folder = new_store().folder
    os.chown(folder, 12345, 12345)
    with pytest.raises(SnapshotError, match="remove it"):
        new_store()


def test_system_without_shared_memory_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(SnapshotError, match="shared memory"):
        SnapshotStore(JOB, "w0", root=tmp_path / "nowhere")


def test_parts_are_readable_by_their_user_only(new_store: MakeStore) -> None:
    store = new_store()
    write(store, 1)
    assert store.folder.stat().st_mode & 0o077 == 0
    assert store.folder.parent.stat().st_mode & 0o077 == 0


def test_jobs_do_not_see_each_other(new_store: MakeStore) -> None:
    mine, other = new_store(), new_store(job="/dlrover/other")
    write(mine, 1)
    assert other.parts() == []
    other.drop_others([], [])
    other.clear()
    assert names(mine) == [(1, 1)]


# --- cleaning up -----------------------------------------------------------------------------------------------------------


def test_parts_of_departed_workers_and_unwanted_copies_are_dropped(new_store: MakeStore) -> None:
    for holder in ("w0", "w1", "w2"):
        for owner in ("w0", "w1", "w2"):
            write(new_store(holder), 1, owner=owner)
    store = new_store("w0")
    store.drop_others(["w0", "w1"], ["w1"])
    held = {(p.holder, p.header.owner) for p in store.parts()}
    w0, w1 = short("w0"), short("w1")  # w1 manages its own copies
    assert held == {(w0, "w0"), (w0, "w1"), (w1, "w0"), (w1, "w1"), (w1, "w2")}


def test_dropped_part_can_be_written_again(new_store: MakeStore) -> None:
    store = new_store()
    write(store, 1, owner="w1")
    new_store("w9").drop_others(["w9"], [])  # regards w0 as gone
    assert store.parts() == []
    write(store, 2, owner="w1")
    write(store, 3, owner="w1")
    assert names(new_store(), "w1") == [(1, 2), (1, 3)]


@pytest.mark.parametrize("what", ["its folder", "all folders"])
def test_part_removed_by_someone_else_is_written_again(new_store: MakeStore, what: str) -> None:
    store = new_store()
    for batch in (1, 2):
        write(store, batch)
    shutil.rmtree(store.folder if what == "its folder" else store.folder.parent)
    assert store.parts() == []
    for batch in (3, 4):
        write(store, batch)
    assert names(new_store()) == [(1, 3), (1, 4)]


def test_memory_that_cannot_be_written_is_an_error_of_the_snapshot(new_store: MakeStore, tmp_path: Path) -> None:
    store = new_store()
    shutil.rmtree(store.folder.parent)
    store.folder.parent.write_text("")
    with pytest.raises(SnapshotError):
        write(store, 1)


def test_a_part_that_is_held_in_hand_outlives_its_file(new_store: MakeStore) -> None:
    store = new_store()
    write(store, 4)
    (part,) = new_store("w9").parts()
    store.clear()
    assert not store.folder.exists()
    assert torch.equal(part.blocks()[0].values, blocks(4.0)[0].values)


def test_ended_job_leaves_nothing_with_any_order_of_cleanup(new_store: MakeStore) -> None:
    stores = [new_store(holder) for holder in ("w0", "w1", "w2")]
    for store in stores:
        write(store, 1)
    for store in stores:
        store.clear()
    assert not stores[0].folder.exists()


def test_closed_store_creates_no_file(new_store: MakeStore) -> None:
    store = new_store()
    write(store, 1)
    store.clear()
    for use in (lambda: write(store, 2), lambda: store.reserve("w1", 1000)):
        with pytest.raises(SnapshotError, match="has ended"):
            use()
    assert not store.folder.exists()


def test_leftovers_of_dead_jobs_are_swept_only_when_old(new_store: MakeStore) -> None:
    dead, mine = new_store(job="/dlrover/dead"), new_store()
    write(dead, 1)
    write(mine, 1)
    dead.close()  # does the same as the end of its process
    mine.sweep(older_than_s=60)
    assert names(dead) == [(1, 1)]
    _age(dead, 120)
    _age(mine, 120)
    mine.sweep(older_than_s=60)
    assert not dead.folder.exists()
    assert names(mine) == [(1, 1)]


def test_a_job_that_lives_for_long_is_not_swept(new_store: MakeStore) -> None:
    living = new_store(job="/dlrover/living")
    for batch in (1, 2):
        write(living, batch)
    _age(living, 120)
    write(living, 3)  # reuses memory that is already mapped
    living.close()
    new_store().sweep(older_than_s=60)
    assert names(living) == [(1, 2), (1, 3)]


@pytest.mark.parametrize("fit", [1, 2])
def test_job_with_a_living_worker_is_not_swept_however_old_its_parts(new_store: MakeStore, fit: int) -> None:
    waiting = new_store(job="/dlrover/waiting")
    if fit > 1:
        waiting.begin_fit(fit)
    write(waiting, 1)
    _age(waiting, 1e6)
    new_store().sweep(older_than_s=60)
    assert names(waiting) == [(1, 1)]
    waiting.close()
    new_store().sweep(older_than_s=60)
    assert not waiting.folder.exists()


@pytest.mark.parametrize("fit", [1, 2])
def test_snapshots_of_killed_workers_are_removed_by_another_process(tmp_path: Path, fit: int) -> None:
    stores = []
    for name in ("over", "other"):
        stores.append(SnapshotStore(f"/dlrover/{name}", "w0", disk=tmp_path / "disk", root=tmp_path, life="1"))
        if fit > 1:
            stores[-1].begin_fit(fit)
        write(stores[-1], 1)
        paths = stores[-1].on_disk((1, 1))
        assert paths is not None
        assert persist(*paths)
    over, other = stores
    remove_snapshots(Keys("over"), root=tmp_path)
    assert not over.folder.exists()
    assert [folder.name for folder in (tmp_path / "disk").iterdir()] == [other.folder.name]
    assert names(other) == [(1, 1), (1, 1)]  # one in memory, one on disk


@pytest.mark.parametrize("content", ["", "relative", "{victim}", "{victim}\0", "{victim}/../victim"])
def test_garbage_instead_of_a_path_on_disk_removes_nothing_else(tmp_path: Path, content: str) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    store = SnapshotStore("/dlrover/over", "w0", root=tmp_path)
    (store.folder / JOB_FILE).write_text(content.format(victim=victim))
    remove_snapshots(Keys("over"), root=tmp_path)
    assert not store.folder.exists()
    assert victim.exists()


def test_folder_that_others_may_write_to_is_not_cleaned_up(new_store: MakeStore, tmp_path: Path) -> None:
    store = new_store(job="/dlrover/over")
    store.folder.parent.chmod(0o777)
    remove_snapshots(Keys("over"), root=tmp_path)
    assert store.folder.exists()


def test_sweep_spares_others_leftovers_for_a_day(new_store: MakeStore, tmp_path: Path) -> None:
    other = new_store(job="/dlrover/other")
    write(other, 1)
    other.close()
    _age(other, 3600)
    world: Any = SimpleNamespace(
        worker_id="w0",
        num_fits=0,
        config=SimpleNamespace(max_workers=1, prefix="/dlrover", run_id="mine", history_ttl_s=60.0),
        membership=SimpleNamespace(view=SimpleNamespace(job=SimpleNamespace(created_at=1.0))),
    )
    tables: Any = None
    ElasticTables(tables, world, SnapshotConfig(memory=tmp_path), lambda module, ignored: module)
    assert names(other) == [(1, 1)]


def test_files_next_to_the_jobs_folders_do_not_stop_a_sweep(new_store: MakeStore) -> None:
    store = new_store()
    (store.folder.parent / "file").write_text("")
    dead = new_store(job="/dlrover/dead")
    dead.close()
    _age(dead, 120)
    store.sweep(older_than_s=60)
    assert not dead.folder.exists()


def _age(store: SnapshotStore, seconds: float) -> None:
    then = time.time() - seconds
    for path in (*store.folder.iterdir(), store.folder):
        os.utime(path, (then, then))


# --- which snapshot ---------------------------------------------------------------------------------------------------------


def test_newest_complete_snapshot_is_found() -> None:
    held = {
        "w0": [header_of(1), header_of(2), header_of(3, owner="w0")],
        "w1": [header_of(1, owner="w1"), header_of(2, owner="w1"), header_of(1, owner="w0")],
    }
    assert newest_complete(held) == (1, 2)
    assert holders_of((1, 2), held) == {"w0": ["w0"], "w1": ["w1"]}
    assert newest_complete({"w1": held["w1"]}) == (1, 1)
    assert holders_of((1, 1), {"w1": held["w1"]}) == {"w1": ["w1"], "w0": ["w1"]}
    assert newest_complete({"w0": held["w0"]}) is None
    assert newest_complete({}) is None


def test_snapshot_of_a_later_round_is_newer_with_any_batch() -> None:
    held = {"w0": [header_of(50, members=("w0",)), header_of(40, round_=2, members=("w0",))]}
    assert newest_complete(held) == (2, 40)


@given(
    held=st.dictionaries(
        st.sampled_from(["a", "b", "c"]),
        st.lists(st.tuples(st.integers(1, 2), st.integers(0, 3), st.sampled_from(["a", "b", "c"])), max_size=8),
    )
)
def test_a_snapshot_is_complete_exactly_if_every_owner_has_a_holder(held: dict[str, list[tuple[int, int, str]]]) -> None:
    members = ("a", "b")  # c has joined since
    headers = {
        worker: [header_of(batch, round_, owner, members) for round_, batch, owner in found if owner in members]
        for worker, found in held.items()
    }
    owners: dict[tuple[int, int], set[str]] = {}
    for found in headers.values():
        for header in found:
            owners.setdefault(header.name, set()).add(header.owner)
    complete = sorted(name for name, who in owners.items() if who == set(members))
    name = newest_complete(headers)
    assert name == (complete[-1] if complete else None)
    if name is None:
        return
    result = holders_of(name, headers)
    assert result.keys() == set(members)
    for owner, holders in result.items():
        for holder in holders:
            assert any(h.owner == owner and h.name == complete[-1] for h in headers[holder])
