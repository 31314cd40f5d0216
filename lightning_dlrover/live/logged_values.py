"""Describe an entry of `self.log` as plain data, and make the same entry on a worker that has not logged it.

Lightning keeps one `_ResultMetric` for each name. A worker may lack one that others have: a joiner, or a worker with a share of
the samples that led to no call of `self.log`. `description` travels between workers; `new_entry` turns it into an empty entry.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lightning_dlrover.live import lightning_names

__all__ = ["description", "new_entry"]


def description(metric: Any) -> dict[str, Any]:
    """Return everything about a `_ResultMetric` except its value, as plain data."""
    sync = metric.meta.sync
    return {
        "meta": {**vars(metric.meta), "reduce_fx": metric.meta.reduce_fx.__name__, "_sync": None},
        "is_tensor": metric.is_tensor,
        "is_synced": sync.should,
        "rank_zero_only": sync.rank_zero_only,
    }


def new_entry(
    trainer: Any, meta: Mapping[str, Any], is_tensor: bool, is_synced: bool, rank_zero_only: bool, device: torch.device
) -> Any:
    """Return a `_ResultMetric` without a value, made from another worker's `description`.

    Args:
            trainer: the Trainer, or one of its loops.

    Raises:
        AttributeError: the value is a torchmetrics object that this worker's module does not have.
    """
    trainer = getattr(trainer, "trainer", trainer)
    metric = lightning_names.new_result(trainer, meta, is_tensor, is_synced, rank_zero_only).to(device)
    if not is_tensor:
        metric.value = _part_at(trainer.lightning_module, str(metric.meta.metric_attribute))
    return metric


def _part_at(module: torch.nn.Module, path: str) -> Any:
    found: Any = module
    for part in path.split("."):
        found = found[int(part)] if part.isdigit() and not hasattr(found, part) else getattr(found, part)
    return found
