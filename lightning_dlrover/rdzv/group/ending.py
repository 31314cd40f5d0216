"""End a round's process groups without waiting for workers that are gone.

The groups of a backend that is abortable, such as NCCL's, go through these states. Each change is made once, under the lock:

    open -> aborting            any thread: a collective failed, or the round is over
    open -> closing             the main thread, after all members have agreed on the next round
    aborting, closing -> ended  the thread that aborts or shuts down

Both calls may block inside the driver while a kernel is stuck, so each runs in a thread of its own. An error there is logged
and changes nothing else: the communicators of the next round are others.

The groups of the round that ended last are kept until the next one ends. The destructor of NCCL's waits for its watchdog, which
needs the interpreter's lock to free a tensor. DDP's reducer drops its group while it holds that lock, so it must never be the
last one that does.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from lightning_dlrover.rdzv.group import torch_names
from lightning_dlrover.rdzv.live.member import WorldError

__all__ = ["GroupStuckError", "RoundEnd"]

log = logging.getLogger(__name__)

STUCK_S = 30.0
"""Seconds for an abort. A worker whose device does not return from one cannot take part in any further round."""

CLOSE_S = 10.0
"""Seconds for a planned shutdown, which waits for the other members. The groups are aborted after that."""

EXIT_STUCK = 70
"""Exit code of a worker whose device does not let go of a lost round."""


_ended_last: list[Sequence[Any]] = []
"""The groups that were ended last: one list at most."""


class GroupStuckError(WorldError):
    """The communicators of an ended round could not be aborted."""


class RoundEnd:
    """The end of one round's groups.

    Args:
        groups: returns the groups of the round, the newest first. Called once, by the thread that ends them.
        what: names the round in messages.
        report: publishes the error that ends this worker, if an abort is stuck. None: such an abort is left behind, as no
            kernel of these groups can hold up another round.
    """

    def __init__(self, groups: Callable[[], Sequence[Any]], what: str, report: Callable[[BaseException], None] | None) -> None:
        self._groups = groups
        self._what = what
        self._report = report
        self._lock = threading.Lock()
        self._is_open = True
        self._ended = threading.Event()

    def abort(self) -> None:
        """Begin to abort the groups, unless they are ending already. Never blocks."""
        self._begin(self._abort, STUCK_S, self._give_up)

    def close(self) -> None:
        """Begin to shut the groups down after all members have agreed to leave them. Never blocks."""
        self._begin(self._shut_down, CLOSE_S, self._abort_instead)

    def wait(self, timeout_s: float = STUCK_S) -> None:
        """Wait until the groups are gone, so that their memory is free and no kernel of theirs is left.

        Raises:
            GroupStuckError: they are not gone in time.
        """
        if not self._is_open and not self._ended.wait(timeout_s):
            raise self._stuck(timeout_s)

    def _begin(self, end: Callable[[Sequence[Any]], None], limit_s: float, too_late: Callable[[Sequence[Any]], None]) -> None:
        with self._lock:
            if not self._is_open:
                return
            self._is_open = False
            groups = list(self._groups())

        def run() -> None:
            try:
                end(groups)
            finally:
                self._ended.set()
                before, _ended_last[:] = list(_ended_last), [groups]
                del before  # in this thread, whose destructors release the interpreter's lock

        def watch() -> None:
            if not self._ended.wait(limit_s):
                too_late(groups)

        threading.Thread(target=run, name="dlrover-end-round", daemon=True).start()
        threading.Thread(target=watch, name="dlrover-watch-end", daemon=True).start()

    def _abort(self, groups: Sequence[Any]) -> None:
        began = time.monotonic()
        try:
            torch_names.abort(groups)
        except Exception as error:
            log.warning("%s: its groups were aborted with an error, which changes nothing: %s", self._what, error)
        log.debug("%s: aborted in %.3f s", self._what, time.monotonic() - began)

    def _shut_down(self, groups: Sequence[Any]) -> None:
        try:
            for group in groups:
                group.shutdown()
        except Exception as error:
            log.warning("%s: its groups are aborted, because their shutdown failed: %s", self._what, error)
            self._abort(groups)

    def _abort_instead(self, groups: Sequence[Any]) -> None:
        log.warning("%s: a member did not take part in its shutdown for %.0f s; its groups are aborted", self._what, CLOSE_S)
        self._abort(groups)

    def _give_up(self, groups: Sequence[Any]) -> None:
        if self._report is None:
            log.warning(
                "%s: its communicators have not connected, and their abort waits for that; they are left behind", self._what
            )
            return
        error = self._stuck(STUCK_S)
        log.critical("%s", error)
        with contextlib.suppress(Exception):
            self._report(error)
        os._exit(EXIT_STUCK)  # the main thread may wait for a kernel that will never end

    def _stuck(self, waited_s: float) -> GroupStuckError:
        return GroupStuckError(
            f"{self._what}: the device has not returned from the abort of its communicators for {waited_s:.0f} s, so this "
            "worker cannot take part in another round; its agent has to start it again. Look for messages of the driver (Xid), "
            "and set NCCL_DEBUG=INFO to see what NCCL waits for"
        )
