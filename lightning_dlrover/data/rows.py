"""Rows of a batch as a sequence of dictionaries and as columns, and how a DataLoader collates them.

`default_collate` takes the columns: it never makes a Python object for a single value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import default_collate

from lightning_dlrover.data.source import DataError
from lightning_dlrover.private_names import Names, check_names

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["Block", "Row", "Rows", "collate", "prepare_default_collate"]


NAMES: Names = {"torch.utils.data._utils.collate": ("default_collate_fn_map",)}
"""Private names of torch that streams use. torch documents this one as the place for further types."""


class Row(dict[str, Any]):
    """One row: values by column."""


class Block:
    """Consecutive rows in memory.

    Args:
        order: the rows in the order to use, shape ``(num_rows,)``; None: as they are.
    """

    def __init__(self, table: pa.Table, order: npt.NDArray[np.int64] | None = None) -> None:
        self._table = table
        self._order = order
        self._columns: dict[str, npt.NDArray[Any] | None] = {}

    def __len__(self) -> int:
        return int(self._table.num_rows)

    @property
    def names(self) -> list[str]:
        return list(self._table.column_names)

    @property
    def table(self) -> pa.Table:
        if self._order is not None:
            self._table, self._order = self._table.take(self._order), None
        return self._table

    def numbers(self, name: str) -> npt.NDArray[Any] | None:
        """Return a column of numbers without nulls as an array, shape ``(num_rows,)``; None for any other column."""
        if name not in self._columns:
            self._columns[name] = self._numbers(name)
        return self._columns[name]

    def _numbers(self, name: str) -> npt.NDArray[Any] | None:
        import pyarrow as pa

        column = self._table.column(name)
        kind = column.type
        is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
        if not is_number or column.null_count:
            return None
        array: npt.NDArray[Any] = column.to_numpy()
        return array if self._order is None else array[self._order]


class Rows(Sequence[Row]):
    """The rows of a batch. Behaves as a list of dictionaries; columns are there without making those.

    Args:
        parts: blocks, with the first row of each and the row after the last.
    """

    def __init__(self, parts: Sequence[tuple[Block, int, int]]) -> None:
        self._parts = parts
        self._table: pa.Table | None = None
        self._lists: dict[str, list[Any]] | None = None

    def __len__(self) -> int:
        return sum(stop - first for _, first, stop in self._parts)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        lists = self._columns_as_lists
        return Row({name: values[index] for name, values in lists.items()})

    def __iter__(self) -> Iterator[Row]:
        lists = self._columns_as_lists
        for values in zip(*lists.values(), strict=True):
            yield Row(zip(lists, values, strict=True))

    @property
    def _columns_as_lists(self) -> dict[str, list[Any]]:
        if self._lists is None:
            self._lists = {name: self.table.column(name).to_pylist() for name in self.table.column_names}
        return self._lists

    @property
    def names(self) -> list[str]:
        """Names of the columns."""
        return self._parts[0][0].names if self._parts else []

    @property
    def table(self) -> pa.Table:
        """All rows as one `pyarrow.Table`."""
        if self._table is None:
            import pyarrow as pa

            slices = [block.table.slice(first, stop - first) for block, first, stop in self._parts]
            self._table = pa.concat_tables(slices).combine_chunks()
        return self._table

    def tensor(self, name: str) -> torch.Tensor:
        """Return a column of numbers, shape ``(rows,)``, or of lists of one length, shape ``(rows, length)``.

        Raises:
            DataError: the column holds nulls, lists of several lengths, or no numbers.
        """
        arrays = [block.numbers(name) for block, _, _ in self._parts]
        pieces = [a[first:stop] for a, (_, first, stop) in zip(arrays, self._parts, strict=True) if a is not None]
        if len(pieces) == len(self._parts):
            return torch.from_numpy(np.concatenate(pieces))
        return self._tensor_of_lists(name)

    def jagged(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a column of lists as all values, shape ``(total,)``, and the length of each list, shape ``(rows,)``, int64.

        torchrec's ``KeyedJaggedTensor(keys, values, lengths)`` takes these of one or several columns, concatenated.
        A null counts as an empty list.

        Raises:
            DataError: the column holds no lists of numbers.
        """
        import pyarrow as pa
        import pyarrow.compute as pc

        column = self.table.column(name).combine_chunks()
        kind = column.type
        if not (pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)):
            raise DataError(f"column {name!r} holds {kind}, not lists: use rows.tensor({name!r})")
        lengths = pc.fill_null(pc.list_value_length(column), 0).cast(pa.int64())
        values = column.flatten()
        if values.null_count or not (pa.types.is_integer(values.type) or pa.types.is_floating(values.type)):
            raise DataError(f"column {name!r} holds {kind} with {values.null_count} nulls in its lists, not lists of numbers")
        return torch.tensor(values.to_numpy(zero_copy_only=False)), torch.tensor(lengths.to_numpy(zero_copy_only=False))

    def _tensor_of_lists(self, name: str) -> torch.Tensor:
        import pyarrow as pa

        column = self.table.column(name)
        kind = column.type
        if column.null_count:
            raise DataError(
                f"column {name!r} has {column.null_count} nulls in a batch of {len(self)} rows, and a tensor has no nulls: "
                "fill them in a transform or a collate_fn, for example with rows.table and pyarrow.compute.fill_null"
            )
        if not (pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)):
            raise DataError(f"column {name!r} holds {kind}, which is no number: leave it out of columns=, or use a collate_fn")
        values, lengths = self.jagged(name)
        if len(lengths) and int(lengths.min()) != int(lengths.max()):
            raise DataError(
                f"the lists in column {name!r} have {int(lengths.min())} to {int(lengths.max())} values, so they are no "
                f"tensor: take rows.jagged({name!r}) in a collate_fn, for example for a KeyedJaggedTensor"
            )
        return values.reshape(len(lengths), -1)


def collate(rows: Rows) -> dict[str, Any]:
    """Return each column as a tensor, or, where it is none, as `default_collate` has it.

    Raises:
        DataError: the column can be neither.
    """
    return {name: _collated(rows, name) for name in rows.names}


def _collated(rows: Rows, name: str) -> Any:
    try:
        return rows.tensor(name)
    except DataError as error:
        values = rows.table.column(name)
        if values.null_count or "lists in column" in str(error):
            raise
        try:
            return default_collate(values.to_pylist())
        except (TypeError, RuntimeError):
            raise error from None


def _collate_rows(batch: Any, *, collate_fn_map: dict[type, Callable[..., Any]] | None = None) -> Any:
    if isinstance(batch, Rows):
        return collate(batch)
    return default_collate([dict(row) for row in batch])


def prepare_default_collate() -> None:
    """Make `default_collate` take columns where a batch consists of rows. Call it in every process that collates.

    Raises:
        MissingNamesError: torch has no place for further types.
    """
    check_names("torch", NAMES)
    from torch.utils.data._utils.collate import default_collate_fn_map

    registered: dict[Any, Callable[..., Any]] = default_collate_fn_map
    registered[Row] = _collate_rows
