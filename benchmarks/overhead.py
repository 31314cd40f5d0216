"""Cost of our strategy and callback while the job does not change: step times against Lightning's stock DDPStrategy.

    python benchmarks/overhead.py [--starts N] [--seconds S] [--steps 50ms] [--equal-malloc] [--quick]
    python benchmarks/overhead.py --device cuda [--backend NAME] [--workers N] ...

Five jobs are alive at once: stock DDP (torchrun, c10d backend), the same again as a control, ours, ours without its search for
replicas that drift apart (`on_drift="ignore"`), and ours with `DLRoverCallback`. Each has two workers; on a GPU, which all
jobs share, it has one. Steps of about 5 ms and of about 50 ms alternate, set by the number of samples. A live worker keeps the
memory that it frees, which alone makes steps shorter. With `--equal-malloc` all jobs keep it.

A machine's speed drifts by more than the differences that are measured here, so jobs are compared within a few seconds:
  - In each round every job takes one short turn, in random order. The jobs that wait are stopped by SIGSTOP, background threads
    included.
  - A round gives one ratio for each job: the median of its steps over the mean of the two stock jobs' medians.
  - The result is the median ratio over all rounds. Its interval contains 95 % of the medians of bootstrap samples of rounds.
  - Rounds in which other programs took more than a few percent of the cores are left out, unless there is no other.
  - The control is compared with the other stock job. Both run one program, so the control's distance from 1 is the floor of the
    measurement: smaller differences of our jobs mean nothing.
  - The place of a process in memory makes it faster or slower for as long as it lives. `--starts` starts all jobs anew, in
    other places; the last column has the ratio of each start.

A median leaves out whatever does not happen in every step, such as votes. The ratio of means contains it, and more noise.
CPU ms is the CPU time of one worker per step, `others` its part outside of the training thread. They are for whole turns, with
the first steps, in which threads catch up with the time in which the job was stopped. Background work follows the wall clock,
and a job's own turns are a fifth of that, so the share of background threads is an upper bound.

That search takes less than such a comparison can show. So its checksums are also timed by themselves, in this process.

On a GPU each turn is timed as a whole, as the host makes steps ahead of the device: its median is its mean.

Ctrl-C and SIGTERM end the measurement early; the rounds made so far are reported.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, TextIO

import numpy as np
import psutil
import torch
from jobs import (
    START_TIMEOUT_S,
    STEP_TIMEOUT_S,
    BenchmarkError,
    Block,
    Job,
    Workspace,
    add_device_options,
    describe_machine,
    device_arguments,
    result_line,
)
from training import NUM_FEATURES, Perceptron, wait_for_device

from lightning_dlrover.live.agreement import PERIOD_STEPS, DriftCheck
from lightning_dlrover.rdzv.etcd.server import EmbeddedEtcd

CHECK_INTERVAL_S = 0.1
"""Approximate seconds between two votes, as by default."""

NUM_WORKERS = {"cpu": 2, "cuda": 1}
NUM_IGNORED_STEPS = 4
"""Number of ignored steps at the start of every turn: caches are cold, and continued threads have to catch up."""

MAX_FOREIGN = 0.05
"""Maximum share of all cores that other programs may take in a turn."""

NUM_BOOTSTRAPS = 4000
STOCK, CONTROL = "stock", "control"
OURS = ("strategy", "unchecked", "callback")


@dataclass(frozen=True)
class Load:
    """One length of steps."""

    step_s: float
    num_steps: int  # measured steps in a turn


LOADS = {"50ms": Load(0.050, 12), "5ms": Load(0.005, 40)}
FRAMEWORK_S = 0.004  # approximate time of Lightning, DDP and the optimizer per step
WIDTHS = {"cpu": 256, "cuda": 2048}
NUM_LAYERS, BATCH_SIZE = 2, 16


@dataclass(frozen=True)
class Turn:
    """One job's measured steps of one round, and the load beside them."""

    step_s: Sequence[float]  # seconds of each step of rank 0
    cpu_s: float  # CPU time of rank 0 per step
    other_threads_s: float  # part of it outside of the training thread
    foreign: float  # share of all cores that other programs took


