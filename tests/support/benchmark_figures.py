"""Run a benchmark as a user does, and read its last line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
DEADLINE_S = 240.0
"""Time limit of a short form on shared cores, in seconds; on two idle ones it needs less than 60 s."""


ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def figures_of(script: str, *options: str, environment: Mapping[str, str] | None = None) -> dict[str, float]:
    """Return the figures of the last line that a script of `benchmarks/` prints.

    Args:
        environment: variables on top of the test's own, such as `ONE_THREAD` for a benchmark that computes in its process.

    Raises:
        AssertionError: it failed, or was not done in time. It has ended its processes then.
    """
    benchmark = subprocess.Popen(
        [sys.executable, str(BENCHMARKS / script), *options],
        env={**os.environ, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        output, errors = benchmark.communicate(timeout=DEADLINE_S)
    except subprocess.TimeoutExpired:
        benchmark.send_signal(signal.SIGINT)  # it ends all its processes
        output, errors = benchmark.communicate(timeout=30.0)
        raise AssertionError(f"{script} {options} was not done after {DEADLINE_S:.0f} s: {output}{errors}") from None
    assert benchmark.returncode == 0, output + errors
    return {name: float(value) for name, value in (pair.split("=") for pair in output.splitlines()[-1].split())}
