"""Assignment of samples to workers: none is lost, doubled or reordered, however the world changes."""

from __future__ import annotations

import copy
import io
import multiprocessing
import multiprocessing.util
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.fabric.utilities.data import _auto_add_worker_init_fn, _set_sampler_epoch
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    WeightedRandomSampler,
    get_worker_info,
)
from torch.utils.data.distributed import DistributedSampler

from lightning_dlrover.checks import UnsupportedLoaderError
from lightning_dlrover.data.lane_plan import share
from lightning_dlrover.live.loader import ElasticLoader
from lightning_dlrover.live.loader_workers import open_handle
from lightning_dlrover.live.order import FitPosition, epoch_order
from lightning_dlrover.live.train_loaders import TrainLoaders
from tests.support.loaders import Numbers, elastic, indices, over, rest_of, workers_of
from tests.support.waiting import eventually


class Backwards(Sampler[int]):
    """A user's own order."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.epochs: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.length - 1, -1, -1))

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


T = TypeVar("T")


class Materialised:
    """Peers that take the order which a function returns."""

    owned_sockets = ()
    speeds = ()

    def __init__(self, rank: int, materialise: Callable[[Any], Any], size: int = 2) -> None:
        self.place = rank, size
        self._materialise = materialise

    def of_rank_zero(self, mine: T) -> T:
        order: T = self._materialise(mine)
        return order


# --- for any world ------------------------------------------------------------------------------------------------------------


@given(st.integers(0, 500), st.integers(1, 70))
def test_shares_follow_each_other_and_differ_by_at_most_one(num_samples: int, world_size: int) -> None:
    shares = [share(num_samples, rank, world_size) for rank in range(world_size)]
    assert shares[0][0] == 0
    assert shares[-1][1] == num_samples
    assert all(before[1] == after[0] for before, after in pairwise(shares))
    lengths = {stop - start for start, stop in shares}
    assert max(lengths) - min(lengths) <= 1


@given(st.integers(0, 500), st.lists(st.integers(1, 2000), min_size=1, max_size=70))
def test_shares_by_speed_follow_each_other_and_differ_from_exact_ones_by_less_than_one(num: int, speeds: list[int]) -> None:
    shares = [share(num, rank, len(speeds), speeds) for rank in range(len(speeds))]
    assert (shares[0][0], shares[-1][1]) == (0, num)
    assert all(before[1] == after[0] for before, after in pairwise(shares))
    exact = [num * speed / sum(speeds) for speed in speeds]
    assert all(abs(stop - start - wanted) <= 1 for (start, stop), wanted in zip(shares, exact, strict=True))


@given(st.integers(1, 300), st.integers(0, 50), st.integers(0, 50))
def test_the_order_of_an_epoch_follows_from_seed_and_epoch_alone(num_samples: int, seed: int, epoch: int) -> None:
    order = epoch_order(num_samples, True, seed, epoch)
    assert torch.equal(order, epoch_order(num_samples, True, seed, epoch))
    assert sorted(order.tolist()) == list(range(num_samples))
    assert epoch_order(num_samples, False, seed, epoch).tolist() == list(range(num_samples))


@settings(max_examples=60)
@given(st.data(), st.integers(1, 40), st.integers(1, 9))
def test_global_batch_does_not_depend_on_the_number_of_workers(
    data: st.DataObject, length: int, global_batch_size: int
) -> None:
    alone = elastic(length, global_batch_size)
    world_size = 1
    loaders = [elastic(length, global_batch_size)]
    for batch in range(len(alone)):
        new_size = data.draw(st.sampled_from([world_size, world_size, 1, 2, 3, 5]))
        while len(loaders) < new_size:  # a joiner is at the beginning until it receives the others' position
            loaders.append(elastic(length, global_batch_size))
            loaders[-1].load_state(loaders[0].state())
        loaders = loaders[:new_size]
        if new_size != world_size or data.draw(st.booleans()):
            rewind = 1 if batch and data.draw(st.booleans()) else 0
            for rank, loader in enumerate(loaders):
                loader.reshard(rank, new_size, rewind)
                if rewind:
                    next(loader)  # the previous batch again
        world_size = new_size
        found: list[int] = []
        weights = []
        for loader in loaders:
            part, weight = indices(next(loader)), loader.split.loss_weight(batch)
            weights.append(weight)
            found += part if weight else []
        assert found == indices(next(alone))
        assert sum(weights) == pytest.approx(world_size)
    for loader in loaders:
        with pytest.raises(StopIteration):
            next(loader)


@settings(max_examples=30)
@given(st.integers(1, 30), st.integers(1, 9), st.integers(1, 6), st.lists(st.integers(1, 9), min_size=6, max_size=6))
def test_weighted_losses_of_all_workers_average_to_the_loss_of_one(
    length: int, global_batch_size: int, world_size: int, speeds: list[int]
) -> None:
    ranks = [elastic(length, global_batch_size, place=(rank, world_size)) for rank in range(world_size)]
    for loader in ranks if min(speeds) > 1 else ():
        loader.divide(tuple(speeds[:world_size]))
    for number, batch in enumerate(elastic(length, global_batch_size)):
        losses = [next(loader).double().mean() * loader.split.loss_weight(number) for loader in ranks]
        assert float(sum(losses) / world_size) == pytest.approx(float(batch.double().mean()))


@settings(max_examples=30)
@given(st.integers(1, 30), st.integers(1, 9), st.integers(1, 6))
def test_validation_sees_every_sample_once(length: int, global_batch_size: int, world_size: int) -> None:
    seen: list[int] = []
    for rank in range(world_size):
        seen += [i for batch in elastic(length, global_batch_size, training=False, place=(rank, world_size)) for i in batch]
    assert sorted(int(i) for i in seen) == list(range(length))


# --- arguments of the loader ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_drop_last_drops_the_rest_of_the_global_batch(world_size: int) -> None:
    ranks = [rest_of(elastic(20, 8, drop_last=True, place=(rank, world_size))) for rank in range(world_size)]
    assert [sum(map(len, parts)) for parts in zip(*ranks, strict=True)] == [8, 8]
    assert len(elastic(20, 8, drop_last=False)) == 3


def test_shuffling_is_kept_and_follows_the_epoch() -> None:
    loader = elastic(50, 50, shuffle=True)
    first = indices(next(loader))
    loader.set_epoch(1)
    iter(loader)
    second = indices(next(loader))
    assert first != second
    assert sorted(first) == sorted(second) == list(range(50))


@pytest.mark.parametrize(
    "options",
    [
        lambda seed: {"sampler": DistributedSampler(Numbers(40), 1, 0, shuffle=True, seed=seed)},
        lambda seed: {"shuffle": True, "generator": torch.Generator().manual_seed(seed)},
    ],
    ids=["Lightning's sampler", "generator"],
)
def test_order_follows_the_seed_of_the_loader(options: Callable[[int], dict[str, Any]]) -> None:
    first, again, other = (indices(next(elastic(40, 40, **options(seed)))) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_users_sampler_gives_the_order_and_gets_the_epoch() -> None:
    sampler = Backwards(20)
    loader = elastic(20, 8, sampler=sampler, place=(1, 2))
    assert [indices(batch) for batch in loader] == [[15, 14, 13, 12], [7, 6, 5, 4], [1, 0]]
    assert sampler.epochs == [0]


@pytest.mark.parametrize("kind", [RandomSampler, SequentialSampler])
def test_a_sampler_derived_from_a_known_one_is_the_users_own(kind: type[Any]) -> None:
    class Favourite(kind):  # type: ignore[misc]
        def __iter__(self) -> Iterator[int]:
            return iter([3] * 8)

    assert rest_of(elastic(8, 4, sampler=Favourite(Numbers(8)))) == [[3] * 4] * 2


def test_validation_gives_every_worker_samples_of_small_batches() -> None:
    ranks = [rest_of(elastic(7, 1, training=False, place=(rank, 3))) for rank in range(3)]
    assert [len(batches) > 0 for batches in ranks] == [True] * 3
    assert sorted(i for batches in ranks for batch in batches for i in batch) == list(range(7))


def test_a_random_sampler_of_the_users_own_is_drawn_once_and_shared() -> None:
    """Every process would draw a different order, so it is drawn once, by `materialise`."""
    drawn: list[list[int]] = []

    def materialise(order: list[int]) -> list[int]:
        drawn.append(order)
        return drawn[0]

    sampler = WeightedRandomSampler([1.0] * 12, 12)
    parts = []
    for rank in range(2):
        loader = over(DataLoader(Numbers(12), 4, sampler=sampler), 4, peers=Materialised(rank, materialise))
        parts.append([indices(batch) for batch in loader])
    assert len(drawn) == 2
    together = [a + b for a, b in zip(*parts, strict=True)]
    assert [i for batch in together for i in batch] == drawn[0]


@pytest.mark.parametrize("sampler", [RandomSampler(Numbers(9), replacement=True), RandomSampler(Numbers(9), num_samples=5)])
def test_random_samplers_with_a_number_of_their_own_keep_it(sampler: RandomSampler) -> None:
    assert sum(map(len, elastic(9, 3, sampler=sampler))) == len(sampler)


def test_joiner_continues_in_an_order_that_it_did_not_draw() -> None:
    there = elastic(12, 4, sampler=WeightedRandomSampler([1.0] * 12, 12))
    next(there)
    joiner = elastic(12, 4, sampler=WeightedRandomSampler([1.0] * 12, 12))
    joiner.load_state(there.state())
    expected = rest_of(there)
    assert len(expected) == 2
    assert rest_of(joiner) == expected


def test_random_sampler_is_drawn_again_for_each_lap() -> None:
    def made(rank: int) -> ElasticLoader:
        loader = elastic(12, 4, sampler=WeightedRandomSampler([1.0] * 12, 12, replacement=False), place=(rank, 2))
        loader.order._peers = Materialised(rank, lambda order: sent.setdefault("order", order))  # type: ignore[union-attr]
        loader.keep_step(8, cycles=True)
        return loader

    sent: dict[str, list[int]] = {}
    batches = zip(*(rest_of(made(rank)) for rank in range(2)), strict=True)
    shown = [i for of_ranks in batches for share in of_ranks for i in share]
    laps = shown[:12], shown[12:24]
    assert sorted(laps[0]) == sorted(laps[1]) == list(range(12))
    assert laps[0] != laps[1]  # equal once in 479,001,600 runs
    assert len(set(shown[24:])) == 8

    loader = made(0)
    loader.order.num_laps = 1  # type: ignore[union-attr]
    loader.order.take(torch.arange(12), 0)  # of a checkpoint that was saved before laps had orders of their own
    assert rest_of(loader) == [[0, 1], [4, 5], [8, 9]] * 2 + [[0, 1], [4, 5]]


# --- loader workers -----------------------------------------------------------------------------------------------------------


def test_batches_prepared_for_the_old_split_are_thrown_away() -> None:
    loader = elastic(40, 8, num_workers=2, prefetch_factor=4)
    assert indices(next(loader)) == list(range(8))
    loader.reshard(1, 2)  # all batches of a world of one are now in the loader's queue
    assert rest_of(loader) == [[8 * b + 4 + i for i in range(4)] for b in range(1, 5)]


def test_next_batch_is_prepared_before_it_is_asked_for(tmp_path: Path) -> None:
    data = Prepared(40, tmp_path)
    loader = over(DataLoader(data, 8, num_workers=1, prefetch_factor=1), 8)
    next(loader)
    loader.reshard(1, 2)
    loader.prepare_next()
    eventually(lambda: (12, data.by_process()[0][1]) in data.by_process(), "the next share's first sample")
    assert rest_of(loader)[0] == [12, 13, 14, 15]


def test_order_that_others_must_take_part_in_is_not_prepared() -> None:
    drawn: list[list[int]] = []

    def materialise(order: list[int]) -> list[int]:
        drawn.append(order)
        return order

    users = DataLoader(Numbers(12), 4, sampler=Backwards(12), num_workers=1, persistent_workers=True)
    loader = over(users, 4, peers=Materialised(0, materialise, size=1))
    loader.workers.warm_up()
    loader.prepare_next()
    assert not drawn
    next(loader)
    loader.prepare_next()
    assert len(drawn) == 1
    loader.set_epoch(1)  # the case of a joiner that has received no order
    loader.prepare_next()
    assert len(drawn) == 1


def test_prepared_batches_end_where_a_longer_epoch_does() -> None:
    loader = elastic(40, 8, num_workers=1)
    loader.keep_step(2, cycles=False)
    next(loader)
    loader.reshard(0, 1)
    loader.prepare_next()
    loader.keep_step(5, cycles=False)
    assert len(rest_of(loader)) == 4


def test_loader_worker_that_was_killed_fails_the_batch_and_not_its_preparation() -> None:
    loader = elastic(40, 8, num_workers=1)
    next(loader)
    worker = workers_of(loader)[0]
    worker.kill()
    worker.join()
    loader.reshard(0, 1)
    loader.prepare_next()
    with pytest.raises(RuntimeError, match="DataLoader worker"):
        next(loader)


@pytest.mark.parametrize("are_planned", [False, True])
def test_loader_workers_survive_a_change_of_the_world(are_planned: bool) -> None:
    loader = elastic(80, 8, num_workers=0 if are_planned else 1)
    next(loader)
    while are_planned and not loader.workers.retune(1):
        next(loader)
    before = workers_of(loader)[0].pid
    for world_size in (2, 1):
        loader.reshard(0, world_size)
        next(loader)
    assert workers_of(loader)[0].pid == before
    assert not loader.workers.refusal


def test_loader_workers_can_be_started_before_there_is_anything_to_fetch() -> None:
    loader = elastic(16, 8, num_workers=1)
    loader.workers.warm_up()
    assert [indices(batch) for batch in loader] == [list(range(8)), list(range(8, 16))]


@pytest.mark.parametrize("context", ["fork", "forkserver"])
def test_loader_workers_work_however_they_are_started(context: str) -> None:
    loader = elastic(8, 8, num_workers=1, multiprocessing_context=context)
    assert indices(next(loader)) == list(range(8))


def test_loader_workers_deliver_with_a_long_temporary_path(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 25)
    folder.mkdir()
    script = """
