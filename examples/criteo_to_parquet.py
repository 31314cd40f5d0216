"""Convert click logs in Criteo's format to a folder of Parquet files, which `train_dlrm.py --data FOLDER` reads as streams.

    python examples/criteo_to_parquet.py day_0.gz day_1.gz FOLDER       files in the order of time, compressed by gzip or not
    python examples/criteo_to_parquet.py --generate 1000000 FOLDER      rows with clicks of a known model

A first pass counts the rows, a second one converts them, so files may be larger than memory. As for a TSV that is loaded whole,
the newest tenth of the rows goes to FOLDER/test, the tenth before it to FOLDER/val, the others to FOLDER/train, in their order.
Numbers become signed logarithms. A category becomes one of `--ids` ids by its value's remainder, so no vocabulary is needed.
FOLDER/clicks.json holds all that depends on the whole of the rows. The folder appears when it is complete.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import os
import shutil
import sys
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NoReturn

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from ctr_auc import Floats
from ctr_data import CRITEO_LABELS, MAX_IDS, UNSEEN, ClickRows, DataError, Ids, load, signed_log, split_in_order
from ctr_options import at_least
from ctr_parquet import CATEGORIES, LABEL, NUMBERS, SETS, Description
from pyarrow import csv
from tqdm.auto import tqdm

CHUNK_BYTES = 8 * 2**20
"""Bytes of text that are converted at once."""

MAX_LINE_BYTES = 2**20
"""Maximum length of a line. A longer one is not a row of a click log."""

MIN_ROWS = 100
"""Fewer rows cannot be split into training, validation and test rows."""

HEX_DIGITS = 16
"""Maximum number of digits of a category."""

COLUMNS = (LABEL, *NUMBERS, *CATEGORIES)

SCHEMA = pa.schema(
    [(LABEL, pa.int8()), *((name, pa.float32()) for name in NUMBERS), *((name, pa.int32()) for name in CATEGORIES)]
)


@dataclass(frozen=True)
class Layout:
    """How rows are laid over files."""

    rows_per_file: int = 1_000_000
    row_group_rows: int = 32_768  # a reader decodes a group from its beginning


@dataclass(frozen=True)
class Lines:
    """Whole lines of a file."""

    text: bytes
    first_line: int

    @property
    def num_rows(self) -> int:
        """Number of lines that are not empty."""
        return _num_rows(self.text)


def main() -> int:
    options = parse_options()
    layout = Layout(options.rows_per_file, options.row_group_rows)
    try:
        if options.generate is not None:
            described = write_generated(options.generate, options.seed, options.output, layout)
        else:
            described = convert(options.inputs, options.output, layout, options.ids)
    except DataError as error:
        print(f"criteo_to_parquet: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(
            f"criteo_to_parquet: {options.output} cannot be written ({error}); check its disk or give another", file=sys.stderr
        )
        return 2
    train, val, test = described.rows
    print(f"{options.output}: {train:,} rows to train, {val:,} to validate, the newest {test:,} to test")
    print(f"train with: python examples/train_dlrm.py --data {options.output}")
    return 0


def convert(inputs: list[Path], output: Path, layout: Layout, num_ids: int = MAX_IDS) -> Description:
    """Convert TSV files, the oldest first.

    Args:
        num_ids: ids per category, including one for missing values.

    Raises:
        DataError: a file or a row of it cannot be used, or the output folder is in use.
        OSError: the output cannot be written.
    """
    with _new_folder(output) as folder:
        num_rows = _counted(inputs)
        moments = _Moments(len(NUMBERS))
        writers = [_Writer(folder / name, layout) for name in SETS]
        position = 0
        with tqdm(desc="converting", total=num_rows, unit=" rows", disable=None, leave=False) as progress:
            for path, chunk in _all_lines(inputs):
                table = _converted(path, chunk, num_ids)
                for name, writer, part in zip(SETS, writers, split_in_order(num_rows), strict=True):
                    first, stop = (min(max(place - position, 0), table.num_rows) for place in (part.start, part.stop))
                    rows = table.slice(first, stop - first)
                    writer.add(rows)
                    if name == "train":
                        moments.add(np.stack([rows.column(number).to_numpy() for number in NUMBERS], axis=1))
                position += table.num_rows
                progress.update(table.num_rows)
        if position != num_rows:
            raise DataError(
                f"{', '.join(map(str, inputs))}: {num_rows:,} rows were counted and {position:,} read: a file changed in "
                "between; convert again when it is complete"
            )
        for writer in writers:
            writer.close()
        described = Description(
            source=", ".join(path.name for path in inputs),
            rows=(writers[0].num_rows, writers[1].num_rows, writers[2].num_rows),
            means=tuple(moments.means.tolist()),
            deviations=tuple(moments.deviations.tolist()),
            cardinalities=(num_ids,) * len(CATEGORIES),
        )
        described.write(folder)
    return described


def write_generated(num_rows: int, seed: int, output: Path, layout: Layout) -> Description:
    """Write the rows that `train_dlrm.py` generates without `--data`. Their numbers are standard normal already.

    Raises:
        DataError: the rows are too few, or the output folder is in use.
        OSError: the output cannot be written.
    """
    made = load(None, seed, num_rows)
    with _new_folder(output) as folder:
        for name, rows in zip(SETS, (made.train, made.val, made.test), strict=True):
            writer = _Writer(folder / name, layout)
            for first in range(0, len(rows), layout.row_group_rows):
                writer.add(_table_of(rows, slice(first, first + layout.row_group_rows)))
            writer.close()
        described = Description(
            source=f"generated, seed {seed}",
            rows=(len(made.train), len(made.val), len(made.test)),
            means=(0.0,) * len(NUMBERS),
            deviations=(1.0,) * len(NUMBERS),
            cardinalities=made.cardinalities,
            best_auc=made.best_auc,
        )
        described.write(folder)
    return described


def _counted(inputs: list[Path]) -> int:
    num_rows = 0
    with tqdm(desc="counting", unit=" rows", disable=None, leave=False) as progress:
        for _, chunk in _all_lines(inputs):
            num_rows += chunk.num_rows
            progress.update(chunk.num_rows)
    if num_rows < MIN_ROWS:
        raise DataError(
            f"{', '.join(map(str, inputs))}: {num_rows} rows are too few to split into training, validation and test rows: "
            f"give {MIN_ROWS} or more"
        )
    return num_rows


# --- from text to columns -----------------------------------------------------------------------------------------------------


class _Unusable(ValueError):
    """Lines that are not rows. The message also fits a single line."""


def _converted(path: Path, lines: Lines, num_ids: int) -> pa.Table:
    try:
        return _table(lines.text, num_ids)
    except _Unusable:
        _reject(path, lines, num_ids)


def _reject(path: Path, lines: Lines, num_ids: int) -> NoReturn:
    """Name the first line that cannot be used. It is found by halving."""
    rows = lines.text.split(b"\n")
    begin, end = 0, len(rows)
    while end - begin > 1:
        middle = (begin + end) // 2
        if _fault(b"\n".join(rows[begin:middle]), num_ids):
            end = middle
        else:
            begin = middle
    raise DataError(
        f"{path}, line {lines.first_line + begin}: {_fault(rows[begin], num_ids)}; correct or delete the line and convert "
        "again. Nothing was written"
    )


def _fault(text: bytes, num_ids: int) -> str:
    try:
        _table(text, num_ids)
    except _Unusable as error:
        return str(error)
    return ""


def _table(text: bytes, num_ids: int) -> pa.Table:
    """Return lines as columns.

    Raises:
        _Unusable: a line is not a row.
    """
    num_rows = _num_rows(text)
    if not num_rows:
        return SCHEMA.empty_table()
    try:
        found = csv.read_csv(
            pa.BufferReader(text),
            csv.ReadOptions(column_names=COLUMNS, block_size=len(text) + 1),
            csv.ParseOptions(delimiter="\t", quote_char=False, ignore_empty_lines=True),
            csv.ConvertOptions(column_types={name: pa.string() for name in COLUMNS}, strings_can_be_null=False),
        ).combine_chunks()
    except pa.ArrowInvalid as error:
        raise _Unusable(_shape(text)) from error
    if found.num_rows != num_rows:
        raise _Unusable("a carriage return within the line")
    columns = {name: column.chunk(0) for name, column in zip(found.column_names, found.columns, strict=True)}
    labels = columns[LABEL]
    if not pc.all(pc.is_in(labels, pa.array(list(CRITEO_LABELS)))).as_py():
        raise _Unusable(f"the label is {labels[0].as_py():.60}, expected {' or '.join(map(repr, CRITEO_LABELS))}")
    return pa.Table.from_arrays(
        [
            pc.cast(labels, pa.int8()),
            *(pa.array(signed_log(_numbers(name, columns[name])), pa.float32()) for name in NUMBERS),
            *(pa.array(_ids(name, columns[name], num_ids), pa.int32()) for name in CATEGORIES),
        ],
        schema=SCHEMA,
    )


def _shape(text: bytes) -> str:
    line = text.rstrip(b"\r\n")
    fields = line.split(b"\t")
    if len(fields) == len(COLUMNS):
        return "a carriage return within the line" if b"\r" in line else "not text in UTF-8"
    return f"{len(fields)} columns, expected {len(COLUMNS)} separated by tabs, in {text[:60].decode(errors='replace')!r}"


def _numbers(name: str, column: pa.Array) -> Floats:
    """Return numbers, NaN where they are missing, shape ``(rows,)``."""
    missing = pc.equal(column, "")
    try:
        known = pc.cast(pc.if_else(missing, pa.scalar(None, pa.string()), column), pa.float64())
    except pa.ArrowInvalid as error:
        raise _Unusable(f"column {name!r} is {column[0].as_py()[:60]!r}, expected a number") from error
    values: Floats = known.to_numpy(zero_copy_only=False)
    if not (np.isfinite(values) | missing.to_numpy(zero_copy_only=False)).all():
        raise _Unusable(f"column {name!r} is {column[0].as_py()[:60]!r}, expected a number")
    return values


def _ids(name: str, column: pa.Array, num_ids: int) -> Ids:
    """Return ids of hexadecimal values, shape ``(rows,)``. Criteo's values are hashes, so the remainder spreads them evenly."""
    padded = pc.utf8_lpad(column, HEX_DIGITS, "0")
    _, offsets, characters = padded.buffers()
    ends = np.frombuffer(offsets, dtype=np.int32, count=len(column) + 1)
    digits = _DIGITS[np.frombuffer(characters, dtype=np.uint8, count=int(ends[-1]))]
    # Only a value that is too long has more than 16 characters now, and only one outside of ASCII more bytes than characters.
    if (np.diff(ends) != HEX_DIGITS).any() or (digits == _NO_DIGIT).any():
        raise _Unusable(f"column {name!r} is {column[0].as_py()[:60]!r}, expected hexadecimal digits or nothing")
    values = np.zeros(len(column), dtype=np.uint64)
    for digit in digits.reshape(-1, HEX_DIGITS).T:
        values = (values << np.uint64(4)) | digit
    missing = pc.equal(column, "").to_numpy(zero_copy_only=False)
    return np.where(missing, UNSEEN, 1 + (values % np.uint64(num_ids - 1)).astype(np.int64))


