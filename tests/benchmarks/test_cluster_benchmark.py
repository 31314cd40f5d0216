"""The benchmark of policies for a cluster prints the figures of its docstring, and refuses folders without traces."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from benchmark_figures import figures_of
from cluster_policies import compare
from jobs import BenchmarkError
from measured_clusters import write_speeds, write_trace

from lightning_dlrover.perf.traces import TraceError
from lightning_dlrover.planner.cluster import work

ROOT = Path(__file__).resolve().parents[2]
SPEEDS = Path(os.environ.get("DLROVER_SHARED_DATA", ROOT.parent / "shared" / "data")) / "step_traces"


@pytest.mark.long
def test_every_policy_is_compared_on_every_workload(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(work.SAMPLES, "toy", 64 * 50)
    monkeypatch.setitem(work.RESTART_S, "toy", 20.0)
    for number in (1, 2, 3):
        write_trace(tmp_path / f"workload-{number}.csv", num_jobs=3, gap_s=20.0 * number)
    speeds = write_speeds(tmp_path / "speeds", per_node=4)
    figures = compare(tmp_path, speeds, tmp_path / "out", num_seeds=1, curve_seeds=1, processes=1, quick=False)
    assert list(figures) == ["jct_vs_sia", "jct_vs_pollux", "wins", "of", "live_gain", "p99_ratio"]
    assert figures["of"] == 3
    shown = capsys.readouterr().out
    assert "those of the constants" in shown
    assert "the others" in shown
    assert (tmp_path / "out" / "report.html").exists()


def quickly(folder: Path, **options: Any) -> None:
    compare(folder, folder, folder / "out", num_seeds=1, curve_seeds=1, processes=1, quick=True, **options)


def test_folders_without_traces_or_speeds_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BenchmarkError, match=r"holds no workload-N\.csv"):
        quickly(tmp_path)
    write_trace(tmp_path / "workload-1.csv")
    with pytest.raises(BenchmarkError, match=r"holds no workload-N\.csv"):
        quickly(tmp_path, workloads=[2])
    with pytest.raises(TraceError, match=r"holds no file NAME-placements\.csv"):
        quickly(tmp_path)


def test_policies_that_the_figures_need_cannot_be_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(work.SAMPLES, "toy", 64 * 50)
    write_trace(tmp_path / "workload-1.csv")
    write_speeds(tmp_path, per_node=4)
    with pytest.raises(BenchmarkError, match=r"the figures need pollux, sia, too: add them to --policy"):
        quickly(tmp_path, policies=["ours", "as-requested"])


@pytest.mark.skipif(not SPEEDS.is_dir(), reason=f"no {SPEEDS}: set DLROVER_SHARED_DATA to the folder that holds step_traces")
@pytest.mark.long
def test_one_decision_for_a_large_cluster_is_fast_and_near_the_optimum() -> None:
    figures = figures_of("cluster.py", "--scale", "--quick", "--speeds", str(SPEEDS))
    assert list(figures) == ["decision_s", "decision_mb", "optimality"]
    assert figures["decision_s"] < 5  # 0.25 s on an idle core
    assert figures["decision_mb"] < 500
    assert figures["optimality"] >= 0.98
