"""Jobs of real processes on this machine, for the benchmarks: started, observed, steered, and ended in every case.

Every wait has a deadline and an error that names the awaited event. A job's workers run `training.py`. Their records are read
from the lines they write, with times of the one monotonic clock that all processes of a machine share.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from statistics import median
from types import FrameType, TracebackType
from typing import TypeVar

import psutil

# Tests and benchmarks share what starts, follows and ends processes.
sys.path.insert(1, str(Path(__file__).resolve().parents[1]))
from hosts import Host, Hosts
from slurm_cluster import SlurmCluster, slurm_cluster

from lightning_dlrover.codec import RecordError
from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.server import EmbeddedEtcd
from lightning_dlrover.rdzv.etcd.types import EtcdConfig, EtcdError, KeyValue
from lightning_dlrover.rdzv.job.records import (
    ControllerRecord,
    DrainRecord,
    EventRecord,
    Keys,
    NodeRecord,
    PlanRecord,
    decode,
    encode,
)
from lightning_dlrover.rdzv.membership.rounds import JobView, read_view
from tests.support.processes import JsonLines, children, ends_of_logs, kill_all, start_logged
from tests.support.waiting import eventually

T = TypeVar("T")

TRAINING = Path(__file__).resolve().parent / "training.py"
PLAIN_TRAINING = TRAINING.with_name("plain_training.py")
AUTO_CONFIG_JOBS = TRAINING.with_name("auto_config_jobs.py")
RECORDING_SCRIPTS = (TRAINING, PLAIN_TRAINING, AUTO_CONFIG_JOBS)
HURRY = "hurry"
"""Name of a file among the records; see `Job.hurry`."""

STAND_IN = "stand_in"
CREATE_S = 1.0
"""Seconds in which the stand-in for NCCL makes a communicator."""

STACKS_SIGNAL = signal.SIGUSR2
"""Makes a process of `training.py` write the stacks of all of its threads to its log."""

STACKS_S = 1.0
"""Seconds for that."""

POLL_S = 0.005
START_TIMEOUT_S = 120.0  # imports alone take 3 s on an idle core, and several workers may share a core
STEP_TIMEOUT_S = 60.0


class BenchmarkError(RuntimeError):
    """An awaited event did not happen, or a job ended on its own."""


@dataclass(frozen=True)
class Step:
    """One line of a worker's records: a completed training step."""

    pid: int
    ended_s: float  # monotonic clock
    number: int  # optimizer updates of the job so far
    epoch: int
    global_rank: int
    world_size: int
    round_number: int  # 0 for stock jobs
    digest: str = ""  # digest of all parameters after the step
    samples: list[int] | None = None  # this worker's share of the batch
    settings: Sequence[int] = ()  # workers, loader workers, threads, batches ahead; see `tuning.plan.Settings`
    loss: float | None = None  # mean over this worker's share

    def encode(self) -> str:
        return json.dumps(asdict(self)) + "\n"


@dataclass(frozen=True)
class Block:
    """Durations of a worker's steps between two visits to the gate of `overhead.py`."""

    pid: int
    global_rank: int
    durations_s: list[float]
    cpu_s: float  # CPU time of all the worker's threads in these steps
    other_threads_s: float  # part of it in all threads but the training thread

    def encode(self) -> str:
        return json.dumps(asdict(self)) + "\n"

    @staticmethod
    def decode(line: str) -> Block:
        return Block(**json.loads(line))


