"""Users' data loaders: the kinds that are split, and the kinds that are refused with a remedy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    StackDataset,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
    random_split,
)
from torch.utils.data.distributed import DistributedSampler

from lightning_dlrover.checks import Batching, UnsupportedLoaderError, batching_of, check_data_loader, check_step_signature
from lightning_dlrover.data import Shard
from lightning_dlrover.data import stream as streamed


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> int:
        return index


DATA = Numbers()


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(5))


class Counted:
    def shards(self) -> list[Shard]:
        return [Shard("a", 20)]

    def read(self, shard: Shard, row: int) -> Iterator[int]:
        yield from range(row, shard.rows)


class Around(Dataset[Any]):
    """A dataset of the user's own that takes rows of another one."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]

    def __len__(self) -> int:
        return len(self.dataset)


class OwnBatches(BatchSampler):
    """A user's own composition of batches."""


class Own(Sampler[int]):
    """A user's own order of the whole epoch."""

    def __len__(self) -> int:
        return 20

    def __iter__(self) -> Iterator[int]:
        return iter(range(20))


class RankAware(Own):
    """Derived from Sampler, not from DistributedSampler, as in DeiT's repeated augmentation."""

    def __init__(self) -> None:
        self.num_replicas, self.rank = 2, 0


class PrivatelyRankAware(Own):
    def __init__(self) -> None:
        self._world_size = 2


class Wrapping(Own):
    def __init__(self, sampler: Sampler[int]) -> None:
        self.sampler = sampler


class Derived(DistributedSampler[int]):
    pass


class Endless(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(int, 1)


class ReadingAhead(DataLoader[int]):
    def __iter__(self) -> Any:
        return iter(list(super().__iter__()))


@pytest.mark.parametrize(
    "loader, advice",
    [
        (DataLoader(Stream(), batch_size=None), "takes whole batches from Stream, .* let the dataset yield single samples"),
        (ReadingAhead(Stream()), r"ReadingAhead overrides .* Use a plain DataLoader: a live job keeps"),
        (DataLoader(DATA, batch_size=None), "give it a batch_size"),
        (DataLoader(DATA, batch_sampler=OwnBatches(SequentialSampler(DATA), 2, False)), "give the DataLoader a batch_size"),
        (DataLoader(DATA, batch_sampler=[[0, 1], [2]]), "batch_sampler list decides"),
        (DataLoader(DATA, sampler=RankAware()), r"RankAware .*\(it has num_replicas 2\).* order of the whole epoch"),
        (DataLoader(DATA, sampler=PrivatelyRankAware()), r"\(it has _world_size 2\)"),
        (DataLoader(DATA, sampler=Wrapping(RankAware())), r"Wrapping .*\(it has num_replicas 2\)"),
        (DataLoader(DATA, batch_sampler=BatchSampler(RankAware(), 2, False)), "RankAware gives every worker"),
        (DataLoader(DATA, sampler=Derived(DATA, 2, 0)), "Derived gives every worker"),
        (DataLoader(DATA, sampler=Endless()), "Endless has no __len__"),
        (ReadingAhead(DATA), "ReadingAhead overrides DataLoader.__iter__"),
    ],
)
def test_loader_that_cannot_be_split_is_refused_with_advice(loader: DataLoader[Any], advice: str) -> None:
    with pytest.raises(UnsupportedLoaderError, match=advice):
        batching_of(loader)
    with pytest.raises(UnsupportedLoaderError, match=advice):
        check_data_loader(loader, is_split_by_user=False, hook="train_dataloader")


ROWS = streamed(Counted())


@pytest.mark.parametrize(
    "dataset, name",
    [
        (random_split(ROWS, [15, 5], torch.Generator().manual_seed(1))[0], "Subset"),
        (Subset(ROWS, range(10)), "Subset"),
        (ConcatDataset([DATA, ROWS]), "ConcatDataset"),
        (Subset(ConcatDataset([Subset(ROWS, range(5)), DATA]), range(3)), "Subset"),
        (StackDataset(a=DATA, b=ROWS), "StackDataset"),
        (Around(ROWS), "Around"),
    ],
)
def test_view_of_a_stream_is_refused_with_the_next_move(dataset: Any, name: str) -> None:
    with pytest.raises(
        UnsupportedLoaderError, match=rf"{name} asks a stream for single rows by number.*parquet\('val/\*.parquet'\)"
    ):
        check_data_loader(DataLoader(dataset, 4), is_split_by_user=False, hook="train_dataloader")


def test_streams_and_views_of_other_data_are_taken() -> None:
    datasets: list[Any] = [ROWS, Subset(DATA, range(4)), Around(DATA), ConcatDataset([DATA, DATA])]
    for dataset in datasets:
        check_data_loader(DataLoader(dataset, 4), is_split_by_user=False, hook="train_dataloader")


@pytest.mark.parametrize("is_split_by_user", [False, True])
def test_iterable_dataset_is_taken_with_its_batch_size(is_split_by_user: bool) -> None:
    loader = DataLoader(Stream(), batch_size=3, drop_last=True, num_workers=2)
    check_data_loader(loader, is_split_by_user, "train_dataloader")
    assert (batching_of(loader).batch_size, batching_of(loader).drop_last) == (3, True)


def test_plain_batch_sampler_keeps_its_batch_size_and_order() -> None:
    sampler = RandomSampler(DATA)
    loader = DataLoader(DATA, batch_sampler=BatchSampler(sampler, 16, True))
    assert batching_of(loader) == Batching(sampler, 16, True)


GLOBAL = [
    SequentialSampler(DATA),
    RandomSampler(DATA),
    SubsetRandomSampler(range(5)),
    WeightedRandomSampler([1.0] * 20, 20),
    DistributedSampler(DATA, 2, 1),
]


@pytest.mark.parametrize("sampler", GLOBAL)
@pytest.mark.parametrize("is_split_by_user", [False, True])
def test_samplers_of_torch_are_those_of_all_workers(sampler: Sampler[int], is_split_by_user: bool) -> None:
    loader = DataLoader(DATA, 4, sampler=sampler)
    check_data_loader(loader, is_split_by_user, "train_dataloader")
    assert batching_of(loader).sampler is sampler


def test_own_sampler_needs_the_trainers_consent() -> None:
    loader = DataLoader(DATA, 4, sampler=Own())
    check_data_loader(loader, is_split_by_user=False, hook="train_dataloader")
    with pytest.raises(UnsupportedLoaderError, match="leave use_distributed_sampler at True"):
        check_data_loader(loader, is_split_by_user=True, hook="train_dataloader")


@pytest.mark.parametrize("loader, name", [([[1], [2]], "list"), (range(3), "range"), (Stream(), f"{__name__}.Stream")])
def test_object_other_than_a_data_loader_is_refused_by_name(loader: object, name: str) -> None:
    with pytest.raises(UnsupportedLoaderError, match=f"val_dataloader holds a {name}, .*map-style dataset"):
        check_data_loader(loader, is_split_by_user=False, hook="val_dataloader")


def test_step_that_fetches_its_own_batches_is_refused() -> None:
    check_step_signature(takes_iterator=False)
    with pytest.raises(UnsupportedLoaderError, match=r"use training_step\(self, batch, batch_idx\)"):
        check_step_signature(takes_iterator=True)
