"""The check that every test ends its threads and processes: it finds everything left behind, and nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from multiprocessing import forkserver
from pathlib import Path

import pytest

from tests.support.leaks import Held, left_behind
from tests.support.warm_process import WarmProcess, run_code


def test_thread_is_left_behind_until_it_ends() -> None:
    before, end = Held.now(), threading.Event()
    thread = threading.Thread(target=end.wait, name="dlrover-test")
    thread.start()
    assert left_behind(before, 0.0) == ["thread dlrover-test"]
    end.set()
    assert left_behind(before) == []


def test_child_process_is_left_behind_until_it_ends() -> None:
    before = Held.now()
    command = [sys.executable, "-c", "print(flush=True); input()"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()  # wait until its command line exists
    [found] = left_behind(before, 0.0)
    assert found.startswith(f"process {process.pid}: ")
    process.communicate(b"\n")
    assert left_behind(before) == []


def test_orphan_is_left_behind_until_it_ends() -> None:
    before = Held.now()
    source = "import subprocess; print(subprocess.Popen(['sleep', '60'], stdout=subprocess.DEVNULL).pid)"
    orphan = int(subprocess.run([sys.executable, "-c", source], stdout=subprocess.PIPE, check=True).stdout)
    assert left_behind(before, 0.0) == [f"process {orphan}: sleep 60"]
    os.kill(orphan, signal.SIGKILL)
    assert left_behind(before) == []


def test_process_forked_from_the_fork_server_is_left_behind_until_it_ends(tmp_path: Path) -> None:
    forkserver.ensure_running()
    before = Held.now()
    process = WarmProcess(run_code, ["import time; time.sleep(60)"], os.environ, tmp_path / "output")
    [found] = left_behind(before, 0.0)
    assert found.startswith(f"process {process.pid}: ")
    process.kill()
    process.wait(10)
    assert left_behind(before) == []


def test_variable_is_left_behind_until_it_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    before = Held.now()
    monkeypatch.setenv("DLROVER_TEST", "1")
    monkeypatch.delenv("DLROVER_HISTORY")
    assert left_behind(before, 0.0) == ["variable DLROVER_TEST=1", "variable DLROVER_HISTORY is gone or changed"]
    monkeypatch.undo()
    assert left_behind(before) == []


def test_temporary_file_is_left_behind_until_it_is_closed() -> None:
    before = Held.now()
    with tempfile.NamedTemporaryFile(prefix="dlrover-", dir="/tmp") as file:
        assert left_behind(before, 0.0) == [f"open file {file.name}"]
    assert left_behind(before) == []
