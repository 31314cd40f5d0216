"""The job's state on its way to other workers, and to checkpoints."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_dlrover.live import handover
from lightning_dlrover.live.handover import SetAside
from lightning_dlrover.rdzv.membership.member import LeftOutError, RoundEndedError
from lightning_dlrover.rdzv.transport import transfer
from lightning_dlrover.rdzv.transport.transfer import HostStateCache
from lightning_dlrover.tables.snapshot_store import SnapshotError
from tests.support.live_parts import BETWEEN, JOINER, a_formation, a_worker, hellos


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


@pytest.mark.parametrize("error, is_kept", [(KeyError("best"), False), (RoundEndedError("a worker was lost"), True)])
def test_left_state_that_cannot_be_restored_is_removed(
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


class Cut:
    """A worker that is cut off from etcd until it is not."""

    def __init__(self, folder: Path) -> None:
        self.is_over = False
        membership: Any = SimpleNamespace(
            is_still_in_force=lambda: self.is_over, own=SimpleNamespace(lease=SimpleNamespace(silent_s=60.0))
        )
        job: Any = SimpleNamespace(membership=membership, config=SimpleNamespace(run_id="job"))
        self.aside = SetAside(job, self)
        self._folder = folder

    def remove_checkpoint(self, path: Any) -> None:
        Path(path).unlink()

    def save(self, name: str, content: str) -> str:
        path = self.aside.place(self._folder / name, 7)
        Path(path).write_text(content)
        return self.aside.written(str(path))

    def remove(self, name: str) -> None:
        if self.aside.may_remove(self._folder / name):
            (self._folder / name).unlink()

    def answers(self) -> None:
        self.is_over = True
        self.aside.settle()

    @property
    def files(self) -> dict[str, str]:
        return {path.name: path.read_text() for path in sorted(self._folder.iterdir())}


@pytest.fixture
def cut(tmp_path: Path) -> Cut:
    (tmp_path / "last.ckpt").write_text("of the others")
    (tmp_path / "old.ckpt").write_text("old")
    return Cut(tmp_path)


def test_checkpoints_get_their_names_once_etcd_answers(cut: Cut, tmp_path: Path) -> None:
    assert cut.save("last.ckpt", "first") == str(tmp_path / "last.ckpt")
    cut.save("last.ckpt", "second")
    cut.save("new.ckpt", "new")
    cut.remove("old.ckpt")
    others = {"cut-off-7-last.ckpt": "second", "last.ckpt": "of the others", "new.ckpt": "new", "old.ckpt": "old"}
    assert cut.files == others
    cut.answers()
    assert cut.files == {"last.ckpt": "second", "new.ckpt": "new"}


def test_older_checkpoint_that_was_set_aside_replaces_no_newer_one(cut: Cut) -> None:
    cut.save("last.ckpt", "first")
    cut.is_over = True
    cut.save("last.ckpt", "second")
    cut.answers()
    assert cut.files == {"last.ckpt": "second", "old.ckpt": "old"}


def test_checkpoint_that_is_written_again_is_not_removed(cut: Cut) -> None:
    cut.remove("old.ckpt")
    cut.is_over = True
    cut.save("old.ckpt", "again")
    cut.answers()
    assert cut.files["old.ckpt"] == "again"


def test_checkpoint_that_was_moved_does_not_stop_the_others(cut: Cut, tmp_path: Path) -> None:
    cut.save("last.ckpt", "first")
    cut.remove("old.ckpt")
    (tmp_path / "cut-off-7-last.ckpt").unlink()
    cut.answers()
    assert cut.files == {"last.ckpt": "of the others"}