import torch
from torch.utils.data import DataLoader, TensorDataset
from lightning_dlrover.live.loader import ElasticLoader

loader = ElasticLoader(DataLoader(TensorDataset(torch.arange(8)), batch_size=4, num_workers=1), 4, True)
print(*(batch.tolist() for (batch,) in loader))
"""
    environment = {**os.environ, "TMPDIR": str(folder)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout == "[0, 1, 2, 3] [4, 5, 6, 7]\n", done.stderr
    assert list(folder.iterdir()) == []


def test_loader_workers_end_with_the_epoch_unless_they_were_to_persist() -> None:
    for persistent in (False, True):
        loader = elastic(8, 8, num_workers=1, persistent_workers=persistent)
        next(loader)
        assert bool(workers_of(loader)) == persistent


@pytest.mark.parametrize("persistent", [False, True])
def test_closing_ends_busy_loader_workers_at_once(persistent: bool) -> None:
    class Slow(Numbers):
        def __getitem__(self, index: int) -> int:
            time.sleep(60 * (index > 0))
            return index

    loader = over(DataLoader(Slow(9), 1, num_workers=2, persistent_workers=persistent), 1)
    next(loader)
    running: Any = loader.workers._feed.loader._iterator
    began = time.monotonic()
    loader.close()
    assert not any(worker.is_alive() for worker in running._workers)
    assert time.monotonic() - began < 4


# --- other loader workers while the loader is used ----------------------------------------------------------------------------


class Prepared(Dataset[int]):
    """Numbers that record the process that has prepared them."""

    def __init__(self, length: int, folder: Path, item_s: float = 0.0) -> None:
        self.length = length
        self.file = str(folder / "prepared")
        self.item_s = item_s

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        time.sleep(self.item_s)
        with open(self.file, "a") as file:
            file.write(f"{index} {os.getpid()}\n")
        return index

    def by_process(self) -> list[tuple[int, int]]:
        return [(int(a), int(b)) for a, b in (line.split() for line in Path(self.file).read_text().splitlines())]


actions = st.lists(
    st.one_of(
        st.just("next"),
        st.just("next"),
        st.just("epoch"),
        st.tuples(st.sampled_from([0, 1, 2, None]), st.sampled_from([1, 3, None])),
        st.tuples(st.just("reshard"), st.integers(1, 3), st.booleans()),
        st.just("prepare"),
    ),
    max_size=14,
)


@settings(max_examples=25)
@given(actions, st.sampled_from([0, 1, 2]), st.booleans(), st.booleans())
def test_no_sample_is_lost_or_doubled_by_changes_of_loader_workers(
    todo: list[Any], num_workers: int, persistent: bool, shuffle: bool
) -> None:
    loader = elastic(23, 4, shuffle=shuffle, num_workers=num_workers, persistent_workers=persistent and num_workers > 0)
    epoch, cursor, world = 0, 0, 1
    try:
        for each in [*todo, *["next"] * 6]:
            order = epoch_order(23, shuffle, loader.order.seed, epoch).tolist()
            if each == "epoch" or cursor == 6:
                if cursor == 6:
                    with pytest.raises(StopIteration):
                        next(loader)
                epoch, cursor = epoch + 1, 0
                loader.set_epoch(epoch)
                iter(loader)
                loader.reshard(0, world)
            elif each == "next":
                batch = order[4 * cursor : 4 * cursor + 4]
                start, stop = share(len(batch), 0, world)
                assert indices(next(loader)) == batch[start:stop]
                cursor += 1
            elif each == "prepare":
                loader.prepare_next()
            elif each[0] == "reshard":
                world, rewind = each[1], int(each[2] and cursor > 0)
                cursor -= rewind
                loader.reshard(0, world, rewind)
            else:
                loader.workers.retune(*each)
    finally:
        loader.close()


@pytest.mark.parametrize("before, after", [(1, 2), (2, 1), (1, 0), (0, 2)])
def test_batches_begun_by_old_loader_workers_are_prepared_once(before: int, after: int, tmp_path: Path) -> None:
    data = Prepared(40, tmp_path)
    users = DataLoader(data, 1, num_workers=before, prefetch_factor=3 if before else None)
    loader = over(users, 1)
    seen = [indices(next(loader)) for _ in range(5)]
    old = {pid for _, pid in data.by_process()}
    assert not loader.workers.retune(after, 2)
    assert loader.num_workers == before
    seen += rest_of(loader)
    assert loader.num_workers == after
    assert loader.workers.retune(after, 2)
    loader.close()
    assert seen == [[i] for i in range(40)]
    prepared = data.by_process()
    assert sorted(i for i, _ in prepared) == list(range(40))
    by_old = sorted(i for i, pid in prepared if pid in old)
    in_flight = max(3 * before, 2)
    assert by_old == list(range(5 + in_flight))
    assert len({pid for _, pid in prepared} - old) == (after or 1)


def test_training_does_not_wait_for_new_loader_workers(tmp_path: Path) -> None:
    item_s, step_s = 0.25, 0.35
    loader = over(DataLoader(Prepared(30, tmp_path, item_s), 1, num_workers=1, prefetch_factor=3), 1)
    waited = []
    for batch in range(14):
        if batch == 5:
            assert not loader.workers.retune(2, 2)
        indices(next(loader))
        waited.append(loader.wait_s)
        time.sleep(step_s)
    assert loader.num_workers == 2
    assert max(waited[2:]) < item_s / 2
    assert loader.workers.handover_s < item_s


def test_old_loader_workers_end_without_being_waited_for() -> None:
    loader = elastic(400, 1, num_workers=2)
    next(loader)
    old = list(workers_of(loader))
    loader.workers.retune(1)
    while any(worker.is_alive() for worker in old):
        time.sleep(0.01)
        next(loader)
    next(loader)
    assert loader.workers._dismissed == []


@pytest.mark.parametrize("num_workers, persistent", [(0, False), (2, False), (2, True)])
def test_random_numbers_of_the_model_ignore_loader_workers(num_workers: int, persistent: bool) -> None:
    def drawn(changes: dict[int, int]) -> list[float]:
        torch.manual_seed(5)
        loader = elastic(12, 1, num_workers=num_workers, persistent_workers=persistent)
        numbers = []
        for epoch in range(3):
            loader.set_epoch(epoch)
            iter(loader)
            for batch in range(12):
                loader.workers.retune(changes.get(12 * epoch + batch))
                next(loader)
                numbers.append(float(torch.rand(())))
        return numbers

    assert drawn({3: 1, 17: 0, 29: 2}) == drawn({}) == drawn({0: 1, 24: 0})


def test_persistent_loader_workers_stay_for_the_next_epoch() -> None:
    for persistent in (False, True):
        loader = elastic(16, 1, num_workers=1, persistent_workers=persistent)
        loader.workers.retune(2)
        rest_of(loader)
        before = loader.workers._feed.loader._iterator
        assert (before is not None) == persistent
        iter(loader)
        assert len(rest_of(loader)) == 16
        assert loader.workers._feed.loader._iterator is before


class Reader(Numbers):
    """Holds an open object deep inside."""

    def __init__(self, held: object) -> None:
        super().__init__(64)
        self.parts = [{"rows": torch.zeros(3)}, {"inner": (held,)}]


def test_a_dataset_with_an_open_file_gets_no_loader_workers(tmp_path: Path) -> None:
    """They would share its file position with the worker, and read each other's bytes."""
    with open(tmp_path / "rows.bin", "wb") as file:
        loader = over(DataLoader(Reader(file), 1), 1)
        next(loader)
        assert loader.workers.retune(1)
        assert "rows.bin" in loader.workers.refusal
        assert len(rest_of(loader)) == 63
        assert loader.num_workers == 0


