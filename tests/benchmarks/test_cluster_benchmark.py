"""Benchmarks of a cluster: policies, jobs with too large requests, and the simulation of real jobs."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import cluster_workloads
import pytest
from cluster_fidelity import CORES, JOBS, Inputs, simulated_times
from cluster_policies import compare
from cluster_requests import LOAD, MEMORY_USE_OF_REQUEST, NUM_NODES, UNITS_PER_NODE, Result, draw_requests, run
from jobs import BenchmarkError

from lightning_dlrover.lab.simulate import simulator, traces
from lightning_dlrover.lab.simulate.simulator import Cluster
from lightning_dlrover.lab.simulate.study import read_inputs
from lightning_dlrover.lab.simulate.traces import TraceError
from tests.support.measured_clusters import write_speeds, write_trace

ROOT = Path(__file__).resolve().parents[2]


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


# --- jobs with too large requests --------------------------------------------------------------------------------------------


SEED = 7


def test_drawn_requests_use_as_little_of_their_cores_as_was_published() -> None:
    shares = [request.cores / request.asked_cores for request in draw_requests(400, SEED)]
    assert min(shares) > 0.16
    assert max(shares) <= 0.31


def test_drawn_jobs_ask_for_more_than_the_cluster_by_the_load() -> None:
    requests = draw_requests(2000, SEED)
    unit_s = sum(request.asked_units * request.seconds for request in requests)
    span_s = requests[-1].at_s - requests[0].at_s
    assert unit_s / span_s / (NUM_NODES * UNITS_PER_NODE) == pytest.approx(LOAD, rel=0.1)


def test_memory_ends_only_in_jobs_that_outgrow_their_request() -> None:
    for request in draw_requests(400, SEED):
        assert (request.fails_at_steps < request.steps) == (request.peak_gib > request.asked_gib)


@pytest.fixture(scope="module")
def results() -> dict[str, Result]:
    requests = draw_requests(40, SEED)
    return {policy: run(requests, policy, SEED) for policy in ("as-requested", "jct")}


def test_all_jobs_end_or_fail_under_both_policies(results: dict[str, Result]) -> None:
    for result in results.values():
        assert len(result.outcome.finished) == 40


def test_resized_jobs_leave_fewer_cores_idle(results: dict[str, Result]) -> None:
    assert results["jct"].cpu > results["as-requested"].cpu + 0.1


def test_users_jobs_use_about_the_published_share_of_their_memory(results: dict[str, Result]) -> None:
    assert MEMORY_USE_OF_REQUEST[0] - 0.05 < results["as-requested"].memory < MEMORY_USE_OF_REQUEST[1] + 0.1


def test_jobs_under_ours_ended_with_all_their_steps(results: dict[str, Result]) -> None:
    assert mean(float(ended.is_whole) for ended in results["jct"].outcome.finished) >= 0.95


# --- simulated side of real jobs ---------------------------------------------------------------------------------------------


INPUTS = Inputs(start_s=10.0, steps_per_s=(7.0, 11.0), join_s=6.0, leave_s=1.0, pause_s=0.5)


def test_each_simulated_job_takes_at_least_its_start_and_its_steps_at_full_speed() -> None:
    times, _ = simulated_times(INPUTS)
    assert sorted(times) == sorted(job.name for job in JOBS)
    for job in JOBS:
        assert times[job.name] >= 10.0 + job.steps / 11.0


def test_simulated_jobs_need_their_core_seconds() -> None:
    times, _ = simulated_times(replace(INPUTS, steps_per_s=(7.0, 14.0), join_s=0.0, leave_s=0.0, pause_s=0.0))
    core_s = sum(10.0 + job.steps / 7.0 for job in JOBS)
    assert max(job.at_s + times[job.name] for job in JOBS) >= core_s / CORES


def test_simulated_jobs_change_their_sizes_and_workers_that_join_later_delay_them() -> None:
    quick, num_changes = simulated_times(INPUTS)
    late, _ = simulated_times(replace(INPUTS, join_s=30.0))
    assert num_changes >= 4
    assert sum(late.values()) > sum(quick.values())


def test_a_faster_machine_ends_all_simulated_jobs_earlier() -> None:
    fast, _ = simulated_times(replace(INPUTS, start_s=5.0, steps_per_s=(14.0, 22.0)))
    assert all(fast[name] < taken for name, taken in simulated_times(INPUTS)[0].items())
