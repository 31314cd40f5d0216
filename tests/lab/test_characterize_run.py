"""The command with real workers: one small run, and an interrupted one."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from lightning_dlrover.cli.main import main
from lightning_dlrover.lab.characterize.results import FILE_NAME, read_store

TIMEOUT_S = 90.0


def command(out: Path, *options: str) -> list[str]:
    place = ["--out", str(out), "--history", str(out.parent / "history.sqlite")]
    return [sys.executable, "-m", "lightning_dlrover.cli", "lab", "characterize", *place, *options]


def run(out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(out, *options), capture_output=True, text=True, timeout=TIMEOUT_S, cwd=out.parent)


def workers_of(out: Path) -> list[psutil.Process]:
    """Processes that measure for this folder."""
    found = []
    for process in psutil.process_iter(["cmdline", "cwd"]):
        line = process.info["cmdline"] or []
        if "lightning_dlrover.lab.characterize.worker" in line and process.info["cwd"] == str(out.parent) and _runs(process):
            found.append(process)
    return found


@pytest.mark.slow
@pytest.mark.long
def test_killed_run_leaves_no_process_and_a_second_one_finishes_it(tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = subprocess.Popen(
        command(out, "--study", "devices", "--budget", "2"), cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline and not (out.exists() and workers_of(out)):
            time.sleep(0.05)  # no event: another process starts others
        workers = workers_of(out)
        assert workers
        first.send_signal(signal.SIGKILL)
        first.wait()
        deadline = time.monotonic() + TIMEOUT_S  # a worker that still imports torch looks at its parent afterwards
        while any(map(_runs, workers)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not any(map(_runs, workers))
    finally:
        if first.poll() is None:
            first.kill()
            first.wait()
    done = run(out, "--study", "devices", "--budget", "0.5")
    assert done.returncode == 0, done.stderr
    visits = read_store(out).visits
    assert visits
    assert {visit.problem for visit in visits} == {""}
    for visit in visits:
        assert 0.5 < sum(visit.part_s.values()) / statistics.median(visit.blocks) < 2.0  # other programs may run, too
        assert visit.peak_memory_bytes > 2**26
    assert (out / "report.html").read_text().count("<svg") >= 1
    assert (out / "devices.csv").exists()
    assert "of a step in" in done.stdout
    assert not [path for path in out.iterdir() if path.name.startswith(".work-")]
    assert not workers_of(out)


def _runs(process: psutil.Process) -> bool:
    """Whether a process still runs. In a container, an orphan may stay a zombie."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize(
    "options, words",
    [
        (["--study", "batches"], "unknown; the studies are features, batch"),
        (["--budget", "0"], "--budget 0: give between 0.17 and 10080 minutes"),
        (["--device", "cuda"], "finds no GPU here"),
        (["--model", "nothing"], "give MODULE:CLASS"),
        (["--model", "missing.py:Net"], "there is no file"),
        (["--compare", "one", "two"], "has no points.jsonl"),
        (["--out", "file/out"], "Not a directory"),
        (["--out", "garbage"], f"{FILE_NAME}, line 1"),
    ],
)
def test_wrong_input_is_refused_with_the_reason_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: list[str], words: str
) -> None:
    if "cuda" in options and os.path.exists("/dev/nvidia0"):
        pytest.skip("there is a GPU")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    (tmp_path / "garbage").mkdir()
    (tmp_path / "garbage" / FILE_NAME).write_text(json.dumps({"kind": "other"}) + "\n")
    assert main(["lab", "characterize", *options]) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "characterization").exists()
