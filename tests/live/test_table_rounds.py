"""Snapshots of a Trainer with sharded tables."""

from __future__ import annotations

import pytest

from lightning_dlrover.rdzv.transport import transfer
from lightning_dlrover.tables.snapshot_store import SnapshotError
from tests.support.live_parts import a_worker


class Own:
    """A value of the script's own, which must not be taken from other workers."""


@pytest.mark.parametrize("value, is_readable", [({"best": 1.5}, True), ({"best": Own()}, False)])
def test_state_that_cannot_be_restored_is_refused_when_packed(value: object, is_readable: bool) -> None:
    live = a_worker()
    live._state.message = lambda: {"callbacks": value}
    live._state.partial_values = dict
    if is_readable:
        assert transfer.loads(live.tables._packed_snapshot()) == {"state": {"callbacks": value}, "values": {}}
        return
    for _ in range(2):
        with pytest.raises(SnapshotError, match=r"add_safe_globals\(\[Own\]\)"):
            live.tables._packed_snapshot()
