"""Nodes on this machine, started by TorchX's Runner."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import logging
import os
import signal
import threading
import time
import traceback
import uuid
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path

import psutil
from torchx.runner import get_runner
from torchx.schedulers.local_scheduler import ReplicaParam, _LocalReplica
from torchx.specs import AppDef

from lightning_dlrover import variables
from lightning_dlrover.components import elastic
from lightning_dlrover.components.targets.machine import Claims, MachineShares
from lightning_dlrover.components.targets.target import ANY_SIZE, App, AppStatus, NodeSize, NodeSpec, Resize
from lightning_dlrover.host import PR_SET_CHILD_SUBREAPER
from lightning_dlrover.output import say
from lightning_dlrover.rdzv.etcd.server import OwnedFolder
from lightning_dlrover.rdzv.job.records import EndNotice
from lightning_dlrover.rdzv.job.sizes import WorldSizes
from lightning_dlrover.spares import Spares

log = logging.getLogger(__name__)

_STATES: dict[str, AppStatus] = {
    "UNSUBMITTED": "pending",
    "SUBMITTED": "pending",
    "PENDING": "pending",
    "RUNNING": "running",
    "SUCCEEDED": "succeeded",
    "FAILED": "failed",
    "CANCELLED": "cancelled",
    "UNKNOWN": "gone",
}

_SCHEDULER = "local_cwd"

_MAX_APPS = 4096
"""Maximum number of apps in the scheduler's cache. With its default of 100, the 101st node is refused while all run."""


class LocalRunner:
    """TorchX's Runner with its local scheduler. All use of the Runner is here, because it changes between releases."""

    def __init__(self, log_dir: Path) -> None:
        self._runner = get_runner(cache_size=_MAX_APPS)
        self._log_dir = str(log_dir)
        self._has_failed = False
        self._former_hook, threading.excepthook = threading.excepthook, self._on_failed_thread
        # The scheduler replaces the process's signal handlers when it is created. The former handlers are restored.
        former = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
        self._runner.scheduler_run_opts(_SCHEDULER)
        for number, handler in former.items():
            signal.signal(number, handler)

    def submit(self, app: AppDef) -> str:
        """Submit an app and return its handle."""
        # No workspace: TorchX would build an image of the current folder.
        return str(self._runner.run(app, _SCHEDULER, {"log_dir": self._log_dir}, workspace=None))

    def status(self, handle: str) -> AppStatus:
        """Return the state of an app; `gone` if the scheduler does not list it."""
        try:
            status = self._runner.status(handle)
        except (OSError, ValueError) as error:
            return self._state_of_processes(handle, error)
        return _STATES.get(status.state.name, "running") if status is not None else "gone"

    def cancel(self, handle: str) -> None:
        """End an app with SIGTERM, then SIGKILL after 10 s. Return after its end."""
        try:
            self._runner.cancel(handle)
        except (OSError, ValueError) as error:
            self._report(error)

    def start_from(self, spares: Spares) -> None:
        """Let the local scheduler start its processes by `spares`."""
        scheduler = self._runner._scheduler(_SCHEDULER)

        def popen(role: str, number: int, given: ReplicaParam) -> _LocalReplica:
            stdout, stderr, combined = scheduler._get_replica_output_handles(given)
            environ = scheduler._get_replica_env(given)
            process = spares.start(given.args, environ, cwd=given.cwd, stdout=stdout, stderr=stderr)
            error_file = environ.get("TORCHELASTIC_ERROR_FILE", "<N/A>")
            return _LocalReplica(role, number, process, stdout, stderr, combined, error_file)

        scheduler._popen = popen

    def close(self) -> None:
        """End all apps that were started here."""
        self._runner.close()
        if threading.excepthook == self._on_failed_thread:
            threading.excepthook = self._former_hook

    def _on_failed_thread(self, failed: threading.ExceptHookArgs) -> None:
        """Report a failed write of a thread in which TorchX copies the nodes' output to a third file, without a traceback."""
        frames = traceback.extract_tb(failed.exc_traceback)
        if isinstance(failed.exc_value, OSError) and frames and frames[-1].filename.endswith("torchx/schedulers/streams.py"):
            self._report(failed.exc_value)
        else:
            self._former_hook(failed)

    def _state_of_processes(self, handle: str, error: Exception) -> AppStatus:
        """Return the state of an app from its processes when the scheduler cannot read or write its own log files.

        Neither a full disk nor an agent's half-written error file may end a job.
        """
        self._report(error)
        app = self._runner._scheduler(_SCHEDULER)._apps[handle.rsplit("/", 1)[-1]]
        processes = [replica.proc for replicas in app.role_replicas.values() for replica in replicas]
        codes = [process.poll() for process in processes]
        return "running" if None in codes else "failed" if any(codes) else "succeeded"

    def _report(self, error: Exception) -> None:
        if not self._has_failed:
            log.warning("TorchX cannot write its own files among the nodes' logs; the job continues: %s", error)
        self._has_failed = True


