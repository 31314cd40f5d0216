"""Checkpoints as folders."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from lightning_dlrover.live.checkpoints import replace_folder


@pytest.mark.parametrize("former", ["folder", "file", "nothing"])
def test_kill_while_the_former_checkpoint_is_removed_leaves_a_complete_one(
    former: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class KilledError(Exception):
        pass

    place, new = tmp_path / "last.ckpt", tmp_path / ".last.ckpt.unfinished"
    new.mkdir()
    (new / "trainer.ckpt").write_text("new")
    if former == "folder":
        place.mkdir()
        (place / "trainer.ckpt").write_text("old")
    elif former == "file":
        place.write_text("old")

    def killed(path: Path, **_: object) -> None:
        if path.is_dir():
            raise KilledError

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", killed)
        try:
            replace_folder(place, new)
        except KilledError:
            assert former == "folder"
    assert (place / "trainer.ckpt").read_text() == "new"
    again = tmp_path / "again"
    again.mkdir()
    replace_folder(place, again)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last.ckpt"]