class _StepLog:
    """Steps in a folder of records, read while they are written."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[Path, JsonLines[Step]] = {}

    def refresh(self) -> list[Step]:
        for file in sorted(self._folder.glob("*.jsonl")):
            self._files.setdefault(file, JsonLines(file, lambda fields: Step(**fields)))
        return [step for lines in self._files.values() for step in lines.read()]


class Workspace:
    """Owns all processes of a benchmark. Leaving it, by Ctrl-C or SIGTERM too, ends them.

    Args:
        keep: do not remove the folder with logs and records afterwards.
    """

    def __init__(self, name: str, keep: bool = False) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix=f"dlrover-{name}-"))
        self._keep = keep
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Workspace:
        def interrupt(signum: int, frame: FrameType | None) -> None:
            # Only once: a second signal must not interrupt the cleanup.
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
            raise KeyboardInterrupt

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, interrupt)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.close()
        if self._keep or isinstance(error, Exception):
            print(f"logs and records are kept in {self.folder}", file=sys.stderr)
        else:
            shutil.rmtree(self.folder, ignore_errors=True)

    def keep(self) -> None:
        """Keep logs and records."""
        self._keep = True

    def etcd(self, host: str = "127.0.0.1") -> EmbeddedEtcd:
        return self._stack.enter_context(EmbeddedEtcd(host=host))

    def hosts(self) -> Hosts:
        return self._stack.enter_context(Hosts())

    def slurm(self, num_hosts: int) -> SlurmCluster:
        folder = self.folder / "slurm"
        folder.mkdir()
        return self._stack.enter_context(slurm_cluster(folder, num_hosts))

    @contextlib.contextmanager
    def job(self, name: str, arguments: Sequence[str], script: Path = TRAINING) -> Iterator[Job]:
        """Create a job without agents. Its processes end with the `with` block."""
        job = Job(name, self.folder / name, arguments, script)
        with contextlib.closing(job), self._registered(job):
            yield job

    @contextlib.contextmanager
    def live_job(
        self, name: str, etcd: EmbeddedEtcd | str, num_workers: str, arguments: Sequence[str], script: Path = TRAINING
    ) -> Iterator[LiveJob]:
        """Create a job of our strategy, for `torchrun --nnodes=num_workers`, on an etcd or its endpoints."""
        endpoint = etcd if isinstance(etcd, str) else etcd.endpoint
        job = LiveJob(name, self.folder / name, endpoint, num_workers, arguments, script)
        with contextlib.closing(job), self._registered(job):
            yield job

    @contextlib.contextmanager
    def controlled_job(
        self, name: str, endpoint: str, arguments: Sequence[str], script: Path = TRAINING
    ) -> Iterator[ControlledJob]:
        """Create a job for `dlrover run`, not started yet."""
        job = ControlledJob(name, self.folder / name, endpoint, arguments, script)
        with contextlib.closing(job), self._registered(job):
            yield job

    @contextlib.contextmanager
    def _registered(self, job: Job) -> Iterator[None]:
        try:
            yield
        except Exception:
            job.save_evidence()
            print(ends_of_logs(job.folder), file=sys.stderr)
            raise


class Job:
    """Elastic agents that run a script. The steps of our own scripts are recorded.

    Args:
        folder: created here, for logs and records.
        arguments: arguments of the script; for ours without `--records`.
    """

    def __init__(self, name: str, folder: Path, arguments: Sequence[str], script: Path = TRAINING) -> None:
        folder.mkdir(parents=True)
        self.name = name
        self.folder = folder
        self.agents: list[subprocess.Popen[bytes]] = []
        # Environment of agents started from now on. Each job has its own history, so none starts from the results of another.
        self.environment = {"DLROVER_HISTORY": str(folder / "history.sqlite")}
        recorded = ["--records", str(folder / "records")] if script in RECORDING_SCRIPTS else []
        self._num_started = 0
        self._given_up: list[subprocess.Popen[bytes]] = []
        self._arguments = [str(script), *recorded, *arguments]
        (folder / "records").mkdir()
        self._log = _StepLog(folder / "records")

    # --- processes ----------------------------------------------------------------------------------------------------

    def start_agent(
        self, torchrun_options: Sequence[str], more_arguments: Sequence[str] = (), host: Host | None = None
    ) -> subprocess.Popen[bytes]:
        """Start one more `torchrun`, with its own log.

        Args:
            host: host to run on; None: this machine.
        """
        here = [] if host and host.link else ["--local-addr=127.0.0.1"]  # the machine's own name may have no reachable address
        command = [sys.executable, "-m", "torch.distributed.run", *here, *torchrun_options, *self._arguments, *more_arguments]
        command = [*(host.enter if host else []), *command]
        # One thread per worker, in every job alike: torchrun sets this only for several workers on a node, not for one.
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            "DLROVER_HISTORY": "off",  # no job starts from another one's history
            **_host_for_nccl(f"{self.name}-{self._num_started}"),
            **self.environment,
            **(host.environment if host else {}),
        }
        log = self.folder / f"agent-{self._num_started}.log"
        agent = start_logged(command, log, environment, self.folder)  # Ctrl-C reaches the benchmark alone, which ends the job
        self._num_started += 1
        self.agents.append(agent)
        return agent

    def start_stock(self, num_workers: int, device: str, more_arguments: Sequence[str] = ()) -> None:
        """Start stock `torchrun`: one agent with all workers, or on a GPU one agent for each worker."""
        if device == "cpu":
            self.start_agent(stock_agent(num_workers), more_arguments)
            return
        options = stock_agent(1, num_workers, free_endpoint())
        for _ in range(num_workers):
            self.start_agent(options, more_arguments)

    def hurry(self) -> None:
        """Let the workers of `training.py` make their steps without the pause of `--step-floor-s`."""
        (self.folder / "records" / HURRY).touch()

    def worker_pids(self, agents: Sequence[subprocess.Popen[bytes]] | None = None) -> list[int]:
        """Current training processes of all agents, or of these. Processes that are still importing are included."""
        agents = self.agents if agents is None else agents
        return [child.pid for agent in agents for child in children(agent.pid) if _runs_training(child)]

    def loader_worker_pids(self) -> list[int]:
        return [pid for worker in self.worker_pids() for pid in loader_workers_of(worker)]

    def give_up(self, agent: subprocess.Popen[bytes]) -> None:
        """Accept from now on that this agent ends. It ends at the latest with the job."""
        self.agents.remove(agent)
        self._given_up.append(agent)

    def close(self) -> None:
        """End all processes of the job at once."""
        kill_all([*self.agents, *self._given_up])

    def wait_until_ended(self, timeout_s: float) -> list[int]:
        """Exit codes of all agents.

        Raises:
            BenchmarkError: naming the agents that did not end in time.
        """
        running: Callable[[], list[int]] = lambda: [i for i, agent in enumerate(self.agents) if agent.poll() is None]  # noqa: E731
        what = f"job {self.name}: the end of all agents"
        eventually(lambda: not running(), what, timeout_s, error=BenchmarkError, report=lambda: f"agents {running()} run")
        return [agent.returncode for agent in self.agents]

    def save_evidence(self) -> None:
        """Write the job's records beside the logs of a failed job."""
        self.dump_stacks()

    def dump_stacks(self) -> None:
        """Write the stacks of all processes beside the logs; without `py-spy` those of our workers, into their logs."""
        py_spy = shutil.which("py-spy", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
        if py_spy is None:
            # The handler answers even if a thread that never returns holds the interpreter's lock.
            for pid in self.worker_pids() if self._arguments[0] == str(TRAINING) else []:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, STACKS_SIGNAL)
            time.sleep(STACKS_S)
            return
        pids = [agent.pid for agent in self.agents if agent.poll() is None]
        pids += [child.pid for pid in pids for child in children(pid, recursive=True)]
        with (self.folder / "stacks.txt").open("wb") as file:
            for pid in pids:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    command = [py_spy, "dump", "--native", "--pid", str(pid)]
                    subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, timeout=20.0, check=False)

    # --- observing ----------------------------------------------------------------------------------------------------

    def steps(self) -> list[Step]:
        """All steps of all workers so far; those of one worker in order."""
        return self._log.refresh()

    def wait_for(self, what: str, found: Callable[[], T | None], timeout_s: float, poll_s: float = POLL_S) -> T:
        """Poll `found` and return its first true result.

        Raises:
            BenchmarkError: no result within `timeout_s`, or every agent has ended, or one has failed.
        """
        return eventually(found, f"job {self.name}: {what}", timeout_s, poll_s, ended=self._ended, error=BenchmarkError)

    def _ended(self) -> str:
        codes = [agent.poll() for agent in self.agents]
        return f"agents ended with {codes}" if any(codes) or None not in codes else ""

    def wait_for_steps(self, num_steps: int, world_size: int, since_s: float = 0.0, timeout_s: float = START_TIMEOUT_S) -> None:
        """Wait until a worker has made `num_steps` steps in a world of this size that ended after `since_s`."""

        def look() -> bool | None:
            by_pid: dict[int, int] = {}
            for step in self.steps():
                if step.world_size == world_size and step.ended_s > since_s:
                    by_pid[step.pid] = by_pid.get(step.pid, 0) + 1
            return True if max(by_pid.values(), default=0) >= num_steps else None

        self.wait_for(f"{num_steps} steps of {world_size} workers", look, timeout_s)


