"""Cost of our strategy and callback while the job does not change: step times against Lightning's stock DDPStrategy.

    python benchmarks/overhead.py [--cycles N] [--equal-malloc] [--quick]

Three jobs of two workers are alive at once: stock DDP (torchrun, c10d backend), ours, and ours with `DLRoverCallback`. They
take turns in blocks of a second or so, so that other load on the machine affects all alike. The waiting jobs are stopped by
SIGSTOP, background threads included. Steps of about 5 ms and of about 50 ms alternate, set by the number of samples.

The ratios are medians of all steps over the median of all stock steps. CPU ms is the CPU time of one worker's threads per
step. The callback's share is an upper bound: its background work follows the wall clock, and a job's own turn is a third of
that.

A live worker keeps the memory that it frees, which alone makes steps shorter. With `--equal-malloc` all three jobs keep it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import TextIO

import torch
from jobs import (
    START_TIMEOUT_S,
    STEP_TIMEOUT_S,
    BenchmarkError,
    Block,
    Job,
    Workspace,
    describe_machine,
    result_line,
    stock_agent,
)
from training import NUM_FEATURES, Perceptron

from lightning_dlrover.rdzv.etcd.server import EmbeddedEtcd

NUM_WORKERS = 2
NUM_IGNORED_STEPS = 5
"""Number of ignored steps at the start of every block: caches are cold, and continued threads have to catch up."""


STEPS_S = {"50ms": 0.050, "5ms": 0.005}
FRAMEWORK_S = 0.004  # approximate time of Lightning, DDP and the optimizer per step
WIDTH, NUM_LAYERS, BATCH_SIZE = 256, 2, 16


class Contestant:
    """One job that makes steps only during its turn."""

    def __init__(self, name: str, job: Job, gate: socket.socket) -> None:
        self.name = name
        self.blocks: dict[str, list[Block]] = {label: [] for label in STEPS_S}  # blocks of rank 0
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

        while len(self._channels) < NUM_WORKERS:
            self._channels.append(self._job.wait_for(f"{self.name} to start", accept, START_TIMEOUT_S))
        self._collect()

    def take_turn(self, label: str, num_steps: int, repeats: int) -> None:
        for pid in self._pids:
            os.kill(pid, signal.SIGCONT)
        for channel in self._channels:
            channel.write(f"{num_steps} {repeats}\n")
            channel.flush()
        self.blocks[label].append(self._collect())

    def _collect(self) -> Block:
        try:
            blocks = [Block.decode(channel.readline()) for channel in self._channels]
        except (TimeoutError, ValueError) as error:
            raise BenchmarkError(f"{self.name}: waited {STEP_TIMEOUT_S:.0f} s in vain for a block of steps") from error
        self._pids = [block.pid for block in blocks]
        for pid in self._pids:
            os.kill(pid, signal.SIGSTOP)
        return next(block for block in blocks if block.global_rank == 0)


def repeats_for(step_s: float) -> int:
    """Number of computations on a step's batch that make it take about `step_s`."""
    torch.set_num_threads(1)
    model = Perceptron(WIDTH, NUM_LAYERS)

    def cpu_s(repeats: int) -> float:
        inputs = torch.randn(BATCH_SIZE * repeats, NUM_FEATURES)
        took = []
        for _ in range(9):
            started = time.process_time()
            model.net(inputs).sum().backward()
            took.append(time.process_time() - started)
        return statistics.median(took)

    few, many = 2, 52
    return max(1, round((step_s - FRAMEWORK_S) / ((cpu_s(many) - cpu_s(few)) / (many - few))))


KEEP_FREED_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(2**31 - 1), "MALLOC_MMAP_MAX_": "0"}
"""Settings of glibc, see mallopt(3)."""


