"""Run folders of other users, and on file systems without locks."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_dlrover.report.status import JobPlace, is_locked
from tests.support.run_cli import RunCli

NOBODY = 65534


@contextlib.contextmanager
def another_user() -> Iterator[None]:
    """Act as a user without root's rights, if this process has them."""
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The run folder of another user's job on this machine, which may be read."""
    monkeypatch.chdir(tmp_path)
    tmp_path.chmod(0o755)
    folder = Path("runs/theirs")
    folder.mkdir(parents=True)
    JobPlace("theirs", "127.0.0.1:1").write(folder)
    (folder / ".lock").touch()
    (folder / ".lock").chmod(0o444)
    return folder


def test_jobs_of_other_users_are_listed(dlrover: RunCli, folder: Path) -> None:
    with another_user():
        code, output, errors = dlrover("list")
    assert (code, errors) == (0, "")
    assert "theirs  ended" in output
    with (folder / ".lock").open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with another_user():
            output = dlrover.output("list")
    assert f"process {os.getpid()}" in output


@pytest.mark.parametrize("closed", [".lock", "."])
def test_job_whose_lock_cannot_be_read_is_not_called_ended(dlrover: RunCli, folder: Path, closed: str) -> None:
    (folder / closed).chmod(0)
    try:
        with another_user():
            assert is_locked(folder) is None
            code, output, errors = dlrover("list")
            assert (code, errors) == (0, "")
            assert "ended" not in output
            assert "Traceback" not in dlrover.refused("cancel", "theirs")
    finally:
        (folder / closed).chmod(0o755)


def test_output_that_may_not_be_read_hides_no_other(dlrover: RunCli, folder: Path) -> None:
    for node in ("node1", "node2"):
        (folder / "logs" / node).mkdir(parents=True)
        (folder / "logs" / node / "stdout.log").write_text(f"of {node}\n")
    (folder / "logs/node1/stdout.log").chmod(0)
    with another_user():
        code, output, errors = dlrover("logs", "theirs")
    assert (code, output) == (1, "[node2] of node2\n")
    assert "node1/stdout.log cannot be read: Permission denied" in errors


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS])
def test_file_system_without_locks_is_named_with_the_next_move(
    dlrover: RunCli, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def without_locks(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", without_locks)
    errors = dlrover.refused("run", "--rdzv-id", "job", "script.py")
    assert f"cannot lock files (flock: {os.strerror(number)})" in errors
    assert "choose a --run-dir elsewhere" in errors
    assert not Path("runs/job").exists()
