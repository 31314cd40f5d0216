"""Keep what an aborted collective of NCCL's has left in memory away from the weights.

The host does not wait for NCCL: only the CUDA stream does, and it goes on after an abort as after a success. Gradients are then
whatever the buffers hold. So the host waits for the stream where results begin to count, and looks whether the round has ended.
gloo needs none of this: its collectives raise.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

__all__ = ["checked_updates", "wait_for_device"]


def wait_for_device(device: torch.device) -> None:
    """Wait until the current stream of a CUDA device has computed all that it was given; a CPU has already."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


@contextlib.contextmanager
def checked_updates(check: Callable[[], None]) -> Iterator[None]:
    """Call `check` before any step of a PyTorch optimizer of this process, once the device has computed its gradients.

    A step that `check` raises an error for changes nothing.
    """

    def before_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
        devices = {p.device for group in optimizer.param_groups for p in group["params"]}
        for device in devices:
            wait_for_device(device)
        check()

    handle = register_optimizer_step_pre_hook(before_step)
    try:
        yield
    finally:
        handle.remove()
