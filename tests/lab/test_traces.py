"""Files of windows, jobs and work are read completely, or refused with name and line. Contradictions are reported."""

from __future__ import annotations

import csv
import dataclasses
import json
from pathlib import Path

import pytest

from lightning_dlrover.cli.main import main
from lightning_dlrover.lab.simulate.traces import (
    RESTART_S,
    SAMPLES,
    SHAKE_S,
    USUAL_BATCHES,
    Submission,
    TraceError,
    WorkloadError,
    read_submissions,
    read_trace,
    read_work,
    shaken,
)
from lightning_dlrover.tuning import configuration_of
from tests.support.windows import window, written


def test_a_placement_is_workers_on_each_node(tmp_path: Path) -> None:
    (sample,) = read_trace(written(tmp_path, "placement,local_bsz,step_time,sync_time\n124,32,0.5,0.2\n")).samples
    configuration = configuration_of(sample)
    assert (configuration.num_nodes, configuration.num_workers, configuration.local_batch) == (3, 7, 32)
    assert (configuration.fullest_node, configuration.emptiest_node) == (4, 1)
    assert (sample.step_time_s, sample.communication_s) == (0.5, 0.2)
    assert sample.forward_s == pytest.approx(0.3)


def test_nodes_and_replicas_serve_as_well_and_sync_time_may_be_missing(tmp_path: Path) -> None:
    (sample,) = read_trace(written(tmp_path, "num_nodes,num_replicas,local_bsz,step_time,note\n2,8,32,0.5,x\n")).samples
    assert (sample.num_nodes, sample.num_workers, sample.global_batch) == (2, 8, 256)
    assert sample.communication_s == sample.forward_s == 0.0


@pytest.mark.parametrize("form", ["csv", "jsonl"])
def test_profiles_of_our_own_are_read_back_as_they_were(tmp_path: Path, form: str) -> None:
    profiles = [window(2, 0.125, communication_s=0.025), window(3, 0.1)]
    rows = [dataclasses.asdict(profile) for profile in profiles]
    path = tmp_path / f"windows.{form}"
    with path.open("w", newline="") as file:
        if form == "jsonl":
            file.writelines(json.dumps(row) + "\n" for row in rows)
        else:
            table = csv.DictWriter(file, list(rows[0]))
            table.writeheader()
            table.writerows(rows)
    assert read_trace(path).samples == tuple(profiles)


@pytest.mark.parametrize(
    "text, said",
    [
        ("", "has no rows"),
        ("placement,local_bsz\n1,32\n", r":2 has no step_time_s \(step_time\), in seconds"),
        ("placement,step_time\n1,0.1\n", r":2 has no local_batch \(local_bsz\)"),
        ("local_bsz,step_time\n32,0.1\n", r":2 has no num_workers \(num_replicas or placement\)"),
        ("placement,local_bsz,step_time\n1,32,0.1\n1,64,-0.1\n", r":3: step_time='-0.1' must be finite and not negative"),
        ("placement,local_bsz,step_time\n1,32,0\n", r":2: step_time=0.0 is not a time"),
        ("placement,local_bsz,step_time\n1,32,nan\n", r":2: step_time='nan' must be finite"),
        ("placement,local_bsz,step_time\n1,32,45000\n", r":2: step_time=45000 would be hours; .*milliseconds"),
        ("placement,local_bsz,step_time\n1,32,fast\n", r":2: step_time='fast' is not a number"),
        ("placement,local_bsz,step_time\n1-2,32,0.1\n", r":2: placement='1-2' is not one digit"),
        ("placement,local_bsz,step_time\n102,32,0.1\n", r":2: placement='102' is not one digit"),
        ("placement,local_bsz,step_time\n1,32.5,0.1\n", r":2: local_bsz='32.5' must be a whole number"),
        ("placement,local_bsz,step_time\n1,0,0.1\n", r":2: local_batch=0 must be 1 or more"),
        ("num_nodes,num_replicas,local_bsz,step_time\n8,2,32,0.1\n", r":2: 2 workers cannot be on 8 nodes"),
        ("placement,local_bsz,step_time,cores\n1,32,0.1,0\n", r":2: cores=0.0 must be finite and above 0"),
        ("placement,local_bsz,step_time,global_batch\n1,32,0.1,0\n", r":2: global_batch=0 must be 1 or more"),
        ("placement,local_bsz,step_time\n1,32\n", r":2 has another number of fields"),
    ],
)
def test_a_broken_file_is_refused_with_the_line_and_the_cause(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(TraceError, match=said):
        read_trace(written(tmp_path, text))


def test_a_line_that_is_no_profile_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"trace\.jsonl:1 is not a JSON object"):
        read_trace(written(tmp_path, "hello\n", "trace.jsonl"))


def test_contradictions_between_rows_and_between_units_are_reported(tmp_path: Path) -> None:
    text = "placement,local_bsz,step_time,sync_time\n11,32,0.1,0.05\n11,32,0.11,0.05\n11,32,0.9,0.05\n1,64,0.1,50\n"
    trace = read_trace(written(tmp_path, text))
    assert len(trace.samples) == 4
    assert len(trace.remarks) == 2
    assert "trace.csv:4: step_time=0.9 s contradicts 0.1 s in line 2" in trace.remarks[0]
    assert "trace.csv:5: sync_time=50 s is longer than step_time=0.1 s" in trace.remarks[1]


def rows(sizes: range) -> str:
    lines = [f"{w},{b},{0.01 + 0.001 * b + 0.002 * w}" for w in sizes for b in (8, 16, 32, 64)]
    return "\n".join(["placement,local_bsz,step_time", *lines, ""])