_NO_DIGIT = 255
_DIGITS: npt.NDArray[np.uint8] = np.full(256, _NO_DIGIT, dtype=np.uint8)
for _characters in ("0123456789abcdef", "0123456789ABCDEF"):
    _DIGITS[[ord(character) for character in _characters]] = np.arange(16)


def _table_of(rows: ClickRows, part: slice) -> pa.Table:
    arrays = [rows.labels[part], *rows.numbers[part].unbind(dim=1), *rows.categories[part].unbind(dim=1)]
    return pa.Table.from_arrays(
        [pa.array(values.numpy(), kind, safe=False) for values, kind in zip(arrays, SCHEMA.types, strict=True)], schema=SCHEMA
    )


class _Moments:
    """Means and deviations of columns that arrive in parts. NaN is ignored."""

    def __init__(self, num_columns: int) -> None:
        self._counts = np.zeros(num_columns)
        self.means = np.zeros(num_columns)
        self._squares = np.zeros(num_columns)  # sums of squared distances from the means

    def add(self, values: npt.NDArray[Any]) -> None:
        """Add rows, shape ``(rows, columns)`` (Chan, Golub and LeVeque, The American Statistician 37(3), 1983)."""
        known = ~np.isnan(values)
        counts = known.sum(axis=0)
        means = np.where(known, values, 0.0).sum(axis=0, dtype=np.float64) / np.maximum(counts, 1)
        squares = (np.where(known, values - means, 0.0) ** 2).sum(axis=0)
        distance, all_counts = means - self.means, self._counts + counts
        share = counts / np.maximum(all_counts, 1)
        self._squares += squares + distance**2 * self._counts * share
        self.means += distance * share
        self._counts = all_counts

    @property
    def deviations(self) -> Floats:
        deviations = np.sqrt(self._squares / np.maximum(self._counts, 1))
        # A constant column has a deviation of rounding errors.
        return np.where(deviations > 1e-6, deviations, 1.0)


