"""Rows of files: the same from every row on, whatever the format, the compression and the end of the file."""

from __future__ import annotations

import gzip
import io
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from torch.utils.data import DataLoader

from lightning_dlrover.data import DataError, Source, file_source, files, parquet, parquet_source, stream
from lightning_dlrover.data.dataset import Positions
from lightning_dlrover.data.file_source import cache_file
from tests.support.spoiled_files import spoil_row_group


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make boundaries of chunks and marks frequent."""
    monkeypatch.setattr(file_source, "CHUNK_BYTES", 64)
    monkeypatch.setattr(file_source, "LINES_PER_MARK", 5)
    monkeypatch.setattr(file_source, "SAMPLES_PER_MARK", 3)


def as_rows(items: Any) -> list[Any]:
    found: list[Any] = []
    for item in items:
        found.extend(item.to_pylist() if isinstance(item, pa.RecordBatch) else [item])
    return found


def assert_readable_from_every_row(source: Source, expected: list[Any]) -> None:
    (shard,) = source.shards()
    assert shard.rows == len(expected)
    for row in range(len(expected)):
        assert as_rows(source.read(shard, row)) == expected[row:]


def write(path: Path, text: str) -> None:
    data = text.encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


TABLE = [{"id": number, "x": number / 4, "name": f"n{number}"} for number in range(23)]
TSV = "".join(f"{row['id']}\t{row['x']}\t{row['name']}\n" for row in TABLE)


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
@pytest.mark.parametrize("end", ["", "\n"])
def test_lines_are_read_from_every_row(tmp_path: Path, name: str, end: str) -> None:
    lines = [f"line {'x' * (number % 40)} {number}" for number in range(31)]
    lines[7] = ""
    write(tmp_path / name, "\n".join(lines) + end)
    assert_readable_from_every_row(files(str(tmp_path / name)), lines)


@pytest.mark.parametrize("name", ["a.tsv", "a.tsv.gz"])
@pytest.mark.parametrize("header", [True, False])
@pytest.mark.parametrize("end", ["", "\n"])
def test_columns_are_read_from_every_row(tmp_path: Path, name: str, header: bool, end: str) -> None:
    write(tmp_path / name, ("id\tx\tname\n" if header else "") + TSV.rstrip("\n") + end)
    source = files(str(tmp_path / name), header=header, columns=None if header else ["id", "x", "name"])
    assert_readable_from_every_row(source, TABLE)


def test_some_columns_of_a_csv_file_are_read(tmp_path: Path) -> None:
    write(tmp_path / "a.csv", "id,x,name\n1,2.5,a\n2,3.5,b\n")
    assert_readable_from_every_row(files(str(tmp_path / "a.csv"), columns=["x"]), [{"x": 2.5}, {"x": 3.5}])


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("columns", [None, ["y", "x"]])
def test_columns_of_each_csv_file_go_by_their_names(tmp_path: Path, suffix: str, columns: list[str] | None) -> None:
    headers = ["x,y,name", "name,y,x", '"y",name,x', "\ufeffx,y,name\r"]
    for number, header in enumerate(headers):
        names = header.strip("\ufeff\r").replace('"', "").split(",")
        values = {"x": f"{number}", "y": "0.5", "name": "a"}
        write(tmp_path / f"{number}.csv{suffix}", header + "\n" + (",".join(values[name] for name in names) + "\n") * 20)
    source = files(str(tmp_path / "*.csv*"), columns=columns)
    for number, shard in enumerate(source.shards()):
        expected = {"x": number, "y": 0.5, "name": "a"}
        assert as_rows(source.read(shard, 7)) == [{name: expected[name] for name in columns or expected}] * 13
    assert {len(batch["x"]) for batch in DataLoader(stream(source, keep_order=True), batch_size=16)} == {16}


@pytest.mark.parametrize(
    "header, columns, message",
    [
        ("x,z", None, r"b.csv has no column 'y', and .*a.csv has one. Give the columns that all files have with files\("),
        ("x", None, "b.csv has no column 'y'"),
        ("x,y,z", None, r"a.csv has no column 'z', and .*b.csv has one"),
        ("x,y,x", None, "b.csv has 2 columns with the name 'x'"),
        ("", None, "b.csv has no column 'x'"),
        ("z,y", ["x"], "b.csv has no column 'x'"),
    ],
)
def test_csv_file_with_other_columns_is_named_at_the_start(
    tmp_path: Path, header: str, columns: list[str] | None, message: str
) -> None:
    write(tmp_path / "a.csv", "x,y\n1,2\n")
    write(tmp_path / "b.csv", header + "\n" + ",".join(["1"] * (header.count(",") + 1)) + "\n")
    with pytest.raises(DataError, match=message):
        files(str(tmp_path), format="csv", columns=columns).shards()


def test_columns_that_are_not_read_may_differ(tmp_path: Path) -> None:
    write(tmp_path / "a.csv", "x,y\n1,2\n")
    write(tmp_path / "b.csv", "z,z,x\na,b,3\n")
    write(tmp_path / "c.csv", "")
    source = files(str(tmp_path / "*.csv"), columns=["x"])
    assert [as_rows(source.read(shard, 0)) for shard in source.shards()] == [[{"x": 1}], [{"x": 3}], []]


@pytest.mark.parametrize("place", [0, 11, 22])
@pytest.mark.parametrize("suffix", [".csv", ".csv.gz"])
@pytest.mark.parametrize("value", ['"hello\nworld"', '"hello\rworld\r"x', '"not closed', "a\rb", '"a,""b""\n"'])
def test_line_break_in_a_value_is_refused_at_the_start(tmp_path: Path, value: str, suffix: str, place: int) -> None:
    lines = [f"{number},some text" for number in range(23)]
    lines[place] = f"{place},{value}"
    write(tmp_path / f"a{suffix}", "id,name\n" + "\n".join(lines) + "\n")
    source = files(str(tmp_path / f"a{suffix}"))
    if value == '"hello\rworld\r"x':  # quoted, so it is no end of a row
        assert source.shards()[0].rows == len(lines)
        return
    with pytest.raises(DataError, match=rf"a{suffix}: the line .* is not a row. A value with a line break, or a quote that"):
        source.shards()


def test_quotes_without_line_breaks_are_read(tmp_path: Path) -> None:
    values = ['"a,b"', '"say ""hi"""', 'a 5" pipe', '""', '"x"']
    expected = ["a,b", 'say "hi"', 'a 5" pipe', "", "x"]
    write(tmp_path / "a.csv", 'id,"the name"\r\n' + "".join(f"{number},{values[number % 5]}\r\n" for number in range(23)))
    rows = [{"id": number, "the name": expected[number % 5]} for number in range(23)]
    assert_readable_from_every_row(files(str(tmp_path / "a.csv")), rows)


