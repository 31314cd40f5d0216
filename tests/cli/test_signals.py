"""Which signals end a command, and how."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator

import pytest

from lightning_dlrover.cli.errors import Interrupted, signals_as_exceptions

SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """As in a shell's foreground, wherever the tests run."""
    former = {number: signal.getsignal(number) for number in SIGNALS}
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    yield
    for number, handler in former.items():
        signal.signal(number, handler)


def send(number: signal.Signals) -> None:
    """Send a signal to this process and wait for its handler."""
    os.kill(os.getpid(), number)
    signal.pause()


@pytest.mark.parametrize("number", SIGNALS)
def test_inherited_ignored_signal_stays_ignored(number: signal.Signals) -> None:
    """As SIGHUP is under nohup, and SIGINT in a script's background job."""
    signal.signal(number, signal.SIG_IGN)
    hurry = threading.Event()
    with signals_as_exceptions(hurry):
        os.kill(os.getpid(), number)
        with pytest.raises(Interrupted) as raised:
            send(next(other for other in SIGNALS if other != number))
        os.kill(os.getpid(), number)
    assert raised.value.signal_number != number
    assert not hurry.is_set()
    assert signal.getsignal(number) is signal.SIG_IGN


def test_first_signal_interrupts_and_the_second_hastens() -> None:
    hurry = threading.Event()
    with signals_as_exceptions(hurry), pytest.raises(Interrupted):
        send(signal.SIGTERM)
    assert not hurry.is_set()
    with signals_as_exceptions(hurry):
        with pytest.raises(Interrupted):
            send(signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGINT)
        assert hurry.wait(5.0)


@pytest.mark.parametrize("file", ["/venv/grpc/_channel.py", logging.__file__])
def test_signal_does_not_interrupt_code_that_may_hold_a_lock(file: str) -> None:
    found: dict[str, Callable[[Callable[[], None]], None]] = {}
    ended: list[str] = []
    exec(compile("def call(act):\n    act()", file, "exec"), found)

    def request() -> None:
        found["call"](lambda: os.kill(os.getpid(), signal.SIGTERM))
        ended.append("the request")
        threading.Event().wait(5.0)
        ended.append("the wait after it")

    with signals_as_exceptions(threading.Event()), pytest.raises(Interrupted):
        request()
    assert ended == ["the request"]
