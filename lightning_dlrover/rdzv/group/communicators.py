"""Connect the communicators of a round before its first collective, for backends that are slow to connect.

torch lets NCCL connect at the first collective, in the backward pass of the first step, without a time limit. Here a thread
connects as soon as the round is known: for a planned round while the former one still trains. `backends` makes NCCL open its
channels then, and not at the first collective.

That thread starts no collective. Members may begin collectives of two communicators in different orders, and wait for each
other for ever on a device that cannot run both at once (NCCL's user guide, "Using multiple NCCL communicators concurrently").
One small reduction follows once the former round's groups are out of use.

    connecting -> connected | failed    the thread
    any -> abandoned                    the main thread or the membership thread: the round is void, or too late

A thread that hangs in the driver is left behind. It holds nothing that another round needs.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch

from lightning_dlrover.rdzv.group import torch_names
from lightning_dlrover.rdzv.group.aborts import wait_for_device
from lightning_dlrover.rdzv.group.backends import names_by_device
from lightning_dlrover.rdzv.group.ending import RoundEnd
from lightning_dlrover.rdzv.group.torch_names import PrefixStore, Store
from lightning_dlrover.rdzv.job.records import RoundRecord
from lightning_dlrover.rdzv.live.member import WorldError

__all__ = ["CommunicatorError", "Communicators", "slow_to_connect"]

log = logging.getLogger(__name__)


class CommunicatorError(WorldError):
    """The communicators of a round could not be connected."""


class Communicators:
    """One worker's communicators of one round.

    Args:
        names: backends to connect, by device type.
        open_store: connects to the round's store; may wait.
        former: end of the groups before, whose abort is awaited first: its kernels would hold up the reduction.
        timeout: limit of a collective.
    """

    def __init__(
        self,
        target: RoundRecord,
        rank: int,
        device: torch.device,
        names: Mapping[str, str],
        open_store: Callable[[], Store],
        former: RoundEnd | None,
        timeout: timedelta,
    ) -> None:
        self.round = target
        self._rank, self._device = rank, device
        self._names = names
        self._open_store = open_store
        self._former = former
        self._timeout = timeout
        self._backends: dict[str, Any] = {}
        self._lock = threading.Lock()
        self.is_abandoned = False
        self.end: RoundEnd | None = None  # of those that were abandoned
        self._error: BaseException | None = None
        self._is_done = threading.Event()
        self._began = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="dlrover-communicators", daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """Whether they are connected, or have failed to."""
        return self._is_done.is_set()

    @property
    def has_failed(self) -> bool:
        """Whether they could not be connected, or were abandoned."""
        return self._error is not None

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until they are connected, or have failed to; return whether they have. Without a limit the caller sets one."""
        return self._is_done.wait(timeout_s)

    def connected(self) -> dict[str, Any]:
        """Return the backends by name.

        Raises:
            CommunicatorError: they could not be connected.
        """
        assert self.is_done
        with self._lock:  # another thread may abandon them now
            if self._error is not None:
                raise CommunicatorError(f"round {self.round.number}: {self._error}") from self._error
            backends, self._backends = self._backends, {}
        return backends

    def warm_up(self) -> None:
        """Run one small reduction in each communicator. The caller limits the wait, and abandons them after an error.

        Raises:
            CommunicatorError: a result is wrong.
        """
        self._use_device()
        with self._lock:
            backends = dict(self._backends)
        for name, backend in backends.items():
            ones = torch.ones(1, device=self._device)
            backend.allreduce([ones]).wait()
            wait_for_device(self._device)
            if int(ones) != len(self.round.members):
                raise CommunicatorError(
                    f"round {self.round.number}: the first reduction over {name} gave {float(ones)} among "
                    f"{len(self.round.members)} workers"
                )

    def abandon(self, reason: str = "the round was given up") -> None:
        """Abort what is connected or connecting, and end all waits for it with an error. Never blocks."""
        with self._lock:
            self.is_abandoned = True
            self._error = self._error or CommunicatorError(reason)
            backends, self._backends = self._backends, {}
        self._is_done.set()
        if backends:
            # No abort reaches a communicator that still connects (pytorch issue 103264), and in non-blocking mode it may wait
            # for that. So an abort that is stuck says nothing about the device, and the thread is left behind.
            self.end = RoundEnd(lambda: list(backends.values()), f"round {self.round.number}", None)
            self.end.abort()

    def _run(self) -> None:
        try:
            if self._former is not None:
                self._former.wait()
            self._use_device()
            store = self._open_store()
            for name in dict.fromkeys(self._names.values()):
                self._connect(name, PrefixStore(name, store))
        except BaseException as error:
            log.info("round %d: its communicators did not connect: %s", self.round.number, error)
            self._error = error
        else:
            log.debug("round %d: communicators after %.3f s", self.round.number, time.monotonic() - self._began)
        finally:
            self._is_done.set()

    def _use_device(self) -> None:
        if self._device.type != "cpu":
            torch.get_device_module(self._device).set_device(self._device)  # a thread begins with the first device

    def _connect(self, name: str, store: Store) -> None:
        size = len(self.round.members)
        backend = torch_names.backend_beside_gloo(name, store, self._rank, size, self._timeout)
        with self._lock:
            if self.is_abandoned:
                raise CommunicatorError("the round was given up")
            self._backends[name] = backend  # from here on it can be aborted
        backend.eager_connect_single_device(self._device)


def slow_to_connect(backend: str) -> dict[str, str]:
    """Return the backends of a group, by device type, that are worth connecting early: all but gloo."""
    return {device: name for device, name in names_by_device(backend).items() if name != "gloo"}
