"""Files of lines, CSV, TSV and tar archives as a source, compressed or not.

Rows are counted once. The count is remembered for the next start, with the files' columns and with marks: places from which a
file can be read. A compressed file is read from its beginning instead, so a place late in a large one costs time.
"""

from __future__ import annotations

import bz2
import contextlib
import gzip
import hashlib
import io
import logging
import lzma
import os
import sqlite3
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_dlrover.data.lane_plan import BLOCK_ROWS, rows_of_block
from lightning_dlrover.data.locations import Location, as_columns, as_paths, located, paths_text
from lightning_dlrover.data.source import DataError, Shard, check_extra
from lightning_dlrover.files import home

log = logging.getLogger(__name__)

NUM_THREADS = 32
"""Files that are counted at once. Stores answer many requests at a time."""

PROGRESS_AFTER_S = 2.0
"""Seconds of counting after which a progress bar appears."""

LOCK_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Count:
    """Rows of a file. The form of `marks` and `columns` depends on its kind."""

    rows: int
    marks: bytes = b""  # places in the file from which it can be read
    columns: bytes = b""  # names and types of its columns


def counted(locations: Sequence[Location], kind: str, count: Callable[[Location], Count]) -> dict[str, Count]:
    """Return the number of rows of each file, by its key, counted unless it is remembered.

    Args:
        kind: of rows; a file may have other rows as another kind.

    Raises:
        DataError: a file cannot be read.
    """
    from tqdm.auto import tqdm

    with contextlib.closing(_Cache()) as cache:
        known = cache.get(kind, locations)
        new = [location for location in locations if location.key not in known]
        with ThreadPoolExecutor(NUM_THREADS) as threads:
            counts = threads.map(count, new)
            progress = tqdm(counts, "counting rows", len(new), unit="files", delay=PROGRESS_AFTER_S, disable=None, leave=False)
            found: dict[str, Count] = {}
            try:
                for location, each in zip(new, progress, strict=True):
                    found[location.key] = each
            finally:  # one unreadable file must not make the next start count the others again
                cache.put(kind, new[: len(found)], found)
    return {**known, **found}


def cache_file(environ: Mapping[str, str] = os.environ) -> str:
    """Return the path of the cache of counts, in XDG_CACHE_HOME or ~/.cache."""
    cache = environ.get("XDG_CACHE_HOME") or os.path.join(home(environ), ".cache")
    return os.path.join(cache, "dlrover", "rows.sqlite")


class _Cache:
    """A file that remembers counts, if it can be opened."""

    def __init__(self) -> None:
        path = cache_file()
        self._connection: sqlite3.Connection | None = None
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            self._connection = connection = sqlite3.connect(path, timeout=LOCK_TIMEOUT_S)
            with connection:
                connection.execute(
                    "CREATE TABLE IF NOT EXISTS files"
                    " (kind TEXT, key TEXT, version TEXT, num_rows INTEGER, marks BLOB, columns TEXT, PRIMARY KEY (kind, key))"
                )
                connection.execute("CREATE TABLE IF NOT EXISTS columns (digest TEXT PRIMARY KEY, columns BLOB)")
        except (OSError, sqlite3.Error) as error:
            log.debug("counts of rows are not remembered: %s: %s", path, error)
            self.close()

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

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


