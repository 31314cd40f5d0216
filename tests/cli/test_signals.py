"""Which signals end a command, and how."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from lightning_dlrover.cli.signals import Interrupted, signals_as_exceptions

SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    former = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in former.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_inherited_ignored_signal_stays_ignored(number: signal.Signals) -> None:
    """As SIGHUP is under nohup, and SIGINT in a script's background job."""
    signal.signal(number, signal.SIG_IGN)
    hurry = threading.Event()
    with signals_as_exceptions(hurry):
        os.kill(os.getpid(), number)
        with pytest.raises(Interrupted) as raised:
            os.kill(os.getpid(), next(other for other in SIGNALS if other != number))
            signal.pause()
        os.kill(os.getpid(), number)
    assert raised.value.signal_number != number
    assert not hurry.is_set()
    assert signal.getsignal(number) is signal.SIG_IGN


def test_first_signal_interrupts_and_the_second_hastens() -> None:
    hurry = threading.Event()
    with signals_as_exceptions(hurry), pytest.raises(Interrupted):
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()
    assert not hurry.is_set()
    with signals_as_exceptions(hurry):
        with pytest.raises(Interrupted):
            os.kill(os.getpid(), signal.SIGHUP)
            signal.pause()
        os.kill(os.getpid(), signal.SIGINT)
        assert hurry.wait(5.0)
