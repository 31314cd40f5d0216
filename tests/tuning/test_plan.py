"""A decision survives its encoding in an event, and is judged by later measurements."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_dlrover.tuning.plan import Candidate, Decision, Settings, outcome

seconds = st.floats(1e-6, 1e6)
some_settings = st.builds(Settings, st.integers(1, 64), st.integers(0, 8), st.integers(0, 16), st.integers(0, 8))


@st.composite
def decisions(draw: st.DrawFn) -> Decision:
    considered = sorted(draw(st.sets(some_settings, min_size=1, max_size=5)))
    candidates = tuple(
        Candidate(
            settings=settings,
            step_time_s=draw(seconds),
            low_s=draw(seconds),
            high_s=draw(seconds),
            samples_per_s=draw(seconds),
            worth_s=draw(st.floats(-1e9, 1e9)),
            measured=draw(st.booleans()),
            feasible=draw(st.booleans()),
            note=draw(st.text(max_size=10)),
        )
        for settings in considered
    )
    return Decision(
        decision_id=draw(st.integers(0, 1 << 62)),
        at=draw(st.floats(0, 4e9)),
        current=draw(some_settings),
        chosen=draw(st.sampled_from(considered)),
        reason=draw(st.text()),
        candidates=candidates,
        observed_step_time_s=draw(seconds),
        predicted_step_time_s=draw(seconds),
        explored=draw(st.booleans()),
        break_even_s=draw(st.none() | seconds),
        fallback=draw(st.none() | some_settings),
    )


ONE_WORKER, TWO_WORKERS = Settings(1, 0, 1, 0), Settings(2, 0, 1, 0)
ONE = Candidate(ONE_WORKER, 0.08, 0.075, 0.085, 800.0, 0.0, measured=True, feasible=True)
TWO = Candidate(TWO_WORKERS, 0.04, 0.03, 0.06, 1600.0, 30.0, measured=False, feasible=True)
GROW = Decision(7, 1000.0, ONE_WORKER, TWO_WORKERS, "1 -> 2 workers: twice as fast", (ONE, TWO), 0.08, 0.04, explored=True)


@given(decisions())
def test_a_decision_comes_back_from_json_as_it_was(decision: Decision) -> None:
    assert Decision.from_data(json.loads(json.dumps(decision.to_data(), allow_nan=False))) == decision


@pytest.mark.parametrize(
    "change",
    [
        {"chosen": {"num_workers": 5, "loader_workers": 0, "intra_op_threads": 1, "prefetch_factor": 0}},
        {"chosen": {"num_workers": "2", "loader_workers": 0, "intra_op_threads": 1, "prefetch_factor": 0}},
        {"chosen": {"num_workers": True, "loader_workers": 0, "intra_op_threads": 1, "prefetch_factor": 0}},
        {"chosen": {"num_workers": 0, "loader_workers": 0, "intra_op_threads": 1, "prefetch_factor": 0}},
        {"chosen": {"num_workers": 2}},
        {"chosen": 2},
        {"reason": None},
        {"reason": ["a", "b"]},
        {"at": math.nan},
        {"at": "now"},
        {"explored": 1},
        {"candidates": None},
        {"candidates": [3]},
        {"candidates": [{"settings": {"num_workers": 2}}]},
        {"surprise": 1},
    ],
)
def test_malformed_decision_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r".+"):
        Decision.from_data({**GROW.to_data(), **change})


def test_a_missing_field_is_named() -> None:
    data = GROW.to_data()
    del data["at"]
    with pytest.raises(ValueError, match="at"):
        Decision.from_data(data)


def test_outcome_compares_measurement_with_prediction() -> None:
    good, bad = outcome(GROW, 0.05), outcome(GROW, 0.1)
    assert good.ratio == pytest.approx(1.25)
    assert good.expected
    assert not bad.expected
    assert good.text == (
        "decision 7, 2x1: 50 ms a step, 1.25 times the 40 ms predicted (inside 30 ms to 60 ms); 1.60 times as fast as with 1x1"
    )


@pytest.mark.parametrize("observed_s", [0.0, -1.0, math.nan, math.inf])
def test_a_decision_is_not_judged_by_an_impossible_time(observed_s: float) -> None:
    with pytest.raises(ValueError, match="decision 7"):
        outcome(GROW, observed_s)


@pytest.mark.parametrize("name", ["num_workers", "loader_workers", "intra_op_threads", "prefetch_factor"])
def test_no_job_runs_with_a_negative_number_of_anything(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        replace(ONE_WORKER, **{name: -1})
