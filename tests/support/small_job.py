"""A job of two workers in an environment of its own, with a script outside of the repository."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tests.support.checkouts import REPOSITORY
from tests.support.dlrover_process import Dlrover
from tests.support.environments import Environment

SCRIPT = Path(__file__).with_name("small_script.py")
STEPS = 30
JOB_S = 150.0


def run_small_job(environment: Environment, folder: Path) -> None:
    """Run `dlrover run --workers 2` in an empty folder to its end, and assert that both workers used the environment alone."""
    shutil.copy(SCRIPT, folder / "train.py")
    dlrover = Dlrover(folder)
    command = [str(environment.folder / "bin" / "dlrover"), "run", "--workers", "2", "--rdzv-id", "job", "train.py", str(STEPS)]
    alone = {"PYTHONPATH": "", "VIRTUAL_ENV": "", "PATH": environment.variables["PATH"], "DLROVER_HISTORY": "off"}
    try:
        ran = dlrover.process(command, JOB_S, **alone)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        dlrover.wait_for_end()
    finally:
        dlrover.end()
    workers = [json.loads(file.read_text()) for file in folder.glob("worker-*.json")]
    assert [(worker["steps"], worker["world_size"]) for worker in workers] == [(STEPS, 2), (STEPS, 2)], ran.stdout
    for worker in workers:
        assert worker["package"] == str(environment.packages / "lightning_dlrover" / "__init__.py")
        assert [path for path in worker["path"] if Path(path).resolve().is_relative_to(REPOSITORY)] == []
    assert (folder / "runs" / "job" / "report.html").stat().st_size > 0
