"""Several agents of one worker each on one host."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from lightning_dlrover.components.host_agents import MAX_KILLS, environments, is_started_again
from lightning_dlrover.rdzv.etcd.server import EmbeddedEtcd
from tests.support.waiting import eventually

LOOP = """
import json, os, sys, time
import torch, torch.distributed as dist
from lightning_dlrover.rdzv import World

folder = sys.argv[1]
with World.from_environment() as world, open(f"{folder}/{os.getpid()}", "a", buffering=1) as file:
    for step in world.steps(100_000, check_interval_s=0.03, model=torch.nn.Linear(4, 1)):
        with step:
            time.sleep(0.02)
            is_enough = torch.tensor([float(os.path.exists(f"{folder}/enough"))])
            dist.all_reduce(is_enough)
            step.is_last = bool(is_enough > 0)
        if not step.was_made:
            continue
        place = {"gpu": os.environ["CUDA_VISIBLE_DEVICES"], "local_rank": int(os.environ["LOCAL_RANK"]), "size": step.size}
        file.write(json.dumps({"step": step.number, **place}) + "\\n")
"""


@pytest.mark.parametrize(
    "wanted, visible, gpus",
    [
        pytest.param("gpu", "0,1,2", ["0", "1", "2"], id="all"),
        pytest.param("2", "GPU-a,GPU-b,GPU-c", ["GPU-a", "GPU-b"], id="fewer"),
        pytest.param("2", "", [None, None], id="cpu"),
    ],
)
def test_each_agent_has_a_gpu_of_its_own(wanted: str, visible: str, gpus: list[str | None]) -> None:
    assert [own.get("CUDA_VISIBLE_DEVICES") for own in environments(wanted, {"CUDA_VISIBLE_DEVICES": visible})] == gpus


@pytest.mark.parametrize(
    "wanted, visible, reason",
    [
        ("4", "0,1", r"4 workers need a GPU each, and 2 are visible here \(0, 1\)"),
        ("gpu", "", "no GPU is visible here"),
        ("0", "0", "'0' is not a number of workers"),
        ("many", "0", "'many' is not a number of workers"),
    ],
)
def test_more_agents_than_gpus_are_refused(wanted: str, visible: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        environments(wanted, {"CUDA_VISIBLE_DEVICES": visible})


@pytest.mark.parametrize(
    ("situation", "code", "num_kills", "again"),
    [
        ("its worker was killed", 128 + signal.SIGKILL, 0, True),
        ("its worker has crashed", 128 + signal.SIGSEGV, MAX_KILLS - 1, True),
        ("its worker was killed too often", 128 + signal.SIGKILL, MAX_KILLS, False),
        ("its worker had an error", 1, 0, False),
        ("its worker was asked to leave", 128 + signal.SIGTERM, 0, False),
        ("it was killed itself", -signal.SIGKILL, 0, False),
    ],
)
def test_only_killed_workers_are_started_again(situation: str, code: int, num_kills: int, again: bool) -> None:
    assert is_started_again(code, num_kills) == again, situation


def steps_of(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """Complete lines of each worker, by process id."""
    files = [file for file in folder.iterdir() if file.name.isdecimal()]
    return {int(f.name): [json.loads(t) for t in f.read_text().splitlines(keepends=True) if t.endswith("\n")] for f in files}


@pytest.mark.long
def test_death_of_a_worker_does_not_end_its_neighbour(etcd: EmbeddedEtcd, run_id: str, tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(LOOP)
    records = tmp_path / "records"
    records.mkdir()
    command = [sys.executable, "-m", "lightning_dlrover.components.host_agents", "gpu", "--rdzv-backend=etcd-v3"]
    command += [f"--rdzv-endpoint={etcd.endpoint}", f"--rdzv-id={run_id}", "--rdzv-conf=live=1", "--nnodes=1:2"]
    command += ["--local-addr=127.0.0.1", "--max-restarts=3", str(tmp_path / "loop.py"), str(records)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    with (tmp_path / "log").open("w") as log:
        host = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)

    def together(num_workers: int) -> dict[int, list[dict[str, Any]]] | None:
        found = steps_of(records)
        return found if sum(bool(own) and own[-1]["size"] == 2 for own in found.values()) >= num_workers else None

    try:
        first = eventually(lambda: together(2), "two workers train together", 60)
        assert {(own[-1]["gpu"], own[-1]["local_rank"]) for own in first.values()} == {("GPU-a", 0), ("GPU-b", 0)}
        victim, neighbour = first
        os.kill(victim, signal.SIGKILL)
        after = eventually(lambda: together(3), "the next worker trains beside the neighbour", 60)
        [successor] = after.keys() - first.keys()
        assert after[successor][-1]["gpu"] == first[victim][-1]["gpu"]
        (records / "enough").touch()
        assert host.wait(60) == 0, (tmp_path / "log").read_text()
        numbers = [line["step"] for line in steps_of(records)[neighbour]]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    finally:
        for process in [*psutil.Process(host.pid).children(recursive=True), host] if host.poll() is None else []:
            process.kill()
        host.wait()


def test_exit_code_is_that_of_an_agent_that_failed() -> None:
    command = [sys.executable, "-m", "lightning_dlrover.components.host_agents", "1", "--rdzv-backend=none", "x.py"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "0 others are left" in done.stderr