class LiveJob(Job):
    """A job of agents that meet in etcd, steered by the records that a planner or a user would write."""

    def __init__(
        self, name: str, folder: Path, endpoint: str, num_workers: str, arguments: Sequence[str], script: Path = TRAINING
    ) -> None:
        ours = ["--strategy", "dlrover"] if script == TRAINING else []
        super().__init__(name, folder, [*ours, *arguments], script)
        self._options = [
            "--rdzv-backend=etcd-v3",
            f"--rdzv-endpoint={endpoint}",
            f"--rdzv-id={name}",
            f"--nnodes={num_workers}",
            "--nproc-per-node=1",
            "--max-restarts=3",  # enough for every killed worker, and few enough that a job that cannot start ends soon
            "--rdzv-conf=live=1",
        ]
        self._client = EtcdClient(EtcdConfig(endpoint))
        self._keys = Keys(name)

    def close(self) -> None:
        super().close()
        self._client.close()

    def start_worker(self) -> subprocess.Popen[bytes]:
        """Start one more agent with one worker."""
        return self.start_agent(self._options)

    def view(self) -> JobView:
        def bad(key: str, error: RecordError) -> None:
            raise BenchmarkError(f"job {self.name}: {error}") from error

        _, found = self._client.get_prefix(self._keys.live)
        entries: dict[str, KeyValue] = {entry.key: entry for entry in found}
        return read_view(entries, self._keys, bad)

    def save_evidence(self) -> None:
        super().save_evidence()
        with contextlib.suppress(EtcdError), (self.folder / "etcd.txt").open("w") as file:
            for entry in sorted(self._client.get_prefix(self._keys.root)[1], key=lambda entry: entry.mod_revision):
                print(entry.mod_revision, entry.key, entry.value.decode(errors="replace")[:2000], file=file)

    def events(self, kind: str) -> list[EventRecord]:
        """Events of this kind in the job's history, oldest first."""
        entries = sorted(self._client.get_prefix(self._keys.events)[1], key=lambda entry: entry.key)
        events = [decode(EventRecord, entry.value, entry.key) for entry in entries]
        return [event for event in events if event.kind == kind]

    def wait_for_snapshot(self, timeout_s: float = STEP_TIMEOUT_S) -> None:
        """Wait until all workers of the current round hold their whole part of one of its snapshots."""

        def look() -> bool | None:
            round_ = self.view().round
            return any(e.data["round"] == round_.number for e in self.events("snapshot")) or None if round_ else None

        self.wait_for("a complete snapshot", look, timeout_s)

    def member_pids(self) -> list[int]:
        """Members of the current round, in rank order."""
        view = self.view()
        return [view.workers[member].pid for member in view.survivors]

    def plan(self, num_workers: int, **settings: int) -> None:
        """Set the number of workers and their settings by hand, as `dlrover scale` does."""
        record = PlanRecord(num_workers, "user", "the benchmark says so", binding=True, created_at=time.time(), **settings)
        self._client.put(self._keys.plan, encode(record))

    def drain(self, pid: int) -> None:
        """Ask one worker to leave."""
        worker_id = next(w for w, record in self.view().workers.items() if record.pid == pid)
        self._client.put(self._keys.drains + worker_id, encode(DrainRecord(worker_id, "the benchmark says so")))

    def wait_for_ready(self, num_spares: int, timeout_s: float = START_TIMEOUT_S) -> None:
        """Wait until `num_spares` workers are ready that no round needs."""

        def look() -> bool | None:
            return True if len(self.view().in_state("ready")) >= num_spares else None

        self.wait_for(f"{num_spares} ready spares", look, timeout_s, poll_s=0.05)


