"""Jobs with too large requests, as `cluster_requests.py` draws and simulates them."""

from __future__ import annotations

from statistics import mean

import pytest
from cluster_requests import LOAD, MEMORY_USE_OF_REQUEST, NUM_NODES, UNITS_PER_NODE, Result, draw_requests, run

SEED = 7


def test_drawn_requests_use_as_little_of_their_cores_as_was_published() -> None:
    shares = [request.cores / request.asked_cores for request in draw_requests(400, SEED)]
    assert min(shares) > 0.16
    assert max(shares) <= 0.31


def test_drawn_jobs_ask_for_more_than_the_cluster_by_the_load() -> None:
    requests = draw_requests(2000, SEED)
    unit_s = sum(request.asked_units * request.seconds for request in requests)
    span_s = requests[-1].at_s - requests[0].at_s
    assert unit_s / span_s / (NUM_NODES * UNITS_PER_NODE) == pytest.approx(LOAD, rel=0.1)


def test_memory_ends_only_in_jobs_that_outgrow_their_request() -> None:
    for request in draw_requests(400, SEED):
        assert (request.fails_at_steps < request.steps) == (request.peak_gib > request.asked_gib)


@pytest.fixture(scope="module")
def results() -> dict[str, Result]:
    requests = draw_requests(40, SEED)
    return {policy: run(requests, policy, SEED) for policy in ("as-requested", "jct")}


def test_all_jobs_end_or_fail_under_both_policies(results: dict[str, Result]) -> None:
    for result in results.values():
        assert len(result.outcome.finished) == 40


def test_resized_jobs_leave_fewer_cores_idle(results: dict[str, Result]) -> None:
    assert results["jct"].cpu > results["as-requested"].cpu + 0.1


def test_users_jobs_use_about_the_published_share_of_their_memory(results: dict[str, Result]) -> None:
    assert MEMORY_USE_OF_REQUEST[0] - 0.05 < results["as-requested"].memory < MEMORY_USE_OF_REQUEST[1] + 0.1


def test_jobs_under_ours_ended_with_all_their_steps(results: dict[str, Result]) -> None:
    assert mean(float(ended.is_whole) for ended in results["jct"].outcome.finished) >= 0.95
