"""Sizes of the largest total value, exactly where that is possible, and near it where it is not."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dlrover.pool.allocation import best_columns, by_hulls, exactly
from lightning_dlrover.pool.policies import solved


def total(values: np.ndarray, columns: np.ndarray) -> float:
    return float(values[np.arange(len(values)), columns].sum())


def brute_force(values: np.ndarray, sizes: np.ndarray, num_devices: int) -> float:
    return max(
        float(sum(values[job, column] for job, column in enumerate(columns)))
        for columns in product(range(len(sizes)), repeat=len(values))
        if sizes[list(columns)].sum() <= num_devices
    )


tables = st.lists(
    st.lists(st.sampled_from([-np.inf, 0.0, 1.0, 2.0, 2.5, 3.0, 5.0]), min_size=4, max_size=4).map(lambda row: [0.0, *row[1:]]),
    min_size=1,
    max_size=4,
)


@given(tables, st.integers(0, 12))
def test_exact_solution_has_the_value_of_a_search_over_all(rows: list[list[float]], num_devices: int) -> None:
    values, sizes = np.array(rows), np.array([0, 1, 2, 4])
    columns = exactly(values, sizes, num_devices)
    assert sizes[columns].sum() <= num_devices
    assert total(values, columns) == brute_force(values, sizes, num_devices)


@given(tables, st.integers(0, 12))
@settings(max_examples=30, deadline=None)
def test_exact_solution_has_the_value_of_the_integer_programs(rows: list[list[float]], num_devices: int) -> None:
    values, sizes = np.array(rows), np.array([0, 1, 2, 4])
    by_program = solved(-values, sizes, num_devices)
    assert total(values, exactly(values, sizes, num_devices)) == pytest.approx(total(values, by_program))


@given(st.integers(0, 10**6), st.integers(1, 60))
def test_hulls_lose_at_most_one_step_of_concave_values(seed: int, num_devices: int) -> None:
    rng = np.random.default_rng(seed)
    sizes = np.arange(9)
    slopes = np.sort(rng.random((12, 8)), axis=1)[:, ::-1]
    values = np.concatenate([np.zeros((12, 1)), slopes.cumsum(axis=1)], axis=1)
    best, near = exactly(values, sizes, num_devices), by_hulls(values, sizes, num_devices)
    assert sizes[near].sum() <= num_devices
    assert total(values, near) == pytest.approx(total(values, best))


@given(tables, st.integers(0, 12))
def test_hulls_keep_what_is_allowed(rows: list[list[float]], num_devices: int) -> None:
    values, sizes = np.array(rows), np.array([0, 1, 2, 4])
    columns = by_hulls(values, sizes, num_devices)
    assert sizes[columns].sum() <= num_devices
    assert total(values, columns) > -np.inf


def test_required_sizes_that_do_not_fit_are_refused() -> None:
    values = np.array([[-np.inf, -np.inf, 1.0], [-np.inf, 1.0, 2.0]])
    with pytest.raises(ValueError, match="2 jobs need at least 3 devices, and there are 2"):
        best_columns(values, np.array([0, 1, 2]), 2)
    assert best_columns(values, np.array([0, 1, 2]), 4).tolist() == [2, 2]
