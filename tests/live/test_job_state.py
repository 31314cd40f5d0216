"""The job's state on its way to joiners."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_dlrover.rdzv.membership.member import LeftOutError
from lightning_dlrover.rdzv.transport import transfer
from tests.support.live_parts import JOINER, a_formation, a_worker, hellos


@pytest.mark.parametrize("name, is_closed", [("w0", True), ("w1", False)])
def test_only_the_source_of_an_unsendable_state_closes_the_job(
    name: str, is_closed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def on_save_checkpoint() -> dict[str, Any]:
        raise AttributeError("what on_load_checkpoint brings")

    live = a_worker(name)
    reasons: list[str] = []
    live.world.standing, live.world.alone = SimpleNamespace(close_to_joiners=reasons.append), nullcontext
    state = live._state
    state.message = on_save_checkpoint
    state._received = state.restore = lambda *args, **options: None
    monkeypatch.setattr(transfer, "send", lambda state, rank: None)
    state.give(a_formation(name, hellos(JOINER, JOINER)), [("w0", "w1")])
    assert len(reasons) == is_closed


def test_worker_that_a_round_leaves_out_while_it_packs_closes_no_job() -> None:
    def on_save_checkpoint() -> dict[str, Any]:  # holds a collective, in which the others recover from a loss
        raise LeftOutError(a_formation("w0", hellos(JOINER)).round)

    live = a_worker()
    reasons: list[str] = []
    live.world.standing = SimpleNamespace(close_to_joiners=reasons.append)
    live._state.message = on_save_checkpoint
    with pytest.raises(LeftOutError):
        live._state.pack_for_joiners()
    assert reasons == []
