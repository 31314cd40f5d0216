"""Any `IterableDataset` gives the same global batches in each world, with and without loader workers."""

from __future__ import annotations

import io
import itertools
import math
import os
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset, get_worker_info

from lightning_dlrover.checks import UnsupportedLoaderError
from lightning_dlrover.data import iterable
from lightning_dlrover.data.source import DataError
from lightning_dlrover.live.data_agreement import settings_for
from lightning_dlrover.live.loader import ElasticLoader
from lightning_dlrover.live.order import UNKNOWN, IterableOrder, IterableSettings
from lightning_dlrover.rdzv.transport import transfer
from tests.support.iterable_loaders import (
    SETTINGS,
    GoesOn,
    GoesOnElsewhere,
    LossyState,
    NumpyState,
    Opaque,
    Shuffled,
    SplitByWorker,
    Stateful,
    Sticky,
    chunks,
    global_batches,
    make,
    rest,
    shares,
)


def order_of(loader: ElasticLoader) -> IterableOrder:
    assert loader.iterable is not None
    return loader.iterable


@pytest.fixture(autouse=True)
def _snapshots_at_every_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(iterable, "SNAPSHOT_S", 0.0)
    monkeypatch.setattr(iterable, "MAX_SNAPSHOT_SHARE", math.inf)


@pytest.mark.parametrize("num_rows", [0, 1, 2, 8, 16, 17, 20, 23])
@pytest.mark.parametrize("kind", [Opaque, Stateful])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_all_worlds_read_the_same_global_batches_and_end_together(kind: Any, world: int, num_rows: int) -> None:
    loaders = [make(kind(num_rows), rank, world) for rank in range(world)]
    assert global_batches([shares(loader) for loader in loaders]) == chunks(num_rows)
    for loader in loaders:
        assert loader.num_epoch_batches == len(chunks(num_rows)) == loader.cursor
        assert loader.split.num_samples == num_rows
        if num_rows:
            last = loader.cursor - 1
            assert loader.split.loss_weight(last) * (num_rows - 8 * last) == loader.split.num_own_samples(last) * world


@pytest.mark.parametrize("num_rows", [0, 7, 8, 15, 16])
def test_incomplete_last_batch_is_dropped_if_the_loader_says_so(num_rows: int) -> None:
    loaders = [make(Opaque(num_rows), rank, 2, drop_last=True) for rank in range(2)]
    assert global_batches([shares(loader) for loader in loaders]) == [each for each in chunks(num_rows) if len(each) == 8]
    assert loaders[0].cursor == loaders[0].num_epoch_batches == num_rows // 8


@pytest.mark.parametrize("world", [1, 3])
def test_loader_worker_reads_the_same_as_this_process(world: int) -> None:
    for kind in (Opaque, Stateful):
        loaders = [make(kind(43), rank, world, num_workers=2) for rank in range(world)]
        assert [loader.num_workers for loader in loaders] == [1] * world
        assert global_batches([shares(loader) for loader in loaders]) == chunks(43)
        for loader in loaders:
            loader.close()


def test_last_batch_is_known_to_be_the_last_when_it_is_handed_out() -> None:
    fetcher = SimpleNamespace(prefetch_batches=1, fetched=1, length=None)
    loader = make(Opaque(16), settings=IterableSettings(fit_loop=SimpleNamespace(_data_fetcher=fetcher)))
    assert fetcher.prefetch_batches == 0
    next(loader)
    assert fetcher.length is None
    assert loader.num_epoch_batches == UNKNOWN // 8
    next(loader)
    assert fetcher.length == 2


def test_length_is_unknown_unless_the_dataset_has_one() -> None:
    with pytest.raises(TypeError):
        len(make(Opaque(16)))

    class Sized(Opaque):
        def __len__(self) -> int:
            return 17

    assert len(make(Sized(17))) == 3
    assert len(make(Sized(17), drop_last=True)) == 2


def test_infinite_dataset_is_read_as_far_as_it_is_used() -> None:
    dataset = Opaque(None)
    loader = make(dataset)
    assert shares(loader, 5) == chunks(40)
    assert dataset.num_read == 41  # one row ahead


def test_number_of_batches_limits_an_epoch() -> None:
    loader = make(Opaque(None))
    loader.keep_step(3, cycles=True)
    assert shares(loader) == chunks(24)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_worker_info_is_hidden_so_that_no_row_is_skipped(num_workers: int) -> None:
    loader = make(SplitByWorker(), num_workers=num_workers, persistent_workers=num_workers > 0)
    assert shares(loader) == chunks(30)
    loader.close()


