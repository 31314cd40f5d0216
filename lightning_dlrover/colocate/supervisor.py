"""Keep one job's processes together: a small program, without imports from the package, that starts the job's command.

The dispatcher starts it with a pipe as standard input. Each line of the pipe is an order: `pause`, `resume`, or `end SECONDS`.
The end of the pipe means that the dispatcher is gone, and then the job ends, too. Orphans of the job become children of this
process (PR_SET_CHILD_SUBREAPER). So it finds every process of the job, stops and continues all of them, and leaves none behind.

Usage: python -I -S supervisor.py RESULT OUTPUT COMMAND...
RESULT is written once, whole, after the last process of the job has ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import sys
import time
from typing import NoReturn

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
GRACE_WITHOUT_DISPATCHER_S = 5.0
"""Seconds between SIGTERM and SIGKILL once the dispatcher is gone."""
GRACE_AFTER_COMMAND_S = 1.0
"""Seconds that processes may outlive the command that started them."""
IGNORED = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM)
"""Signals of a terminal are the dispatcher's business. It closes the pipe, or asks for an end."""
LOOK_S = 0.02
"""Seconds between two looks at processes that were asked to end."""
REST_S = 1.0
"""Seconds between two looks otherwise: ends of children and orders wake the supervisor."""
EXIT_NOT_STARTED = 127


def family() -> list[int]:
    """Return the ids of all processes below this one."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as stream:
                    fields = stream.read().rpartition(b")")[2].split()
            except OSError:
                continue
            if fields[0] != b"Z":
                children.setdefault(int(fields[1]), []).append(int(name))
    found: list[int] = []
    to_visit = [os.getpid()]
    while to_visit:
        below = children.get(to_visit.pop(), [])
        found += below
        to_visit += below
    return found


def send(number: int) -> None:
    """Send a signal to the whole family, until a pass finds no process without it."""
    reached: set[int] = set()
    while new := set(family()) - reached:
        for pid in new:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)
        reached |= new


class Job:
    """The command and its state: running, ending (SIGTERM was sent), or ended."""

    def __init__(self, command: list[str], output: str) -> None:
        self.code: int | None = None
        self.kill_at: float | None = None
        self.asked = False
        supervisor = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            self._become(command, output, supervisor)

    @staticmethod
    def _become(command: list[str], output: str, supervisor: int) -> NoReturn:
        try:
            os.setsid()
            for number in (*IGNORED, signal.SIGPIPE):
                signal.signal(number, signal.SIG_DFL)
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != supervisor:  # it was killed before the line above
                os._exit(EXIT_NOT_STARTED)
            nothing = os.open(os.devnull, os.O_RDONLY)
            log = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(nothing, 0)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.closerange(3, 256)
            os.execvp(command[0], command)
        except OSError as error:
            os.write(2, f"{command[0]}: {error.strerror}\n".encode())
        os._exit(EXIT_NOT_STARTED)

    def end(self, grace_s: float) -> None:
        """Ask all processes to end. Those that remain after the grace period are killed."""
        self.asked = self.asked or self.code is None
        deadline = time.monotonic() + grace_s
        if self.kill_at is None:
            send(signal.SIGTERM)
            send(signal.SIGCONT)
        self.kill_at = deadline if self.kill_at is None else min(self.kill_at, deadline)

    def reap(self) -> bool:
        """Reap ended processes. Return whether all have ended."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return True
            if pid == 0:
                break
            if pid == self.pid:
                self.code = os.waitstatus_to_exitcode(status)
        if self.code is not None and self.kill_at is None:
            self.kill_at = time.monotonic() + GRACE_AFTER_COMMAND_S
        if self.kill_at is not None and time.monotonic() >= self.kill_at:
            send(signal.SIGKILL)
        return False


def obey(job: Job, orders: bytes) -> bytes:
    """Carry out the orders that are complete, and return the rest."""
    while b"\n" in orders:
        order, _, orders = orders.partition(b"\n")
        if order == b"pause":
            send(signal.SIGSTOP)
        elif order == b"resume":
            send(signal.SIGCONT)
        elif order.startswith(b"end "):
            job.end(float(order[4:]))
    return orders


def main(result: str, output: str, command: list[str]) -> None:
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    ends, woken = os.pipe()
    for descriptor in (ends, woken):
        os.set_blocking(descriptor, False)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # without a handler of Python's, nothing is written to the pipe
    began = time.time()
    job = Job(command, output)
    orders, is_open = b"", True
    while not job.reap():
        ready = select.select([ends, 0] if is_open else [ends], [], [], LOOK_S if job.kill_at is not None else REST_S)[0]
        if ends in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(ends, 4096)
        if 0 in ready:
            read = os.read(0, 4096)
            if not read:
                is_open = False
                job.end(GRACE_WITHOUT_DISPATCHER_S)
            orders = obey(job, orders + read)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    report = {
        "code": None if job.code is None else max(0, job.code),
        "signal": 0 if job.code is None else max(0, -job.code),
        "asked_to_end": job.asked,
        "began_s": began,
        "ended_s": time.time(),
        "cpu_s": used.ru_utime + used.ru_stime,
        "largest_process_bytes": 1024 * used.ru_maxrss,
    }
    unfinished = f"{result}.{os.getpid()}"
    try:
        with open(unfinished, "w") as stream:
            json.dump(report, stream)
        os.replace(unfinished, result)
    except OSError:  # the exit code is the second way
        code = job.code if job.code is not None else EXIT_NOT_STARTED
        sys.exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