class ControlledJob(LiveJob):
    """A job of `dlrover run`, observed through its workers like a job of agents."""

    def __init__(self, name: str, folder: Path, endpoint: str, arguments: Sequence[str], script: Path = TRAINING) -> None:
        super().__init__(name, folder, endpoint, "1", arguments, script)
        self._endpoint = endpoint

    def start(self, min_workers: int, max_workers: int, *options: str) -> None:
        """
        Args:
            options: options of `dlrover run`, such as those of a target.
        """
        command = [sys.executable, "-m", "lightning_dlrover.cli", "run", "--endpoint", self._endpoint, "--rdzv-id", self.name]
        command += ["--workers", f"{min_workers}:{max_workers}", "--run-dir", str(self.folder / "runs"), *options]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **self.environment}
        self.agents.append(start_logged([*command, *self._arguments], self.folder / "run.log", environment, self.folder))

    def close(self) -> None:
        for run in self.agents:
            if run.poll() is None:
                run.terminate()  # ends all processes that it has started
                with contextlib.suppress(subprocess.TimeoutExpired):
                    run.wait(30.0)
        super().close()

    def nodes(self) -> dict[str, NodeRecord]:
        """Every requested node, by name."""
        _, entries = self._client.get_prefix(self._keys.each_node)
        return {e.key.removeprefix(self._keys.each_node): decode(NodeRecord, e.value, e.key) for e in entries}

    def controller(self) -> ControllerRecord | None:
        """The record of the process that starts the nodes."""
        entry = self._client.get(self._keys.controller)
        return decode(ControllerRecord, entry.value, entry.key) if entry is not None else None

    def newest_step(self) -> int:
        return max((step.number for step in self.steps()), default=0)

    def wait_for_step(self, number: int, timeout_s: float = 120.0) -> None:
        self.wait_for(f"step {number}", lambda: True if self.newest_step() >= number else None, timeout_s, poll_s=0.05)

    def rate(self, first: int, num_steps: int) -> float:
        """Steps per second, by the median step: a burst of other load on the machine must not count."""
        ended = sorted({step.number: step.ended_s for step in self.steps()}.items())
        times = [at for number, at in ended if first <= number <= first + num_steps]
        return 1 / median(after - before for before, after in pairwise(times))


