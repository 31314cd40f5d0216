"""The benchmark of policies for a cluster prints the figures of its docstring, and refuses folders without traces."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import cluster_workloads
import pytest
from cluster_policies import compare
from jobs import BenchmarkError

from lightning_dlrover.lab.simulate import simulator, traces
from lightning_dlrover.lab.simulate.simulator import Cluster
from lightning_dlrover.lab.simulate.study import read_inputs
from lightning_dlrover.lab.simulate.traces import TraceError
from tests.support.benchmark_figures import ONE_THREAD, figures_of
from tests.support.measured_clusters import write_speeds, write_trace

ROOT = Path(__file__).resolve().parents[2]
SPEEDS = Path(os.environ.get("DLROVER_SHARED_DATA", ROOT.parent / "shared" / "data")) / "step_traces"


@pytest.mark.long
def test_every_policy_is_compared_on_every_workload(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(traces.SAMPLES, "toy", 64 * 50)
    monkeypatch.setitem(traces.RESTART_S, "toy", 20.0)
    for number in (1, 2, 3):
        write_trace(tmp_path / f"workload-{number}.csv", num_jobs=3, gap_s=20.0 * number)
    speeds = write_speeds(tmp_path / "speeds", per_node=4)
    flow, gavel = tmp_path / "cluster01.csv", tmp_path / "jobs-1.csv"
    flow.write_text("job_id,submission_time,duration,num_gpu\na,0,500,1\nb,60,900,2\n")
    gavel.write_text("job,num_devices,total_steps,arrival_s\nLM (batch size 5),1,600,0\nLM (batch size 5),2,6000,30\n")
    (tmp_path / "throughputs.csv").write_text("device,job,num_devices,steps_per_s\nv100,LM (batch size 5),1,2\n")
    monkeypatch.setitem(cluster_workloads.LIKE, "LM", "toy")
    monkeypatch.setattr(traces, "USUAL_BATCHES", {"toy": (64,)})
    for module in (simulator, cluster_workloads):
        monkeypatch.setattr(module, "USUAL_BATCHES", traces.USUAL_BATCHES)
    figures = compare(
        tmp_path,
        speeds,
        tmp_path / "out",
        num_seeds=2,
        processes=1,
        quick=False,
        policies=["jct", "sia", "pollux"],
        elsewhere=[flow, gavel],
    )
    names = ["jct_vs_best", "best", "jct_unknown", "resizes_unknown", "worst_workload", "live_gain", "p99_ratio"]
    assert list(figures) == names
    assert figures["best"] in ("sia", "pollux")
    shown = capsys.readouterr().out
    tables = re.findall(r"^(.+): mean JCT / p99", shown, re.MULTILINE)
    assert len(tables) == 10
    for title in ("load 2", "other sources, lengths unknown", "live resizes, lengths known"):
        assert title in tables
    assert "elasticflow-cluster01" in shown
    assert (tmp_path / "out" / "report.html").exists()


def test_other_loads_and_sources_keep_the_jobs_and_change_their_arrivals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(traces.SAMPLES, "toy", 64 * 50)
    speeds = write_speeds(tmp_path / "speeds", per_node=4)
    inputs, (trace,) = read_inputs([write_trace(tmp_path / "workload-1.csv", 3)], speeds, Cluster(2, 4))
    assert [job.at_s for job in cluster_workloads.at_load(trace, 2.0).submissions] == [0, 30, 60]
    path = tmp_path / "jobs-1.csv"
    path.write_text("job,num_devices,total_steps,arrival_s\nLM (batch size 5),2,600,7\nA3C,1,10000,9\n")
    (tmp_path / "throughputs.csv").write_text("device,job,num_devices,steps_per_s\nv100,LM (batch size 5),2,3\nv100,A3C,1,5\n")
    monkeypatch.setattr(cluster_workloads, "USUAL_BATCHES", {"toy": (64,)})
    monkeypatch.setattr(cluster_workloads, "LIKE", {"LM": "toy", "A3C": "toy"})
    found = cluster_workloads.read_elsewhere(path, inputs).submissions
    assert [(job.duration_s, job.num_devices) for job in found] == [(200.0, 2), (2000.0, 1)]
    assert [job.at_s for job in found] == [0, (2 * 200 + 2000) / 8]  # the device seconds asked for, over the devices
    path.write_text("job,num_devices,total_steps,arrival_s\nDLRM,2,600,7\n")
    with pytest.raises(BenchmarkError, match=r"jobs-1\.csv:2: the speed of 'DLRM' is not in throughputs\.csv of v100"):
        cluster_workloads.read_elsewhere(path, inputs)


def quickly(folder: Path, **options: Any) -> None:
    compare(folder, folder, folder / "out", num_seeds=1, processes=1, quick=True, **options)


def test_folders_without_traces_or_speeds_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BenchmarkError, match=r"holds no workload-N\.csv"):
        quickly(tmp_path)
    write_trace(tmp_path / "workload-1.csv")
    with pytest.raises(BenchmarkError, match=r"holds no workload-N\.csv"):
        quickly(tmp_path, workloads=[2])
    with pytest.raises(TraceError, match=r"holds no file NAME-placements\.csv"):
        quickly(tmp_path)


def test_figures_need_jct_and_another_policy(tmp_path: Path) -> None:
    for policies in (["jct"], ["as-requested", "sia"]):
        with pytest.raises(BenchmarkError, match="the figures need jct and another policy"):
            quickly(tmp_path, policies=policies)


@pytest.mark.skipif(not SPEEDS.is_dir(), reason=f"no {SPEEDS}: set DLROVER_SHARED_DATA to the folder that holds step_traces")
@pytest.mark.long
def test_one_decision_for_a_large_cluster_is_fast_and_near_the_optimum() -> None:
    figures = figures_of("cluster.py", "--scale", "--quick", "--speeds", str(SPEEDS), environment=ONE_THREAD)
    assert list(figures) == ["decision_s", "decision_mb", "optimality"]
    assert figures["decision_s"] < 5  # 0.25 s on an idle core
    assert figures["decision_mb"] < 500
    assert figures["optimality"] >= 0.98
