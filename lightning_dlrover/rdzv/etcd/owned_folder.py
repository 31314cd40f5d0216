"""Temporary folders that do not outlive their owner for long: whoever makes the next one removes those of dead processes.

The owner holds a lock on a file in its folder. The kernel releases it whatever the end of the process, so a process id that is
used again, or a clock, decides nothing.
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
        prefix: of its name; folders of that name whose owners are dead are removed first.
        root: folder to make it in; None: that of all temporary files.
    """

    def __init__(self, prefix: str, root: Path | None = None) -> None:
        _remove_orphans(prefix, root)
        self._folder = tempfile.TemporaryDirectory(prefix=prefix, dir=root)
        self.name = self._folder.name
        unlocked = Path(self.name, f"{_OWNER_FILE}.new")
        self._lock = unlocked.open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        unlocked.rename(Path(self.name, _OWNER_FILE))  # it is never seen without its lock

    def cleanup(self) -> None:
        """Remove the folder."""
        self._folder.cleanup()
        self._lock.close()


def _remove_orphans(prefix: str, root: Path | None) -> None:
    for file in (root or Path(tempfile.gettempdir())).glob(f"{prefix}*/{_OWNER_FILE}"):
        # Another user's folder, or one that goes just now, is nobody's business here.
        with contextlib.suppress(OSError), file.open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(file.parent, ignore_errors=True)
