"""The plain loop's example: under python alone, and on torchrun nodes that come, go and are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch

from lightning_dlrover.rdzv.etcd.server import EmbeddedEtcd
from tests.support.waiting import eventually
from tests.support.warm_process import WarmProcess, run_warm
from tests.support.warm_tree import run_program

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "plain_pytorch.py"
NUM_ROWS, NUM_EPOCHS, NUM_STEPS = 1000, 10, 200
SIZES = (f"--rows={NUM_ROWS}", f"--epochs={NUM_EPOCHS}", f"--batch-size={NUM_ROWS * NUM_EPOCHS // NUM_STEPS}")
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(SCRIPT.parent)]), "OMP_NUM_THREADS": "1"}


@dataclass
class Node:
    process: WarmProcess
    log: Path

    @property
    def worker(self) -> psutil.Process:
        return psutil.Process(self.process.pid).children()[-1]  # the first is the nursery, see `warm_tree`

    def kill(self) -> None:
        """Kill as if the machine lost power."""
        for process in (*psutil.Process(self.process.pid).children(recursive=True), psutil.Process(self.process.pid)):
            process.kill()

    def wait(self) -> int:
        return self.process.wait(60)


RUNNER = """
import sys, time
from pathlib import Path
import plain_pytorch

trace, step_s = Path(sys.argv.pop(1)), Path(sys.argv.pop(1))
original = plain_pytorch.rows_of_step

def rows_of_step(step, *args):
    rows, num_rows = original(step, *args)
    formation = step._loop._formation
    with trace.open("a") as file:
        file.write(" ".join(map(str, [step.number, formation.round.number, step.size, *rows.tolist(), "\\n"])))
    time.sleep(float(step_s.read_text()))
    return rows, num_rows

plain_pytorch.rows_of_step = rows_of_step
plain_pytorch.main()
"""


@dataclass
class Trace:
    """Records of the steps that the workers attempted."""

    file: Path
    last_step: int = -1  # last awaited step

    def attempts(self) -> list[tuple[int, int, int, list[int]]]:
        """(step, round, size, rows) of each worker's attempts."""
        if not self.file.exists():
            return []
        lines = [[int(n) for n in line.split()] for line in self.file.read_text().splitlines(keepends=True) if line[-1] == "\n"]
        return [(step, number, size, rows) for step, number, size, *rows in lines]

    def until_world(self, size: int, node: Node) -> None:
        """Wait until `size` workers have gone beyond a step later than the last awaited one."""

        def steps() -> list[int]:
            return [step for step, _, its_size, _ in self.attempts() if its_size == size and step > self.last_step]

        def ended() -> str:
            return "the node has ended" if node.process.poll() is not None else ""

        self.last_step = min(eventually(steps, f"a step of {size} workers", 60, 0.1, ended=ended, report=node.log.read_text))


StartNode = Callable[..., Node]


@pytest.fixture
def start_node(fork_server: None, etcd: EmbeddedEtcd, run_id: str, tmp_path: Path) -> Iterator[StartNode]:
    nodes: list[Node] = []

    script = tmp_path / "run_example.py"
    script.write_text(RUNNER)

    def start(*arguments: str, max_restarts: int = 0) -> Node:
        log = tmp_path / f"node{len(nodes)}.log"
        command = [
            *("-m", "torch.distributed.run"),
            *("--rdzv-backend=etcd-v3", f"--rdzv-endpoint={etcd.endpoint}", f"--rdzv-id={run_id}", "--rdzv-conf=live=1"),
            *("--nnodes=1:3", "--nproc-per-node=1", f"--max-restarts={max_restarts}", str(script), *arguments, *SIZES),
        ]
        nodes.append(Node(WarmProcess(run_program, command, ENVIRONMENT, log, folder=tmp_path), log))
        return nodes[-1]

    yield start
    for node in nodes:
        if node.process.poll() is None:
            node.kill()
            node.process.wait(10)


@pytest.mark.long
def test_joins_leaves_and_deaths_change_neither_samples_nor_result(start_node: StartNode, tmp_path: Path) -> None:
    undisturbed, disturbed = tmp_path / "undisturbed.pt", tmp_path / "disturbed.pt"
    trace, step_s = Trace(tmp_path / "trace"), tmp_path / "step_s"
    step_s.write_text("0.25")  # the job outlasts the slowest joiner
    arguments = (str(trace.file), str(step_s), f"--save={disturbed}")
    first = start_node(*arguments)
    trace.until_world(1, first)
    second, third = start_node(*arguments, max_restarts=1), start_node(*arguments)
    trace.until_world(3, first)
    second.worker.kill()  # its agent lives and starts another one
    trace.until_world(2, first)
    trace.until_world(3, first)
    third.kill()
    trace.until_world(2, first)
    first.worker.send_signal(signal.SIGTERM)  # rank 0 hands over and leaves
    trace.until_world(1, second)
    step_s.write_text("0")
    assert first.wait() == 0, first.log.read_text()
    assert "finished" not in first.log.read_text()
    assert second.wait() == 0, second.log.read_text()
    assert f"finished after {NUM_STEPS} steps" in second.log.read_text()

    command = [sys.executable, str(SCRIPT), *SIZES, f"--save={undisturbed}"]  # a fresh interpreter: all imports are its own
    alone = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=60, check=False)
    assert alone.returncode == 0, alone.stderr
    expected, found = torch.load(undisturbed), torch.load(disturbed)
    for name, parameter in expected.items():
        torch.testing.assert_close(found[name], parameter, rtol=0, atol=1e-6)

    # A step's last attempt is the one that made it.
    made_in = {step: number for step, number, _, _ in sorted(trace.attempts(), key=lambda attempt: attempt[:2])}
    assert sorted(made_in) == list(range(NUM_STEPS))
    for epoch in range(NUM_EPOCHS):
        in_epoch = range(epoch * NUM_STEPS // NUM_EPOCHS, (epoch + 1) * NUM_STEPS // NUM_EPOCHS)
        rows = [
            row for step, number, _, rows in trace.attempts() if step in in_epoch and made_in[step] == number for row in rows
        ]
        assert sorted(rows) == list(range(NUM_ROWS))


@pytest.mark.usefixtures("fork_server")
def test_start_by_another_backend_is_an_error_with_the_next_move(tmp_path: Path) -> None:
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(SCRIPT), *SIZES]
    done = run_warm(command, ENVIRONMENT, tmp_path, 60)
    assert done.returncode == 1
    assert "start the script with torchrun --rdzv-backend=etcd-v3, or with python" in done.stderr
