"""`dlrover run` handles nodes that fail before they have trained."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.dlrover_process import Dlrover

SCRIPT = Path(__file__).with_name("tiny_script.py")


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "hook",
    [
        "on_train_start",
        pytest.param("setup", marks=pytest.mark.on_demand),
        pytest.param("on_fit_start", marks=pytest.mark.on_demand),
        pytest.param("on_train_batch_start", marks=pytest.mark.on_demand),
    ],
)
def test_worker_killed_before_the_first_batch_is_replaced(dlrover: Dlrover, tmp_path: Path, hook: str) -> None:
    bad, until = tmp_path / "bad", tmp_path / "until"
    bad.touch()
    limits = ("--workers", "2:2", "--lease-ttl", "7s", "--join-timeout", "1h")
    run = dlrover.start(*limits, SCRIPT, "--fateful-hook", hook, "--bad", bad, "--until", until)
    run.wait_for_output(r"\[loss\] |\[round\] round [2-9]|node[34]", timeout_s=120)
    assert not bad.exists()

    def two_train() -> bool:
        status = run.status()
        active = [w for w in status["workers"] if w["state"] == "active" and w["rank"] is not None]
        return status["phase"] == "training" and len(active) == 2

    run.wait_for(two_train, "two workers that train", timeout_s=120)
    run.finish(until)
    assert "failed before the first step" not in run.output


@pytest.mark.on_demand
@pytest.mark.timeout(400)
def test_growth_by_nodes_that_always_fail_ends_until_it_is_asked_for(dlrover: Dlrover, tmp_path: Path) -> None:
    bad, until = tmp_path / "bad", tmp_path / "until"
    run = dlrover.start("--workers", "1:2", SCRIPT, "--fateful-hook", "on_train_start", "--bad", bad, "--until", until)
    run.wait_for_output(r"\[round\] round 1: 1 worker,", timeout_s=90)
    run.wait_for(lambda: run.status()["phase"] == "training", "training")
    bad.mkdir()
    assert dlrover("scale", "job", 2).returncode == 0
    held_up = run.wait_for(lambda: run.status()["controller"]["held_up"], "the end of growth", timeout_s=200)
    assert "no more nodes are added, 3 that joined have failed with the same error: OSError: process" in held_up
    assert f"nodes: {held_up}" in dlrover("status", "job").stdout
    assert len([w for w in run.status()["workers"] if w["rank"] is not None]) == 1
    bad.rmdir()
    assert dlrover("scale", "job", 2).returncode == 0
    run.wait_for(
        lambda: len([w for w in run.status()["workers"] if w["state"] == "active"]) == 2, "the second worker", timeout_s=90
    )
    run.finish(until)
