"""A user without a home gets one among the temporary files."""

from __future__ import annotations

import getpass
import os
import pwd
import tempfile
from pathlib import Path

import pytest

from lightning_dlrover.data.file_source import cache_file
from lightning_dlrover.files import give_home, home
from lightning_dlrover.tuning.history import history_url


@pytest.fixture
def nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Take name and home from this user; return the folder of temporary files."""

    def unknown(uid: int) -> None:
        raise KeyError(uid)

    for name in ("HOME", "LOGNAME", "USER", "LNAME", "USERNAME", "XDG_DATA_HOME", "XDG_CACHE_HOME", "DLROVER_HISTORY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_user_without_name_and_home_gets_both(nobody: Path) -> None:
    give_home()
    assert Path.home() == nobody / f"dlrover-home-{os.getuid()}"
    assert Path.home().stat().st_mode & 0o777 == 0o700
    assert getpass.getuser() == f"user-{os.getuid()}"


def test_history_and_counts_of_rows_are_in_no_folder_named_tilde(nobody: Path) -> None:
    assert history_url(None) == f"sqlite:///{nobody}/dlrover-home-{os.getuid()}/.local/share/dlrover/history.sqlite"
    assert cache_file() == f"{nobody}/dlrover-home-{os.getuid()}/.cache/dlrover/rows.sqlite"


def test_folder_of_another_user_is_not_taken_as_home(nobody: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 54321)
    (nobody / "dlrover-home-54321").mkdir()
    with pytest.raises(PermissionError, match="belongs to another user: set HOME to a folder of your own"):
        home()