_LOOKS = 10
"""Maximum number of passes over the processes of a node that moves to other cores."""


def node_app(spec: NodeSpec, node: str, dollar: str) -> AppDef:
    """Return the component of one node. `dollar` becomes one $ after every expansion of ${...} on the way to the script."""
    return elastic.node(
        *(argument.replace("$", dollar) for argument in spec.script_args),
        script=spec.script.replace("$", dollar),
        rdzv_endpoint=spec.endpoint,
        rdzv_id=spec.run_id,
        workers=f"{spec.min_workers}:{spec.max_workers}",
        node=node,
        max_restarts=spec.max_restarts,
        spares=int(spec.has_spares),
        notices=spec.notices,
        agents=spec.workers_per_node,
        sizes=WorldSizes(spec.sizes).conf,
        key_prefix=spec.prefix,
        timeouts=",".join(f"{name}={seconds:g}" for name, seconds in spec.timeouts.items()),
        **spec.access,  # type: ignore[arg-type]
    )


class LocalTarget:
    """Nodes as processes on this machine, through TorchX's local scheduler.

    A node's share of the machine is released once all its processes have ended. Orphans of nodes become children of this
    process (PR_SET_CHILD_SUBREAPER) and carry a mark in their environment, so `close` finds all of them and no other process.
    Use it from the main thread: nodes end with the thread that started them.

    Args:
        gpus: GPUs that each node owns exclusively; 0: all nodes share every GPU visible to this process.
        claims: keeps these GPUs from other jobs of this machine; None: no other job uses them.
        grace_s: seconds between SIGTERM and SIGKILL.
        hurry: when set, SIGKILL follows without a grace period.
    """

    name = "local"
    outlives_controller = False
    resizes_in_place = True

    def __init__(
        self,
        spec: NodeSpec,
        log_dir: Path,
        gpus: int = 0,
        claims: Claims | None = None,
        grace_s: float = 20.0,
        hurry: threading.Event | None = None,
    ) -> None:
        self._spec = spec
        self._log_dir = log_dir
        self._grace_s = grace_s
        self._hurry = hurry or threading.Event()
        self._mark = uuid.uuid4().hex
        self._agents: dict[str, psutil.Process] = {}
        self._apps: list[str] = []  # TorchX's names of all nodes that were started
        self._nodes: dict[str, str] = {}  # key: handle; names of nodes not seen to end yet
        self._out_of_memory: set[str] = set()  # handles
        self._logs: dict[str, list[Path]] = {}  # key: handle
        self._shares = MachineShares(gpus, spec.workers_per_node, claims)
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
        self._runner = LocalRunner(log_dir)
        self._spares_folder: OwnedFolder | None = None
        self.spares: Spares | None = None
        # Of several agents of a node, each keeps a spare process of its own.
        if spec.has_spares and spec.workers_per_node == 1:
            self._spec = dataclasses.replace(spec, has_spares=False)
            self._spares_folder = OwnedFolder("dlrover-spares-")
            self.spares = Spares(self._spares_folder.name, say, "controller")
            self._runner.start_from(self.spares)

    def open(self, mark: str) -> None:
        pass  # nodes of another process have ended with it

    def owns(self, node: str, handle: str) -> bool:
        return self._nodes.get(handle) == node

    def apps(self) -> Sequence[App]:
        if self.spares is not None:
            self.spares.look()
        self._settle()
        return [App(node, handle, True) for handle, node in self._nodes.items()]

    def start(self, node: str, size: NodeSize = ANY_SIZE) -> str:
        self._settle()
        cores, own = self._shares.take(node, size)
        # TorchX expands ${...} with its macros, then torchrun does the same with its own.
        app = node_app(self._spec, node, dollar="$$$$")
        app.roles[0].env |= {
            **own,
            **{name: value.replace("$", "$$") for name, value in self._spec.environment.items()},
            variables.PARENT_PID: str(os.getpid()),
            variables.STARTED_BY: self._mark,
        }
        self._reap_orphans()
        before = set(self._children())
        try:
            with _on_cores(cores):
                handle = self._runner.submit(app)
        except BaseException:
            self._shares.end(node)
            raise
        self._nodes[handle] = node
        self._apps.append(handle.rsplit("/", 1)[-1])
        started = [p for p in self._children() if p not in before and _leads_its_session(p)]
        self._agents.update((handle, process) for process in started[-1:])
        return handle

    def status(self, handle: str) -> AppStatus:
        status = self._runner.status(handle)
        if status not in ("pending", "running") and (node := self._nodes.pop(handle, None)) is not None:
            # A killed agent leaves its worker behind. A training worker hands over on SIGTERM.
            for process in self._orphans():
                with contextlib.suppress(psutil.Error):
                    if process.environ().get(variables.NODE) == node:
                        process.terminate()
            if status == "failed" and (why := self._shares.why_killed(node)):
                self._out_of_memory.add(handle)
                with contextlib.suppress(OSError, IndexError), self.logs(handle)[-1].open("a", encoding="utf-8") as stream:
                    stream.write(f"this machine: {why}\n")
            self._shares.end(node)
            self._settle()
        return status

    def cancel(self, handles: Iterable[str]) -> None:
        ending = list(handles)
        # An agent forwards SIGTERM to its worker and waits for it.
        self._end([self._agents[handle] for handle in ending if handle in self._agents])
        for handle in ending:
            self._runner.cancel(handle)
            self._agents.pop(handle, None)
            if (node := self._nodes.pop(handle, None)) is not None:
                self._shares.end(node)
        self._settle()

    def resize(self, handle: str, size: NodeSize) -> Resize:
        node = self._nodes[handle]
        cores, why = self._shares.resize(node, size)
        if why:
            return Resize("refused", why)
        if cores and handle in self._agents:
            _move(self._agents[handle], cores)
        return Resize("done")

    def ran_out_of_memory(self, handle: str) -> bool:
        return handle in self._out_of_memory

    def release(self, handle: str) -> bool:
        return True

    def notice(self, handle: str) -> EndNotice | None:
        return None

    def logs(self, handle: str) -> list[Path]:
        if (known := self._logs.get(handle)) is not None:
            return known
        app_id = handle.rsplit("/", 1)[-1]
        found = [file for name in ("stdout", "stderr") for file in sorted(self._log_dir.glob(f"*/{app_id}/*/*/{name}.log"))]
        if len(found) == 2:
            self._logs[handle] = found  # a folder of many sessions takes long to search
        return found

    def close(self) -> None:
        self._end([*self._agents.values(), *self._orphans()])
        self._runner.close()
        if self.spares is not None and self._spares_folder is not None:
            self.spares.close()
            self._spares_folder.cleanup()
        for app_id in self._apps:
            # TorchX writes a file SUCCESS once it has closed an app's output, also if the app failed or was cancelled.
            for file in self._log_dir.glob(f"*/{app_id}/SUCCESS"):
                with contextlib.suppress(OSError):
                    file.unlink()
        self._reap_orphans()
        self._shares.close()

    def _settle(self) -> None:
        """Release the shares of ended nodes, unless some of their processes still run."""
        if not self._shares.awaits:
            return
        left = set()
        for process in self._orphans():
            with contextlib.suppress(psutil.Error):
                left.add(process.environ().get(variables.NODE, ""))
        agents = {node: self._agents[handle] for handle, node in self._nodes.items() if handle in self._agents}
        for node, cores in self._shares.settle(left).items():
            if node in agents:
                _move(agents[node], cores)

    def _children(self) -> list[psutil.Process]:
        return sorted(psutil.Process().children(), key=lambda process: process.create_time())

    def _orphans(self) -> list[psutil.Process]:
        orphans = []
        for process in self._children():
            with contextlib.suppress(psutil.Error):
                if process not in self._agents.values() and process.environ().get(variables.STARTED_BY) == self._mark:
                    orphans.append(process)
        return orphans

    def _reap_orphans(self) -> None:
        """Reap orphans: as their new parent, this process would otherwise keep them as zombies.

        A child of this process itself leads a session or is in ours, and other code waits for it.
        """
        for process in self._children():
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                if os.getsid(process.pid) not in (process.pid, os.getsid(0)):
                    os.waitpid(process.pid, os.WNOHANG)

    def _end(self, roots: list[psutil.Process]) -> None:
        """End processes and their descendants: SIGTERM to the given ones, after a grace period SIGKILL to all that remain."""
        family = _with_descendants(roots)
        for root in roots:
            with contextlib.suppress(psutil.NoSuchProcess):
                root.terminate()
        deadline = time.monotonic() + self._grace_s
        while (left := [p for p in family if _is_running(p)]) and time.monotonic() < deadline and not self._hurry.is_set():
            time.sleep(0.05)
            family |= _with_descendants(left)
        while left := [p for p in _with_descendants(family) if _is_running(p)]:
            for process in left:
                # psutil compares the start time first, so a reused process id is never signalled.
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(left, timeout=1.0)
            family = set(left)
            if time.monotonic() > deadline + 10.0:
                return  # stuck in the kernel: no signal can end it


