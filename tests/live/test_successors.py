"""The state that a former group of workers has left in a host's memory."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_dlrover.live import handover
from lightning_dlrover.rdzv.membership.member import RoundEndedError
from lightning_dlrover.rdzv.transport import transfer
from lightning_dlrover.rdzv.transport.transfer import HostStateCache
from tests.support.live_parts import BETWEEN, a_formation, a_worker, hellos


@pytest.mark.parametrize("error, is_kept", [(KeyError("best"), False), (RoundEndedError("a worker was lost"), True)])
def test_a_left_state_that_cannot_be_restored_is_not_met_again(
    error: Exception, is_kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def restore(*args: Any, **options: Any) -> None:
        raise error

    live = a_worker()
    left = HostStateCache(tmp_path)
    left.write(7, transfer.pack({"state": {}, "values": {}}))
    live.world.left_state, live.world.has_finished = left, False
    live.checkpoints.unread = lambda: None
    live._state.restore = restore
    monkeypatch.setattr(handover, "TrainerState", dict)
    with pytest.raises(type(error)):
        live._successors.resume()
    assert left.step() == (7 if is_kept else None)


@pytest.mark.parametrize("has_finished", [[True, False], [False, True]])
def test_left_state_is_refused_by_all_or_by_none(has_finished: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    gathered = []

    def gather(mine: Any) -> list[Any]:
        gathered.append(mine)
        return [mine, (mine[0], has_finished[1])]

    live = a_worker("w0", a_formation("w0", hellos(BETWEEN, BETWEEN)))
    monkeypatch.setattr(transfer, "all_gather", gather)
    live.checkpoints.unread = lambda: None
    live.world.has_finished, live.world.left_state = has_finished[0], SimpleNamespace(step=lambda: 10)
    assert not live._successors.resume()
    assert len(gathered) == 1
