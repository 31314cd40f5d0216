"""Rows that could not be read, on their way from the process that reads them to the one that trains.

They travel with each batch that takes rows from their block. So those of a batch that is prepared and then discarded, as when
workers change, are named again with the batch in its place.
"""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = ["LeftOut", "WithLeftOut"]


class LeftOut(NamedTuple):
    """Consecutive rows of a shard that are left out of batches."""

    shard: int  # number of the shard
    key: str  # its name
    first: int  # number of the first row; in a Kafka topic its offset
    stop: int  # number of the row after the last one; `first`: further rows of the block are not named
    reason: str  # of the first row

    @property
    def is_cut_short(self) -> bool:
        return self.first == self.stop


class WithLeftOut(NamedTuple):
    """A batch, and the rows left out of its blocks. A named tuple, as a DataLoader pins the memory of its parts."""

    batch: Any
    left_out: tuple[LeftOut, ...]