class Contestant:
    """One job that makes steps only during its turn."""

    def __init__(self, name: str, job: Job, gate: socket.socket, num_workers: int) -> None:
        self.name = name
        self._num_workers = num_workers
        self._job = job
        self._gate = gate
        self._channels: list[TextIO] = []
        self._pids: list[int] = []

    def wait_at_gate(self) -> None:
        """Run the first, unmeasured block: the job starts up, and then stops."""
        self._gate.settimeout(1.0)

        def accept() -> TextIO | None:
            with contextlib.suppress(TimeoutError):
                connection, _ = self._gate.accept()
                connection.settimeout(STEP_TIMEOUT_S)
                return connection.makefile("rw")
            return None

        while len(self._channels) < self._num_workers:
            self._channels.append(self._job.wait_for(f"{self.name} to start", accept, START_TIMEOUT_S))
        self._collect()

    def take_turn(self, num_steps: int, repeats: int) -> Turn:
        began, busy_s = time.perf_counter(), _busy_s()
        for pid in self._pids:
            os.kill(pid, signal.SIGCONT)
        for channel in self._channels:
            channel.write(f"{num_steps} {repeats}\n")
            channel.flush()
        blocks = self._collect()
        elapsed_s = time.perf_counter() - began
        own_s = sum(
            block.cpu_s * (1 + 1 / len(block.durations_s)) for block in blocks
        )  # includes the first step, which is not counted there
        foreign = (_busy_s() - busy_s - own_s) / (elapsed_s * (os.cpu_count() or 1))
        first = next(block for block in blocks if block.global_rank == 0)
        made = len(first.durations_s)
        return Turn(first.durations_s[NUM_IGNORED_STEPS:], first.cpu_s / made, first.other_threads_s / made, foreign)

    def _collect(self) -> list[Block]:
        try:
            blocks = [Block.decode(channel.readline()) for channel in self._channels]
        except (TimeoutError, ValueError) as error:
            raise BenchmarkError(f"{self.name}: waited {STEP_TIMEOUT_S:.0f} s in vain for a block of steps") from error
        self._pids = [block.pid for block in blocks]
        for pid in self._pids:
            os.kill(pid, signal.SIGSTOP)
        return blocks


def _busy_s() -> float:
    """Return the CPU time of all programs so far, and that taken by the host of a virtual machine."""
    times = psutil.cpu_times()
    return float(sum(getattr(times, name, 0.0) for name in ("user", "nice", "system", "irq", "softirq", "steal")))


def drift_check_s(step_s: float, device: str) -> float:
    """Return the seconds per step that a worker needs for its checksums of weights and optimizer states."""
    torch.set_num_threads(1)
    model = Perceptron(WIDTHS[device], NUM_LAYERS).to(device)
    optimizer: Any = model.configure_optimizers()
    model.net(torch.randn(BATCH_SIZE, NUM_FEATURES, device=device)).sum().backward()
    optimizer.step()
    root_device = next(model.parameters()).device
    loaders = SimpleNamespace(batch_number=0)
    strategy = SimpleNamespace(on_drift="end", sharded_names=set(), tables=None, root_device=root_device)
    trainer: Any = SimpleNamespace(strategy=strategy, lightning=SimpleNamespace(lightning_module=model, optimizers=[optimizer]))
    position: Any = SimpleNamespace(size=2, formation=SimpleNamespace(round=SimpleNamespace(number=1)))
    batches: Any = loaders
    nobody: Any = None  # neither events nor collectives are needed while the workers agree
    check, every, took_s = DriftCheck(nobody, batches, trainer, position), max(1, round(CHECK_INTERVAL_S / step_s)), 0.0
    num_votes = 20 * PERIOD_STEPS // every
    for vote in range(10 + num_votes):
        loaders.batch_number += every
        wait_for_device(model)
        began = time.perf_counter()
        check.ballot()
        wait_for_device(model)
        took_s += time.perf_counter() - began if vote >= 10 else 0.0
    return took_s / (num_votes * every)