# --- files --------------------------------------------------------------------------------------------------------------------


def _all_lines(paths: Iterable[Path]) -> Iterator[tuple[Path, Lines]]:
    for path in paths:
        for lines in _lines(path):
            yield path, lines


def _lines(path: Path) -> Iterator[Lines]:
    """Yield the lines of a file, many at once.

    Raises:
        DataError: the file cannot be read, or is not text.
    """
    first_line, rest = 1, b""
    try:
        with _opened(path) as file:
            while data := file.read(CHUNK_BYTES):
                end = data.rfind(b"\n") + 1
                text, rest = (rest + data[:end], data[end:]) if end else (b"", rest + data)
                if text:
                    yield Lines(text, first_line)
                    first_line += text.count(b"\n")
                if len(rest) > MAX_LINE_BYTES:
                    raise DataError(
                        f"{path}, line {first_line} is longer than {MAX_LINE_BYTES} bytes; decompress or export the file as "
                        "text first"
                    )
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(
            f"{path}: cannot be read after line {first_line - 1} ({error}); download it again, or check its path"
        ) from error
    if rest:
        yield Lines(rest, first_line)


def _opened(path: Path) -> IO[bytes]:
    with path.open("rb") as file:
        is_gzip = file.read(2) == b"\x1f\x8b"
    if is_gzip:
        return gzip.open(path)  # type: ignore[return-value]
    return path.open("rb")


