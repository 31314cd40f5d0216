"""Real processes: whatever happens to a job, its supervisor or the dispatcher, no process is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_dlrover.colocate.devices import families
from lightning_dlrover.colocate.running import Outcome, SupervisedJob
from tests.support.waiting import eventually

Keep = Callable[..., SupervisedJob]

FAMILY = "setsid sleep 100 & (sleep 100 & sleep 100) & "
"""Processes in a session of their own, and a grandchild."""


@pytest.fixture
def keep(tmp_path: Path) -> Keep:
    def kept(program: str, *, command: tuple[str, ...] = ()) -> SupervisedJob:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        return SupervisedJob(command or ("sh", "-c", program), folder, "/", dict(os.environ))

    return kept


def ended(job: SupervisedJob) -> Outcome:
    return eventually(job.outcome, "the job's end", poll_s=0.01)


def family(job: SupervisedJob, size: int) -> list[int]:
    def found() -> list[int] | None:
        below = families([job.supervisor_pid])[job.supervisor_pid]
        return below if len(below) >= size else None

    return eventually(found, f"{size} processes")


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_exit_code_and_last_words_are_reported(keep: Keep) -> None:
    job = keep("echo first; echo last words >&2; exit 7")
    outcome = ended(job)
    assert (outcome.exit_code, outcome.text) == (7, "exit code 7")
    assert job.last_words() == "first | last words"


def test_signal_that_killed_the_command_is_reported(keep: Keep) -> None:
    outcome = ended(keep("kill -SEGV $$"))
    assert (outcome.exit_code, outcome.text) == (128 + signal.SIGSEGV, "killed by SIGSEGV")


def test_command_that_does_not_exist_has_failed(keep: Keep) -> None:
    job = keep("", command=("no-such-program",))
    assert ended(job).text.startswith("exit code 127")
    assert "no-such-program: No such file" in job.last_words()


def test_command_gets_default_signals_and_no_open_files(keep: Keep) -> None:
    program = (
        "import os, signal; print(signal.getsignal(signal.SIGINT).__name__, sorted(map(int, os.listdir('/proc/self/fd')))[:4])"
    )
    job = keep("", command=(sys.executable, "-c", program))
    assert ended(job).code == 0
    assert job.last_words() == "default_int_handler [0, 1, 2, 3]"


def test_what_a_command_leaves_behind_is_ended(keep: Keep) -> None:
    job = keep(FAMILY + "sleep 0.3")
    below = family(job, 5)
    assert ended(job).exit_code == 0
    assert not any(map(is_alive, below))


def test_end_reaches_all_processes_also_those_that_ignore_sigterm(keep: Keep) -> None:
    job = keep(FAMILY + "trap '' TERM; while true; do sleep 0.1; done")
    below = family(job, 5)
    job.pause()
    job.end(0.3)
    assert ended(job).asked_to_end
    assert not any(map(is_alive, below))


def test_paused_job_uses_no_core_and_goes_on(keep: Keep) -> None:
    job = keep("", command=(sys.executable, "-c", "while True: pass"))
    (pid,) = family(job, 1)

    def state() -> str:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]

    job.pause()
    eventually(lambda: state() == "T", "a stopped process")
    job.resume()
    eventually(lambda: state() != "T", "a process that continues")
    job.end(1.0)
    assert ended(job).signal == signal.SIGTERM


def test_job_ends_with_a_killed_dispatcher(tmp_path: Path) -> None:
    program = f"""
import os, sys, time
from pathlib import Path
from lightning_dlrover.colocate.running import SupervisedJob
job = SupervisedJob(("sh", "-c", {FAMILY + "sleep 100"!r}), Path({str(tmp_path)!r}), "/", dict(os.environ))
print(job.supervisor_pid, flush=True)
time.sleep(100)
"""
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    supervisor = int(parent.stdout.readline())
    eventually(lambda: len(families([supervisor])[supervisor]) >= 5, "5 processes")
    below = families([supervisor])[supervisor]
    parent.kill()
    parent.wait(10)
    eventually(lambda: not any(map(is_alive, [supervisor, *below])), "the end of the job")


def test_command_ends_with_a_killed_supervisor(keep: Keep) -> None:
    job = keep("exec sleep 100")
    (pid,) = family(job, 1)
    os.kill(job.supervisor_pid, signal.SIGKILL)
    assert ended(job).code is None
    eventually(lambda: not is_alive(pid), "the end of the command")