def test_start_up_function_of_loader_workers_finds_the_users_dataset() -> None:
    def prepare(worker_id: int) -> None:
        info: Any = get_worker_info()
        info.dataset.num_rows = 10 * info.num_workers + worker_id

    loader = make(Opaque(0), num_workers=2, worker_init_fn=prepare)
    assert shares(loader) == chunks(10)
    loader.close()


def test_state_with_classes_of_the_script_is_not_shared(caplog: pytest.LogCaptureFixture) -> None:
    class WithObjects(Stateful):
        def state_dict(self) -> dict[str, Any]:
            return {"next": self.next, "how": make}

    old = make(WithObjects(100))
    shares(old, 6)
    assert old.state().iterable["snapshot"] is None  # type: ignore[index]
    assert "the state of WithObjects is not shared" in caplog.text


def test_time_that_serializing_takes_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    num_taken = 0

    def dumps_large_state(state: object, dumps: Any = transfer.dumps) -> bytes:
        nonlocal num_taken
        num_taken += 1
        time.sleep(0.2)
        return bytes(dumps(state))

    monkeypatch.setattr(transfer, "dumps", dumps_large_state)
    monkeypatch.setattr(iterable, "MAX_SNAPSHOT_SHARE", 0.02)
    assert shares(make(Stateful(200))) == chunks(200)
    assert num_taken == 1  # the next one comes after 10 s


@pytest.mark.parametrize("num_workers", [0, 1])
def test_unseeded_numbers_are_the_same_on_all_workers_and_differ_by_epoch(num_workers: int) -> None:
    read = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        loader = make(Shuffled(), num_workers=num_workers)
        before = random.getstate(), str(np.random.get_state())
        epochs = [shares(loader)]
        assert random.getstate() == before[0]
        assert str(np.random.get_state()) == before[1]
        iter(loader)
        loader.set_epoch(1)
        epochs.append(shares(loader))
        loader.close()
        read.append(epochs)
    assert read[0] == read[1]
    assert read[0][0] != read[0][1]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_batches_are_given_again_to_another_split(num_workers: int) -> None:
    dataset = Opaque(100)
    loader = make(dataset, num_workers=num_workers, persistent_workers=num_workers > 0)
    for _ in range(5):
        next(loader)
    loader.reshard(1, 2, rewind=1)
    assert loader.refetch().tolist() == [36, 37, 38, 39]
    loader.reshard(0, 1)
    assert loader.refetch().tolist() == list(range(40, 48))
    if not num_workers:
        assert dataset.num_read == 49  # nothing was read twice
    loader.close()


def test_last_batch_is_given_again_after_the_end() -> None:
    dataset = Opaque(20)
    loader = make(dataset)
    shares(loader)
    loader.reshard(0, 2, rewind=1)
    assert loader.refetch().tolist() == [16, 17]
    assert dataset.num_read == 20


def test_accumulated_batches_are_kept() -> None:
    dataset = Opaque(100)
    loader = make(dataset)
    order_of(loader).redo_batches = 5
    for _ in range(8):
        next(loader)
    loader.reshard(0, 1, rewind=4)
    assert shares(loader, 2) == chunks(100)[4:6]
    assert dataset.num_read == 65


@pytest.mark.parametrize("kind", [Stateful, GoesOn])
def test_epoch_begins_with_the_first_row_wherever_the_last_one_was_left(kind: Any) -> None:
    loader = make(kind(100))
    shares(loader, 4)
    for epoch in (1, 2):
        iter(loader)
        loader.set_epoch(epoch)
        assert shares(loader, 13 if epoch == 1 else 2) == chunks(100)[: 13 if epoch == 1 else 2]
    state = make(kind(100)).state()
    loader.load_state(state)
    assert shares(loader) == chunks(100)


@pytest.mark.parametrize("kind", [Stateful, GoesOn, Sticky])
@pytest.mark.parametrize("ends", [True, False])
@pytest.mark.parametrize("begins_late", [True, False])
def test_epoch_after_a_state_was_loaded_begins_with_the_first_row(kind: Any, ends: bool, begins_late: bool) -> None:
    old, joiner = make(kind(100)), make(kind(100))
    shares(joiner, 2 if begins_late else 0)
    shares(old, 6)
    joiner.load_state(old.state())
    assert shares(joiner, 1000 if ends else 2) == chunks(100)[6 : 13 if ends else 8]
    iter(joiner)
    joiner.set_epoch(1)
    assert shares(joiner) == chunks(100)


