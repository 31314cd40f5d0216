"""The choice of the windows and decisions that are written to etcd, within a budget of bytes."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dlrover.codec import to_json
from lightning_dlrover.tuning.plan import Candidate, Decision, Settings
from lightning_dlrover.tuning.profile_log import (
    DECISIONS,
    FIRST_WINDOWS,
    LOG_EVERY_S,
    NUM_LOGGED_SINGLY,
    PROFILES,
    REPEAT_EVERY_S,
    WINDOWS,
    DecisionLog,
    PublishedProfile,
    Rate,
    WindowLog,
    WriteBudget,
    merged,
    rounded,
    stored_bytes,
)
from lightning_dlrover.tuning.samples import StepProfile
from tests.support.windows import WINDOW


def windows(count: int, **changes: float) -> list[StepProfile]:
    """Windows of two seconds each, one after the other."""
    return [replace(WINDOW, first_step=20 * i, at=1000.0 + 2 * i, **changes) for i in range(count)]  # type: ignore[arg-type]


def test_hour_of_equal_windows_is_few_events_with_every_step() -> None:
    log, measured = WindowLog(), windows(1800)
    logged = [each for i, window in enumerate(measured) for each in log.add(window, 2.0 * i)] + log.flush()
    assert len(logged) <= NUM_LOGGED_SINGLY + 3600 / LOG_EVERY_S + 1
    assert_contiguous(logged, num_steps=1800 * 20)


def test_lasting_change_of_the_step_time_ends_a_stretch() -> None:
    log = WindowLog()
    for window in windows(NUM_LOGGED_SINGLY + 5):
        assert not log.add(window, 0.0) or window.first_step < 20 * NUM_LOGGED_SINGLY
    slow = [replace(WINDOW, step_time_s=0.2, samples_per_s=320.0, at=2000.0 + i) for i in range(2)]
    assert log.add(slow[0], 30.0) == []
    [before] = log.add(slow[1], 32.0)
    assert before.num_steps == 5 * 20
    assert before.step_time_s == pytest.approx(0.1)
    [after] = log.flush()
    assert after.step_time_s == pytest.approx(0.2)


def test_single_slow_window_ends_no_stretch() -> None:
    log = WindowLog()
    measured = windows(NUM_LOGGED_SINGLY + 20)
    measured[-10] = replace(measured[-10], step_time_s=0.3)
    logged = [each for i, window in enumerate(measured) for each in log.add(window, 2.0 * i)]
    assert logged == measured[:NUM_LOGGED_SINGLY]


def test_windows_of_another_round_or_setting_are_not_merged() -> None:
    log = WindowLog()
    for window in windows(NUM_LOGGED_SINGLY + 5):
        log.add(window, 0.0)
    other = replace(WINDOW, round_number=2, at=2000.0)
    merged_before, first = log.add(other, 30.0)
    assert merged_before.num_steps == 5 * 20
    assert first == other


def test_merged_window_has_means_by_step_and_the_highest_memory() -> None:
    short = replace(WINDOW, num_steps=10, step_time_s=0.4, samples_per_s=160.0, peak_memory_bytes=5)
    both = merged([short, replace(WINDOW, first_step=10, num_steps=30, peak_memory_bytes=3)])
    assert both.num_steps == 40
    assert abs(both.step_time_s - (10 * 0.4 + 30 * 0.1) / 40) < 1e-9
    assert abs(both.samples_per_s - 64 / both.step_time_s) < 1e-9
    assert both.peak_memory_bytes == 5


def test_unchanged_worker_is_published_every_ten_minutes() -> None:
    published = PublishedProfile()
    at = [2 * i for i in range(1800) if published.is_due(WINDOW, 1000, now=2.0 * i)]
    assert at == [0, 30, 630, 1230, 1830, 2430, 3030]  # the second one, because the first contains slow first steps


def test_lasting_change_is_published_with_its_second_window() -> None:
    published = PublishedProfile()
    slow = replace(WINDOW, step_time_s=0.2)
    published.is_due(WINDOW, 1000, now=0.0)
    published.is_due(WINDOW, 1000, now=2.0)
    assert [published.is_due(slow, 1000, now=4.0 + 2 * i) for i in range(5)] == [False, True, False, False, False]
    assert published.is_due(replace(slow, round_number=2), 1000, now=20.0)


def test_alternating_windows_do_not_count_as_a_change() -> None:
    published = PublishedProfile()
    published.is_due(WINDOW, 1000, now=0.0)
    swings = [replace(WINDOW, step_time_s=0.1 * (2 if i % 2 else 0.5)) for i in range(14)]
    assert not any(published.is_due(window, 1000, now=2.0 * i) for i, window in enumerate(swings))


def test_publication_that_etcd_did_not_take_is_repeated_with_the_next_window() -> None:
    published = PublishedProfile()
    assert published.is_due(WINDOW, 1000, now=0.0)
    published.was_lost()
    assert published.is_due(WINDOW, 1000, now=2.0)
    assert not published.is_due(WINDOW, 1000, now=4.0)


@pytest.mark.slow
@settings(max_examples=20)
@given(seed=st.integers(0, 2**32), swing=st.sampled_from([0.1, 0.3, 1.0, 3.0]), run=st.integers(1, 6))
def test_noise_never_writes_more_than_the_budget(seed: int, swing: float, run: int) -> None:
    published, log, rng = PublishedProfile(), WindowLog(), random.Random(seed)
    level, profile_bytes, logged = 1.0, 0, []
    for i, window in enumerate(windows(3000)):
        if i % run == 0:
            level = math.exp(rng.gauss(0.0, swing))
        noisy = rounded(replace(window, step_time_s=0.1 * level, memory_bytes=round(2**30 * level)))
        if published.is_due(noisy, len(to_json(noisy)), now=2.0 * i):
            profile_bytes += len(to_json(noisy))
        logged += log.add(noisy, now=2.0 * i)
    largest = 1000  # bytes of the first window, which needs no budget
    assert profile_bytes <= PROFILES.within(6000.0) + largest
    assert sum(stored_bytes(to_json(rounded(each))) for each in logged) <= WINDOWS.within(6000.0) + FIRST_WINDOWS.within(6000.0)
    assert_contiguous([*logged, *log.flush()], num_steps=3000 * 20)


def test_windows_are_kept_up_though_the_wall_clock_jumps() -> None:
    published, log = PublishedProfile(), WindowLog()
    jumping = [replace(window, at=window.at + 86_400 * (-1) ** i * (i // 50)) for i, window in enumerate(windows(900))]
    assert sum(published.is_due(window, 1000, now=2.0 * i) for i, window in enumerate(jumping)) == 4
    logged = [each for i, window in enumerate(jumping) for each in log.add(window, 2.0 * i)]
    assert len(logged) == NUM_LOGGED_SINGLY + (900 - NUM_LOGGED_SINGLY) // 90


def test_rounded_window_is_shorter_and_keeps_its_milliseconds() -> None:
    exact = replace(WINDOW, step_time_s=0.123456789, samples_per_s=2 / 3, at=1795431333.634554)
    short = rounded(exact)
    assert (short.step_time_s, short.samples_per_s, short.at) == (0.12346, 0.66667, 1795431333.635)
    assert rounded(short) == short
    assert len(to_json(short)) < len(to_json(exact))


def assert_contiguous(logged: list[StepProfile], num_steps: int) -> None:
    assert sum(window.num_steps for window in logged) == num_steps
    ends = [window.first_step + window.num_steps for window in logged]
    assert [window.first_step for window in logged] == [0, *ends[:-1]]


# --- decisions ---------------------------------------------------------------------------------------------------------------


ONE, TWO = Settings(1, 0, 1, 0), Settings(2, 0, 1, 0)
NUM_BYTES = 6000


def decision(current: Settings, chosen: Settings) -> Decision:
    candidates = tuple(Candidate(s, 0.1, 0.1, 0.1, 100.0, 0.0, True, True) for s in (ONE, TWO))
    return Decision(1, 0.0, current, chosen, "a test", candidates, 0.1, 0.1, False)


STAY, MOVE = decision(ONE, ONE), decision(ONE, TWO)


def test_decisions_to_stay_are_recorded_once_in_half_an_hour() -> None:
    log = DecisionLog()
    recorded = [log.is_due(STAY, NUM_BYTES, 10.0 * i, is_carried_out=False) for i in range(720)]  # two hours
    assert sum(recorded) == 7200 / REPEAT_EVERY_S
    assert recorded[0]


def test_every_change_and_the_decision_after_it_are_recorded() -> None:
    log = DecisionLog()
    assert all(log.is_due(MOVE, NUM_BYTES, 10.0 * i, is_carried_out=True) for i in range(100))
    assert log.is_due(STAY, NUM_BYTES, 1001.0, is_carried_out=False)
    assert not log.is_due(STAY, NUM_BYTES, 1002.0, is_carried_out=False)


def test_same_recommendation_is_recorded_once() -> None:
    log = DecisionLog()
    assert [log.is_due(MOVE, NUM_BYTES, 10.0 * i, is_carried_out=False) for i in range(3)] == [True, False, False]


def test_alternating_recommendations_stay_within_the_budget() -> None:
    log, rng = DecisionLog(), random.Random(1)
    written = 0
    for i in range(8640):  # a day
        for num_bytes in (NUM_BYTES, 500):
            one = rng.choice((STAY, MOVE))
            is_written = (
                log.is_due(one, num_bytes, 10.0 * i, is_carried_out=False)
                if num_bytes == NUM_BYTES
                else log.may_recommend(num_bytes, 10.0 * i)
            )
            written += num_bytes * is_written
    assert written <= DECISIONS.within(86_400.0)


# --- budgets -----------------------------------------------------------------------------------------------------------------


RATE = Rate(bytes_per_day=86_400, burst_bytes=10)  # one byte a second


@given(st.lists(st.tuples(st.floats(0, 20), st.integers(1, 15), st.booleans()), max_size=200))
def test_no_sequence_of_writes_takes_more_than_the_rate(asked: list[tuple[float, int, bool]]) -> None:
    budget, now, taken = WriteBudget(RATE), 0.0, 0
    for pause_s, num_bytes, is_charged in asked:
        now += pause_s
        if is_charged:
            budget.charge(num_bytes, now)
        elif budget.take(num_bytes, now):
            taken += num_bytes
    assert taken <= RATE.within(now) + 1e-6


def test_burst_is_there_again_after_a_pause() -> None:
    budget = WriteBudget(RATE)
    assert budget.take(10, now=100.0)
    assert not budget.take(1, now=100.5)
    assert budget.take(1, now=101.0)
    assert budget.take(10, now=1000.0)
    assert not budget.take(10, now=1005.0)


def test_clock_that_goes_back_gives_nothing() -> None:
    budget = WriteBudget(RATE)
    assert budget.take(10, now=100.0)
    assert not budget.take(1, now=0.0)


def test_write_that_is_made_in_any_case_leaves_less_for_others_but_no_debt() -> None:
    budget = WriteBudget(RATE)
    budget.charge(1000, now=0.0)
    assert not budget.take(1, now=0.5)
    assert budget.take(1, now=1.0)


def test_rank_0_writes_less_than_two_megabytes_a_day() -> None:
    assert sum(rate.within(86_400.0) for rate in (PROFILES, WINDOWS, FIRST_WINDOWS, DECISIONS)) < 2_000_000


def test_other_worker_writes_less_than_half_a_megabyte_a_day() -> None:
    assert PROFILES.within(86_400.0) < 500_000


def test_stored_bytes_include_more_than_the_value() -> None:
    assert stored_bytes(b"x" * 700) > 700 + 2 * len("/dlrover/run/events/01234567890123456789-a-host-of-a-cluster-12345-abcdef")
