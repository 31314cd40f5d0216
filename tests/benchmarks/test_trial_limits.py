"""The figures of `benchmarks/trial_limits.py`, from step times made by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from trial_limits import Limits, Stretch, Trial, best_of, figures_of, read, trials_of


def test_limits_need_enough_slow_steps_in_a_row_and_enough_time() -> None:
    trial = Trial(0.1, (0.1, 0.4, 0.1, 0.4, 0.4, 0.1, 0.4))
    assert Limits(1, 0.0, 1.5).steps_until(trial) == 2
    assert Limits(3, 0.0, 1.5).steps_until(trial) == 4
    assert Limits(3, 1.05, 1.5).steps_until(trial) == 5
    assert Limits(3, 0.0, 4.5).steps_until(trial) is None
    assert Limits(9, 0.0, 1.5).steps_until(trial) is None


def test_trials_are_stretches_without_a_change_and_changes_to_more_threads() -> None:
    one, two = Stretch(1, (0.1,) * 60), Stretch(2, (0.4,) * 4)
    assert trials_of([one, two, one]) == [Trial(0.1, (0.1,) * 10), Trial(0.1, (0.1,) * 10), Trial(0.1, (0.4,) * 4)]
    assert trials_of([Stretch(1, (0.1,) * 50), Stretch(2, (0.4,) * 2)]) == []  # too few steps to judge
    (long,) = trials_of([Stretch(1, (1.0,) * 100)])
    assert len(long.durations_s) == 6  # the length of a trial's windows


def test_figures_count_good_trials_given_up_and_what_bad_ones_cost() -> None:
    calm, hiccup = Trial(0.1, (0.1,) * 9), Trial(0.1, (0.1, 0.1, 0.4, 0.4, 0.1, 0.1, 0.1))
    bad, between = Trial(0.1, (0.1, *[0.4] * 19)), Trial(0.1, (0.13,) * 9)
    figures = figures_of(Limits(3, 0.0, 1.5), [calm, hiccup, bad, between])
    assert (figures.num_good, figures.num_wrong, figures.num_bad) == (2, 1, 1)
    assert (figures.wrong, figures.steps) == (0.5, 3)
    assert figures.lost_s == pytest.approx(0.6)
    never = figures_of(Limits(9, 60.0, 1.5), [calm, hiccup, bad, between])
    assert (never.num_wrong, never.steps) == (0, 20)


def test_fastest_limits_that_spare_good_trials_are_chosen() -> None:
    calm, hiccup, bad = Trial(0.1, (0.1,) * 9), Trial(0.1, (0.1, 0.4, *[0.1] * 7)), Trial(0.1, (0.4,) * 20)
    hasty, careful, slow = Limits(1, 0.0, 1.5), Limits(3, 0.0, 1.5), Limits(9, 0.0, 1.5)
    assert best_of([slow, careful, hasty], [calm, hiccup, bad]) == careful
    assert best_of([slow, careful, hasty], [calm, bad]) == hasty
    assert best_of([hasty], [calm, hiccup, bad]) == hasty  # all give a good one up


@pytest.mark.parametrize("content", ["", "[{}]", "3", '[{"num_threads": 1}]'])
def test_file_that_is_no_recording_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "0-deep-idle.json").write_text(content)
    with pytest.raises(SystemExit, match=r"0-deep-idle\.json is no recording"):
        read(tmp_path)


def test_recordings_are_read_by_round(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="record some with --record"):
        read(tmp_path)
    for name in ("0-deep-idle", "1-deep-idle", "1-deep-busy"):
        (tmp_path / f"{name}.json").write_text(json.dumps([{"num_threads": 1, "durations_s": [0.1]}]))
    assert {number: len(found) for number, found in read(tmp_path).items()} == {0: 1, 1: 2}
