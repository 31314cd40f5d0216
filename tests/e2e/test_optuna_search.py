"""The Optuna example: all workers run one study, and prune its trials together."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from tests.e2e.test_dlrover_run import wait_for_first_round, wait_for_workers
from tests.support.dlrover_process import Dlrover, Run

pytest.importorskip("optuna", reason="the example needs it")

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "optuna_search.py"
RESULT = r"trials ([CP]+), best (\S+) with (\{.*\})"


def results(run: Run, num_workers: int) -> list[tuple[str, str, str]]:
    """States of the trials, best value and parameters, as each worker has printed them."""
    assert run.wait_for_exit(120) == 0, run.output
    found: list[tuple[str, str, str]] = re.findall(RESULT, run.output)
    assert len(found) == num_workers, run.output
    assert "Traceback" not in run.output
    return found


@pytest.mark.timeout(240)
def test_pruned_trials_end_on_all_workers_and_the_study_continues(dlrover: Dlrover) -> None:
    [alone] = results(dlrover.start("--workers", "1", SCRIPT, "--trials", 8, run_id="alone"), 1)
    assert {*alone[0]} == {"C", "P"}
    both = results(dlrover.start("--workers", "2", SCRIPT, "--trials", 8), 2)
    assert both[0] == both[1]
    assert {*both[0][0]} == {"C", "P"}


@pytest.mark.timeout(240)
def test_worker_that_joins_the_first_trial_and_a_survivor_of_a_loss_have_one_study(dlrover: Dlrover) -> None:
    run = dlrover.start("--workers", "1:3", SCRIPT, "--trials", 6, "--epochs", 6, "--step-s", 0.05)
    wait_for_first_round(run)
    assert dlrover("scale", "job", 3).returncode == 0
    three = wait_for_workers(run, 3)
    run.wait_for(lambda: "fit number" in dlrover("status", "job").stdout, "the second trial")
    assert "no worker can join: fit number" in dlrover("status", "job").stdout
    refused = dlrover("scale", "job", 2)
    assert refused.returncode == 2
    assert "keeps its workers: fit number" in refused.stderr
    os.kill(three[1]["pid"], signal.SIGKILL)
    run.wait_for_exit(180)
    found: list[tuple[str, str, str]] = re.findall(RESULT, run.output)
    assert len(found) >= 2, run.output
    assert len({*found}) == 1, run.output
    assert len(found[0][0]) == 6
