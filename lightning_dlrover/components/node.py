"""Start one node's elastic agents, and supervise them where the scheduler sends notices to the workers.

Run as `python -m lightning_dlrover.components.node [--agents=N] ARGS...`; ARGS are those of torchrun. With several agents,
`host_agents.py` takes the place of the agent below.

- On this machine, the agent must not outlive its parent. TorchX's local scheduler gives every app its own session, so a killed
  controller would leave its nodes behind. If the node's memory is limited, it enters its control group first.
- Under Slurm, a notice (`sbatch --signal`) precedes the time limit or a preemption, and becomes a planned leave. The agent's
  exit code is written to a file, for a controller that arrives after Slurm has forgotten the job.
- Under Kubernetes, SIGTERM is the only notice an ending pod receives, so it means a planned leave.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import runpy
import signal
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType

import psutil

from lightning_dlrover import variables
from lightning_dlrover.components import LEAVE_SIGNAL
from lightning_dlrover.files import atomic_write
from lightning_dlrover.host import show_in_proc
from lightning_dlrover.spares import is_forked, keep_template

AGENTS_OPTION = "--agents="
"""Start of the first argument of a node that runs several agents, each with one worker; their number follows."""

PR_SET_PDEATHSIG = 1


def notice_file(exit_file: Path) -> Path:
    """Return the path of the file that marks a received notice. It holds the node's end in seconds since the epoch."""
    return exit_file.with_name("notice")


def main() -> None:
    """Become torchrun, with the same process id. Run it as a child where the scheduler sends notices.

    A node that was forked from a template keeps one for its worker, and becomes torchrun without `exec`.
    """
    agent = [sys.executable, "-m", "lightning_dlrover.rdzv.agents.program"]
    arguments = sys.argv[1:]
    if has_several := bool(arguments) and arguments[0].startswith(AGENTS_OPTION):
        number = arguments.pop(0).removeprefix(AGENTS_OPTION)
        agent = [sys.executable, "-m", "lightning_dlrover.components.host_agents", number]
    # Settings of the target that starts this node. No process of the node may inherit them.
    names = (variables.EXIT_FILE, variables.LEAVE_ON_SIGTERM, variables.NOTICE_S, variables.PARENT_PID, variables.MEMORY_GROUP)
    exit_file, leaves_on_sigterm, notice_s, parent_pid, group = (os.environ.pop(name, "") for name in names)
    if exit_file or leaves_on_sigterm:
        # torchrun's own temporary folder would be left behind by every node.
        with tempfile.TemporaryDirectory(prefix="dlrover-node-", ignore_cleanup_errors=True) as folder:
            command = [*agent, f"--log-dir={folder}", *arguments]
            raise SystemExit(_supervise(command, exit_file, float(notice_s or 0), bool(leaves_on_sigterm), has_several))
    if parent_pid:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != int(parent_pid):
            raise SystemExit("the process that started this node has ended already")
    if group:
        try:
            Path(group, "cgroup.procs").write_text(str(os.getpid()))
        except OSError as error:
            raise SystemExit(f"this node cannot enter control group {group}, which limits its memory: {error}") from error
    if is_forked() and not has_several:
        keep_template()
        show_in_proc([*agent, *arguments], dict(os.environ))
        sys.argv[1:] = arguments
        runpy.run_module(agent[-1], run_name="__main__", alter_sys=True)
        return
    os.execv(sys.executable, [*agent, *arguments])


def _supervise(command: list[str], exit_file: str, notice_s: float, leaves_on_sigterm: bool, has_several: bool) -> int:
    """Run the agent and return its exit code in a shell's form. With `has_several`, it forwards requests to leave."""
    file = Path(exit_file) if exit_file else None
    handled = {signal.SIGUSR1, signal.SIGTERM}
    # Neither signal may arrive before its handler and the agent exist.
    signal.pthread_sigmask(signal.SIG_BLOCK, handled)
    agent = psutil.Popen(command, preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, handled))

    def take_notice(number: int, frame: FrameType | None) -> None:
        # The controller sees the file and starts another node first. Half of the notice period is reserved for that.
        with contextlib.suppress(OSError):
            if file is not None:
                atomic_write(notice_file(file), f"{time.time() + notice_s if notice_s else 0.0:.1f}\n")
        signal.setitimer(signal.ITIMER_REAL, max(0.01, notice_s / 2))

    def leave(number: int, frame: FrameType | None) -> None:
        print("the scheduler wants this node back: its workers hand over and leave", file=sys.stderr, flush=True)
        workers = []
        with contextlib.suppress(psutil.NoSuchProcess):  # it may just have ended
            if has_several:
                agent.send_signal(LEAVE_SIGNAL)
                return
            workers = agent.children()
        # SIGTERM makes a worker hand over, but makes an agent end its worker at once.
        for process in workers or [agent]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.terminate()

    def end(number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            agent.terminate()

    signal.signal(signal.SIGUSR1, take_notice)
    signal.signal(signal.SIGALRM, leave)
    signal.signal(signal.SIGTERM, leave if leaves_on_sigterm else end)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, handled)
    code = _wait_for(agent.pid)
    code = 128 - code if code < 0 else code
    if file is not None:
        with contextlib.suppress(OSError):  # a full disk: the scheduler reports the exit code while it remembers the job
            atomic_write(file, f"{code}\n")
    return code


def _wait_for(process_id: int) -> int:
    """Return the exit code of a child. Reap orphans too: in a container they are children of its first process, this one."""
    while True:
        ended, status = os.waitpid(-1, 0)
        if ended == process_id:
            return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    main()