@contextlib.contextmanager
def contestants(space: Workspace, etcd: EmbeddedEtcd, environment: Mapping[str, str]) -> Iterator[list[Contestant]]:
    live = ["--rdzv-backend=etcd-v3", f"--rdzv-endpoint={etcd.endpoint}", "--rdzv-conf=live=1", "--nnodes=1:2"]
    live += [f"--nproc-per-node={NUM_WORKERS}", "--max-restarts=0"]
    model = [f"--width={WIDTH}", f"--num-layers={NUM_LAYERS}", f"--batch-size={BATCH_SIZE}"]
    kinds = {
        "stock": (stock_agent(NUM_WORKERS), ["--strategy=ddp"]),
        "strategy": ([*live, "--rdzv-id=strategy"], ["--strategy=dlrover"]),
        "callback": ([*live, "--rdzv-id=callback"], ["--strategy=dlrover", "--profiled"]),
    }
    with contextlib.ExitStack() as stack:
        found = []
        for name, (torchrun_options, arguments) in kinds.items():
            address = space.folder / f"{name}.gate"
            gate = stack.enter_context(socket.socket(socket.AF_UNIX))
            gate.bind(str(address))
            gate.listen(NUM_WORKERS)
            job = stack.enter_context(space.job(name, [*arguments, *model, f"--gate={address}"]))
            job.environment.update(environment)
            # A stopped worker cannot renew its lease.
            job.environment["DLROVER_LEASE_TTL_S"] = "120"
            job.start_agent(torchrun_options)
            found.append(Contestant(name, job, gate))
        for contestant in found:
            contestant.wait_at_gate()
        yield found


def report(label: str, found: list[Contestant]) -> dict[str, float | int]:
    """Print a table; return the ratios of medians to stock."""
    measured = {c.name: [block.durations_s[NUM_IGNORED_STEPS:] for block in c.blocks[label]] for c in found}
    steps = {name: list(chain.from_iterable(blocks)) for name, blocks in measured.items()}
    medians = {name: statistics.median(of_job) for name, of_job in steps.items()}
    means = {name: statistics.mean(of_job) for name, of_job in steps.items()}
    block_medians = {name: [statistics.median(block) for block in blocks] for name, blocks in measured.items()}
    cpu_s = {c.name: statistics.median(b.cpu_s / len(b.durations_s) for b in c.blocks[label]) for c in found}
    columns = (
        f"{'median ms':>11}{'mean ms':>9}{'p90 ms':>9}{'CPU ms':>9}{'steps':>7}{'ratio':>8}{'of means':>10}{'by block':>10}"
    )
    print(f"{label + ' steps':12}{columns}")
    for name, of_job in steps.items():
        by_block = statistics.median(a / b for a, b in zip(block_medians[name], block_medians["stock"], strict=True))
        milliseconds = (medians[name], means[name], statistics.quantiles(of_job, n=10)[-1], cpu_s[name])
        print(
            f"{name:11}{''.join(f' {1e3 * s:8.3f}' for s in milliseconds)} {len(of_job):8}"
            f"{medians[name] / medians['stock']:8.3f}{means[name] / means['stock']:10.3f}{by_block:10.3f}",
            flush=True,
        )
    return {f"{name}_{label}": medians[name] / medians["stock"] for name in medians if name != "stock"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cycles", type=int, default=24, help="turns of every job")
    parser.add_argument("--equal-malloc", action="store_true", help="let all jobs keep the memory that they free")
    parser.add_argument("--quick", action="store_true", help="few short turns, under 60 s")
    parser.add_argument("--keep", action="store_true", help="keep logs and records")
    options = parser.parse_args()
    cycles, turn_s = (4, 0.5) if options.quick else (options.cycles, 1.5)
    ratios: dict[str, float | int] = {}
    print(describe_machine(), flush=True)
    repeats = {label: repeats_for(step_s) for label, step_s in STEPS_S.items()}
    environment = KEEP_FREED_MEMORY if options.equal_malloc else {}
    with Workspace("overhead", options.keep) as space, contestants(space, space.etcd(), environment) as found:
        for cycle in range(cycles):
            # Each job follows each other one equally often.
            order = found if cycle % 2 == 0 else found[::-1]
            for label, step_s in STEPS_S.items():
                for contestant in order[cycle % 3 :] + order[: cycle % 3]:
                    contestant.take_turn(label, NUM_IGNORED_STEPS + round(turn_s / step_s), repeats[label])
        for label in STEPS_S:
            ratios |= report(label, found)
    names = ("strategy_50ms", "strategy_5ms", "callback_50ms", "callback_5ms")
    print(result_line({name: ratios[name] for name in names}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
