"""Rows of a stream as samples and as columns of a batch, with memory of their own."""

from __future__ import annotations

import copy
import datetime
import decimal
import logging
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from operator import is_, itemgetter
from typing import TYPE_CHECKING, Any, TypeVar, overload

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import default_collate, get_worker_info

from lightning_dlrover.data.source import DataError
from lightning_dlrover.private_names import Names, check_names

if TYPE_CHECKING:
    import pyarrow as pa

# Copy rows before they are handed out, so that a transform, a `collate_fn` or a `training_step` may change them: the process
# that reads them may have to hand them out again.

log = logging.getLogger(__name__)

FIXED: frozenset[type] = frozenset(
    [type(None), bool, int, float, complex, str, bytes, decimal.Decimal, uuid.UUID]
    + [datetime.date, datetime.datetime, datetime.time, datetime.timedelta]
    + [kind for kind in np.sctypeDict.values() if kind not in (np.object_, np.void)]
)
"""Types of immutable values. Copies share them."""


def own_copies(rows: Sequence[Any]) -> list[Any] | None:
    """Return copies that share nothing mutable with the rows; None: one of the rows cannot be copied."""
    found = []
    copies: dict[int, Any] = {}  # copies by `id` of the original: rows may hold the same object
    try:
        for row in rows:
            kind = type(row)
            if kind in FIXED:
                found.append(row)
            elif kind is dict and FIXED.issuperset(map(type, row.values())):
                found.append(row.copy())
            else:
                found.append(_copy(row, copies))
                copies.pop(id(row), None)  # a row that comes twice is two rows, as its copies may be on two workers
        return found
    except Exception as error:  # the row may hold an open file, for example
        log.debug("rows cannot be copied, so they are read again when needed again: %r", error)
        return None


def _copy(value: Any, copies: dict[int, Any]) -> Any:
    kind = type(value)
    if kind in FIXED:
        return value
    if (known := copies.get(id(value))) is not None:
        return known
    if kind is dict:
        found = copies[id(value)] = value.copy()
        for key, each in value.items():
            if type(each) not in FIXED:
                found[key] = _copy(each, copies)
        return found
    if kind is list:
        items = copies[id(value)] = value.copy()
        if not FIXED.issuperset(map(type, items)):
            items[:] = [_copy(each, copies) for each in value]
        return items
    if kind is tuple:
        return tuple(_copy(each, copies) for each in value)
    if kind is torch.Tensor and not value.requires_grad:
        tensor = copies[id(value)] = value.clone()  # `deepcopy` would copy the whole storage of a view
        return tensor
    if kind is np.ndarray and not value.dtype.hasobject:
        array = copies[id(value)] = value.copy(order="K")
        return array
    return copy.deepcopy(value, copies)


# Memory for the columns of a batch, and their way from a loader worker to the training process.
#
# A tensor in shared memory costs a file descriptor, a connection with a handshake, and a mapping: together more CPU time than
# copying a small batch through the pipe that announces it.

ALIGNMENT = 64
"""Bytes: in shared memory, the columns of each type begin at a multiple of this."""

MAX_SENT_BYTES = 512 * 2**10
"""Maximum bytes of a batch that is sent through the pipe. Above it, shared memory costs the training process less."""

INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
FLOATS = (torch.float16, torch.float32, torch.float64)

NAMES: Names = {
    "torch:UntypedStorage": ("_new_shared",),
    "torch.utils.data._utils.collate": ("default_collate_fn_map",),  # documented as the place for further types
}
"""Private names of torch that this module uses."""

Matrix = tuple[npt.NDArray[Any], list[torch.Tensor]]
"""Memory to fill, shape ``(columns, rows)``, and its columns as tensors."""

Shape = tuple[np.dtype[Any], int, int]
"""Type, number of columns, number of rows."""


def new_matrices(shapes: Sequence[Shape]) -> list[Matrix]:
    matrices = [np.empty((columns, rows), kind) for kind, columns, rows in shapes]
    return [(matrix, list(map(torch.from_numpy, matrix))) for matrix in matrices]


