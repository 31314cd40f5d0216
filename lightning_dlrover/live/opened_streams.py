"""Put on record which streams a fit reads, so that people can find out which rows were trained when."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lightning_dlrover.data.dataset import Stream
from lightning_dlrover.rdzv.job.events import StreamOpened
from lightning_dlrover.report.streams import described

if TYPE_CHECKING:
    import lightning as L

    from lightning_dlrover.live.loader import ElasticLoader

__all__ = ["opened_streams", "sentence"]

log = logging.getLogger(__name__)

MAX_SOURCE_LENGTH = 2000
"""Characters of a source's expression above which only its type is on record."""


MAX_RANGES = 100
"""Partitions above which their offsets are not on record: a job may have thousands of windows."""


def opened_streams(
    trainer: L.Trainer, loaders: Sequence[ElasticLoader], fit: int, begins_epoch: bool = False
) -> list[StreamOpened]:
    """Return the records of the training loaders that read streams.

    Args:
        fit: number of the script's `fit`.
        begins_epoch: whether the Trainer is about to begin an epoch, and still has the counts of the one before.
    """
    progress = trainer.fit_loop.epoch_loop.batch_progress
    in_epoch, accumulate = 0 if begins_epoch else progress.current.ready, _accumulated(trainer)
    streams = []
    for number, loader in enumerate(loaders):
        layout, stream = loader.order.layout, loader.dataset
        if layout is None or not isinstance(stream, Stream):
            continue
        source = repr(stream.source)
        ranges = stream.window_as_data
        streams.append(
            StreamOpened(
                fit=fit,
                number=number,
                source=source if len(source) <= MAX_SOURCE_LENGTH else type(stream.source).__name__,
                folder=os.getcwd(),
                num_shards=len(stream.shards),
                num_rows=len(stream),
                digest=stream.fingerprint,
                own_batches=len(loader),
                epoch_batches=loader.num_epoch_batches,
                cycles=loader.split.cycles,
                epoch=trainer.current_epoch,
                batches_before=progress.total.ready - in_epoch,
                steps_before=max(0, trainer.global_step - in_epoch // max(1, accumulate)),
                accumulate=accumulate,
                batch_size=layout.batch_size,
                slots=layout.slots,
                cycle=layout.cycle,
                block_rows=layout.block_rows,
                ranges=ranges if ranges is None or len(ranges) <= MAX_RANGES else None,
                grows=stream.grows or None,
                seed=loader.order.seed % 2**64 if stream.shuffle_rows else None,  # orders take so many bits, and no sign
            )
        )
    return streams


def sentence(opened: StreamOpened) -> str:
    """Return the line of the history, which is logged as well."""
    text = f"reads {described(opened)}"
    log.info("%s", text)
    return text


def _accumulated(trainer: L.Trainer) -> int:
    """Return the global batches of an optimizer update; 0 if they vary."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    scheduled = any(hasattr(callback, "scheduling") and callback.scheduling != {0: 1} for callback in callbacks)
    return 0 if scheduled or not trainer.lightning_module.automatic_optimization else trainer.accumulate_grad_batches