@pytest.mark.parametrize("num_read", [0, 2, 9])
def test_state_that_fails_in_the_middle_of_an_epoch_is_forgotten(num_read: int) -> None:
    old, joiner = make(GoesOnElsewhere(100)), make(GoesOnElsewhere(100))
    shares(joiner, num_read)
    shares(old, 6)
    joiner.load_state(old.state())
    assert shares(joiner) == chunks(100)[6:]


def test_rollback_further_than_rows_are_kept_reads_the_epoch_again() -> None:
    dataset = Opaque(100)
    loader = make(dataset)
    early = loader.state()
    for _ in range(8):
        next(loader)
    loader.load_state(early)
    assert shares(loader) == chunks(100)
    assert dataset.num_read == 165


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("kind", [Opaque, Stateful])
def test_joiner_continues_where_the_others_are(kind: Any, num_workers: int) -> None:
    old = make(kind(100), 0, 1)
    before = shares(old, 6)
    state = old.state()
    old.reshard(0, 2)
    dataset = kind(100)
    joiner = make(dataset, 1, 2, num_workers=num_workers)
    joiner.load_state(state)
    assert before + global_batches([shares(old), shares(joiner)]) == chunks(100)
    if not num_workers:
        assert dataset.num_read == (52 if kind is Stateful else 100)
    joiner.close()


def test_joiner_with_unseeded_numbers_continues_with_the_same_rows() -> None:
    class StatefulNoise(Stateful):
        def __iter__(self) -> Iterator[Any]:
            return (row + random.random() / 2 for row in super().__iter__())

    class StatefulOrder(Stateful):
        def __iter__(self) -> Iterator[Any]:
            order = torch.randperm(self.num_rows).tolist()
            return (order[row] for row in super().__iter__())

    for kind in (StatefulNoise, StatefulOrder):
        old, joiner = make(kind(100)), make(kind(100))
        shares(old, 6)
        joiner.load_state(old.state())
        assert shares(joiner) == shares(old)


def test_state_that_does_not_restore_the_rows_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    old, joiner = make(LossyState(100)), make(LossyState(100))
    shares(old, 6)
    joiner.load_state(old.state())
    assert shares(joiner) == shares(old) == chunks(100)[6:]
    assert "with another row than expected" in caplog.text


class Thing:
    def __init__(self, number: int) -> None:
        self.number = number


class Unknown(Thing):
    def __reduce_ex__(self, _: Any) -> Any:
        raise TypeError("cannot be pickled")


@pytest.mark.parametrize("kind, message", [(Thing, "another row than expected: rows in"), (Unknown, "cannot be recognised")])
def test_state_is_checked_by_objects_as_rows(kind: type[Thing], message: str, caplog: pytest.LogCaptureFixture) -> None:
    class Things(LossyState):
        def __iter__(self) -> Iterator[Any]:
            yield from map(kind, super().__iter__())

    def collate(things: list[Thing]) -> torch.Tensor:
        return torch.tensor([thing.number for thing in things])

    old, joiner = (make(Things(100), collate_fn=collate) for _ in range(2))
    shares(old, 6)
    joiner.load_state(old.state())
    assert shares(joiner) == chunks(100)[6:]
    assert message in caplog.text


def test_state_is_checked_even_if_workers_do_not_compare_rows(caplog: pytest.LogCaptureFixture) -> None:
    trainer = SimpleNamespace(testing=False, limit_val_batches=1.0)
    settings = settings_for(trainer, training=False, global_batch_size=8, max_catch_up_s=60.0, compare_data=False)
    old, joiner = (make(LossyState(100), settings=settings) for _ in range(2))
    seen = old.peek()
    assert seen is not None
    assert seen.first is None
    shares(old, 6)
    joiner.load_state(old.state())
    assert shares(joiner) == chunks(100)[6:]
    assert "with another row than expected" in caplog.text