def repeats_for(step_s: float, device: str) -> int:
    """Number of computations on a step's batch that make it take about `step_s`."""
    torch.set_num_threads(1)
    model = Perceptron(WIDTHS[device], NUM_LAYERS).to(device)

    def computing_s(repeats: int) -> float:
        inputs = torch.randn(BATCH_SIZE * repeats, NUM_FEATURES, device=device)
        took = []
        for _ in range(9):
            wait_for_device(model)
            started = time.process_time() if device == "cpu" else time.perf_counter()
            model.net(inputs).sum().backward()
            wait_for_device(model)
            took.append((time.process_time() if device == "cpu" else time.perf_counter()) - started)
        return statistics.median(took)

    few, many = (2, 52) if device == "cpu" else (100, 1000)
    of_framework_s = FRAMEWORK_S if device == "cpu" else 0.0  # a GPU computes at the same time
    return max(1, round((step_s - of_framework_s) / ((computing_s(many) - computing_s(few)) / (many - few))))


KEEP_FREED_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(2**31 - 1), "MALLOC_MMAP_MAX_": "0"}
"""Settings of glibc, see mallopt(3)."""


@contextlib.contextmanager
def contestants(
    space: Workspace, etcd: EmbeddedEtcd, start: int, environment: Mapping[str, str], options: argparse.Namespace
) -> Iterator[list[Contestant]]:
    num_agents = 1 if options.device == "cpu" else options.workers
    live = ["--rdzv-backend=etcd-v3", f"--rdzv-endpoint={etcd.endpoint}", "--rdzv-conf=live=1", "--max-restarts=0"]
    live += [f"--nnodes={num_agents}:{num_agents + 1}", f"--nproc-per-node={options.workers // num_agents}"]
    model = [f"--width={WIDTHS[options.device]}", f"--num-layers={NUM_LAYERS}", f"--batch-size={BATCH_SIZE}"]
    model += device_arguments(options)
    kinds = {
        STOCK: ["--strategy=ddp"],
        CONTROL: ["--strategy=ddp"],
        "strategy": ["--strategy=dlrover"],
        "unchecked": ["--strategy=dlrover", "--on-drift=ignore"],
        "callback": ["--strategy=dlrover", "--profiled"],
    }
    with contextlib.ExitStack() as stack:
        found = []
        for kind, arguments in kinds.items():
            name = f"{kind}{start}"
            address = space.folder / f"{name}.gate"
            gate = stack.enter_context(socket.socket(socket.AF_UNIX))
            gate.bind(str(address))
            gate.listen(options.workers)
            job = stack.enter_context(space.job(name, [*arguments, *model, f"--gate={address}"]))
            job.environment.update(environment)
            # A stopped worker cannot renew its lease.
            job.environment["DLROVER_LEASE_TTL_S"] = "120"
            if kind in OURS:
                for _ in range(num_agents):
                    job.start_agent([*live, f"--rdzv-id={name}"])
            else:
                job.start_stock(options.workers, options.device)
            found.append(Contestant(kind, job, gate, options.workers))
        for contestant in found:
            contestant.wait_at_gate()
        yield found


# --- comparing ----------------------------------------------------------------------------------------------------------------


Summary = Callable[[Sequence[float]], float]
Round = Mapping[str, Turn]
"""One turn of each job, by name."""


