"""The bound on what a worker writes while nothing but its measurements changes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lightning_dlrover.tuning.profile_log import DECISIONS, FIRST_WINDOWS, PROFILES, WINDOWS, Rate, WriteBudget, stored_bytes

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
