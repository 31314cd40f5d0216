from __future__ import annotations

from pathlib import Path

import pytest

from lightning_dlrover.colocate.journal import (
    Added,
    Ended,
    JobSpec,
    Journal,
    JournalError,
    Opened,
    Profiled,
    Rates,
    Record,
    Span,
    Started,
    read_records,
)
from lightning_dlrover.colocate.report import _kinds, summarize, summary_text

RECORDS: tuple[Record, ...] = (
    Opened("fifo", 2.0, 1 << 30, 1.0),
    Added(JobSpec("a", ("x", "y"), "/", {"A": "b"}), 1.5),
    Started("a", 1, "cpu", 2.0),
    Profiled("abc", "cpu", {"cores": 0.5}, 3.0),
    Rates("cpu", {"abc": 0.5}, ("abc", "abc"), 4.0),
    Ended("a", 1, "done", 0, "", 5.0, 3.0, 0.0, 2.5, 1 << 20, spans=(Span("running", 2.0, 5.0),)),
)


def test_all_records_are_read_as_written(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        for record in RECORDS:
            journal.add(record)
        mark = journal.queue
    assert tuple(read_records(tmp_path)) == RECORDS
    with Journal(tmp_path) as again:
        assert tuple(again.records) == RECORDS
        assert again.queue == mark


def test_line_that_a_killed_dispatcher_left_is_removed(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        journal.add(RECORDS[0])
    with (tmp_path / "queue.jsonl").open("a") as stream:
        stream.write('{"kind":"started","jo')
    with Journal(tmp_path) as journal:
        journal.add(RECORDS[2])
    assert read_records(tmp_path) == [RECORDS[0], RECORDS[2]]


def test_second_dispatcher_is_refused(tmp_path: Path) -> None:
    with Journal(tmp_path), pytest.raises(JournalError, match="in use by another dispatcher"):
        Journal(tmp_path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("nonsense", "line 2 is not JSON"),
        ('{"kind":"nothing"}', "line 2 is b'"),
        ('{"kind":"started","job":"a"}', "line 2: field 'attempt'"),
        (
            '{"kind":"ended","job":"a","attempt":1,"result":"?","code":0,"reason":"","at":1,"run_s":1,"paused_s":0,"cpu_s":0,"peak_bytes":0}',
            "result '?'",
        ),
    ],
)
def test_unreadable_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    with Journal(tmp_path):
        pass
    with (tmp_path / "queue.jsonl").open("a") as stream:
        stream.write(line + "\n")
    with pytest.raises(JournalError) as refused:
        Journal(tmp_path)
    assert message in str(refused.value)
    assert "remove the line" in str(refused.value)


def test_journal_of_another_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "queue.jsonl").write_text('{"kind":"header","format":9,"queue":"q"}\n')
    with pytest.raises(JournalError, match="format 9, this release reads 1"):
        Journal(tmp_path)


def test_folder_without_a_queue_is_named(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="holds no queue"):
        read_records(tmp_path)


def queue(seconds: float, alone: tuple[float, ...], num_steps: int = 100) -> list[Record]:
    """A queue of one job, which trains for `seconds`, and the speeds that its kind had alone."""
    spec = JobSpec("a", ("train",), "/")
    spans = (Span("running", 0.0, seconds),)
    ended = Ended("a", 1, "done", 0, "", seconds, seconds, 0.0, seconds, 1 << 20, num_steps=num_steps, spans=spans)
    profiled = [Profiled(spec.kind, "cpu", {"cores": 1.0}, speed) for speed in alone]
    return [Opened("fifo", 1.0, 1 << 30, 0.0), Added(spec, 0.0), Started("a", 1, "cpu", 0.0), *profiled, ended]


@pytest.mark.parametrize(
    "seconds, slowdown",
    [(5.0, 1.0), (12.0, 1.0), (40.0, 4.0)],
    ids=["faster than ever alone", "as fast as in the slowest measurement", "slower than any"],
)
def test_slowdown_is_judged_by_all_measurements_alone(seconds: float, slowdown: float) -> None:
    [job] = summarize(queue(seconds, (8.0, 10.0, 25.0))).jobs
    assert job.slowdown == pytest.approx(slowdown)


@pytest.mark.parametrize("seconds, is_shown", [(0.04, False), (120.0, True)])
def test_jobs_per_hour_need_a_minute(seconds: float, is_shown: bool) -> None:
    assert ("jobs/h" in summary_text(summarize(queue(seconds, ())))) == is_shown


def test_kind_measured_several_times_is_one_row_with_a_range() -> None:
    [row] = _kinds(queue(5.0, (8.0, 10.0, 25.0)), {JobSpec("a", ("train",), "/").kind: "a"})
    assert row[:3] == ("a", "8 to 25", "1.00")
