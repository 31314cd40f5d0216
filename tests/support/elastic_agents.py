"""Stock `LocalElasticAgent`s with our backend, each a process of its own, and the workers they start.

Agents are forked from a process that has imported torch once. One more agent costs milliseconds, and none inherits the threads
of the test. (multiprocessing shares one such process, with modules and an environment for other tests.)

Most workers are tiny scripts without torch, started as `torchrun` starts a script. They record their environment. Test and
workers wait for marks that others leave in a folder.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import torch.distributed.rpc  # noqa: F401 - imported here once, not by every worker
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

import lightning_dlrover.rdzv.agents.rendezvous  # noqa: F401 - as above
from tests.support.disturbed_writes import Failpoint, disturb_writes
from tests.support.waiting import eventually

_NURSE = "from tests.support import elastic_agents, frozen_heap; elastic_agents._nurse"

# Prepended to every script.
PREAMBLE = """
import os, signal, sys, time
from tests.support.elastic_worker import Worker
me = Worker.started()
"""


@dataclass(frozen=True)
class Node:
    """Settings of one agent, except endpoint and run: options of torchrun by the names of its API."""

    entrypoint: str | Callable[..., Any]  # source of a script, or a function
    args: tuple[Any, ...] = ()
    min_nodes: int = 1
    max_nodes: int = 1
    nproc: int = 1
    role: str = "default"
    max_restarts: int = 0
    exit_barrier_timeout_s: float = 60.0
    conf: Mapping[str, str] = field(default_factory=dict)
    start_method: str = "spawn"  # start method of a function's process
    redirects: Std = Std.NONE
    tee: Std = Std.NONE
    log_line_prefix_template: str | None = None
    local_addr: str | None = None
    master_addr: str | None = None
    master_port: int | None = None
    environ: Mapping[str, str] = field(default_factory=dict)
    with_writes: bool = False  # record the agent's writes into etcd
    point: Failpoint | None = None  # write to disturb, if any


@dataclass(frozen=True)
class Outcome:
    """End of an agent: results of its workers, or an error of its own."""

    state: str = ""  # SUCCEEDED or FAILED
    return_values: Mapping[int, Any] = field(default_factory=dict)  # return values by global rank
    exit_codes: Mapping[int, int] = field(default_factory=dict)  # exit codes of failed workers, by global rank
    messages: Mapping[int, str] = field(default_factory=dict)  # error messages of failed workers, by global rank
    restarts_left: int = 0
    error: str = ""  # type and text


@dataclass(frozen=True)
class Started:
    """One start of one worker, as recorded by the worker."""

    agent: int
    pid: int
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    group_rank: int
    group_world_size: int
    role: str
    role_rank: int
    role_world_size: int
    restart: int
    master: str
    environ: Mapping[str, str] = field(repr=False)

    @staticmethod
    def decode(text: str) -> Started:
        environ = json.loads(text)

        def number(name: str) -> int:
            return int(environ[name])

        return Started(
            agent=number("CONTRACT_AGENT"),
            pid=number("PID"),
            rank=number("RANK"),
            world_size=number("WORLD_SIZE"),
            local_rank=number("LOCAL_RANK"),
            local_world_size=number("LOCAL_WORLD_SIZE"),
            group_rank=number("GROUP_RANK"),
            group_world_size=number("GROUP_WORLD_SIZE"),
            role=environ["ROLE_NAME"],
            role_rank=number("ROLE_RANK"),
            role_world_size=number("ROLE_WORLD_SIZE"),
            restart=number("TORCHELASTIC_RESTART_COUNT"),
            master=f"{environ['MASTER_ADDR']}:{environ['MASTER_PORT']}",
            environ=environ,
        )


class Nursery:
    """The process that forks agents."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair()
        command = f"{_NURSE}({theirs.fileno()})"
        self._process = subprocess.Popen(
            [sys.executable, "-c", command],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
        )
        theirs.close()

    def run(self, *arguments: Any) -> tuple[int, Connection]:
        """Fork a process that calls `_run_agent`; return its pid, and the connection that receives its outcome."""
        ours, theirs = multiprocessing.Pipe()
        socket.send_fds(self._control, [b"+"], [theirs.fileno()])
        theirs.close()
        ours.send(arguments)
        assert ours.poll(60), "the process that agents are forked from does not answer"
        pid: int = ours.recv()
        return pid, ours

    def close(self) -> None:
        self._control.close()
        self._process.wait(10)


