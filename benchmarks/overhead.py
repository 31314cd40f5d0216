"""What our strategy and callback cost while nothing changes: step times against Lightning's stock DDPStrategy.

    python benchmarks/overhead.py [--cycles N] [--quick]

Three jobs of two workers are alive at once: stock DDP (torchrun, c10d backend), ours, and ours with `DLRoverCallback`. They
take turns in blocks of a second or so, so that other load on the machine hits all alike; whoever has no turn is stopped by
SIGSTOP, background threads included. Both with steps of about 5 ms and of about 50 ms, by size of the batch.

The ratios are medians of all steps over the median of all stock steps. The callback's share is if anything overstated: its
background work goes by the wall clock, of which a job's own turn is a third.
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
from collections.abc import Iterator
from dataclasses import dataclass
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

from lightning_dlrover.rdzv.server import EmbeddedEtcd

NUM_WORKERS = 2
NUM_IGNORED_STEPS = 5
"""At the start of every block: caches are cold, and threads that were stopped have some work to catch up on."""


@dataclass(frozen=True)
class Workload:
    """A model, and how long a step of it shall take."""

    step_s: float
    framework_s: float  # roughly what Lightning, DDP and the optimizer take of it
    width: int
    num_layers: int


WORKLOADS = {
    "50ms": Workload(step_s=0.050, framework_s=0.008, width=512, num_layers=4),
    "5ms": Workload(step_s=0.005, framework_s=0.0025, width=128, num_layers=2),
}


class Contestant:
    """One job that makes steps only when it is given a turn."""

    def __init__(self, name: str, job: Job, gate: socket.socket) -> None:
        self.name = name
        self.blocks: list[list[float]] = []  # seconds of each step of rank 0
        self._job = job
        self._gate = gate
        self._channels: list[TextIO] = []
        self._pids: list[int] = []

    def wait_at_gate(self) -> None:
        """The first, unmeasured block: the job starts up, and then stops."""
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

    def take_turn(self) -> None:
        for pid in self._pids:
            os.kill(pid, signal.SIGCONT)
        for channel in self._channels:
            channel.write("go\n")
            channel.flush()
        self.blocks.append(self._collect())

    def _collect(self) -> list[float]:
        try:
            blocks = [Block.decode(channel.readline()) for channel in self._channels]
        except (TimeoutError, ValueError) as error:
            raise BenchmarkError(f"{self.name}: waited {STEP_TIMEOUT_S:.0f} s in vain for a block of steps") from error
        self._pids = [block.pid for block in blocks]
        for pid in self._pids:
            os.kill(pid, signal.SIGSTOP)
        return next(block.durations_s[NUM_IGNORED_STEPS:] for block in blocks if block.global_rank == 0)


def batch_size_for(workload: Workload) -> int:
    """Samples per worker and step with which forward and backward pass take about what is left of a step."""
    from training import NUM_FEATURES, Perceptron

    torch.set_num_threads(1)
    model = Perceptron(workload.width, workload.num_layers)

    def seconds(batch_size: int) -> float:
        inputs = torch.randn(batch_size, NUM_FEATURES)
        took = []
        for _ in range(7):
            started = time.perf_counter()
            model.net(inputs).sum().backward()
            took.append(time.perf_counter() - started)
        return statistics.median(took[2:])

    small, large = 32, 1024
    fixed_s, per_sample_s = (times := [seconds(small), seconds(large)])[0], (times[1] - times[0]) / (large - small)
    return max(8, small + round((workload.step_s - workload.framework_s - fixed_s) / per_sample_s))


@contextlib.contextmanager
def contestants(space: Workspace, etcd: EmbeddedEtcd, label: str, workload: Workload, block: int) -> Iterator[list[Contestant]]:
    live = ["--rdzv-backend=etcd-v3", f"--rdzv-endpoint={etcd.endpoint}", "--rdzv-conf=live=1", "--nnodes=1:2"]
    live += [f"--nproc-per-node={NUM_WORKERS}", "--max-restarts=0"]
    batch_size = batch_size_for(workload)
    model = [f"--width={workload.width}", f"--num-layers={workload.num_layers}", f"--batch-size={batch_size}"]
    kinds = {
        "stock": (stock_agent(NUM_WORKERS), ["--strategy=ddp"]),
        "strategy": ([*live, f"--rdzv-id=strategy-{label}"], ["--strategy=dlrover"]),
        "callback": ([*live, f"--rdzv-id=callback-{label}"], ["--strategy=dlrover", "--profiled"]),
    }
    with contextlib.ExitStack() as stack:
        found = []
        for name, (torchrun_options, arguments) in kinds.items():
            address = space.folder / f"{name}-{label}.gate"
            gate = stack.enter_context(socket.socket(socket.AF_UNIX))
            gate.bind(str(address))
            gate.listen(NUM_WORKERS)
            job = stack.enter_context(
                space.job(f"{name}-{label}", [*arguments, *model, f"--gate={address}", f"--block={block}"])
            )
            # A stopped worker cannot renew its lease.
            job.environment["DLROVER_LEASE_TTL_S"] = "120"
            job.start_agent(torchrun_options)
            found.append(Contestant(name, job, gate))
        for contestant in found:
            contestant.wait_at_gate()
        yield found


def report(label: str, found: list[Contestant]) -> dict[str, float | int]:
    """Print a table; returns the ratios of medians to stock."""
    steps = {c.name: [s for block in c.blocks for s in block] for c in found}
    medians = {name: statistics.median(of_job) for name, of_job in steps.items()}
    means = {name: statistics.mean(of_job) for name, of_job in steps.items()}
    block_medians = {c.name: [statistics.median(block) for block in c.blocks] for c in found}
    columns = f"{'median ms':>11}{'mean ms':>9}{'p90 ms':>9}{'steps':>7}{'ratio':>8}{'of means':>10}{'by block':>10}"
    print(f"{label + ' steps':12}{columns}")
    for name, of_job in steps.items():
        by_block = statistics.median(a / b for a, b in zip(block_medians[name], block_medians["stock"], strict=True))
        print(
            f"{name:12}{1e3 * medians[name]:11.3f}{1e3 * means[name]:9.3f}{1e3 * statistics.quantiles(of_job, n=10)[-1]:9.3f}"
            f"{len(of_job):7}{medians[name] / medians['stock']:8.3f}{means[name] / means['stock']:10.3f}{by_block:10.3f}",
            flush=True,
        )
    return {f"{name}_{label}": medians[name] / medians["stock"] for name in medians if name != "stock"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cycles", type=int, default=24, help="turns of every job")
    parser.add_argument("--quick", action="store_true", help="few short turns, under 60 s")
    parser.add_argument("--keep", action="store_true", help="keep logs and records")
    options = parser.parse_args()
    cycles, turn_s = (4, 0.5) if options.quick else (options.cycles, 1.5)
    ratios: dict[str, float | int] = {}
    print(describe_machine(), flush=True)
    with Workspace("overhead", options.keep) as space:
        etcd = space.etcd()
        for label, workload in WORKLOADS.items():
            block = NUM_IGNORED_STEPS + round(turn_s / workload.step_s)
            with contestants(space, etcd, label, workload, block) as found:
                for cycle in range(cycles):
                    # Everyone follows everyone else equally often.
                    order = found if cycle % 2 == 0 else found[::-1]
                    for contestant in order[cycle % 3 :] + order[: cycle % 3]:
                        contestant.take_turn()
            ratios |= report(label, found)
    names = ("strategy_50ms", "strategy_5ms", "callback_50ms", "callback_5ms")
    print(result_line({name: ratios[name] for name in names}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
