from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import ctr_data
import numpy as np
import pytest
import train_ctr

from tests.support.warm_process import run_warm

SCRIPT = Path(ctr_data.__file__).with_name("train_ctr.py")


ENVIRONMENT = {**os.environ, "PYTHONPATH": str(SCRIPT.parents[1])}


def train(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run the script in a fresh interpreter."""
    command = [sys.executable, str(SCRIPT), "--accelerator", "cpu", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=ENVIRONMENT, cwd=cwd)


@pytest.fixture
def clicks(tmp_path: Path) -> Path:
    """1,000 rows in Criteo's format; the first number decides the label."""
    numbers = np.random.default_rng(0).integers(0, 50, 1000)
    rows = ["\t".join([str(int(n > 25)), str(n), *["1"] * 12, *[f"{i % 5:08x}"] * 26]) for i, n in enumerate(numbers)]
    path = tmp_path / "clicks.tsv"
    path.write_text("\n".join(rows) + "\n")
    return path


def test_plain_python_trains_as_one_worker_and_writes_its_metrics(clicks: Path, tmp_path: Path) -> None:
    output = tmp_path / "output"
    done = train(
        "--data",
        str(clicks),
        *("--epochs", "8", "--batch-size", "64", "--width", "32", "--lr", "3e-3", "--loader-workers", "0"),
        *("--output", str(output)),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    metrics = json.loads((output / "metrics.json").read_text())
    assert json.loads(done.stdout.strip().splitlines()[-1]) == metrics
    assert metrics["test_auc"] > 0.95
    assert (metrics["rows"], metrics["steps"], metrics["best_auc"]) == (100, 8 * 13, None)
    assert str(clicks) in done.stdout  # names the loaded file


@pytest.mark.usefixtures("fork_server")
def test_max_steps_ends_training_early(clicks: Path, tmp_path: Path) -> None:
    arguments = [str(SCRIPT), "--accelerator=cpu", f"--data={clicks}", "--batch-size=64", "--width=32"]
    done = run_warm([*arguments, "--max-steps=5", "--loader-workers=1"], ENVIRONMENT, tmp_path, 120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.strip().splitlines()[-1])["steps"] == 5


def test_broken_data_ends_the_script_with_one_line_and_code_2(
    clicks: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clicks.write_text(clicks.read_text() + "broken\n")
    monkeypatch.setattr(sys, "argv", ["train_ctr.py", "--data", str(clicks)])
    assert train_ctr.main() == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"train_ctr: {clicks}, line 1001: 1 columns, expected 40")
