"""The choice of the windows that are written to etcd."""

from __future__ import annotations

from dataclasses import replace

import pytest
from windows import WINDOW

from lightning_dlrover.learn.profile_log import (
    LOG_EVERY_S,
    NUM_LOGGED_SINGLY,
    PublishedProfile,
    WindowLog,
    merged,
)
from lightning_dlrover.perf.samples import StepProfile


def windows(count: int, **changes: float) -> list[StepProfile]:
    """Windows of two seconds each, one after the other."""
    return [replace(WINDOW, first_step=20 * i, at=1000.0 + 2 * i, **changes) for i in range(count)]  # type: ignore[arg-type]


def test_hour_of_equal_windows_is_few_events_with_every_step() -> None:
    log, measured = WindowLog(), windows(1800)
    logged = [each for window in measured for each in log.add(window)] + log.flush()
    assert len(logged) <= NUM_LOGGED_SINGLY + 3600 / LOG_EVERY_S + 1
    assert sum(window.num_steps for window in logged) == 1800 * 20
    ends = [window.first_step + window.num_steps for window in logged]
    assert [window.first_step for window in logged] == [0, *ends[:-1]]


def test_change_of_the_step_time_is_an_event_of_its_own() -> None:
    log = WindowLog()
    for window in windows(NUM_LOGGED_SINGLY + 5):
        log.add(window)
    slow = replace(WINDOW, step_time_s=0.2, samples_per_s=320.0, at=2000.0)
    [before] = log.add(slow)
    assert before.num_steps == 5 * 20
    assert before.step_time_s == pytest.approx(0.1)
    assert log.flush() == [slow]


def test_windows_of_another_round_or_setting_are_not_merged() -> None:
    log = WindowLog()
    for window in windows(NUM_LOGGED_SINGLY + 5):
        log.add(window)
    other = replace(WINDOW, round_number=2, at=2000.0)
    merged_before, first = log.add(other)
    assert merged_before.num_steps == 5 * 20
    assert first == other


def test_merged_window_has_means_by_step_and_the_highest_memory() -> None:
    short = replace(WINDOW, num_steps=10, step_time_s=0.4, samples_per_s=160.0, peak_memory_bytes=5)
    both = merged([short, replace(WINDOW, first_step=10, num_steps=30, peak_memory_bytes=3)])
    assert both.num_steps == 40
    assert abs(both.step_time_s - (10 * 0.4 + 30 * 0.1) / 40) < 1e-9
    assert abs(both.samples_per_s - 64 / both.step_time_s) < 1e-9
    assert both.peak_memory_bytes == 5


def test_unchanged_worker_is_published_every_ten_seconds() -> None:
    published = PublishedProfile()
    assert sum(published.is_news(WINDOW, now=2.0 * i) for i in range(30)) == 6  # windows published in one minute
    assert published.is_news(replace(WINDOW, step_time_s=0.2), now=59.0)
    assert published.is_news(replace(WINDOW, step_time_s=0.2, round_number=2), now=60.0)


def test_windows_are_kept_up_though_the_wall_clock_jumps() -> None:
    published, log = PublishedProfile(), WindowLog()
    jumping = [replace(window, at=window.at + 86_400 * (-1) ** i * (i // 50)) for i, window in enumerate(windows(300))]
    assert sum(published.is_news(window, now=2.0 * i) for i, window in enumerate(jumping)) == 60
    logged = [each for window in jumping for each in log.add(window)]
    assert len(logged) == NUM_LOGGED_SINGLY + (300 - NUM_LOGGED_SINGLY) // 30
