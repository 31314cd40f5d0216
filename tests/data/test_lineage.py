"""Rows of steps, steps of rows, and progress by file: the same as the job's loader deals them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from torch.utils.data import DataLoader

from lightning_dlrover.data import DataError, Shard, Stream, files, parquet, stream
from lightning_dlrover.data.lineage import FilesProgress, Lineage, listed_shards
from lightning_dlrover.live.loader import ElasticLoader
from lightning_dlrover.rdzv.job.events import StreamOpened

LENGTHS = [30, 0, 7, 44, 1]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of files whose rows are numbered through."""
    (tmp_path / "data").mkdir()
    first = 0
    for number, length in enumerate(LENGTHS):
        table = pa.table({"id": list(range(first, first + length))})
        pq.write_table(table, tmp_path / "data" / f"{number}.parquet", row_group_size=5)
        first += length
    return tmp_path / "data"


def opened_by(data: Stream, loader: ElasticLoader, accumulate: int = 1, **changes: object) -> StreamOpened:
    layout = loader.order.layout
    assert layout is not None
    opened = StreamOpened(
        fit=1,
        number=0,
        source=repr(data.source),
        folder="/",
        num_shards=len(data.shards),
        num_rows=len(data),
        digest=data.fingerprint,
        own_batches=len(loader),
        epoch_batches=len(loader),
        cycles=False,
        epoch=0,
        batches_before=0,
        steps_before=0,
        accumulate=accumulate,
        batch_size=layout.batch_size,
        slots=layout.slots,
        cycle=layout.cycle,
        block_rows=layout.block_rows,
        seed=loader.order.seed if data.shuffle_rows else None,
    )
    return replace(opened, **changes)  # type: ignore[arg-type]


def made(folder: Path, shuffle_rows: int = 0, drop_last: bool = False) -> tuple[Stream, ElasticLoader]:
    data = stream(parquet(str(folder)), shuffle_rows=shuffle_rows, seed=3)
    loader = ElasticLoader(DataLoader(data, 8, drop_last=drop_last), 8, training=True, max_workers=4)
    return data, loader


def lineage_of(folder: Path, **changes: object) -> tuple[Lineage, ElasticLoader]:
    data, loader = made(folder)
    return Lineage(opened_by(data, loader, **changes), data.shards), loader  # type: ignore[arg-type]


def ids(lineage: Lineage, shards: Sequence[Shard], epoch: int, batches: range) -> list[int]:
    firsts = {shard.key: sum(LENGTHS[:number]) for number, shard in enumerate(shards)}
    return [
        firsts[each.file] + row
        for each in lineage.rows_of(epoch, batches)
        for first, last in each.ranges
        for row in range(first, last + 1)
    ]


@pytest.mark.parametrize("shuffle_rows", [0, 40, 1000])
@pytest.mark.parametrize("drop_last", [False, True])
def test_rows_of_a_batch_are_those_of_the_loader(folder: Path, shuffle_rows: int, drop_last: bool) -> None:
    data, loader = made(folder, shuffle_rows, drop_last)
    opened = opened_by(data, loader)
    shards = listed_shards(opened)
    lineage = Lineage(opened, shards)
    for epoch in range(2):
        loader.set_epoch(epoch)
        dealt = [sorted(batch["id"].tolist()) for batch in loader]
        assert [sorted(ids(lineage, shards, epoch, range(b, b + 1))) for b in range(len(dealt))] == dealt