class Unprepared(Numbers):
    """Can only be read in the process that created it."""

    def __init__(self, length: int, trouble: str, bad: int = -1) -> None:
        super().__init__(length)
        self.trouble = trouble
        self.bad = bad

    def __getitem__(self, index: int) -> int:
        if index == self.bad:
            raise ArithmeticError("the dataset's own")
        if get_worker_info() is not None and index > 20:
            if self.trouble == "killed":
                os.kill(os.getpid(), signal.SIGBUS)  # simulates exhausted shared memory
            raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")
        return index


@pytest.mark.parametrize("trouble", ["raises", "killed"])
def test_failure_of_planned_loader_workers_does_not_end_the_job(trouble: str) -> None:
    loader = over(DataLoader(Unprepared(60, trouble), 2), 2)
    seen = indices(next(loader))
    loader.workers.retune(2, 2)
    for batch in rest_of(loader):
        seen += batch
    assert seen == list(range(60))
    assert loader.num_workers == 0
    assert loader.workers.refusal
    assert loader.workers.retune(1)
    assert loader.num_workers == 0


@pytest.mark.parametrize("users, plans", [(1, None), (0, 1)])
def test_error_of_the_dataset_is_the_users_with_any_loader_workers(users: int, plans: int | None) -> None:
    loader = over(DataLoader(Unprepared(20, "raises", bad=9), 1, num_workers=users), 1)
    next(loader)
    loader.workers.retune(plans)
    with pytest.raises(ArithmeticError, match="the dataset's own"):
        rest_of(loader)


