"""Copy rows before they are handed out, so that a transform, a `collate_fn` or a `training_step` may change them.

The process that keeps rows to hand them out again keeps them as they were read.
"""

from __future__ import annotations

import copy
import datetime
import decimal
import logging
import uuid
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

__all__ = ["FIXED", "own_copies"]

log = logging.getLogger(__name__)

FIXED: frozenset[type] = frozenset(
    [type(None), bool, int, float, complex, str, bytes, decimal.Decimal, uuid.UUID]
    + [datetime.date, datetime.datetime, datetime.time, datetime.timedelta]
    + [kind for kind in np.sctypeDict.values() if kind not in (np.object_, np.void)]
)
"""Types of values that nothing can change. Copies share them."""


def own_copies(rows: Sequence[Any]) -> list[Any] | None:
    """Return copies that share nothing with the rows that can be changed; None: one of the rows cannot be copied."""
    found = []
    copies: dict[int, Any] = {}  # what was copied, by `id`: rows may hold the same object
    try:
        for row in rows:
            kind = type(row)
            if kind in FIXED:
                found.append(row)
            elif kind is dict and FIXED.issuperset(map(type, row.values())):
                found.append(row.copy())
            else:
                found.append(_copy(row, copies))
                copies.pop(id(row), None)  # a row that comes twice is two rows, as its copies may be on two workers
        return found
    except Exception as error:  # a row of the user's, for example with an open file
        log.debug("rows cannot be copied, so they are read again when they are asked for again: %r", error)
        return None


def _copy(value: Any, copies: dict[int, Any]) -> Any:
    kind = type(value)
    if kind in FIXED:
        return value
    if (known := copies.get(id(value))) is not None:
        return known
    if kind is dict:
        found = copies[id(value)] = value.copy()
        for key, each in value.items():
            if type(each) not in FIXED:
                found[key] = _copy(each, copies)
        return found
    if kind is list:
        items = copies[id(value)] = value.copy()
        if not FIXED.issuperset(map(type, items)):
            items[:] = [_copy(each, copies) for each in value]
        return items
    if kind is tuple:
        return tuple(_copy(each, copies) for each in value)
    if kind is torch.Tensor and not value.requires_grad:
        tensor = copies[id(value)] = value.clone()  # `deepcopy` would copy all of the storage that it is a view of
        return tensor
    if kind is np.ndarray and not value.dtype.hasobject:
        array = copies[id(value)] = value.copy(order="K")
        return array
    return copy.deepcopy(value, copies)