def _num_rows(text: bytes) -> int:
    """Return the number of lines that are not empty."""
    characters = np.frombuffer(text, dtype=np.uint8)
    ends = np.flatnonzero(characters == ord("\n"))
    if not text.endswith(b"\n"):
        ends = np.append(ends, len(characters))
    lengths = np.diff(ends, prepend=-1) - 1
    is_return = characters[np.maximum(ends - 1, 0)] == ord("\r") if len(characters) else False
    return int((lengths > is_return).sum())


class _Writer:
    """Writes rows to the files of one folder."""

    def __init__(self, folder: Path, layout: Layout) -> None:
        folder.mkdir()
        self._folder = folder
        self._layout = layout
        self._pending: list[pa.Table] = []
        self._num_pending = 0
        self._file: pq.ParquetWriter | None = None
        self._num_files = 0
        self._rows_in_file = 0
        self.num_rows = 0

    def add(self, table: pa.Table) -> None:
        while table.num_rows:
            room = min(self._layout.row_group_rows, self._layout.rows_per_file - self._rows_in_file) - self._num_pending
            part, table = table.slice(0, room), table.slice(room)
            self._pending.append(part)
            self._num_pending += part.num_rows
            if part.num_rows == room:
                self._write_group()

    def close(self) -> None:
        self._write_group()
        self._close_file()

    def _write_group(self) -> None:
        if not self._num_pending:
            return
        if self._file is None:
            self._file = pq.ParquetWriter(self._folder / f"part-{self._num_files:05}.parquet", SCHEMA)
            self._num_files += 1
        self._file.write_table(pa.concat_tables(self._pending), row_group_size=self._layout.row_group_rows)
        self._rows_in_file += self._num_pending
        self.num_rows += self._num_pending
        self._pending, self._num_pending = [], 0
        if self._rows_in_file == self._layout.rows_per_file:
            self._close_file()

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file, self._rows_in_file = None, 0


@contextlib.contextmanager
def _new_folder(output: Path) -> Iterator[Path]:
    """Yield a folder that is renamed to its final name once it is complete. If writing fails, it is removed.

    Raises:
        DataError: there is something at that path already.
        OSError: the folder cannot be written.
    """
    if output.exists() and not output.is_dir():
        raise DataError(f"{output} is a file; give a new folder as the last argument")
    if output.is_dir() and any(output.iterdir()):
        raise DataError(f"{output} is not empty, and nothing in it was changed; remove it or give another folder")
    output = output.resolve()
    folder = output.with_name(f".{output.name}.{os.getpid()}.partial")
    folder.mkdir(parents=True)
    try:
        yield folder
        os.replace(folder, output)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# --- options ------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Options:
    inputs: list[Path]
    output: Path
    generate: int | None
    seed: int
    ids: int
    rows_per_file: int
    row_group_rows: int


def parse_options() -> Options:
    parser = argparse.ArgumentParser(description="Convert click logs in Criteo's format to a folder of Parquet files.")
    parser.add_argument("inputs", metavar="INPUT.tsv[.gz]", nargs="*", type=Path, help="TSV files, the oldest rows first")
    parser.add_argument("output", metavar="OUTPUT_FOLDER", type=Path, help="folder to write, new or empty")
    parser.add_argument("--generate", metavar="ROWS", type=at_least(MIN_ROWS), help="write generated rows, without an input")
    parser.add_argument("--seed", type=int, default=1, help="seed of generated rows (default: %(default)s)")
    parser.add_argument(
        "--ids", type=at_least(2), default=MAX_IDS, help="ids per category, ignored with --generate (default: %(default)s)"
    )
    parser.add_argument("--rows-per-file", type=at_least(1), default=Layout.rows_per_file, help="(default: %(default)s)")
    parser.add_argument(
        "--row-group-rows",
        type=at_least(1),
        default=Layout.row_group_rows,
        help="rows that are compressed together; fewer make reading from the middle cheaper (default: %(default)s)",
    )
    given = parser.parse_args()
    if given.generate is None and not given.inputs:
        parser.error("give one or more TSV files before the output folder, or --generate ROWS")
    if given.generate is not None and given.inputs:
        parser.error(f"--generate takes no input, and {given.inputs[0]} is one: leave one of them out")
    return Options(**vars(given))


if __name__ == "__main__":
    sys.exit(main())
