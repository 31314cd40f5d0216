"""Columns of Parquet files are compared before a row is read: widened, or refused with file and column."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_dlrover.data import DataError, Source, parquet, stream
from lightning_dlrover.data.file_source import cache_file

NUM_ROWS = 10


def write(folder: Path, *tables: dict[str, Any]) -> str:
    """Write files a, b, and so on."""
    (folder / "data").mkdir(exist_ok=True)
    for letter, columns in zip("abcde", tables, strict=False):
        pq.write_table(pa.table(columns), folder / "data" / f"{letter}.parquet", row_group_size=4)
    return str(folder / "data")


def numbers(kind: Any, first: int = 0) -> Any:
    return pa.array(range(first, first + NUM_ROWS)).cast(kind)


def batches(source: Source, **options: Any) -> list[Any]:
    return list(DataLoader(stream(source, keep_order=True), batch_size=7, **options))


@pytest.mark.parametrize(
    "kinds, widest",
    [
        ([pa.int64(), pa.float64()], torch.float64),
        ([pa.float64(), pa.int64(), pa.int32()], torch.float64),
        ([pa.int32(), pa.int64()], torch.int64),
        ([pa.float32(), pa.float64()], torch.float64),
        ([pa.int8(), pa.uint8(), pa.float32()], torch.float32),
    ],
)
@pytest.mark.parametrize("num_workers", [0, 1])
def test_column_of_several_types_of_numbers_has_the_widest_one_in_all_batches(
    tmp_path: Path, kinds: list[Any], widest: Any, num_workers: int
) -> None:
    tables = [{"row": numbers(pa.int64(), i * NUM_ROWS), "x": numbers(kind)} for i, kind in enumerate(kinds)]
    found = batches(parquet(write(tmp_path, *tables)), num_workers=num_workers)
    assert {batch["x"].dtype for batch in found} == {widest}
    rows = torch.cat([batch["row"] for batch in found])
    assert rows.tolist() == list(range(NUM_ROWS * len(kinds)))
    assert torch.cat([batch["x"] for batch in found]).tolist() == (rows % NUM_ROWS).tolist()


def test_strings_and_lists_are_widened_and_equal_types_are_left_alone(tmp_path: Path) -> None:
    one = {
        "s": pa.array(["a", "b"]),
        "l": pa.array([[], []], pa.list_(pa.null())),
        "d": pa.array([[1], [2]], pa.list_(pa.int32())),
    }
    other = {"s": pa.array(["c"], pa.large_string()), "l": pa.array([[1]]), "d": pa.array([[0.5]])}
    source = parquet(write(tmp_path, one, other, other))
    read = [pa.Table.from_batches(source.read(shard, 0)) for shard in source.shards()]
    assert read[0].schema.types == read[1].schema.types == [pa.large_string(), pa.list_(pa.int64()), pa.list_(pa.float64())]
    assert read[0].to_pylist() == [{"s": "a", "l": [], "d": [1.0]}, {"s": "b", "l": [], "d": [2.0]}]


@pytest.mark.parametrize("columns", [None, ["b", "a"]])
def test_columns_come_in_one_order_from_files_of_any_order(tmp_path: Path, columns: list[str] | None) -> None:
    one, two = (
        {"a": numbers(pa.int64()), "b": numbers(pa.int64(), 50)},
        {"b": numbers(pa.int64(), 50), "a": numbers(pa.int64())},
    )
    for batch in batches(parquet(write(tmp_path, one, two), columns)):
        assert list(batch) == (columns or ["a", "b"])
        assert (batch["b"] - batch["a"]).tolist() == [50] * len(batch["a"])


@pytest.mark.parametrize(
    "first, second, columns, message",
    [
        ({"a": [1]}, {"b": [1]}, None, r"b.parquet has no column 'a', and .*a.parquet has one.*columns=\[...\]"),
        ({"a": [1]}, {"a": [1], "b": [1]}, None, r"a.parquet has no column 'b', and .*b.parquet has one"),
        ({"a": [1], "b": [1]}, {"a": [1]}, ["b"], r"b.parquet has no column 'b', and .*a.parquet has one"),
        ({"a": [1]}, {"a": [1]}, ["c"], "a.parquet has no column c, only a"),
        ({"a": [1]}, {"a": ["x"]}, None, r"a.parquet: column 'a' is int64, and in .*b.parquet it is string"),
        ({"a": [True]}, {"a": [1]}, None, r"a.parquet: column 'a' is bool, and in .*b.parquet it is int64"),
        (
            {"a": [1]},
            {"a": [None]},
            None,
            r"b.parquet: column 'a' has no values.*and in .*a.parquet it is int64.*types={'a': 'int64'}",
        ),
        ({"a": [None]}, {"a": [0.5]}, None, r"a.parquet: column 'a' has no values.*and in .*b.parquet it is double"),
        (
            {"a": [{"x": 1}]},
            {"a": [{"x": 1, "y": 2}]},
            None,
            r"column 'a' is struct<x: int64>, and in .*b.parquet it is struct",
        ),
        ({"a": [{"x": 1}]}, {"a": [{"x": 0.5}]}, ["a.x"], r"column 'a' is struct<x: int64>, and in .*b.parquet it is struct"),
    ],
)
def test_files_that_do_not_fit_are_named_at_the_start(
    tmp_path: Path, first: dict[str, Any], second: dict[str, Any], columns: list[str] | None, message: str
) -> None:
    folder = write(tmp_path, first, second)
    for _ in range(2):  # the second time by what is remembered
        with pytest.raises(DataError, match=message):
            len(stream(parquet(folder, columns)))


def test_files_without_rows_and_columns_that_are_not_read_may_differ(tmp_path: Path) -> None:
    folder = write(tmp_path, {"a": [1, 2], "b": [1, 2]}, {"a": pa.array([], pa.string())}, {"a": [3], "b": ["x"], "c": [1]})
    (batch,) = batches(parquet(folder, ["a"]))
    assert batch["a"].tolist() == [1, 2, 3]


def test_fields_of_structs_are_read_from_all_files(tmp_path: Path) -> None:
    folder = write(tmp_path, {"at": [{"x": 1, "y": 2}], "a": [1]}, {"a": [0.5], "at": [{"x": 3, "y": 4}]})
    (batch,) = batches(parquet(folder, ["at.y", "a"]))
    assert batch["at"]["y"].tolist() == [2, 4]
    assert batch["a"].tolist() == [1.0, 0.5]


def fill(rows: Any) -> list[float]:
    return [row["a"] or 0.0 for row in rows]


def test_given_type_makes_files_fit(tmp_path: Path) -> None:
    folder = write(tmp_path, {"a": [1, 2]}, {"a": [None, None]}, {"a": [0.5, 1.5]})
    (filled,) = batches(parquet(folder, types={"a": "float64"}), collate_fn=fill)
    assert filled == [1.0, 2.0, 0.0, 0.0, 0.5, 1.5]
    with pytest.raises(DataError, match=r"c.parquet: column 'a' is double and cannot be read as int64"):
        batches(parquet(folder, types={"a": "int64"}), collate_fn=fill)
    with pytest.raises(DataError, match="has no column z to read, only a"):
        len(stream(parquet(folder, types={"z": "int64"})))
    with pytest.raises(ValueError, match="nonsense"):
        len(stream(parquet(folder, types={"a": "nonsense"})))


def test_number_that_the_wider_type_lacks_is_named(tmp_path: Path) -> None:
    source = parquet(write(tmp_path, {"a": [2**60 + 1]}, {"a": [0.5]}))
    with pytest.raises(DataError, match=r"a.parquet: column 'a' is int64 and cannot be read as double"):
        batches(source)


def test_columns_of_many_files_are_remembered_once(tmp_path: Path) -> None:
    folder = write(tmp_path, *[{"a": [1], "b": ["x"]}] * 5)
    assert [shard.rows for _ in range(2) for shard in parquet(folder).shards()] == [1] * 10
    assert Path(cache_file()).read_bytes().count(pq.read_schema(folder + "/a.parquet").serialize().to_pybytes()) == 1
