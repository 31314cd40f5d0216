"""Memory for the columns of a batch, and their way from a loader worker to the training process.

A tensor in shared memory costs a file descriptor, a connection with a handshake to hand it over, and a mapping: together more
CPU time than copying a small batch through the pipe that announces it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lightning_dlrover.private_names import Names

__all__ = ["MAX_SENT_BYTES", "NAMES", "Columns", "Matrix", "new_matrices", "new_shared_matrices", "num_bytes"]

ALIGNMENT = 64
"""Bytes. Each type's columns of a batch begin at a multiple of it."""

MAX_SENT_BYTES = 512 * 2**10
"""Bytes of a batch that are sent through the pipe. Beyond it, shared memory costs the training process less."""

INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
FLOATS = (torch.float16, torch.float32, torch.float64)

NAMES: Names = {"torch:UntypedStorage": ("_new_shared",)}
"""Private names of torch that this module uses."""

Matrix = tuple[npt.NDArray[Any], list[torch.Tensor]]
"""Memory to fill, shape ``(columns, rows)``, and its columns as tensors."""

Shape = tuple[np.dtype[Any], int, int]
"""Type, number of columns, number of rows."""


def num_bytes(shapes: Sequence[Shape]) -> int:
    """Return the bytes of all matrices together."""
    return sum(kind.itemsize * columns * rows for kind, columns, rows in shapes)


def new_matrices(shapes: Sequence[Shape]) -> list[Matrix]:
    matrices = [np.empty((columns, rows), kind) for kind, columns, rows in shapes]
    return [(matrix, list(map(torch.from_numpy, matrix))) for matrix in matrices]


def new_shared_matrices(shapes: Sequence[Shape]) -> list[Matrix]:
    """Return matrices in one piece of memory that other processes can map.

    A loader worker hands over one piece at a small part of the cost of as many pieces as there are columns.
    """
    sizes = [kind.itemsize * columns * rows for kind, columns, rows in shapes]
    starts = np.cumsum([0, *(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)]).tolist()
    storage = torch.UntypedStorage._new_shared(starts[-1])  # type: ignore[no-untyped-call]  # as `default_collate` does
    memory = torch.empty(0, dtype=torch.uint8).set_(storage)
    found: list[Matrix] = []
    for start, size, (kind, columns, rows) in zip(starts, sizes, shapes, strict=False):
        matrix = memory[start : start + size].view(_torch_type(kind)).view(columns, rows)
        found.append((matrix.numpy(), _columns(matrix)))
    return found


class Columns(dict[str, Any]):
    """A batch by column in a loader worker. The training process gets a plain dictionary with tensors of its own.

    The tensors of a small batch travel in one message. Those of a larger one, and all other values, travel as in any batch.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        sent: dict[tuple[torch.dtype, torch.Size], list[str]] = {}
        others: dict[str, Any] = {}
        for name, value in self.items():
            if _can_be_sent(value):
                sent.setdefault((value.dtype, value.shape), []).append(name)
            else:
                others[name] = value
        total = sum(self[name].nbytes for names in sent.values() for name in names)
        if not 0 < total <= MAX_SENT_BYTES:
            return dict, (dict(self),)
        message = bytearray()
        groups = []
        for (kind, shape), names in sorted(sent.items(), key=lambda item: -item[0][0].itemsize):  # so that each is aligned
            groups.append((kind, tuple(shape), names))
            message += b"".join(self[name].numpy().data for name in names)
        return _received, (message, groups, others, list(self))


def _can_be_sent(value: Any) -> bool:
    return (
        type(value) is torch.Tensor
        and value.device.type == "cpu"
        and value.layout is torch.strided
        and value.dtype in (*INTEGERS, *FLOATS)
        and value.numel() > 0
        and value.is_contiguous()
        and not value.requires_grad
        and not value.is_shared()  # type: ignore[no-untyped-call]
    )


def _received(
    message: bytearray,
    groups: Sequence[tuple[torch.dtype, tuple[int, ...], Sequence[str]]],
    others: Mapping[str, Any],
    order: Sequence[str],
) -> dict[str, Any]:
    found = dict(others)
    start = 0
    for kind, shape, names in groups:
        count = len(names) * int(np.prod(shape))
        matrix = torch.frombuffer(message, dtype=kind, count=count, offset=start).view(len(names), *shape)
        start += matrix.nbytes
        found.update(zip(names, _columns(matrix), strict=True))
    return {name: found[name] for name in order}


def _columns(matrix: torch.Tensor) -> list[torch.Tensor]:
    # `.data`: a change of one column in place must not count as a change of the others.
    return [column.data for column in matrix.unbind()]


@cache
def _torch_type(kind: np.dtype[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, kind)).dtype
