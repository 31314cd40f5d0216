"""ResidualGP of a job's prior carry over to alike configurations, as far as those of other jobs do."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from lightning_dlrover.tuning import Columns, configuration_of
from lightning_dlrover.tuning.population import MAX_CONFIGURATIONS, JobResidualGP, ResidualGP, Residuals, variances_of
from lightning_dlrover.tuning.samples import Floats
from tests.support.windows import window

NONE = 1e-8
BATCH_ERRORS = ResidualGP(np.array([0.1**2, NONE, NONE, NONE, NONE, NONE, NONE, 0.02**2, 0.02**2]))
PLACE_ERRORS = ResidualGP(np.array([NONE, NONE, NONE, NONE, 0.1**2, NONE, NONE, 0.02**2, 0.02**2]))


def columns(places: list[tuple[int, int, int]]) -> Columns:
    """Return configurations of workers, nodes and local batch."""
    windows = [window(workers, 0.1, global_batch=batch * workers, num_nodes=nodes) for workers, nodes, batch in places]
    return Columns.of([configuration_of(w) for w in windows])


def residuals(of: Columns, step: Floats, compute: Floats, by_sync: float = 0.5) -> Residuals:
    halves = np.full(len(of), by_sync)
    return Residuals(of, 1 - halves, halves, step, compute, np.ones(len(of)))


def expected(own: JobResidualGP, asked: Columns) -> Floats:
    halves = np.full(len(asked), 0.5)
    return own.at(asked, halves, halves)


def test_a_batch_with_slow_computing_is_slow_in_every_placement() -> None:
    seen = columns([(2, 1, 16), (2, 1, 32), (4, 1, 16)])
    compute = np.array([0.2, 0.0, 0.2])
    own = JobResidualGP.of(BATCH_ERRORS, residuals(seen, compute / 2, compute))
    slow, normal = expected(own, columns([(16, 4, 16), (16, 4, 32)]))
    assert slow == pytest.approx(0.1, rel=0.1)
    assert abs(normal) < 0.01


def test_computing_that_was_not_measured_shows_in_the_step() -> None:
    seen = columns([(2, 1, 16), (2, 1, 32), (4, 1, 16)])
    own = JobResidualGP.of(BATCH_ERRORS, residuals(seen, np.array([0.1, 0.0, 0.1]), np.full(3, np.nan)))
    slow, normal = expected(own, columns([(16, 4, 16), (16, 4, 32)]))
    assert slow == pytest.approx(0.1, rel=0.2)
    assert abs(normal) < 0.01


def test_errors_of_a_place_fade_with_the_distance_and_with_the_share_of_communication() -> None:
    own = JobResidualGP.of(PLACE_ERRORS, residuals(columns([(4, 2, 32)]), np.array([0.1]), np.zeros(1)))
    here, near, far = expected(own, columns([(4, 2, 32), (5, 2, 32), (64, 16, 32)]))
    assert here > near > 5 * far > 0
    quiet = own.at(columns([(4, 2, 32)]), np.ones(1), np.zeros(1))
    assert abs(quiet[0]) < 1e-4 * here


def test_windows_with_other_threads_do_not_count_as_alike() -> None:
    own = JobResidualGP.of(BATCH_ERRORS, residuals(columns([(2, 1, 16)]), np.array([0.1]), np.array([0.2])))
    same = columns([(4, 1, 16)])
    other = dataclasses.replace(same, threads=8 * same.threads)
    assert expected(own, other)[0] < 0.2 * expected(own, same)[0]


def test_many_configurations_leave_the_newest_of_the_job() -> None:
    own_places = [(2, 1, batch) for batch in range(1, 501)]
    earlier_places = [(3, 1, batch) for batch in range(1, 101)]
    seen = residuals(columns(own_places + earlier_places), np.zeros(600), np.zeros(600))
    weighted = dataclasses.replace(seen, weight=np.repeat([1.0, 0.3], [500, 100]))
    kept = JobResidualGP.of(BATCH_ERRORS, weighted).columns
    assert sorted(kept.local_batch) == [*range(501 - MAX_CONFIGURATIONS, 501)]
    assert set(kept.num_workers) == {2.0}


def test_variances_of_several_jobs_show_which_errors_carry_over() -> None:
    places = columns([(workers, 1 + workers // 5, batch) for workers in (1, 2, 4, 8, 16) for batch in range(8, 80, 8)])
    jobs = []
    for seed in range(4):
        rng = np.random.default_rng(seed)
        of_batch = dict(zip(range(8, 80, 8), rng.normal(0, 0.1, 9), strict=True))
        compute = np.array([of_batch[int(batch)] for batch in places.local_batch])
        noisy = compute + rng.normal(0, 0.02, len(places))
        jobs.append(residuals(places, compute / 2 + rng.normal(0, 0.02, len(places)), noisy))
    same_batch, *_, of_step, of_compute = np.sqrt(variances_of(jobs))
    assert same_batch == pytest.approx(0.1, rel=0.4)
    assert of_step == pytest.approx(0.02, rel=0.4)
    assert of_compute == pytest.approx(0.02, rel=0.4)
