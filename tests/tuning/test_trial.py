"""A failed trial is detected within a few steps, and left for the best settings measured before it."""

from __future__ import annotations

import json
import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import replace
from math import fsum

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_dlrover.tuning.autoscale import TrialWatch, give_up_above_s, has_failed, retreat
from lightning_dlrover.tuning.candidates import PlanRequest
from lightning_dlrover.tuning.plan import Candidate, Decision, Settings
from tests.support.simulated_jobs import dense_heavy, limits_of, slowed, window
from tests.tuning.test_autoscale import ONE, ours

TWO_THREADS = Settings(1, 2, 2, 2)
CANDIDATE = Candidate(TWO_THREADS, 0.05, 0.03, 0.06, 1600.0, 30.0, measured=False, feasible=True)
TRIAL = Decision(7, 1000.0, ONE, TWO_THREADS, "1 -> 2 threads", (CANDIDATE,), 0.08, 0.05, explored=True, break_even_s=0.1)


def test_trial_fails_far_above_the_step_time_with_which_it_would_break_even() -> None:
    assert give_up_above_s(TRIAL) == pytest.approx(2.0 * 0.1)
    # An older record has no such time. Steps above both its interval and the steps before it are no use to any objective.
    old = replace(TRIAL, break_even_s=None)
    assert give_up_above_s(old) == pytest.approx(2.0 * 0.08)
    assert (has_failed(old, 0.159), has_failed(old, 0.161)) == (False, True)
    assert give_up_above_s(replace(old, observed_step_time_s=0.05)) == pytest.approx(2.0 * 0.06)


def test_known_settings_and_settings_that_stay_never_fail() -> None:
    assert give_up_above_s(replace(TRIAL, explored=False)) == math.inf
    assert give_up_above_s(replace(TRIAL, chosen=ONE)) == math.inf


@pytest.mark.parametrize(
    ("steps_s", "given_up_after"),
    [
        ([2.0, 2.0], 2),  # two slow steps are the median of three
        ([2.0, 0.05, 0.05, 2.0, 0.05, 0.05], None),  # a slow step now and then
        ([0.05, 2.0, 0.05, 2.0], 4),
        ([0.6] * 9, 3),  # 1.5 s are the least
        ([0.19] * 40, None),  # slower than before, but not by far
        ([0.05] * 40 + [0.4] * 5, 44),  # the machine has become busy meanwhile
    ],
)
def test_trial_of_threads_is_given_up_within_a_few_slow_steps(steps_s: Sequence[float], given_up_after: int | None) -> None:
    watch = TrialWatch()
    alarms = [watch.step_ended(TRIAL, TWO_THREADS, step_s) for step_s in steps_s]
    assert next((number for number, alarm in enumerate(alarms, 1) if alarm is not None), None) == given_up_after


@given(
    steps_s=st.lists(st.sampled_from([0.01, 0.05, 0.19, 0.2, 0.21, 0.4, 1.0]), max_size=40),
    min_steps=st.integers(1, 6),
    min_s=st.sampled_from([0.0, 0.305, 0.505, 1.105]),  # no sum of steps, which a running sum may miss by its rounding
)
def test_trial_fails_with_the_median_of_its_newest_steps(steps_s: list[float], min_steps: int, min_s: float) -> None:
    watch = TrialWatch(min_steps, min_s)
    for number, step_s in enumerate(steps_s, 1):
        alarm = watch.step_ended(TRIAL, TWO_THREADS, step_s)
        # As few of the newest steps as there must be, and as long as they must take.
        enough = (n for n in range(min_steps, number + 1) if fsum(steps_s[number - n : number]) >= min_s)
        newest_s = steps_s[number - next(enough, number) : number]
        usual_s = statistics.median([*[0.0] * (min_steps - len(newest_s)), *newest_s])
        expected = usual_s if fsum(newest_s) >= min_s and has_failed(TRIAL, usual_s) else None
        assert alarm == expected, number


