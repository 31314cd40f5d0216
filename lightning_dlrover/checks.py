"""Refuse scripts, loaders and arguments that several workers cannot run together without silent errors, with the reason."""

from __future__ import annotations

import hashlib
import logging
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from numbers import Integral, Real
from typing import Any

import torch
from torch.distributed.optim import ZeroRedundancyOptimizer
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
from lightning_dlrover.lightning_compat import EarlyStopping, ModelCheckpoint
from lightning_dlrover.tables.snapshots import SnapshotConfig

log = logging.getLogger(__name__)


class UnsupportedScriptError(Exception):
    """A script cannot run correctly with several workers."""


HYPERPARAMETERS = ("lr", "momentum", "betas", "weight_decay")  # options of parameter groups that schedulers set


def check_optimizers(optimizers: Sequence[Any]) -> None:
    """Raise `UnsupportedScriptError` for an optimizer whose state is spread over the workers of one round."""
    for optimizer in optimizers:
        if isinstance(optimizer, ZeroRedundancyOptimizer):
            raise UnsupportedScriptError(
                "ZeroRedundancyOptimizer spreads its state over the ranks of one round, so a part would leave with each "
                "worker. Use the wrapped optimizer directly; to save memory, shard large embedding tables instead"
            )


def check_hook_state(state: object | None) -> None:
    """Raise `UnsupportedScriptError` for a state of DDP's communication hook: it holds a group, or gradients of one round."""
    if state is not None:
        raise UnsupportedScriptError(
            f"ddp_comm_state={type(state).__name__} belongs to the workers of one round: after a change its group is gone, its "
            "residual gradients have other sizes, and a joiner would begin with other collectives. Use a hook without a state, "
            "such as fp16_compress_hook or bf16_compress_hook, or none"
        )


def check_graphs(module: torch.nn.Module) -> None:
    """Raise `UnsupportedScriptError` for modules that replay CUDA graphs, as a graph is valid for one size of batches only."""
    for name, part in module.named_modules():
        if getattr(vars(part).get("forward"), "__module__", "") == "torch.cuda.graphs":
            raise UnsupportedScriptError(
                f"module {name or type(part).__name__!r} comes from torch.cuda.make_graphed_callables: its graph holds for one "
                "number of samples, and each worker's share changes with the workers. Use torch.compile(module, "
                'mode="reduce-overhead") instead, which records a graph for each number'
            )


def warn_of_max_norm(module: torch.nn.Module) -> None:
    """Warn of embeddings that drift apart with several workers."""
    kinds = torch.nn.Embedding, torch.nn.EmbeddingBag
    if found := [name for name, part in module.named_modules() if isinstance(part, kinds) and part.max_norm is not None]:
        log.warning(
            "the embeddings %s have max_norm, which rescales rows in the forward pass, only on the workers that read them: "
            "the workers' models drift apart. Leave max_norm out and rescale all rows in on_train_batch_end, or let "
            "DLRoverStrategy(on_drift='repair') copy rank 0's weights from time to time",
            ", ".join(found),
        )


def check_capture() -> None:
    """Raise `UnsupportedScriptError` while a backward pass is captured: replays would use the workers of that round."""
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():  # type: ignore[no-untyped-call]
        raise UnsupportedScriptError(
            "this backward pass is captured into a CUDA graph, which always reduces gradients with the present workers. Use "
            'torch.compile(module, mode="reduce-overhead") instead, which leaves the reduction out of its graphs'
        )


def check_precision_of_tables(precision: Any) -> None:
    """Raise `UnsupportedScriptError` for a precision plugin that scales the loss of tables trained in the backward pass."""
    if getattr(precision, "scaler", None) is not None:
        raise UnsupportedScriptError(
            f"precision={getattr(precision, 'precision', '16-mixed')!r} scales the loss, and embedding tables are updated in "
            "the backward pass, by the scaled gradients: use precision='bf16-mixed', which needs no scaling"
        )


def monitoring(callbacks: Iterable[Any]) -> list[str]:
    """Describe the callbacks that follow a logged value or save checkpoints: all workers have to act on them together."""
    found = []
    for callback in callbacks:
        monitor = getattr(callback, "monitor", None)
        if isinstance(monitor, str):
            found.append(f"{type(callback).__name__}(monitor={monitor!r})")
        elif isinstance(callback, ModelCheckpoint | EarlyStopping):
            found.append(type(callback).__name__)
    return sorted(found)


