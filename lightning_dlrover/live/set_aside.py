"""Checkpoints of a worker that does not know whether others have taken its job over: nothing of theirs is replaced or removed.

Workers that are cut off from etcd train on. If that lasts, others may have started the job again from its newest checkpoint.
What a cut-off worker saves under a name that is in use is set aside, and what it would remove stays. Both are made good once
etcd has taken a record of this worker, which it does only for members of the job.

    wanted -> set aside -> written -> in its place     place, written, settle
    unwanted -> kept -> removed                        may_remove, settle
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from lightning_dlrover.live.checkpoints import absolute, exists, replace_folder
from lightning_dlrover.live.ports import Job

__all__ = ["SetAside"]

log = logging.getLogger(__name__)


class CheckpointFiles(Protocol):
    """Storage of checkpoints, as the Trainer's `checkpoint_io` or the strategy offers it."""

    def remove_checkpoint(self, path: Any) -> None: ...


class SetAside:
    """Rank 0's checkpoints that wait for etcd. `settle` may run in another thread than the rest.

    Args:
        files: where checkpoints are written.
    """

    def __init__(self, job: Job, files: CheckpointFiles) -> None:
        self._job = job
        self._run_id = job.config.run_id
        self._files = files
        self._wanted: dict[str, str] = {}  # path of each checkpoint that was set aside, and the path that it should have
        self._written: set[str] = set()  # those that are complete
        self._kept: set[str] = set()  # checkpoints that were to be removed
        self._lock = threading.Lock()

    def place(self, path: Any, round_number: int) -> Any:
        """Return where a checkpoint may be written: elsewhere if what is there may be of another life of the job."""
        with self._lock:
            self._kept.discard(absolute(path))
            if self._job.membership.is_still_in_force():
                for aside in [each for each in self._written if self._wanted[each] == absolute(path)]:
                    self._written.discard(aside)  # it is older than what comes now
                    self._carry_out("remove", aside, partial(self._files.remove_checkpoint, aside))
                return path
            if not exists(path):
                return path
        folder, slash, name = str(path).rpartition("/")
        # The name comes last: Lightning takes the newest file that begins with "last" for the newest checkpoint.
        aside = f"{folder}{slash}cut-off-{round_number}-{name}"
        self._wanted[absolute(aside)] = absolute(path)
        log.warning("%s: checkpoint %s is not replaced before it answers; until then it is %s", self._doubt, path, aside)
        return aside

    def may_remove(self, path: Any) -> bool:
        """Return whether a checkpoint may be removed now; else `settle` removes it."""
        if self._job.membership.is_still_in_force():
            return True
        self._kept.add(absolute(path))
        log.warning("%s: checkpoint %s is not removed before it answers", self._doubt, path)
        return False

    def written(self, path: str) -> str:
        """Note that a checkpoint is complete; return the path at which it will be once etcd answers."""
        wanted = self._wanted.get(path)
        if wanted is None or "://" in path:  # a file in an object store would have to be copied
            return path
        self._written.add(path)
        return wanted

    def settle(self) -> None:
        """Put checkpoints in their places and remove others, because this worker is a member of the job."""
        with self._lock:
            while self._written:
                aside = self._written.pop()
                self._carry_out(f"move {aside} to", self._wanted[aside], partial(self._move, aside))
            while self._kept:
                kept = self._kept.pop()
                self._carry_out("remove", kept, partial(self._files.remove_checkpoint, kept))

    def _move(self, aside: str) -> None:
        if os.path.isdir(aside):
            replace_folder(Path(self._wanted[aside]), Path(aside))
        else:
            os.replace(aside, self._wanted[aside])
        log.info("run %s: etcd answers again: %s is in its place", self._run_id, self._wanted[aside])

    def _carry_out(self, what: str, path: str, change: Callable[[], None]) -> None:
        try:
            change()
        except OSError as error:  # the user, or another process, may have moved them
            log.warning("run %s: could not %s %s: %s", self._run_id, what, path, error)

    @property
    def _doubt(self) -> str:
        own = self._job.membership.own
        silent_s = own.lease.silent_s
        return f"run {self._run_id}: etcd has not answered for {silent_s:.0f} s, so other workers may have taken the job over"
