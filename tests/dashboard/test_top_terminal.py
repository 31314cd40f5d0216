"""`dlrover top` in a real pseudo terminal, as it is seen by a person who has connected with ssh."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyte
import pytest

from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.server import EmbeddedEtcd
from lightning_dlrover.rdzv.etcd.types import EtcdConfig
from lightning_dlrover.rdzv.job.records import EventRecord, encode
from tests.support.recorded_jobs import recorded_job, write

COLUMNS, LINES = 80, 24
START = "import sys; from lightning_dlrover.cli.main import main; sys.exit(main())"


class Terminal:
    """A terminal of 80x24 with a program in it."""

    def __init__(self, process: subprocess.Popen[bytes], descriptor: int) -> None:
        self.process = process
        self.raw = b""
        self._descriptor = descriptor
        self._screen = pyte.Screen(COLUMNS, LINES)
        self._stream = pyte.ByteStream(self._screen)

    @property
    def text(self) -> str:
        return "\n".join(self._screen.display)

    def type(self, keys: str) -> None:
        os.write(self._descriptor, keys.encode())

    def wait_for(self, *parts: str, timeout_s: float = 60.0) -> str:
        """Read until all texts are on the screen."""
        deadline = time.monotonic() + timeout_s
        while any(part not in self.text for part in parts):
            assert time.monotonic() < deadline, f"{parts} not on the screen:\n{self.text}"
            assert self.read() or self.process.poll() is None, f"the program has ended:\n{self.text}"
        return self.text

    def read(self) -> bool:
        """Read what the program has written within a moment; return whether there was something."""
        if not select.select([self._descriptor], [], [], 0.2)[0]:
            return False
        try:
            found = os.read(self._descriptor, 1 << 16)
        except OSError:  # the program has closed its end
            return False
        self.raw += found
        self._stream.feed(found)
        return bool(found)


@contextmanager
def terminal(folder: Path, *arguments: str) -> Iterator[Terminal]:
    """Run `dlrover ARGUMENTS` in a terminal."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(COLUMNS), "LINES": str(LINES)}
    process = subprocess.Popen(
        [sys.executable, "-c", START, *arguments],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        cwd=folder,
        env=environment,
        start_new_session=True,
    )
    os.close(theirs)
    try:
        yield Terminal(process, ours)
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def test_a_terminal_shows_jobs_opens_one_and_is_clean_afterwards(private_etcd: EmbeddedEtcd, tmp_path: Path) -> None:
    evil = "\x1b]0;owned\x07\x1b[31mred"
    records = recorded_job(2, time.time() - 101.0)
    records["events/9-w"] = encode(EventRecord("error", time.time(), evil))
    with EtcdClient(EtcdConfig(private_etcd.endpoint)) as client:
        write(client, "ctr", records)
    with terminal(tmp_path, "top", "--endpoint", private_etcd.endpoint) as shown:
        text = shown.wait_for("1 job, 1 running", "training", "45 %", "filter", "quit")
        assert max(len(line) for line in text.splitlines()) == COLUMNS
        shown.type("\r")
        shown.wait_for("job ctr", "RANK", "node1", "compute 90%", "]0;owned", "drain")
        shown.type("+")
        shown.wait_for("Set job ctr to")
        shown.type("n")
        shown.wait_for("RANK", "SLOW")
        shown.type("q")
        assert shown.process.wait(30) == 0
        while shown.read():
            pass
        assert b"owned\x07" not in shown.raw
        assert shown.raw.rindex(b"\x1b[?1049l") > shown.raw.rindex(b"\x1b[?1049h")  # the user's own screen is back
        assert b"Traceback" not in shown.raw


@pytest.mark.parametrize("hidden", ["textual", ""])
def test_without_a_terminal_or_textual_one_line_names_the_next_move(tmp_path: Path, hidden: str) -> None:
    if not hidden:
        command = [sys.executable, "-c", START, "top"]
        ran = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60)
        assert (ran.returncode, ran.stderr.count("\n")) == (2, 1)
        assert "dlrover status --json" in ran.stderr
        return
    (tmp_path / "textual.py").write_text("raise ModuleNotFoundError(\"No module named 'textual'\", name='textual')\n")
    with terminal(tmp_path, "top") as shown:
        shown.wait_for("pip install")
        assert b"needs the package `textual`: pip install 'lightning-dlrover[top]'" in shown.raw
        assert shown.process.wait(30) == 2
        assert "Traceback" not in shown.text
