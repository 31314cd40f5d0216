"""Temporary folders that do not outlive their owner for long: creating the next one removes those of dead processes.

The owner holds a lock on a file in its folder. The kernel releases it however the process ends, so neither a reused process id
nor a clock matters.
"""

from __future__ import annotations

import contextlib
import fcntl
import shutil
import tempfile
from pathlib import Path

__all__ = ["OwnedFolder"]

_OWNER_FILE = ".owner"


class OwnedFolder:
    """A new temporary folder, as `tempfile.TemporaryDirectory`.

    Args:
        prefix: prefix of its name; folders with this prefix and a dead owner are removed first.
        root: folder to create it in; None: the system's folder for temporary files.
    """

    def __init__(self, prefix: str, root: Path | None = None) -> None:
        _remove_orphans(prefix, root)
        self._folder = tempfile.TemporaryDirectory(prefix=prefix, dir=root)
        self.name = self._folder.name
        unlocked = Path(self.name, f"{_OWNER_FILE}.new")
        self._lock = unlocked.open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        unlocked.rename(Path(self.name, _OWNER_FILE))  # renamed last, so that the file is never visible without its lock

    def cleanup(self) -> None:
        """Remove the folder."""
        self._folder.cleanup()
        self._lock.close()


def _remove_orphans(prefix: str, root: Path | None) -> None:
    for file in (root or Path(tempfile.gettempdir())).glob(f"{prefix}*/{_OWNER_FILE}"):
        # Another user's folder, or one that is being removed at this moment, is left alone.
        with contextlib.suppress(OSError), file.open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(file.parent, ignore_errors=True)
