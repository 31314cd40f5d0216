"""Rows of a stream that cannot be read: each is named once to the job, however often batches are made from its block."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from lightning_dlrover.data import Shard, Skipped, parquet, stream
from lightning_dlrover.data.source import SkippedRange
from lightning_dlrover.live.loader import MAX_LISTED, ElasticLoader, SkippedRows
from tests.support.spoiled_files import spoil_row_group


class Gappy:
    """300 numbers, of which every third one of the second hundred has none, and those of the last hundred cannot be read."""

    block_rows = 512  # all of them

    def shards(self) -> list[Shard]:
        return [Shard("whole", 40), Shard("gappy", 300)]

    def read(self, shard: Shard, row: int) -> Iterator[Any]:
        for number in range(row, shard.rows):
            if shard.key == "gappy" and number >= 200:
                yield Skipped(1, "broken")
            elif shard.key == "gappy" and number >= 100 and number % 3 == 0:
                yield Skipped(1, "nothing is there", are_rows=False)
            else:
                yield number


@pytest.fixture
def spoiled(tmp_path: Path) -> Path:
    """Files of 300 and 40 rows. Of the larger one, rows 100 to 199 cannot be read."""
    for name, length in (("a", 300), ("b", 40)):
        pq.write_table(pa.table({"a": list(range(length))}), tmp_path / f"{name}.parquet", row_group_size=100)
    spoil_row_group(tmp_path / "a.parquet", 1)
    return tmp_path


@pytest.mark.parametrize("loader_workers", [0, 2])
@pytest.mark.parametrize("shuffle_rows", [0, 600])
def test_rows_are_named_once_by_all_workers_and_epochs(spoiled: Path, loader_workers: int, shuffle_rows: int) -> None:
    found: set[int] = set()
    named: list[list[int]] = []
    for rank in range(2):
        data = stream(parquet(str(spoiled), on_error="skip"), shuffle_rows=shuffle_rows)
        loader = ElasticLoader(DataLoader(data, batch_size=150, num_workers=loader_workers), 150, True)
        for epoch in range(2):
            loader.set_epoch(epoch)
            iter(loader)
            loader.reshard(rank, 2)
            for number in range(3):
                next(loader)
                if number == 0:
                    loader.reshard(1 - rank, 2)  # batches of the former share are discarded
                    loader.reshard(rank, 2)
        for record in loader.skipped.take_news(1, 0):
            assert record.file.endswith("a.parquet")
            assert "row group 1" in record.reason
            named += record.ranges
        assert not loader.skipped.has_news
        loader.close()
    for first, stop in named:
        found.update(range(first, stop))
    assert found == set(range(100, 200))


def test_numbers_without_data_are_not_named() -> None:
    data = stream(Gappy(), keep_order=True)
    rows = [row for batch in DataLoader(data, batch_size=340, collate_fn=list) for row in batch]
    assert rows == [*range(40), *(n for n in range(200) if n < 100 or n % 3)]
    assert data.take_skipped() == (SkippedRange(1, "gappy", 200, 300, "broken"),)
    assert data.take_skipped() == ()


class Telling:
    """200 rows, none of the second hundred of which can be read, each for a reason of its own."""

    block_rows = 256

    def shards(self) -> list[Shard]:
        return [Shard("telling", 200)]

    def read(self, shard: Shard, row: int) -> Iterator[Any]:
        return (number if number < 100 else Skipped(1, f"cannot decode {number}") for number in range(row, 200))


def test_rows_with_reasons_of_their_own_are_one_range_and_one_line(caplog: pytest.LogCaptureFixture) -> None:
    data = stream(Telling(), keep_order=True)
    (rows,) = DataLoader(data, batch_size=200, collate_fn=list)
    assert rows == [*range(100)]
    assert data.take_skipped() == (SkippedRange(0, "telling", 100, 200, "cannot decode 100"),)
    assert [record.getMessage() for record in caplog.records] == ["telling: 100 rows are skipped so far: cannot decode 100"]


def test_only_rows_without_a_record_are_news() -> None:
    rows = SkippedRows()
    rows.add(
        [SkippedRange(0, "a", 10, 20, "broken"), SkippedRange(1, "b", 0, 5, "gone"), SkippedRange(0, "a", 10, 20, "broken")]
    )
    first, second = rows.take_news(1, 0)
    assert (first.shard, first.file, first.ranges, first.reason) == (0, "a", [[10, 20]], "broken")
    assert (second.shard, second.ranges) == (1, [[0, 5]])
    rows.add([SkippedRange(0, "a", 12, 20, "broken"), SkippedRange(1, "b", 1, 2, "gone")])
    assert not rows.has_news
    rows.add([SkippedRange(0, "a", 15, 30, "broken"), SkippedRange(0, "a", 30, 40, "broken")])
    (only,) = rows.take_news(1, 0)
    assert only.ranges == [[15, 40]]


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 9)), max_size=30))
def test_rows_are_news_once_in_any_order(found: list[tuple[int, int]]) -> None:
    rows, named = SkippedRows(), set[int]()
    for first, length in found:
        is_new = not {*range(first, first + length)} <= named
        rows.add([SkippedRange(0, "a", first, first + length, "broken")])
        assert rows.has_news == is_new
        for record in rows.take_news(1, 0):
            named.update(row for begin, stop in record.ranges for row in range(begin, stop))
        assert {*range(first, first + length)} <= named


def test_time_per_row_does_not_grow_with_the_rows_before() -> None:
    rows = SkippedRows()
    began = time.process_time()
    rows.add([SkippedRange(0, "a", 2 * n, 2 * n + 1, "broken") for n in range(10_000)])
    assert time.process_time() - began < 2.0  # 0.05 s; 6 s if each row is compared with all


def test_records_end_with_one_that_names_no_rows() -> None:
    rows = SkippedRows()
    rows.add([SkippedRange(0, "a", 2 * n, 2 * n + 1, "broken") for n in range(MAX_LISTED + 5)])
    listed, rest = rows.take_news(1, 0)
    assert len(listed.ranges) == MAX_LISTED
    assert rest.ranges == []
    rows.add([SkippedRange(0, "a", 9000, 9001, "broken"), SkippedRange(0, "a", 9100, 9100, "broken")])
    assert rows.take_news(1, 0) == []
