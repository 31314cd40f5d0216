"""Helpers beside a node's agent under a scheduler's signals and limits, with the real torchrun and its worker."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from lightning_dlrover import variables as names
from lightning_dlrover.components.control.post_mortem import PostMortem, examine
from lightning_dlrover.components.node import AGENTS_OPTION, notice_file
from tests.support.waiting import eventually

POLITE = """
import signal, sys, time
def leave(*_):
    print("handed over", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, leave)
print("training", flush=True)
time.sleep(600)
"""

TWO_GPUS = {"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b"}
OF_RUN = {names.NODE: "node1", names.LEAVE_ON_SIGTERM: "1"}

Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[subprocess.Popen[bytes]] = []

    def node(source: str, notice_s: float = 0.0, first: Sequence[str] = (), **variables: str) -> subprocess.Popen[bytes]:
        (tmp_path / "script.py").write_text(source)
        (tmp_path / "tmp").mkdir()
        added = variables or {names.EXIT_FILE: str(tmp_path / "exit_code"), names.NOTICE_S: str(notice_s)}
        with (tmp_path / "output").open("wb") as output:
            command = ["-m", "lightning_dlrover.components.node", *first, "--standalone", "--nproc-per-node=1"]
            started.append(
                subprocess.Popen(
                    [sys.executable, *command, str(tmp_path / "script.py")],
                    env={**os.environ, **added, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path / "tmp")},
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )
        return started[-1]

    yield node
    for process in started:
        if process.poll() is None:
            # torchrun gives its worker its own session.
            family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
            for each in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()
            process.wait()


def wait_for_output(folder: Path, text: str, timeout_s: float = 60.0) -> None:
    output = (folder / "output").read_text
    eventually(lambda: text in output(), f"{text!r}", timeout_s, 0.05, report=output)


def test_a_notice_is_written_down_and_then_passed_on_to_the_worker_alone(start: Start, tmp_path: Path) -> None:
    node = start(POLITE, notice_s=2.0)
    wait_for_output(tmp_path, "training")
    began, sent_at = time.monotonic(), round(time.time(), 1)
    node.send_signal(signal.SIGUSR1)
    assert node.wait(30) == 0  # an agent that receives the signal itself ends with an error
    assert time.monotonic() - began > 1.0  # half of the time is left for the replacement
    assert "handed over" in (tmp_path / "output").read_text()
    assert 0.0 <= float(notice_file(tmp_path / "exit_code").read_text()) - sent_at - 2.0 < 1.0
    assert (tmp_path / "exit_code").read_text() == "0\n"
    assert list((tmp_path / "tmp").iterdir()) == []


def test_failed_script_prints_one_traceback_and_keeps_its_exit_code(start: Start, tmp_path: Path) -> None:
    node = start("raise ValueError('bad')")
    assert node.wait(60) == 1
    assert (tmp_path / "exit_code").read_text() == "1\n"
    assert not notice_file(tmp_path / "exit_code").exists()
    output = (tmp_path / "output").read_text()
    assert output.count("Traceback") == 1
    assert output.splitlines()[-1].endswith("has failed (exitcode: 1), see its error above")
    assert examine(output).error == "ValueError: bad"


def test_sigterm_ends_agent_and_worker(start: Start, tmp_path: Path) -> None:
    node = start(POLITE)
    wait_for_output(tmp_path, "training")
    node.send_signal(signal.SIGTERM)
    assert node.wait(30) != 0
    assert (tmp_path / "exit_code").read_text() != "0\n"
    assert "handed over" in (tmp_path / "output").read_text()


def test_sigterm_from_a_scheduler_reaches_the_worker_alone(start: Start, tmp_path: Path) -> None:
    node = start(POLITE, **{names.LEAVE_ON_SIGTERM: "1"})
    wait_for_output(tmp_path, "training")
    node.send_signal(signal.SIGTERM)
    assert node.wait(30) == 0
    assert "handed over" in (tmp_path / "output").read_text()
    assert not (tmp_path / "exit_code").exists()
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGUSR1])
def test_notice_reaches_the_workers_of_all_agents_and_no_agent(start: Start, tmp_path: Path, sign: signal.Signals) -> None:
    exit_file = {names.EXIT_FILE: str(tmp_path / "exit_code"), names.NOTICE_S: "0.1"}
    variables = exit_file if sign == signal.SIGUSR1 else {names.LEAVE_ON_SIGTERM: "1"}
    node = start(POLITE, 0.0, [f"{AGENTS_OPTION}2"], **variables, **TWO_GPUS)
    eventually(lambda: (tmp_path / "output").read_text().count("training") == 2, "both workers", 60)
    node.send_signal(sign)
    assert node.wait(30) == 0, (tmp_path / "output").read_text()
    assert (tmp_path / "output").read_text().count("handed over") == 2
    assert list((tmp_path / "tmp").iterdir()) == []


def test_error_of_one_of_several_workers_ends_their_node_at_once(start: Start, tmp_path: Path) -> None:
    one_fails = f"import os\nif os.environ['CUDA_VISIBLE_DEVICES'] == 'GPU-b': raise ValueError('bad')\n{POLITE}"
    node = start(one_fails, 0.0, [f"{AGENTS_OPTION}2"], **OF_RUN, **TWO_GPUS)
    assert node.wait(60) == 1
    output = (tmp_path / "output").read_text()
    assert "agent 1 has ended with 1; 1 others are left, whose workers hand over and leave" in output
    assert examine(output).error == "ValueError: bad"


def test_node_with_fewer_gpus_than_workers_fails_with_that_error(start: Start, tmp_path: Path) -> None:
    node = start(POLITE, 0.0, [f"{AGENTS_OPTION}3"], **OF_RUN, **TWO_GPUS)
    assert node.wait(60) == 1
    assert examine((tmp_path / "output").read_text()).error.startswith(
        "ValueError: 3 workers need a GPU each, and 2 are visible"
    )


@pytest.mark.skipif(bool(os.geteuid()), reason="only root makes a process the first of its namespace")
def test_the_first_process_of_a_container_lets_no_zombies_stay(start: Start, tmp_path: Path) -> None:
    script = """
