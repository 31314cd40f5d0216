"""SIGTERM drains a worker, also while etcd is away."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from lightning_dlrover.rdzv.etcd.types import EtcdUnavailableError
from lightning_dlrover.rdzv.group import failures
from lightning_dlrover.rdzv.group.failures import DrainOnSigterm


class Membership:
    """A worker's registration in an etcd that is away for some requests."""

    worker_id = "w0"
    evicted = False

    def __init__(self, num_refusals: int) -> None:
        self.own = self
        self.num_refusals = num_refusals
        self.has_asked = threading.Event()

    def drain(self, reason: str) -> None:
        if self.num_refusals:
            self.num_refusals -= 1
            raise EtcdUnavailableError("127.0.0.1:2379 does not answer")
        self.has_asked.set()


@pytest.fixture
def handler() -> Iterator[None]:
    """Restore the handler of SIGTERM."""
    former = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, former)


@pytest.mark.parametrize("num_refusals, num_lines", [(0, 0), (3, 1)])
def test_worker_that_cannot_hand_over_names_the_next_move_once(
    num_refusals: int, num_lines: int, handler: None, caplog: pytest.LogCaptureFixture
) -> None:
    membership: Any = Membership(num_refusals)
    DrainOnSigterm(membership, 60.0).listen()
    os.kill(os.getpid(), signal.SIGTERM)
    assert membership.has_asked.wait(10)
    assert caplog.text.count("cannot hand over because etcd does not answer") == num_lines
    assert caplog.text.count("start the job again with the newest checkpoint") == num_lines


@pytest.mark.parametrize("has_agent", [True, False])
def test_worker_ends_itself_when_neither_etcd_nor_its_agent_is_left(
    has_agent: bool, handler: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    codes: list[int] = []
    has_ended = threading.Event()
    membership: Any = Membership(1000)

    def end(code: int) -> None:
        codes.append(code)
        membership.own.evicted = True  # ends the thread
        has_ended.set()

    monkeypatch.setattr(failures, "AGENT_GRACE_S", 0.2)
    monkeypatch.setattr(os, "_exit", end)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as agent:
        if not has_agent:
            agent.kill()
            agent.wait()
        DrainOnSigterm(membership, 60.0, agent.pid).listen()
        os.kill(os.getpid(), signal.SIGTERM)
        assert has_ended.wait(0.6 if has_agent else 10) is not has_agent
        membership.own.evicted = True
    assert codes == ([] if has_agent else [128 + signal.SIGTERM])
    assert ("cannot announce that it leaves" in caplog.text) is not has_agent


class Calls:
    """Handlers of a script, which note that they were called."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.former: Any = None

    def plain(self, signum: int, frame: Any) -> None:
        self.names.append("plain")

    def chained(self, signum: int, frame: Any) -> None:
        self.names.append("chained")
        self.former(signum, frame)


@pytest.mark.parametrize("order", ["before", "after", "after, and calls the former one"])
def test_scripts_own_handler_is_called_too(order: str, handler: None) -> None:
    membership: Any = Membership(0)
    drain, calls = DrainOnSigterm(membership, 60.0), Calls()
    if order == "before":
        signal.signal(signal.SIGTERM, calls.plain)
    drain.listen()
    if order != "before":
        calls.former = signal.signal(signal.SIGTERM, calls.plain if order == "after" else calls.chained)
    drain.keep()
    drain.keep()
    os.kill(os.getpid(), signal.SIGTERM)
    assert membership.has_asked.wait(10)
    assert calls.names == ["chained" if order.endswith("one") else "plain"]


def test_handler_is_left_alone_until_training_begins(handler: None) -> None:
    membership: Any = Membership(0)
    calls = Calls()
    signal.signal(signal.SIGTERM, calls.plain)
    DrainOnSigterm(membership, 60.0).keep()
    assert signal.getsignal(signal.SIGTERM) == calls.plain


@pytest.mark.parametrize("has_handler", [True, False])
def test_forked_process_does_not_drain_its_worker(has_handler: bool, handler: None) -> None:
    membership: Any = Membership(0)
    signal.signal(signal.SIGTERM, (lambda *_: os._exit(7)) if has_handler else signal.SIG_DFL)
    DrainOnSigterm(membership, 60.0).listen()
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        os.write(writer, b"1")  # Python drops signals that come before the fork has ended
        time.sleep(60)
        os._exit(1)
    os.read(reader, 1)
    os.kill(child, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == (7 if has_handler else -signal.SIGTERM)
    assert not membership.has_asked.is_set()
