"""How far another run's figure of a point may be from this run's. Pure.

Blocks of one visit follow each other within a second, so their range is blind to slow changes of the machine. Visits are
minutes apart, and their deviations show these changes. Two visits of one point alone say little about its variance, so each
variance is moderated by the mean of all points (Smyth, Linear models and empirical Bayes methods, Statistical Applications
in Genetics and Molecular Biology 3(1), 2004).
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Sequence

__all__ = ["half_widths"]

LEVEL = 0.9
PRIOR_DEGREES = 4.0
"""Degrees of freedom for which the mean variance of all points counts."""


def half_widths(visits: Sequence[Sequence[float]]) -> list[float] | None:
    """Return the half width of each point's 90 % prediction interval; None if no point has two visits.

    The predicted figure is the mean of as many visits in another run: m +- t s sqrt(2 / n).

    Args:
        visits: log of seconds in each visit, at least one for each point.
    """
    squares = [sum((value - statistics.fmean(values)) ** 2 for value in values) for values in visits]
    degrees = sum(len(values) - 1 for values in visits)
    if not degrees:
        return None
    mean = sum(squares) / degrees
    found = []
    for values, of_point in zip(visits, squares, strict=True):
        own = PRIOR_DEGREES + len(values) - 1
        variance = (PRIOR_DEGREES * mean + of_point) / own
        found.append(_quantile(own) * math.sqrt(2 * variance / len(values)))
    return found


@functools.cache
def _quantile(degrees: float) -> float:
    from scipy.special import stdtrit  # Student's t; the import takes long

    return float(stdtrit(degrees, (1 + LEVEL) / 2))
