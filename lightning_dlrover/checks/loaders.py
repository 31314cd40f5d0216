"""Decide which data loaders a live job can split anew for every world. Others are refused when the Trainer starts."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from lightning_dlrover.data.dataset import Stream

__all__ = [
    "Batching",
    "UnsupportedLoaderError",
    "batching_of",
    "check_data_loader",
    "check_no_view_of_a_stream",
    "check_step_signature",
]

GLOBAL_SAMPLERS = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler)
"""Samplers of torch's own. Their order or seed is used for all workers together."""

RANK_NAMES = ("num_replicas", "world_size", "num_processes", "num_shards", "rank", "global_rank", "process_index", "shard_id")
"""Attributes that show that a sampler gives each worker its own samples."""

MAX_WRAPPED_SAMPLERS = 8

MAX_WRAPPED_DATASETS = 32


class UnsupportedLoaderError(TypeError):
    """A data loader with samples that cannot be split again when the world changes."""


@dataclass(frozen=True)
class Batching:
    """The batching of a DataLoader."""

    sampler: Any
    batch_size: int
    drop_last: bool


def batching_of(loader: DataLoader[Any]) -> Batching:
    """Return the sampler, batch size and `drop_last` of a loader, also if it was given a plain `BatchSampler`.

    An `IterableDataset` has a sampler without meaning.
    For a loader with a `batch_sampler` torch sets `batch_size` to None, `sampler` to a sequential one, `drop_last` to False.

    Raises:
        UnsupportedLoaderError: its batches cannot be split again for every world.
    """
    if type(loader).__iter__ is not DataLoader.__iter__ and isinstance(loader.dataset, IterableDataset):
        raise UnsupportedLoaderError(
            f"{type(loader).__name__} overrides DataLoader.__iter__, and its own states are those of one process: they cannot "
            "be split again when workers join or leave. Use a plain DataLoader: a live job keeps the dataset's state_dict() "
            "in its checkpoints and hands it to joiners by itself"
        )
    if type(loader).__iter__ is not DataLoader.__iter__:
        raise UnsupportedLoaderError(
            f"{type(loader).__name__} overrides DataLoader.__iter__: whether it reads ahead, or gives one batch for each one "
            "that was asked for, cannot be seen, so its batches cannot be split again when workers join or leave. "
            "Use a plain DataLoader; its num_workers and prefetch_factor prepare batches ahead"
        )
    batches: Any = loader.batch_sampler
    if batches is None and isinstance(loader.dataset, IterableDataset):
        raise UnsupportedLoaderError(
            f"a DataLoader with batch_size=None takes whole batches from {type(loader.dataset).__name__}, which cannot be "
            "split again when workers join or leave: give it a batch_size, and let the dataset yield single samples"
        )
    if batches is None:
        raise UnsupportedLoaderError(
            "a DataLoader with batch_size=None makes its own batches, which cannot be split again when workers join or leave: "
            "give it a batch_size"
        )
    if type(batches) is not BatchSampler:
        raise UnsupportedLoaderError(
            f"batch_sampler {type(batches).__name__} decides which samples form a batch and cannot be split again "
            "when workers join or leave: give the DataLoader a batch_size and, if needed, a sampler"
        )
    sampler: Any = batches.sampler
    if isinstance(loader.dataset, IterableDataset):
        return Batching(sampler, batches.batch_size, batches.drop_last)
    if isinstance(loader.dataset, Stream) and type(sampler) not in (SequentialSampler, DistributedSampler):
        raise UnsupportedLoaderError(
            f"a DataLoader of a stream has the sampler {type(sampler).__name__}, which asks for single rows in an order of its "
            "own, so almost every row is read from another place: leave out shuffle= and sampler=, and give "
            "stream(..., shuffle_rows=200_000)"
        )
    check_no_view_of_a_stream(loader.dataset)
    _check_sampler(sampler)
    return Batching(sampler, batches.batch_size, batches.drop_last)


