"""How a command ends: exit codes, the error for wrong usage, and signals."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_LOST = 0, 1, 2, 3
"""`EXIT_USAGE`: refused before anything was started. `EXIT_LOST`: another controller acts for the job now."""


class UsageError(Exception):
    """The user asked for something impossible; the message names an alternative."""


_AGAIN_S = 0.02
"""Seconds after which a signal is repeated that came while a lock was held."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(BaseException):
    """A signal asked the process to end."""

    def __init__(self, signal_number: int) -> None:
        self.signal_number = signal_number


@contextlib.contextmanager
def quiet_start() -> Iterator[Callable[[], None]]:
    """Let Ctrl-C end this process without a traceback, as long as it has started nothing that must be ended first.

    Call the yielded function to restore Python's own handler.
    """

    def interrupted(number: int, frame: FrameType | None) -> None:
        # Exit at once: some modules would take an exception during an import for a failed import.
        with contextlib.suppress(OSError):
            os.write(2, b"dlrover: interrupted\n")
        os._exit(128 + number)

    def started() -> None:
        if is_ours and signal.getsignal(signal.SIGINT) is interrupted:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    is_ours = threading.current_thread() is threading.main_thread()
    is_ours = is_ours and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_ours:
        signal.signal(signal.SIGINT, interrupted)
    try:
        yield started
    finally:
        started()


@contextlib.contextmanager
def signals_as_exceptions(hurry: threading.Event) -> Iterator[None]:
    """Raise `Interrupted` at the first signal that asks this process to end; set `hurry` at each later one.

    A signal that this process was started to ignore stays ignored: `nohup dlrover run ... &` outlives its login session, and a
    script's background job survives Ctrl-C.
    """
    former = {n: handler for n in _SIGNALS if (handler := signal.getsignal(n)) is not signal.SIG_IGN}

    def hasten(number: int, frame: FrameType | None) -> None:
        hurry.set()

    def interrupt(number: int, frame: FrameType | None) -> None:
        if _holds_lock(frame):
            again = threading.Timer(_AGAIN_S, os.kill, (os.getpid(), number))
            again.daemon = True
            again.start()
            return
        # An orderly end takes seconds. A second signal must hasten it, not interrupt it.
        for each in former:
            signal.signal(each, hasten)
        raise Interrupted(number)

    for each in former:
        signal.signal(each, interrupt)
    try:
        yield
    finally:
        for each, handler in former.items():
            signal.signal(each, handler)


def _holds_lock(frame: FrameType | None) -> bool:
    """Whether an exception out of the interrupted code may leave a lock held: the job's orderly end would wait for it forever.

    gRPC's channel has such a lock. A request is short; the wait for one ends with its timeout.
    """
    while frame is not None:
        file, function = frame.f_code.co_filename, frame.f_code.co_name
        if "/grpc/" in file or file == logging.__file__:
            return True
        if file == threading.__file__ and function in ("__enter__", "__exit__"):
            return True
        frame = frame.f_back
    return False
