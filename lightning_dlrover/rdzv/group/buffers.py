"""Copy a module's buffers, such as BatchNorm's means, before a step that may be repeated."""

from __future__ import annotations

import logging

import torch
from torch import Tensor, nn

__all__ = ["BufferCopies", "is_expanded"]

log = logging.getLogger(__name__)

MAX_COPIED_BYTES = 64 << 20
"""Size of the largest buffer that is copied before each step, such as a queue of 65,536 keys of 256 floats."""


class BufferCopies:
    """Copies of a module's buffers on their devices, from before a computation that a loss may interrupt.

    The forward pass writes buffers: a repeated one would count its batch twice, and what an aborted collective returned would
    stay. The copies keep their memory from step to step. Buffers above `MAX_COPIED_BYTES` are left out, with one warning.
    """

    def __init__(self, module: nn.Module) -> None:
        self._parts = [(name, part) for name, part in module.named_modules()]
        self._kept: list[tuple[dict[str, Tensor | None], str, Tensor | None]] = []  # each buffer's holder, name and tensor
        self._copies: list[Tensor] = []
        self._left_out: set[str] = set()

    def keep(self) -> None:
        """Copy the buffers, in place of the former copies."""
        self._kept = [
            (part._buffers, name, buffer)
            for path, part in self._parts
            for name, buffer in part._buffers.items()
            if buffer is None or self._is_copied(f"{path}.{name}".lstrip("."), buffer)
        ]
        buffers = self._tensors()
        if [_layout(copy) for copy in self._copies] != [_layout(buffer) for buffer in buffers]:
            self._copies = [torch.empty_like(buffer) for buffer in buffers]
        _copy(self._copies, buffers)

    def restore(self) -> None:
        """Set the buffers to their copies. Can be called several times."""
        for buffers, name, buffer in self._kept:
            buffers[name] = buffer  # the computation may have assigned another tensor
        _copy(self._tensors(), self._copies)

    def _tensors(self) -> list[Tensor]:
        return [buffer for _, _, buffer in self._kept if buffer is not None and not is_expanded(buffer)]

    def _is_copied(self, name: str, buffer: Tensor) -> bool:
        if buffer.nbytes <= MAX_COPIED_BYTES:
            return True
        if name not in self._left_out:
            self._left_out.add(name)
            log.warning(
                "Buffer %s has %.0f MiB, too many to copy before each step: if a worker is lost in a step, what the forward "
                "pass has written to it stays, and the repeated step writes again",
                *(name, buffer.nbytes / 2**20),
            )
        return False


def is_expanded(buffer: Tensor) -> bool:
    """Whether several elements share memory. Nothing can be written to such a tensor."""
    strides = buffer.stride()
    return 0 in strides and any(size > 1 and step == 0 for size, step in zip(buffer.shape, strides, strict=True))


def _layout(tensor: Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.dtype, tensor.device


def _copy(to: list[Tensor], values: list[Tensor]) -> None:
    if not to:
        return  # torch refuses empty lists
    with torch.no_grad():
        torch._foreach_copy_(to, values)  # few kernels for all buffers on a GPU