import os, time
reading, writing = os.pipe()
if os.fork() == 0:
    if (orphan := os.fork()) == 0:
        time.sleep(0.2)
        os._exit(0)
    os.write(writing, str(orphan).encode())
    os._exit(0)
os.wait()
orphan = int(os.read(reading, 20))
deadline = time.monotonic() + 20
while os.path.exists(f"/proc/{orphan}"):
    assert time.monotonic() < deadline, open(f"/proc/{orphan}/stat").read()
    time.sleep(0.05)
print("none is left")
"""
    (tmp_path / "script.py").write_text(script)
    command = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-m", "lightning_dlrover.components.node"]
    done = subprocess.run(
        [*command, "--standalone", "--nproc-per-node=1", str(tmp_path / "script.py")],
        env={**os.environ, names.LEAVE_ON_SIGTERM: "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=90,
    )
    if "unshare failed" in done.stderr or "Operation not permitted" in done.stderr:
        pytest.skip(f"no namespaces here: {done.stderr}")
    assert done.returncode == 0, done.stderr
    assert "none is left" in done.stdout


KILLED = """
import os, signal
os.kill(os.getpid(), signal.{sign})
"""


@pytest.mark.parametrize("sign", ["SIGKILL", "SIGTERM"])
def test_killed_worker_takes_one_line_of_its_node(start: Start, tmp_path: Path, sign: str) -> None:
    assert start(KILLED.format(sign=sign)).wait(timeout=60) == 128 + signal.Signals[sign]
    output = (tmp_path / "output").read_text()
    assert f"was ended by {sign} (exitcode: -" in output.splitlines()[-1]
    assert "Traceback" not in output
    assert "ChildFailedError" not in output
    assert examine(output) == PostMortem("", "")  # like the output of a killed worker, which is worth another start
