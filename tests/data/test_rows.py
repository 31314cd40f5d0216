"""Rows as dictionaries, as columns and as tensors; all show the same values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch.utils.data import default_collate

from lightning_dlrover.data import DataError, Row, Rows
from lightning_dlrover.data import rows as module
from lightning_dlrover.data.rows import NAMES, Block, collate, prepare_default_collate
from lightning_dlrover.private_names import MissingNamesError, missing_names

VALUES: dict[str, list[Any]] = {
    "i": [3, 1, 2, 5, 4],
    "f": [0.5, 1.5, 2.5, 3.5, 4.5],
    "b": [True, False, True, True, False],
    "s": ["a", "b", "c", "d", "e"],
    "l": [[1], [2, 3], [], [4], [5, 6]],
    "p": [[1.0, 2.0]] * 5,
    "n": [{"x": i} for i in range(5)],
}


def two_blocks(**columns: Any) -> Rows:
    """Return the rows 3, 1 of a block that is shuffled, and 0, 1 of one that is not."""
    table = pa.table(columns or VALUES)
    return Rows([(block_of(table, [4, 3, 1, 0, 2]), 1, 3), (block_of(table), 0, 2)])


def block_of(table: pa.Table, order: list[int] | None = None) -> Block:
    """Return the rows of a table, which come in batches of two."""
    block = Block(table.schema, table.num_rows)
    for batch in table.to_batches(2):
        block.add(batch)
    return block.finish(None if order is None else np.array(order))


ORDER = [3, 1, 0, 1]


def test_rows_are_dictionaries_in_their_order() -> None:
    rows = two_blocks()
    expected = [{name: values[i] for name, values in VALUES.items()} for i in ORDER]
    assert list(rows) == [rows[i] for i in range(4)] == rows[:] == rows.table.to_pylist() == expected
    assert len(rows) == 4
    assert type(rows[0]) is Row
    assert rows.names == list(VALUES)


@pytest.mark.parametrize("name, dtype", [("i", torch.int64), ("f", torch.float64), ("b", torch.bool)])
def test_tensor_of_a_column_of_numbers(name: str, dtype: torch.dtype) -> None:
    tensor = two_blocks().tensor(name)
    assert tensor.dtype == dtype
    assert tensor.tolist() == [VALUES[name][i] for i in ORDER]
    tensor.zero_()  # a copy, not the block's memory
    assert two_blocks().tensor(name).tolist() == [VALUES[name][i] for i in ORDER]


def test_lists_of_one_length_are_a_matrix_and_others_are_jagged() -> None:
    assert two_blocks().tensor("p").tolist() == [[1.0, 2.0]] * 4
    values, lengths = two_blocks().jagged("l")
    assert (values.tolist(), lengths.tolist()) == ([4, 2, 3, 1, 2, 3], [1, 2, 1, 2])
    values, lengths = two_blocks(l=[[1], None, [2, 3], [], [4]]).jagged("l")
    assert (values.tolist(), lengths.tolist()) == ([1], [0, 0, 1, 0])


def test_default_collate_takes_columns_and_makes_no_rows() -> None:
    prepare_default_collate()
    rows = two_blocks(i=VALUES["i"], s=VALUES["s"], n=VALUES["n"])
    batch = default_collate(rows)  # type: ignore[arg-type]
    assert batch["i"].tolist() == [5, 1, 3, 1]
    assert batch["s"] == ["d", "b", "a", "b"]
    assert batch["n"]["x"].tolist() == ORDER


def test_rows_that_a_transform_has_kept_are_collated_one_by_one() -> None:
    prepare_default_collate()
    assert default_collate([Row(a=1), Row(a=2)])["a"].tolist() == [1, 2]


@pytest.mark.parametrize(
    "column, message",
    [
        ([1, None, 2, 3, None], "column 'c' has 2 nulls in a batch of 4 rows"),
        ([[1], [1, 2], [], [1], [1]], "lists in column 'c' have 1 to 2 values"),
        ([["a"]] * 5, "not lists of numbers"),
        ([b"a", b"b", b"c", b"d", b"e"], "column 'c' holds binary, which is no number"),
    ],
)
def test_column_that_is_no_tensor_is_named(column: list[Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        two_blocks(c=column).tensor("c")


def test_column_of_dates_is_named_in_a_batch() -> None:
    with pytest.raises(DataError, match=r"column 'd' holds timestamp.*leave it out of columns="):
        collate(two_blocks(d=np.array(["2026-01-01"] * 5, dtype="datetime64[us]")))


def test_numbers_are_no_lists() -> None:
    with pytest.raises(DataError, match="column 'i' holds int64, not lists"):
        two_blocks().jagged("i")


def test_private_names_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    assert missing_names(NAMES) == []
    monkeypatch.setattr(module, "NAMES", {"torch.utils.data._utils.collate": ("no_such_map",)})
    with pytest.raises(MissingNamesError, match="no_such_map"):
        prepare_default_collate()
