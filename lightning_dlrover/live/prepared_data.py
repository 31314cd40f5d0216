"""Run `prepare_data` once on each host, or once in the job, however many workers prepare their Trainers at once.

Lightning runs it where the local rank is 0. Each node of `dlrover run` has an agent of its own, so that is every worker of a
host, and a joiner would write files that others are reading.

Locks of the kernel keep the workers of a host apart: one for the worker that prepares, one for all living workers whose data is
ready. A lock ends with its process, however that ends, and no child process inherits it.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import os
import struct
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from lightning_dlrover.live import lightning_names
from lightning_dlrover.rdzv.job.snapshot_folders import ROOT, is_private, users_folder

__all__ = ["PreparedData", "PreparedDataError"]

log = logging.getLogger(__name__)

FILE = "prepared-data"
"""File in the user's folder in shared memory. It stays empty: a call of `prepare_data` has two of its bytes to lock."""

MATE_LOOK_S = 0.1
TELL_S = 3.0
TELL_AGAIN_S = 60.0

LIMIT_S = 24 * 3600.0
"""Seconds for which a worker waits for another one's `prepare_data`, which may download for hours."""


class PreparedDataError(RuntimeError):
    """Another worker on this host has not finished `prepare_data` in time."""


class PreparedData:
    """The calls of `prepare_data` in one worker's script.

    Args:
        job: what tells the job from all others of this user.
        root: where the user's folder is.
    """

    def __init__(self, job: str, root: Path = ROOT) -> None:
        self._job = job
        self._root = root
        self._calls: Counter[str] = Counter()
        self._file: BinaryIO | None = None  # closing it would end all locks

    def prepare(self, trainer: Any) -> None:
        """Do what Lightning does to prepare data, with one worker of each host, or rank 0 alone as the user has asked.

        Joiners are of no rank: the data of a job that trains is prepared.
        """
        for part, prepare in lightning_names.preparations(trainer):
            with lightning_names.wait_for_preparation(trainer):
                if part.prepare_data_per_node:
                    self.once_on_this_host(f"{type(part).__module__}.{type(part).__qualname__}.prepare_data", prepare)
                elif trainer.is_global_zero:
                    prepare()

    def once_on_this_host(self, name: str, prepare: Callable[[], None]) -> None:
        """Run one call of a script, unless a living worker on this host has run it; wait for one that runs it.

        Args:
            name: the same for the same call in all workers. A script's second call of a name is another one than its first.

        Raises:
            PreparedDataError: another worker takes too long.
        """
        self._calls[name] += 1
        try:
            file = self._opened()
        except OSError as error:
            log.warning("%s runs on each worker of this host, because no lock can be taken: %s", name, error)
            prepare()
            return
        digest = hashlib.sha256(f"{self._job}/{name}/{self._calls[name]}".encode()).digest()
        preparing = int.from_bytes(digest[:7], "big") * 2
        is_prepared = preparing + 1
        _wait_for(file, preparing, name)
        try:
            if _try(file, is_prepared):  # no living worker has it
                prepare()
            fcntl.lockf(file, fcntl.LOCK_SH, 1, is_prepared)
        except BaseException:
            fcntl.lockf(file, fcntl.LOCK_UN, 1, is_prepared)
            raise
        finally:
            fcntl.lockf(file, fcntl.LOCK_UN, 1, preparing)

    def _opened(self) -> BinaryIO:
        if self._file is None:
            folder = users_folder(self._root)
            with suppress(FileExistsError):
                folder.mkdir(mode=0o700)
            if not is_private(folder):
                raise PermissionError(f"{folder} is not a folder of this user's alone: remove it")
            self._file = os.fdopen(os.open(folder / FILE, os.O_RDWR | os.O_CREAT, 0o600), "r+b", buffering=0)
        return self._file


def _wait_for(file: BinaryIO, place: int, name: str) -> None:
    began = time.monotonic()
    tell_at = began + TELL_S
    while not _try(file, place):
        now = time.monotonic()
        if now > began + LIMIT_S:
            raise PreparedDataError(
                f"{name} of {_holder(file, place)} on this host has not ended for {LIMIT_S:.0f} s: end that process, or run "
                "the work before the job starts"
            )
        if now > tell_at:
            tell_at = now + TELL_AGAIN_S
            log.warning("waiting for %s on this host, which runs %s, for %.0f s", _holder(file, place), name, now - began)
        time.sleep(MATE_LOOK_S)


def _try(file: BinaryIO, place: int) -> bool:
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EAGAIN):
            raise
        return False
    return True


def _holder(file: BinaryIO, place: int) -> str:
    request = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, place, 1, 0)
    *_, pid = struct.unpack("hhqqi", fcntl.fcntl(file, fcntl.F_GETLK, request))
    return f"process {pid}" if pid > 0 else "a process"  # 0: of another container