@pytest.mark.parametrize("shuffle_rows", [0, 40])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_each_row_is_in_the_step_that_lists_it(folder: Path, shuffle_rows: int, accumulate: int) -> None:
    data, loader = made(folder, shuffle_rows)
    lineage = Lineage(opened_by(data, loader, accumulate, epoch=2, steps_before=7, batches_before=20), data.shards)
    steps_per_epoch = -(-len(loader) // accumulate)
    seen: Counter[int] = Counter()
    for step in range(8, 8 + 2 * steps_per_epoch):
        epoch, batches = lineage.batches_of_step(step)
        assert epoch == 2 + (step - 8) // steps_per_epoch
        for each in lineage.rows_of(epoch, batches):
            for first, last in each.ranges:
                for row in range(first, last + 1):
                    (place,) = lineage.places_of(each.file, row, range(epoch, epoch + 1))
                    assert (place.epoch, place.step) == (epoch, step)
                    assert place.batch in batches
        seen.update(ids(lineage, data.shards, epoch, batches))
    assert seen == dict.fromkeys(range(sum(LENGTHS)), 2)


def test_loader_that_begins_again_within_an_epoch_trains_rows_more_than_once(folder: Path) -> None:
    data, loader = made(folder, 40)
    opened = opened_by(data, loader, epoch_batches=2 * len(loader) + 3, cycles=True)
    lineage = Lineage(opened, data.shards)
    seen = Counter(ids(lineage, data.shards, 0, range(len(loader))) + ids(lineage, data.shards, 0, range(11, 22)))
    assert seen == dict.fromkeys(range(sum(LENGTHS)), 2)
    assert {len(lineage.places_of("0.parquet", row, range(1))) for row in range(30)} == {2, 3}


def test_row_beyond_the_end_of_the_epochs_is_in_no_batch(folder: Path) -> None:
    data, loader = made(folder, drop_last=True)
    lineage = Lineage(opened_by(data, loader), data.shards)
    places = [
        place for shard in data.shards for row in range(shard.rows) for place in lineage.places_of(shard.key, row, range(1))
    ]
    assert len(places) == len(loader) * 8 == 80


def test_files_are_counted_as_they_are_used(folder: Path) -> None:
    lineage, loader = lineage_of(folder)
    assert lineage.files_progress(0, 0) == FilesProgress(1, 0, 4)  # one is empty
    found = [lineage.files_progress(0, batches) for batches in range(len(loader) + 1)]
    assert all(each is not None and each.done + each.in_work + each.left == 5 for each in found)
    assert found[-1] == FilesProgress(5, 0, 0)
    assert Lineage(lineage.opened).files_progress(0, 3) is None
    assert [lineage.rows_done(batches) for batches in (0, 1, 11, 12)] == [0, 8, 82, 82]


def test_position_is_an_epoch_and_batches_of_it(folder: Path) -> None:
    lineage, _ = lineage_of(folder, epoch=1)
    assert [lineage.place_in_epoch(batches) for batches in (0, 10, 11, 25)] == [(1, 0), (1, 10), (2, 0), (3, 3)]
    assert lineage.place_in_epoch(22, is_over=True) == (2, 11)


@pytest.mark.parametrize("step", [-1, 0, 4])
def test_step_before_the_record_is_refused(folder: Path, step: int) -> None:
    with pytest.raises(DataError, match=f"there is no step {step}: "):
        lineage_of(folder, steps_before=4)[0].batches_of_step(step)


@pytest.mark.parametrize(
    "file, row, message",
    [
        ("9.parquet", 0, r"has no file 9.parquet, but for example .*/0.parquet"),
        ("0.parquet", 30, r"0.parquet has 30 rows, numbered from 0: there is no row 30"),
        ("1.parquet", 0, r"1.parquet has 0 rows"),
    ],
)
def test_unknown_row_is_named(folder: Path, file: str, row: int, message: str) -> None:
    with pytest.raises(DataError, match=message):
        lineage_of(folder)[0].places_of(file, row, range(1))


def test_name_of_several_files_is_refused(tmp_path: Path) -> None:
    for day in ("day=1", "day=2"):
        (tmp_path / day).mkdir()
        pq.write_table(pa.table({"id": [1]}), tmp_path / day / "a.parquet")
    lineage, _ = lineage_of(tmp_path)
    with pytest.raises(DataError, match=r"2 files are named a.parquet, such as .*day=1/a.parquet: give more of the path"):
        lineage.places_of("a.parquet", 0, range(1))
    assert len(lineage.places_of("day=2/a.parquet", 0, range(1))) == 1


def test_files_are_listed_again_from_the_scripts_folder_or_from_another_place(folder: Path) -> None:
    data, loader = made(folder)
    opened = opened_by(data, loader, source="parquet('data')", folder=str(folder.parent))
    assert listed_shards(opened) == data.shards
    (folder.parent / "moved").mkdir()
    for file in folder.iterdir():
        file.rename(folder.parent / "moved" / file.name)
    with pytest.raises(DataError, match="data has no files"):
        listed_shards(opened)
    assert len(listed_shards(opened, [str(folder.parent / "moved")])) == 5
    (folder.parent / "moved" / "0.parquet").unlink()
    with pytest.raises(DataError, match="has 4 files with 52 rows here, and not the 5 files with 82 rows that the job reads"):
        listed_shards(opened, [str(folder.parent / "moved")])


def test_source_of_the_script_cannot_be_listed(folder: Path) -> None:
    data, loader = made(folder)
    for source in ("<Own object at 0x1>", "Own()", "parquet(paths())"):
        with pytest.raises(DataError, match=r"the script's own source"):
            listed_shards(opened_by(data, loader, source=source))
    with pytest.raises(DataError, match=r"Parquet has too many paths .* with --files"):
        listed_shards(opened_by(data, loader, source="Parquet"))
    assert listed_shards(opened_by(data, loader, source="Parquet"), [str(folder)]) == data.shards


def test_files_of_lines_are_listed_as_they_were_counted(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("1,2\n3,4\n")
    data = stream(files(str(tmp_path / "*.csv"), "csv", header=False))
    loader = ElasticLoader(DataLoader(data, 2), 2, training=True)
    assert listed_shards(opened_by(data, loader)) == data.shards
