"""Parquet files as a source, local or at a URL that fsspec opens, all read with the same columns."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from lightning_dlrover.data.file_source import Count, counted
from lightning_dlrover.data.lane_plan import BLOCK_BYTES, BLOCK_ROWS, rows_of_block
from lightning_dlrover.data.locations import Location, as_columns, as_paths, located, paths_text
from lightning_dlrover.data.source import DataError, Shard, Skipped, check_extra

if TYPE_CHECKING:
    import pyarrow as pa

# Agree on the columns and types of all files before a row is read.
#
# A column may have a wider type in some files: pandas turns an integer column with missing values into float64. All files are
# then read with the widest type. Columns without a common type are refused, and the error names both files.


@dataclass(frozen=True)
class AgreedColumns:
    """The columns of all files, in their order."""

    names: list[str] = field(default_factory=list)
    # By file, types of the columns that differ there. A file with the common columns in their order is not in it.
    casts: Mapping[str, Mapping[str, pa.DataType]] = field(default_factory=dict)

    def batch(self, batch: pa.RecordBatch, key: str) -> pa.RecordBatch:
        """Return rows of a file with the common columns. Raises `DataError` if a value does not fit the common type."""
        import pyarrow as pa

        casts = self.casts.get(key)
        if casts is None:
            return batch
        columns = []
        for name in self.names:
            column = batch.column(name)
            if name in casts:
                try:
                    column = column.cast(casts[name])
                except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
                    raise DataError(
                        f"{key}: column {name!r} is {column.type} and cannot be read as {casts[name]}, its type for all files: "
                        f"{error}. Rewrite the file, or give a type with parquet(..., types={{{name!r}: ...}})"
                    ) from error
            columns.append(column)
        return pa.RecordBatch.from_arrays(columns, names=self.names)


def agreed_columns(
    columns: Mapping[str, bytes], wanted: Sequence[str] | None, given: Mapping[str, str] | None = None
) -> AgreedColumns:
    """Compare the columns of files.

    Args:
        columns: serialized Arrow schemas by file.
        wanted: columns to read, also fields of structs (``"at.x"``); None: all.
        given: Arrow's names of types by column.

    Raises:
        DataError: a file lacks a column, or the types of a column have no common type.
        ValueError: a type in `given` does not exist.
    """
    import pyarrow as pa

    types = {name: pa.type_for_alias(kind) for name, kind in (given or {}).items()}
    schemas = {body: pa.ipc.read_schema(pa.py_buffer(body)) for body in dict.fromkeys(columns.values())}
    if not schemas:
        return AgreedColumns()
    file_with = {body: key for key, body in reversed(list(columns.items()))}  # the first one
    first_body = next(iter(schemas))
    first = file_with[first_body]
    all_names = list(schemas[first_body].names)
    names = all_names if wanted is None else list(dict.fromkeys(name.partition(".")[0] for name in wanted))
    if unknown := [name for name in types if name not in names]:
        raise DataError(f"types={given}: {first} has no column {', '.join(unknown)} to read, only {', '.join(names)}")
    common: dict[str, tuple[pa.DataType, str]] = {name: (kind, "types=") for name, kind in types.items()}  # and a file with it
    for body, schema in schemas.items():
        for name in [*names, *(schema.names if wanted is None else ())]:
            _check_name(name, (first, all_names), (file_with[body], schema.names))
            kind = schema.field(name).type
            before, other = common.setdefault(name, (kind, file_with[body]))
            if before == kind or name in types:
                continue
            widest = _wider(before, kind) if wanted is None or name in wanted else None
            if widest is None:
                raise DataError(_differ(name, (before, other), (kind, file_with[body])))
            if widest != before:
                common[name] = widest, file_with[body]
    casts = {}
    for body, schema in schemas.items():
        found = {name: common[name][0] for name in names if schema.field(name).type != common[name][0]}
        if found or (wanted is None and schema.names != names):
            casts[body] = found
    return AgreedColumns(names, {key: casts[body] for key, body in columns.items() if body in casts})


def _check_name(name: str, first: tuple[str, Sequence[str]], file: tuple[str, Sequence[str]]) -> None:
    """Raise `DataError` if a file or the first one lacks a column, or has it twice. Each comes with its columns' names."""
    (key, names), (other, others) = file, first
    if (times := names.count(name)) > 1:
        raise DataError(f"{key} has {times} columns with the name {name!r}: a row can only hold one of them")
    if name not in others:
        (key, names), (other, others) = first, file
    if name in names:
        return
    if name not in others:
        raise DataError(f"{key} has no column {name}, only {', '.join(names)}")
    raise DataError(
        f"{key} has no column {name!r}, and {other} has one. Give the columns that all files have with "
        "parquet(..., columns=[...]), or make a stream of each kind of file"
    )


