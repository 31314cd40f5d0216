"""Cut a batch into parts along its samples, and put the results of its parts together. Pure."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["UnsplittableBatchError", "num_rows", "part_of", "part_sizes", "whole_output", "whole_value"]

_CONSTANTS = (str, bytes, bool, int, float, complex, Enum, type(None))


class UnsplittableBatchError(TypeError):
    """A batch has a value that cannot be divided among its samples."""


def part_sizes(num_samples: int, max_samples: int) -> list[int]:
    """Return the sizes of the fewest parts of at most `max_samples`. They differ by one at the most; larger ones come first."""
    num_parts = -(-num_samples // max_samples)
    size, rest = divmod(num_samples, num_parts)
    return [size + (i < rest) for i in range(num_parts)]


def num_rows(batch: Any, expected: int) -> int:
    """Return the number of samples in a batch.

    Args:
        expected: their number if no row of a stream was skipped.
    """
    if _has_rows(batch, expected):
        return expected
    return next((len(leaf) for leaf in _leaves(batch) if leaf.ndim), expected)


def part_of(batch: Any, num_samples: int, rows: slice, path: str = "batch") -> Any:
    """Return some samples of a batch: views of its tensors, in the batch's own structure.

    Tensors and NumPy arrays hold one sample per index of their first dimension, except for those without dimensions. A list or
    tuple is a structure of such fields, or holds one sample per item if it has as many items as samples, all of one type.

    Args:
        num_samples: samples in the batch.
        path: name of the batch in an error.

    Raises:
        UnsplittableBatchError: a value is of another type, or has another first dimension.
    """
    if isinstance(batch, Tensor | np.ndarray):
        if batch.ndim == 0:
            return batch
        if len(batch) == num_samples:
            return batch[rows]
        raise _refusal(path, f"has the shape {list(batch.shape)}", num_samples)
    if isinstance(batch, _CONSTANTS):
        return batch
    if isinstance(batch, Mapping):
        fields = {key: part_of(value, num_samples, rows, f"{path}[{key!r}]") for key, value in batch.items()}
        return fields if type(batch) is dict else type(batch)(fields)  # type: ignore[call-arg]
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        part = copy.copy(batch)
        for field in dataclasses.fields(batch):
            value = part_of(getattr(batch, field.name), num_samples, rows, f"{path}.{field.name}")
            object.__setattr__(part, field.name, value)
        return part
    if isinstance(batch, list | tuple):
        if _holds_samples(batch, num_samples):
            return batch[rows]
        parts = [part_of(value, num_samples, rows, f"{path}[{i}]") for i, value in enumerate(batch)]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    raise _refusal(path, f"is of type {type(batch).__name__}", num_samples)


def whole_output(outputs: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Return what a training step has returned for a whole share, from what it has returned for each part.

    Tensors with one row per sample are joined, numbers become their mean over samples. Of anything else the last part's stays.

    Args:
        sizes: samples of each part.
    """
    first = outputs[0]
    if all(isinstance(each, Tensor) and each.ndim and len(each) == size for each, size in zip(outputs, sizes, strict=True)):
        return torch.cat(list(outputs))
    if all(isinstance(each, Tensor) and each.is_floating_point() and not each.ndim for each in outputs):
        return whole_value("mean", outputs, sizes)
    if isinstance(first, dict) and all(isinstance(each, dict) and each.keys() == first.keys() for each in outputs):
        return {key: whole_output([each[key] for each in outputs], sizes) for key in first}
    return outputs[-1]


def whole_value(reduction: str, values: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """Return a value of a whole share from those of its parts.

    Args:
        reduction: "mean" over samples, "sum", "max" or "min".
        sizes: samples of each part.
    """
    stacked = torch.stack(list(values))
    if reduction == "mean":
        stacked = stacked if stacked.is_floating_point() else stacked.float()
        weights = torch.tensor(sizes, dtype=stacked.dtype, device=stacked.device) / sum(sizes)
        mean: Tensor = torch.tensordot(weights, stacked, 1)
        return mean
    if reduction == "sum":
        return stacked.sum(0)
    return stacked.amax(0) if reduction == "max" else stacked.amin(0)


def _has_rows(value: Any, number: int) -> bool:
    """Return whether a value, or a field of it, has one row per sample."""
    if isinstance(value, Tensor | np.ndarray):
        return value.ndim > 0 and len(value) == number
    if isinstance(value, list | tuple) and len(value) == number:
        return True
    return any(_has_rows(field, number) for field in _fields(value))


def _holds_samples(items: Sequence[Any], number: int) -> bool:
    """Return whether a list or tuple has one item per sample. One of equally many fields has rows in all of them."""
    is_alike = len({type(item) for item in items}) == 1
    return len(items) == number and is_alike and not all(_has_rows(item, number) for item in items)


def _fields(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, list | tuple):
        return value
    return vars(value).values() if dataclasses.is_dataclass(value) and not isinstance(value, type) else ()


def _leaves(value: Any) -> Iterable[Any]:
    if isinstance(value, Tensor | np.ndarray):
        yield value
    for field in _fields(value):
        yield from _leaves(field)


def _refusal(path: str, what: str, num_samples: int) -> UnsplittableBatchError:
    return UnsplittableBatchError(
        f"this worker computes its share of {num_samples} samples in parts, but {path} {what}, so its samples cannot be told "
        "apart: let the collate_fn return tensors with the samples in the first dimension, also in lists, dictionaries or "
        "dataclasses, or define split_batch(batch, sizes) in the LightningModule, which returns a list of batches"
    )
