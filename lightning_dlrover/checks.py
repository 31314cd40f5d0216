"""Refuse scripts that several workers cannot run together without silent errors, and explain the reason."""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.distributed.optim import ZeroRedundancyOptimizer

from lightning_dlrover.packages import EarlyStopping, ModelCheckpoint

__all__ = [
    "BackwardCheck",
    "UnsupportedScriptError",
    "check_capture",
    "check_graphs",
    "check_hook_state",
    "check_optimizers",
    "check_precision_of_tables",
    "different_callbacks",
    "different_rates",
    "explain_memory",
    "explain_single_sample",
    "monitoring",
    "rates",
    "rates_digest",
    "warn_of_max_norm",
]

log = logging.getLogger(__name__)


class UnsupportedScriptError(Exception):
    """A script does something that goes wrong with several workers."""


HYPERPARAMETERS = ("lr", "momentum", "betas", "weight_decay")
"""Options of parameter groups that schedulers set."""


def check_optimizers(optimizers: Sequence[Any]) -> None:
    """Check the optimizers at the start of a job that can change.

    Raises:
        UnsupportedScriptError: an optimizer's state is spread over the workers of one round.
    """
    for optimizer in optimizers:
        if isinstance(optimizer, ZeroRedundancyOptimizer):
            raise UnsupportedScriptError(
                "ZeroRedundancyOptimizer spreads its state over the ranks of one round, so a part would go with each worker "
                "that leaves. Use the optimizer that it wraps by itself; to save memory, shard large embedding tables instead"
            )


def check_hook_state(state: object | None) -> None:
    """Check the state of DDP's communication hook at the start of a job that can change.

    Raises:
        UnsupportedScriptError: the hook has a state, which holds a group or gradients of one round's buckets and workers.
    """
    if state is not None:
        raise UnsupportedScriptError(
            f"ddp_comm_state={type(state).__name__} belongs to the workers of one round: after a change its group is gone, its "
            "residual gradients have other sizes, and a joiner would begin with other collectives. Use a hook without a state, "
            "such as fp16_compress_hook or bf16_compress_hook, or none"
        )


def check_graphs(module: torch.nn.Module) -> None:
    """Check for modules that replay CUDA graphs, at the start of a job that can change.

    Raises:
        UnsupportedScriptError: a graph holds for one size of batches, and each worker's share changes with the workers.
    """
    for name, part in module.named_modules():
        if getattr(vars(part).get("forward"), "__module__", "") == "torch.cuda.graphs":
            raise UnsupportedScriptError(
                f"module {name or type(part).__name__!r} comes from torch.cuda.make_graphed_callables: its graph holds for one "
                "number of samples, and each worker's share changes with the workers. Use torch.compile(module, "
                'mode="reduce-overhead") instead, which records a graph for each number'
            )


def warn_of_max_norm(module: torch.nn.Module) -> None:
    """Name embeddings that drift apart as soon as there are several workers."""
    kinds = torch.nn.Embedding, torch.nn.EmbeddingBag
    if found := [name for name, part in module.named_modules() if isinstance(part, kinds) and part.max_norm is not None]:
        log.warning(
            "the embeddings %s have max_norm, which rescales rows in the forward pass, on those workers only that read them: "
            "the workers' models drift apart. Leave max_norm out and rescale all rows in on_train_batch_end, or let "
            "DLRoverStrategy(on_drift='repair') copy rank 0's weights from time to time",
            ", ".join(found),
        )


def check_capture() -> None:
    """Check, in a job that can change, that a backward pass is not being captured.

    Raises:
        UnsupportedScriptError: a replay would reduce gradients with the workers of the round of its capture.
    """
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():  # type: ignore[no-untyped-call]
        raise UnsupportedScriptError(
            "this backward pass is captured into a CUDA graph, which reduces gradients with the present workers for ever. Use "
            'torch.compile(module, mode="reduce-overhead") instead, which leaves the reduction out of its graphs'
        )


def check_precision_of_tables(precision: Any) -> None:
    """Check Lightning's precision plugin of a model with tables that are trained in their backward pass.

    Raises:
        UnsupportedScriptError: it scales the loss, and nothing could undo that before the tables' rows are updated.
    """
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
    """Explain a BatchNorm error of a training step.

    Raises:
        ValueError: `error` is BatchNorm's, about a share of a single sample.
    """
    if num_workers > 1 and num_samples == 1 and "more than 1 value per channel" in str(error):
        raise ValueError(
            f"BatchNorm cannot train on one sample, which is this worker's share of the batch: {num_workers} workers share "
            "each global batch, the last one of an epoch included. Use drop_last=True, a larger global_batch_size, fewer "
            "workers at most (--workers, --nnodes), or GroupNorm or LayerNorm instead"
        ) from error


def explain_memory(error: torch.OutOfMemoryError, num_samples: int, num_workers: int, reason: str) -> torch.OutOfMemoryError:
    """Return an error that explains why a share cannot be computed in parts where it does not fit.

    Args:
        num_samples: samples of the pass that did not fit.
    """
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
        """Check the gradients' origin. Call it before each step of manual optimization.

        Raises:
            UnsupportedScriptError: no gradient came from `manual_backward`.
        """
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
        "apart. A scheduler or optimizer probably depends on trainer.world_size, trainer.global_rank or a random number when "
        "it is made; make it depend on the global batch size, which no resize changes"
    )


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return list(value) if isinstance(value, tuple) else value
