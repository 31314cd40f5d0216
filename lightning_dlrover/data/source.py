"""Sources of streams: shards with a known number of rows, each readable from any row on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import PurePath
from typing import Any, Protocol, runtime_checkable

__all__ = ["DataError", "Ranges", "Shard", "Skipped", "Source", "WindowedSource", "check_extra"]

Ranges = dict[str, tuple[int, int]]
"""Rows of each shard in a window, by its key: number of the first row, and of the one after the last."""


class DataError(RuntimeError):
    """Data cannot be read, or have changed since the job began.

    Example:
        >>> Shard("part-0.parquet", rows=-1)
        Traceback (most recent call last):
        lightning_dlrover.data.source.DataError: shard 'part-0.parquet' has -1 rows: a stream needs the number of rows ...
    """


def check_extra() -> None:
    """Check that the packages that read files are installed.

    Raises:
        ModuleNotFoundError: one is missing.
    """
    missing = [name for name in ("pyarrow", "tqdm") if find_spec(name) is None]
    if missing:
        raise ModuleNotFoundError(
            f"streams of files need {' and '.join(missing)}: pip install 'lightning-dlrover[data]'", name=missing[0]
        )


@dataclass(frozen=True)
class Shard:
    """A part of a source that is read from its first row to its last, such as a file.

    Example:
        >>> Shard("part-0", rows=1000, version="etag-1")
        Shard(key='part-0', rows=1000, version='etag-1')
    """

    key: str  # names it in errors and records; unique in its source
    rows: int
    version: str = ""  # changes with its content, for example size and time of modification

    @property
    def number_of_first_row(self) -> int:
        """Number of its first row in records and for people."""
        return 0

    @property
    def identity(self) -> str:
        """What workers compare, beside the number of rows. The folder of a file may differ from host to host."""
        return PurePath(self.key).name

    def __post_init__(self) -> None:
        if isinstance(self.rows, bool) or not isinstance(self.rows, int) or self.rows < 0:
            raise DataError(
                f"shard {self.key!r} has {self.rows!r} rows: a stream needs the number of rows of each shard, 0 or more, "
                "before it reads one. Count them once and keep the numbers with the data"
            )


@dataclass(frozen=True)
class Skipped:
    """Rows that `read` leaves out because they cannot be read; it yields this in their place.

    Example:
        >>> def read(lines):
        ...     for number, line in enumerate(lines):
        ...         yield float(line) if line else Skipped(1, f"line {number} is empty")
        >>> list(read(["1.5", ""]))
        [1.5, Skipped(rows=1, reason='line 1 is empty', are_rows=True)]
    """

    rows: int
    reason: str
    are_rows: bool = True  # False: no data have these numbers, as in a compacted topic


@runtime_checkable
class Source(Protocol):
    """Where rows come from. A user's own source has these two methods and can be pickled.

    With an attribute ``reads_in_threads = True``, `read` may run in several threads at once, each for another place.
    An attribute ``block_rows`` is the number of rows of a lane that a process keeps in memory, if they are not shuffled.

    Example:
        >>> class Squares:
        ...     def shards(self):
        ...         return [Shard("squares", rows=100)]
        ...
        ...     def read(self, shard, row):
        ...         yield from (number * number for number in range(row, shard.rows))
        >>> isinstance(Squares(), Source)
        True
    """

    def shards(self) -> Sequence[Shard]:
        """Return all shards, the same in every process of the job."""

    def read(self, shard: Shard, row: int) -> Iterator[Any]:
        """Yield the shard's rows from number `row` on, the same ones each time.

        An item is one row of any kind, a `pyarrow.RecordBatch` of rows, or `Skipped`.
        """


@runtime_checkable
class WindowedSource(Source, Protocol):
    """A source whose rows come and go while a job runs. The job decides once for all workers which of them make a window.

    Attributes:
        grows: whether each epoch is a window of its own. Otherwise one window serves all epochs.
        dry_s: seconds without new rows after which a growing source counts as ended.
    """

    grows: bool
    dry_s: float

    def window(self, after: Mapping[str, int] | None) -> Ranges:
        """Return what is there now.

        Args:
            after: row at which each shard goes on; None: where the source starts.
        """

    def shards_in(self, ranges: Ranges) -> Sequence[Shard]:
        """Return the shards of a window."""
