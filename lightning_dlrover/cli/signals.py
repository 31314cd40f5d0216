"""Signals of the `dlrover` process: a quiet start, then an orderly end of what it has started."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(BaseException):
    """The process was asked to end by a signal."""

    def __init__(self, signal_number: int) -> None:
        self.signal_number = signal_number


@contextlib.contextmanager
def quiet_start() -> Iterator[Callable[[], None]]:
    """Let Ctrl-C end this process without a traceback, as long as nothing was started that would have to be ended first.

    The function that it gives ends that time.
    """

    def interrupted(number: int, frame: FrameType | None) -> None:
        # At once: an exception in the middle of an import would be an import's error to some modules.
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
    """Raise `Interrupted` at the first signal that asks this process to end; set `hurry` at each later one."""
    former = {number: signal.getsignal(number) for number in _SIGNALS}
    install_handlers(hurry)
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def install_handlers(hurry: threading.Event) -> None:
    """Install the handlers of `signals_as_exceptions`, also in place of others'."""

    def hasten(number: int, frame: FrameType | None) -> None:
        hurry.set()

    def interrupt(number: int, frame: FrameType | None) -> None:
        # Ending everything in order takes seconds; a second signal must not break that off, only hasten it.
        for each in _SIGNALS:
            signal.signal(each, hasten)
        raise Interrupted(number)

    for each in _SIGNALS:
        signal.signal(each, interrupt)
