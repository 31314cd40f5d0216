"""Folders of a job on a host: its snapshots, and the default run folder and etcd of a command.

A worker that was killed leaves its snapshots behind. If it was the last one on its host, its agent removes them, or its
`dlrover run` on this machine.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from lightning_dlrover import variables
from lightning_dlrover.rdzv.etcd.types import access_from
from lightning_dlrover.rdzv.job.records import DEFAULT_PREFIX, Keys

ROOT = Path("/dev/shm")

JOB_FILE = "job"
"""File in the folder of a job's snapshots. Its content is the path of the job's folder on disk, if it has one.

The job's workers on this host hold a lock on it. The kernel releases the lock however they end."""


def name_of_job(keys: Keys) -> str:
    return keys.root.rstrip("/")


def short(name: str) -> str:
    """Return the form of a job's or worker's name in the names of files."""
    return hashlib.sha256(name.encode()).hexdigest()[:16]


def users_folder(root: Path = ROOT) -> Path:
    """Return the folder of all jobs of this user."""
    return root / f"dlrover-{os.getuid()}"


def is_private(folder: Path) -> bool:
    """Whether it is a folder of this user's alone. Raises `FileNotFoundError` if it does not exist."""
    status = os.lstat(folder)
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077


def hold(folder: Path, disk: Path | None) -> BinaryIO:
    """Mark a folder as one of a living job, until the returned file is closed or this process has ended.

    Args:
        disk: the job's folder on disk, absolute; its last part is the folder's name.

    Raises:
        OSError: the mark cannot be written, or the folder is missing.
    """
    file = os.fdopen(os.open(folder / JOB_FILE, os.O_RDWR | os.O_CREAT, 0o600), "r+b", buffering=0)
    fcntl.flock(file, fcntl.LOCK_SH)
    if disk is not None:
        os.pwrite(file.fileno(), os.fsencode(disk), 0)  # every worker writes the same bytes
    return file


def is_held(folder: Path) -> bool:
    """Whether a worker on this host lives that has called `hold`."""
    with contextlib.suppress(FileNotFoundError), (folder / JOB_FILE).open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def remove_snapshots(keys: Keys, root: Path = ROOT) -> None:
    """Remove the snapshots of a job from this host's memory, and from their folder on disk. Call it once the job is over."""
    parent = users_folder(root)
    with contextlib.suppress(FileNotFoundError):
        if is_private(parent):
            for folder in parent.glob(f"{short(name_of_job(keys))}-*"):
                _remove_from_disk(folder)
                shutil.rmtree(folder, ignore_errors=True)


def _remove_from_disk(folder: Path) -> None:
    with contextlib.suppress(OSError, ValueError):
        disk = Path(os.fsdecode((folder / JOB_FILE).read_bytes()))
        if disk.is_absolute() and disk.name == folder.name:
            shutil.rmtree(disk, ignore_errors=True)


DEFAULT_RUN_DIR = Path("runs")  # parent of the jobs' run folders


@dataclass(frozen=True)
class EtcdDefaults:
    """The etcd of a job's worker that starts a command, or the one that the user has set."""

    endpoint: str | None
    prefix: str
    access: Mapping[str, str]  # see `EtcdConfig.access`

    @classmethod
    def of_this_process(cls) -> EtcdDefaults:
        endpoint, prefix = os.environ.get(variables.ENDPOINT), os.environ.get(variables.PREFIX)
        return cls(endpoint or None, prefix or DEFAULT_PREFIX, access_from(os.environ))
