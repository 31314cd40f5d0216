"""Collate a stream's samples in a live job, with the facts that the training process needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_dlrover.data.dataset import Opened, Stream
from lightning_dlrover.data.left_out import WithLeftOut

__all__ = ["StreamCollate"]


class StreamCollate:
    """A collate function for a stream: the batch of the user's function, `WithLeftOut` if rows were left out.

    Args:
        inner: the user's collate function.
        dataset: the stream, in the process that calls this function.
    """

    def __init__(self, inner: Callable[[Any], Any], dataset: Stream) -> None:
        self._inner = inner
        self._dataset = dataset

    def __call__(self, samples: Any) -> Any:
        if isinstance(samples, Opened):
            return None
        batch = self._inner(samples)
        left_out = self._dataset.take_left_out()
        return WithLeftOut(batch, left_out) if left_out else batch