def test_chunk_whose_rows_are_not_its_lines_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_source, "_check_line_breaks", lambda *args: None)
    write(tmp_path / "a.csv", 'id,name\n1,a\n2,"hello\nworld"\n3,b\n')
    source = files(str(tmp_path / "a.csv"))
    with pytest.raises(DataError, match=r"a.csv: 4 lines have 3 rows. A value with a line break"):
        as_rows(source.read(source.shards()[0], 0))


def test_samples_of_a_tar_archive_are_read_from_every_one(tmp_path: Path) -> None:
    expected = []
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for number in range(11):
            sample = {"json": json.dumps(number).encode(), "seg.png": bytes(range(number * 60 % 256))}
            for extension, data in sample.items():
                member = tarfile.TarInfo(f"train/{number:04}.{extension}")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
            expected.append({"__key__": f"train/{number:04}", **sample})
    assert_readable_from_every_row(files(str(tmp_path / "a.tar")), expected)
    assert stream(files(str(tmp_path / "a.tar"))).layout_for(64).block_rows == 64  # images of 100 KB: 300 MB in 48 lanes


@pytest.mark.parametrize("group_rows", [1024, 2048])
def test_lanes_together_hold_few_pages_of_large_rows(group_rows: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """48 lanes that each keep a page of 10 MB would hold 1 GB."""
    dice = np.random.default_rng(0)
    columns = {"image": [dice.bytes(10_000) for _ in range(2048)], "number": list(range(2048))}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet", row_group_size=group_rows)
    data = stream(parquet(str(tmp_path / "a.parquet")))
    layout = replace(data.layout_for(64), cycle=12, block_rows=32)
    found, largest = [], 0
    for first in range(0, 2048, 64):
        rows = data.__getitems__(Positions(0, layout, ((first, first + 64),)))
        found += [row["number"] for row in rows]
        largest = max(largest, pa.total_allocated_bytes())
    assert sorted(found) == columns["number"]
    assert largest < 60 * 10**6
    assert caplog.text.count("has rows so large that pages may have 10 MB, and a page is decoded as a whole") == 1


def test_row_groups_that_take_long_to_read_again_stay_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(parquet_source, "MAX_REREAD_BYTES", 5_000_000)
    pq.write_table(pa.table({"image": [os.urandom(10_000) for _ in range(1024)]}), tmp_path / "a.parquet")
    source = parquet(str(tmp_path / "a.parquet"))
    (shard,) = source.shards()
    next(source.read(shard, 0))
    assert source.held_bytes(shard) == 0
    assert "row groups of 10 MB are too large to be decoded again" in caplog.text


def test_parquet_is_read_from_every_row(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(TABLE), tmp_path / "a.parquet", row_group_size=5)
    assert_readable_from_every_row(parquet(str(tmp_path)), TABLE)


def ids_of(rows: Any) -> Any:
    return rows.jagged("ids")


def test_nested_columns_and_lists_of_parquet_are_batched(tmp_path: Path) -> None:
    rows = [{"ids": [number] * (number % 3), "pair": [number, -number], "at": {"x": number, "y": "a"}} for number in range(8)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    data = stream(parquet(str(tmp_path), columns=["pair", "at"]), keep_order=True)
    (batch,) = DataLoader(data, batch_size=8)
    assert batch["pair"].tolist() == [row["pair"] for row in rows]
    assert batch["at"]["x"].tolist() == list(range(8))
    assert batch["at"]["y"] == ["a"] * 8

    jagged = DataLoader(stream(parquet(str(tmp_path)), keep_order=True), batch_size=5, collate_fn=ids_of)
    (values, lengths), _ = jagged
    assert (values.tolist(), lengths.tolist()) == ([1, 2, 2, 4], [0, 1, 2, 0, 1])
    with pytest.raises(DataError, match=r"lists in column 'ids' have 0 to 2 values.*rows.jagged"):
        next(iter(DataLoader(stream(parquet(str(tmp_path))), batch_size=8)))


def test_nulls_are_named_with_their_column(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [1, None, 3]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="column 'a' has 1 nulls in a batch of 3 rows"):
        next(iter(DataLoader(stream(parquet(str(tmp_path))), batch_size=3)))


def test_corrupt_row_group_is_named_or_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"a": list(range(300))}), path, row_group_size=100, compression="zstd", use_dictionary=False)
    spoil_row_group(path, 1)
    with pytest.raises(
        DataError, match=r"row group 1 of .*a.parquet \(rows from 0 of its 100\) cannot be read.*on_error='skip'"
    ):
        list(DataLoader(stream(parquet(str(tmp_path)), keep_order=True), batch_size=50))
    for shuffle_rows in (0, 600):
        data = stream(parquet(str(tmp_path), on_error="skip"), shuffle_rows=shuffle_rows)
        batches = [batch["a"].tolist() for batch in DataLoader(data, batch_size=150) if batch]
        assert sorted(chain.from_iterable(batches)) == [*range(100), *range(200, 300)]
    assert "100 rows are skipped so far: row group 1 of" in caplog.text


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda path: path.unlink(), "is gone or cannot be read"),
        (lambda path: write(path, "a\nb\nc\nd\n"), "has changed since the job counted its rows"),
        (lambda path: os.utime(path, ns=(1, 1)), "has changed since the job counted its rows"),
    ],
)
def test_file_that_changes_after_it_was_counted_is_named(tmp_path: Path, change: Callable[[Path], None], message: str) -> None:
    path = tmp_path / "a.txt"
    write(path, "a\nb\nc\n")
    source = files(str(path))
    (shard,) = source.shards()
    change(path)
    with pytest.raises(DataError, match=f"a.txt {message}"):
        next(iter(source.read(shard, 0)))


