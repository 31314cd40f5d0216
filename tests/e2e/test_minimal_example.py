"""`examples/minimal.py`, as the README starts it: what its user sees of the training."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.dlrover_process import Dlrover

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "minimal.py"


@pytest.mark.timeout(180)
def test_run_and_status_show_how_far_a_job_has_trained(dlrover: Dlrover) -> None:
    run = dlrover.start("--workers", "1:2", SCRIPT)
    run.wait_for_output(r"\[progress\] epoch \d+ of 100, batch \d+ of 782, .* left, loss \S+, \S+ samples/s with 1 worker\n")
    progress = json.loads(dlrover("status", "--json", "job").stdout)["progress"]
    assert (progress["max_epochs"], progress["num_batches"]) == (100, 782)
    assert progress["step"] == 782 * progress["epoch"] + progress["batch"] > 0
    assert 0 < float(progress["loss"]) < 3
    assert progress["seconds_left"] > 0
    assert "epoch " in dlrover("status", "job").stdout
    assert dlrover("scale", "job", 2).returncode == 0
    run.wait_for_output(r"\[progress\] .* samples/s with 2 workers\n")
    assert dlrover("cancel", "job").returncode == 0
    assert run.wait_for_exit() == 1
    dlrover.assert_all_ended()
