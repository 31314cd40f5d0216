from __future__ import annotations

import gzip
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import criteo_to_parquet
import ctr_data
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from criteo_to_parquet import Layout, convert, write_generated
from ctr_data import Batch, DataError
from ctr_parquet import CATEGORIES, NUMBERS, SETS, ClickStreams, Description, is_click_folder, load_streams
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

SMALL = Layout(rows_per_file=70, row_group_rows=30)


def row(label: str = "0", numbers: str = "1", category: str = "68fd1e64") -> str:
    return "\t".join([label, *[numbers] * 13, *[category] * 26])


def many_rows(num_rows: int, seed: int = 0) -> list[str]:
    """Rows with gaps, and with more values of each category than a vocabulary of ctr_data holds."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(num_rows):
        numbers = ["" if gap else str(n) for gap, n in zip(rng.random(13) < 0.2, rng.integers(-3, 10_000, 13), strict=True)]
        values = rng.integers(0, 2**32, 26)
        categories = ["" if gap else f"{v:08x}" for gap, v in zip(rng.random(26) < 0.2, values, strict=True)]
        rows.append("\t".join([str(rng.integers(2)), *numbers, *categories]))
    return rows


def written(path: Path, rows: list[str], end: str = "\n") -> Path:
    path.write_bytes("".join(line + end for line in rows).encode())
    return path


def batches(data: ClickStreams, name: str, num_workers: int = 0) -> Iterator[Batch]:
    return iter(DataLoader(getattr(data, name), 64, collate_fn=data.collate, num_workers=num_workers))


def all_rows(data: ClickStreams, name: str) -> torch.Tensor:
    """Rows as numbers, ids and labels side by side, sorted."""
    parts = [torch.cat([numbers, ids, labels[:, None]], dim=1) for numbers, ids, labels in batches(data, name)]
    whole = torch.cat(parts).numpy()
    return torch.from_numpy(whole[np.lexsort(whole.T)])


# --- rows ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_rows_of_the_folder_are_those_of_the_tsv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    monkeypatch.setattr(criteo_to_parquet, "CHUNK_BYTES", 5_000)  # lines go across chunks
    monkeypatch.setattr(ctr_data, "MAX_IDS", 50)  # ctr_data hashes categories, as the conversion does
    path = written(tmp_path / "clicks.tsv", many_rows(503), end)
    convert([path], tmp_path / "folder", SMALL, num_ids=50)
    expected, found = ctr_data.load(path, 0, 1000), load_streams(tmp_path / "folder", shuffle_rows=0)
    assert found.cardinalities == expected.cardinalities == (50,) * 26
    for name in SETS:
        rows = getattr(expected, name)
        whole = torch.cat([rows.numbers, rows.categories, rows.labels[:, None]], dim=1).numpy()
        torch.testing.assert_close(
            all_rows(found, name), torch.from_numpy(whole[np.lexsort(whole.T)]), rtol=1e-4, atol=1e-5, msg=name
        )


def test_files_hold_the_rows_in_their_order_and_as_many_as_asked_for(tmp_path: Path) -> None:
    rows = [row(numbers=str(number)) for number in range(500)]
    convert([written(tmp_path / "clicks.tsv", rows)], tmp_path / "folder", SMALL)
    files = sorted((tmp_path / "folder" / "train").iterdir())
    assert [pq.ParquetFile(file).metadata.num_rows for file in files] == [70, 70, 70, 70, 70, 50]
    metadata = pq.ParquetFile(files[0]).metadata
    assert [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)] == [30, 30, 10]
    stored = np.concatenate([pq.read_table(tmp_path / "folder" / name).column("I1").to_numpy() for name in SETS])
    assert stored == pytest.approx(np.log1p(np.arange(500)), rel=1e-6)


def test_several_files_compressed_or_not_are_one_log(tmp_path: Path) -> None:
    rows = many_rows(300)
    whole = written(tmp_path / "whole.tsv", rows)
    first, second = written(tmp_path / "first.tsv", [*rows[:100], ""]), tmp_path / "second.tsv.gz"
    second.write_bytes(gzip.compress("\n".join(rows[100:]).encode()))  # the last line has no end
    convert([whole], tmp_path / "one", SMALL)
    described = convert([first, second], tmp_path / "two", SMALL)
    assert described.source == "first.tsv, second.tsv.gz"
    for name in SETS:
        one, two = (pq.read_table(tmp_path / folder / name) for folder in ("one", "two"))
        assert one.schema == two.schema
        for column in one.column_names:
            np.testing.assert_array_equal(one.column(column).to_numpy(), two.column(column).to_numpy())


@settings(max_examples=50, deadline=None)
@given(st.lists(st.sampled_from(["", "1"]), min_size=1), st.sampled_from(["\n", "\r\n"]), st.booleans())
def test_rows_are_counted_as_they_are_converted(lines: list[str], end: str, last_has_end: bool) -> None:
    text = "".join((row() if line else "") + end for line in lines).encode()
    text = text if last_has_end else text.removesuffix(end.encode())
    assert criteo_to_parquet._num_rows(text) == lines.count("1")
    assert criteo_to_parquet._table(text, 100).num_rows == lines.count("1")


@settings(max_examples=50, deadline=None)
@given(st.lists(st.text("0123456789abcdefABCDEF", max_size=16), min_size=1), st.integers(2, 2**31 - 1))
def test_id_is_the_remainder_of_the_value(values: list[str], num_ids: int) -> None:
    expected = [1 + int(value, 16) % (num_ids - 1) if value else ctr_data.UNSEEN for value in values]
    assert criteo_to_parquet._ids("C1", pa.array(values), num_ids).tolist() == expected


def test_constant_and_missing_numbers_become_zero(tmp_path: Path) -> None:
    convert([written(tmp_path / "clicks.tsv", [row(numbers="0.1"), row(numbers="")] * 100)], tmp_path / "folder", SMALL)
    for numbers, _, _ in batches(load_streams(tmp_path / "folder", 0), "train"):
        assert numbers.abs().max() < 1e-3


def test_generated_rows_are_those_of_ctr_data(tmp_path: Path) -> None:
    write_generated(300, seed=3, output=tmp_path / "folder", layout=SMALL)
    made, found = ctr_data.load(None, 3, 300), load_streams(tmp_path / "folder", shuffle_rows=0)
    assert (found.best_auc, found.cardinalities, found.num_numbers) == (made.best_auc, made.cardinalities, made.num_numbers)
    for name in SETS:
        rows = getattr(made, name)
        stored = pq.read_table(tmp_path / "folder" / name)
        for i, column in enumerate(NUMBERS):
            assert stored.column(column).to_numpy().tolist() == rows.numbers[:, i].tolist()
        for i, column in enumerate(CATEGORIES):
            assert stored.column(column).to_numpy().tolist() == rows.categories[:, i].tolist()
        assert stored.column("label").to_numpy().tolist() == rows.labels.tolist()


# --- what cannot be converted -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "broken, message",
    [
        (row() + "\t", "line 152: 41 columns, expected 40 separated by tabs"),
        ("39, State-gov", "line 152: 1 columns, expected 40 separated by tabs, in '39, State-gov'"),
        (row(label="2"), "line 152: the label is 2, expected '0' or '1'"),
        (row(label=""), "line 152: the label is , expected"),
        (row(numbers="1.5.2"), "line 152: column 'I1' is '1.5.2', expected a number"),
        (row(numbers="inf"), "line 152: column 'I1' is 'inf', expected a number"),
        (row(numbers="nan"), "line 152: column 'I1' is 'nan', expected a number"),
        (row(category="xyz"), "line 152: column 'C1' is 'xyz', expected hexadecimal digits or nothing"),
        (row(category="é"), "line 152: column 'C1' is 'é', expected hexadecimal digits or nothing"),
        (row(category="1" * 17), "line 152: column 'C1' is '11111111111111111', expected hexadecimal digits or nothing"),
        (row(category="1\r2"), "line 152: a carriage return within the line"),
        (row(category="\udcff"), "line 152: not text in UTF-8"),
    ],
)
def test_broken_row_is_named_and_nothing_is_left_behind(tmp_path: Path, broken: str, message: str) -> None:
    path = tmp_path / "clicks.tsv"
    path.write_bytes("\n".join([*many_rows(150), "", broken, *many_rows(150)]).encode(errors="surrogateescape"))
    with pytest.raises(DataError) as caught:
        convert([path], tmp_path / "folder", SMALL)
    assert f"{path}, {message}" in str(caught.value)
    assert "correct or delete the line and convert again" in str(caught.value)
    assert [file.name for file in tmp_path.iterdir()] == ["clicks.tsv"]


def test_line_numbers_count_all_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(criteo_to_parquet, "CHUNK_BYTES", 3_000)
    path = written(tmp_path / "clicks.tsv", [*many_rows(150), "", row(label="x"), *many_rows(50)])
    with pytest.raises(DataError, match="line 152: the label is x"):
        convert([path], tmp_path / "folder", SMALL)


def test_files_that_are_not_a_log_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "clicks.tsv.gz"
    path.write_bytes(gzip.compress("\n".join(many_rows(200)).encode())[:-100])
    with pytest.raises(DataError, match="cannot be read after line"):
        convert([path], tmp_path / "folder", SMALL)
    with pytest.raises(DataError, match="nothing: cannot be read after line 0"):
        convert([tmp_path / "nothing"], tmp_path / "folder", SMALL)
    with pytest.raises(DataError, match="99 rows are too few"):
        convert([written(tmp_path / "few.tsv", many_rows(99))], tmp_path / "folder", SMALL)
    monkeypatch.setattr(criteo_to_parquet, "MAX_LINE_BYTES", 1000)
    (tmp_path / "zeros").write_bytes(bytes(5000))
    with pytest.raises(DataError, match="line 1 is longer than 1000 bytes"):
        convert([tmp_path / "zeros"], tmp_path / "folder", SMALL)


def test_file_that_grows_between_the_passes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "clicks.tsv", many_rows(200))
    moments = criteo_to_parquet._Moments

    def grown(num_columns: int) -> criteo_to_parquet._Moments:
        written(path, many_rows(250))
        return moments(num_columns)

    monkeypatch.setattr(criteo_to_parquet, "_Moments", grown)
    with pytest.raises(DataError, match="200 rows were counted and 250 read"):
        convert([path], tmp_path / "folder", SMALL)
    assert not (tmp_path / "folder").exists()


def test_folder_in_use_is_refused_and_an_empty_one_is_taken(tmp_path: Path) -> None:
    path = written(tmp_path / "clicks.tsv", many_rows(100))
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "mine").touch()
    with pytest.raises(DataError, match="is not empty, and nothing in it was changed"):
        convert([path], folder, SMALL)
    assert [file.name for file in folder.iterdir()] == ["mine"]
    with pytest.raises(DataError, match="is a file"):
        convert([path], path, SMALL)
    (folder / "mine").unlink()
    convert([path], folder, SMALL)
    assert sorted(file.name for file in folder.iterdir()) == ["clicks.json", "test", "train", "val"]


# --- reading ------------------------------------------------------------------------------------------------------------------


def test_loader_workers_change_no_batch(tmp_path: Path) -> None:
    convert([written(tmp_path / "clicks.tsv", many_rows(600))], tmp_path / "folder", SMALL)
    data = load_streams(tmp_path / "folder", shuffle_rows=1000)
    alone = list(batches(data, "train"))
    assert sum(len(labels) for _, _, labels in alone) == 480
    for num_workers in (1, 3):
        for one, two in zip(alone, batches(data, "train", num_workers), strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_batches_have_the_types_that_models_take(tmp_path: Path) -> None:
    write_generated(200, seed=1, output=tmp_path / "folder", layout=SMALL)
    numbers, categories, labels = next(batches(load_streams(tmp_path / "folder", 0), "train"))
    assert (numbers.dtype, tuple(numbers.shape)) == (torch.float32, (64, 13))
    assert (categories.dtype, tuple(categories.shape)) == (torch.int64, (64, 26))
    assert (labels.dtype, tuple(labels.shape)) == (torch.float32, (64,))


def test_folder_that_was_changed_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    write_generated(400, seed=1, output=folder, layout=SMALL)
    (folder / "train" / "part-00001.parquet").unlink()
    with pytest.raises(DataError, match=r"train holds 250 rows, but clicks\.json counts 320"):
        load_streams(folder, 0)
    shutil.rmtree(folder / "val")
    (folder / "train" / "part-00000.parquet").write_text("no Parquet")
    with pytest.raises(DataError, match="is not a Parquet file"):
        load_streams(folder, 0)


@pytest.mark.parametrize("text", [None, "", "[]", "{", '{"rows": [1, 2, 3]}'])
def test_damaged_description_is_named(tmp_path: Path, text: str | None) -> None:
    (tmp_path / "train").mkdir()
    if text is not None:
        (tmp_path / "clicks.json").write_text(text)
    assert is_click_folder(tmp_path)
    with pytest.raises(DataError, match=r"clicks\.json is not a description of click rows .*examples/criteo_to_parquet\.py"):
        Description.read(tmp_path)


def test_description_is_read_as_it_was_written(tmp_path: Path) -> None:
    described = write_generated(200, seed=1, output=tmp_path / "folder", layout=SMALL)
    assert Description.read(tmp_path / "folder") == described


# --- the command --------------------------------------------------------------------------------------------------------------


def test_command_names_the_folder_and_the_next_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, folder = written(tmp_path / "clicks.tsv", many_rows(1000)), tmp_path / "folder"
    monkeypatch.setattr(sys, "argv", ["criteo_to_parquet.py", str(path), str(folder), "--ids", "77"])
    assert criteo_to_parquet.main() == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == f"{folder}: 800 rows to train, 100 to validate, the newest 100 to test"
    assert second == f"train with: python examples/train_dlrm.py --data {folder}"
    assert json.loads((folder / "clicks.json").read_text())["cardinalities"] == [77] * 26
    assert criteo_to_parquet.main() == 2
    assert capsys.readouterr().err.startswith(f"criteo_to_parquet: {folder} is not empty")


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["folder"], "give one or more TSV files before the output folder, or --generate ROWS"),
        (["clicks.tsv", "folder", "--generate", "100"], "--generate takes no input, and clicks.tsv is one"),
        (["folder", "--generate", "99"], "99 must be 100 or more"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["criteo_to_parquet.py", *arguments])
    with pytest.raises(SystemExit) as caught:
        criteo_to_parquet.main()
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_killed_conversion_leaves_no_folder(tmp_path: Path) -> None:
    script = (
        "import os, signal, criteo_to_parquet as c; from pathlib import Path; "
        "c.Description.write = lambda *_: os.kill(os.getpid(), signal.SIGKILL); "
        f"c.write_generated(100, 1, Path({str(tmp_path / 'folder')!r}), c.Layout())"
    )
    source = Path(criteo_to_parquet.__file__).parent
    done = subprocess.run([sys.executable, "-c", script], cwd=source, capture_output=True, timeout=60, check=False)
    assert done.returncode == -9, done.stderr
    assert not (tmp_path / "folder").exists()
