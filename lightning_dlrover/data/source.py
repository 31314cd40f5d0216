"""Fix the rows of each window of a source, once for all its readers.

A source that grows has a window for each epoch, which goes on where the window before has ended. Any other one has a single
window. The process that needs a window first proposes it. In a live job its record in etcd makes it that of all workers.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch.utils.data import get_worker_info

from lightning_dlrover.data.source import DataError, Ranges, WindowedSource

__all__ = ["WindowKeeper", "Windows", "num_rows"]

log = logging.getLogger(__name__)

POLL_S = 0.5
"""Seconds between two looks for new rows; longer if a look takes long."""

WARN_AFTER_S = 5.0
"""Seconds without new rows after which the wait is logged."""

NUM_KEPT = 4
"""Newest windows that a process remembers. A rollback may lead back to the one before."""


def num_rows(ranges: Mapping[str, tuple[int, int]]) -> int:
    """Return the number of rows in a window."""
    return sum(stop - first for first, stop in ranges.values())


class WindowKeeper(Protocol):
    """Where the windows of a source are fixed."""

    def read(self, epoch: int, after: Mapping[str, int] | None) -> Ranges | None:
        """Return a window that was fixed; None if it was not.

        Args:
            after: row at which each shard goes on, according to the window before. A window that does not is none.
        """

    def fix(self, epoch: int, after: Mapping[str, int] | None, ranges: Ranges) -> Ranges:
        """Fix a window, unless another process was faster. Return the one that counts."""

    def pause(self, seconds: float) -> None:
        """Wait before the next look for new rows. May raise what ends the wait."""


class _Alone:
    """A process that has the source for itself."""

    def read(self, epoch: int, after: Mapping[str, int] | None) -> Ranges | None:
        return None

    def fix(self, epoch: int, after: Mapping[str, int] | None, ranges: Ranges) -> Ranges:
        return ranges

    def pause(self, seconds: float) -> None:
        time.sleep(seconds)


class _SharedText:
    """A text in memory that processes share which are forked later."""

    def __init__(self) -> None:
        self._file = open(os.memfd_create("dlrover-windows"), "r+b", buffering=0)  # noqa: SIM115  # closed with this object

    def write(self, text: str) -> None:
        data = text.encode()
        os.pwrite(self._file.fileno(), data, 0)
        self._file.truncate(len(data))

    def read(self) -> str:
        fd = self._file.fileno()
        return os.pread(fd, os.fstat(fd).st_size, 0).decode()


class Windows:
    """The windows of one source, by epoch. A source that does not grow has the same window in each epoch."""

    def __init__(self, source: WindowedSource) -> None:
        self._source = source
        self._known: dict[int, Ranges] = {}
        self._start: dict[str, int] | None = None  # row at which each shard goes on in epoch 0; None: the source's own start
        self.keeper: WindowKeeper = _Alone()
        self._shared = _SharedText()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "keeper": _Alone(), "_shared": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._shared = _SharedText()

    @property
    def grows(self) -> bool:
        return self._source.grows

    @property
    def goes_on(self) -> bool:
        """Whether epoch 0 begins where an earlier fit has ended."""
        return self._start is not None

    def of(self, epoch: int) -> Ranges:
        """Return the window of an epoch. Without rows in it, a growing source has ended before that epoch.

        Raises:
            DataError: the window before is not known, or the source cannot be read.
        """
        epoch = epoch if self.grows else 0
        if epoch not in self._known:
            self.take(epoch, self._decided(epoch))
        return self._known[epoch]

    def take(self, epoch: int, ranges: Mapping[str, tuple[int, int]]) -> None:
        """Adopt a window that was fixed earlier, or by another process. What is known of later ones is forgotten."""
        epoch = epoch if self.grows else 0
        ranges = {key: (int(first), int(stop)) for key, (first, stop) in ranges.items()}
        if self._known.get(epoch) == ranges:
            return
        self._known = {e: known for e, known in self._known.items() if epoch - NUM_KEPT < e < epoch} | {epoch: ranges}
        self._shared.write(json.dumps(self._known))

    def anew(self) -> Windows:
        """Return windows of the same source of which none is known."""
        return Windows(self._source)

    def begin_again(self) -> None:
        """Count epochs from 0 again, for another fit. A source that grows goes on where the newest window has ended."""
        if self.grows and self._known:
            self._start = _stops(self._known[max(self._known)])
            self._known = {}

    def go_on_before(self, epoch: int, ranges: Mapping[str, Sequence[int]]) -> None:
        """Decide an epoch anew, which begins where a window without rows begins."""
        if epoch:
            self._known.pop(epoch, None)
            self.take(epoch - 1, {key: (first, first) for key, (first, _) in ranges.items()})
        else:
            self._known, self._start = {}, {key: int(first) for key, (first, _) in ranges.items()}

    def look_again(self, epoch: int) -> None:
        """Decide an epoch anew if it had no rows."""
        ranges = self._known.get(epoch)
        if self.grows and ranges is not None and not num_rows(ranges):
            self.go_on_before(epoch, ranges)

    def _decided(self, epoch: int) -> Ranges:
        if get_worker_info() is not None:  # each process would decide differently
            shared = json.loads(self._shared.read() or "{}")
            if str(epoch) in shared:
                return {key: (first, stop) for key, (first, stop) in shared[str(epoch)].items()}
            raise DataError(
                f"{self._source!r:.120} has rows that come and go, and a loader worker was started before those of epoch "
                f"{epoch} were known: call len() of the stream before the loader's iterator is made"
            )
        begin = after = self._stops_before(epoch)
        began = time.monotonic()
        has_warned = False
        while (fixed := self.keeper.read(epoch, after)) is None:
            looked = time.monotonic()
            ranges = self._source.window(begin)
            begin = {key: first for key, (first, _) in ranges.items()}  # the newest row may be another one at the next look
            now = time.monotonic()
            if num_rows(ranges) or not self.grows or now - began >= self._source.dry_s:
                return self.keeper.fix(epoch, after, ranges)
            if now - began > WARN_AFTER_S and not has_warned:
                has_warned = True
                log.warning("%.120r has no new rows; training ends after %g s without any", self._source, self._source.dry_s)
            left_s = max(0.0, self._source.dry_s - (now - began))
            self.keeper.pause(min(max(POLL_S, 10 * (now - looked)), left_s))
        return fixed

    def _stops_before(self, epoch: int) -> dict[str, int] | None:
        if not epoch:
            return self._start
        if epoch - 1 not in self._known:
            raise DataError(
                f"{self._source!r:.120} grows, and it is not known where it was before epoch {epoch}: begin with epoch 0, or "
                "continue from a checkpoint of a live job (rows.resume_from(checkpoint) without one)"
            )
        return _stops(self._known[epoch - 1])


def _stops(ranges: Ranges) -> dict[str, int]:
    return {key: stop for key, (_, stop) in ranges.items()}
