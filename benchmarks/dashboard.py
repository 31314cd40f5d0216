"""What the page of `dlrover serve` costs, with simulated records of many jobs in a real etcd.

    python benchmarks/dashboard.py [--quick] [--jobs 100] [--workers 10] [--viewers 20]

The records change as those of training jobs do: each job writes its progress every eight seconds, and a window of steps every
minute. Half of the viewers look at the list of all jobs, the others at a job each. The server is a process of its own.

The last line holds: `first_paint_s`, the median time from the request for the list to its first drawing in Chromium, or to the
last byte of the list where there is no Chromium; `core_per_viewer`, the server's CPU time per second and viewer, less that
without viewers; `etcd_rps`, the reads per second that etcd gets from the server, whatever the number of viewers.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil
from jobs import describe_machine, result_line

from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.server import EmbeddedEtcd
from lightning_dlrover.rdzv.etcd.types import EtcdConfig
from lightning_dlrover.rdzv.job.records import Keys, ProgressRecord, encode
from tests.support.recorded_jobs import recorded_job, window_event

PROGRESS_EVERY_S = 8.0
WINDOW_EVERY_S = 60.0
START_S = 60.0
NUM_PAINTS = 5


class Size(NamedTuple):
    jobs: int
    workers: int  # of each job
    viewers: int
    seconds: float  # of each measurement


class Changes(threading.Thread):
    """Writes what the jobs' rank 0 would write."""

    def __init__(self, client: EtcdClient, size: Size) -> None:
        super().__init__(daemon=True)
        self._client = client
        self._size = size
        self._stopped = threading.Event()

    def run(self) -> None:
        step, number = 900, 1_000
        while not self._stopped.is_set():
            step += 80
            for job in range(self._size.jobs):
                if self._stopped.wait(PROGRESS_EVERY_S / self._size.jobs):
                    return
                keys, now = Keys(f"job-{job:03d}"), time.time()
                rate = 5000.0 + random.random() * 200
                record = ProgressRecord(step, 0, step, self._size.workers, rate, 2, 100_000, 120.0, "0.4", now)
                self._client.put(keys.progress, encode(record))
                if random.random() < PROGRESS_EVERY_S / WINDOW_EVERY_S:
                    number += 1
                    self._client.put(f"{keys.events}{number:020d}-w", encode(window_event(now, step)))

    def stop(self) -> None:
        self._stopped.set()
        self.join(10)


class Viewer(threading.Thread):
    """Reads a stream of events, as an open page does."""

    def __init__(self, port: int, path: str) -> None:
        super().__init__(daemon=True)
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        self._path = path
        self.num_bytes = 0
        self.has_begun = threading.Event()

    def run(self) -> None:
        with contextlib.suppress(OSError, http.client.HTTPException, ValueError, AttributeError):  # closed by the main thread
            self._connection.request("GET", self._path)
            answer = self._connection.getresponse()
            while line := answer.readline():
                self.num_bytes += len(line)
                if line.startswith(b"data: "):
                    self.has_begun.set()

    def close(self) -> None:
        if self._connection.sock is not None:
            with contextlib.suppress(OSError):
                self._connection.sock.shutdown(2)
        self._connection.close()


def num_reads(etcd: EmbeddedEtcd) -> int:
    """Return the reads and watches that etcd has begun. The benchmark itself only puts."""
    with urllib.request.urlopen(f"http://{etcd.endpoint}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    found = re.findall(r'grpc_server_started_total\{grpc_method="(?:Range|Txn|Watch|Status)",[^}]*\} (\S+)', text)
    return int(sum(map(float, found)))


@contextlib.contextmanager
def server(etcd: EmbeddedEtcd, folder: Path) -> Iterator[tuple[psutil.Process, int]]:
    """Run `dlrover serve`, and yield its process and port."""
    command = [sys.executable, "-c", "import sys; from lightning_dlrover.cli.main import main; sys.exit(main())"]
    command += ["serve", "--port", "0", "--endpoint", etcd.endpoint, "--history", "off"]
    log = folder / "serve.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=folder, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + START_S
        while (found := re.search(r"http://127\.0\.0\.1:(\d+)/", log.read_text())) is None:
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"dlrover serve has not started: {log.read_text()}")
            time.sleep(0.1)
        yield psutil.Process(process.pid), int(found[1])
    finally:
        process.terminate()
        process.wait(20)


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def measure(process: psutil.Process, etcd: EmbeddedEtcd, seconds: float) -> tuple[float, float]:
    """Return the cores that the server keeps busy, and etcd's reads per second."""
    reads, used, began = num_reads(etcd), cpu_s(process), time.monotonic()
    time.sleep(seconds)
    passed_s = time.monotonic() - began
    return (cpu_s(process) - used) / passed_s, (num_reads(etcd) - reads) / passed_s


