"""Measure real steps of a small part of the batch, for modules without shape rules. For a process that is thrown away."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_dlrover.observe.peak_memory.child import run_in_child
from lightning_dlrover.observe.peak_memory.resident import resident
from lightning_dlrover.observe.peak_memory.step import Step, run_backward
from lightning_dlrover.observe.resources import forget_peak

__all__ = ["measure_steps"]

NUM_STEPS = 2  # the second has the optimizer's state
PARTS = (8, 4)  # the batch's fractions, 1/8 and 1/4
MIN_SAMPLES = 64  # a smaller batch is measured whole


def measure_steps(
    optimizers: Sequence[torch.optim.Optimizer], batch: Any, step: Step, deadline_s: float, extra_bytes: int
) -> int:
    """Return the bytes that steps add to this process, extrapolated from two sizes of the batch.

    A batch without a common first dimension is measured whole. Anonymous memory counts, as a copy of a process starts with
    few of the pages of files that its parent has mapped.
    Raises:
        ChildError: a step failed, or needed more than `deadline_s` or `extra_bytes`.
    """

    def peak_bytes(part: Any) -> int:
        return int(run_in_child(lambda: _run(optimizers, part, step), deadline_s, extra_bytes))

    if (num_samples := _num_samples(batch)) < MIN_SAMPLES:
        return peak_bytes(batch)
    (few, small), (more, large) = [
        (size, peak_bytes(_first(batch, num_samples, size))) for size in (num_samples // part for part in PARTS)
    ]
    return max(large, round(small + (large - small) * (num_samples - few) / (more - few)))


def _run(optimizers: Sequence[torch.optim.Optimizer], batch: Any, step: Step) -> int:
    # OpenMP's threads do not exist in a copied process, and its first parallel region would wait for them forever.
    torch.set_num_threads(1)
    start = resident().anonymous_bytes
    forget_peak()
    for _ in range(NUM_STEPS):
        result = step(batch)
        run_backward(result)
        del result
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return max(0, resident().peak_anonymous_bytes - start)


def _num_samples(batch: Any) -> int:
    """Return the size of the first dimension that all tensors have in common, 0 if there is none."""
    leaves: list[Any] = []
    _map(batch, lambda leaf: leaves.append(leaf))
    tensors = [each for each in leaves if isinstance(each, Tensor)]
    sizes = {len(each) if each.dim() else 0 for each in tensors}
    return sizes.pop() if len(sizes) == 1 and len(tensors) == len(leaves) else 0


def _first(batch: Any, num_samples: int, size: int) -> Any:
    return _map(batch, lambda leaf: leaf[:size].clone())


def _map(batch: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(batch, dict):
        return {key: _map(value, change) for key, value in batch.items()}
    if isinstance(batch, list | tuple) and not hasattr(batch, "_fields"):
        return type(batch)(_map(each, change) for each in batch)
    return change(batch)
