"""Submissions are read in order of time, and jobs that cannot be are refused with source and line."""

from __future__ import annotations

import pytest

from lightning_dlrover.lab.simulate.traces import SHAKE_S, Submission, WorkloadError, read_submissions, shaken

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