def different_callbacks(ones: Sequence[str], others: Sequence[str], one: str, other: str) -> str:
    """Return why the callbacks of two workers, see `monitoring`, do not match; empty if they do.

    Args:
        one, other: names of the workers, such as "rank 0".
    """
    odd = (Counter(ones) - Counter(others), one), (Counter(others) - Counter(ones), other)
    parts = [f"{', '.join(sorted(found))} on {where} only" for found, where in odd if found]
    if not parts:
        return ""
    return (
        f"callbacks differ between workers: {'; '.join(parts)}. Such a callback takes part in collectives, and its worker may "
        "leave: add it on all workers, and test trainer.is_global_zero inside its hooks where only one of them shall act"
    )


def explain_single_sample(error: ValueError, num_samples: int, num_workers: int) -> None:
    """Raise a `ValueError` with an explanation if `error` is BatchNorm's about a share of a single sample."""
    if num_workers > 1 and num_samples == 1 and "more than 1 value per channel" in str(error):
        raise ValueError(
            f"BatchNorm cannot train on one sample, which is this worker's share of the batch: {num_workers} workers share "
            "each global batch, the last one of an epoch included. Use drop_last=True, a larger global_batch_size, fewer "
            "workers at most (--workers, --nnodes), or GroupNorm or LayerNorm instead"
        ) from error


def explain_memory(error: torch.OutOfMemoryError, num_samples: int, num_workers: int, reason: str) -> torch.OutOfMemoryError:
    """Return an error that explains why a share of `num_samples`, which did not fit, cannot be computed in parts."""
    return torch.OutOfMemoryError(
        f"{error}\nThis worker ran out of memory with {num_samples} samples at once, as one of {num_workers} workers, and "
        f"{reason}. Use a smaller global_batch_size, more workers at least (--workers MIN:MAX), or automatic optimization with "
        "DLRoverStrategy(max_share=None), which computes a share that does not fit in parts"
    )


class BackwardCheck:
    """Detects `loss.backward()` in manual optimization: its gradients are neither reduced nor weighted by samples."""

    def __init__(self) -> None:
        self._num_before = self._num_now = 0  # calls of `manual_backward` in the former and in this batch

    def batch_begins(self) -> None:
        self._num_before, self._num_now = self._num_now, 0

    def backward(self) -> None:
        self._num_now += 1

    def optimizer_step(self, optimizer: Any, closure: Any) -> None:
        """Raise `UnsupportedScriptError` before a step of manual optimization if no gradient came from `manual_backward`."""
        if self._num_now or self._num_before or getattr(closure, "__name__", "") != "do_nothing_closure":
            return
        if any(p.grad is not None for group in optimizer.param_groups for p in group["params"]):
            raise UnsupportedScriptError(
                "optimizer.step() follows loss.backward() in training_step. Gradients of loss.backward() are not reduced over "
                "the workers: call self.manual_backward(loss) instead"
            )


def rates(optimizers: Sequence[Any]) -> list[list[Any]]:
    """Return the options of each parameter group that schedulers set."""
    return [
        [_plain(group[name]) for name in HYPERPARAMETERS if name in group]
        for optimizer in optimizers
        for group in optimizer.param_groups
    ]


def rates_digest(optimizers: Sequence[Any]) -> int:
    """Return a number below 2 ** 56 that is equal on workers with equal rates."""
    return int.from_bytes(hashlib.sha256(repr(rates(optimizers)).encode()).digest()[:7], "big")


def different_rates(of_ranks: Sequence[list[list[Any]]], rank: int) -> UnsupportedScriptError | None:
    """Return why this worker cannot continue if its rates differ from those of rank 0, else None."""
    if of_ranks[rank] == of_ranks[0]:
        return None
    mine, first = next((a, b) for a, b in zip(of_ranks[rank], of_ranks[0], strict=True) if a != b)
    return UnsupportedScriptError(
        f"this worker's learning rate (or momentum, weight decay) is {mine}, rank 0's is {first}: the weights would drift "
        "apart. A scheduler or optimizer probably depends on trainer.world_size, trainer.global_rank or a random number; make "
        "it depend on the global batch size, which no resize changes"
    )


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return list(value) if isinstance(value, tuple) else value


# Data loaders that a job can split again for every world.

# Samplers of torch's own. Their order or seed is used for all workers together.
GLOBAL_SAMPLERS = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler)
# Attributes that show that a sampler gives each worker its own samples.
RANK_NAMES = ("num_replicas", "world_size", "num_processes", "num_shards", "rank", "global_rank", "process_index", "shard_id")
MAX_WRAPPED_SAMPLERS = 8
MAX_WRAPPED_DATASETS = 32


class UnsupportedLoaderError(TypeError):
    """A data loader with samples that cannot be split again when the world changes."""


@dataclass(frozen=True)
class Batching:
    """Sampler and batch size of a DataLoader."""

    sampler: Any
    batch_size: int
    drop_last: bool


