"""Nodes that are taken away after a notice, by SIGKILL: their workers have been replaced, or have left in time."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.dlrover_process import Dlrover, Run
from tests.support.metadata_services import MetadataService

SCRIPT = Path(__file__).with_name("tiny_script.py")
START_S = 90.0


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> Iterator[MetadataService]:
    service = MetadataService("aws")
    # `Dlrover` passes on no variable of ours.
    environment = Dlrover.environment.fget  # type: ignore[attr-defined]
    monkeypatch.setattr(Dlrover, "environment", property(lambda run: {**environment(run), "DLROVER_METADATA_URL": service.url}))
    yield service
    service.close()


def members(run: Run) -> list[dict[str, Any]]:
    return [w for w in run.status()["workers"] if w["rank"] is not None and w["state"] in ("active", "leaving")]


def trains(run: Run, num_workers: int, without: str = "") -> list[dict[str, Any]]:
    def look() -> list[dict[str, Any]] | None:
        found = members(run)
        return found if len(found) == num_workers and without not in {w["worker_id"] for w in found} else None

    return run.wait_for(look, f"{num_workers} workers without {without!r}", START_S)


def kill_node(run: Run, node: str) -> int:
    """Kill all processes of a node at once, as the loss of its machine does. Return how many there were."""
    name = f"DLROVER_NODE={node}".encode()
    doomed = []
    for pid in run.dlrover.processes():
        with contextlib.suppress(OSError):
            if name in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                doomed.append(pid)
    for pid in sorted(doomed, reverse=True):  # the worker first: it would receive SIGTERM once its agent has gone
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return len(doomed)


def wait_until(at: float) -> None:
    time.sleep(max(0.0, at - time.time()))


def changes(run: Run) -> list[str]:
    """Kinds of all rounds after the start, as far as they are planned; `loss` for each other one."""
    rounds = [event.data for event in run.events if event.kind == "round"]
    return [each["kind"] if each["planned"] else "loss" for each in rounds[1:]]


@pytest.mark.long
@pytest.mark.timeout(300)
def test_worker_is_replaced_before_its_machine_is_taken_away(dlrover: Dlrover, tmp_path: Path, aws: MetadataService) -> None:
    until = tmp_path / "enough"
    run = dlrover.start("--workers", "2:2", "--notices", "aws", SCRIPT, "--until", until)
    run.wait_for_output(r"\[round\] round 1: ", START_S)
    [_, second] = trains(run, 2)
    at = float(int(time.time()) + 30)
    aws.announce(second["node"], at)
    noticed = run.wait_for(lambda: next((w for w in members(run) if w["notice"]), None), "the notice", 20)
    assert (noticed["worker_id"], noticed["notice"]) == (
        second["worker_id"],
        {"source": "aws spot/instance-action", "taken_at": at},
    )
    assert re.search(
        r"its node will be taken away at [-\d]+ [:\d]+ \(aws spot/instance-action\)", dlrover("status", "job").stdout
    )
    trains(run, 2, without=second["worker_id"])
    assert time.time() < at
    wait_until(at)
    kill_node(run, second["node"])
    run.finish(until)
    assert "loss" not in changes(run)
    assert len([event for event in run.events if event.kind == "notice"]) == 1
    assert run.output.count("cannot be read") == 0


@pytest.mark.long
@pytest.mark.timeout(300)
def test_worker_leaves_in_time_where_none_replaces_it(dlrover: Dlrover, tmp_path: Path) -> None:
    until = tmp_path / "enough"
    run = dlrover.start("--workers", "1:2", SCRIPT, "--until", until)
    run.wait_for_output(r"\[round\] round 1: ", START_S)
    assert dlrover("scale", "job", 2).returncode == 0
    [_, second] = trains(run, 2)
    os.kill(run.process.pid, signal.SIGSTOP)  # its controller starts no other node
    try:
        at = time.time() + 6.0
        assert dlrover("drain", "job", second["node"], "--at", "+6").returncode == 0
        trains(run, 1, without=second["worker_id"])
        assert time.time() < at
        wait_until(at)
        kill_node(run, second["node"])
    finally:
        os.kill(run.process.pid, signal.SIGCONT)
    trains(run, 2, without=second["worker_id"])
    run.finish(until)
    assert changes(run) == ["grow", "shrink", "grow"]


@pytest.mark.long
@pytest.mark.timeout(300)
def test_worker_of_the_minimum_stays_until_its_machine_is_taken_away(dlrover: Dlrover, tmp_path: Path) -> None:
    until = tmp_path / "enough"
    run = dlrover.start("--workers", "2:2", SCRIPT, "--until", until)
    run.wait_for_output(r"\[round\] round 1: ", START_S)
    [_, second] = trains(run, 2)
    os.kill(run.process.pid, signal.SIGSTOP)
    try:
        at = time.time() + 6.0
        assert dlrover("drain", "job", second["worker_id"], "--at", "+6").returncode == 0
        run.wait_for(lambda: "stays until it is replaced" in str(run.status()["workers"]), "the worker to stay", 10)
        wait_until(at)
        assert {w["worker_id"] for w in members(run)} >= {second["worker_id"]}
        assert kill_node(run, second["node"]) > 0
    finally:
        os.kill(run.process.pid, signal.SIGCONT)
    trains(run, 2, without=second["worker_id"])
    run.finish(until)
    assert changes(run)[0] == "loss"