def test_types_that_do_not_fit_are_named_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_source, "LINES_TO_INFER_FROM", 3)
    write(tmp_path / "a.csv", "x\n" + "1\n" * 20 + "2.5\n")
    source = files(str(tmp_path / "a.csv"))
    with pytest.raises(DataError, match=r"a.csv cannot be parsed as csv: .*2.5.*types="):
        as_rows(source.read(source.shards()[0], 0))
    source = files(str(tmp_path / "a.csv"), types={"x": "float64"})
    assert as_rows(source.read(source.shards()[0], 20)) == [{"x": 2.5}]


@pytest.mark.parametrize(
    "name, options, message",
    [
        ("a.bin", {}, "its name has no known ending"),
        ("missing.txt", {}, "has no files: check the path"),
        ("a.csv", {"types": {"z": "int64"}}, "has no column z, only x"),
        ("a.csv", {"types": {"x": "nonsense"}}, "nonsense"),
        ("a.parquet", {}, "its name has no known ending"),
        ("b.tar", {}, "cannot be read as a tar archive"),
    ],
)
def test_what_cannot_be_read_is_named_at_the_start(tmp_path: Path, name: str, options: Any, message: str) -> None:
    for each in ("a.bin", "a.csv", "a.parquet", "b.tar"):
        write(tmp_path / each, "x\n1\n")
    with pytest.raises(DataError, match=message):
        files(str(tmp_path / name), **options).shards()