FORMATS = ("lines", "csv", "tsv", "tar")
SUFFIXES = {".csv": "csv", ".tsv": "tsv", ".tar": "tar", ".txt": "lines", ".jsonl": "lines", ".log": "lines"}
OPENERS: Mapping[str, Callable[[Any], Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}

CHUNK_BYTES = 4 * 2**20
"""Bytes of text that are read and parsed at once."""

LINES_PER_MARK, SAMPLES_PER_MARK = 8192, 64
"""Rows from one mark to the next."""

NO_LINE_BREAKS = (
    "A value with a line break, or a quote that is not closed, makes rows that cannot be found by counting lines: replace line "
    "breaks in values, or write such data to Parquet or to lines of JSON"
)

SAMPLES_PER_BLOCK = 64
"""Samples of tar archives that a lane keeps in memory. With fewer, most repeated steps would reopen lanes."""

LINES_TO_INFER_FROM = 1000
"""Lines of the first file from which the types of columns are inferred."""


class Files:
    """Files of one format as a source of a stream.

    Args:
        paths: a file, a folder, a pattern such as ``"s3://bucket/day_*.tsv.gz"``, or several of them.
        format: ``"lines"`` (rows are strings), ``"csv"`` or ``"tsv"`` (rows are dictionaries by column, batches are made from
            columns), ``"tar"`` (WebDataset: rows are dictionaries of bytes by extension, with ``__key__``). None: by the names.
        columns: of CSV and TSV, the columns to read; with ``header=False`` the names of all columns.
        types: Arrow's names of types by column, where the types inferred from the first lines do not fit.
        header: whether the first line of each CSV or TSV file has the names of the columns.

    Raises:
        TypeError: `paths` or `columns` is of another type.
        ValueError: there is no such format, or no path or column is given.
        ModuleNotFoundError: pyarrow is missing.

    Example:
        >>> import pathlib, tempfile
        >>> from lightning_dlrover.data import stream
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = pathlib.Path(folder, "log.txt").write_text("first\\nsecond\\n")
        ...     rows = stream(files(f"{folder}/*.txt"), keep_order=True)
        ...     len(rows), rows[1]
        (2, 'second')
    """

    def __init__(
        self,
        paths: str | Sequence[str],
        format: str | None = None,
        columns: Sequence[str] | None = None,
        types: Mapping[str, str] | None = None,
        header: bool = True,
    ) -> None:
        check_extra()
        if format is not None and format not in FORMATS:
            raise ValueError(f"format={format!r}: give one of {', '.join(FORMATS)}, or leave it out to go by the files' names")
        self._paths = as_paths(paths)
        self._given_format = format
        self._given_columns = as_columns(columns)
        self._types = dict(types or {})
        self._header = header
        self._locations: dict[str, Location] = {}
        self.block_rows = BLOCK_ROWS  # rows of a lane to keep in memory; `shards` counts them
        self._marks: dict[str, npt.NDArray[np.int64]] = {}
        self._format = format or ""
        self._schema: Any = None  # columns of CSV and TSV
        self._names: dict[str, list[str]] = {}  # names of the columns in files of another order than the first one's

    def __repr__(self) -> str:
        options = f", {self._given_format!r}" if self._given_format is not None else ""
        return f"files({paths_text(self._paths)}{options}{'' if self._header else ', header=False'})"

    def shards(self) -> Sequence[Shard]:
        """Return the files with their numbers of rows. Raises `DataError` if one cannot be read, or has an unknown format."""
        self._locations = {each.key: each for each in located(self._paths)}
        formats = {self._given_format or _format_of(key) for key in self._locations}
        if len(formats) > 1:
            raise DataError(
                f"{self._paths!r} has files of several formats ({', '.join(sorted(formats))}): make a stream of each"
            )
        (self._format,) = formats
        is_table = self._format in ("csv", "tsv")
        skips, delimiter = self._header and is_table, self._delimiter if is_table else ""
        count = _count_tar if self._format == "tar" else partial(_count_lines, has_header=skips, delimiter=delimiter)
        counts = counted(list(self._locations.values()), f"{self._format} {int(skips)}", count)
        self._marks = {key: np.frombuffer(each.marks, dtype=np.int64) for key, each in counts.items()}
        shards = [Shard(key, counts[key].rows, location.version) for key, location in self._locations.items()]
        num_bytes = sum(location.size for location in self._locations.values())
        most = SAMPLES_PER_BLOCK if self._format == "tar" else BLOCK_ROWS
        self.block_rows = rows_of_block(sum(shard.rows for shard in shards), num_bytes, most)
        if is_table:
            first = next((shard for shard in shards if shard.rows), None)
            self._schema = self._inferred(self._locations[first.key]) if first is not None else None
            if first is not None and self._header:
                self._names = self._names_by_file(
                    first.key, {each.key: counts[each.key].columns for each in shards if each.rows}
                )
        return shards

    def read(self, shard: Shard, row: int) -> Iterator[Any]:
        """Yield rows from a row on: strings, dictionaries of a sample's files, or record batches.

        Raises `DataError` if the file has changed since it was counted, or cannot be parsed.
        """
        location = self._locations[shard.key]
        per_mark = SAMPLES_PER_MARK if self._format == "tar" else LINES_PER_MARK
        marks = self._marks[shard.key]
        mark = min(row // per_mark, len(marks) - 1)
        with _opened(location, shard.version) as file:
            if _opener(location.key) is None:
                file.seek(int(marks[mark]))
                row -= mark * per_mark
            elif int(marks[0]):
                file.read(int(marks[0]))  # the header
            if self._format == "tar":
                yield from _samples(file, row, shard.key)
            elif self._format == "lines":
                for chunk in _chunks(file, row):
                    yield from chunk.decode(errors="replace").removesuffix("\n").split("\n")
            else:
                for chunk in _chunks(file, row):
                    yield from self._parsed(chunk, shard.key)

    def _parsed(self, chunk: bytes, key: str) -> Iterator[Any]:
        reading = {"column_names": self._names.get(key, self._schema.names), "block_size": max(len(chunk), 1)}
        wanted = self._wanted or self._schema.names
        try:
            table = _read_csv(chunk, self._delimiter, reading, column_types=self._schema, include_columns=wanted)
        except ValueError as error:  # Arrow's errors, too
            raise DataError(
                f"{key} cannot be parsed as {self._format}: {error}. Types come from the first {LINES_TO_INFER_FROM} lines of "
                "the first file; give others with files(..., types={'column': 'float64'})"
            ) from error
        if table.num_rows != _num_lines(chunk):
            raise DataError(f"{key}: {_num_lines(chunk)} lines have {table.num_rows} rows. {NO_LINE_BREAKS}")
        yield from table.to_batches()

    def _names_by_file(self, first: str, headers: Mapping[str, bytes]) -> dict[str, list[str]]:
        """Return the columns of each file with another order than the first one, or raise `DataError` for other columns."""
        expected: list[str] = self._schema.names
        of_line = {line: _names_in(line, self._delimiter) for line in set(headers.values())}
        for key, line in headers.items():
            names = of_line[line]
            wanted = self._wanted or [*expected, *(name for name in names if name not in expected)]
            for name in wanted:
                if names.count(name) > 1:
                    raise DataError(
                        f"{key} has {names.count(name)} columns with the name {name!r}: a row can only hold one of them"
                    )
                if name not in names or name not in expected:
                    here, there = (key, first) if name not in names else (first, key)
                    raise DataError(
                        f"{here} has no column {name!r}, and {there} has one. Give the columns that all files have with "
                        "files(..., columns=[...]), or make a stream of each kind of file"
                    )
        return {key: of_line[line] for key, line in headers.items() if of_line[line] != expected}

    def _inferred(self, location: Location) -> Any:
        """Return the columns' names and types, from the first lines of a file and from the arguments."""
        import pyarrow as pa

        with _opened(location) as file:
            lines = b"".join(line for _, line in zip(range(LINES_TO_INFER_FROM + self._header), file, strict=False))
        names = None if self._header else self._given_columns
        try:
            reading = {"column_names": names, "autogenerate_column_names": names is None and not self._header}
            table = _read_csv(lines, self._delimiter, reading, column_types=self._types)
        except (ValueError, TypeError) as error:
            raise DataError(
                f"{location.key} cannot be parsed as {self._format}: {error}. If its first line does not name the columns, "
                "give files(..., header=False, columns=[...])"
            ) from error
        unknown = [name for name in (*self._types, *(self._given_columns or ())) if name not in table.column_names]
        if unknown:
            raise DataError(f"{location.key} has no column {', '.join(unknown)}, only {', '.join(table.column_names)}")
        schema = table.schema
        for number, field in enumerate(schema):
            if pa.types.is_null(field.type):
                schema = schema.set(number, field.with_type(pa.string()))
        return schema

    @property
    def _wanted(self) -> list[str] | None:
        return self._given_columns if self._header else None

    @property
    def _delimiter(self) -> str:
        return "," if self._format == "csv" else "\t"


files = Files
"""Name of `Files` in scripts."""


def _format_of(key: str) -> str:
    suffixes = [suffix for suffix in PurePosixPath(key).suffixes if suffix not in OPENERS]
    found = SUFFIXES.get(suffixes[-1].lower()) if suffixes else None
    if found is None:
        raise DataError(f"{key}: its name has no known ending; give files(..., format=) one of {', '.join(FORMATS)}")
    return found


def _opener(key: str) -> Callable[[Any], Any] | None:
    return OPENERS.get(PurePosixPath(key).suffix)


def _opened(location: Location, version: str | None = None) -> Any:
    """Open a file, decompressed."""
    file, opener = location.open(version), _opener(location.key)
    return io.BufferedReader(file if opener is None else opener(file), CHUNK_BYTES)


def _chunks(file: Any, skip: int) -> Iterator[bytes]:
    """Yield whole lines, many at once, after the first `skip` ones."""
    rest = b""
    while data := file.read(CHUNK_BYTES):
        data = rest + data
        end = data.rfind(b"\n") + 1
        whole, rest = data[:end], data[end:]
        if skip and whole:
            breaks = _line_breaks(whole)
            if len(breaks) <= skip:
                skip -= len(breaks)
                continue
            whole, skip = whole[int(breaks[skip - 1]) + 1 :], 0
        if whole:
            yield whole
    if rest and not skip:
        yield rest


def _line_breaks(data: bytes) -> npt.NDArray[np.int64]:
    return np.flatnonzero(np.frombuffer(data, dtype=np.uint8) == ord("\n"))


def _num_lines(text: bytes) -> int:
    return text.count(b"\n") + (not text.endswith(b"\n"))


def _count_lines(location: Location, has_header: bool, delimiter: str) -> Count:
    """Count the lines of a file; with a delimiter, the rows of a table."""
    lines, position = 0, 0
    marks, header = [0], b""
    rest = b""
    is_over = False
    try:
        with _opened(location) as file:
            while not is_over:
                data = file.read(CHUNK_BYTES)
                is_over = not data
                text = rest + data
                end = len(text) if is_over else text.rfind(b"\n") + 1
                text, rest = text[:end], text[end:]
                if not text:
                    continue
                if delimiter:
                    _check_line_breaks(text, delimiter, location.key)
                ends = _line_breaks(text) + position + 1  # where the next line begins
                if not text.endswith(b"\n"):
                    ends = np.append(ends, position + len(text))
                if has_header and not header:
                    header, marks[0] = text[: int(ends[0])], int(ends[0])
                    ends = ends[1:]
                first = -lines % LINES_PER_MARK or LINES_PER_MARK
                marks.extend(ends[first - 1 :: LINES_PER_MARK].tolist())
                lines, position = lines + len(ends), position + len(text)
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise DataError(f"{location.key} cannot be read: {error}") from error
    return Count(lines, np.array(marks, dtype=np.int64).tobytes(), header)


def _check_line_breaks(text: bytes, delimiter: str, key: str) -> None:
    """Raise `DataError` unless each line is a row, as rows are found by line breaks."""
    if b'"' not in text and (b"\r" not in text or text.count(b"\r") == text.count(b"\r\n")):
        return
    if _are_rows(text, delimiter):
        return
    ends = _line_breaks(text) + 1
    good, bad = 0, len(ends)  # lines that are rows, and lines of which one is not
    while bad - good > 1:
        middle = (good + bad) // 2
        is_good = _are_rows(text[: ends[middle - 1]], delimiter)
        good, bad = (middle, bad) if is_good else (good, middle)
    line = text[ends[good - 1] if good else 0 :][:80]
    raise DataError(f"{key}: the line {line!r} is not a row. {NO_LINE_BREAKS}")


def _are_rows(text: bytes, delimiter: str) -> bool:
    """Return whether each line is a row for the parser."""
    import pyarrow as pa

    text = text if text.endswith(b"\n") else text + b"\n"
    text += text[: text.index(b"\n") + 1]  # the parser closes quotes that are open at the end
    reading = {"autogenerate_column_names": True, "block_size": len(text)}
    first = {"include_columns": ["f0"], "column_types": {"f0": pa.binary()}}
    try:
        table = _read_csv(text, delimiter, reading, check_utf8=False, **first)
    except pa.ArrowInvalid:
        return False
    return bool(table.num_rows == text.count(b"\n"))


def _names_in(header: bytes, delimiter: str) -> list[str]:
    if not header.strip():
        return []
    try:
        return [str(name) for name in _read_csv(header, delimiter, {}).column_names]
    except ValueError:  # not text
        return []


def _read_csv(text: bytes, delimiter: str, reading: Mapping[str, Any], **converting: Any) -> Any:
    """Return a table, in which empty lines count as rows. Arrow's errors are `ValueError`s."""
    import pyarrow as pa
    from pyarrow import csv

    return csv.read_csv(
        pa.BufferReader(text),
        csv.ReadOptions(use_threads=False, **reading),
        csv.ParseOptions(delimiter=delimiter, ignore_empty_lines=False),
        csv.ConvertOptions(**converting),
    )


def _samples(file: Any, skip: int, key: str) -> Iterator[dict[str, Any]]:
    """Yield a tar archive's samples after the first `skip` ones: consecutive files whose names differ in the extension only."""
    sample: dict[str, Any] = {}
    try:
        for member, content in _members(file):
            name, extension = _parts(member.name)
            if sample and sample["__key__"] != name:
                if not skip:
                    yield sample
                skip, sample = max(0, skip - 1), {}
            sample.setdefault("__key__", name)
            sample[extension] = content() if not skip else b""
    except (tarfile.TarError, OSError, EOFError) as error:
        raise DataError(f"{key} cannot be read as a tar archive: {error}") from error
    if sample and not skip:
        yield sample


def _members(file: Any) -> Iterator[tuple[tarfile.TarInfo, Callable[[], bytes]]]:
    with tarfile.open(fileobj=file, mode="r|") as archive:
        for member in archive:
            if member.isfile():
                yield member, lambda member=member: archive.extractfile(member).read()  # type: ignore[misc,union-attr]


def _parts(path: str) -> tuple[str, str]:
    """Return a file's name without its extension, and the extension."""
    folder, slash, name = path.rpartition("/")
    stem, _, extension = name.partition(".")
    return folder + slash + stem, extension


def _count_tar(location: Location) -> Count:
    marks: list[int] = []
    samples, before = 0, ""
    try:
        with _opened(location) as file:
            for member, _ in _members(file):
                name, _ = _parts(member.name)
                if name != before:
                    if samples % SAMPLES_PER_MARK == 0:
                        marks.append(member.offset)
                    samples, before = samples + 1, name
    except (tarfile.TarError, OSError, EOFError) as error:
        raise DataError(f"{location.key} cannot be read as a tar archive: {error}") from error
    return Count(samples, np.array(marks or [0], dtype=np.int64).tobytes())