def batching_of(loader: DataLoader[Any]) -> Batching:
    """Return the sampler, batch size and `drop_last` of a loader, also if it was given a plain `BatchSampler`.

    The sampler of an `IterableDataset` has no meaning. For a loader with a `batch_sampler` torch sets `batch_size` to None,
    `sampler` to a sequential one and `drop_last` to False.

    Raises:
        UnsupportedLoaderError: its batches cannot be split again for every world.
    """
    if type(loader).__iter__ is not DataLoader.__iter__ and isinstance(loader.dataset, IterableDataset):
        raise UnsupportedLoaderError(
            f"{type(loader).__name__} overrides DataLoader.__iter__, and its own states are those of one process: they cannot "
            "be split again when workers join or leave. Use a plain DataLoader: a live job keeps the dataset's state_dict() "
            "in its checkpoints and hands it to joiners"
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
    """Raise `UnsupportedLoaderError` for a map-style dataset that takes rows of a stream, such as one of `random_split`."""
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
        kind = type(loader)
        name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
        raise UnsupportedLoaderError(
            f"{hook} holds a {name}, which is not a torch.utils.data.DataLoader: a live job splits every "
            "batch over the workers there are, and needs single samples for that. Put them in a map-style dataset "
            "(__getitem__ and __len__) or an IterableDataset, and that in a DataLoader with a batch_size, or use "
            "strategy='ddp' with a fixed number of workers"
        )
    sampler = batching_of(loader).sampler
    if is_split_by_user and not isinstance(loader.dataset, IterableDataset) and type(sampler) not in GLOBAL_SAMPLERS:
        raise UnsupportedLoaderError(
            f"{hook}: with Trainer(use_distributed_sampler=False) sampler {type(sampler).__name__} decides which samples "
            "this worker gets, and its samples would be split over the workers a second time. If it gives the order of "
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


# Arguments of `DLRoverStrategy`.


def check_arguments(
    global_batch_size: object,
    check_interval_s: object,
    timeout: object,
    sharding_constraints: object,
    sharders: object,
    snapshots: object,
    compare_data: object,
    rerun_epoch_hooks: object,
    max_catch_up_s: object,
    max_share: object,
    shares: object,
    on_drift: object,
) -> None:
    """Raise TypeError or ValueError for the first invalid argument; see `DLRoverStrategy`."""
    if global_batch_size is not None:
        _check_count("global_batch_size", global_batch_size, "a whole number of samples, or None")
    _check_type("check_interval_s", check_interval_s, Real, "a number of seconds")
    if not 0 < check_interval_s < math.inf:  # type: ignore[operator]
        raise ValueError(f"check_interval_s is {check_interval_s}, it must be above 0")
    _check_type("timeout", timeout, timedelta, "a datetime.timedelta")
    if timeout <= timedelta():  # type: ignore[operator]
        raise ValueError(f"timeout is {timeout}, it must be above 0")
    _check_type("sharding_constraints", sharding_constraints, Mapping | None, "a mapping from names of tables, or None")
    _check_type("sharders", sharders, Sequence | None, "a list of torchrec's sharders, or None")
    _check_type("snapshots", snapshots, SnapshotConfig | None, "a SnapshotConfig, or None")
    _check_type("compare_data", compare_data, bool, "True or False")
    _check_type("rerun_epoch_hooks", rerun_epoch_hooks, bool, "True or False")
    _check_type("max_catch_up_s", max_catch_up_s, Real, "a number of seconds")
    if not max_catch_up_s > 0:  # type: ignore[operator]
        raise ValueError(f"max_catch_up_s is {max_catch_up_s}, it must be above 0; math.inf stands for no limit")
    if max_share is not None and max_share != "whole":
        _check_count("max_share", max_share, "a whole number of samples, 'whole' or None")
    if shares not in ("by-speed", "equal"):
        raise ValueError(f"shares is {shares!r:.80}, it must be 'by-speed' or 'equal'")
    if on_drift not in ("end", "repair", "ignore"):
        raise ValueError(f"on_drift is {on_drift!r:.80}, it must be 'end', 'repair' or 'ignore'")


def _check_count(name: str, value: object, meant: str) -> None:
    _check_type(name, value, Integral, meant)
    if value < 1:  # type: ignore[operator]
        raise ValueError(f"{name} is {value}, it must be at least 1")


def _check_type(name: str, value: object, kind: object, meant: str) -> None:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):  # type: ignore[arg-type]
        raise TypeError(f"{name} of DLRoverStrategy is {value!r:.80}, of type {type(value).__name__}; it must be {meant}")