def test_folders_leave_out_marker_files_and_other_suffixes(tmp_path: Path) -> None:
    for name in ("day=1/a.parquet", "day=2/b.parquet", "_SUCCESS", "day=1/_meta.parquet", ".tmp/c.parquet", "notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        pq.write_table(pa.table({"a": [1]}), tmp_path / name)
    assert [Path(shard.key).name for shard in parquet(str(tmp_path)).shards()] == ["a.parquet", "b.parquet"]
    assert len(parquet(str(tmp_path / "day=*/*.parquet")).shards()) == 3
    assert len(parquet([str(tmp_path / "day=1/a.parquet"), str(tmp_path / "day=1")]).shards()) == 1


MARKS = ["_delta_log/00000000000000000000.json", ".hoodie/hoodie.properties", "metadata/v1.metadata.json"]


@pytest.mark.parametrize("mark", MARKS)
@pytest.mark.parametrize("root", ["", "memory:/"])
def test_table_with_a_list_of_its_files_is_refused(tmp_path: Path, mark: str, root: str) -> None:
    folder = f"{root}{tmp_path}"
    filesystem, _ = fsspec.core.url_to_fs(folder)
    rows = io.BytesIO()
    pq.write_table(pa.table({"a": [1, 2]}), rows)
    for name in ("table/data/day=1/a.parquet", "table/data/day=1/b.parquet", "plain/metadata/a.parquet"):
        filesystem.makedirs(os.path.dirname(f"{tmp_path}/{name}"), exist_ok=True)
        filesystem.pipe_file(f"{tmp_path}/{name}", rows.getvalue())
    filesystem.makedirs(os.path.dirname(f"{tmp_path}/table/{mark}"), exist_ok=True)
    filesystem.pipe_file(f"{tmp_path}/table/{mark}", b"{}")
    for path in ("", "/table", "/table/data", "/table/data/day=*/*.parquet", "/table/data/day=1"):
        with pytest.raises(
            DataError, match=r"so this is a table of (Delta Lake|Apache).*Give the files of one version as a list"
        ):
            parquet(folder + path).shards()
    assert len(parquet(f"{folder}/table/data/day=1/a.parquet").shards()) == 1  # as a list of one version's files has it
    assert len(parquet(f"{folder}/plain").shards()) == len(parquet(f"{folder}/plain/metadata/*.parquet").shards()) == 1


class LikeAzure(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
    """Gives ETags with quotes for a file, and without in a listing."""

    protocol = "likeazure"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.replace("likeazure://", "memory://")))

    def glob(self, path: str, **options: Any) -> Any:
        return {name: {**super(LikeAzure, self).info(name), "etag": "0x8D"} for name in super().glob(path)}

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        return {**super().info(path, **options), "etag": f'{"W/" if "weak" in path else ""}"0x8D"'}


def test_etag_is_the_same_with_and_without_quotes() -> None:
    fsspec.register_implementation("likeazure", LikeAzure, clobber=True)
    for name in ("a", "weak"):
        LikeAzure().pipe_file(f"/data/{name}.txt", b"1\n2\n")
    source = files("likeazure://data/*.txt")
    assert [as_rows(source.read(shard, 1)) for shard in source.shards()] == [["2"], ["2"]]