def test_only_open_resources_prevent_loader_workers() -> None:
    assert open_handle(Reader(io.BytesIO(b"in memory"))) == ""
    assert open_handle(Reader(lambda row: row)) == ""
    assert open_handle(Reader(list(range(10**6)))) == ""
    assert open_handle(Reader(torch.zeros(3))) == ""
    assert open_handle(Reader(torch.zeros(3, device="meta"))) == "a tensor on meta"
    assert "Connection" in open_handle(Reader(sqlite3.connect(":memory:")))
    with socket.socket() as opened:
        assert "socket" in open_handle(Reader(opened))


class Signalled:
    """Sends SIGTERM to each process that is forked, before torch or the package runs in it, as long as it is referenced."""

    def __init__(self) -> None:
        multiprocessing.util.register_after_fork(self, Signalled.end)

    def end(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)


class SignalMasks(Numbers):
    """Whether the process that fetches a sample blocks SIGTERM."""

    def __getitem__(self, index: int) -> int:
        assert get_worker_info() is not None
        return int(signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, set()))


def test_loader_worker_survives_the_end_of_its_group_while_it_starts() -> None:
    loader = elastic(4, 1, training=False, num_workers=1)
    signalled = Signalled()
    try:
        assert rest_of(loader) == [[0], [1], [2], [3]]
    finally:
        del signalled


