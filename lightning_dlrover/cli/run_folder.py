"""The run folder of a job, which one process uses at a time."""

from __future__ import annotations

import contextlib
import fcntl
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from lightning_dlrover.cli.errors import UsageError
from lightning_dlrover.report.event_log import JobNotFoundError
from lightning_dlrover.report.status import JOB_FILE, read_job_file


@contextlib.contextmanager
def run_folder(folder: Path, run_id: str, endpoint: str | None, target: str) -> Iterator[Path]:
    """The run folder of a job, locked while the job runs.

    Raises:
        UsageError: a job runs in the folder, or it holds another job's files.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("a")
    except OSError as error:
        raise UsageError(f"folder {str(folder)!r} cannot be used: {error.strerror}; choose another --run-dir") from error
    with lock:
        deadline = time.monotonic() + 1.0
        try:
            while not (is_ours := _try_to_lock(lock)) and time.monotonic() < deadline:
                time.sleep(0.05)  # a check by `is_locked` holds the lock for a moment, too
        except OSError as error:
            _remove_if_unused(folder)
            raise UsageError(
                f"folder {str(folder)!r} is on a file system that cannot lock files (flock: {error.strerror}), so two runs "
                "could use it at once; choose a --run-dir elsewhere, such as in your home folder, or have it mounted with "
                "locks (Lustre: -o flock; NFS: lockd on the server)"
            ) from error
        if not is_ours:
            who = "another `dlrover run`"
            with contextlib.suppress(JobNotFoundError):
                who = f"process {read_job_file(folder / JOB_FILE).pid} on {socket.gethostname()}"
            raise UsageError(
                f"job {run_id!r} is already run by {who} (folder {folder}); choose another --rdzv-id, "
                "or use `dlrover scale` to resize it"
            )
        if any(each.name != ".lock" for each in folder.iterdir()):
            former = None
            with contextlib.suppress(JobNotFoundError):
                former = read_job_file(folder / JOB_FILE).place.endpoint
            # A job whose controller was killed can continue with the same etcd, or with the data of its embedded one.
            has_data = target != "local" and former is not None and (folder / "etcd").is_dir()
            if former != endpoint if endpoint is not None else not has_data:
                raise UsageError(f"{folder} holds an earlier job's files; choose another --rdzv-id, or remove the folder")
        try:
            yield folder.resolve()
        finally:
            _remove_if_unused(folder)


def _remove_if_unused(folder: Path) -> None:
    """Remove the lock file of a refused job, which would make the folder look used to the next attempt."""
    with contextlib.suppress(OSError):  # the user may have removed the folder while the job ran
        if [each.name for each in folder.iterdir()] == [".lock"]:
            (folder / ".lock").unlink()
            folder.rmdir()


def _try_to_lock(lock: IO[str]) -> bool:
    """
    Raises:
        OSError: the file system has no locks.
    """
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
