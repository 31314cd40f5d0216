"""Distinguish a broken round from a mistake in the user's code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist

from lightning_dlrover.rdzv.group.meeting import CollectiveMonitor, MismatchError
from lightning_dlrover.rdzv.live.member import LeftOutError, MembershipError, RoundEndedError, WorldError

__all__ = ["Failures", "is_group_failure"]

MAX_ATTEMPTS = 8
"""Recoveries at one place in the program before its error is attributed to the user's code."""


def is_group_failure(error: BaseException) -> bool:
    """Whether `error` was raised by a collective whose peer is gone, and not by the user's own code.

    Example:
        >>> is_group_failure(RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer"))
        True
        >>> is_group_failure(ValueError("batch is empty"))
        False
    """
    text = str(error)
    if any(mark in text for mark in _MISTAKES):
        return False
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(mark in text for mark in _LOSSES)


_LOSSES = (
    "gloo/transport",
    "Connection closed by peer",
    "Connection reset by peer",
    "NCCL communicator was aborted",
    "NCCL error",
    "ncclRemoteError",
    "ncclSystemError",
)
"""Texts of errors raised by collectives when a peer is gone."""

_MISTAKES = ("ncclInvalidUsage", "ncclInvalidArgument", "ncclUnhandledCudaError", "Duplicate GPU detected")
"""Texts of NCCL's errors that would recur in the next round, such as two workers on one GPU."""


class MaySever(Protocol):
    """Connections of a round, which end with it."""

    @property
    def are_severed(self) -> bool: ...


class Failures:
    """Classify errors that end a worker's rounds as recoverable or not, and limit recoveries.

    Args:
        sockets: connections of the round.
    """

    def __init__(self, sockets: MaySever, meeting: Callable[[], CollectiveMonitor | None]) -> None:
        self.mismatch: MismatchError | None = None
        self._sockets = sockets
        self._meeting = meeting
        self._attempts: tuple[bytes, int] = (b"", 0)  # hello, and the number of recoveries with it
        self._last_failure = ""  # text of the newest error that was attributed to a loss

    def is_failure(self, error: BaseException) -> bool:
        """See `World.is_failure`."""
        if isinstance(error, MembershipError | LeftOutError | MismatchError):
            return False
        self.raise_mismatch(error)
        is_loss = is_group_failure(error) or isinstance(error, RoundEndedError)
        is_loss = is_loss or (self._sockets.are_severed and _may_follow_from_an_abort(error))
        if is_loss:
            self._last_failure = f"{type(error).__name__}: {error}"[:2000]
        return is_loss

    def raise_mismatch(self, error: BaseException | None = None) -> None:
        """Raise the mismatch that has ended the round, if any, in place of `error`, its consequence."""
        if (meeting := self._meeting()) is not None:
            self.mismatch = meeting.await_mismatch()
        if self.mismatch is not None and error is not self.mismatch:
            raise self.mismatch from error

    def count_attempt(self, hello: bytes) -> None:
        """Count one more recovery at the place that `hello` names.

        Raises:
            WorldError: there were too many recoveries at this place.
        """
        self._attempts = (hello, self._attempts[1] + 1 if self._attempts[0] == hello else 1)
        if self._attempts[1] > MAX_ATTEMPTS:
            raise WorldError(
                f"collectives failed {MAX_ATTEMPTS} times in a row at {hello.decode()}; giving up. "
                f"The last error was: {self._last_failure or 'unknown'}"
            )


def _may_follow_from_an_abort(error: BaseException) -> bool:
    """Whether an error may come from the groups of a round that was ended while code used them."""
    if isinstance(error, torch.OutOfMemoryError):
        return False  # it would come again in the next round
    if isinstance(error, RuntimeError):
        return True
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    # Without its groups torch raises ValueError, KeyError, TypeError or AssertionError, whichever table it looks into first.
    return frame is not None and frame.tb_frame.f_globals.get("__name__", "").startswith("torch.distributed")
