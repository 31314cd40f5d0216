"""The component as `torchx run` uses it: by file path, linted by TorchX."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

COMPONENT = Path(__file__).parents[2] / "components" / "elastic.py"


def torchx(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torchx.cli.main", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120, check=False)


def test_torchx_runs_the_component_by_file_path(tmp_path: Path) -> None:
    options = ["--script", "train.py", "--rdzv_endpoint", "10.0.0.7:2379", "--rdzv_id", "job", "--workers", "1:4"]
    done = torchx("run", "--dryrun", "-s", "local_cwd", f"{COMPONENT}:train", *options, "--", "--epochs", "3", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for argument in (
        "--rdzv-backend=etcd-v3",
        "--rdzv-endpoint=10.0.0.7:2379",
        "--rdzv-id=job",
        "--nnodes=1:4",
        "--nproc-per-node=1",
        "train.py",
        "--epochs",
    ):
        assert f"'{argument}'" in done.stdout, argument


def test_torchx_names_an_option_that_is_missing(tmp_path: Path) -> None:
    done = torchx("run", "--dryrun", "-s", "local_cwd", f"{COMPONENT}:train", "--script", "train.py", cwd=tmp_path)
    assert done.returncode != 0
    assert "rdzv_endpoint" in done.stderr + done.stdout
