"""Blocks of lanes that threads read before they are asked for."""

from __future__ import annotations

import multiprocessing
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from stream_schedules import Numbered, SimulatedJob, follow, random_schedule, rows_of
from torch.utils.data import DataLoader

from lightning_dlrover.data import DataError, Shard, Stream, files, parquet, stream
from lightning_dlrover.data.lane_plan import LanePlan, Layout
from lightning_dlrover.data.reader import LaneReader, ReadingThreads

DEADLINE_S = 60.0


class InThreads(Numbered):
    """Numbers that threads may read. Remembers which threads did, in this process."""

    reads_in_threads = True

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.readers: set[str] = set()

    def read(self, shard: Shard, row: int) -> Iterator[Any]:
        for item in super().read(shard, row):
            self.readers.add(threading.current_thread().name)
            yield item


def drawn(data: Stream, **options: Any) -> list[list[int]]:
    return [rows_of(batch).tolist() for batch in DataLoader(data, **{"batch_size": 512, **options})]


@pytest.mark.parametrize("shuffle_rows", [0, 4_000])
@pytest.mark.parametrize("chunk_rows", [0, 700])
def test_threads_change_no_batch(chunk_rows: int, shuffle_rows: int) -> None:
    lengths = [50_000, 0, 30, 61_000]
    without = drawn(stream(InThreads(lengths, chunk_rows), shuffle_rows=shuffle_rows))
    for num_threads in (1, 3):
        source = InThreads(lengths, chunk_rows)
        assert drawn(stream(source, shuffle_rows=shuffle_rows, threads=num_threads)) == without
        assert any(name.startswith("stream") for name in source.readers)


def test_kept_order_is_kept_with_threads() -> None:
    data = stream(InThreads([20_000, 21_000], 700), keep_order=True, threads=2)
    assert [row for batch in drawn(data) for row in batch] == list(range(41_000))


@pytest.mark.parametrize("seed", range(4))
def test_job_with_threads_trains_as_planned_through_resizes_and_losses(seed: int) -> None:
    dice = random.Random(seed)
    source = InThreads([2_000, 5_000, 100], 300)
    job = SimulatedJob(source, dice.randint(100, 400), shuffle_rows=1_000 * (seed % 2), max_workers=6, threads=2)
    for epoch, trained in enumerate(follow(job, random_schedule(dice, job.num_batches, 6))):
        assert trained.tolist() == job.planned(epoch).tolist()
    assert any(name.startswith("stream") for name in source.readers) or not seed % 2  # without shuffling lanes have one block


def test_lanes_that_are_closed_while_a_thread_reads_them_are_read_again() -> None:
    layout = Layout(40, slots=4, cycle=1, block_rows=50)
    source = InThreads([4_000], 30)
    plan = LanePlan([4_000], None, layout)
    reader = LaneReader(source, source.shards(), plan, max_open=2, threads=ReadingThreads(2))
    found = [rows_of({"number": reader.read(list(plan.pieces(i, i + 40))).tensor("number")}) for i in range(0, 4_000, 40)]  # type: ignore[union-attr]
    _, rows = plan.rows_between(0, 4_000)
    assert np.concatenate(found).tolist() == rows.tolist()
    reader.close()


def test_error_of_a_thread_is_raised_at_the_batch_that_needs_the_block() -> None:
    def loader(num_threads: int) -> DataLoader[Any]:
        return DataLoader(stream(InThreads([50_000] * 2, 700, {"1": 40_000}), threads=num_threads), batch_size=512)

    def read_into(found: list[list[int]], num_threads: int) -> None:
        found.extend(rows_of(batch).tolist() for batch in loader(num_threads))

    without: list[list[int]] = []
    with_threads: list[list[int]] = []
    for num_threads, found in ((0, without), (2, with_threads)):
        with pytest.raises(DataError, match="1 ended after 40000 rows, but had 50000 when the job counted them"):
            read_into(found, num_threads)
    assert len(without) > 20
    assert with_threads == without


def test_loader_workers_forked_while_threads_read_give_the_same_batches() -> None:
    data = stream(InThreads([50_000, 61_000], 700), threads=2)
    without = drawn(stream(InThreads([50_000, 61_000], 700)))
    batches = iter(DataLoader(data, batch_size=512))
    first = [rows_of(next(batches)).tolist() for _ in range(20)]
    assert drawn(data, num_workers=2) == without
    assert [*first, *(rows_of(batch).tolist() for batch in batches)] == without


def test_fork_waits_for_reads() -> None:
    threads = ReadingThreads(1)
    began = threading.Event()

    def read() -> None:
        began.set()
        time.sleep(0.2)

    future = threads.submit(read)
    assert began.wait(DEADLINE_S)
    process = multiprocessing.get_context("fork").Process(target=int)
    process.start()
    assert future.done()
    process.join(DEADLINE_S)
    assert process.exitcode == 0


def test_threads_read_the_same_rows_of_parquet_files(tmp_path: Path) -> None:
    for number in range(3):
        values = np.arange(40_000) + 40_000 * number
        pq.write_table(pa.table({"number": values}), tmp_path / f"{number}.parquet", row_group_size=3_000)
    assert drawn(stream(parquet(str(tmp_path)), threads=2)) == drawn(stream(parquet(str(tmp_path))))


def test_blocks_that_are_needed_next_are_due() -> None:
    threads = ReadingThreads(2)  # four blocks ahead
    due = [threads.is_due(rows_left, 8_000, num_lanes=16) for rows_left in (0, 2_000, 2_001, 8_000)]
    assert due == [True, True, False, False]
    assert threads.is_due(8_000, 8_000, num_lanes=4)


@pytest.mark.parametrize("threads", [-1, 1.5, True, "2"])
def test_wrong_number_of_threads_is_refused(threads: Any) -> None:
    with pytest.raises(ValueError, match="is not a number of threads"):
        stream(InThreads([9]), threads=threads)


def test_threads_are_refused_for_a_source_that_one_thread_reads(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("number\n1\n")
    for source in (Numbered([9]), files(str(tmp_path / "*.csv"))):
        with pytest.raises(ValueError, match=r"cannot be read in threads.*num_workers"):
            stream(source, threads=1)