def new_shared_matrices(shapes: Sequence[Shape]) -> list[Matrix]:
    """Return matrices in one piece of shared memory, which costs a loader worker far less than one piece for each column."""
    sizes = [kind.itemsize * columns * rows for kind, columns, rows in shapes]
    starts = np.cumsum([0, *(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)]).tolist()
    storage = torch.UntypedStorage._new_shared(starts[-1])  # type: ignore[no-untyped-call]  # as `default_collate` does
    memory = torch.empty(0, dtype=torch.uint8).set_(storage)
    found: list[Matrix] = []
    for start, size, (kind, columns, rows) in zip(starts, sizes, shapes, strict=False):
        matrix = memory[start : start + size].view(_torch_type(kind)).view(columns, rows)
        found.append((matrix.numpy(), _columns(matrix)))
    return found


class Columns(dict[str, Any]):
    """A batch by column in a loader worker. The training process receives a plain dictionary with tensors of its own.

    The tensors of a small batch are sent in one message. Those of a larger one, and all other values, are sent as usual.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        sent: dict[tuple[torch.dtype, torch.Size], list[str]] = {}
        others: dict[str, Any] = {}
        for name, value in self.items():
            if _can_be_sent(value):
                sent.setdefault((value.dtype, value.shape), []).append(name)
            else:
                others[name] = value
        total = sum(self[name].nbytes for names in sent.values() for name in names)
        if not 0 < total <= MAX_SENT_BYTES:
            return dict, (dict(self),)
        message = bytearray()
        groups = []
        for (kind, shape), names in sorted(sent.items(), key=lambda item: -item[0][0].itemsize):  # so that each is aligned
            groups.append((kind, tuple(shape), names))
            message += b"".join(self[name].numpy().data for name in names)
        return _received, (message, groups, others, list(self))


def _can_be_sent(value: Any) -> bool:
    return (
        type(value) is torch.Tensor
        and value.device.type == "cpu"
        and value.layout is torch.strided
        and value.dtype in (*INTEGERS, *FLOATS)
        and value.numel() > 0
        and value.is_contiguous()
        and not value.requires_grad
        and not value.is_shared()  # type: ignore[no-untyped-call]
    )


def _received(
    message: bytearray,
    groups: Sequence[tuple[torch.dtype, tuple[int, ...], Sequence[str]]],
    others: Mapping[str, Any],
    order: Sequence[str],
) -> dict[str, Any]:
    found = dict(others)
    start = 0
    for kind, shape, names in groups:
        count = len(names) * int(np.prod(shape))
        matrix = torch.frombuffer(message, dtype=kind, count=count, offset=start).view(len(names), *shape)
        start += matrix.nbytes
        found.update(zip(names, _columns(matrix), strict=True))
    return {name: found[name] for name in order}


def _columns(matrix: torch.Tensor) -> list[torch.Tensor]:
    # `.data`: a change of one column in place must not count as a change of the others.
    return [column.data for column in matrix.unbind()]


@cache
def _torch_type(kind: np.dtype[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, kind)).dtype


# Rows of a batch as a sequence of dictionaries and as columns, and how a DataLoader collates them.
#
# `default_collate` takes the columns, without a Python object for each value.

LARGE_BYTES = 2**20
"""Bytes of a column in a record batch above which a part of it is copied: a slice would keep the whole column in memory."""

T = TypeVar("T")


class Row(dict[str, Any]):
    """One row: values by column.

    Example:
        >>> row = Row(item=7, price=2.5)
        >>> row["price"]
        2.5
    """


class Block:
    """Consecutive rows in memory.

    Columns of numbers without nulls are copied into one array per type, so that a batch is cut from a few arrays rather than
    from every column. They are copied batch by batch, so that each batch's memory serves the next one.

    Args:
        schema: columns of the batches.
        num_rows: maximum number of rows.

    Attributes:
        names: of all columns.
        groups: type, and names of the columns in each array.
        arrays: one for each type of number, shape ``(columns, num_rows)``.
    """

    def __init__(self, schema: pa.Schema, num_rows: int) -> None:
        self._schema = schema
        self.names = list(schema.names)
        self._num_rows = 0
        self.groups = _number_columns(schema)
        self.arrays = [np.empty((len(of_kind), num_rows), kind) for kind, of_kind in self.groups]
        self._find_places()
        self._chunks: dict[str, list[pa.Array]] = {name: [] for name in self.names if name not in self._place}
        self._others: pa.Table | None = None  # the other columns, once all rows are there

    def _find_places(self) -> None:
        self._place = {name: (i, j) for i, (_, of_kind) in enumerate(self.groups) for j, name in enumerate(of_kind)}
        self.num_numbers = len(self._place)  # columns of numbers without nulls
        number = {name: i for i, name in enumerate(self._place)}
        are_all = 1 < len(number) == len(self.names)  # `itemgetter` gives one item without a tuple
        self._in_order = itemgetter(*(number[name] for name in self.names)) if are_all else None

    def by_name(self, values: Sequence[T]) -> dict[str, T]:
        """Return values of the columns in `groups` by name; in the order of `names` if there are no other columns."""
        if self._in_order is not None:
            return dict(zip(self.names, self._in_order(values), strict=True))
        return dict(zip(self._place, values, strict=True))

    def add(self, batch: pa.RecordBatch) -> None:
        """Append the rows of a batch with the same columns."""
        import pyarrow as pa

        first, stop = self._num_rows, self._num_rows + batch.num_rows
        for name, column in zip(self.names, batch.columns, strict=True):
            if name in self._chunks:
                self._chunks[name].append(_own(column))
            elif column.null_count:
                known = self.numbers(name)
                assert known is not None
                self._chunks[name] = [pa.array(known[:first], column.type), column]
            else:
                i, j = self._place[name]
                self.arrays[i][j, first:stop] = column.to_numpy(zero_copy_only=False)
        self._num_rows = stop

    def finish(self, order: npt.NDArray[np.int64] | None = None) -> Block:
        """Bring the rows, once all are there, into an order, shape ``(num_rows,)``; None: they stay as they are."""
        import pyarrow as pa

        with_nulls = {name for name in self._chunks if name in self._place}
        kept = [[j for j, name in enumerate(names) if name not in with_nulls] for _, names in self.groups]
        for i, (js, array) in enumerate(zip(kept, self.arrays, strict=True)):
            whole = array[:, : self._num_rows] if len(js) == len(array) else array[js, : self._num_rows]
            self.arrays[i] = whole if order is None else np.take(whole, order, axis=1)
        self.arrays = [array for array in self.arrays if len(array)]
        if with_nulls:
            self.groups = tuple(
                (kind, tuple(names[j] for j in js)) for (kind, names), js in zip(self.groups, kept, strict=True) if js
            )
            self._find_places()
        fields = [field for field in self._schema if field.name in self._chunks]
        others = pa.table(
            [pa.chunked_array(self._chunks[field.name], field.type) for field in fields], schema=pa.schema(fields)
        )
        self._chunks = {}
        self._others = others if order is None or not fields else others.take(order)
        return self

    def __len__(self) -> int:
        return self._num_rows

    def table(self, first: int, stop: int) -> pa.Table:
        import pyarrow as pa

        assert self._others is not None
        others = self._others.slice(first, stop - first)
        columns = []
        for field in self._schema:
            array = self.numbers(field.name)
            columns.append(others.column(field.name) if array is None else pa.array(array[first:stop], field.type))
        return pa.table(columns, schema=self._schema)

    def lists(self, first: int, stop: int) -> dict[str, list[Any]]:
        """Return some of the rows, the values of each column as a list."""
        found = self.by_name([values for array in self.arrays for values in array[:, first:stop].tolist()])
        return self._with_others(found, lambda others: others.slice(first, stop - first).to_pydict())

    def row(self, number: int) -> Row:
        found = self.by_name([value for array in self.arrays for value in array[:, number].tolist()])
        return Row(self._with_others(found, lambda others: others.slice(number, 1).to_pylist()[0]))

    def _with_others(self, found: dict[str, Any], values_of: Callable[[pa.Table], dict[str, Any]]) -> dict[str, Any]:
        """Return values of the columns of numbers and of the others, in the order of all columns."""
        if len(found) == len(self.names):
            return found
        assert self._others is not None
        found |= values_of(self._others)
        return {name: found[name] for name in self.names}

    def numbers(self, name: str) -> npt.NDArray[Any] | None:
        """Return a column of numbers without nulls as an array, shape ``(num_rows,)``; None for any other column."""
        place = self._place.get(name)
        return None if place is None else self.arrays[place[0]][place[1]]


Groups = tuple[tuple[np.dtype[Any], tuple[str, ...]], ...]
"""Types of numbers, and the names of the columns of each."""


def _is_number(kind: pa.DataType) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))


def _is_list(kind: pa.DataType) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


@lru_cache(maxsize=64)
def _number_columns(schema: pa.Schema) -> Groups:
    """Return a table's columns of numbers: the same object each time, because blocks are compared for each batch."""
    names: dict[np.dtype[Any], list[str]] = {}
    for field in schema:
        if _is_number(field.type):
            names.setdefault(np.dtype(field.type.to_pandas_dtype()), []).append(field.name)
    return tuple((kind, tuple(of_kind)) for kind, of_kind in names.items())


