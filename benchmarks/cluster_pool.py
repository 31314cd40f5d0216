"""A pool of real jobs on this machine, for `cluster_real.py`: submitted, watched, and ended in every case."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import psutil
from jobs import BenchmarkError

from tests.support.processes import children, ends_of_logs, start_logged
from tests.support.waiting import eventually

SCRIPT = Path(__file__).resolve().parent / "cluster_jobs.py"
SAMPLE_S = 0.25
DLROVER = (sys.executable, "-m", "lightning_dlrover.cli")


@dataclass(frozen=True)
class Arrival:
    """A job and the time of its submission, seconds from the start.

    Args:
        step_s: sleep in each step.
        sample_s: sleep for each sample of a worker's share.
    """

    name: str
    at_s: float
    steps: int
    workers: str = "1:2"
    width: int = 640
    step_s: float = 0.0
    sample_s: float = 0.0


@dataclass(frozen=True)
class Ended:
    """A job's end. `jct_s`: seconds from its submission."""

    name: str
    code: int
    jct_s: float


@dataclass
class _Submitted:
    arrival: Arrival
    at: float
    process: subprocess.Popen[bytes]
    ended: Ended | None = None

    def await_end(self) -> None:
        code = self.process.wait()
        self.ended = Ended(self.arrival.name, code, time.monotonic() - self.at)


@dataclass
class PoolOfJobs:
    """One etcd's pool. Use as a context manager: leaving it ends all processes.

    Args:
        cores: the budget; more workers at a time are counted as an excess.
    """

    folder: Path
    endpoint: str
    cores: int
    options: Sequence[str] = ()  # more options of each `dlrover run`
    jobs: dict[str, _Submitted] = field(default_factory=dict)
    brains: list[subprocess.Popen[bytes]] = field(default_factory=list)
    worst_excess_s: float = 0.0
    _stop: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> PoolOfJobs:
        self.folder.mkdir(parents=True)
        self._auditor = threading.Thread(target=self._audit, daemon=True)
        self._auditor.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop.set()
        self._auditor.join(5.0)
        processes = [*self.brains, *(job.process for job in self.jobs.values())]
        for process in processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 20.0
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, deadline - time.monotonic()))
            if process.poll() is None:
                process.kill()
                process.wait(5.0)

    def start_brain(self, policy: str) -> subprocess.Popen[bytes]:
        rules = (f"--budget=cores={self.cores}", f"--policy={policy}", "--interval=1s")
        command = ["pool", "run", *rules, f"--endpoint={self.endpoint}"]
        self.brains.append(self._start(command, f"brain-{len(self.brains)}"))
        return self.brains[-1]

    def submit(self, arrival: Arrival) -> None:
        """Start a job, or start it again after it was killed."""
        command = [
            *("run", "--pool=default", f"--rdzv-id={arrival.name}", f"--workers={arrival.workers}", *self.options),
            *(f"--endpoint={self.endpoint}", f"--run-dir={self.folder / 'runs'}", str(SCRIPT)),
            *(
                f"--steps={arrival.steps}",
                f"--width={arrival.width}",
                f"--step-s={arrival.step_s}",
                f"--sample-s={arrival.sample_s}",
                f"--checkpoints={self.folder / 'checkpoints' / arrival.name}",
            ),
        ]
        before = self.jobs.get(arrival.name)
        at = before.at if before is not None else time.monotonic()
        job = self.jobs[arrival.name] = _Submitted(arrival, at, self._start(command, arrival.name))
        threading.Thread(target=job.await_end, daemon=True).start()

    def ended(self) -> list[Ended]:
        """Jobs that have ended so far, in the order of their ends."""
        ends = [(job.at + job.ended.jct_s, job.ended) for job in self.jobs.values() if job.ended is not None]
        return [end for _, end in sorted(ends, key=lambda pair: pair[0])]

    def workers(self) -> dict[str, int]:
        """Training processes of each job now."""
        return {name: _num_workers(job.process.pid) for name, job in list(self.jobs.items()) if job.process.poll() is None}

    def wait_for(self, what: str, found: Callable[[], object], timeout_s: float) -> None:
        """Poll a function until it returns true.

        Raises:
            BenchmarkError: it did not in time.
        """

        def report() -> str:
            return f"workers: {self.workers()}; {ends_of_logs(self.folder, 6)}"

        eventually(found, what, timeout_s, 0.1, report=report, error=BenchmarkError)

    def wait_for_end(self, name: str, timeout_s: float) -> None:
        """Wait until a job has ended.

        Raises:
            BenchmarkError: it has not in time.
        """
        self.wait_for(f"the end of {name}", lambda: any(end.name == name for end in self.ended()), timeout_s)

    def _start(self, arguments: Sequence[str], name: str) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "DLROVER_HISTORY": "off"}
        return start_logged([*DLROVER, *arguments], self.folder / f"{name}.log", environment, self.folder)

    def _audit(self) -> None:
        """Measure for how long there were more workers than cores. Processes are counted, so etcd may be away."""
        since: float | None = None
        while not self._stop.wait(SAMPLE_S):
            total, now = sum(self.workers().values()), time.monotonic()
            if total > self.cores:
                since = since if since is not None else now
                self.worst_excess_s = max(self.worst_excess_s, now - since)
            else:
                since = None


def _num_workers(pid: int) -> int:
    found = 0
    for child in children(pid, recursive=True):
        with contextlib.suppress(psutil.Error):
            command = child.cmdline()
            found += str(SCRIPT) in command and not any("rdzv" in part for part in command)
    return found
