"""Wishes that workers exchange in their votes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.support.live_parts import BETWEEN, a_formation, a_worker, hellos


@pytest.mark.parametrize("fit_of_vote, stops", [(1, False), (2, True)])
def test_wish_to_stop_ends_no_later_fit(fit_of_vote: int, stops: bool) -> None:
    live = a_worker("w0", a_formation("w0", hellos(BETWEEN)))
    live.world.records = SimpleNamespace(checkpoint_request=lambda: 0)
    for fit in (1, 2):
        live.fit_begins()
        if fit == fit_of_vote:
            live.votes._wants_stop = True
            live.world.wishes = live.votes.wishes()
    assert not live.votes.count(step_time_s=0.0)
    assert live._trainer.lightning.should_stop is stops