def add_device_options(parser: argparse.ArgumentParser) -> None:
    """Add `--device` and `--backend`."""
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="device of the workers, which share one GPU (default: cpu)"
    )
    parser.add_argument(
        "--backend",
        default="",
        help=f"backend of process groups (default: gloo on a CPU, NCCL on a GPU); {STAND_IN}: the stand-in for NCCL of the "
        f"tests, on a CPU, whose communicators take {CREATE_S:.0f} s",
    )


def device_arguments(options: argparse.Namespace) -> list[str]:
    """Return what a job's script needs of `add_device_options`."""
    return [f"--device={options.device}", *([f"--backend={options.backend}"] if options.backend else [])]


def use_backend(name: str) -> None:
    """Register a backend in a worker, if torch does not know it."""
    if name == STAND_IN:
        from tests.support import nccl_stand_in

        nccl_stand_in.install(nccl_stand_in.Quirks(create_s=CREATE_S))


def free_endpoint() -> str:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return f"127.0.0.1:{probe.getsockname()[1]}"


def _host_for_nccl(name: str) -> dict[str, str]:
    """Variables that make an agent a host of its own to NCCL, which refuses two ranks of one host on one GPU."""
    return {"NCCL_HOSTID": name, "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "GLOO_SOCKET_IFNAME": "lo"}


def stock_agent(num_workers: int, num_nodes: int = 1, endpoint: str = "localhost:0") -> list[str]:
    """Options of a stock `torchrun` that never restarts a worker.

    Args:
        num_workers: workers of its node.
        num_nodes: agents of the job, each started with these options.
        endpoint: where they meet; the default serves one agent only.
    """
    return [
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={endpoint}",
        f"--nnodes={num_nodes}",
        f"--nproc-per-node={num_workers}",
        "--max-restarts=0",
    ]


def describe_machine() -> str:
    cpu = platform.processor() or platform.machine()
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    memory_gib = psutil.virtual_memory().total / 2**30
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "lightning", "lightning-dlrover"))
    return (
        f"machine: {os.cpu_count()} cores, {cpu}, {memory_gib:.0f} GiB, load {os.getloadavg()[0]:.1f}; "
        f"Python {platform.python_version()}, {versions}"
    )


def result_line(values: Mapping[str, float | int | str]) -> str:
    """Last line of a benchmark: `name=value` pairs."""
    return " ".join(f"{name}={value if isinstance(value, str) else format(value, '.4g')}" for name, value in values.items())


def loader_workers_of(worker_pid: int) -> list[int]:
    return [child.pid for child in children(worker_pid) if _runs_training(child)]


def _runs_training(process: psutil.Process) -> bool:
    try:
        return any(str(script) in process.cmdline() for script in RECORDING_SCRIPTS)
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return False