def test_counts_are_remembered_until_the_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "a.txt", "a\nb\n")
    source = files(str(tmp_path / "a.txt"))
    counts: list[str] = []
    count = file_source._count_lines

    def counting(location: Any, **options: Any) -> Any:
        counts.append(location.key)
        return count(location, **options)

    monkeypatch.setattr(file_source, "_count_lines", counting)
    assert [shard.rows for _ in range(3) for shard in source.shards()] == [2, 2, 2]
    assert len(counts) == 1
    write(tmp_path / "a.txt", "a\nb\nc\n")
    assert source.shards()[0].rows == 3
    assert len(counts) == 2


def test_decoder_is_imported_before_loader_workers_are_forked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pq.write_table(pa.table({"id": [1, 2]}), tmp_path / "a.parquet")
    source = parquet(str(tmp_path))
    source.shards()
    monkeypatch.delitem(sys.modules, "pyarrow.parquet")
    source.shards()  # the rows are counted already
    assert "pyarrow.parquet" in sys.modules


@pytest.mark.parametrize("content", [b"no database", None])
def test_unusable_cache_is_ignored(tmp_path: Path, content: bytes | None) -> None:
    place = Path(cache_file())
    if content is None:
        place.mkdir(parents=True)
    else:
        place.parent.mkdir(parents=True)
        place.write_bytes(content)
    write(tmp_path / "a.txt", "a\nb\n")
    assert files(str(tmp_path / "a.txt")).shards()[0].rows == 2


def test_many_small_and_empty_files_are_one_stream(tmp_path: Path) -> None:
    for number in range(300):
        write(tmp_path / f"{number:03}.txt", "".join(f"{number} {row}\n" for row in range(number % 4)))
    data = stream(files(str(tmp_path / "*.txt")), shuffle_rows=100)
    rows = [row for batch in DataLoader(data, batch_size=32, num_workers=2) for row in batch]
    assert sorted(rows) == sorted(f"{number} {row}" for number in range(300) for row in range(number % 4))


@pytest.mark.parametrize("make", [parquet, files])
def test_missing_package_is_named_with_the_extra(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_dlrover.data.source.find_spec", lambda name: None if name == "pyarrow" else object())
    with pytest.raises(ModuleNotFoundError, match=r"need pyarrow: pip install 'lightning-dlrover\[data\]'"):
        make("x")


def test_a_format_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="format='xml': give one of lines, csv, tsv, tar"):
        files("x", format="xml")


def test_reading_can_end_anywhere(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", "\n".join(map(str, range(50))))
    source = files(str(tmp_path / "a.txt"))
    (shard,) = source.shards()
    assert list(islice(source.read(shard, 3), 4)) == ["3", "4", "5", "6"]


def test_reading_imports_nothing_once_the_shards_are_known(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [1, 2, 3]}), tmp_path / "a.parquet")
    script = f"""
import sys
from torch.utils.data import DataLoader
from lightning_dlrover.data import parquet, stream
loader = DataLoader(stream(parquet({str(tmp_path)!r})), batch_size=3)
len(loader)
before = set(sys.modules)
assert next(iter(loader))["a"].tolist() == [1, 2, 3]
print([name for name in sorted(set(sys.modules) - before) if name.startswith(("pandas", "pyarrow"))])
"""
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"  # else each loader worker of a joiner would do so while a step waits


# Small row groups are read one by one at first, larger ones in one pass that begins within one of them.
@pytest.mark.parametrize(("size", "corrupt"), [(1_000, 25), (9_000, 3)])
def test_corrupt_row_group_behind_others_is_named(tmp_path: Path, size: int, corrupt: int) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"a": list(range(36_000))}), path, row_group_size=size, compression="zstd", use_dictionary=False)
    spoil_row_group(path, corrupt)
    source = parquet(str(path))
    (shard,) = source.shards()
    first = size * corrupt
    for row in (0, 500, 8_192, 9_001, first - 1, first):
        read: list[int] = []
        with pytest.raises(
            DataError, match=rf"row group {corrupt} of .*a.parquet \(rows from 0 of its {size}\) cannot be read"
        ):
            read.extend(value for batch in source.read(shard, row) for value in batch.column("a").to_pylist())
        assert read == list(range(row, first))
