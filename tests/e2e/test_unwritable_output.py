"""`dlrover run` when its own files, its nodes' output or its terminal become unwritable."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

from lightning_dlrover.rdzv.etcd.server import EmbeddedEtcd
from lightning_dlrover.report.status import read_event_file
from tests.support.dlrover_process import Dlrover

SCRIPT = Path(__file__).with_name("tiny_loop.py")
LIMIT = 4  # KiB

TALKATIVE = """
from tests.e2e import tiny_script
quiet = tiny_script.TinyModel.training_step
def training_step(self, batch, batch_idx):
    print("x" * 200, flush=True)
    return quiet(self, batch, batch_idx)
tiny_script.TinyModel.training_step = training_step
tiny_script.main()
print("the last line")
"""


def test_full_log_disk_ends_no_job(dlrover: Dlrover, etcd: EmbeddedEtcd, run_id: str, tmp_path: Path) -> None:
    """A limit on the size of all files simulates a full disk, which etcd does not use."""
    script = tmp_path / "script.py"
    script.write_text(TALKATIVE)
    run = [sys.executable, "-m", "lightning_dlrover.cli", "run", "--endpoint", etcd.endpoint, "--rdzv-id", run_id]
    job = [*run, "--workers", "1:1", str(script), "--steps", "100", "--window-s", "0.1"]
    # Python would keep a compiled module that the limit has cut.
    limited = f'ulimit -f {LIMIT}; export PYTHONDONTWRITEBYTECODE=1; exec "$@"'
    done = dlrover.process(["bash", "-c", limited, "bash", *job], timeout_s=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr.count("events are missing") == 1
    assert "Traceback" not in done.stderr
    assert "no report was written" in done.stderr
    files = {file.name: file.stat().st_size for file in (tmp_path / "runs" / run_id).rglob("*") if file.is_file()}
    assert files["events.jsonl"] == files["stdout.log"] == LIMIT * 1024  # both files were cut
    assert read_event_file(tmp_path / "runs" / run_id / "events.jsonl")
    assert re.search(r"steps +100\n", dlrover("report", "--endpoint", etcd.endpoint, run_id).stdout)


def test_lost_terminal_ends_no_job(dlrover: Dlrover, etcd: EmbeddedEtcd, run_id: str, tmp_path: Path) -> None:
    window, terminal = pty.openpty()
    os.close(window)
    run = [sys.executable, "-m", "lightning_dlrover.cli", "run", "--endpoint", etcd.endpoint, "--rdzv-id", run_id]
    job = [*run, "--workers", "1:1", str(SCRIPT), "--steps", "20"]
    process = subprocess.Popen(
        job, cwd=tmp_path, env=dlrover.environment, stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True
    )
    os.close(terminal)
    assert process.wait(90) == 0
    assert [e.kind for e in read_event_file(tmp_path / "runs" / run_id / "events.jsonl")][-1] == "finished"
    assert (tmp_path / "runs" / run_id / "report.html").exists()