def check_no_view_of_a_stream(dataset: Any) -> None:
    """Raise `UnsupportedLoaderError` for a map-style dataset that takes rows of a stream, as `random_split` makes them."""
    inside: list[Any] = [dataset]
    for each in inside:
        if isinstance(each, Stream) and each is not dataset:
            raise UnsupportedLoaderError(
                f"{type(dataset).__name__} asks a stream for single rows by number. Almost each is read from another place, "
                "and in another epoch its number may be that of another row. Make a stream of each part's files, such as "
                "parquet('train/*.parquet') and parquet('val/*.parquet'); one stream of several paths instead of "
                "ConcatDataset; and stream(..., transform=...) instead of a dataset around the stream"
            )
        if isinstance(each, Dataset) and not isinstance(each, Stream | IterableDataset) and len(inside) < MAX_WRAPPED_DATASETS:
            several = getattr(each, "datasets", None)
            several = list(several.values()) if isinstance(several, dict) else several
            inside += [getattr(each, "dataset", None), *(several if isinstance(several, list | tuple) else ())]


def check_data_loader(loader: object, is_split_by_user: bool, hook: str) -> None:
    """Raise `UnsupportedLoaderError` unless a live job can train or validate with `loader`.

    Args:
        is_split_by_user: whether the Trainer was made with `use_distributed_sampler=False`.
        hook: name of the hook that returned the loader, for the error.
    """
    if not isinstance(loader, DataLoader):
        raise UnsupportedLoaderError(
            f"{hook} holds a {_full_name(type(loader))}, which is not a torch.utils.data.DataLoader: a live job splits every "
            "batch over the workers there are, and needs single samples for that. Put them in a map-style dataset "
            "(__getitem__ and __len__) or an IterableDataset, and that in a DataLoader with a batch_size, or use "
            "strategy='ddp' with a fixed number of workers"
        )
    sampler = batching_of(loader).sampler
    if is_split_by_user and not isinstance(loader.dataset, IterableDataset) and type(sampler) not in GLOBAL_SAMPLERS:
        raise UnsupportedLoaderError(
            f"{hook}: with Trainer(use_distributed_sampler=False) sampler {type(sampler).__name__} decides by itself which "
            "samples this worker gets, and its samples would be split over the workers a second time. If it gives the order of "
            "the whole epoch, for all workers together, leave use_distributed_sampler at True: live jobs never replace it"
        )


def check_step_signature(takes_iterator: bool) -> None:
    """Raise `UnsupportedLoaderError` for a `training_step` that fetches its batches itself."""
    if takes_iterator:
        raise UnsupportedLoaderError(
            "training_step(self, dataloader_iter) fetches its batches itself, so workers would join and leave in the middle "
            "of a step: use training_step(self, batch, batch_idx), and num_workers of the DataLoader to prepare batches ahead"
        )


def _check_sampler(sampler: Any) -> None:
    if type(sampler) is DistributedSampler:
        return  # its dataset, shuffling and seed are used, its rank is not
    name = type(sampler).__name__
    place = _place_among_workers(sampler)
    if isinstance(sampler, DistributedSampler) or place:
        seen = f" (it has {place})" if place else ""
        raise UnsupportedLoaderError(
            f"sampler {name} gives every worker samples of its own{seen} and cannot be split again when "
            "workers join or leave: give the DataLoader a sampler of the order of the whole epoch, which is split for you. "
            "Instead of a distributed weighted sampler, for example, use torch's WeightedRandomSampler"
        )
    if not hasattr(type(sampler), "__len__"):
        raise UnsupportedLoaderError(
            f"sampler {name} has no __len__: the batches of an epoch must be countable before they are split over the "
            "workers. Give it a __len__, the number of samples of an epoch"
        )


def _place_among_workers(sampler: Any) -> str:
    """Return the attribute by which a sampler, or one that it wraps, picks one worker's samples; empty if there is none."""
    for _ in range(MAX_WRAPPED_SAMPLERS):
        if sampler is None or type(sampler) in GLOBAL_SAMPLERS:
            break
        for name in RANK_NAMES:
            for spelled in (name, f"_{name}"):
                if isinstance(getattr(sampler, spelled, None), Integral):
                    return f"{spelled} {getattr(sampler, spelled)}"
        sampler = getattr(sampler, "sampler", None)
    return ""


def _full_name(kind: type) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
