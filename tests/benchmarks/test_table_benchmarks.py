"""The benchmarks of models with sharded tables run in their short form and report the promised figures."""

from __future__ import annotations

import math

import pytest
from test_benchmarks import DEADLINE_S, quick_result, takes_minutes

pytest.importorskip("torchrec", reason="sharded tables need torchrec")


@pytest.mark.slow
@takes_minutes
@pytest.mark.timeout(DEADLINE_S + 40)
def test_resharding_in_memory_is_shorter_than_a_restart() -> None:
    result = quick_result("reshard.py")
    assert list(result) == ["stall_s", "ratio", "bytes_ratio", "bandwidth_ratio", "extra_memory", "kill_s"]
    assert -0.5 < result["stall_s"] < 10  # a usual step is subtracted, and these may be shared cores
    assert result["ratio"] > 2
    assert result["bytes_ratio"] == pytest.approx(1.0, abs=0.01)  # counted, not timed
    assert result["bandwidth_ratio"] > 0
    assert math.isfinite(result["extra_memory"])  # not meaningful for small tables
    assert -2 < result["kill_s"] < 20


@pytest.mark.slow
@takes_minutes
@pytest.mark.timeout(DEADLINE_S + 40)
def test_snapshots_leave_most_of_the_throughput() -> None:
    result = quick_result("snapshot.py")
    assert list(result) == ["throughput_ratio", "stall_ratio"]
    assert 0.2 < result["throughput_ratio"] < 5
    assert 0 < result["stall_ratio"] < 5