def test_started_loader_worker_takes_signals_again() -> None:
    loader = over(DataLoader(SignalMasks(4), 1, num_workers=1), 1, training=False)
    assert not any(bool(batch) for batch in loader)
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, set())


# --- several loaders, one epoch ---------------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(st.data(), st.integers(1, 12), st.integers(1, 30), st.booleans())
def test_loader_that_is_cycled_gives_whole_laps_in_any_world(
    data: st.DataObject, length: int, num_batches: int, shuffle: bool
) -> None:
    def cycled(rank: int, world_size: int) -> ElasticLoader:
        loader = elastic(length, 4, place=(rank, world_size), shuffle=shuffle)
        loader.keep_step(num_batches, cycles=True)
        return loader

    expected = rest_of(cycled(0, 1))
    assert len(expected) == num_batches
    for first in range(0, num_batches - len(cycled(0, 1)) + 1, len(cycled(0, 1))):
        lap = [i for batch in expected[first : first + len(cycled(0, 1))] for i in batch]
        assert sorted(lap) == list(range(length))
    loaders, found = [cycled(0, 1)], []
    for batch in range(num_batches):
        size = data.draw(st.sampled_from([1, 2, 3]))
        rewind = 1 if batch and data.draw(st.booleans()) else 0
        while len(loaders) < size:
            loaders.append(cycled(0, 1))
            loaders[-1].load_state(loaders[0].state())
        loaders = loaders[:size]
        for rank, loader in enumerate(loaders):
            loader.reshard(rank, size, rewind)
            if rewind:
                loader.refetch()
        found.append([i for rank, x in enumerate(loaders) for i in indices(next(x))[: x.split.num_own_samples(batch)]])
    assert found == expected


