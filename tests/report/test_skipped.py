"""Rows that a stream leaves out, as the job's history has them."""

from __future__ import annotations

import itertools
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from lightning_dlrover.rdzv.job.events import RowsSkipped, StreamOpened, record_of
from lightning_dlrover.report.streams import described_skipped, merged, shown_ranges, skipped_rows

OPENED = StreamOpened(*(1, 0, "parquet('train')", "/", 2, 100, "digest", 13, 13, False), *(0, 0, 0, 2, 8, 4, 12, 4096))
FOUND = RowsSkipped(1, 0, 0, "a.parquet", [[10, 20]], "broken")


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 9)).map(lambda each: (each[0], sum(each)))))
def test_merged_ranges_hold_the_same_rows(ranges: list[tuple[int, int]]) -> None:
    found = merged(ranges)
    assert {n for first, stop in found for n in range(first, stop)} == {n for a, b in ranges for n in range(a, b)}
    assert all(stop < first for (_, stop), (first, _) in itertools.pairwise(found))


def test_rows_that_several_workers_have_found_count_once() -> None:
    others = (
        replace(FOUND, file="/elsewhere/a.parquet", ranges=[[15, 25], [40, 41]]),
        replace(FOUND, shard=1, file="b.parquet", ranges=[[0, 3]]),
        replace(FOUND, fit=2, ranges=[[50, 60]]),
        replace(FOUND, number=1, ranges=[[50, 60]]),
    )
    skipped = skipped_rows([record_of(each, "", 1.0) for each in (FOUND, *others)], OPENED)
    assert [(each.file, each.ranges) for each in skipped.files] == [
        ("a.parquet", ((10, 25), (40, 41))),
        ("b.parquet", ((0, 3),)),
    ]
    assert described_skipped(skipped) == "19 rows skipped in 2 files"


def test_rows_that_are_not_listed_are_mentioned() -> None:
    records = [record_of(each, "", 1.0) for each in (FOUND, replace(FOUND, ranges=[]))]
    assert described_skipped(skipped_rows(records, OPENED)) == "at least 10 rows skipped in a.parquet"
    assert described_skipped(skipped_rows([], OPENED)) == ""


def test_ranges_are_shown_with_both_ends() -> None:
    assert shown_ranges([(0, 1), (5, 8), (9, 12), (20, 21), (30, 31)]) == "0, 5 to 7, 9 to 11 and 2 more"
