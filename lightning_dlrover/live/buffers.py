"""Take the buffers of a model, such as BatchNorm's means, from rank 0 before a validation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

__all__ = ["send_buffers", "take_buffers"]


def send_buffers(model: Any) -> dict[str, Tensor]:
    """Give all workers rank 0's buffers before a validation. Called where there are several workers.

    DDP does so in each worker's first forward pass. A worker without a sample of the first dataloader, or without any left
    after a loss, makes that pass later than the others or never. It would meet them in another collective.

    Args:
        model: the model that the workers train, in DDP if its gradients are reduced.

    Returns:
        A copy of the sent buffers, for a worker that did not receive them because of a loss; see `take_buffers`.
    """
    sent: dict[str, Tensor] = {}
    if isinstance(model, DistributedDataParallel):
        if model.broadcast_buffers and any(True for _ in model.module.buffers()):
            model._sync_buffers()  # type: ignore[no-untyped-call]
            sent = {name: buffer.detach().clone() for name, buffer in model.named_module_buffers.items()}
        model.require_forward_param_sync = False
    return sent


def take_buffers(module: nn.Module, sent: Mapping[str, Tensor]) -> None:
    """Set the buffers that `send_buffers` returned, here or on another worker."""
    own = dict(module.named_buffers())
    with torch.no_grad():
        for name, buffer in sent.items():
            own[name].copy_(buffer)