def test_ended_loader_keeps_counting_and_can_be_rewound() -> None:
    loader = elastic(6, 2)
    loader.keep_step(5, cycles=False)
    assert rest_of(loader) == [[0, 1], [2, 3], [4, 5]]
    assert [loader.split.has_samples(batch) for batch in range(5)] == [True, True, True, False, False]
    assert loader.cursor == 4  # the batch in which it gave none
    loader.reshard(0, 1, rewind=2)
    assert indices(loader.refetch()) == [4, 5]
    with pytest.raises(StopIteration):
        loader.refetch()
    assert loader.cursor == 4


def test_loader_ends_with_the_trainers_epoch_if_that_is_shorter() -> None:
    loader = elastic(20, 2)
    loader.keep_step(3, cycles=False)
    assert len(rest_of(loader)) == 3


def train_loaders(combined: CombinedLoader, has_global_batch_size: bool = False) -> TrainLoaders:
    """The loaders of a Trainer with epochs of 5 batches."""
    val_loop = SimpleNamespace(_combined_loader=None)
    fit_loop = SimpleNamespace(_combined_loader=combined, epoch_loop=SimpleNamespace(val_loop=val_loop))
    trainer: Any = SimpleNamespace(fit_loop=fit_loop, num_training_batches=5, accumulate_grad_batches=1)
    return TrainLoaders(trainer, FitPosition(None), has_global_batch_size)


