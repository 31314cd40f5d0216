"""Prices of work: seconds by which the completion times of all jobs fall for each unit of work."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_dlrover.pool.allocation import exactly, prices


def everywhere(speeds: np.ndarray) -> np.ndarray:
    return np.ones(speeds.shape, dtype=bool)


def test_prices_are_those_of_hesrpt_where_speeds_are_powers() -> None:
    sizes = np.arange(1025)
    speeds = np.tile(sizes**0.7, (3, 1))
    found = prices(speeds, everywhere(speeds), sizes, 1024, np.array([3.0, 1.0, 2.0]), np.ones(3))
    q = 1 / 0.3
    expected = np.array([1.0, (3**q - 2**q) ** 0.3, (2**q - 1) ** 0.3]) / 1024**0.7
    assert found == pytest.approx(expected, rel=0.01)


def test_a_job_counts_no_more_for_being_short_where_devices_suffice_for_all() -> None:
    sizes = np.arange(9)
    speeds = np.array([np.minimum(sizes, most) for most in (4.0, 2.0, 1.0)])
    found = prices(speeds, everywhere(speeds), sizes, 8, np.array([100.0, 10.0, 1.0]), np.array([1.0, 1.0, 3.0]))
    assert found.tolist() == pytest.approx([1 / 4, 1 / 2, 3.0])


@given(st.integers(0, 10**6), st.integers(1, 12), st.integers(1, 5))
def test_the_best_division_of_each_phase_is_worth_its_weights(seed: int, num_devices: int, num_jobs: int) -> None:
    rng = np.random.default_rng(seed)
    sizes = np.arange(9)
    slopes = -np.sort(-rng.random((num_jobs, 8)), axis=1)
    speeds = np.concatenate([np.zeros((num_jobs, 1)), slopes.cumsum(axis=1)], axis=1)
    work, weights = rng.random(num_jobs), rng.uniform(0.5, 2.0, num_jobs)
    found = prices(speeds, everywhere(speeds), sizes, num_devices, work, weights)
    last_first = np.argsort(-work / weights)
    for number in range(1, num_jobs + 1):
        phase = last_first[:number]
        values = found[phase, None] * speeds[phase]
        best = exactly(values, sizes, num_devices)
        assert values[np.arange(number), best].sum() == pytest.approx(weights[phase].sum())


def test_a_job_that_cannot_run_has_no_price_and_changes_no_other() -> None:
    sizes = np.arange(5)
    speeds = np.array([np.zeros(5), np.minimum(sizes, 2.0)])
    found = prices(speeds, everywhere(speeds), sizes, 4, np.array([1.0, 2.0]), np.ones(2))
    assert found.tolist() == [0.0, 0.5]


def test_devices_that_add_too_little_are_not_counted_as_used() -> None:
    sizes = np.arange(5)
    speeds = np.array([[0.0, 1.0, 1.5, 1.54, 1.58], [0.0, 1.0, 1.5, 1.54, 1.58]])
    work, weights = np.array([2.0, 1.0]), np.ones(2)
    without = prices(speeds, everywhere(speeds), sizes, 4, work, weights)
    found = prices(speeds, everywhere(speeds), sizes, 4, work, weights, least_gain=0.05)
    assert without[0] == pytest.approx(1 / 1.58)
    assert found.tolist() == pytest.approx([1 / 1.5, 1 / 1.5])