def test_short_steps_are_watched_for_a_while() -> None:
    watch, fast = TrialWatch(), replace(TRIAL, break_even_s=0.002)
    alarms = [watch.step_ended(fast, TWO_THREADS, 0.01) is not None for _ in range(200)]
    assert alarms.index(True) == 149  # after 1.5 s


def test_trial_counts_from_its_first_step_with_new_threads() -> None:
    watch = TrialWatch()
    assert [watch.step_ended(TRIAL, ONE, 2.0) for _ in range(5)] == [None] * 5
    on_the_way = replace(TWO_THREADS, loader_workers=0, prefetch_factor=0)
    assert watch.step_ended(TRIAL, on_the_way, 2.0) is None
    assert watch.step_ended(TRIAL, on_the_way, 3.0) == 2.0
    other = replace(TRIAL, decision_id=8)
    assert watch.step_ended(other, on_the_way, 2.0) is None


def test_windows_judge_trials_of_other_settings() -> None:
    watch, loaders = TrialWatch(), replace(TWO_THREADS, intra_op_threads=1)
    trial = replace(TRIAL, chosen=loaders, candidates=(replace(CANDIDATE, settings=loaders),))
    assert [watch.step_ended(trial, loaders, 2.0) for _ in range(5)] == [None] * 5


def test_workers_neither_join_nor_leave_when_a_trial_is_given_up() -> None:
    better = replace(ONE, loader_workers=1, prefetch_factor=2)
    assert replace(TRIAL, fallback=better).home == better
    assert replace(TRIAL, fallback=replace(better, num_workers=2)).home == ONE
    assert TRIAL.home == ONE


def test_retreat_goes_to_the_best_measured_settings_without_a_model() -> None:
    truth, rng = dense_heavy(4), random.Random(0)
    limits = limits_of(truth, 1)
    slow = Settings(1, 4, 1, 2)
    samples = [window(truth, ONE, rng, 0.02, at=float(number)) for number in range(3)]
    samples += [slowed(window(truth, slow, rng, 0.02, at=float(number)), 1.3) for number in range(3, 6)]
    trial = ours(PlanRequest(samples, node_cores=4.0), limits, 1)
    assert trial.explored
    assert (trial.current, trial.home) == (slow, ONE)
    step_s = 6 * trial.choice.high_s
    back = retreat(trial, step_s, decision_id=2, at=7.0)
    assert (back.current, back.chosen, back.explored, back.fallback) == (trial.chosen, ONE, False, None)
    assert back.predicted_step_time_s == pytest.approx(samples[0].step_time_s, rel=0.1)
    assert back.observed_step_time_s == step_s
    assert back.choice.measured
    assert "given up after a few steps" in back.reason
    assert Decision.from_data(json.loads(json.dumps(back.to_data()))) == back
    # The next plan takes the failed trial for measured and does not repeat it.
    failed = replace(window(truth, trial.chosen, rng, 0.0), step_time_s=step_s)
    later = ours(PlanRequest([*samples, failed, samples[0]], node_cores=4.0, past=[trial, back]), limits, 3)
    assert later.chosen != trial.chosen


def test_only_steps_of_the_trials_own_workers_count() -> None:
    watch = TrialWatch()
    more = replace(TWO_THREADS, num_workers=TWO_THREADS.num_workers + 1)  # the trial's worker has got a neighbour
    assert [watch.step_ended(TRIAL, more, 2.0) for _ in range(5)] == [None] * 5
    assert watch.step_ended(TRIAL, TWO_THREADS, 2.0) is None


def test_pause_before_a_round_and_its_first_steps_do_not_count() -> None:
    watch = TrialWatch()
    alarms = [watch.step_ended(TRIAL, TWO_THREADS, 0.05, 1) for _ in range(3)]
    alarms += [watch.step_ended(TRIAL, TWO_THREADS, step_s, 2) for step_s in (2.0, 0.6, 0.05, 0.05)]
    assert alarms == [None] * 7
