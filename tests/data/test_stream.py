"""Streams in a DataLoader by itself, and in the loader of a live job whose world changes."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from lightning_dlrover.checks.loaders import UnsupportedLoaderError
from lightning_dlrover.data import DataError, Shard, Stream, parquet, stream
from lightning_dlrover.data.lane_plan import share
from lightning_dlrover.live.loader import ElasticLoader, LoaderState


class Numbered:
    """Rows ``(shard, row)`` as numbers, one by one or as record batches."""

    def __init__(self, lengths: Sequence[int], columnar: bool = False, cut: dict[str, int] | None = None) -> None:
        self.lengths = lengths
        self.columnar = columnar
        self.cut = cut or {}

    def shards(self) -> list[Shard]:
        return [Shard(str(number), length) for number, length in enumerate(self.lengths)]

    def read(self, shard: Shard, row: int) -> Iterator[Any]:
        stop = self.cut.get(shard.key, shard.rows)
        names = range(int(shard.key) * 1000 + row, int(shard.key) * 1000 + stop)
        if self.columnar:
            yield from pa.table({"number": list(names)}).to_batches(max_chunksize=3)
        else:
            yield from names

    @property
    def all(self) -> list[int]:
        return [number * 1000 + row for number, length in enumerate(self.lengths) for row in range(length)]


def numbers(batch: Any) -> list[int]:
    values: list[int] = (batch["number"] if isinstance(batch, dict) else batch).tolist()
    return values


def flat(batches: Iterable[list[int]]) -> list[int]:
    return list(chain.from_iterable(batches))


def drawn(data: Stream, **options: Any) -> list[list[int]]:
    return [numbers(batch) for batch in DataLoader(data, **{"batch_size": 8, **options})]


# --- in a DataLoader by itself ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columnar", [True, False])
@pytest.mark.parametrize("shuffle_rows", [0, 40])
def test_loader_workers_change_nothing(columnar: bool, shuffle_rows: int) -> None:
    source = Numbered([50, 0, 3, 61], columnar)
    alone = drawn(stream(source, shuffle_rows=shuffle_rows))
    assert sorted(flat(alone)) == source.all
    for num_workers in (1, 3):
        assert drawn(stream(source, shuffle_rows=shuffle_rows), num_workers=num_workers) == alone


def test_length_and_last_batch_are_those_of_a_list() -> None:
    data = stream(Numbered([10, 9]))
    assert len(data) == 19
    assert [len(batch) for batch in drawn(data)] == [8, 8, 3]
    assert [len(batch) for batch in drawn(data, drop_last=True)] == [8, 8]
    assert len(DataLoader(data, batch_size=8)) == 3


def test_kept_order_is_that_of_the_shards() -> None:
    source = Numbered([10, 9], columnar=True)
    assert flat(drawn(stream(source, keep_order=True), num_workers=2)) == source.all


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


def test_epoch_goes_on_at_a_row() -> None:
    data = stream(Numbered([100]), shuffle_rows=10_000)
    whole = flat(drawn(data))
    data.set_epoch(0, first_row=24)
    assert list(data.__getitems__(range(76))) == whole[24:]


def test_spawned_loader_workers_read_the_same_rows() -> None:
    source = Numbered([30], columnar=True)
    loader = DataLoader(stream(source), batch_size=8, num_workers=1, multiprocessing_context="spawn")
    assert flat(numbers(batch) for batch in loader) == flat(drawn(stream(source)))


def test_transform_makes_samples_of_rows() -> None:
    data = stream(Numbered([5], columnar=True), transform=lambda row: (row["number"], -row["number"]))
    (batch,) = DataLoader(data, batch_size=5)
    assert [each.tolist() for each in batch] == [[0, 1, 2, 3, 4], [0, -1, -2, -3, -4]]


def test_stream_can_be_pickled_while_it_is_read() -> None:
    data = stream(Numbered([10]))
    assert data[3] == 3
    assert pickle.loads(pickle.dumps(data))[3] == 3


# --- in a live job ------------------------------------------------------------------------------------------------------------


class Job:
    """The loaders of all workers of a job, whose worlds change."""

    def __init__(
        self, source: Numbered, global_batch: int, num_workers: int, shuffle_rows: int, hands_over: bool = True
    ) -> None:
        self.make = lambda: ElasticLoader(
            DataLoader(stream(source, shuffle_rows=shuffle_rows, seed=3), batch_size=1, num_workers=num_workers),
            global_batch,
            training=True,
            max_workers=4,
        )
        self.source = source
        self.global_batch = global_batch
        self.hands_over = hands_over
        self.loaders = [self.make()]
        self.trained: list[int] = []
        self.epoch = self.cursor = 0
        self._begin()

    def _begin(self) -> None:
        for loader in self.loaders:
            iter(loader)
            loader.set_epoch(self.epoch)
        self._place()

    def _place(self, rewind: int = 0) -> None:
        for rank, loader in enumerate(self.loaders):
            loader.reshard(rank, len(self.loaders), rewind)

    @property
    def num_batches(self) -> int:
        return -(-len(self.source.all) // self.global_batch)

    def step(self, counts: bool = True) -> None:
        batches = [numbers(loader.refetch()) for loader in self.loaders]
        sizes = [loader.split.num_own_samples(self.cursor) for loader in self.loaders]
        self.cursor += 1
        if counts:  # a worker without a share computes a placeholder with weight 0
            self.trained += flat(batch[:size] for batch, size in zip(batches, sizes, strict=True))

    def resize(self, size: int) -> None:
        state = self.loaders[0].state()
        while len(self.loaders) > size:
            self.loaders.pop(0).close()
        while len(self.loaders) < size:
            joiner = self.make()
            iter(joiner)
            if self.hands_over:
                joiner.load_state(pickle.loads(pickle.dumps(state)))
            self.loaders.append(joiner)
        self._place()

    def lose(self) -> None:
        """Lose a worker in a step, which the others do again."""
        self.step(counts=False)
        if len(self.loaders) > 1:
            self.loaders.pop().close()
        self.cursor -= 1
        self._place(rewind=1)

    def roll_back(self, num_batches: int) -> None:
        """Go back to a snapshot: what was trained since does not count."""
        num_batches = min(num_batches, self.cursor)
        last = min(self.global_batch * self.cursor, len(self.source.all))
        del self.trained[len(self.trained) - (last - self.global_batch * (self.cursor - num_batches)) :]
        self.cursor -= num_batches
        self._place(rewind=num_batches)

    def finish_epoch(self) -> None:
        while self.cursor < self.num_batches:
            self.step()
        assert self.trained == self.expected()
        self.trained = []
        self.epoch, self.cursor = self.epoch + 1, 0
        self._begin()

    def expected(self) -> list[int]:
        data = self.loaders[0].dataset
        plan = data.plan(3 + self.epoch, self.loaders[0].order.layout)
        return [shard * 1000 + row for shard, row in map(plan.row_at, range(plan.num_rows))]

    def close(self) -> None:
        for loader in self.loaders:
            loader.close()


actions = st.lists(
    st.one_of(
        st.just("step"),
        st.just("step"),
        st.just("lose"),
        st.just("epoch"),
        st.integers(1, 5),  # resize
        st.tuples(st.just("back"), st.integers(1, 3)),
    ),
    max_size=16,
)


def follow(job: Job, todo: list[Any]) -> None:
    try:
        for each in [*todo, "epoch", "epoch"]:
            if job.cursor == job.num_batches or each == "epoch":
                job.finish_epoch()
            if each == "step":
                job.step()
            elif each == "lose":
                job.lose()
            elif isinstance(each, int):
                job.resize(each)
            elif isinstance(each, tuple):
                job.roll_back(each[1])
    finally:
        job.close()


@settings(max_examples=60)
@given(
    actions, st.lists(st.integers(0, 40), min_size=1, max_size=4), st.integers(1, 17), st.booleans(), st.sampled_from([0, 30])
)
def test_every_row_is_trained_once_in_each_epoch(
    todo: list[Any], lengths: list[int], global_batch: int, columnar: bool, shuffle_rows: int
) -> None:
    if not sum(lengths):
        lengths = [1]
    follow(Job(Numbered(lengths, columnar), global_batch, 0, shuffle_rows), todo)


@pytest.mark.parametrize("num_workers", [1, 2])
def test_every_row_is_trained_once_with_loader_workers(num_workers: int) -> None:
    todo = ["step", 3, "step", "lose", "step", ("back", 2), "step", 1, "lose", 4, "epoch", "step", 2, ("back", 1)]
    follow(Job(Numbered([90, 31], True), 12, num_workers, 30), todo)


def test_rows_would_be_lost_and_doubled_without_the_hand_over() -> None:
    with pytest.raises(AssertionError):
        follow(Job(Numbered([90, 31]), 12, 0, 30, hands_over=False), ["step", "step", 3])


def test_job_goes_on_with_the_layout_of_its_state() -> None:
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
    with pytest.raises(UnsupportedLoaderError, match="order of 9 samples for this loader, which reads a stream here"):
        streamed.load_state(LoaderState(0, 0, 3, torch.arange(9)))


def test_plans_loader_workers_are_rounded_to_a_divisor_of_the_cycle() -> None:
    loader = ElasticLoader(DataLoader(stream(Numbered([9])), batch_size=3), 3, training=True)
    assert [loader.order.fitting_loader_workers(n) for n in (0, 1, 4, 5, 7, 11, 12, 13)] == [0, 1, 4, 4, 6, 6, 12, 12]


def test_workers_share_a_batch_as_one_reads_it_whole() -> None:
    source = Numbered([64, 33], columnar=True)

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
    steps = [[data.share_of_batch(step, 8, rank, size, max_workers=5) for rank in range(size)] for step in range(8)]
    assert [sum(map(len, step)) for step in steps] == [8, 8, 8, 7] * 2
    first, second = (flat(chain.from_iterable(steps[i : i + 4])) for i in (0, 4))
    assert sorted(first) == sorted(second) == data.source.all  # type: ignore[attr-defined]
    assert first != second
    alone = [list(data.share_of_batch(step, 8, max_workers=5)) for step in range(8)]
    assert [flat(step) for step in steps] == alone


# --- refused ------------------------------------------------------------------------------------------------------------------


def test_shuffled_dataloader_of_a_stream_is_refused_with_the_right_option() -> None:
    with pytest.raises(UnsupportedLoaderError, match="shuffle_rows=200_000"):
        ElasticLoader(DataLoader(stream(Numbered([9])), batch_size=3, shuffle=True), 3, training=True)


@pytest.mark.parametrize("columnar", [True, False])
def test_shard_that_is_shorter_than_counted_is_named(columnar: bool) -> None:
    data = stream(Numbered([10, 10], columnar, cut={"1": 4}))
    with pytest.raises(DataError, match="1 ended after 4 rows, but had 10 when the job counted them"):
        drawn(data)


def test_transform_that_drops_a_row_is_refused() -> None:
    data = stream(Numbered([10]), transform=lambda row: None if row == 3 else row)
    with pytest.raises(DataError, match=r"transform .*lambda.* returned None for a row"):
        drawn(data)


@pytest.mark.parametrize(
    "source, message",
    [
        (object(), "has no shards"),
        ([1, 2], "has no shards"),
    ],
)
def test_what_is_no_source_is_refused(source: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
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


@pytest.mark.parametrize("shuffle_rows", [-1, True, 1.5])
def test_wrong_number_of_rows_to_shuffle_is_refused(shuffle_rows: Any) -> None:
    with pytest.raises(ValueError, match="shuffle_rows="):
        stream(Numbered([1]), shuffle_rows=shuffle_rows)


def test_kept_order_and_shuffling_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="keep_order"):
        stream(Numbered([1]), shuffle_rows=10, keep_order=True)


def test_files_of_other_columns_are_named(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [1, 2]}), tmp_path / "1.parquet")
    pq.write_table(pa.table({"b": [1, 2]}), tmp_path / "2.parquet")
    with pytest.raises(DataError, match=r"2.parquet has the columns b: int64, and .*1.parquet has a: int64"):
        list(DataLoader(stream(parquet(str(tmp_path)), keep_order=True), batch_size=4))
