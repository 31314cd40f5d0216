"""Fix the windows of streams once for all workers of a job, in etcd.

The worker that needs a window first writes its record. All others read it: those that join later, and those of a job that is
started again. A checkpoint holds the window in which it was saved.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_dlrover.data.dataset import Stream
from lightning_dlrover.data.source import DataError, Ranges
from lightning_dlrover.data.windows import Windows, num_rows
from lightning_dlrover.live.position import FitPosition
from lightning_dlrover.rdzv.etcd.errors import EtcdUnavailableError
from lightning_dlrover.rdzv.group.world import World
from lightning_dlrover.rdzv.job.records import WindowRecord

__all__ = ["JobWindows"]

NUM_ON_RECORD, RANGES_ON_RECORD = 1000, 20_000
"""Newest windows of a stream that stay on record, beside the first one: as many, with as many partitions in all."""


class JobWindows:
    """The windows of all streams that this worker reads in the job."""

    def __init__(self, world: World, position: FitPosition) -> None:
        self._world = world
        self._position = position
        self._windows: dict[str, Windows] = {}  # one for each stream, by its name; they outlive the loaders
        self._saved: dict[str, tuple[int, Ranges]] = {}  # windows of a checkpoint that is being resumed

    def attend(self, stream: Stream, epoch: int) -> None:
        """Let a stream have the windows of the job.

        Args:
            epoch: the one that is about to begin. An earlier fit may have ended before it, for want of rows.
        """
        if stream.windows is None:
            return
        name = stream.name
        if name not in self._windows:
            if isinstance(stream.windows.keeper, _Keeper):
                stream.windows.begin_again()  # an earlier fit has trained what is known
                stream.share_windows(stream.windows)
            else:
                stream.share_windows(stream.windows.anew())  # the script has looked at the stream by itself
            stream.windows.keeper = _Keeper(name, stream.grows, self._world, self._position)
            self._windows[name] = stream.windows
        else:
            self._windows[name].look_again(epoch)
            stream.share_windows(self._windows[name])
        if name in self._saved:
            self._adopt(name)

    def resume(self, positions: Sequence[Mapping[str, Any] | None]) -> None:
        """Go on with the windows of a checkpoint, see `ElasticLoader.position_in_stream`."""
        for position in positions:
            if position is not None and "window" in position:
                self._saved[position["stream"]] = position["epoch"], dict(position["window"])
        for name in self._windows.keys() & self._saved.keys():
            self._adopt(name)

    def _adopt(self, name: str) -> None:
        epoch, ranges = self._saved.pop(name)
        if not num_rows(ranges):  # saved by a job that has ended for want of rows, and there may be some now
            self._windows[name].go_on_before(epoch, ranges)
            return
        self._windows[name].take(epoch, ranges)
        keeper = self._windows[name].keeper
        assert isinstance(keeper, _Keeper)
        keeper.put(epoch, ranges)


class _Keeper:
    """The records of one stream's windows."""

    def __init__(self, name: str, grows: bool, world: World, position: FitPosition) -> None:
        self._name = name
        self._grows = grows
        self._world = world
        self._position = position

    def read(self, epoch: int, after: Mapping[str, int] | None) -> Ranges | None:
        return self._swapped(epoch, after, None)

    def fix(self, epoch: int, after: Mapping[str, int] | None, ranges: Ranges) -> Ranges:
        fixed = self._swapped(epoch, after, WindowRecord(epoch, _plain(ranges), time.time()))
        assert fixed is not None
        return fixed

    def put(self, epoch: int, ranges: Mapping[str, Sequence[int]]) -> None:
        """Write a window, whatever is on record."""
        new = WindowRecord(epoch, _plain(ranges), 0.0)
        self._record(epoch, lambda now: now if now is not None and now.ranges == new.ranges else new)

    def pause(self, seconds: float) -> None:
        self._position.looks += 1  # a worker that waits for rows does not hang
        if self._position.is_repeatable and self._world.broken:
            raise self._world.broken_error()  # the others wait for this worker in the next round
        time.sleep(seconds)

    def _swapped(self, epoch: int, after: Mapping[str, int] | None, new: WindowRecord | None) -> Ranges | None:
        def change(now: WindowRecord | None) -> WindowRecord | None:
            # A job that went back to an old checkpoint may have other windows since.
            return now if now is not None and _goes_on(now, after) else new

        found = self._record(epoch, change, len(new.ranges) if new is not None else 0)
        if found is None or not _goes_on(found, after):
            return None
        return {key: (first, stop) for key, (first, stop) in found.ranges.items()}

    def _record(self, epoch: int, change: Any, num_ranges: int = 0) -> WindowRecord | None:
        """Compare-and-swap a window's record.

        Args:
            num_ranges: partitions of a window that is written, which makes room for it; 0: it is only read.
        """
        folder = f"{self._name}/{self._position.fit if self._grows else 0}/"
        outdated = epoch - max(10, min(NUM_ON_RECORD, RANGES_ON_RECORD // num_ranges)) if num_ranges else 0
        config = self._world.config
        try:
            return self._world.records.window(
                f"{folder}{epoch:010d}", change, config.wait_timeout_s, f"{folder}{outdated:010d}" if outdated > 0 else ""
            )
        except EtcdUnavailableError as error:
            raise DataError(
                f"run {config.run_id!r}: the rows of epoch {epoch} are fixed in etcd, which has given no answer for "
                f"{config.wait_timeout_s:.0f} s: {error}. Start the job again once etcd is back; it goes on from its checkpoint"
            ) from error


def _plain(ranges: Mapping[str, Sequence[int]]) -> dict[str, list[int]]:
    return {key: [int(first), int(stop)] for key, (first, stop) in ranges.items()}


def _goes_on(record: WindowRecord, after: Mapping[str, int] | None) -> bool:
    """Return whether a window begins where the one before has ended."""
    return after is None or all(record.ranges.get(key, [stop])[0] == stop for key, stop in after.items())