class Rows(Sequence[Row]):
    """The rows of a batch: a list of dictionaries, and columns that need no dictionaries.

    Changes of a dictionary last, and the columns follow them. A column whose values no longer have one Arrow type can only be
    taken from the dictionaries, or by `default_collate`.

    Args:
        parts: blocks, with the first row of each and the row after the last.

    Example:
        >>> import pathlib, tempfile
        >>> from torch.utils.data import DataLoader
        >>> from lightning_dlrover.data import files, stream
        >>> folder = tempfile.TemporaryDirectory()
        >>> path = pathlib.Path(folder.name, "prices.csv")
        >>> _ = path.write_text("item,price\\n7,2.5\\n9,4.0\\n")
        >>> def collate(rows):  # `rows` is a `Rows`
        ...     return len(rows), rows.names, rows.tensor("price"), rows[1]["item"]
        >>> next(iter(DataLoader(stream(files(str(path)), keep_order=True), batch_size=2, collate_fn=collate)))
        (2, ['item', 'price'], tensor([2.5000, 4.0000], dtype=torch.float64), 9)
        >>> folder.cleanup()
    """

    def __init__(self, parts: Sequence[tuple[Block, int, int]]) -> None:
        self._parts = parts
        self._table: pa.Table | None = None
        self._lists: dict[str, list[Any]] | None = None
        self._peeked: tuple[Row, Row] | None = None  # the first row, and what it was
        self._made: list[Row] | None = None  # all rows

    def __len__(self) -> int:
        return sum(stop - first for _, first, stop in self._parts)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if index == 0 and self._made is None and self._parts:
            # `default_collate` looks at the first row's type only.
            block, first, stop = self._parts[0]
            if self._peeked is None and first < stop:
                row = block.row(first)
                self._peeked = row, Row(copy.deepcopy(row) if len(block.names) > block.num_numbers else row)
            if self._peeked is not None:
                return self._peeked[0]
        return self._rows[index]

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows)

    @property
    def _rows(self) -> list[Row]:
        if self._made is None:
            lists = self._columns_as_lists
            self._made = [Row(zip(lists, values, strict=True)) for values in zip(*lists.values(), strict=True)]
            if self._peeked is not None:
                self._made[0] = self._peeked[0]
        return self._made

    @property
    def _may_be_edited(self) -> bool:
        """Whether rows were handed out, and may have been changed."""
        if self._made is None and self._peeked is not None and self._peeked[0] != self._peeked[1]:
            return bool(self._rows)
        return bool(self._made)

    def values(self, name: str) -> list[Any]:
        """Return the values of a column."""
        edited = self._edited(name)
        return self._blocks_table.column(name).to_pylist() if edited is None else edited

    def _edited(self, name: str) -> list[Any] | None:
        """Return a column's values by the rows; None: they are those of the blocks. Raises `KeyError` if a row has none."""
        if not self._may_be_edited:
            return None
        values, before = [row[name] for row in self._rows], self._columns_as_lists.get(name, ())
        has_changed = len(before) != len(values) or not all(map(is_, values, before))
        return values if has_changed or not FIXED.issuperset(map(type, values)) else None

    @property
    def _columns_as_lists(self) -> dict[str, list[Any]]:
        if self._lists is None:
            self._lists = {name: [] for name in self._names_in_blocks}
            for block, first, stop in self._parts:
                for name, values in block.lists(first, stop).items():
                    self._lists[name] += values
        return self._lists

    @property
    def names(self) -> list[str]:
        """Names of the columns."""
        if self._may_be_edited:
            return list(self._rows[0])
        return self._names_in_blocks

    @property
    def _names_in_blocks(self) -> list[str]:
        return self._parts[0][0].names if self._parts else []

    @property
    def table(self) -> pa.Table:
        """All rows as one `pyarrow.Table`. Raises `DataError` if a column was changed to values without an Arrow type."""
        import pyarrow as pa

        if self._may_be_edited:
            return pa.table({name: self._column(name) for name in self.names})
        return self._blocks_table

    @property
    def _blocks_table(self) -> pa.Table:
        import pyarrow as pa

        if self._table is None:
            tables = [block.table(first, stop) for block, first, stop in self._parts]
            if len(tables) == 1:  # Arrow's memory can be written to through `to_numpy`, and blocks are read again
                self._table = tables[0].take(np.arange(len(self)))
            else:
                self._table = pa.concat_tables(tables).combine_chunks()
        return self._table

    def _column(self, name: str) -> pa.ChunkedArray:
        """Return a column as it is now, in its former type if the values still fit. Raises `DataError` as `table` does."""
        import pyarrow as pa

        values = self._edited(name)
        if values is None:
            return self._blocks_table.column(name)
        before, kinds = self._columns_as_lists.get(name), set(map(type, values))
        is_kept = before is not None and kinds <= {*map(type, before), *([int] if float in map(type, before) else [])}
        for kind in [self._blocks_table.schema.field(name).type, None] if is_kept else [None]:
            try:
                return pa.chunked_array([pa.array(values, kind)])
            except (pa.ArrowException, TypeError, ValueError, OverflowError):
                continue
        raise DataError(
            f"column {name!r} holds {', '.join(sorted(kind.__name__ for kind in kinds))} since its rows were changed, and "
            "Arrow has no type for them: take it from the rows, or let default_collate do so"
        )

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return columns of numbers by name, each of shape ``(rows,)``; none if blocks have nulls or rows were changed."""
        if not self._parts or self._may_be_edited:
            return {}
        groups, num_rows = self._parts[0][0].groups, len(self)
        if any(block.groups is not groups and block.groups != groups for block, _, _ in self._parts):
            return {}  # a column has nulls in some blocks only
        shapes = [(kind, len(names), num_rows) for kind, names in groups]
        num_bytes = sum(kind.itemsize * columns * rows for kind, columns, rows in shapes)
        is_large = get_worker_info() is not None and num_bytes > MAX_SENT_BYTES
        make = new_shared_matrices if is_large else new_matrices
        found: list[torch.Tensor] = []
        for number, (matrix, tensors) in enumerate(make(shapes)):
            done = 0
            for block, first, stop in self._parts:
                matrix[:, done : done + stop - first] = block.arrays[number][:, first:stop]
                done += stop - first
            found += tensors
        return self._parts[0][0].by_name(found)

    def tensor(self, name: str) -> torch.Tensor:
        """Return a column of numbers, shape ``(rows,)``, or of lists of one length, shape ``(rows, length)``.

        Raises:
            DataError: the column holds nulls, lists of several lengths, or no numbers.
        """
        if self._edited(name) is None:
            arrays = [block.numbers(name) for block, _, _ in self._parts]
            pieces = [a[first:stop] for a, (_, first, stop) in zip(arrays, self._parts, strict=True) if a is not None]
            if len(pieces) == len(self._parts):
                return torch.from_numpy(np.concatenate(pieces))
        column = self._column(name)
        kind = column.type
        if column.null_count:
            raise DataError(
                f"column {name!r} has {column.null_count} nulls in a batch of {len(self)} rows, and a tensor has no nulls: "
                "fill them in a transform or a collate_fn, for example with rows.table and pyarrow.compute.fill_null"
            )
        if _is_number(kind):
            return torch.from_numpy(np.array(column.to_numpy()))
        if not _is_list(kind):
            raise DataError(
                f"column {name!r} holds {kind}, which is not a number: leave it out of columns=, or use a collate_fn"
            )
        values, lengths = self.jagged(name)
        if len(lengths) and int(lengths.min()) != int(lengths.max()):
            raise DataError(
                f"the lists in column {name!r} have {int(lengths.min())} to {int(lengths.max())} values, so they do not form a "
                f"tensor: take rows.jagged({name!r}) in a collate_fn, for example for a KeyedJaggedTensor"
            )
        return values.reshape(len(lengths), -1)

    def jagged(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a column of lists as all values, shape ``(total,)``, and the length of each list, shape ``(rows,)``, int64.

        torchrec's ``KeyedJaggedTensor(keys, values, lengths)`` takes these of one or several columns, concatenated.
        A null counts as an empty list.

        Raises:
            DataError: the column holds no lists of numbers.
        """
        import pyarrow as pa
        import pyarrow.compute as pc

        column = self._column(name).combine_chunks()
        kind = column.type
        if not _is_list(kind):
            raise DataError(f"column {name!r} holds {kind}, not lists: use rows.tensor({name!r})")
        lengths = pc.fill_null(pc.list_value_length(column), 0).cast(pa.int64())
        values = column.flatten()
        if values.null_count or not (pa.types.is_integer(values.type) or pa.types.is_floating(values.type)):
            raise DataError(f"column {name!r} holds {kind} with {values.null_count} nulls in its lists, not lists of numbers")
        return torch.tensor(values.to_numpy(zero_copy_only=False)), torch.tensor(lengths.to_numpy(zero_copy_only=False))


