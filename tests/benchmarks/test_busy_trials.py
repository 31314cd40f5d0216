"""The figures of `benchmarks/busy_trials.py`, from steps and decisions made by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from busy_trials import Run, Tally, Trial, stints_of, summary, trials_of
from jobs import Step

from lightning_dlrover.planner.plan import Candidate, Decision, Settings

HOME, TRIAL, ON_THE_WAY = Settings(1, 0, 1, 0), Settings(1, 2, 2, 2), Settings(1, 0, 2, 0)
CANDIDATE = Candidate(TRIAL, 0.1, 0.05, 0.2, 1.0, 1.0, measured=False, feasible=True)
TRY = Decision(1, 0.0, HOME, TRIAL, "a trial", (CANDIDATE,), 0.1, 0.1, explored=True)
RETURN = replace(TRY, current=TRIAL, chosen=HOME, candidates=(replace(CANDIDATE, settings=HOME),), explored=False)


def steps_of(*stints: tuple[Settings, Sequence[float]]) -> list[Step]:
    ended_s = 0.0
    steps: list[Step] = []
    for settings, durations_s in stints:
        for duration_s in durations_s:
            ended_s += duration_s
            figures = tuple(vars(settings).values())
            steps.append(Step(1, ended_s, len(steps) + 1, 0, 0, 1, 1, settings=figures))
    return steps


def test_trial_is_compared_with_the_steps_before_it() -> None:
    steps = steps_of((HOME, [0.1] * 60), (ON_THE_WAY, [0.3]), (TRIAL, [0.4] * 4), (HOME, [0.1] * 9))
    [trial] = trials_of(stints_of(steps, [TRY, RETURN]), [TRY, RETURN])
    assert trial.slowdown == pytest.approx(4)
    assert (trial.settings, trial.num_steps, trial.is_left) == (TRIAL, 5, True)  # the step on the way belongs to it
    assert trial.seconds == pytest.approx(1.9)


def test_settings_count_as_a_trial_only_once_and_only_if_they_were_explored() -> None:
    steps = steps_of((HOME, [0.1] * 5), (TRIAL, [0.2] * 5), (HOME, [0.1] * 5), (TRIAL, [0.1] * 5))
    assert len(trials_of(stints_of(steps, [TRY, RETURN]), [TRY, RETURN])) == 1
    known = [replace(TRY, explored=False), RETURN]
    assert trials_of(stints_of(steps, known), known) == []
    assert trials_of(stints_of([], []), []) == []


def test_trial_under_way_at_the_end_is_not_given_up() -> None:
    left, kept, at_the_end = (
        Trial(TRIAL, 4.0, 5, seconds, is_left) for seconds, is_left in ((0.8, True), (3.5, True), (0.8, False))
    )
    tally = Tally(1.0, [Run([left, kept], 100), Run([at_the_end], 80)])
    assert tally.given_up == [left]
    assert tally.values()["bad_steps"] == 7.5


def test_last_line_compares_both_policies_with_a_job_without_trials() -> None:
    bad, good = Trial(TRIAL, 4.0, 20, 0.9, True), Trial(TRIAL, 0.6, 20, 4.0, True)
    tallies = {
        ("idle", "ours"): Tally(1.0, [Run([good], 150)]),
        ("idle", "careless"): Tally(1.0, [Run([good], 140)]),
        ("idle", "none"): Tally(1.0, [Run([], 100)]),
        ("busy", "ours"): Tally(1.0, [Run([], 95), Run([], 85), Run([], 105)]),
        ("busy", "careless"): Tally(1.0, [Run([bad], 50)]),
        ("busy", "none"): Tally(1.0, [Run([], 100)]),
    }
    values = summary(tallies, 1.0)
    assert (values["progress"], values["idle_progress"], values["careless_progress"]) == (0.95, 1.5, 0.5)
    assert (values["trials"], values["careless_bad"], values["careless_worst"]) == (0, 1, 4.0)
    assert math.isnan(values["worst"])