def _with_descendants(processes: Iterable[psutil.Process]) -> set[psutil.Process]:
    family = set(processes)
    for process in list(family):
        with contextlib.suppress(psutil.NoSuchProcess):
            family.update(process.children(recursive=True))
    return family


@contextlib.contextmanager
def _on_cores(cores: Collection[int]) -> Iterator[None]:
    """Bind this thread to cores for a while. Its children inherit the binding from their first instruction on."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores or before)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _move(root: psutil.Process, cores: Iterable[int]) -> None:
    """Bind a process and its descendants to cores. Repeated passes find processes that start during a pass."""
    wanted = {*cores}
    for _ in range(_LOOKS):
        moved = False
        for process in _with_descendants([root]):
            with contextlib.suppress(OSError, psutil.Error):
                for thread in os.listdir(f"/proc/{process.pid}/task"):
                    with contextlib.suppress(ProcessLookupError):
                        if os.sched_getaffinity(int(thread)) != wanted:
                            os.sched_setaffinity(int(thread), wanted)
                            moved = True
        if not moved:
            return


def _leads_its_session(process: psutil.Process) -> bool:
    try:
        return os.getsid(process.pid) == int(process.pid)
    except ProcessLookupError:
        return False


def _is_running(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running()) and str(process.status()) != "zombie"
    except psutil.NoSuchProcess:
        return False
