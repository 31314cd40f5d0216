"""How far another run's figure of a point may be from this run's. Pure.

Blocks of one visit follow each other within a second, so their range is blind to slow changes of the machine. Visits are
minutes apart, and their deviations show these changes. What the reference program's time explains of them is taken out. Two
visits of one point alone say little about its variance, so each variance is moderated by the mean of all points (Smyth, Linear
models and empirical Bayes methods, Statistical Applications in Genetics and Molecular Biology 3(1), 2004).
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Sequence

__all__ = ["half_widths", "sensitivity"]

LEVEL = 0.9
PRIOR_DEGREES = 4.0
"""Degrees of freedom for which the mean variance of all points counts."""

STILL = 0.02
"""Deviation of the reference program's log time below which it shows its own noise instead of the machine's speed."""

Logs = Sequence[tuple[float, float]]
"""Each visit's log of a step's seconds, and log of the reference program's; the latter is 0 where it did not run."""


def sensitivity(points: Sequence[Logs]) -> float:
    """Return the change in log of a step's time per change in log of the reference program's, from 0 to 1, over all points."""
    together, alone, count = 0.0, 0.0, 0
    for visits in points:
        deviations = _deviations(visits, 0.0)
        of_reference = _deviations([(x, 0.0) for _, x in visits], 0.0)
        together += sum(y * x for y, x in zip(deviations, of_reference, strict=True))
        alone += sum(x * x for x in of_reference)
        count += len(visits) - 1
    return min(1.0, max(0.0, together / (alone + count * STILL**2))) if count else 0.0


def half_widths(points: Sequence[Logs]) -> list[float] | None:
    """Return the half width of each point's 90 % prediction interval of the log; None if no point has two visits.

    The predicted figure is the mean of as many visits in another run, at the same speed of the machine: m +- t s sqrt(2 / n).

    Args:
        points: visits of each point, at least one.
    """
    degrees = sum(len(visits) - 1 for visits in points)
    if not degrees:
        return None
    slope = sensitivity(points)
    squares = [sum(deviation**2 for deviation in _deviations(visits, slope)) for visits in points]
    mean = sum(squares) / degrees
    found = []
    for visits, of_point in zip(points, squares, strict=True):
        own = PRIOR_DEGREES + len(visits) - 1
        variance = (PRIOR_DEGREES * mean + of_point) / own
        found.append(_quantile(own) * math.sqrt(2 * variance / len(visits)))
    return found


def _deviations(visits: Logs, slope: float) -> list[float]:
    values = [y - slope * x for y, x in visits]
    mean = statistics.fmean(values)
    return [value - mean for value in values]


@functools.cache
def _quantile(degrees: float) -> float:
    from scipy.special import stdtrit  # Student's t; the import takes long

    return float(stdtrit(degrees, (1 + LEVEL) / 2))
