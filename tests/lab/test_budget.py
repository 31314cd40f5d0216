from __future__ import annotations

from dataclasses import replace

from lightning_dlrover.lab.characterize.points import Point, Visit, all_studies
from lightning_dlrover.lab.characterize.run import Aim, in_order, next_point, seconds_left
from tests.support.characterize_points import SCOPE, visit

AIM = Aim(min_visits=2, max_visits=4, spread=0.1)
POINTS = [Point("p", batch=n) for n in (1, 2, 3)]
LOSS = Point("loss", learning_rate=0.1)


def test_order_holds_every_point_once_and_begins_with_each_study() -> None:
    studies = all_studies(SCOPE)
    ordered = in_order(studies)
    assert len(ordered) == len(set(ordered))
    assert set(ordered) == {point for study in studies for point in study.points}
    firsts = {study.points[0] for study in studies}
    assert firsts <= set(ordered[: len(studies)])


def test_every_point_is_visited_before_any_is_visited_again() -> None:
    visits: list[Visit] = []
    for expected in [*POINTS, *POINTS]:
        point = next_point(POINTS, visits, 100.0, AIM)
        assert point == expected
        visits.append(visit(point, 1.0, 1.0))
    assert next_point(POINTS, visits, 100.0, AIM) is None


def test_loss_is_visited_once() -> None:
    assert next_point([LOSS], [], 100.0, AIM) == LOSS
    assert next_point([LOSS], [visit(LOSS, 0.7, 0.9)], 100.0, AIM) is None


def test_rest_of_the_budget_goes_to_the_widest_interval_for_its_cost() -> None:
    a, b, c = POINTS
    visits = [visit(a, 1.0), visit(a, 1.05), visit(b, 1.0), visit(b, 1.5), visit(c, 1.0), visit(c, 1.6)]
    visits = [replace(v, took_s=1.1) if v.point == c else v for v in visits]
    assert next_point(POINTS, visits, 100.0, AIM) == b
    assert next_point(POINTS, [*visits, visit(b, 1.0), visit(b, 1.5)], 100.0, AIM) == c


def test_visit_that_does_not_fit_into_the_budget_is_not_made() -> None:
    a, b, _ = POINTS
    visits = [visit(a, 1.0, took_s=20.0), visit(b, 1.0, took_s=2.0)]
    assert next_point([a, b], visits, 10.0, AIM) == b
    assert next_point([a, b], visits, 1.0, AIM) is None


def test_point_that_failed_twice_is_given_up() -> None:
    failed = visit(POINTS[0], problem="out of memory")
    assert next_point(POINTS[:1], [failed], 100.0, AIM) == POINTS[0]
    assert next_point(POINTS[:1], [failed, failed], 100.0, AIM) is None


def test_time_left_counts_missing_visits_within_the_budget() -> None:
    visits = [visit(POINTS[0], 1.0, took_s=3.0)]
    assert seconds_left(POINTS, visits, 1000.0, AIM) == 3.0 + 2 * 6.0
    assert seconds_left(POINTS, visits, 4.0, AIM) == 4.0
