"""Start Python programs by forking a process that has imported their modules: a job's warm spare.

A new worker spends most of its start on imports. A *template* is a process that has imported what the job's first worker had
imported after its first step, and nothing else: it never runs the script. Each program forked from it shares its memory.

    recorded -> importing -> ready -> forks programs, one at a time
                   |           |
                   +-----------+--> refused, stale or dead: programs start as usual

`Spares` decides for one process that starts programs (an elastic agent, or the controller of nodes on this machine) when its
template is started and used. `Template` is that process's end of the connection, `serve` the template's. Only the process that
started a template gives it requests, and the template ends with it.

Below are, in this order: records of a worker's imports, the template's imports, its forks, the life of a forked program, and
the side that starts them. This file imports no torch: a template must not have imported more than its programs need.
"""

from __future__ import annotations

import array
import ast
import contextlib
import ctypes
import dataclasses
import gc
import importlib
import importlib.machinery
import importlib.util
import json
import os
import random
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import sysconfig
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, Literal, NoReturn

from lightning_dlrover import variables
from lightning_dlrover.files import FileStamps, atomic_write
from lightning_dlrover.host import (
    ForkedProcess,
    as_subreaper,
    fits_in_proc,
    own_children,
    parent_of,
    pss_bytes,
    receive_exactly,
    show_in_proc,
    why_no_orphans,
)

# Records of the first worker that has trained. They are in a folder of the process that starts the workers.

RECIPE_FILE = "modules.json"
STEPPED_FILE = "stepped-"
MEMORY_FILE = "memory-"
"""Beginning of a file's name, before the process id of a template's owner. It holds the template's memory in bytes."""
OFF_FILE = "off"
"""File with the reason why no program of this folder is forked any more."""


@dataclass(frozen=True)
class Recipe:
    """Modules to import in advance."""

    modules: list[tuple[str, str]]  # name and file, in the order of import
    path: list[str]  # `sys.path` of the worker

    @classmethod
    def read(cls, file: Path) -> Recipe:
        """Read the recipe.

        Raises:
            OSError: the file cannot be read.
            ValueError: it holds something else.
        """
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
            return cls([(str(name), str(origin)) for name, origin in found["modules"]], list(found["path"]))
        except (KeyError, TypeError) as error:
            raise ValueError(f"{file} is not a list of modules") from error


def note_first_step(environ: Mapping[str, str] = os.environ) -> None:
    """Record this worker's modules, and that it has made a step, if the process that started it keeps spares."""
    folder = environ.get(variables.SPARES, "")
    if not folder:
        return
    with contextlib.suppress(OSError):  # a full disk costs the next worker some seconds
        Path(folder, f"{STEPPED_FILE}{os.getpid()}").touch()
        if not (file := Path(folder, RECIPE_FILE)).exists():
            atomic_write(file, json.dumps({"modules": _imported_modules(), "path": sys.path}))


def _imported_modules() -> list[tuple[str, str]]:
    """Return the modules of this process that another one can import from the same files, in the order to import them."""
    found = {}
    for name, module in list(sys.modules.items()):
        spec = getattr(module, "__spec__", None)
        # A module under another name, or without a file, is made by a third one.
        if spec is not None and spec.name == name and spec.has_location and spec.origin and name != "__mp_main__":
            found[name] = spec.origin
    # What is in a circle of imports depends on the module that is imported first. All others follow as their imports ended.
    first = [name for name in _imported_by(getattr(sys.modules["__main__"], "__file__", None) or "") if name in found]
    return [(name, found[name]) for name in dict.fromkeys([*first, *found])]


def _imported_by(script: str) -> list[str]:
    """Return the modules that a script imports itself, in its order. The script is read, not run."""
    names: list[str] = []
    with contextlib.suppress(OSError, SyntaxError, ValueError):
        for node in ast.walk(ast.parse(Path(script).read_bytes())):
            if isinstance(node, ast.Import):
                names += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return names


# The template's imports.
#
# A module is left out if its import starts a thread or a process, opens a GPU, or reads a variable that differs between
# workers. So are the modules whose own import was under way at that moment. The template then starts again without them, as
# it cannot undo an import.

MAX_ATTEMPTS = 6

DIFFERING = {
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"),
    *("TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE"),
    *("TORCH_NCCL_ASYNC_ERROR_HANDLING", "PET_LOG_DIR", "TORCHX_JOB_ID"),
}
"""Variables that differ between the template and its programs, or between these."""