def ratio(round_: Round, name: str, summary: Summary) -> float:
    """Return a job's `summary` of its steps over that of the stock jobs; the control's over that of the other one."""
    of_job = {job: summary(turn.step_s) for job, turn in round_.items()}
    return of_job[name] / (of_job[STOCK] if name == CONTROL else statistics.mean((of_job[STOCK], of_job[CONTROL])))


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the bounds of 95 % of the medians of bootstrap samples of `values`."""
    samples = np.random.default_rng(0).choice(np.asarray(values), (NUM_BOOTSTRAPS, len(values)))
    low, high = np.percentile(np.median(samples, axis=1), [2.5, 97.5])
    return float(low), float(high)


def report(label: str, starts: Sequence[Sequence[Round]]) -> dict[str, float | int]:
    """Print a table of all jobs; return their ratios to the stock jobs.

    Args:
        starts: rounds after each start of the jobs.

    Raises:
        BenchmarkError: there is no round.
    """
    num_all = sum(map(len, starts))
    if not num_all:
        raise BenchmarkError(f"the measurement of {label} steps ended before its first round")
    calm = [[r for r in start if all(turn.foreign <= MAX_FOREIGN for turn in r.values())] for start in starts]
    num_calm = sum(map(len, calm))
    counted = calm if num_calm else starts
    rounds = [r for start in counted for r in start]
    left_out = "" if num_calm else ", so all of them count; such a measurement decides nothing"
    print(f"{label} steps: the machine was calm in {num_calm} of {num_all} rounds{left_out}")
    print(f"{'':10}{'median ms':>10}{'CPU ms':>9}{'others':>9}", end="")
    print(f"{'ratio':>8}{'95 %':>15}{'of means':>10}{'95 %':>15}  by start")
    ratios: dict[str, float | int] = {}
    for name in (STOCK, CONTROL, *OURS):
        turns = [r[name] for r in rounds]
        figures = [statistics.median(s for turn in turns for s in turn.step_s)]
        figures += [statistics.median(t.cpu_s for t in turns), statistics.median(t.other_threads_s for t in turns)]
        line = f"{name:10}{1e3 * figures[0]:10.3f}{1e3 * figures[1]:9.3f}{1e3 * figures[2]:9.3f}"
        if name != STOCK:
            medians, means = ([ratio(r, name, summary) for r in rounds] for summary in (statistics.median, statistics.mean))
            ratios[f"{name}_{label}"] = statistics.median(medians)
            for values, width in ((medians, 8), (means, 10)):
                low, high = interval(values)
                line += f"{statistics.median(values):{width}.4f}  {low:.4f}-{high:.4f}"
            by_start = (statistics.median(ratio(r, name, statistics.median) for r in start) for start in counted if start)
            line += "  " + " ".join(f"{each:.4f}" for each in by_start)
        print(line, flush=True)
    return ratios


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_device_options(parser)
    parser.add_argument("--workers", type=int, help="workers of each job (default: 2, on a GPU 1)")
    parser.add_argument("--starts", type=int, default=3, help="times to start all jobs anew")
    parser.add_argument("--seconds", type=float, default=60.0, help="seconds of turns after each start")
    parser.add_argument("--steps", choices=tuple(LOADS), action="append", help="only steps of this length")
    parser.add_argument("--equal-malloc", action="store_true", help="let all jobs keep the memory that they free")
    parser.add_argument("--quick", action="store_true", help="one start and a few seconds of turns")
    parser.add_argument("--seed", type=int, default=0, help="seed of the order of turns")
    parser.add_argument("--keep", action="store_true", help="keep logs and records")
    options = parser.parse_args()
    options.workers = options.workers or NUM_WORKERS[options.device]
    num_starts, turns_s = (1, 10.0) if options.quick else (options.starts, options.seconds)
    loads = {label: load for label, load in LOADS.items() if label in (options.steps or LOADS)}
    order = random.Random(options.seed)
    print(describe_machine(), flush=True)
    repeats = {label: repeats_for(load.step_s, options.device) for label, load in loads.items()}
    environment = KEEP_FREED_MEMORY if options.equal_malloc else {}
    starts: list[dict[str, list[Round]]] = []
    with Workspace("overhead", options.keep) as space, contextlib.suppress(KeyboardInterrupt):
        etcd = space.etcd()
        for start in range(num_starts):
            with contestants(space, etcd, start, environment, options) as found:
                rounds: dict[str, list[Round]] = {label: [] for label in loads}
                starts.append(rounds)
                until = time.monotonic() + turns_s
                while time.monotonic() < until:
                    for label, load in loads.items():
                        num_steps = NUM_IGNORED_STEPS + load.num_steps
                        turns = {c.name: c.take_turn(num_steps, repeats[label]) for c in order.sample(found, len(found))}
                        rounds[label].append(turns)
    ratios: dict[str, float | int] = {}
    for label in loads:
        ratios |= report(label, [rounds[label] for rounds in starts])
    for label, load in loads.items():
        check_s = drift_check_s(load.step_s, options.device)
        print(f"{label} steps: checksums take {1e6 * check_s:.1f} us, {100 * check_s / load.step_s:.3f} % of a step")
        ratios[f"drift_check_{label}"] = check_s / load.step_s
    names = (f"{name}_{label}" for name in (*OURS, CONTROL, "drift_check") for label in loads)
    print(result_line({name: ratios[name] for name in names}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
