"""Workers of real jobs are forked from spare processes, and nothing of these outlasts the job."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from lightning_dlrover.rdzv.etcd.server import EmbeddedEtcd
from lightning_dlrover.spares import TITLE
from tests.support.dlrover_process import Dlrover, Run
from tests.support.processes import start_logged
from tests.support.waiting import eventually

SCRIPT = Path(__file__).with_name("spare_loop.py")
START_S = 90.0


def forked(output: str) -> list[tuple[int, bool]]:
    """Process ids of all workers in the order of their start, and whether each was forked."""
    return [(int(pid), is_forked == "True") for pid, is_forked in re.findall(r"process (\d+): forked (True|False)", output)]


def templates(pid: int) -> list[psutil.Process]:
    found = []
    for process in psutil.Process(pid).children(recursive=True):
        try:
            if TITLE in process.cmdline():
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


def trains(run: Run, num_workers: int, without: int = 0) -> list[dict[str, Any]]:
    def look() -> list[dict[str, Any]] | None:
        found = [w for w in run.status()["workers"] if w["rank"] is not None and w["state"] == "active"]
        return found if len(found) == num_workers and without not in {w["pid"] for w in found} else None

    return run.wait_for(look, f"{num_workers} workers without {without}", START_S)


@pytest.mark.long
@pytest.mark.timeout(400)
def test_nodes_of_a_job_are_forked_after_growth_and_losses(cold_dlrover: Dlrover, tmp_path: Path) -> None:
    until = tmp_path / "enough"
    run = cold_dlrover.start("--workers", "1:2", "--spares", 1, SCRIPT, tmp_path / "failing", "--until", until)
    run.wait_for_output("spare ready", START_S)
    [spare] = run.status()["spares"]  # that of the controller
    assert (spare["state"], spare["memory_bytes"] > 50 << 20) == ("ready", True)
    assert f"spare process of {spare['owner']}: ready" in cold_dlrover("status", "job").stdout

    assert cold_dlrover("scale", "job", 2).returncode == 0
    first, second = trains(run, 2)
    assert forked(run.output) == [(first["pid"], False), (second["pid"], True)]
    _, spare_of_node = templates(run.process.pid)
    assert spare_of_node.parent() == psutil.Process(second["pid"]).parent()

    os.kill(second["pid"], signal.SIGKILL)
    third = trains(run, 2, without=second["pid"])[-1]
    agent = psutil.Process(third["pid"]).parent()
    assert agent is not None
    agent.kill()
    fourth = trains(run, 2, without=third["pid"])[-1]
    assert forked(run.output)[2:] == [(third["pid"], True), (fourth["pid"], True)]

    templates(run.process.pid)[0].kill()
    run.wait_for(lambda: run.output.count("spare ready") == 2 or None, "another spare process", START_S)
    os.kill(first["pid"], signal.SIGKILL)
    fifth = next(w for w in trains(run, 2, without=first["pid"]) if w["pid"] != fourth["pid"])
    assert forked(run.output)[4:] == [(fifth["pid"], True)]
    assert "is lost" in run.output

    until.touch()
    assert run.wait_for_exit(60) == 0, run.output
    cold_dlrover.assert_all_ended()


@pytest.mark.long
@pytest.mark.timeout(200)
def test_nothing_outlasts_a_killed_controller(cold_dlrover: Dlrover, tmp_path: Path) -> None:
    run = cold_dlrover.start("--workers", "2:2", "--spares", 1, SCRIPT, tmp_path / "failing")
    run.wait_for_output("spare ready", START_S)
    first, _ = trains(run, 2)
    os.kill(first["pid"], signal.SIGKILL)  # now a node has a spare process, too
    trains(run, 2, without=first["pid"])
    assert len(templates(run.process.pid)) == 2
    run.process.kill()
    cold_dlrover.wait_for_end(60.0)  # without etcd, torchrun kills its workers after 30 s


@pytest.fixture
def agent(etcd: EmbeddedEtcd, run_id: str, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """A stock torchrun that keeps a spare process."""
    log = tmp_path / "log"
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=etcd-v3", f"--rdzv-endpoint={etcd.endpoint}"),
        *(f"--rdzv-id={run_id}", "--rdzv-conf=live=1,spares=1", "--nnodes=1", "--nproc-per-node=1", "--max-restarts=9"),
        *(str(SCRIPT), str(tmp_path / "failing"), "--until", str(tmp_path / "enough")),
    ]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path / "tmp")}
    (tmp_path / "tmp").mkdir()
    process = start_logged(command, log, environ)
    yield process, log
    for each in [*psutil.Process(process.pid).children(recursive=True), process] if process.poll() is None else []:
        each.kill()
    process.wait()


@pytest.mark.long
@pytest.mark.timeout(300)
def test_restarted_workers_of_stock_torchrun_are_forked(agent: tuple[subprocess.Popen[bytes], Path], tmp_path: Path) -> None:
    process, log = agent

    def ready(number: int) -> None:
        text = f"spare process {number}"
        eventually(lambda: log.read_text().count("spare ready") == number, text, START_S, report=log.read_text)

    def worker(number: int) -> int:
        found = eventually(lambda: forked(log.read_text())[number:], f"worker {number}", START_S, report=log.read_text)
        assert found[0][1] == (number > 0), log.read_text()
        return found[0][0]

    first = worker(0)
    ready(1)
    os.kill(first, signal.SIGKILL)
    second = worker(1)
    assert psutil.Process(second).ppid() == process.pid
    eventually(lambda: list((tmp_path / "tmp").glob(f"dlrover-spares-*/stepped-{second}")), "a step", START_S)
    [template] = templates(process.pid)
    template.kill()
    ready(2)
    os.kill(second, signal.SIGKILL)
    third = worker(2)
    eventually(lambda: list((tmp_path / "tmp").glob(f"dlrover-spares-*/stepped-{third}")), "a step", START_S)
    (tmp_path / "enough").touch()
    assert process.wait(60) == 0, log.read_text()
    assert not list((tmp_path / "tmp").glob("dlrover-spares-*"))


@pytest.mark.long
@pytest.mark.timeout(300)
def test_worker_that_fails_when_forked_starts_as_usual_next(
    agent: tuple[subprocess.Popen[bytes], Path], tmp_path: Path
) -> None:
    process, log = agent
    eventually(lambda: "spare ready" in log.read_text(), "a spare process", START_S, report=log.read_text)
    (tmp_path / "failing").touch()
    os.kill(forked(log.read_text())[0][0], signal.SIGKILL)
    eventually(lambda: len(forked(log.read_text())) == 3, "two more workers", START_S, report=log.read_text)
    assert [is_forked for _, is_forked in forked(log.read_text())] == [False, True, False]
    assert log.read_text().count("failed before its first step") == 1
    assert templates(process.pid) == []
    (tmp_path / "enough").touch()
    assert process.wait(60) == 0, log.read_text()


@pytest.mark.long
@pytest.mark.timeout(200)
def test_nothing_outlasts_a_killed_torchrun(agent: tuple[subprocess.Popen[bytes], Path]) -> None:
    process, log = agent
    eventually(lambda: "spare ready" in log.read_text(), "a spare process", START_S, report=log.read_text)
    os.kill(forked(log.read_text())[0][0], signal.SIGKILL)
    eventually(lambda: len(forked(log.read_text())) == 2, "a forked worker", START_S, report=log.read_text)
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) >= 2
    process.kill()
    eventually(lambda: not any(each.is_running() and each.status() != "zombie" for each in family), "the end of all", START_S)


@pytest.mark.parametrize("options", [["--spares", "2"], ["--spares", "-1"]])
def test_number_of_spares_is_checked(dlrover: Dlrover, options: list[str]) -> None:
    refused = dlrover("run", *options, SCRIPT)
    assert refused.returncode == 2
    assert "--spares" in refused.stderr


def test_status_of_a_job_without_spares_has_none(dlrover: Dlrover, tmp_path: Path) -> None:
    until = tmp_path / "enough"
    run = dlrover.start("--workers", "1:1", SCRIPT, tmp_path / "failing", "--until", until)
    run.wait_for_output(r"round 1: 1 worker", START_S)
    trains(run, 1)
    assert json.loads(dlrover("status", "--json", "job").stdout)["spares"] == []
    until.touch()
    assert run.wait_for_exit(60) == 0
