"""Start one node's elastic agent, and stay beside it where a scheduler has something to say to its worker.

On this machine the agent must not outlive whoever started it: TorchX's local scheduler gives every app a session of its own;
without this a controller that is killed would leave its nodes behind. Under Slurm a notice (`sbatch --signal`: the time limit
or a preemption is near) becomes a planned leave, and how the agent has ended is written down for a controller that comes when
Slurm has forgotten the job. Run as `python -m lightning_dlrover.components.node ARGS...`; ARGS are those of torchrun.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import tempfile
from pathlib import Path
from types import FrameType

import psutil

__all__ = ["EXIT_FILE_VARIABLE", "NOTICE_VARIABLE", "PARENT_VARIABLE", "main", "notice_file"]

PARENT_VARIABLE = "DLROVER_DIE_WITH_PID"
"""Process id of the parent that this node ends with; not set where nodes live on their own."""

EXIT_FILE_VARIABLE = "DLROVER_EXIT_FILE"
"""File that the agent's exit code is written into. With it SIGUSR1 is a notice: the scheduler wants the node back."""

NOTICE_VARIABLE = "DLROVER_NOTICE_S"
"""How long before its end a node is given notice, in seconds."""

PR_SET_PDEATHSIG = 1


def notice_file(exit_file: Path) -> Path:
    """What exists once a node was given notice."""
    return exit_file.with_name("notice")


def main() -> None:
    """Become torchrun, with the same process id; or run it and wait for it where there is an exit file."""
    agent = [sys.executable, "-m", "torch.distributed.run"]
    if exit_file := os.environ.pop(EXIT_FILE_VARIABLE, ""):
        # torchrun would leave one of its own behind with every node.
        with tempfile.TemporaryDirectory(prefix="dlrover-node-", ignore_cleanup_errors=True) as folder:
            raise SystemExit(_stay_beside([*agent, f"--log-dir={folder}", *sys.argv[1:]], Path(exit_file)))
    parent = os.environ.pop(PARENT_VARIABLE, "")
    if parent:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != int(parent):
            raise SystemExit("the process that started this node has ended already")
    os.execv(sys.executable, [*agent, *sys.argv[1:]])


def _stay_beside(command: list[str], exit_file: Path) -> int:
    """The agent's exit code, as a shell gives it."""
    wanted = {signal.SIGUSR1, signal.SIGTERM}
    notice_s = float(os.environ.pop(NOTICE_VARIABLE, "0"))
    # Neither signal may come while there is no handler, or no agent to tell.
    signal.pthread_sigmask(signal.SIG_BLOCK, wanted)
    agent = psutil.Popen(command, preexec_fn=_unblock_signals)

    def take_notice(number: int, frame: FrameType | None) -> None:
        # A controller that sees it starts another node first: half of the time is for that.
        with contextlib.suppress(OSError):
            notice_file(exit_file).touch()
        signal.setitimer(signal.ITIMER_REAL, max(0.01, notice_s / 2))

    def leave(number: int, frame: FrameType | None) -> None:
        print("the scheduler wants this node back: its worker hands over and leaves", file=sys.stderr, flush=True)
        # To the worker a SIGTERM means to hand over, to the agent that it shall end its worker at once.
        workers = []
        with contextlib.suppress(psutil.NoSuchProcess):  # it may just have ended
            workers = agent.children()
        for process in workers or [agent]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.terminate()

    def end(number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            agent.terminate()

    signal.signal(signal.SIGUSR1, take_notice)
    signal.signal(signal.SIGALRM, leave)
    signal.signal(signal.SIGTERM, end)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, wanted)
    code: int = agent.wait()
    code = 128 - code if code < 0 else code
    unfinished = exit_file.with_name(f".{exit_file.name}")
    with contextlib.suppress(OSError):  # a full disk: the scheduler says how we have ended, as long as it remembers
        unfinished.write_text(f"{code}\n")
        unfinished.replace(exit_file)
    return code


def _unblock_signals() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1, signal.SIGTERM})


if __name__ == "__main__":
    main()
