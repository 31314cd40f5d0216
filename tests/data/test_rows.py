"""Rows as dictionaries, as columns and as tensors; all show the same values."""

from __future__ import annotations

import ctypes
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


def edit(rows: Any) -> dict[str, Any]:
    for row in rows:
        row["i"] = row["i"] / 100
        row["f"] += 1
        row["l"].append(7)
        row["new"] = torch.ones(2)
        del row["b"]
    rows[0]["s"] = "first"
    batch: dict[str, Any] = default_collate(rows)
    return batch


def test_rows_that_were_changed_are_collated_as_those_of_a_list() -> None:
    prepare_default_collate()
    table = pa.table({**VALUES, "f": pa.array(VALUES["f"], pa.float32()), "l": [[1]] * 5})
    rows = Rows([(block_of(table), 0, 5)])
    batch = edit(rows)
    of_list = edit(table.to_pylist())
    assert list(batch) == list(of_list) == ["i", "f", "s", "l", "p", "n", "new"]
    assert (batch["i"].dtype, batch["f"].dtype) == (
        torch.float64,
        torch.float32,
    )
    assert batch["l"].tolist() == torch.stack(of_list["l"], 1).tolist() == [[1, 7]] * 5  # a matrix, as of rows unchanged
    assert batch["s"] == of_list["s"] == ["first", "b", "c", "d", "e"]
    for name in ("i", "f", "new"):
        assert batch[name].tolist() == of_list[name].tolist()
    assert rows.tensor("i").tolist() == [value / 100 for value in VALUES["i"]]
    assert rows.jagged("l")[0].tolist() == [1, 7] * 5
    with pytest.raises(DataError, match="column 'new' holds Tensor since its rows were changed"):
        _ = rows.table


def test_change_of_the_first_row_alone_is_seen() -> None:
    for name, value in (("i", 9), ("l", [8])):
        rows = two_blocks(i=VALUES["i"], l=[[1]] * 5)
        rows[0][name] = value
        assert rows.table.to_pylist() == list(rows)
        assert rows[0][name] == value
    rows = two_blocks(l=[[1]] * 5)
    rows[0]["l"][0] = 8
    assert collate(rows)["l"].tolist() == [[8], [1], [1], [1]]


def test_nulls_are_filled_in_place() -> None:
    rows = two_blocks(c=[1, None, 2, 3, None])
    for row in rows:
        row["c"] = row["c"] or 0
    assert rows.tensor("c").tolist() == [3, 0, 1, 0]
    assert rows.tensor("c").dtype == torch.int64


def test_batch_without_nulls_from_a_block_with_nulls_is_a_tensor() -> None:
    block = block_of(pa.table({"c": [1, 2, None], "b": [True, False, None]}))
    assert {name: tensor.tolist() for name, tensor in collate(Rows([(block, 0, 2)])).items()} == {
        "c": [1, 2],
        "b": [True, False],
    }


@pytest.mark.parametrize("values", [[1, 2, 3], [1, None, 3]])
def test_table_shares_no_memory_with_the_block(values: list[Any]) -> None:
    block = block_of(pa.table({"c": values, "l": [[1]] * 3}))
    for name in ("c", "l"):
        column = Rows([(block, 0, 3)]).table.column(name).chunk(0)
        numbers = column.values if name == "l" else column
        ctypes.memset(numbers.buffers()[1].address, 0, 8)  # as `torch.from_numpy(column.to_numpy())` allows
    assert Rows([(block, 0, 3)]).table.to_pydict() == {"c": values, "l": [[1]] * 3}


@pytest.mark.parametrize(
    "column, message",
    [
        ([1, None, 2, 3, None], "column 'c' has 2 nulls in a batch of 4 rows"),
        ([[1], [1, 2], [], [1], [1]], "lists in column 'c' have 1 to 2 values"),
        ([["a"]] * 5, "not lists of numbers"),
        ([b"a", b"b", b"c", b"d", b"e"], "column 'c' holds binary, which is not a number"),
    ],
)
def test_column_that_cannot_be_a_tensor_is_named(column: list[Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        two_blocks(c=column).tensor("c")


def test_column_of_dates_is_named_in_a_batch() -> None:
    with pytest.raises(DataError, match=r"column 'd' holds timestamp.*leave it out of columns="):
        collate(two_blocks(d=np.array(["2026-01-01"] * 5, dtype="datetime64[us]")))


def test_numbers_are_not_lists() -> None:
    with pytest.raises(DataError, match="column 'i' holds int64, not lists"):
        two_blocks().jagged("i")


def test_private_names_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    assert missing_names(NAMES) == []
    monkeypatch.setattr(module, "NAMES", {"torch.utils.data._utils.collate": ("no_such_map",)})
    with pytest.raises(MissingNamesError, match="no_such_map"):
        prepare_default_collate()