def _wider(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    """Return the narrowest type that holds the values of both; None: there is none."""
    import pyarrow as pa

    # A column without values would make batches of nulls, and missing fields of structs would become nulls.
    if any(pa.types.is_null(kind) or pa.types.is_struct(kind) for kind in (one, other)):
        return None
    schemas = [pa.schema([("column", kind)]) for kind in (one, other)]
    try:
        return pa.unify_schemas(schemas, promote_options="permissive").field(0).type
    except (pa.ArrowTypeError, pa.ArrowInvalid):
        return None


def _differ(name: str, one: tuple[pa.DataType, str], other: tuple[pa.DataType, str]) -> str:
    import pyarrow as pa

    (kind, key), (other_kind, other_key) = (other, one) if pa.types.is_null(other[0]) else (one, other)
    if pa.types.is_null(kind):
        return (
            f"{key}: column {name!r} has no values, so its type is null, and in {other_key} it is {other_kind}. A batch "
            f"of nulls is not a tensor. Leave out the file or the column; or give "
            f"parquet(..., types={{{name!r}: '{other_kind}'}}) and fill the nulls in a collate_fn"
        )
    return (
        f"{key}: column {name!r} is {kind}, and in {other_key} it is {other_kind}, and no type holds the values of both. "
        f"Rewrite one of them, leave out the column, or give a type with parquet(..., types={{{name!r}: '{kind}'}})"
    )


log = logging.getLogger(__name__)

ROWS_AT_ONCE = 8192
"""Rows that are decoded at once. A lane holds these, not its whole row group."""

BUFFER_BYTES = 64 * 2**10
"""Bytes of each column that are read at once from a local file. At a URL this is the minimum; small row groups come whole."""

HEAVY_BYTES = 20 * 2**20
"""Maximum bytes of a row group at a URL that a lane reads as a whole: 48 lanes of a worker hold 1 GB."""

PIECES_BYTES = 4 * 2**20
"""Bytes of the pieces of all columns that a lane holds of a larger row group, in addition to its decoded rows."""

PAGE_BYTES, PAGE_ROWS = 2**20, 1024
"""Bytes after which writers end a page. They check after so many values, so large values make large pages."""

MAX_REREAD_BYTES = 32 * BLOCK_BYTES
"""Maximum stored bytes of a row group that may be read again for each block of its rows."""

NUM_METADATA = 64
"""Files whose metadata a process keeps. Several lanes read one file, and parsing takes as long as hundreds of rows."""


class _Opened(NamedTuple):
    metadata: Any
    held_bytes: int  # see `Parquet.held_bytes`


class Parquet:
    """Parquet files as a source of a stream. Rows are dictionaries by column; batches are made from columns.

    Args:
        paths: a file, a folder, a pattern such as ``"s3://bucket/day=*/*.parquet"``, or several of them.
        columns: names of the columns to read, or the name of one; None: all.
        on_error: treatment of a row group that cannot be read: ``"raise"``, or ``"skip"`` its rows and count them.
        types: Arrow's names of types by column, such as ``"float64"``, where those of the files differ or do not fit.

    Raises:
        TypeError: `paths` or `columns` is of another type.
        ValueError: `on_error` is neither, there is no such type, or no path or column is given.
        ModuleNotFoundError: pyarrow is missing.

    Example:
        >>> import tempfile
        >>> import pyarrow as pa, pyarrow.parquet as pq
        >>> from lightning_dlrover.data import stream
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     pq.write_table(pa.table({"item": [7, 9], "price": [2.5, 4.0]}), f"{folder}/part-0.parquet")
        ...     rows = stream(parquet(folder, columns=["price"]), keep_order=True)
        ...     len(rows), rows[1]
        (2, {'price': 4.0})
    """

    reads_in_threads = True

    def __init__(
        self,
        paths: str | Sequence[str],
        columns: Sequence[str] | None = None,
        on_error: str = "raise",
        types: Mapping[str, str] | None = None,
    ) -> None:
        check_extra()
        if on_error not in ("raise", "skip"):
            raise ValueError(f"on_error={on_error!r}: give 'raise' or 'skip'")
        self._paths = as_paths(paths)
        self._columns = as_columns(columns)
        self._on_error = on_error
        self._types = dict(types or {})
        self._locations: dict[str, Location] = {}
        self.block_rows = BLOCK_ROWS  # rows of a lane to keep in memory; `shards` counts them
        self._agreed = AgreedColumns()
        self._has_looked = False  # whether large row groups were logged
        self._has_seen_pages = False  # whether large pages were logged
        self._begin_in_process()

    def _begin_in_process(self) -> None:
        self._opened: OrderedDict[Shard, _Opened] = OrderedDict()  # files that were opened last
        self._lock = threading.Lock()  # held while `_opened` is changed

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_opened", "_lock")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin_in_process()

    def __repr__(self) -> str:
        return f"parquet({paths_text(self._paths)})"

    def shards(self) -> Sequence[Shard]:
        # Here, or each loader worker would import them while a step waits for its first batch.
        import pyarrow as pa
        import pyarrow.compute
        import pyarrow.parquet

        pa.array([0]).to_numpy(zero_copy_only=False)  # imports pandas where it is installed, which takes half a second
        self._locations = {each.key: each for each in located(self._paths, suffix=".parquet")}
        counts = counted(list(self._locations.values()), "parquet", _counted)
        columns = {key: counts[key].columns for key in self._locations if counts[key].rows}
        self._agreed = agreed_columns(columns, self._columns, self._types)
        num_bytes = sum(location.size for location in self._locations.values())
        self.block_rows = rows_of_block(sum(each.rows for each in counts.values()), num_bytes)
        return [Shard(key, counts[key].rows, location.version) for key, location in self._locations.items()]

    @property
    def _rows_at_once(self) -> int:
        """Rows to decode at once: no more than a lane keeps, as each lane decodes for itself."""
        return min(ROWS_AT_ONCE, self.block_rows)

    def read(self, shard: Shard, row: int) -> Iterator[Any]:
        """Yield record batches from a row on. Raises `DataError` if the file has changed or rows cannot be read."""
        for item in self._read(shard, row):
            yield item if isinstance(item, Skipped) else self._agreed.batch(item, shard.key)

    def _read(self, shard: Shard, row: int) -> Iterator[Any]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        with ExitStack() as opened:
            file = opened.enter_context(self._locations[shard.key].open(shard.version))
            try:
                # Every lane holds its file open, so local files are read in pieces: no lane holds a whole row group's bytes.
                buffer_size = 0 if self._locations[shard.key].store is not None else BUFFER_BYTES
                before = self._opened.get(shard)
                parquet_file = pq.ParquetFile(
                    file,
                    metadata=before.metadata if before is not None else None,
                    pre_buffer=not buffer_size,
                    buffer_size=buffer_size,
                )
            except (OSError, ValueError) as error:
                raise DataError(f"{shard.key} cannot be read as Parquet: {error}") from error
            metadata = parquet_file.metadata
            held = before.held_bytes if before is not None else self._bytes_of_pages(shard, metadata)
            with self._lock:
                self._opened[shard] = _Opened(metadata, held)
                self._opened.move_to_end(shard)
                if len(self._opened) > NUM_METADATA:
                    self._opened.popitem(last=False)
            if held:  # else freed pages would stay with the process
                opened.callback(pa.default_memory_pool().release_unused)
            if not buffer_size and (piece := self._bytes_of_piece(shard, metadata)):
                file.close()  # it reads ahead by more than a piece, and the next column's piece would discard the rest
                file = opened.enter_context(self._locations[shard.key].open(ahead_bytes=piece))
                parquet_file = pq.ParquetFile(file, metadata=metadata, pre_buffer=False, buffer_size=piece)
            sizes = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
            ends = np.cumsum(sizes)
            group = int(np.searchsorted(ends, row, side="right"))
            skip = row - int(ends[group] - sizes[group]) if group < len(sizes) else 0
            # A pass over several groups decodes many rows at once, but the first rows may be awaited, and may be few.
            rows_at_once = self._rows_at_once
            enough = min(int(np.searchsorted(ends, row + rows_at_once)) + 1, len(sizes))
            together = next((i for i in range(group, enough) if sizes[i] >= rows_at_once), enough)
            for number in range(group, together):
                yield from self._row_group(parquet_file, shard, number, skip, sizes[number])
                skip = 0
            if buffer_size and self._on_error == "raise":
                # One pass over many row groups takes three quarters of the time of one pass each. But from a store it would
                # fetch them all at once, and the number of skipped rows must not depend on where the pass began.
                done = 0
                for batch in self._in_one_pass(parquet_file, range(together, len(sizes))):
                    done += batch.num_rows
                    if done > skip:
                        yield _last(batch, done - skip)
                skip = max(skip, done)
            for number in range(together, len(sizes)):
                if skip < sizes[number]:
                    yield from self._row_group(parquet_file, shard, number, skip, sizes[number])
                skip = max(0, skip - sizes[number])

    def _bytes_of_piece(self, shard: Shard, metadata: Any) -> int:
        """Return the bytes of each column to request at once from a store, to bound a lane's memory; 0: whole row groups."""
        stored = [chunk.total_compressed_size for chunk in self._largest_chunks(metadata)]
        if sum(stored) <= HEAVY_BYTES:
            return 0
        piece = max(BUFFER_BYTES, PIECES_BYTES // len(stored))
        if not self._has_looked:
            self._has_looked = True
            log.warning(
                "row groups of %s have up to %.0f MB as stored, and the file is at a URL: each column is read in pieces of "
                "%.2f MB, as each lane of a process holds what it has requested. Row groups of at most %.0f MB, or fewer "
                "columns=, need fewer requests",
                *(shard.key, sum(stored) / 1e6, piece / 1e6, HEAVY_BYTES / 1e6),
            )
        return piece

    def held_bytes(self, shard: Shard) -> int:
        """Return the bytes that a reader of a shard holds between two rows, if many and better read again; else 0."""
        opened = self._opened.get(shard)
        return opened.held_bytes if opened is not None else 0

    def _bytes_of_pages(self, shard: Shard, metadata: Any) -> int:
        """Return what a reader holds in large pages, unless reading its row group again would take too long."""
        chunks = self._largest_chunks(metadata)
        of_values = [(c.total_uncompressed_size, max(1, c.num_values)) for c in chunks]
        pages = [min(size, size * PAGE_ROWS // values) for size, values in of_values]
        held = 2 * sum(page for page in pages if page > 2 * PAGE_BYTES)
        stored = sum(chunk.total_compressed_size for chunk in chunks)
        may_close = stored <= MAX_REREAD_BYTES
        if held and not self._has_seen_pages:
            self._has_seen_pages = True
            log.warning(
                "%s has rows so large that pages may have %.0f MB, and a page is decoded as a whole. %s. For smaller pages, "
                "use pyarrow's write_table(..., write_batch_size=16), or row groups with fewer rows",
                *(shard.key, held / 2e6),
                "Where the lanes of a process would hold more than 1 GB, they decode a page again for each block of rows"
                if may_close
                else f"Each lane of a process holds one: row groups of {stored / 1e6:.0f} MB are too large to be decoded again",
            )
        return held if may_close else 0

    def _largest_chunks(self, metadata: Any) -> list[Any]:
        """Return the metadata of the wanted columns in the row group with the most rows."""
        if not metadata.num_row_groups:
            return []
        groups = (metadata.row_group(number) for number in range(metadata.num_row_groups))
        largest = max(groups, key=lambda group: group.num_rows)
        columns = (largest.column(number) for number in range(largest.num_columns))
        wanted = {name.partition(".")[0] for name in self._columns} if self._columns is not None else None
        return [each for each in columns if wanted is None or each.path_in_schema.partition(".")[0] in wanted]

    def _in_one_pass(self, file: Any, numbers: Sequence[int]) -> Iterator[Any]:
        """Yield the rows of these row groups up to an error, which reading them one by one then attributes."""
        if not numbers:
            return
        try:
            yield from file.iter_batches(self._rows_at_once, row_groups=numbers, columns=self._columns, use_threads=False)
        except (OSError, ValueError) as error:
            log.debug("reading row groups %s one by one, since reading them together failed: %s", numbers, error)

    def _row_group(self, file: Any, shard: Shard, number: int, skip: int, num_rows: int) -> Iterator[Any]:
        done = 0
        try:
            for batch in file.iter_batches(self._rows_at_once, row_groups=[number], columns=self._columns, use_threads=False):
                done += batch.num_rows
                if done > skip:
                    yield _last(batch, done - skip)
        except (OSError, ValueError) as error:
            left = num_rows - max(done, skip)
            where = f"row group {number} of {shard.key} (rows from {max(done, skip)} of its {num_rows})"
            if self._on_error == "raise":
                raise DataError(
                    f"{where} cannot be read: {str(error).splitlines()[0]}. Rewrite the file, or skip such rows with "
                    "parquet(..., on_error='skip'), which counts them"
                ) from error
            yield Skipped(left, f"{where}: {str(error).splitlines()[0]}")


parquet = Parquet
"""Name of `Parquet` in scripts."""


def _last(batch: Any, num_rows: int) -> Any:
    """Return the last `num_rows` rows of a batch, or all if it has fewer."""
    return batch if num_rows >= batch.num_rows else batch.slice(batch.num_rows - num_rows)


def _counted(location: Location) -> Count:
    import pyarrow.parquet as pq

    with location.open() as file:
        try:
            found = pq.ParquetFile(file)
            columns = found.schema_arrow.remove_metadata().serialize().to_pybytes()
        except (OSError, ValueError) as error:
            raise DataError(f"{location.key} is not a Parquet file: {error}") from error
    return Count(found.metadata.num_rows, columns=columns)
