"""The choice of the decisions that are written to etcd."""

from __future__ import annotations

import random

from lightning_dlrover.tuning.plan import Candidate, Decision, Settings
from lightning_dlrover.tuning.profile_log import DECISIONS, REPEAT_EVERY_S, DecisionLog

ONE, TWO = Settings(1, 0, 1, 0), Settings(2, 0, 1, 0)
NUM_BYTES = 6000


def decision(current: Settings, chosen: Settings) -> Decision:
    candidates = tuple(Candidate(s, 0.1, 0.1, 0.1, 100.0, 0.0, True, True) for s in (ONE, TWO))
    return Decision(1, 0.0, current, chosen, "a test", candidates, 0.1, 0.1, False)


STAY, MOVE = decision(ONE, ONE), decision(ONE, TWO)


def test_decisions_to_stay_are_recorded_once_in_half_an_hour() -> None:
    log = DecisionLog()
    recorded = [log.is_due(STAY, NUM_BYTES, 10.0 * i, is_carried_out=False) for i in range(720)]  # two hours
    assert sum(recorded) == 7200 / REPEAT_EVERY_S
    assert recorded[0]


def test_every_change_and_the_decision_after_it_are_recorded() -> None:
    log = DecisionLog()
    assert all(log.is_due(MOVE, NUM_BYTES, 10.0 * i, is_carried_out=True) for i in range(100))
    assert log.is_due(STAY, NUM_BYTES, 1001.0, is_carried_out=False)
    assert not log.is_due(STAY, NUM_BYTES, 1002.0, is_carried_out=False)


def test_same_recommendation_is_recorded_once() -> None:
    log = DecisionLog()
    assert [log.is_due(MOVE, NUM_BYTES, 10.0 * i, is_carried_out=False) for i in range(3)] == [True, False, False]


def test_alternating_recommendations_stay_within_the_budget() -> None:
    log, rng = DecisionLog(), random.Random(1)
    written = 0
    for i in range(8640):  # a day
        for num_bytes in (NUM_BYTES, 500):
            one = rng.choice((STAY, MOVE))
            is_written = (
                log.is_due(one, num_bytes, 10.0 * i, is_carried_out=False)
                if num_bytes == NUM_BYTES
                else log.may_recommend(num_bytes, 10.0 * i)
            )
            written += num_bytes * is_written
    assert written <= DECISIONS.within(86_400.0)
