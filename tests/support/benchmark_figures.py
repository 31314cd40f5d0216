"""Run a benchmark as a user does, and read its last line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

__all__ = ["figures_of"]

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def figures_of(script: str, *options: str, timeout_s: float = 280) -> dict[str, float]:
    """Return the figures of the last line that a script of `benchmarks/` prints."""
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / script), *options],
        env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return {name: float(value) for name, value in (pair.split("=") for pair in done.stdout.splitlines()[-1].split())}
