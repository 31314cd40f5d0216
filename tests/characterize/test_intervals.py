from __future__ import annotations

import numpy as np
import pytest

from lightning_dlrover.characterize.intervals import half_widths


def test_interval_takes_two_visits_of_some_point() -> None:
    assert half_widths([[0.0], [1.0]]) is None


@pytest.mark.parametrize("num_visits", [2, 3, 4])
def test_nine_tenths_of_second_runs_lie_within_the_interval(num_visits: int) -> None:
    rng = np.random.default_rng(num_visits)
    deviations = 0.05 * rng.uniform(0.5, 2.0, size=2000)  # points differ in how much they vary
    one, other = (deviations[:, None] * rng.standard_normal((2000, num_visits)) for _ in range(2))
    widths = half_widths(one.tolist())
    assert widths is not None
    inside = np.abs(one.mean(axis=1) - other.mean(axis=1)) <= widths
    assert 0.87 <= inside.mean() <= 0.96
    assert np.median(widths) < 6 * 0.05 / np.sqrt(num_visits)
