"""Show a live elastic job from start to finish, on this machine. `make run` executes this script.

It starts `dlrover run --workers 1:2 examples/train_ctr.py`, or `examples/train_dlrm.py` for a folder of Parquet files:

    make run                                                          generated rows
    make run ARGS="--data FOLDER"                                     Adult files, a Criteo-format TSV, or a Parquet folder

From then on it only watches and disturbs the job: it waits until the planner has grown the job to two workers, kills one with
SIGKILL, and waits for its replacement. Then it asks for one worker, waits for the shrink, and ends training. Every wait has a
deadline. The exit code is 0 only if every stage happened.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from ctr_parquet import is_click_folder

from lightning_dlrover.codec import RecordError
from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.etcd.types import EtcdConfig, EtcdError
from lightning_dlrover.rdzv.job.records import EventRecord, Keys, PlanRecord, RoundRecord, WorkerRecord, decode
from lightning_dlrover.report.page import summary_text

T = TypeVar("T")

REPOSITORY = Path(__file__).resolve().parents[1]
SCRIPT = REPOSITORY / "examples" / "train_ctr.py"
STREAMS_SCRIPT = REPOSITORY / "examples" / "train_dlrm.py"  # reads folders of Parquet files
POLL_S = 0.1
END_S = 10.0  # seconds from the end of the job's etcd to the job's own end
STEADY_S = 8.0  # seconds of training between two changes, so that the pictures show each size
ENOUGH = "enough"  # file in the job's folder that ends training
MAX_EPOCHS = 1000  # training ends with the show, on a slow machine as on a fast one


class DemoError(RuntimeError):
    """A stage that did not happen. The message names the awaited event and the logs to read."""


@dataclass(frozen=True)
class JobFile:
    """Fields of `runs/<id>/job.json`, as `dlrover run` writes it, that the demo needs."""

    endpoint: str
    prefix: str


def start(run_id: str, run_dir: Path, script: Path, script_arguments: list[str]) -> Demo:
    """Start `dlrover run` on an example. Its output goes to a file next to the run's folder."""
    command = [sys.executable, "-m", "lightning_dlrover.cli", "run", "--workers", "1:2"]
    command += ["--rdzv-id", run_id, "--run-dir", str(run_dir)]
    command += ["--history", "off"]  # keeps earlier runs from changing the demo
    command += [str(script), *script_arguments]
    run_dir.mkdir(parents=True, exist_ok=True)
    log = run_dir / f"{run_id}.log"
    with log.open("wb") as output:
        # Its own session: Ctrl-C reaches it once, from `Demo.stop`, and not a second time from the terminal.
        process = subprocess.Popen(
            command,
            cwd=REPOSITORY,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return Demo(run_id, run_dir / run_id, log, process, script)


class Demo:
    """One job under observation."""

    def __init__(self, run_id: str, folder: Path, log: Path, process: subprocess.Popen[bytes], script: Path = SCRIPT) -> None:
        self.run_id = run_id
        self.script = script
        self.folder = folder
        self.log = log
        self.process = process
        self.started_at = time.monotonic()
        self._client: EtcdClient | None = None
        self._keys = Keys(run_id)

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.started_at:6.1f} s] {text}", flush=True)

    def connect(self) -> None:
        job = self.wait("dlrover run to start etcd and write job.json", self._job_file, timeout_s=60)
        self._client = EtcdClient(EtcdConfig(job.endpoint))
        self._keys = Keys(self.run_id, job.prefix)

    def wait(self, what: str, look: Callable[[], T | None], timeout_s: float) -> T:
        """Poll `look` and return its first result that is not None.

        Raises:
            DemoError: the job ended, or nothing was found within `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                found = look()
            except EtcdError as error:
                # The job's etcd ends with the job. The job's exit is then the more useful message.
                try:
                    self.process.wait(END_S)
                except subprocess.TimeoutExpired:
                    raise DemoError(f"while waiting for {what}: {error}") from error
                found = None
            except RecordError as error:
                raise DemoError(f"while waiting for {what}: {error}") from error
            if found is not None:
                return found
            if self.process.poll() is not None:
                raise DemoError(
                    f"the job ended (exit code {self.process.returncode}) while waiting for {what}; see its output below"
                )
            if time.monotonic() > deadline:
                raise DemoError(f"no sign of {what} within {timeout_s:.0f} s; the job's output is in {self.log}")
            time.sleep(POLL_S)

    def round_of(self, num_workers: int, after: int = 0, without: str = "") -> Callable[[], RoundRecord | None]:
        """Return a function that looks for a round of this size, newer than round `after` and without the worker `without`."""

        def look() -> RoundRecord | None:
            found = self.round()
            if found is None or found.number <= after or len(found.members) != num_workers or without in found.members:
                return None
            return found

        return look

    def round_without(self, worker_id: str, after: int) -> Callable[[], RoundRecord | None]:
        """Return a function that looks for a round of any size, newer than `after`, without the member `worker_id`."""

        def look() -> RoundRecord | None:
            found = self.round()
            return found if found is not None and found.number > after and worker_id not in found.members else None

        return look

    def round(self) -> RoundRecord | None:
        return self._read(RoundRecord, self._keys.round)

    def plan(self) -> PlanRecord | None:
        return self._read(PlanRecord, self._keys.plan)

    def plan_for(self, num_workers: int) -> Callable[[], PlanRecord | None]:
        """Return a function that looks for the planner's plan of this many workers."""

        def look() -> PlanRecord | None:
            found = self.plan()
            return found if found is not None and (found.num_workers, found.source) == (num_workers, "planner") else None

        return look

    def train_steadily(self) -> None:
        begun = time.monotonic()
        self.wait("steady training", lambda: True if time.monotonic() - begun > STEADY_S else None, STEADY_S + 5)

    def kill(self, worker_id: str) -> None:
        """Send SIGKILL to one worker of this job and to nothing else.

        Raises:
            DemoError: its record or its process does not match the one that we started.
        """
        worker = self._read(WorkerRecord, self._keys.workers + worker_id)
        if worker is None:
            raise DemoError(f"worker {worker_id} has no record in etcd, so its process is unknown")
        # Process ids are reused and etcd may be shared, so both must match.
        command = _command_line(worker.pid)
        if worker.host not in (os.uname().nodename, "localhost") or str(self.script) not in command:
            raise DemoError(f"process {worker.pid} of {worker.host} is not a worker of this demo; nothing was killed")
        try:
            os.kill(worker.pid, signal.SIGKILL)
        except OSError as error:
            raise DemoError(f"worker {worker_id}: process {worker.pid} cannot be killed ({error.strerror})") from error

    def scale(self, num_workers: int) -> None:
        command = [sys.executable, "-m", "lightning_dlrover.cli", "scale", "--run-dir", str(self.folder.parent)]
        command += [self.run_id, str(num_workers)]
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False)
        if done.returncode != 0:
            raise DemoError(f"dlrover scale {self.run_id} {num_workers} failed: {(done.stderr or done.stdout).strip()}")

    def finish(self, timeout_s: float) -> None:
        """Let training end, and wait for the job's end.

        Raises:
            DemoError: it failed, or did not end in time.
        """
        (self.folder / ENOUGH).touch()
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            raise DemoError(f"the job did not finish within {timeout_s:.0f} s; its output is in {self.log}") from error
        if code != 0:
            raise DemoError(f"the job failed with exit code {code}")

    def stop(self) -> None:
        """End the job if it still runs: first as Ctrl-C would, then with SIGKILL."""
        if self._client is not None:
            self._client.close()
        for number, patience_s in ((signal.SIGINT, 20.0), (signal.SIGTERM, 10.0), (signal.SIGKILL, 5.0)):
            if self.process.poll() is not None:
                return
            self.process.send_signal(number)
            try:
                self.process.wait(patience_s)
            except subprocess.TimeoutExpired:
                continue

    def events(self) -> list[EventRecord]:
        path = self.folder / "events.jsonl"
        lines = path.read_bytes().splitlines() if path.exists() else []
        events = []
        for number, line in enumerate(lines, start=1):
            try:
                events.append(decode(EventRecord, line, f"{path}, line {number}"))
            except RecordError:
                continue  # the last line of a job that was stopped may be cut short
        return events

    def metrics(self) -> dict[str, Any]:
        """Metrics that the script measured at its end.

        Raises:
            DemoError: it wrote no readable metrics.
        """
        path = self.folder / "metrics.json"
        try:
            found: dict[str, Any] = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise DemoError(f"the job finished, but {path} cannot be read: {error}") from error
        return found

    def _job_file(self) -> JobFile | None:
        try:
            found = json.loads((self.folder / "job.json").read_text())
            return JobFile(str(found["endpoint"]), str(found["prefix"]))
        except (OSError, ValueError, KeyError):
            return None  # missing or incomplete

    def _read(self, record_type: type[T], key: str) -> T | None:
        assert self._client is not None
        found = self._client.get(key)
        return None if found is None else decode(record_type, found.value, key)