def collate(rows: Rows) -> dict[str, Any]:
    """Return each column as a tensor, or else as `default_collate` collates it; raises `DataError` if it can be neither."""
    batch: dict[str, Any] = rows.tensors()
    if len(batch) < len(rows.names):
        batch = {name: batch[name] if name in batch else _collated(rows, name) for name in rows.names}
    return batch if get_worker_info() is None else Columns(batch)


def _collated(rows: Rows, name: str) -> Any:
    try:
        return rows.tensor(name)
    except DataError as error:
        values = rows.values(name)
        if "lists in column" in str(error) or any(value is None for value in values):
            raise
        try:
            return default_collate(values)
        except (TypeError, RuntimeError):
            raise error from None


def _collate_rows(batch: Any, *, collate_fn_map: dict[type, Callable[..., Any]] | None = None) -> Any:
    if isinstance(batch, Rows):
        return collate(batch)
    return default_collate([dict(row) for row in batch])


def prepare_default_collate() -> None:
    """Make `default_collate` take columns where a batch consists of rows. Call it in every process that collates.

    Raises `MissingNamesError` if torch has no place for further types.
    """
    check_names("torch", NAMES)
    from torch.utils.data._utils.collate import default_collate_fn_map

    registered: dict[Any, Callable[..., Any]] = default_collate_fn_map
    registered[Row] = _collate_rows


def _own(column: pa.Array) -> pa.Array:
    """Return a column that holds little more than its values in memory: a slice shares the buffers of the whole."""
    import pyarrow as pa

    whole = column.get_total_buffer_size()
    if whole <= LARGE_BYTES or column.nbytes > 0.9 * whole:
        return column
    return pa.concat_arrays([column, column[:0]])