def _nurse(control_fd: int) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no process waits for the agents
    control = socket.socket(fileno=control_fd)
    while True:
        asked, fds, _, _ = socket.recv_fds(control, 1, 1)
        if not asked:
            return
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            control.close()
            connection = Connection(fds[0])
            connection.send(os.getpid())
            _run_agent(*connection.recv(), connection)  # type: ignore[call-arg]
            return
        os.close(fds[0])


class RunningAgent:
    def __init__(self, number: int, pid: int, connection: Connection, log_path: Path) -> None:
        self.number = number
        self.pid = pid
        self._connection = connection
        self._log_path = log_path
        self._outcome: Outcome | None = None

    def __str__(self) -> str:
        return f"agent {self.number}"

    @property
    def output(self) -> str:
        """Output of the agent and, unless redirected, of its workers."""
        return self._log_path.read_text(errors="replace") if self._log_path.exists() else ""

    def writes(self, kind: str = "write") -> list[dict[str, Any]]:
        """Its writes into etcd so far, or the disturbed ones (`failpoint`)."""
        path = self._log_path.with_name("writes")
        lines = path.read_text().splitlines() if path.exists() else []
        return [record for line in lines if (record := json.loads(line))["kind"] == kind]

    @property
    def is_running(self) -> bool:
        return bool(psutil.pid_exists(self.pid))

    def signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL the agent alone. Its workers become orphans."""
        self.signal(signal.SIGKILL)
        eventually(lambda: not self.is_running, f"{self} is dead")

    def wait(self, timeout_s: float = 60.0) -> Outcome:
        """Wait until the agent has ended, and return its outcome.

        Raises:
            AssertionError: it still runs, or died without an outcome.
        """
        if self._outcome is None:
            assert self._connection.poll(timeout_s), (
                f"agent {self.number} still runs after {timeout_s:g} s; its output:\n{self.output}"
            )
            try:
                self._outcome = pickle.loads(self._connection.recv_bytes())
            except EOFError:
                raise AssertionError(f"{self} died without a word; its output:\n{self.output}") from None
            eventually(lambda: not self.is_running, f"{self}, which has a result, ends", timeout_s)
        return self._outcome


class ElasticAgents:
    """The agents of one run, and all records of their workers. Closing it ends all processes."""

    def __init__(self, nursery: Nursery, endpoint: str, run_id: str, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._nursery = nursery
        self.folder = folder
        self._endpoint = endpoint
        self._run_id = run_id
        self._agents: list[RunningAgent] = []

    def start(self, node: Node, num_agents: int = 1) -> list[RunningAgent]:
        return [self.start_one(node) for _ in range(num_agents)]

    def start_one(self, node: Node) -> RunningAgent:
        number = len(self._agents)
        folder = self.folder / f"agent-{number}"
        folder.mkdir()
        if isinstance(node.entrypoint, str):
            (folder / "script.py").write_text(PREAMBLE + node.entrypoint)
        pid, connection = self._nursery.run(node, number, self._endpoint, self._run_id, folder)
        self._agents.append(RunningAgent(number, pid, connection, folder / "log"))
        return self._agents[-1]

    def starts(self) -> list[Started]:
        """All starts of workers so far, in order."""
        return [Started.decode(file.read_text()) for file in sorted(self.folder.glob("started-*"))]

    def wait_for_starts(self, num_starts: int, world_size: int = 0, timeout_s: float = 60.0) -> list[Started]:
        """Starts in a world of this size (0: any), once there are `num_starts`."""

        def look() -> list[Started]:
            found = [start for start in self.starts() if world_size in (0, start.world_size)]
            return found if len(found) >= num_starts else []

        what = f"{num_starts} workers of a world of {world_size or 'any size'} have started"
        return eventually(look, what, timeout_s, report=self.report)

    def report(self) -> str:
        """Readable summary: all starts, and the output of each agent."""
        outputs = (f"--- agent {agent.number}\n{agent.output}" for agent in self._agents)
        return "\n".join([f"started: {self.starts()}", *outputs])

    def leave(self, mark: str) -> None:
        """Leave a mark that workers may wait for."""
        (self.folder / mark).touch()

    def has(self, mark: str) -> bool:
        """Return whether a worker has left this mark."""
        return (self.folder / mark).exists()

    def found(self, mark: str) -> str:
        """Text of a mark that a worker has left."""
        return (self.folder / mark).read_text()

    def kill_node(self, agent: RunningAgent) -> None:
        """SIGKILL an agent and its workers, as if the machine lost power."""
        agent.kill()
        for start in self.starts():
            if start.agent == agent.number:
                self._kill_worker(start)

    def close(self) -> None:
        for agent in self._agents:
            if agent.is_running:
                agent.kill()
        for start in self.starts():
            self._kill_worker(start)

    def _kill_worker(self, start: Started) -> None:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            process = psutil.Process(start.pid)
            # The pid may have been reused. A forked worker shows the command line of the process that forks agents.
            is_forked = _NURSE in " ".join(process.cmdline())
            if is_forked or process.environ().get("CONTRACT_FOLDER") == str(self.folder):
                process.kill()


def _run_agent(node: Node, number: int, endpoint: str, run_id: str, folder: Path, end: Connection) -> None:
    """Run an agent as `torch.distributed.launcher.api.launch_agent` does, and send its result to the test."""
    with (folder / "log").open("wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.environ.update({"CONTRACT_FOLDER": str(folder.parent), "CONTRACT_AGENT": str(number), **node.environ})
    if node.with_writes:
        record = (folder / "writes").open("a", buffering=1)
        disturb_writes(node.point, lambda kind, **fields: print(json.dumps({"kind": kind, **fields}), file=record))
    is_script = isinstance(node.entrypoint, str)
    try:
        conf = {"last_call_timeout": "0.5", "lease_ttl": "2", **node.conf}
        handler = get_rendezvous_handler(
            RendezvousParameters("etcd-v3", endpoint, run_id, node.min_nodes, node.max_nodes, node.local_addr, **conf)
        )
        agent = LocalElasticAgent(
            WorkerSpec(
                role=node.role,
                local_world_size=node.nproc,
                rdzv_handler=handler,
                entrypoint=sys.executable if is_script else node.entrypoint,
                args=("-u", str(folder / "script.py"), *node.args) if is_script else node.args,
                max_restarts=node.max_restarts,
                monitor_interval=0.05,
                master_addr=node.master_addr,
                master_port=node.master_port,
                local_addr=node.local_addr,
            ),
            DefaultLogsSpecs(log_dir=str(folder / "logs"), redirects=node.redirects, tee=node.tee),
            start_method=node.start_method,
            exit_barrier_timeout=node.exit_barrier_timeout_s,
            log_line_prefix_template=node.log_line_prefix_template,
        )
        is_shut_down = False
        try:
            result = agent.run()
        except SignalException:
            is_shut_down = True  # like torchrun, which does not call shutdown() after a signal
            raise
        finally:
            if not is_shut_down:
                handler.shutdown()
    except BaseException as error:
        _send(end, Outcome(error=f"{type(error).__name__}: {error}"))
        raise
    failures = result.failures
    _send(
        end,
        Outcome(
            state=result.state.name,
            return_values=result.return_values,
            exit_codes={rank: failure.exitcode for rank, failure in failures.items()},
            messages={rank: failure.message for rank, failure in failures.items()},
            restarts_left=agent._remaining_restarts,
        ),
    )


def _send(end: Connection, outcome: Outcome) -> None:
    # Not `end.send`: tensors would be shared with this process, which ends before the test reads them.
    end.send_bytes(pickle.dumps(outcome))
