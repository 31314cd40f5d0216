"""Streams in a DataLoader by itself, and in the loader of a live job whose world changes."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stream_schedules import Action, Numbered, SimulatedJob, Tally, follow, rows_of
from torch.utils.data import DataLoader

from lightning_dlrover.checks import UnsupportedLoaderError
from lightning_dlrover.data import DataError, Shard, Stream, files, parquet, stream
from lightning_dlrover.data.dataset import OBJECTS_PER_BLOCK
from lightning_dlrover.data.lane_plan import LanePlan, Layout, share
from lightning_dlrover.live.loader import ElasticLoader, LoaderState


def numbers(batch: Any) -> list[int]:
    values: list[int] = rows_of(batch).tolist()
    return values


def flat(batches: Iterable[list[int]]) -> list[int]:
    return list(chain.from_iterable(batches))


def drawn(data: Stream, **options: Any) -> list[list[int]]:
    return [numbers(batch) for batch in DataLoader(data, **{"batch_size": 8, **options})]


# --- in a DataLoader by itself ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_rows", [0, 3])
@pytest.mark.parametrize("shuffle_rows", [0, 40])
def test_loader_workers_change_nothing(chunk_rows: int, shuffle_rows: int) -> None:
    source = Numbered([50, 0, 3, 61], chunk_rows)
    alone = drawn(stream(source, shuffle_rows=shuffle_rows))
    assert sorted(flat(alone)) == list(range(source.num_rows))
    for num_workers in (1, 3):
        assert drawn(stream(source, shuffle_rows=shuffle_rows), num_workers=num_workers) == alone


def test_length_and_last_batch_are_those_of_a_list() -> None:
    data = stream(Numbered([10, 9]))
    assert len(data) == 19
    assert [len(batch) for batch in drawn(data)] == [8, 8, 3]
    assert [len(batch) for batch in drawn(data, drop_last=True)] == [8, 8]
    assert len(DataLoader(data, batch_size=8)) == 3


def test_kept_order_is_that_of_the_shards() -> None:
    source = Numbered([10, 9], chunk_rows=3)
    assert flat(drawn(stream(source, keep_order=True), num_workers=2)) == list(range(source.num_rows))


def test_epochs_have_orders_of_their_own() -> None:
    data = stream(Numbered([100]), shuffle_rows=10_000, seed=5)
    first = drawn(data)
    data.set_epoch(1)
    second = drawn(data)
    assert sorted(flat(first)) == sorted(flat(second))
    assert first != second
    data.set_epoch(0)
    assert drawn(data) == first


def test_persistent_loader_workers_follow_the_epoch() -> None:
    data = stream(Numbered([100]), shuffle_rows=10_000)
    loader = DataLoader(data, batch_size=8, num_workers=2, persistent_workers=True)
    first = [numbers(batch) for batch in loader]
    data.set_epoch(1)
    assert [numbers(batch) for batch in loader] != first
    data.set_epoch(0)
    assert [numbers(batch) for batch in loader] == first


def test_epoch_continues_at_a_row() -> None:
    data = stream(Numbered([100]), shuffle_rows=10_000)
    whole = flat(drawn(data))
    data.set_epoch(0, first_row=24)
    assert list(data.__getitems__(range(76))) == whole[24:]


def test_spawned_loader_workers_read_the_same_rows() -> None:
    source = Numbered([30], chunk_rows=3)
    loader = DataLoader(stream(source), batch_size=8, num_workers=1, multiprocessing_context="spawn")
    assert flat(numbers(batch) for batch in loader) == flat(drawn(stream(source)))


def test_transform_makes_samples_of_rows() -> None:
    data = stream(Numbered([5], chunk_rows=3), transform=lambda row: (row["number"], -row["number"]))
    (batch,) = DataLoader(data, batch_size=5)
    assert [each.tolist() for each in batch] == [[0, 1, 2, 3, 4], [0, -1, -2, -3, -4]]


def test_stream_can_be_pickled_while_it_is_read() -> None:
    data = stream(Numbered([10]))
    assert data[3] == 3
    assert pickle.loads(pickle.dumps(data))[3] == 3


# --- in a live job ------------------------------------------------------------------------------------------------------------


actions = st.lists(
    st.one_of(
        st.just(Action("step")),
        st.just(Action("step")),
        st.builds(Action, st.just("lose"), st.integers(0, 4)),
        st.just(Action("epoch")),
        st.builds(Action, st.just("resize"), st.integers(1, 5)),
        st.builds(Action, st.just("back"), st.integers(1, 3)),
    ),
    max_size=16,
)
SCHEDULE = [
    Action(kind, number)  # type: ignore[arg-type]
    for kind, number in [
        ("step", 1), ("resize", 3), ("step", 1), ("lose", 2), ("step", 1), ("back", 2), ("step", 1), ("resize", 1), ("lose", 0),
        ("resize", 4), ("epoch", 1), ("step", 1), ("resize", 2), ("back", 1),
    ]
]  # fmt: skip


def check_that_it_trains_as_planned(job: SimulatedJob, schedule: list[Action]) -> None:
    for epoch, trained in enumerate(follow(job, schedule)):
        assert trained.tolist() == job.planned(epoch).tolist()


@settings(max_examples=60)
@given(
    actions,
    st.lists(st.integers(0, 40), min_size=1, max_size=4),
    st.integers(1, 17),
    st.sampled_from([0, 3]),
    st.sampled_from([0, 30]),
)
def test_every_row_is_trained_once_in_each_epoch(
    todo: list[Action], lengths: list[int], global_batch: int, chunk_rows: int, shuffle_rows: int
) -> None:
    if not sum(lengths):
        lengths = [1]
    job = SimulatedJob(Numbered(lengths, chunk_rows), global_batch, 0, shuffle_rows)
    check_that_it_trains_as_planned(job, todo)


@pytest.mark.parametrize("num_workers", [1, 2])
def test_every_row_is_trained_once_with_loader_workers(num_workers: int) -> None:
    check_that_it_trains_as_planned(SimulatedJob(Numbered([90, 31], chunk_rows=3), 12, num_workers, 30), SCHEDULE)


def test_rows_would_be_lost_and_doubled_without_the_hand_over() -> None:
    job = SimulatedJob(Numbered([90, 31]), 12, 0, 30, hands_over=False)
    first, *_ = (Tally.of(trained, 121) for trained in follow(job, [Action("step", 2), Action("resize", 3)]))
    assert first.lost > 0
    assert first.doubled > 0


def test_job_continues_with_the_layout_of_its_state() -> None:
    data = stream(Numbered([100]), shuffle_rows=30, seed=3)

    def loader(max_workers: int) -> ElasticLoader:
        return ElasticLoader(DataLoader(data, batch_size=10), 10, training=True, max_workers=max_workers)

    first, other = loader(2), loader(9)
    assert first.order.layout != other.order.layout
    other.load_state(pickle.loads(pickle.dumps(first.state())))
    assert numbers(other.refetch()) == numbers(first.refetch())


def test_state_of_another_script_is_refused() -> None:
    streamed = ElasticLoader(DataLoader(stream(Numbered([9])), batch_size=3), 3, training=True)
    listed = ElasticLoader(DataLoader(torch.arange(9), batch_size=3), 3, training=True)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedLoaderError, match="layout of a stream for this loader, which reads a Tensor here"):
        listed.load_state(streamed.state())
    with pytest.raises(UnsupportedLoaderError, match="order of 9 samples for this loader, which reads a Stream here"):
        streamed.load_state(LoaderState(0, 0, 3, torch.arange(9)))


def test_plans_loader_workers_are_rounded_to_a_divisor_of_the_cycle() -> None:
    loader = ElasticLoader(DataLoader(stream(Numbered([4_000_000])), batch_size=64), 64, training=True)
    assert [loader.order.fitting_loader_workers(n) for n in (0, 1, 4, 5, 7, 11, 12, 13)] == [0, 1, 4, 4, 6, 6, 12, 12]


class Listed(Numbered):
    """Writes a line to a file for each lane that is opened."""

    block_rows = 8192  # a lane that goes back over a block's edge is opened again

    def __init__(self, lengths: list[int], file: Path) -> None:
        super().__init__(lengths, chunk_rows=1024)
        self._file = file

    def read(self, shard: Shard, row: int) -> Iterator[Any]:
        with self._file.open("a") as file:
            file.write(f"{row}\n")
        yield from super().read(shard, row)

    @property
    def num_opened(self) -> int:
        return len(self._file.read_text().splitlines())


@pytest.mark.parametrize("num_workers", [2, 3])
def test_loader_workers_keep_their_lanes_when_the_split_stays(num_workers: int, tmp_path: Path) -> None:
    source = Listed([4_000_000], tmp_path / "opened")
    data = DataLoader(stream(source), batch_size=1, num_workers=num_workers)
    loader = ElasticLoader(data, 16, training=True)
    iter(loader)
    batches = [numbers(loader.refetch()) for _ in range(13)]  # all 12 batches of the cycle, and an odd number
    num_opened = source.num_opened
    assert num_opened == 48
    for rewind in (0, 1, 4):  # repeated steps, too
        loader.reshard(0, 1, rewind)
        batches += [numbers(loader.refetch()) for _ in range(13)]
    assert source.num_opened == num_opened
    loader.close()
    alone = ElasticLoader(DataLoader(stream(source), batch_size=1), 16, training=True)
    iter(alone)
    expected = [numbers(alone.refetch()) for _ in range(47)]
    assert batches == [*expected[:26], *expected[25:38], *expected[34:47]]


class Weighed(Numbered):
    """Counts the rows that are read, all of them objects of their own."""

    def __init__(self) -> None:
        super().__init__([4_000_000])
        self.num_read = 0

    def read(self, shard: Shard, row: int) -> Iterator[Any]:
        for item in super().read(shard, row):
            self.num_read += 1
            yield item


@pytest.mark.parametrize("block_rows", [None, 40, 8192])
def test_process_keeps_one_block_of_objects_of_each_lane(block_rows: int | None) -> None:
    source = Weighed()
    if block_rows is not None:
        source.block_rows = block_rows  # type: ignore[attr-defined]
    data = stream(source)
    loader = ElasticLoader(DataLoader(data, batch_size=64), 64, training=True)
    iter(loader)
    loader.refetch()
    per_block = block_rows or OBJECTS_PER_BLOCK
    assert source.num_read <= 4 * (per_block + 16)  # of 4 lanes; the first block of a lane may be a part
    for _ in range(59):
        loader.refetch()
    (reader,) = data._readers.values()
    held = [len(lane.loaded.rows) for lane in reader._lanes.values()]
    assert (len(held), max(held)) == (48, per_block)


@given(st.integers(1, 50), st.integers(1, 50))
def test_order_of_unshuffled_rows_does_not_depend_on_blocks(one: int, other: int) -> None:
    plans = [LanePlan([37, 3, 61], None, Layout(8, slots=2, cycle=2, block_rows=number)) for number in (one, other)]
    (first, second) = ([found.tolist() for found in plan.rows_between(0, 101)] for plan in plans)
    assert first == second


def test_workers_share_a_batch_as_one_reads_it_whole() -> None:
    source = Numbered([64, 33], chunk_rows=3)

    def job(size: int) -> list[list[int]]:
        loaders = [
            ElasticLoader(DataLoader(stream(source, shuffle_rows=64, seed=1), batch_size=1), 12, training=True, max_workers=4)
            for _ in range(size)
        ]
        for rank, loader in enumerate(loaders):
            iter(loader)
            loader.reshard(rank, size)
        return [flat(numbers(loader.refetch()) for loader in loaders) for _ in range(8)]

    assert job(1) == job(2) == job(3)
    assert share(12, 0, 3) == (0, 4)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_plain_loop_takes_every_row_once_in_each_epoch(size: int) -> None:
    data = stream(Numbered([20, 11]), shuffle_rows=1000)
    steps = [flat(list(data.share_of_batch(step, 8, rank, size, max_workers=5)) for rank in range(size)) for step in range(8)]
    assert [len(step) for step in steps] == [8, 8, 8, 7] * 2
    first, second = flat(steps[:4]), flat(steps[4:])
    assert sorted(first) == sorted(second) == list(range(31))
    assert first != second
    alone = [list(data.share_of_batch(step, 8, max_workers=5)) for step in range(8)]
    assert steps == alone


# --- refused ------------------------------------------------------------------------------------------------------------------


def test_shuffled_dataloader_of_a_stream_is_refused_with_the_right_option() -> None:
    with pytest.raises(UnsupportedLoaderError, match="shuffle_rows=200_000"):
        ElasticLoader(DataLoader(stream(Numbered([9])), batch_size=3, shuffle=True), 3, training=True)


@pytest.mark.parametrize("chunk_rows", [0, 3])
def test_shard_that_is_shorter_than_counted_is_named(chunk_rows: int) -> None:
    data = stream(Numbered([10, 10], chunk_rows, cut={"1": 4}))
    with pytest.raises(DataError, match="1 ended after 4 rows, but had 10 when the job counted them"):
        drawn(data)


class Twice(Numbered):
    def read(self, shard: Shard, row: int) -> Iterator[Any]:
        for batch in super().read(shard, row):
            yield pa.RecordBatch.from_arrays([*batch.columns, *batch.columns], ["number", "number"])


def test_columns_with_one_name_are_refused() -> None:
    with pytest.raises(DataError, match="0 has 2 columns with the name 'number'"):
        drawn(stream(Twice([10], chunk_rows=5)))


@pytest.mark.parametrize(
    "transform, message",
    [
        (lambda row: None if row == 3 else row, "None for a row"),
        (lambda row: (row for _ in range(2)), "a generator for a row.*Return a list"),
    ],
)
def test_transform_that_changes_the_number_of_rows_is_refused(transform: Callable[[int], Any], message: str) -> None:
    with pytest.raises(DataError, match=rf"transform .*lambda.* returned {message}"):
        drawn(stream(Numbered([10]), transform=transform))


def test_samples_of_one_row_are_joined_by_collate_fn() -> None:
    data = stream(Numbered([3, 7]), transform=lambda row: [row] * (row % 3))
    batches = DataLoader(data, batch_size=4, collate_fn=lambda lists: list(chain.from_iterable(lists)))
    assert sorted(flat(batches)) == sorted(row for row in range(10) for _ in range(row % 3))


@pytest.mark.parametrize("source", [object(), [1, 2]])
def test_what_is_not_a_source_is_refused(source: Any) -> None:
    with pytest.raises(TypeError, match="has no shards"):
        stream(source)


@pytest.mark.parametrize("rows", [-1, None, 2.0, True])
def test_shard_without_a_number_of_rows_is_refused(rows: Any) -> None:
    with pytest.raises(DataError, match="a stream needs the number of rows of each shard"):
        Shard("a", rows)


def test_source_without_rows_or_with_a_shard_twice_is_refused() -> None:
    with pytest.raises(DataError, match="has no rows"):
        len(stream(Numbered([0, 0])))
    source = Numbered([1])
    source.shards = lambda: [Shard("a", 1), Shard("a", 1)]  # type: ignore[method-assign]
    with pytest.raises(DataError, match="has 'a' 2 times"):
        len(stream(source))


@pytest.mark.parametrize(
    ("make", "refusal"),
    [
        (lambda: parquet(None), "paths=None: give a file, a folder"),  # type: ignore[arg-type]
        (lambda: files([5]), r"paths=\[5\]: give a file"),  # type: ignore[list-item]
        (lambda: parquet([]), "paths is empty"),
        (lambda: parquet("a", columns=[]), "columns is empty"),
        (lambda: files("a.csv", columns=7), "columns=7: give a list of names"),  # type: ignore[arg-type]
        (lambda: stream(parquet("a"), seed="abc"), "seed='abc': give a whole number"),  # type: ignore[arg-type]
        (lambda: stream(parquet("a"), transform=5), "transform=5 cannot be called"),  # type: ignore[arg-type]
        (lambda: stream(parquet("a"), threads=100_000), "threads=100000 is above 1024"),
        (lambda: stream(Numbered([1]), shuffle_rows=10, keep_order=True), "keep_order"),
        *((lambda rows=rows: stream(Numbered([1]), shuffle_rows=rows), "shuffle_rows=") for rows in (-1, True, 1.5)),
    ],
)
def test_wrong_arguments_are_refused_by_name(make: Callable[[], object], refusal: str) -> None:
    with pytest.raises((TypeError, ValueError), match=refusal):
        make()


def test_name_of_one_column_reads_that_column(tmp_path: Path) -> None:
    pq.write_table(pa.table({"label": [1, 2], "price": [0.5, 1.5]}), tmp_path / "a.parquet")
    assert next(iter(stream(parquet(str(tmp_path), columns="label"), keep_order=True))) == {"label": 1}
