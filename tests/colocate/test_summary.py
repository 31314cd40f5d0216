"""Figures of a queue that its journal supports, and none that it does not."""

from __future__ import annotations

import pytest

from lightning_dlrover.colocate.journal import Added, Ended, JobSpec, Opened, Profiled, Record, Span, Started
from lightning_dlrover.colocate.report import _kinds, summarize, summary_text


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