AGENT_MODULES = (
    "torch.distributed.run",
    "lightning_dlrover.rdzv.membership.coordinator",
    "lightning_dlrover.rdzv.transport.transfer",
)
"""What a node imports in addition to its worker, and takes long."""

OURS = variables.SPARES.removesuffix("SPARES")
"""Beginning of this package's variables, which differ as well."""

READ_BY_LIBRARIES = (
    *("PYTHON", "LD_", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "GOTO_", "BLIS_", "MALLOC_", "GLIBC_", "TCMALLOC_"),
    *("ATEN_", "LC_", "LANG", "TZ"),
)
"""Beginnings of variables that an interpreter or a library reads when it starts."""

_OF_LIGHTNING = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK")

RANK_MODULES: Mapping[str, Sequence[str]] = {
    "lightning.fabric.utilities.rank_zero": _OF_LIGHTNING,
    "lightning_fabric.utilities.rank_zero": _OF_LIGHTNING,
    "torchmetrics.utilities.prints": ("LOCAL_RANK",),
}
"""Modules whose import sets `rank_zero_only.rank` from the first of these variables. Each forked program sets it again."""

_GPU_FILES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/")


class _Unsafe(BaseException):
    """The template cannot be forked: a module has started a thread or a process, or opened a GPU. No module may handle it."""