def test_checkpoint_resumes_in_another_world() -> None:
    for kind in (Opaque, Stateful, GoesOn, NumpyState):
        old = make(kind(100))
        before = shares(old, 7)
        saved = torch.load(_bytes(order_of(old).in_checkpoint()), weights_only=True)
        datasets = [kind(100) for _ in range(3)]
        resumed = [make(dataset, rank, 3) for rank, dataset in enumerate(datasets)]
        for loader in resumed:
            loader.cursor = 7
            order_of(loader).resume_from(saved)
        assert before + global_batches([shares(loader) for loader in resumed]) == chunks(100)
        assert all(dataset.num_read == 44 for dataset in datasets if kind is NumpyState)  # rows after the state


def test_order_that_depends_on_the_number_of_passes_is_refused_after_a_checkpoint() -> None:
    class Counts(Opaque):
        num_passes = 0

        def __iter__(self) -> Iterator[int]:
            self.num_passes += 1
            yield from random.Random(self.num_passes).sample(range(100), 100)

    old, resumed = make(Counts(100)), make(Counts(100))
    shares(old)
    for loader in (old, resumed):
        iter(loader)
        loader.set_epoch(1)
    shares(old, 7)
    resumed.cursor = 7
    order_of(resumed).resume_from(torch.load(_bytes(order_of(old).in_checkpoint()), weights_only=True))
    with pytest.raises(DataError, match=r"Counts gives other rows than before: row 0 of epoch 1.* set_epoch\(epoch\)"):
        next(resumed)


def _bytes(obj: object) -> Any:
    file = io.BytesIO()
    torch.save(obj, file)
    file.seek(0)
    return file


def catching_up(joiner: ElasticLoader, cursor: int) -> ElasticLoader:
    joiner.cursor = cursor
    order_of(joiner).is_catching_up = True
    return joiner


@pytest.mark.parametrize(
    "row_s, limit_s, cursor, message",
    [(0.001, 0.5, 10_000, r"80000 rows .* limit of 0.5 s. Give Slow the methods state_dict\(\)"), (0.02, 0.2, 6, "48 rows")],
    ids=["refused early", "few rows, refused at the limit"],
)
def test_joiner_that_reads_too_slowly_is_refused(row_s: float, limit_s: float, cursor: int, message: str) -> None:
    class Slow(Opaque):
        def __iter__(self) -> Iterator[int]:
            for row in super().__iter__():
                time.sleep(row_s)
                yield row

    joiner = catching_up(make(Slow(None), 1, 2, settings=IterableSettings(max_catch_up_s=limit_s)), cursor)
    began = time.monotonic()
    with pytest.raises(DataError, match=message):
        joiner.peek()
    assert time.monotonic() - began < 0.5


def test_time_that_a_state_takes_counts_for_the_limit() -> None:
    class SlowState(LossyState):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            time.sleep(0.3)
            super().load_state_dict(state)

    old = make(SlowState(100))
    shares(old, 6)
    joiner = make(SlowState(100), settings=replace(SETTINGS, max_catch_up_s=0.2))
    joiner.load_state(old.state())
    order_of(joiner).is_catching_up = True
    with pytest.raises(DataError, match="0 of them in 0"):
        joiner.peek()


def test_slow_first_row_does_not_show_the_speed() -> None:
    class SlowStart(Opaque):
        def __iter__(self) -> Iterator[int]:
            time.sleep(0.1)
            yield from super().__iter__()

    joiner = catching_up(make(SlowStart(1000), settings=IterableSettings(max_catch_up_s=0.5)), 100)
    assert shares(joiner) == chunks(1000)[100:]


def test_error_of_the_dataset_is_raised_again_and_never_taken_for_the_end() -> None:
    class Broken(Opaque):
        def __iter__(self) -> Iterator[int]:
            yield from range(10)
            raise OSError("the disk is gone")

    loader = make(Broken(None))
    assert next(loader).tolist() == list(range(8))
    for _ in range(2):
        with pytest.raises(OSError, match="the disk is gone"):
            next(loader)
        loader.reshard(0, 1)


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_validation_splits_the_counted_rows(world: int, num_workers: int) -> None:
    loaders = [make(Opaque(20), rank, world, training=False, num_workers=num_workers) for rank in range(world)]
    assert len(loaders[0]) == 3
    found = [[row for batch in rest(loader) for row in batch.tolist()] for loader in loaders]
    assert sorted(itertools.chain(*found)) == list(range(20))
    for loader in loaders:
        iter(loader)
        loader.deal([np.array([3, 4, 9]), np.array([1])])
        assert [batch.tolist() for batch in rest(loader)] == [[3, 4, 9], [1]]
        loader.close()