def main() -> int:
    parser = argparse.ArgumentParser(description="Grow, kill, replace and shrink a live training job on this machine.")
    parser.add_argument("--data", type=Path, help="Adult folder, Criteo-format TSV, or Parquet folder of criteo_to_parquet.py")
    parser.add_argument("--rdzv-id", default=time.strftime("demo-%Y%m%d-%H%M%S"), help="name of the job")
    parser.add_argument("--run-dir", type=Path, default=REPOSITORY / "runs")
    parser.add_argument("--width", type=int, help="hidden units (default: the script's)")
    parser.add_argument("--lr", type=float, help="learning rate (default: 3e-4, with a Parquet folder the script's)")
    given = parser.parse_args()

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    run_dir = given.run_dir.resolve()
    script = script_for(given.data)
    learning_rate = 3e-4 if given.lr is None and script == SCRIPT else given.lr
    arguments = ["--epochs", str(MAX_EPOCHS)]
    arguments += ["--width", str(given.width)] if given.width is not None else []
    arguments += ["--lr", str(learning_rate)] if learning_rate is not None else []
    arguments += ["--output", str(run_dir / given.rdzv_id), "--until", str(run_dir / given.rdzv_id / ENOUGH)]
    if given.data is not None:
        arguments += ["--data", str(given.data.resolve())]
    demo = start(given.rdzv_id, run_dir, script, arguments)
    try:
        play(demo)
    except DemoError as error:
        demo.stop()
        print(f"\nlast lines of {demo.log}:\n{_tail(demo.log)}\n\ndemo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        demo.say("interrupted: ending the job")
        return 130
    finally:
        demo.stop()
    return 0


def script_for(data: Path | None) -> Path:
    """Return the script that reads these data."""
    return STREAMS_SCRIPT if data is not None and is_click_folder(data) else SCRIPT


PLANNER_S = 30.0
"""Seconds for the planner to choose another worker. On some machines more threads for one worker are better."""


def play(demo: Demo) -> None:
    """Run all stages, in order.

    Raises:
        DemoError: a stage did not happen.
    """
    demo.say(f"dlrover run --workers 1:2 --rdzv-id {demo.run_id} examples/{demo.script.name}; its output goes to {demo.log}")
    demo.connect()
    first = demo.wait("the first round", demo.round_of(1), timeout_s=60)
    demo.say("1 worker trains; waiting for the planner to want another one")
    try:
        demo.wait("the planner to want 2 workers", demo.plan_for(2), timeout_s=PLANNER_S)
    except DemoError:
        plan = demo.plan()
        demo.say(f"the planner wants other settings, not more workers{f': {plan.reason}' if plan else ''}")
        demo.scale(2)
        demo.say(f"dlrover scale {demo.run_id} 2")
    grown = demo.wait("the job to grow to 2 workers", demo.round_of(2, after=first.number), timeout_s=60)
    plan = demo.plan()
    demo.say(f"grown to 2 workers while training (round {grown.number}). {plan.reason if plan else ''}")
    demo.scale(2)  # fixed by hand, because the planner might shrink the job before all stages were shown
    demo.train_steadily()

    victim = grown.members[-1]
    demo.kill(victim)
    demo.say(f"killed worker {victim} with SIGKILL")
    lost = demo.wait("the survivor to continue alone", demo.round_without(victim, after=grown.number), timeout_s=30)
    demo.say(f"round {lost.number} continues with {len(lost.members)} worker(s): {lost.reason}")
    replaced = demo.wait(
        "a replacement of the killed worker",
        demo.round_of(2, after=grown.number, without=victim),
        timeout_s=60,
    )
    demo.say(f"replaced (round {replaced.number})")
    demo.train_steadily()

    demo.scale(1)
    demo.say(f"dlrover scale {demo.run_id} 1")
    shrunk = demo.wait("the job to shrink to 1 worker", demo.round_of(1, after=replaced.number), timeout_s=30)
    demo.say(f"shrunk (round {shrunk.number})")
    demo.train_steadily()
    demo.say("trained for long enough: the job ends")
    demo.finish(timeout_s=60)

    metrics = demo.metrics()
    best = "" if metrics.get("best_auc") is None else f" (no model can beat {metrics['best_auc']:.4f})"
    report = demo.folder / "report.html"
    print(f"\n{summary_text(demo.run_id, demo.events())}\n", flush=True)
    print(f"test AUC on {metrics['data']}: {metrics['test_auc']:.4f}{best} after {metrics['steps']} steps")
    if not report.exists():
        raise DemoError(f"the job finished, but it wrote no {report}")
    print(f"report with pictures: {report}")


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _command_line(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


def _tail(path: Path, num_lines: int = 30) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-num_lines:])


if __name__ == "__main__":
    sys.exit(main())