def test_command_prints_errors_of_three_models_and_the_coverage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train, test = written(tmp_path, rows(range(1, 8)), "a.csv"), written(tmp_path, rows(range(8, 10)), "b.csv")
    assert main(["lab", "evaluate", "--train", str(train), "--test", str(test)]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    values = {name: float(value) for name, value in (pair.split("=") for pair in last.split())}
    assert list(values) == ["mape", "prior_mape", "trees_mape", "coverage"]
    assert values["mape"] < 5
    assert 0 <= values["coverage"] <= 100


def test_command_names_the_fault_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = written(tmp_path, rows(range(1, 4)), "a.csv"), written(tmp_path, "step_time\n1\n", "b.csv")
    assert main(["lab", "evaluate", "--train", str(good), "--test", str(bad)]) == 2
    assert "b.csv:2 has no num_workers" in capsys.readouterr().err
    assert main(["lab", "evaluate", "--train", str(tmp_path / "none.csv"), "--test", str(good)]) == 2
    assert "cannot read" in capsys.readouterr().err


def test_all_tables_hold_the_same_applications() -> None:
    assert set(SAMPLES) == set(RESTART_S) == set(USUAL_BATCHES)


def test_work_is_read_by_application(tmp_path: Path) -> None:
    path = tmp_path / "work.csv"
    path.write_text("application,samples\nncf,1e6\nbert,5\n")
    assert read_work(path) == {"ncf": 1_000_000, "bert": 5}


@pytest.mark.parametrize(
    "text, message",
    [
        ("model,samples\nncf,1\n", r"work.csv:1: no column application"),
        ("application,samples\nncf,1\nbert,-1\n", r"work.csv:3: samples is '-1'"),
        ("application,samples\nncf,many\n", r"work.csv:2: samples is 'many'"),
        ("application,samples\n,5\n", r"work.csv:2: the application has no name"),
    ],
)
def test_a_bad_line_is_refused_with_its_number(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "work.csv"
    path.write_text(text)
    with pytest.raises(WorkloadError, match=message):
        read_work(path)


HEAD = "time,name,application,num_replicas,batch_size"
KNOWN = ("ncf", "bert")


def read(*rows: str, head: str = HEAD) -> list[Submission]:
    return read_submissions([head, *rows], "week.csv", KNOWN, 64)


def test_submissions_are_read_in_order_of_time() -> None:
    jobs = read("7.5,b,bert,4,48", "0,a,ncf,1,32768")
    assert jobs == [Submission("a", "ncf", 0.0, 1, 32768), Submission("b", "bert", 7.5, 4, 48)]


def test_jobs_without_a_name_are_named_after_their_line() -> None:
    jobs = read("0,ncf,1,10", "1,ncf,2,10", head="time,application,num_replicas,batch_size")
    assert [job.name for job in jobs] == ["ncf-2", "ncf-3"]


@pytest.mark.parametrize(
    "row, message",
    [
        ("-3,a,ncf,1,10", r"week.csv:3: the job comes at -3 s"),
        ("3,a,gpt,1,10", r"week.csv:3: model 'gpt' is unknown; known are bert, ncf"),
        ("3,a,ncf,65,10", r"week.csv:3: the job asks for 65 devices, the cluster has 64"),
        ("3,a,ncf,0,10", r"week.csv:3: num_replicas is 0"),
        ("3,a,ncf,1,1.5", r"week.csv:3: batch_size is 1.5"),
        ("soon,a,ncf,1,10", r"week.csv:3: time is 'soon', which is not a finite number"),
        ("nan,a,ncf,1,10", r"week.csv:3: time is 'nan'"),
        ("3,a,ncf", r"week.csv:3: the line has 3 of 5 fields"),
        ("3,first,ncf,1,10", r"week.csv:3: the name 'first' is that of line 2, too"),
    ],
)
def test_jobs_that_cannot_be_are_refused_with_their_line(row: str, message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        read("0,first,ncf,1,10", row)


def test_a_trace_of_another_form_is_refused_with_the_columns() -> None:
    with pytest.raises(WorkloadError, match=r"week.csv:1: no column application, num_replicas, batch_size; .* job_id"):
        read("0,1", head="time,steps")


FLOW = "job_id,submission_time,duration,num_gpu"


def test_a_trace_of_durations_is_told_apart_by_its_columns() -> None:
    jobs = read("9,5,300,4", ",2,60,1", head=FLOW)
    assert jobs == [Submission("job-3", "", 2.0, 1, 0, 60.0), Submission("9", "", 5.0, 4, 0, 300.0)]


@pytest.mark.parametrize(
    "row, message",
    [
        ("a,-1,5,1", r"week.csv:2: the job comes at -1 s"),
        ("a,1,0,1", r"week.csv:2: duration is 0 s"),
        ("a,1,5,65", r"week.csv:2: the job asks for 65 devices"),
        ("a,1,5,none", r"week.csv:2: num_gpu is 'none'"),
    ],
)
def test_durations_that_cannot_be_are_refused_with_their_line(row: str, message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        read(row, head=FLOW)


def test_shaking_moves_each_arrival_a_little_and_seed_0_moves_none() -> None:
    jobs = read(*(f"{100 * n},j{n},ncf,1,10" for n in range(20)))
    moved = {job.name: job.at_s for job in shaken(jobs, 1)}
    assert all(0 < abs(moved[job.name] - job.at_s) <= SHAKE_S or job.at_s == 0 for job in jobs)
    assert min(moved.values()) >= 0
    assert shaken(jobs, 0) == jobs
    assert shaken(jobs, 1) == shaken(jobs, 1) != shaken(jobs, 2)
