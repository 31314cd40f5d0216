"""Keep what an aborted collective of an asynchronous backend, such as NCCL, has left in memory away from the weights.

The host does not wait for such a collective. Only the stream does, and it continues after an abort as after a success, with
arbitrary gradients in the buffers. So the host waits for the stream before results are used, and checks whether the round has
ended. gloo needs none of this: its collectives raise.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

__all__ = ["DeviceWait", "checked_updates", "wait_for_device"]

log = logging.getLogger(__name__)

DEVICE_TICK_S = 1.0
"""Seconds between two looks at a wait for the device."""


def wait_for_device(device: torch.device) -> None:
    """Wait until the current stream of a device has completed its work. A CPU has none."""
    if device.type == "cpu":
        torch.cpu.synchronize()
    else:
        torch.get_device_module(device).current_stream(device).synchronize()


class DeviceWait:
    """Wait for a device, and end the round if the wait lasts longer than a collective may.

    Nothing else limits it: gloo ends such a wait by itself, but the watchdog that would do so for NCCL is off (`backends`).

    Args:
        end_round: ends the round's collectives, so that the stream continues. Called from another thread.
    """

    def __init__(self, limit_s: float, end_round: Callable[[], None]) -> None:
        self._limit_s = limit_s
        self._end_round = end_round
        self._since = float("inf")
        self._is_closed = threading.Event()
        self._watcher: threading.Thread | None = None

    def wait(self, device: torch.device) -> None:
        """Wait until the device's current stream has completed its work. The caller checks whether the round has ended."""
        if self._watcher is None:
            self._watcher = threading.Thread(target=self._watch, name="dlrover-device-wait", daemon=True)
            self._watcher.start()
        self._since = time.monotonic()
        try:
            wait_for_device(device)
        finally:
            self._since = float("inf")

    def close(self) -> None:
        self._is_closed.set()

    def _watch(self) -> None:
        while not self._is_closed.wait(min(DEVICE_TICK_S, self._limit_s / 4)):
            since = self._since
            if time.monotonic() - since > self._limit_s:
                log.error(
                    "this worker has waited %.0f s for its device: another worker takes no part in a collective; the round is "
                    "ended. DLRoverStrategy(timeout=...) sets the limit",
                    time.monotonic() - since,
                )
                self._since = float("inf")
                self._end_round()


@contextlib.contextmanager
def checked_updates(check: Callable[[torch.device], None]) -> Iterator[None]:
    """Call `check` with each device before any step of a PyTorch optimizer of this process.

    If `check` raises an error, the step changes no parameter.
    """

    def before_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
        for device in {p.device for group in optimizer.param_groups for p in group["params"]}:
            check(device)

    handle = register_optimizer_step_pre_hook(before_step)
    try:
        yield
    finally:
        handle.remove()
