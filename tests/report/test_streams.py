"""Streams of a job, their progress and their skipped rows, as its history shows them."""

from __future__ import annotations

import itertools
from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_dlrover.rdzv.job.events import Event, FitFinished, RowsSkipped, StreamOpened, WindowMeasured, record_of
from lightning_dlrover.rdzv.job.records import EventRecord
from lightning_dlrover.report.streams import (
    ReadStreams,
    Standing,
    described,
    described_skipped,
    guarantee,
    merged,
    read_streams,
    shown_ranges,
    skipped_rows,
    standing,
)
from tests.support.history_rows import window

OPENED = StreamOpened(1, 0, "parquet('a')", "/", 2, 100, "x", 13, 13, False, 0, 0, 0, 2, 8, 4, 12, 4096)


def history(*events: tuple[float, Event]) -> list[EventRecord]:
    return [record_of(event, "a sentence", at) for at, event in events]


def read(events: list[EventRecord]) -> ReadStreams:
    found = read_streams(events)
    assert found is not None
    return found


def position(*args: Any, **kwargs: Any) -> Standing:
    where = standing(*args, **kwargs)
    assert where is not None
    return where


@pytest.mark.parametrize(
    "changes, text",
    [
        ({}, "each row exactly once"),
        ({"epoch_batches": 20}, "each row exactly once"),  # another loader is longer
        ({"own_batches": 12, "epoch_batches": 12}, "each row at most once, 4 left out of each epoch"),
        ({"epoch_batches": 5}, "each row at most once, 60 left out of each epoch"),
        ({"epoch_batches": 20, "cycles": True}, "each row at least once, as the rows begin again within an epoch"),
        ({"cycles": True}, "each row exactly once"),
    ],
)
def test_guarantee_follows_from_the_batches_of_an_epoch(changes: dict[str, int], text: str) -> None:
    assert guarantee(replace(OPENED, **changes)) == text  # type: ignore[arg-type]
    assert described(replace(OPENED, **changes)) == f"parquet('a'), 2 files, 100 rows: {text}"  # type: ignore[arg-type]


def test_history_without_streams_has_none() -> None:
    assert read_streams(history((1.0, FitFinished(3)))) is None


def test_streams_of_the_newest_fit_are_read_by_number() -> None:
    second = replace(OPENED, number=1, source="files('b')")
    later = replace(OPENED, fit=2, source="parquet('c')")
    events = history((1.0, OPENED), (1.1, second), (5.0, FitFinished(7)))
    found = read(events)
    assert (found.streams, found.at, found.finished_step) == ((OPENED, second), 1.0, 7)
    found = read([*events, *history((6.0, later))])
    assert (found.streams, found.at, found.finished_step) == ((later,), 6.0, None)


def test_record_of_a_resumed_fit_is_counted_from_the_fits_beginning() -> None:
    resumed = replace(OPENED, epoch=3, batches_before=39, steps_before=21)
    found = read(history((1.0, OPENED), (9.0, resumed)))
    assert (found.streams, found.at) == ((OPENED,), 1.0)


@pytest.mark.parametrize("changes", [{"digest": "y"}, {"seed": 4}, {"batches_before": 40}, {"steps_before": 20}])
def test_record_of_other_rows_counts_alone(changes: dict[str, object]) -> None:
    resumed = replace(OPENED, **{"epoch": 3, "batches_before": 39, "steps_before": 21, **changes})  # type: ignore[arg-type]
    found = read(history((1.0, OPENED), (9.0, resumed)))
    assert (found.streams, found.at) == ((resumed,), 9.0)


def test_position_is_that_of_the_newest_window_of_rank_zero() -> None:
    measured = [replace(window(at), first_step=int(at), num_steps=3, step_time_s=0.5) for at in (10.0, 20.0)]
    events = history((1.0, OPENED), (20.0, WindowMeasured(asdict(measured[1]))))
    found = read(events)
    others = replace(window(30.0), global_rank=1, first_step=99)
    for profiles in ([measured[0]], [measured[1], others], []):
        where = position(found, profiles, events, now=24.0, is_training=False)
        assert (where.batches, where.age_s, where.batches_per_s) == (23, 4.0, 2.0)
    where = position(found, [], events, now=24.0, is_training=True)
    assert where.batches == 31
    assert standing(found, [], history((1.0, OPENED)), now=24.0, is_training=True) is None
    assert standing(found, [replace(window(0.5), first_step=77)], [], now=24.0, is_training=True) is None  # an earlier fit's


@pytest.mark.parametrize("step, batches", [(7, 13), (8, 15), (14, 26)])
def test_position_of_a_finished_fit_follows_from_its_updates(step: int, batches: int) -> None:
    events = history((1.0, OPENED), (5.0, FitFinished(step)))
    found = read(events)
    where = position(found, [], events, now=24.0, is_training=False)
    assert where.batches == batches


# --- skipped rows ------------------------------------------------------------------------------------------------------------


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