class _Imports:
    """Watch the imports of this process."""

    def __init__(self, excluded: Mapping[str, str]) -> None:
        self.excluded = dict(excluded)
        self.new: dict[str, str] = {}  # modules to exclude from the next attempt, with reasons
        self.read: set[str] = set()  # environment variables that were read
        self.visited: list[str] = []  # variables that an iteration has reached, the next one last
        self._stack: list[str] = []
        self._has_gpu = any(os.path.exists(file) for file in ("/dev/nvidiactl", "/dev/kfd"))

    def run(self, modules: Sequence[tuple[str, str]]) -> None:
        """Import modules by name, if they are in that file, or in any for an empty one.

        Raises:
            _Unsafe: the process cannot be forked any more.
        """
        with self._watching():
            errors: dict[str, BaseException] = {}
            for name, origin in modules:
                if name in sys.modules or name in self.excluded or name in self.new:
                    continue
                try:
                    spec = importlib.util.find_spec(name)
                    if spec is not None and origin in (spec.origin, ""):
                        importlib.import_module(name)
                except _Unsafe:
                    raise
                except BaseException as error:  # a module may raise anything, SystemExit too
                    errors[name] = error
            for name, failure in errors.items():
                if name not in sys.modules:  # part of a circle can be imported by another module only
                    self._blame(f"its import fails in advance ({type(failure).__name__}: {failure})", name)

    def check(self) -> None:
        """Check that this process can be forked.

        Raises:
            _Unsafe: it cannot.
        """
        if problem := self._problem():
            self._blame(problem)
            raise _Unsafe(problem)

    def _problem(self) -> str:
        if len(os.listdir("/proc/self/task")) > 1:
            return "its import starts a thread"
        if own_children():
            return "its import starts a process"
        if self._has_gpu:
            for number in os.listdir("/proc/self/fd"):
                with contextlib.suppress(OSError):
                    if os.readlink(f"/proc/self/fd/{number}").startswith(_GPU_FILES):
                        return "its import opens a GPU"
        return ""

    def _blame(self, why: str, name: str = "") -> None:
        for each in [*self._stack, *([name] if name else [])]:
            self.new.setdefault(each, why)

    def note_read(self, name: str) -> None:
        """Note that a module has read an environment variable. A search of all by their names does not count, or a copy."""
        if self.visited[-1:] == [name]:
            self.visited.pop()
        else:
            self.read.add(name)
        if name in DIFFERING and self._stack and self._stack[-1] not in RANK_MODULES:
            self._blame(f"its import reads {name}")

    @contextlib.contextmanager
    def _watching(self) -> Iterator[None]:
        loaders = importlib.machinery.SourceFileLoader, importlib.machinery.ExtensionFileLoader
        replaced = [(loaders[0], "exec_module"), (loaders[1], "create_module"), (loaders[1], "exec_module")]
        former = [getattr(loader, name) for loader, name in replaced]
        for (loader, name), original in zip(replaced, former, strict=True):
            setattr(loader, name, self._watched(original))
        environ_class = type(os.environ)
        os.environ.__class__ = _watched_environ(environ_class, self)
        try:
            yield
        finally:
            os.environ.__class__ = environ_class
            for (loader, name), original in zip(replaced, former, strict=True):
                if loader.__dict__.get(name) is not None:
                    setattr(loader, name, original)

    def _watched(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(loader: Any, given: Any) -> Any:
            name = given.__name__ if isinstance(given, ModuleType) else given.name
            self._stack.append(name)
            try:
                if name in self.excluded:
                    self._blame(f"it imports {name}: {self.excluded[name]}")
                result = original(loader, given)
                self.check()
                return result
            finally:
                self._stack.pop()

        return call


def _watched_environ(base: type, imports: _Imports) -> type:
    class Environ(base):  # type: ignore[misc]
        def __iter__(self) -> Iterator[str]:
            names = list(super().__iter__())
            for name in names:
                imports.visited = [name]
                yield name
            imports.visited = names[::-1]  # `dict(os.environ)` reads them in this order

        def __getitem__(self, name: str) -> str:
            imports.note_read(name)
            return str(super().__getitem__(name))

        def __contains__(self, name: object) -> bool:
            imports.note_read(str(name))
            return bool(super().__contains__(name))

    return Environ


def _own_sources() -> list[str]:
    """Return the files of the imported modules that may change while a job runs: all but those of installed packages."""
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    installed = tuple(os.path.join(os.path.realpath(path), "") for name in names if (path := sysconfig.get_path(name)))
    files = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    return [file for file in files if isinstance(file, str) and not os.path.realpath(file).startswith(installed)]


# The template's process: `python -c "...serve()" FD OWNER RECIPE EXCLUDED ATTEMPT IS_NODE PADDING`.


@dataclass(frozen=True)
class Program:
    """A Python program to start."""

    arguments: list[str]  # arguments of the interpreter, without its own name
    environ: dict[str, str]
    cwd: str
    cores: list[int]
    umask: int


PADDING_BYTES = 96 * 1024
"""Room for the arguments and the variables of programs, which `/proc` shows."""

PR_SET_PDEATHSIG = 1

TITLE = "lightning-dlrover: modules imported in advance"
"""Argument of a template's command line."""

_CODE = "from lightning_dlrover.spares import serve; serve()"

_own: Template | None = None
"""Template that this process has forked from itself, see `keep_template`."""

_is_forked = False


def serve() -> None:
    """Import the modules of a recipe, then fork programs until the owner ends. Returns in each of them, and runs it."""
    connection, owner = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    file, excluded, is_node = Path(sys.argv[3]), json.loads(sys.argv[4]), sys.argv[6] == "1"
    os.environ.pop(variables.SPARES_PADDING, None)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != owner:
        os._exit(0)
    show_in_proc([sys.executable, "-c", TITLE], dict(os.environ))
    with contextlib.suppress(OSError):  # imports must not slow the job down; each program starts a session with another group
        Path("/proc/self/autogroup").write_text("10")
    imports = _Imports(excluded)
    recipe = Recipe.read(file)
    has_torch = any(name == "torch" for name, _ in recipe.modules)
    agent = AGENT_MODULES if is_node and has_torch else ()  # most of what an agent imports is torch
    given = dict(os.environ)
    initial_path = sys.path[1:]
    quiet = os.open(os.devnull, os.O_RDWR)
    kept = [os.dup(1), os.dup(2)]
    of_blas = {name: text for name, text in given.items() if name == "OPENBLAS_NUM_THREADS"}
    try:
        for number in (1, 2):  # what modules print has been printed by the workers that imported them
            os.dup2(quiet, number)
        os.environ["OPENBLAS_NUM_THREADS"] = "1"  # its pool would be started by the import of NumPy
        sys.path[:] = recipe.path
        with contextlib.suppress(_Unsafe):
            imports.run([*((name, "") for name in agent), *recipe.modules])  # torch loads the agent's module itself
            imports.check()
    except BaseException as error:
        _tell(connection, {"state": "refused", "reason": f"it has failed: {type(error).__name__}: {error}"})
        os._exit(70)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, copy in zip((1, 2), kept, strict=True):
            os.dup2(copy, number)
            os.close(copy)
        os.close(quiet)
    del os.environ["OPENBLAS_NUM_THREADS"]
    os.environ.update(of_blas)
    if imports.new:
        _start_again(connection, imports, len(recipe.modules))
    sys.path[:] = ["", *initial_path]
    gc.collect()
    gc.freeze()  # programs would copy the pages of all objects that their collections visit
    server = _Server(connection, owner, given, imports.read, initial_path)
    _tell(connection, {"state": "ready", "modules": len(sys.modules), "excluded": imports.excluded})
    _become(server.serve())


def _start_again(connection: socket.socket, imports: _Imports, num_modules: int) -> NoReturn:
    """Replace this process by a template without the modules that are not safe."""
    attempt = int(sys.argv[5]) + 1
    for pid in own_children():
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    excluded = {**imports.excluded, **imports.new}
    if attempt >= MAX_ATTEMPTS or len(excluded) > num_modules // 2:
        name, why = next(iter(imports.new.items()))
        reason = f"{len(excluded)} modules cannot be imported in advance, such as {name}: {why}"
        _tell(connection, {"state": "refused", "reason": reason})
        os._exit(0)
    arguments = [*sys.argv[1:4], json.dumps(excluded), str(attempt), sys.argv[6], "x" * PADDING_BYTES]
    environ = {**os.environ, variables.SPARES_PADDING: "x" * PADDING_BYTES}
    os.set_inheritable(connection.fileno(), True)
    flags = ["-u"] if "-u" in sys.orig_argv else []
    os.execve(sys.executable, [sys.executable, *flags, "-c", _CODE, *arguments], environ)


def _tell(connection: socket.socket, message: Mapping[str, Any]) -> None:
    data = json.dumps(message).encode()
    connection.sendall(struct.pack("I", len(data)) + data)


class _Server:
    """Forks programs for its owner."""

    def __init__(
        self, connection: socket.socket, owner: int, environ: Mapping[str, str], read: set[str], path: Sequence[str]
    ) -> None:
        self._connection = connection
        self._owner = owner
        self._environ = environ  # before the imports
        self._set_by_imports = {name: value for name, value in os.environ.items() if environ.get(name) != value}
        self._read = read
        self._sources = FileStamps(_own_sources())
        self._path = path
        self._cores = sorted(os.sched_getaffinity(0))

    def serve(self) -> Program:
        """Return in each forked program."""
        while True:
            head, fds, _, _ = socket.recv_fds(self._connection, 4, 4)
            if not head:
                os._exit(0)
            program = Program(**json.loads(receive_exactly(self._connection, *struct.unpack("I", head))))
            try:
                if refusal := self._refusal(program):
                    _tell(self._connection, refusal)
                elif self._fork(program, fds):
                    return program
            except OSError as error:
                _tell(self._connection, {"state": "failed", "reason": f"it cannot be forked: {error}"})
            finally:
                for each in fds:
                    with contextlib.suppress(OSError):
                        os.close(each)

    def of_descendant(self, connection: socket.socket, owner: int) -> None:
        """Serve another owner: a program forked from here."""
        self._connection.close()
        self._connection, self._owner = connection, owner

    def _refusal(self, program: Program) -> dict[str, Any]:
        """Return why a program cannot be forked; empty if it can."""
        if len(os.listdir("/proc/self/task")) > 1:
            return {"state": "refused", "reason": "it has started a thread"}
        if file := self._sources.changed():
            return {"state": "stale", "reason": f"{file} has changed"}
        for name in sorted({*program.environ, *self._environ}):
            value, before = program.environ.get(name), self._environ.get(name)
            is_read = name in self._read and name not in DIFFERING
            if value != before and (is_read or name.startswith(READ_BY_LIBRARIES)):
                return {"state": "differs", "reason": f"{name} is {value!r}, and it was {before!r} for its imports"}
        if program.cores != self._cores and "OMP_NUM_THREADS" not in program.environ:
            return {"state": "differs", "reason": "it has other cores, and OMP_NUM_THREADS is not set"}
        if not fits_in_proc([sys.executable, *program.arguments], program.environ):
            return {"state": "differs", "reason": f"its arguments and variables have more than {PADDING_BYTES} bytes"}
        return {}

    def _fork(self, program: Program, fds: Sequence[int]) -> bool:
        """Fork a program whose parent is the owner. Return True in the program.

        A process in between ends at once, so the owner, a subreaper at this moment, becomes the program's parent.
        """
        reading, writing = os.pipe()
        between = os.fork()
        if between == 0:
            if os.fork() != 0:
                os._exit(0)
            os.close(reading)
            os.setsid()
            os.write(writing, struct.pack("i", os.getpid()))
            os.close(writing)
            if os.read(fds[3], 1) != b"y" or os.getppid() != self._owner:  # the owner takes it on as a child, or does not
                os._exit(0)
            self._connection.close()
            program.environ.update(self._set_by_imports)
            _prepare(program, fds[:3], self._path)
            global _server
            _server = self
            return True
        os.close(writing)
        os.waitpid(between, 0)
        pid = os.read(reading, 4)
        os.close(reading)
        _tell(self._connection, {"state": "forked", "pid": struct.unpack("i", pid)[0]} if pid else {"state": "failed"})
        return False


_server: _Server | None = None
"""Part of the template that this program was forked from."""


# A forked program: as if an interpreter had started it.


def _prepare(program: Program, streams: Sequence[int], path: Sequence[str]) -> None:
    """Take over the surroundings of a program."""
    os.sched_setaffinity(0, program.cores)
    os.umask(program.umask)
    os.chdir(program.cwd)
    for number, given in enumerate(streams):
        os.dup2(given, number)
    show_in_proc([sys.executable, *program.arguments], program.environ)
    sys.path[:] = ["", *path]
    random.seed()
    if (numbers := sys.modules.get("numpy.random")) is not None:
        numbers.seed()
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.seed()
    if (processes := sys.modules.get("multiprocessing.process")) is not None:
        processes.current_process().authkey = os.urandom(32)
    for name, of_rank in RANK_MODULES.items():
        if (module := sys.modules.get(name)) is not None:
            ranks = (int(program.environ[variable]) for variable in of_rank if variable in program.environ)
            module.rank_zero_only.rank = next(ranks, 0)
    _set_blas_threads(program.environ)


def _set_blas_threads(environ: Mapping[str, str]) -> None:
    """Give OpenBLAS, which was loaded for one thread, as many as it gives itself."""
    if "numpy" not in sys.modules:
        return
    names = ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS")
    given = [int(text) for name in names if (text := environ.get(name, "")).isdecimal() and int(text)]
    number = min([*given[:1], len(os.sched_getaffinity(0))])
    if number > 1:
        threadpoolctl = importlib.import_module("threadpoolctl")
        threadpoolctl.ThreadpoolController().select(internal_api="openblas").limit(limits=number)


def _become(program: Program) -> None:
    """Run a program as `__main__`. Its end is that of the interpreter."""
    global _is_forked
    _is_forked = True
    while True:
        try:
            error = _run(program)
            break
        except _Forked as forked:
            program = forked.program
    if error is not None:
        error.__traceback__ = _of_program(error.__traceback__)
        sys.excepthook(type(error), error, error.__traceback__)
        raise SystemExit(1)


def _run(program: Program) -> BaseException | None:
    """Run a program; return the error that has ended it."""
    rest = list(program.arguments)
    while rest[0] == "-u":
        rest.pop(0)
    sys.orig_argv[:] = [sys.executable, *program.arguments]
    try:
        if rest[0] == "-m":
            sys.path[0] = os.getcwd()
            sys.argv[:] = rest[1:]
            main = sys.modules["__main__"] = ModuleType("__main__")
            main.__dict__.update(__builtins__=__builtins__, __file__=None)
            runpy._run_module_as_main(rest[1])  # type: ignore[attr-defined]
        else:
            sys.path[0] = os.path.dirname(os.path.realpath(rest[0]))
            sys.argv[:] = rest
            _run_file(rest[0])
    except (SystemExit, KeyboardInterrupt, _Forked):
        raise
    except BaseException as error:
        return error
    return None


def _run_file(name: str) -> None:
    path = os.path.abspath(name)
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    main = sys.modules["__main__"] = ModuleType("__main__")
    main.__dict__.update(__builtins__=__builtins__, __file__=path, __loader__=loader, __annotations__={}, __cached__=None)
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    exec(code, main.__dict__)


def _of_program(found: TracebackType | None) -> TracebackType | None:
    """Leave out the frames of this file and of runpy."""
    while found is not None and found.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
        found = found.tb_next
    return found


def is_forked() -> bool:
    """Whether this program was forked from a template. It then continues in the same process instead of `exec`."""
    return _is_forked


def keep_template() -> None:
    """Fork a template of this program's own from it, which forks the programs that it starts.

    Call this in a forked program before it starts a thread. The two share their memory.
    """
    global _own, _server
    server, _server = _server, None
    if server is None:
        return
    ours, theirs = socket.socketpair()
    owner = os.getpid()
    pid = os.fork()
    if pid == 0:
        ours.close()
        os.setsid()  # the signals for its parent's group are not for it
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != owner:
            os._exit(0)
        server.of_descendant(theirs, owner)
        show_in_proc([sys.executable, "-c", TITLE], dict(os.environ))
        raise _Forked(server.serve())
    theirs.close()
    _own = Template(ours, ForkedProcess(pid, [sys.executable]), "ready")


class _Forked(BaseException):
    """This process is a program that was forked by a template within another program."""

    def __init__(self, program: Program) -> None:
        self.program = program


# The side that starts programs.

FORK_S = 10.0
"""Seconds that a template has for one fork. A busy machine may need one."""

MAX_DEATHS = 3
"""Templates that may die before programs start as usual for good."""

MAX_DIFFERENCES = 3
"""Programs in a row that do not fit the template before it is given up."""

IMPORT_S = 600.0
"""Seconds that the imports of a template may take. They have a low priority."""

MEMORY_S = 60.0
"""Seconds between two measurements of a template's memory."""

_CRASHES = {-number for number in (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)}

Process = subprocess.Popen[bytes] | ForkedProcess

State = Literal["importing", "ready", "refused", "stale", "dead"]


class SparesError(RuntimeError):
    """This platform cannot fork programs as this module does."""


class NotForkedError(Exception):
    """A template has not forked a program, for the reason in the message."""


def check_platform() -> None:
    """Check that programs can be forked here.

    Raises:
        SparesError: they cannot.
    """
    if problem := why_no_orphans():
        raise SparesError(f"no spare process can be kept here: {problem}; leave out --spares, or set it to 0")


class Template:
    """A template process, as its owner uses it. Its owner's thread must not end before it."""

    def __init__(self, connection: socket.socket, process: Process, state: State) -> None:
        self.state: State = state
        self.reason = ""  # why it cannot be used
        self.num_modules = 0
        self.excluded: dict[str, str] = {}
        self._connection = connection
        self._process = process
        self._started_at = time.monotonic()

    @classmethod
    def start(cls, recipe: Path, environ: Mapping[str, str], is_unbuffered: bool, is_node: bool) -> Template:
        """Start a process that imports a recipe's modules.

        Args:
            environ: variables of its programs; those that differ between them are left out.
            is_node: its programs run an elastic agent, too.

        Raises:
            OSError: the process cannot be started.
        """
        ours, theirs = socket.socketpair()
        common = {name: text for name, text in environ.items() if name not in DIFFERING and not name.startswith(OURS)}
        common[variables.SPARES_PADDING] = "x" * PADDING_BYTES
        flags = ["-u"] if is_unbuffered else []
        arguments = [str(theirs.fileno()), str(os.getpid()), str(recipe), "{}", "0", str(int(is_node)), "x" * PADDING_BYTES]
        try:
            process = subprocess.Popen(
                [sys.executable, *flags, "-c", _CODE, *arguments],
                env=common,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        return cls(ours, process, "importing")

    @property
    def pid(self) -> int:
        return self._process.pid

    def look(self) -> None:
        """Note the template's messages and its end."""
        while self.state in ("importing", "ready") and select.select([self._connection], [], [], 0)[0]:
            try:
                self._connection.settimeout(FORK_S)
                self._note(self._message())
            except (OSError, EOFError, ValueError):
                code = self._process.poll()
                self.state, self.reason = "dead", "it has ended" + (f" with {code}" if code is not None else "")
        if self.state == "importing" and time.monotonic() - self._started_at > IMPORT_S:
            self.state, self.reason = "refused", f"its imports have taken {IMPORT_S:.0f} s"

    def fork(self, program: Program, streams: Sequence[int]) -> int:
        """Fork a program as a child of this process; return its process id.

        Args:
            streams: file descriptors of its standard input, output and error.

        Raises:
            NotForkedError: it was not forked; no part of it runs.
        """
        reading, writing = os.pipe()
        pid = 0
        is_permitted = False
        try:
            with as_subreaper():
                self._connection.settimeout(FORK_S)
                data = json.dumps(dataclasses.asdict(program)).encode()
                fds = array.array("i", [*streams, reading])
                self._connection.sendmsg([struct.pack("I", len(data))], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
                self._connection.sendall(data)
                answer = self._message()
                self._note(answer)
                pid = int(answer.get("pid", 0))
                if answer["state"] != "forked":
                    raise NotForkedError(answer.get("reason", "it has ended at once"))
                if parent_of(pid) != os.getpid():
                    raise NotForkedError("its process is not a child of this one: the kernel lacks child subreapers")
                os.write(writing, b"y")
                is_permitted = True
            return pid
        except (OSError, EOFError, ValueError) as error:
            self.state, self.reason = "dead", f"it does not answer: {error}"
            raise NotForkedError(self.reason) from error
        finally:
            os.close(reading)
            os.close(writing)
            if pid and not is_permitted:  # it ends at once
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, 0)

    def _message(self) -> dict[str, Any]:
        found = json.loads(receive_exactly(self._connection, *struct.unpack("I", receive_exactly(self._connection, 4))))
        if not isinstance(found, dict):
            raise ValueError("the template's message is malformed")
        return found

    def _note(self, message: Mapping[str, Any]) -> None:
        if message["state"] == "ready":
            self.num_modules, self.excluded = int(message["modules"]), dict(message["excluded"])
        if message["state"] in ("ready", "refused", "stale"):
            self.state, self.reason = message["state"], str(message.get("reason", ""))

    def close(self) -> None:
        """End the process."""
        self._connection.close()
        self._process.kill()
        self._process.wait()


class Spares:
    """The template of one process that starts Python programs, and whether they are forked from it.

    Use it from one thread, the one that outlives all programs.

    Args:
        folder: folder for the records of all programs below; they find it in `variables.SPARES`.
        say: prints a line for the user.
        owner: `agent`: it keeps a template once a program of its own has trained; `controller`: once any has; `node`: it has
            the template that it was forked with, or none.
    """

    def __init__(self, folder: str, say: Callable[[str], None], owner: Literal["agent", "controller", "node"]) -> None:
        self.memory_bytes = 0  # of the template
        self.off = ""  # reason why no program is forked any more
        self._folder = Path(folder)
        self._memory_file = self._folder / f"{MEMORY_FILE}{os.getpid()}"
        self._say = say
        self._owner = owner
        self._template = _own if owner == "node" else None
        self._environ: dict[str, str] | None = None  # of the newest program that was started as usual
        self._is_unbuffered = True
        self._started: set[int] = set()  # process ids of programs
        self._forked: list[ForkedProcess] = []
        self._said: set[str] = set()
        self._num_deaths = self._num_differences = 0
        self._measured_at = -MEMORY_S

    @property
    def state(self) -> str:
        """State in a word: `waiting`, `importing`, `ready`, or `off`; empty without a template of its own."""
        if self._owner == "node" and self._template is None:
            return ""
        if self.off:
            return "off"
        return self._template.state if self._template is not None else "waiting"

    def start(
        self,
        args: Sequence[str],
        env: Mapping[str, str],
        cwd: str | None = None,
        stdout: Any = None,
        stderr: Any = None,
    ) -> Process:
        """Start a program as the leader of a session: forked if possible, else as usual.

        Raises:
            OSError: it cannot be started.
        """
        self.look()
        environ = {**env, variables.SPARES: str(self._folder)}
        program = _program(args, environ, cwd)
        process: Process | None = None
        if program is not None and self._template is not None and self._template.state == "ready":
            streams = [number if each is None else each.fileno() for number, each in ((0, None), (1, stdout), (2, stderr))]
            try:
                process = ForkedProcess(self._template.fork(program, streams), args)
                self._forked.append(process)
                self._num_differences = 0
            except NotForkedError as error:
                self._say_once(f"a process was started without its spare, so its start takes longer: {error}")
                self._num_differences += self._template.state == "ready"
                self._settle()
        if process is None:
            if program is not None:
                self._environ, self._is_unbuffered = dict(environ), "-u" in args[1:]
            process = subprocess.Popen(args, env=environ, cwd=cwd, stdout=stdout, stderr=stderr, start_new_session=True)
        self._started.add(process.pid)
        return process

    def look(self) -> None:
        """Start the template if it is due, and note its news. Cheap, so call it often."""
        self._note_failures()
        if self.off:
            return
        if self._template is None:
            if self._owner != "node" and self._environ is not None and self._is_due():
                with contextlib.suppress(OSError):
                    recipe, is_node = self._folder / RECIPE_FILE, self._owner == "controller"
                    self._template = Template.start(recipe, self._environ, self._is_unbuffered, is_node)
            return
        before = self._template.state
        self._template.look()
        self._settle()
        if self._template is not None and self._template.state == "ready":
            if before == "importing" or time.monotonic() - self._measured_at >= MEMORY_S:
                self._measured_at = time.monotonic()
                self.memory_bytes = pss_bytes(self._template.pid)
                with contextlib.suppress(OSError):
                    atomic_write(self._memory_file, str(self.memory_bytes))
            if before == "importing":
                without = f", without {len(self._template.excluded)} that are not safe" if self._template.excluded else ""
                self._say(
                    f"spare ready: {self._template.num_modules} modules imported{without}, {self.memory_bytes / 2**20:.0f} MiB"
                )

    def _is_due(self) -> bool:
        if not (self._folder / RECIPE_FILE).exists():
            return False
        return self._owner == "controller" or any(map(self._has_stepped, self._started))

    def _has_stepped(self, pid: int) -> bool:
        return (self._folder / f"{STEPPED_FILE}{pid}").exists()

    def _settle(self) -> None:
        """Part with a template that cannot be used."""
        template = self._template
        if self._num_differences >= MAX_DIFFERENCES:
            self._turn_off(f"{MAX_DIFFERENCES} processes in a row could not be forked")
        if template is None or template.state in ("importing", "ready"):
            return
        self._drop()
        if template.state == "refused":
            self._turn_off(template.reason)
        elif template.state == "stale":
            # The next worker that trains records its modules again.
            (self._folder / RECIPE_FILE).unlink(missing_ok=True)
        else:
            self._num_deaths += 1
            self._say_once(f"the spare is lost, {template.reason}; processes start as usual until there is another one")
            if self._num_deaths >= MAX_DEATHS:
                self._turn_off(f"{MAX_DEATHS} spare processes have died")

    def _note_failures(self) -> None:
        """Fork no more programs after one that failed before its first step: its code may not be safe to fork."""
        if not self.off and (self._folder / OFF_FILE).exists():
            with contextlib.suppress(OSError):
                self._turn_off((self._folder / OFF_FILE).read_text(encoding="utf-8", errors="replace"))
        for process in list(self._forked):
            if (code := process.poll()) is None:
                continue
            self._forked.remove(process)
            if (code > 0 or code in _CRASHES) and self._owner != "controller" and not self._has_stepped(process.pid):
                self._turn_off(f"process {process.pid} failed before its first step")

    def _turn_off(self, reason: str) -> None:
        if self.off:
            return
        self.off = reason
        self._say(f"no spares from now on, processes start as usual: {reason}")
        with contextlib.suppress(OSError):
            atomic_write(self._folder / OFF_FILE, reason)
        self._drop()

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._say(text)

    def _drop(self) -> None:
        template, self._template = self._template, None
        self.memory_bytes = 0
        with contextlib.suppress(OSError):
            self._memory_file.unlink(missing_ok=True)
        if template is not None:
            template.close()

    def close(self) -> None:
        """End the template. Programs that were forked from it continue."""
        self._note_failures()
        self._drop()


def _program(args: Sequence[str], environ: Mapping[str, str], cwd: str | None) -> Program | None:
    """Return the program of a command line, None if it is not one that can be forked."""
    rest = [text for text in args[1:] if text != "-u"]
    if args[0] != sys.executable or not rest or "PYTHONSAFEPATH" in environ:
        return None
    if rest[0] == "-m":
        if len(rest) < 2:
            return None
    elif rest[0].startswith("-") or not os.path.isfile(os.path.join(cwd or "", rest[0])) or zipfile.is_zipfile(rest[0]):
        return None
    umask = os.umask(0)
    os.umask(umask)
    return Program(list(args[1:]), dict(environ), cwd or os.getcwd(), sorted(os.sched_getaffinity(0)), umask)


def memory_bytes(environ: Mapping[str, str]) -> tuple[int, int]:
    """Return the memory of the template of this worker's agent, and of all templates of its folder; 0 for none."""
    folder, agent = environ.get(variables.SPARES, ""), environ.get(variables.AGENT_PID, "")
    own = total = 0
    for file in Path(folder).glob(f"{MEMORY_FILE}*") if folder else ():
        with contextlib.suppress(OSError, ValueError):
            of_one = int(file.read_text())
            total += of_one
            own += of_one if file.name == f"{MEMORY_FILE}{agent}" else 0
    return own, total