def paint_s(port: int, folder: Path) -> tuple[float, str]:
    """Return the median time to the first drawing of the list, and how it was measured."""
    if (shutil.which("chromium") or shutil.which("chromium-browser")) is not None:
        with contextlib.suppress(ImportError):
            from tests.support.browser import browser

            with browser(folder) as tab:
                times = []
                for _ in range(NUM_PAINTS + 1):
                    tab.open(f"http://127.0.0.1:{port}/")
                    times.append(float(tab.wait_for("document.documentElement.dataset.painted")) / 1000)
                return statistics.median(times[1:]), "Chromium, its start excluded"
    times = []
    for _ in range(NUM_PAINTS):
        began = time.monotonic()
        for path in ("/", "/static/page.css", "/static/page.js"):
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as answer:
                answer.read()
        viewer = Viewer(port, "/api/events")
        viewer.start()
        viewer.has_begun.wait(30)
        times.append(time.monotonic() - began)
        viewer.close()
    return statistics.median(times), "without a browser: until the list has arrived"


def run(size: Size, folder: Path) -> dict[str, float]:
    records = recorded_job(size.workers, at=time.time() - 120.0)
    with EmbeddedEtcd() as etcd, EtcdClient(EtcdConfig(etcd.endpoint)) as client:
        for job in range(size.jobs):
            root = Keys(f"job-{job:03d}").root
            for path, value in records.items():
                client.put(root + path, value)
        changes = Changes(client, size)
        changes.start()
        with server(etcd, folder) as (process, port):
            time.sleep(3.0)
            idle, idle_rps = measure(process, etcd, size.seconds)
            paths = ["/api/events" if n % 2 else f"/api/events?job=job-{n % size.jobs:03d}" for n in range(size.viewers)]
            viewers = [Viewer(port, path) for path in paths]
            for viewer in viewers:
                viewer.start()
            missing = [viewer for viewer in viewers if not viewer.has_begun.wait(30)]
            if missing:
                raise SystemExit(f"{len(missing)} of {size.viewers} viewers got nothing within 30 s")
            before = sum(viewer.num_bytes for viewer in viewers)
            busy, busy_rps = measure(process, etcd, size.seconds)
            per_viewer = (sum(viewer.num_bytes for viewer in viewers) - before) / size.seconds / size.viewers
            paint, how = paint_s(port, folder)
            for viewer in viewers:
                viewer.close()
            memory = process.memory_info().rss / 2**20
        changes.stop()
    print(f"{size.jobs} jobs of {size.workers} workers each, {size.viewers} viewers, {size.seconds:.0f} s each")
    print(f"server without viewers: {idle:.3f} cores, {idle_rps:.2f} reads/s from etcd")
    print(f"server with viewers:    {busy:.3f} cores, {busy_rps:.2f} reads/s from etcd, {memory:.0f} MiB")
    print(f"a viewer gets {per_viewer / 1000:.1f} kB/s; first paint {paint:.2f} s ({how}), with all others watching")
    return {
        "first_paint_s": round(paint, 3),
        "core_per_viewer": round(max(0.0, busy - idle) / size.viewers, 4),
        "etcd_rps": round(busy_rps, 2),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="10 jobs, 4 viewers, 5 s")
    parser.add_argument("--jobs", type=int, default=100)
    parser.add_argument("--workers", type=int, default=10, help="workers of each job")
    parser.add_argument("--viewers", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=30.0, help="duration of each measurement")
    options = parser.parse_args(arguments)
    size = Size(options.jobs, options.workers, options.viewers, options.seconds)
    if options.quick:
        size = Size(10, 4, 4, 5.0)
    print(describe_machine())
    with tempfile.TemporaryDirectory(prefix="dlrover-dashboard-") as folder:
        found = run(size, Path(folder))
    print(result_line(found))


if __name__ == "__main__":
    main()
