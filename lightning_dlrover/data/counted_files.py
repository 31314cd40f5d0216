"""Count the rows of many files in parallel, and remember the counts and the files' columns for the next start."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from lightning_dlrover.data.locations import Location
from lightning_dlrover.home import home

__all__ = ["Count", "cache_file", "counted"]

log = logging.getLogger(__name__)

NUM_THREADS = 32
"""Files that are counted at once. Stores answer many requests at a time."""

PROGRESS_AFTER_S = 2.0
"""Seconds of counting after which a progress bar appears."""

LOCK_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Count:
    """Rows of a file, as they are remembered."""

    rows: int
    marks: bytes = b""  # places in the file from which it can be read, in the form of its kind
    columns: bytes = b""  # names and types of its columns, in the form of its kind


def counted(locations: Sequence[Location], kind: str, count: Callable[[Location], Count]) -> dict[str, Count]:
    """Count the rows of each file, unless its count is remembered.

    Args:
        kind: of rows. The same file may have other rows as another kind.

    Returns:
        Counts by the files' keys.

    Raises:
        DataError: a file cannot be read.
    """
    from tqdm.auto import tqdm

    with _opened_cache() as cache:
        known = cache.get(kind, locations)
        new = [location for location in locations if location.key not in known]
        with ThreadPoolExecutor(NUM_THREADS) as threads:
            counts = threads.map(count, new)
            progress = tqdm(counts, "counting rows", len(new), unit="files", delay=PROGRESS_AFTER_S, disable=None, leave=False)
            found: dict[str, Count] = {}
            try:
                for location, each in zip(new, progress, strict=True):
                    found[location.key] = each
            finally:  # the next start counts no file again because of another one that could not be read
                cache.put(kind, new[: len(found)], found)
    return {**known, **found}


def cache_file(environ: Mapping[str, str] = os.environ) -> str:
    """Return the path of the file that remembers counts, in XDG_CACHE_HOME or ~/.cache."""
    cache = environ.get("XDG_CACHE_HOME") or os.path.join(home(environ), ".cache")
    return os.path.join(cache, "dlrover", "rows.sqlite")


class _Cache:
    def __init__(self, connection: sqlite3.Connection | None) -> None:
        self._connection = connection

    def get(self, kind: str, locations: Sequence[Location]) -> dict[str, Count]:
        found: dict[str, Count] = {}
        query = "SELECT num_rows, marks, columns FROM files WHERE kind = ? AND key = ? AND version = ?"
        if self._connection is None:
            return found
        with contextlib.suppress(sqlite3.Error):
            columns = {digest: bytes(each) for digest, each in self._connection.execute("SELECT digest, columns FROM columns")}
            for each in locations:
                if row := self._connection.execute(query, (kind, each.key, each.version)).fetchone():
                    found[each.key] = Count(int(row[0]), bytes(row[1]), columns[row[2]])
        return found

    def put(self, kind: str, locations: Sequence[Location], counts: Mapping[str, Count]) -> None:
        if self._connection is None or not locations:
            return
        digests = {each.columns: hashlib.sha256(each.columns).hexdigest() for each in counts.values()}  # files share them
        rows = [
            (kind, each.key, each.version, count.rows, count.marks, digests[count.columns])
            for each, count in ((each, counts[each.key]) for each in locations)
        ]
        with contextlib.suppress(sqlite3.Error), self._connection:  # another process may be writing the same
            columns = [(digest, columns) for columns, digest in digests.items()]
            self._connection.executemany("INSERT OR REPLACE INTO columns VALUES (?, ?)", columns)
            self._connection.executemany("INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?, ?, ?)", rows)


@contextlib.contextmanager
def _opened_cache() -> Iterator[_Cache]:
    path = cache_file()
    connection = None
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        connection = sqlite3.connect(path, timeout=LOCK_TIMEOUT_S)
        with connection:
            connection.execute("DROP TABLE IF EXISTS counts")  # of earlier versions, without columns
            connection.execute(
                "CREATE TABLE IF NOT EXISTS files"
                " (kind TEXT, key TEXT, version TEXT, num_rows INTEGER, marks BLOB, columns TEXT, PRIMARY KEY (kind, key))"
            )
            connection.execute("CREATE TABLE IF NOT EXISTS columns (digest TEXT PRIMARY KEY, columns BLOB)")
    except (OSError, sqlite3.Error) as error:
        log.debug("counts of rows are not remembered: %s: %s", path, error)
        connection = None
    try:
        yield _Cache(connection)
    finally:
        if connection is not None:
            connection.close()