@pytest.mark.parametrize("is_iterable", [True, False])
def test_shuffled_validation_is_split_though_each_worker_has_its_own_seed(
    is_iterable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[float] = []
    for rank in range(3):
        monkeypatch.setenv("PL_GLOBAL_SEED", str(1000 + rank))
        dataset: Any = Shuffled() if is_iterable else TensorDataset(torch.arange(40))
        options: dict[str, Any] = {} if is_iterable else {"shuffle": True}
        for batch in rest(make(dataset, rank, 3, training=False, **options)):
            found += (batch if is_iterable else batch[0]).tolist()
    assert sorted(int(each) for each in found) == list(range(40))


def test_endless_validation_is_counted_up_to_its_limit() -> None:
    loader = make(Opaque(None), training=False, settings=IterableSettings(max_rows=24))
    assert len(loader) == 3


@pytest.mark.parametrize("options", [{}, {"num_workers": 1}, {"num_workers": 1, "persistent_workers": True}])
def test_new_epoch_begins_with_set_epoch(options: dict[str, Any]) -> None:
    class ByEpoch(Opaque):
        def set_epoch(self, epoch: int) -> None:
            self.num_rows = 8 * (epoch + 1)

    loader = make(ByEpoch(None), **options)
    for epoch in range(3):
        iter(loader)
        loader.set_epoch(epoch)
        assert shares(loader) == chunks(8 * (epoch + 1))
    loader.close()


def test_epoch_ends_before_a_length_that_is_too_large() -> None:
    class Sized(Opaque):
        def __len__(self) -> int:
            return 100

    fetcher: Any = SimpleNamespace(prefetch_batches=1, fetched=2, length=None)
    loader = make(Sized(20), settings=IterableSettings(fit_loop=SimpleNamespace(_data_fetcher=fetcher)))
    loader.keep_step(len(loader), cycles=True)
    lengths = []
    for expected in chunks(20):
        assert shares(loader, 1) == [expected]
        lengths.append(fetcher.length)
    assert lengths == [None, None, 3]
    assert shares(loader) == []
    assert loader.num_epoch_batches == 3


def test_forked_process_has_an_iterator_of_its_own() -> None:
    loader = make(Opaque(100))
    next(loader)
    reader: Any = order_of(loader).reading_loader.dataset
    child = os.fork()
    if not child:
        request = next(order_of(loader).requests(1))
        rows = reader.__getitems__(request)
        os._exit(0 if list(rows) == list(range(8, 16)) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert next(loader).tolist() == list(range(8, 16))


def test_loaders_that_make_batches_themselves_are_refused() -> None:
    with pytest.raises(UnsupportedLoaderError, match="takes whole batches from Opaque"):
        ElasticLoader(DataLoader(Opaque(8), batch_size=None), 8, True)

    class StatefulDataLoader(DataLoader[int]):
        def __iter__(self) -> Any:
            return super().__iter__()

    with pytest.raises(UnsupportedLoaderError, match="Use a plain DataLoader"):
        ElasticLoader(StatefulDataLoader(Opaque(8), batch_size=2), 8, True)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("accumulated", [1, 4])
def test_reader_keeps_as_many_rows_as_documented(accumulated: int, drop_last: bool) -> None:
    loader = ElasticLoader(DataLoader(Opaque(400), 8, drop_last=drop_last), 8, training=True)
    order_of(loader).redo_batches = accumulated + 1  # as the loaders of a Trainer that accumulates so many batches
    iter(loader)
    for _ in range(20):
        loader.refetch()
    reader: Any = loader.workers._feed.loader.dataset
    assert len(reader._current._kept) == (accumulated + 2) * 8 + (8 if drop_last else 1)


def test_reader_keeps_batches_that_are_prepared_ahead_too() -> None:
    loader = ElasticLoader(DataLoader(Opaque(400), 8, num_workers=1, prefetch_factor=3), 8, training=True)
    order_of(loader).redo_batches = 2
    iter(loader)
    try:
        for _ in range(20):
            loader.refetch()
        assert loader.workers._feed.asked_for - loader.cursor == 3
        requests: list[Any] = list(itertools.islice(loader.shares(loader.cursor), 3))
        assert max(each.first_row + each.batch_size - each.keep_from for each in requests) <= (1 + 2 + 3) * 8
    finally:
        loader.close()
