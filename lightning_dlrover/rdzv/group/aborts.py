"""Keep what an aborted collective of an asynchronous backend, such as NCCL, has left in memory away from the weights.

The host does not wait for such a collective. Only the stream does, and it continues after an abort as after a success, with
arbitrary gradients in the buffers. So the host waits for the stream before results are used, and checks whether the round has
ended. gloo needs none of this: its collectives raise.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

__all__ = ["checked_updates", "wait_for_device"]


def wait_for_device(device: torch.device) -> None:
    """Wait until the current stream of a device has completed its work. A CPU has none."""
    if device.type == "cpu":
        torch.cpu.synchronize()
    else:
        torch.get_device_module(device).current_stream(device).synchronize()


@contextlib.contextmanager
def checked_updates(check: Callable[[], None]) -> Iterator[None]:
    """Call `check` before any step of a PyTorch optimizer of this process, once the device has computed its gradients.

    If `check` raises an error, the step changes no parameter.
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
