"""Which point to visit next within a budget of time, and how long the rest takes. Pure.

Every point is visited once before any is visited again: first the ends of each sweep, then its middle. Visits after
that go where the interval is widest for the time that a visit takes.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_dlrover.characterize.point import Point, Visit
from lightning_dlrover.characterize.results import results_of
from lightning_dlrover.characterize.studies import Study

__all__ = ["Aim", "in_order", "next_point", "seconds_left"]

FIRST_ESTIMATE_S = 1.5
"""Seconds of a visit before any was made."""


@dataclass(frozen=True)
class Aim:
    """When a point has been measured well enough."""

    min_visits: int = 2  # minutes apart, so that the interval includes changes of the machine
    max_visits: int = 4
    spread: float = 0.08  # width of the interval over the median, below which `min_visits` are enough


def in_order(studies: Sequence[Study]) -> list[Point]:
    """Return all points, each once: the studies in turn, the ends of each sweep first, then its middles."""
    queues = [[study.points[i] for i in _coarse_to_fine(len(study.points))] for study in studies]
    found: dict[Point, None] = {}
    for turn in range(max(map(len, queues), default=0)):
        found |= dict.fromkeys(queue[turn] for queue in queues if turn < len(queue))
    return list(found)


def next_point(ordered: Sequence[Point], visits: Sequence[Visit], left_s: float, aim: Aim) -> Point | None:
    """Return the point from which the next visit learns most; None if nothing is worth the time or fits into it.

    Args:
        ordered: all points, as `in_order` returns them.
        left_s: seconds left of the budget.
    """
    made = _by_point(visits)
    costs = {point: _cost_s(made.get(point, ()), visits) for point in ordered}
    able = [point for point in ordered if costs[point] <= left_s and not _is_hopeless(made.get(point, ()))]
    for count in range(aim.min_visits):
        for point in able:
            # The same seeds give the same loss.
            if len(made.get(point, ())) <= count and (count == 0 or not point.measures_loss):
                return point
    results = results_of(visits)
    wide = [
        point
        for point in able
        if point in results
        and not point.measures_loss
        and len(made[point]) < aim.max_visits
        and results[point].spread > aim.spread
    ]
    return max(wide, key=lambda point: results[point].spread / len(made[point]) / costs[point], default=None)


def seconds_left(ordered: Sequence[Point], visits: Sequence[Visit], budget_left_s: float, aim: Aim) -> float:
    """Return the estimated time until every point has its least visits, within the budget."""
    made = _by_point(visits)
    needed = sum(
        max(0, (1 if point.measures_loss else aim.min_visits) - len(made.get(point, ()))) * _cost_s(made.get(point, ()), visits)
        for point in ordered
        if not _is_hopeless(made.get(point, ()))
    )
    return min(needed, max(0.0, budget_left_s))


def _is_hopeless(visits: Sequence[Visit]) -> bool:
    """Whether a point has failed twice without any figures: a third attempt would end alike."""
    return sum(bool(visit.problem) for visit in visits) >= 2 and not any(visit.blocks for visit in visits)


def _by_point(visits: Sequence[Visit]) -> Mapping[Point, list[Visit]]:
    found: dict[Point, list[Visit]] = {}
    for visit in visits:
        found.setdefault(visit.point, []).append(visit)
    return found


def _cost_s(own: Sequence[Visit], visits: Sequence[Visit]) -> float:
    # The least, since the first visit of a kind also starts processes and imports libraries.
    if own:
        return min(visit.took_s for visit in own)
    return statistics.median(visit.took_s for visit in visits) if visits else FIRST_ESTIMATE_S


def _coarse_to_fine(count: int) -> list[int]:
    """Return 0 to `count` - 1: both ends, the middle, the middles of both halves, and so on."""
    found = dict.fromkeys([0, count - 1] if count else [])
    spans = [(0, count - 1)]
    while spans:
        low, high = spans.pop(0)
        middle = (low + high) // 2
        if high - low > 1:
            found[middle] = None
            spans += [(low, middle), (middle, high)]
    return list(found)
