"""Run Python programs, and the Python programs that they start, without the seconds of their imports.

`run_program` in a `WarmProcess` is `python ARGUMENTS` in a process that has imported torch.
Each interpreter that it starts with `subprocess.Popen` is forked from a clean copy of it, its *nursery*.
An `os.execv` of Python continues in the same process.
Everything else is as with fresh interpreters: parents, process ids, sessions, signals, files, arguments and environments, also
those that `/proc` shows, and the end of the interpreter.

A fork differs in one point: modules that its parent had imported are there. If imports or memory matter to a test, its
programs are started as usual, and so is every program with another PYTHONPATH or number of threads.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import ctypes
import json
import logging
import multiprocessing
import os
import random
import runpy
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from multiprocessing import forkserver, process, resource_tracker
from types import ModuleType, TracebackType
from typing import Any, NoReturn

from lightning_dlrover.host import fits_in_proc, receive_exactly, show_in_proc

PADDING = "padding_" * 1024
"""Text for the command line and the environment of the first process: room for those of the processes forked from it."""

SAME = ("PYTHONPATH", "OMP_NUM_THREADS", "PYTHONHOME", "LD_PRELOAD", "LD_LIBRARY_PATH")
"""Variables that an interpreter reads when it starts, or torch when it is imported."""

IMPORTS = ("torch.distributed.run", "lightning_dlrover.components.node", "lightning_dlrover.rdzv.agents.rendezvous")
"""Modules that every node of a job imports."""

CLONE_PARENT, CLONE_CHILD_CLEARTID, CLONE_CHILD_SETTID = 0x8000, 0x200000, 0x1000000
SYSCALL_CLONE = {"x86_64": 56, "aarch64": 220}
PR_SET_PDEATHSIG = 1

_MainProcess = type(process.current_process())  # multiprocessing's class; the process that forks others imports this module


@dataclass(frozen=True)
class _Program:
    """A Python program to start."""

    arguments: list[str]  # arguments of the interpreter, without its own name
    environ: dict[str, str]
    cwd: str
    leads_session: bool = False
    cores: tuple[int, ...] = ()


class _Replaced(BaseException):
    """The program has called `os.execv`."""

    def __init__(self, program: _Program) -> None:
        self.program = program


def run_program() -> NoReturn:
    """Run `python` with the arguments of this process, as the leader of a process group."""
    os.setpgrp()
    _be(_Program(sys.argv[:], dict(os.environ), os.getcwd()))


def _be(program: _Program) -> NoReturn:
    """Continue as this program, and end with it."""
    os.execv = _execv  # type: ignore[assignment]
    while True:
        _show(program)
        _forget_the_parent()
        nursery = _Nursery() if "-m" in program.arguments[:2] else None  # scripts start no other programs
        try:
            with contextlib.ExitStack() as stack:
                if nursery is not None:
                    stack.callback(nursery.close)
                    stack.enter_context(nursery.in_use())
                code = _run(program.arguments)
                threading._shutdown()  # type: ignore[attr-defined]
                atexit._run_exitfuncs()
        except _Replaced as replaced:
            program = replaced.program
            _reset_signals()
            continue
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        if code == -signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        os._exit(code)


def _run(arguments: Sequence[str]) -> int:
    """Run a module or a file as an interpreter does; return its exit code."""
    rest = list(arguments)
    while rest[0] == "-u":
        rest.pop(0)
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(write_through=True)  # type: ignore[union-attr]
    try:
        if rest[0] == "-m":
            sys.argv = rest[1:]
            sys.path[:0] = [os.getcwd(), *_folders()]
            if not hasattr(sys.modules.get(rest[1]), "__path__"):
                sys.modules.pop(rest[1], None)  # runpy warns of modules that are there already
            runpy.run_module(rest[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = rest
            sys.path[:0] = [os.path.dirname(os.path.abspath(rest[0])), *_folders()]
            _run_file(os.path.abspath(rest[0]))
    except _Replaced:
        raise
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return (error.code or 0) & 0xFF
        print(error.code, file=sys.stderr)
        return 1
    except BaseException as error:
        error.__traceback__ = _of_the_program(error.__traceback__)
        # These keep the objects of the frames alive while exit functions run.
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        sys.excepthook(type(error), error, error.__traceback__)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _run_file(path: str) -> None:
    # Not by runpy, which would put this path into sys.argv, too.
    main = sys.modules["__main__"] = ModuleType("__main__")
    main.__file__ = path
    with open(path, "rb") as file:
        exec(compile(file.read(), path, "exec"), main.__dict__)


def _folders() -> list[str]:
    return os.environ["PYTHONPATH"].split(os.pathsep) if os.environ.get("PYTHONPATH") else []


def _of_the_program(found: TracebackType | None) -> TracebackType | None:
    """Leave out the frames of this file and of runpy."""
    while found is not None and found.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
        found = found.tb_next
    return found


def _execv(path: str, arguments: Sequence[str]) -> NoReturn:
    if (program := _python(list(arguments), None, None)) is None:
        raise NotImplementedError(f"{path} {arguments} is no Python program that can go on in this process")
    raise _Replaced(program)


def _python(
    arguments: list[str], environ: Mapping[str, str] | None, cwd: str | None, same: Sequence[str] = SAME
) -> _Program | None:
    """Return the program that a command line runs, if it is one of this Python and environment.

    Args:
        same: variables that must be those of this process.
    """
    variables = dict(os.environ if environ is None else environ)
    found = shutil.which(arguments[0], path=variables.get("PATH")) if arguments else None
    if found is None or os.path.realpath(found) != os.path.realpath(sys.executable):
        return None
    rest = [argument for argument in arguments[1:] if argument != "-u"]
    is_known = len(rest) > 0 and (rest[0] == "-m" or not rest[0].startswith("-"))
    if not is_known or any(variables.get(name) != os.environ.get(name) for name in same):
        return None
    return _Program(arguments[1:], variables, cwd or os.getcwd())


# --- the nursery --------------------------------------------------------------------------------------------------------------


class _Nursery:
    """A copy of this process from before its program, without threads, that forks this process's children."""

    same: Sequence[str] = SAME

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ours, theirs = socket.socketpair()
        self._owner = os.getpid()
        self._pid = self._start(theirs)
        theirs.close()

    def _start(self, theirs: socket.socket) -> int:
        """Start the process that forks; return its process id."""
        pid = os.fork()
        if pid == 0:
            self._ours.close()
            _serve(theirs, self._owner)
        return pid

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Fork the Python programs that this process starts."""
        replaced = subprocess.Popen._execute_child  # type: ignore[attr-defined]
        subprocess.Popen._execute_child = self._execute_child(replaced)  # type: ignore[attr-defined]
        try:
            yield
        finally:
            if os.getpid() == self._owner:
                subprocess.Popen._execute_child = replaced  # type: ignore[attr-defined]

    def close(self) -> None:
        if os.getpid() == self._owner:
            self._ours.close()
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)

    def _execute_child(self, replaced: Any) -> Any:
        """Return a method for `Popen` that lets the nursery fork, or calls the method that it replaces."""

        def execute_child(process: Any, *given: Any) -> None:
            args, executable, preexec_fn, _, pass_fds, cwd, env, _, _, shell = given[:10]
            pipes, rest = given[10:16], given[16:]
            leads_session = bool(rest[5])
            arguments = [args] if isinstance(args, str | bytes | os.PathLike) else list(map(os.fspath, args))
            is_plain = not (shell or pass_fds or preexec_fn or executable) and os.getpid() == self._owner
            words, folder = list(map(os.fsdecode, arguments)), cwd and os.fsdecode(cwd)
            program = _python(words, _text(env), folder, self.same) if is_plain else None
            if program is None:
                replaced(process, *given)
                return
            started = _Program(
                program.arguments, program.environ, program.cwd, leads_session, tuple(sorted(os.sched_getaffinity(0)))
            )
            streams = [given if given != -1 else number for number, given in enumerate((pipes[0], pipes[3], pipes[5]))]
            process.pid = self._fork(started, streams)
            process._child_created = True
            process._close_pipe_fds(*pipes)

        return execute_child

    def _fork(self, program: _Program, streams: Sequence[int]) -> int:
        data = json.dumps(asdict(program)).encode()
        with self._lock:
            fds = array.array("i", streams)
            self._ours.sendmsg([struct.pack("I", len(data))], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
            self._ours.sendall(data)
            (pid,) = struct.unpack("i", receive_exactly(self._ours, 4))
        return int(pid)


class FreshNursery(_Nursery):
    """The nursery of a process with threads, such as a test's: a fresh interpreter that has imported the modules of nodes.

    It has imported torch for one thread. Agents do not compute, and a worker with another number of threads is a fresh one.
    """

    same = tuple(name for name in SAME if name != "OMP_NUM_THREADS")

    def _start(self, theirs: socket.socket) -> int:
        code = (
            f"import {', '.join(IMPORTS)}; from tests.support.warm_tree import serve; serve({theirs.fileno()}, {self._owner})"
        )
        environ = {**os.environ, "PADDING": PADDING, "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen([sys.executable, "-c", code, PADDING], env=environ, pass_fds=[theirs.fileno()])
        return self._process.pid

    def close(self) -> None:
        self._ours.close()
        self._process.kill()
        self._process.wait()


def serve(requests: int, owner: int) -> NoReturn:
    """Fork programs for the process that has started this one with a socket, until that ends."""
    # Collects the garbage of the imports, and keeps the rest out of later collections.
    from tests.support import frozen_heap  # noqa: F401

    _serve(socket.socket(fileno=requests), owner)


def _text(environ: Mapping[Any, Any] | None) -> dict[str, str] | None:
    return None if environ is None else {os.fsdecode(name): os.fsdecode(value) for name, value in environ.items()}


def _serve(requests: socket.socket, owner: int) -> NoReturn:
    """Fork siblings of this process for its parent, until that ends."""
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != owner:
            os._exit(0)
        os.setpgid(0, 0)  # the signals for its parent's group are not for it
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN)
        _close_all_but(0, 1, 2, requests.fileno())
        while True:
            head, fds, _, _ = socket.recv_fds(requests, 4, 3)
            if not head:
                os._exit(0)
            program = json.loads(receive_exactly(requests, *struct.unpack("I", head)))
            program["cores"] = tuple(program["cores"])
            # As with `subprocess.Popen`, the caller continues once the process leads its session.
            reading, writing = os.pipe()
            pid = _clone_sibling()
            if pid == 0:
                _start(_Program(**program), fds)
            for each in (*fds, writing):
                os.close(each)
            os.read(reading, 1)
            os.close(reading)
            requests.sendall(struct.pack("i", pid))
    except BaseException:
        traceback.print_exc()
    os._exit(70)


def _start(program: _Program, streams: Sequence[int]) -> NoReturn:
    """Become this program. The end of the pipe signals to the nursery that the process has its session and its cores."""
    if program.leads_session:
        os.setsid()
    else:
        os.setpgid(0, os.getpgid(os.getppid()))
    _reset_signals()
    os.sched_setaffinity(0, program.cores)
    for number, given in enumerate(streams):
        os.dup2(given, number)
    _close_all_but(0, 1, 2)
    _be(program)


def _reset_signals() -> None:
    """Restore the signal handlers of a fresh interpreter."""
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, 32, 33}:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(ignored, signal.SIG_IGN)
    signal.set_wakeup_fd(-1)


def _forget_the_parent() -> None:
    """Make logging, multiprocessing, random numbers and exit functions those of a fresh interpreter."""
    logging.root.handlers.clear()
    atexit._clear()
    random.seed()
    process._current_process = _MainProcess()  # type: ignore[attr-defined]
    process._parent_process = None  # type: ignore[attr-defined]
    process._children = set()  # type: ignore[attr-defined]
    multiprocessing.set_start_method(None, force=True)
    resource_tracker._resource_tracker._fd = None  # type: ignore[attr-defined]
    resource_tracker._resource_tracker._pid = None  # type: ignore[attr-defined]
    forkserver._forkserver = forkserver.ForkServer()


def _close_all_but(*kept: int) -> None:
    for number in map(int, os.listdir("/proc/self/fd")):
        if number not in kept:
            with contextlib.suppress(OSError):  # the folder's own
                os.close(number)


def _clone_sibling() -> int:
    """Fork a child of this process's parent; return its process id, or 0 in it."""
    python, system = ctypes.pythonapi, ctypes.PyDLL(None, use_errno=True)
    system.syscall.restype = ctypes.c_long
    flags = CLONE_PARENT | CLONE_CHILD_CLEARTID | CLONE_CHILD_SETTID | signal.SIGCHLD
    arguments = [SYSCALL_CLONE[os.uname().machine], flags, 0, 0, 0, 0]
    # The C library keeps the thread's id in its description of the thread. x86_64 takes the child's address before TLS.
    arguments[4 if os.uname().machine == "x86_64" else 5] = _address_of_thread_id(system)
    python.PyOS_BeforeFork()
    pid = int(system.syscall(*map(ctypes.c_long, arguments)))
    if pid == 0:
        python.PyOS_AfterFork_Child()
        return 0
    python.PyOS_AfterFork_Parent()
    if pid < 0:
        raise OSError(ctypes.get_errno(), "no process could be forked")
    return pid


def _address_of_thread_id(system: ctypes.PyDLL) -> int:
    system.pthread_self.restype = ctypes.c_ulong
    thread = int(system.pthread_self())
    own = os.getpid()  # this process has one thread
    # The id is at a multiple of 8. Between two of them is the upper half of a pointer, such as 0x55ce, which may equal an id.
    for address in range(thread, thread + 2048, 8):
        if ctypes.c_int.from_address(address).value == own:
            return address
    raise NotImplementedError("the C library's description of a thread holds no thread id")


# --- appearance in /proc ------------------------------------------------------------------------------------------------------


def _show(program: _Program) -> None:
    """Take over the program's folder and environment, and let /proc show them and its arguments."""
    os.chdir(program.cwd)
    arguments = [sys.executable, *program.arguments]
    if not fits_in_proc(arguments, program.environ):
        raise ValueError(f"the arguments and variables of {arguments[:3]} do not fit into those of the first process")
    show_in_proc(arguments, program.environ)
