"""Sockets that were shut down cost no time, although gloo keeps them."""

from __future__ import annotations

import json
import os
import select
import socket
from pathlib import Path

import pytest

from lightning_dlrover.rdzv.transport.waits import silence
from tests.support.warm_process import WarmProcess, run_script

SCRIPT = Path(__file__).with_name("failed_beside_a_message.py")


def test_silenced_socket_is_reported_once_more_and_stays_registered() -> None:
    one, other = socket.socketpair()
    with one, other, select.epoll() as epoll:
        epoll.register(one, select.EPOLLIN)
        other.send(b"never read")
        assert epoll.poll(0) == epoll.poll(0) == [(one.fileno(), select.EPOLLIN)]
        assert silence([(one.fileno(), os.fstat(one.fileno()).st_ino)]) == 1
        assert epoll.poll(0) == [(one.fileno(), select.EPOLLIN)]  # its data stay as they were registered
        other.close()
        assert epoll.poll(0) == epoll.poll(0.01) == []
        epoll.unregister(one)


def test_socket_that_reuses_a_descriptor_is_not_silenced() -> None:
    one, other = socket.socketpair()
    with one, other, select.epoll() as epoll:
        epoll.register(one, select.EPOLLIN)
        other.send(b"never read")
        assert silence([(one.fileno(), os.fstat(one.fileno()).st_ino + 1), (2**20, 1)]) == 0
        assert epoll.poll(0) == epoll.poll(0) == [(one.fileno(), select.EPOLLIN)]


@pytest.mark.usefixtures("fork_server")
def test_message_that_gloo_has_no_memory_for_any_more_takes_no_core(tmp_path: Path) -> None:
    process = WarmProcess(run_script, [str(SCRIPT), str(tmp_path)], os.environ, tmp_path / "output")
    try:
        assert process.wait(60) == 0, (tmp_path / "output").read_text()
    finally:
        process.kill()
    before, after = json.loads((tmp_path / "output").read_text().splitlines()[-1])
    assert after < 0.05
    # If a later gloo does not spin here itself, `silence` is no longer needed.
    assert before > 2 * after
