"""Checkpoints of a worker that etcd does not answer, and what becomes of them when it does."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_dlrover.live.handover import SetAside


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


def test_checkpoint_that_somebody_has_moved_holds_up_nothing(cut: Cut, tmp_path: Path) -> None:
    cut.save("last.ckpt", "first")
    cut.remove("old.ckpt")
    (tmp_path / "cut-off-7-last.ckpt").unlink()
    cut.answers()
    assert cut.files == {"last.ckpt": "of the others"}
