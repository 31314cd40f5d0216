"""`dlrover run --workers-per-node`: nodes of two workers, with real agents, real workers and a made-up list of GPUs."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_dlrover_run import wait_for_workers
from tests.support.dlrover_process import Dlrover, Run

LOOP = """
import json, os, sys, time
import torch, torch.distributed as dist
from lightning_dlrover.rdzv import World

folder = sys.argv[1]
with World.from_environment() as world, open(f"{folder}/{os.getpid()}", "a", buffering=1) as file:
    for step in world.steps(1_000_000, check_interval_s=0.03, model=torch.nn.Linear(4, 1)):
        with step:
            time.sleep(0.02)
            state = torch.tensor([float(os.path.exists(f"{folder}/{name}")) for name in ("enough", "broken")])
            dist.all_reduce(state)
            step.is_last = bool(state[0] > 0)
        if state[1] > 0 and os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-b":
            raise ValueError("a mistake of one worker")
        if step.was_made:
            gpu, node = os.environ["CUDA_VISIBLE_DEVICES"], os.environ["DLROVER_NODE"]
            file.write(json.dumps({"step": step.number, "size": step.size, "gpu": gpu, "node": node}) + "\\n")
"""
OPTIONS = ("--workers", "2:4", "--gpus", 2, "--workers-per-node", "gpu")


@pytest.fixture
def records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a file of steps for each worker's process."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b,GPU-c,GPU-d")
    (tmp_path / "loop.py").write_text(LOOP)
    (tmp_path / "records").mkdir()
    return tmp_path / "records"


def steps_of(records: Path, worker: dict[str, Any]) -> list[dict[str, Any]]:
    lines = (records / str(worker["pid"])).read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def gpus(run: Run, records: Path, num_workers: int, **without: Any) -> dict[str, dict[str, Any]]:
    """The workers of a round of this size by GPU, once each has made a step in it."""
    run.wait_for_output(r"\[round\] round 1: \d workers", timeout_s=90)
    workers = wait_for_workers(run, num_workers, **without)
    run.wait_for(
        lambda: all(any(line["size"] == num_workers for line in steps_of(records, w)) for w in workers) or None, "their steps"
    )
    return {steps_of(records, worker)[-1]["gpu"]: worker for worker in workers}


def wait_for_nodes(run: Run, *names: str) -> None:
    """Wait until these nodes are left, with two agents each."""

    def found() -> bool | None:
        status = run.status()
        nodes = sorted(worker["node"] for worker in status["workers"])
        return (nodes, len(status["agents"])) == (sorted(2 * names), 2 * len(names)) or None

    run.wait_for(found, f"{names} alone")


@pytest.mark.timeout(300)
def test_node_of_two_workers_is_added_keeps_one_when_the_other_dies_and_is_given_back(dlrover: Dlrover, records: Path) -> None:
    run = dlrover.start(*OPTIONS, records.parent / "loop.py", records)
    first = gpus(run, records, 2)
    assert first.keys() == {"GPU-a", "GPU-b"}
    assert {steps_of(records, worker)[-1]["node"] for worker in first.values()} == {"node1"}

    refused = dlrover("scale", "job", 3)
    assert refused.returncode == 2
    assert "2 workers on each node, and 3 would not fill theirs: use 2 or 4" in refused.stderr
    assert dlrover("scale", "job", 4).returncode == 0
    grown = gpus(run, records, 4)
    assert grown.keys() == {"GPU-a", "GPU-b", "GPU-c", "GPU-d"}
    assert [len(event.data["members"]) for event in run.events if event.kind == "round"] == [2, 4]

    os.kill(grown["GPU-d"]["pid"], signal.SIGKILL)
    mended = gpus(run, records, 4, without=(grown["GPU-d"]["worker_id"],))
    kept = {gpu: worker["pid"] for gpu, worker in mended.items() if gpu != "GPU-d"}
    assert kept == {gpu: worker["pid"] for gpu, worker in grown.items() if gpu != "GPU-d"}
    assert steps_of(records, mended["GPU-d"])[-1]["node"] == "node2"
    assert "node3" not in run.output

    assert dlrover("scale", "job", 2).returncode == 0
    left = gpus(run, records, 2)
    [node] = {steps_of(records, worker)[-1]["node"] for worker in left.values()}
    wait_for_nodes(run, node)

    (records / "enough").touch()
    assert run.wait_for_exit(60) == 0, run.output
    numbers = [line["step"] for line in steps_of(records, next(iter(left.values())))]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    dlrover.assert_all_ended()


@pytest.mark.timeout(300)
def test_drained_worker_leaves_with_its_node_once_that_is_replaced(dlrover: Dlrover, records: Path) -> None:
    run = dlrover.start(*OPTIONS, records.parent / "loop.py", records)
    first = gpus(run, records, 2)
    assert dlrover("drain", "--replace", "job", first["GPU-b"]["worker_id"]).returncode == 0
    second = gpus(run, records, 2, without=tuple(worker["worker_id"] for worker in first.values()))
    assert second.keys() == {"GPU-c", "GPU-d"}
    wait_for_nodes(run, "node2")
    (records / "enough").touch()
    assert run.wait_for_exit(60) == 0, run.output
    last = steps_of(records, first["GPU-a"])[-1]["step"]
    numbers = [line["step"] for line in steps_of(records, second["GPU-c"])]
    assert numbers[0] <= last + 2  # the state was handed over
    dlrover.assert_all_ended()


@pytest.mark.timeout(300)
def test_node_with_a_failed_worker_is_replaced_as_a_whole_in_a_job_that_needs_all_workers(
    dlrover: Dlrover, records: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b,GPU-c,GPU-d,GPU-e,GPU-f")
    options = ("--workers", 4, "--gpus", 2, "--workers-per-node", "gpu")
    run = dlrover.start(*options, records.parent / "loop.py", records)
    first = gpus(run, records, 4)
    (records / "broken").touch()
    run.wait_for_output(r"\[node1\] .*this node is released as a whole")
    (records / "broken").unlink()
    mended = gpus(run, records, 4, without=(first["GPU-a"]["worker_id"], first["GPU-b"]["worker_id"]))
    assert {gpu: mended[gpu]["pid"] for gpu in ("GPU-c", "GPU-d")} == {gpu: first[gpu]["pid"] for gpu in ("GPU-c", "GPU-d")}
    assert {worker["node"] for worker in mended.values()} == {"node2", "node3"}
    (records / "enough").touch()
    assert run.wait_for_exit(60) == 0, run.output
    numbers = [line["step"] for line in steps_of(records, first["GPU-c"])]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    dlrover.assert_all_ended()
