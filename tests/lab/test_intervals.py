from __future__ import annotations

import numpy as np
import pytest

from lightning_dlrover.lab.characterize.points import half_widths, sensitivity


def test_interval_takes_two_visits_of_some_point() -> None:
    assert half_widths([[(0.0, 0.0)], [(1.0, 0.0)]]) is None


@pytest.mark.parametrize("num_visits", [2, 3, 4])
def test_nine_tenths_of_second_runs_lie_within_the_interval(num_visits: int) -> None:
    rng = np.random.default_rng(num_visits)
    deviations = 0.05 * rng.uniform(0.5, 2.0, size=2000)  # points differ in how much they vary
    one, other = (deviations[:, None] * rng.standard_normal((2000, num_visits)) for _ in range(2))
    widths = half_widths([[(value, 0.0) for value in visits] for visits in one.tolist()])
    assert widths is not None
    inside = np.abs(one.mean(axis=1) - other.mean(axis=1)) <= widths
    assert 0.87 <= inside.mean() <= 0.96
    assert np.median(widths) < 6 * 0.05 / np.sqrt(num_visits)


def test_changes_that_the_reference_program_shows_are_no_part_of_the_interval() -> None:
    rng = np.random.default_rng(0)
    speeds = 0.3 * rng.standard_normal((50, 3))
    points = [[(0.5 * x + 0.01 * rng.standard_normal(), x) for x in visits] for visits in speeds.tolist()]
    assert sensitivity(points) == pytest.approx(0.5, abs=0.02)
    widths = half_widths(points)
    unexplained = half_widths([[(y, 0.0) for y, _ in visits] for visits in points])
    assert widths is not None
    assert unexplained is not None
    assert max(widths) < 0.1 < min(unexplained)


def test_noise_of_the_reference_program_on_a_quiet_machine_explains_nothing() -> None:
    assert sensitivity([[(0.0, 0.0), (0.005, 0.005)]]) < 0.05
    assert sensitivity([[(0.0, 0.0)]]) == 0.0