def test_loss_weighs_by_the_first_loader_that_takes_part(caplog: pytest.LogCaptureFixture) -> None:
    long, short = elastic(20, 4, place=(0, 3)), elastic(5, 4, place=(0, 3))
    combined = CombinedLoader([short, long], "max_size")
    iter(combined)
    loaders = train_loaders(combined)
    loaders.keep_step()
    assert loaders.loss_weight(0) == pytest.approx(2 * 3 / 4)
    assert loaders.loss_weight(2) == pytest.approx(2 * 3 / 4)
    assert not caplog.records
    assert loaders.loss_weight(1) == pytest.approx(1 * 3 / 1)  # the last sample of the shorter one, all of it here
    assert "are not split equally over 3 workers" in caplog.text


def test_one_global_batch_size_for_unlike_loaders_is_refused() -> None:
    loaders = [elastic(20, 8, batch_size=size) for size in (4, 8)]
    with pytest.raises(UnsupportedLoaderError, match=r"batch sizes \[4, 8\], and global_batch_size would give each"):
        train_loaders(CombinedLoader(loaders), has_global_batch_size=True).keep_step()


def test_iterable_dataset_with_another_loader_is_refused() -> None:
    class Endless(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(int, 1)

    endless = ElasticLoader(DataLoader(Endless(), batch_size=4), 4, training=True)
    with pytest.raises(UnsupportedLoaderError, match="one of them of the IterableDataset Endless: its end is not known before"):
        train_loaders(CombinedLoader([elastic(20, 4), endless])).keep_step()


@pytest.mark.parametrize(
    ("num_workers", "allowed", "is_refused"), [((0, 1), False, True), ((0, 1), True, False), ((1, 2), False, False)]
)
def test_loaders_without_loader_workers_are_not_tunable_by_default(
    num_workers: tuple[int, int], allowed: bool, is_refused: bool
) -> None:
    loaders = train_loaders(CombinedLoader([elastic(num_workers=number) for number in num_workers]))
    loaders.may_add_workers = allowed
    assert ("num_workers=0" in loaders.refusal) == is_refused


def test_order_that_was_agreed_on_holds_for_loaders_made_later() -> None:
    first, later = elastic(20, 4, shuffle=True), elastic(20, 4, shuffle=True)
    loaders = train_loaders(CombinedLoader([first]))
    loaders.keep_step()
    loaders.take_order_seeds([7])
    loaders._trainer.fit_loop._combined_loader = CombinedLoader([later])
    loaders.keep_step()
    assert (first.order.seed, later.order.seed) == (7, 7)
    assert rest_of(later) == [order.tolist() for order in epoch_order(20, True, 7, 0).split(4)]  # type: ignore[no-untyped-call]


class Counted(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


@pytest.mark.parametrize("dataset", [Counted(), Numbers(8)])
def test_loader_that_is_replaced_leaves_no_process(dataset: Dataset[int]) -> None:
    def made(training: bool) -> ElasticLoader:
        persistent = not isinstance(dataset, Counted)  # loader workers of an IterableDataset outlive an epoch anyway
        loader = over(DataLoader(dataset, 4, num_workers=1, persistent_workers=persistent), 4, training)
        loaders.attend(loader)
        return loader

    before = set(multiprocessing.active_children())
    loaders = train_loaders(CombinedLoader([]))
    fit_loop: Any = loaders._trainer.fit_loop
    for _ in range(3):
        fit_loop._combined_loader = CombinedLoader([made(True)])
        loaders.keep_step()
        rest_of(loaders.first)
        fit_loop.epoch_loop.val_loop._combined_loader = CombinedLoader([validation := made(False)])
        loaders.close_unused()
        rest_of(validation)
        assert len(set(multiprocessing.active_children()) - before) == 2
    loaders.close()
    assert set(multiprocessing.active_children()) == before


# --- behaviour towards user code ----------------------------------------------------------------------------------------


def test_user_code_reads_its_loader() -> None:
    sampler = Backwards(20)
    loader = elastic(batch_size=5, sampler=sampler, drop_last=True, timeout=0)
    assert (loader.batch_size, loader.drop_last, loader.num_workers, loader.timeout) == (5, True, 0, 0)
    assert loader.collate_fn is torch.utils.data.default_collate
    assert loader.sampler is sampler
    assert (loader.batch_sampler.batch_size, loader.batch_sampler.drop_last) == (5, True)
    assert isinstance(loader.dataset, Numbers)
    with pytest.raises(AttributeError, match="no_such"):
        _ = loader.no_such


def test_lightning_sets_the_epoch_of_every_loader() -> None:
    sampler = Backwards(20)
    for loader in (elastic(shuffle=True), elastic(sampler=sampler)):
        _set_sampler_epoch(loader, 3)
        assert loader.epoch == 3
    assert sampler.epochs == [3]


@pytest.mark.parametrize("name", ["batch_size", "dataset", "num_workers", "sampler", "weights"])
def test_a_change_that_would_have_no_effect_is_an_error(name: str) -> None:
    with pytest.raises(AttributeError, match=name):
        setattr(elastic(), name, 3)


def test_state_of_an_unread_loader_is_not_saved() -> None:
    class Stateful(DataLoader[int]):
        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise AssertionError

    loader = ElasticLoader(Stateful(Numbers(5), 2), 2, training=True)
    assert not hasattr(loader, "state_dict")
    assert copy.copy(loader).batch_size == 2


def test_batches_come_in_order_even_with_in_order_false() -> None:
    class FirstIsSlow(Numbers):
        def __getitem__(self, index: int) -> int:
            if index == 0:
                time.sleep(0.3)
            return index

    loader = over(DataLoader(FirstIsSlow(6), 1, num_workers=2, in_order=False), 1)
    assert rest_of(loader) == [[i] for i in range(6)]
    loader.close()


def test_plain_batch_sampler_is_split_as_any_other_loader() -> None:
    given = BatchSampler(RandomSampler(Numbers(20)), 8, True)
    loader = over(DataLoader(Numbers(20), batch_sampler=given), 8)
    assert rest_of(loader) == [order.tolist() for order in epoch_order(20, True, loader.order.seed, 0)[:16].split(8)]  # type: ignore[no-untyped-call]


def test_workers_seeded_by_their_rank_have_one_order() -> None:
    ours, theirs = (elastic(shuffle=True, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    theirs.load_state(ours.state())
    assert rest_of(ours) == rest_of(theirs)


@pytest.mark.parametrize(
    "order, problem",
    [
        ([0, 1], "gave 2 samples in epoch 0, but its length is 3"),
        (["a", "b", "c"], "gives 'a', not a sample's number"),
        ([(0, 1), (1, 1), (2, 1)], "not the numbers of samples"),
        ([0.5, 1.0, 1.5], "not the numbers of samples"),
    ],
)
def test_a_sampler_that_gives_no_order_of_samples_is_refused(order: list[Any], problem: str) -> None:
    class Odd(Backwards):
        def __iter__(self) -> Iterator[int]:
            return iter(order)

    with pytest.raises(UnsupportedLoaderError, match=problem):
        next(elastic(3, 3, sampler=Odd(3)))


def test_a_loader_that_makes_its_own_iterators_keeps_its_workers() -> None:
    class Filtering(DataLoader[int]):
        """Like loaders of graphs."""

        def _get_iterator(self) -> Any:
            return super()._get_iterator()

    loader = ElasticLoader(Filtering(Numbers(5), 1), 1, training=True)
    assert loader.workers.retune(1)
    assert (loader.num_workers, loader.workers.refusal) == (0, "Filtering makes its iterators itself")


class Wrapped:
    """Batches of an iterator, each one changed."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __iter__(self) -> Wrapped:
        return self

    def __next__(self) -> Any:
        return -next(self.inner)

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        self.inner._reset(loader, first_iter)


class OfGraphs(DataLoader[int]):
    """Like NeighborLoader of PyTorch Geometric."""

    def _get_iterator(self) -> Any:
        return Wrapped(super()._get_iterator())


@pytest.mark.parametrize("persistent", [False, True])
def test_loader_that_wraps_its_iterator_is_resharded_and_closed(persistent: bool) -> None:
    before = set(multiprocessing.active_children())
    loader = over(OfGraphs(Numbers(16), 4, num_workers=2, persistent_workers=persistent), 4)
    for _ in range(2):
        assert indices(next(loader)) == [0, -1, -2, -3]
        loader.reshard(1, 2)
        assert rest_of(loader) == [[-6, -7], [-10, -11], [-14, -15]]
        iter(loader)
    assert [*loader.workers.fetch_apart([3, 5], list)] == [[3], [5]]
    loader.close()
    assert set(multiprocessing.active_children()) == before


def test_loader_whose_iterator_hides_its_loader_workers_is_refused() -> None:
    class Hiding(DataLoader[int]):
        def _get_iterator(self) -> Any:
            return (batch for batch in super()._get_iterator())

    with pytest.raises(UnsupportedLoaderError, match="Hiding hands out its batches through a generator"):
        ElasticLoader(Hiding(Numbers(16), 4, num_workers=1), 4, training=True)


def test_lightning_seeds_workers_of_any_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_SEED_WORKERS", "1")  # set by `seed_everything(workers=True)`, which LightningCLI calls by default
    loader = ElasticLoader(DataLoader(Numbers(6), 2, num_workers=1), 2, training=True)
    _auto_add_worker_init_fn(loader, rank=0)
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5]]
