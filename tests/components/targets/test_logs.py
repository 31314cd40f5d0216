"""The files with a node's output, and their new content."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

from lightning_dlrover.components.targets.target import PIECE_BYTES, LogFile, log_files, read_tail


def write(file: Path, text: str = "") -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def test_output_is_found_by_node_wherever_it_ran(tmp_path: Path) -> None:
    local = [write(tmp_path / f"torchx_1/node2-x1y2z3/worker/0/{name}.log") for name in ("stderr", "stdout")]
    slurm = [write(tmp_path / f"node10/{name}.log") for name in ("stdout", "stderr")]
    write(tmp_path / "node10/batch.sh")
    write(tmp_path / "other/stdout.log")
    assert log_files(tmp_path) == {"node2": local[::-1], "node10": slurm}
    assert list(log_files(tmp_path)) == ["node2", "node10"]


def test_a_line_is_given_once_and_when_it_is_whole(tmp_path: Path) -> None:
    file = LogFile(write(tmp_path / "stdout.log", "one\ntw"))
    assert list(file.new_lines(whole=False)) == ["one"]
    with file.file.open("a") as stream:
        stream.write("o\nbar 1%\rbar 2%\n\nlast")
    assert list(file.new_lines(whole=False)) == ["two", "bar 2%", ""]
    assert list(file.new_lines(whole=True)) == ["last"]
    assert list(file.new_lines(whole=True)) == []


def test_earlier_output_can_be_left_out(tmp_path: Path) -> None:
    file = LogFile(write(tmp_path / "stdout.log", "old\n"))
    file.skip()
    with file.file.open("a") as stream:
        stream.write("new\n")
    assert list(file.new_lines(whole=False)) == ["new"]


def test_tail_is_read_without_the_rest(tmp_path: Path) -> None:
    file = tmp_path / "stderr.log"
    with file.open("wb") as stream:
        stream.truncate(1 << 40)  # sparse, so it takes no space
        stream.seek(0, 2)
        stream.write(b"\nValueError: bad\n")
    assert read_tail(file, 100).endswith("ValueError: bad\n")
    assert read_tail(write(tmp_path / "short.log", "one\ntwo\n")) == "one\ntwo\n"
    assert read_tail(write(tmp_path / "lines.log", "one\ntwo\n"), 6) == "two\n"


def test_progress_bar_without_an_end_is_read_once(tmp_path: Path) -> None:
    file = LogFile(write(tmp_path / "stdout.log", "".join(f"bar {i} %\r" for i in range(20_000)) + "half"))
    assert list(file.new_lines(whole=False)) == []
    assert file.file.stat().st_size - file.num_read == len("half")
    with file.file.open("a") as stream:
        stream.write(" a bar\r100 %\nnext\n")
    assert list(file.new_lines(whole=False)) == ["100 %", "next"]


def test_file_that_was_cut_short_is_read_from_its_start(tmp_path: Path) -> None:
    file = LogFile(write(tmp_path / "stdout.log", "one\ntwo\n"))
    assert list(file.new_lines(whole=False)) == ["one", "two"]
    write(file.file, "three\n")  # as after logrotate's copytruncate
    assert list(file.new_lines(whole=False)) == [
        "(stdout.log was cut short, so some of its lines may be missing here)",
        "three",
    ]
    assert list(file.new_lines(whole=False)) == []


def test_file_of_any_size_is_read_in_pieces(tmp_path: Path) -> None:
    text = write(tmp_path / "stdout.log", "".join(f"{number:06}: é {'x' * number}\n" for number in range(0, 6000, 5)))
    assert text.stat().st_size > 12 * PIECE_BYTES
    tracemalloc.start()
    try:
        lines = 0
        for line in LogFile(text).new_lines(whole=True):
            assert line == f"{lines * 5:06}: é {'x' * lines * 5}"
            lines += 1
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert lines == 1200
    assert peak < 6 * PIECE_BYTES


def test_line_without_an_end_is_given_in_parts(tmp_path: Path) -> None:
    file = LogFile(write(tmp_path / "stdout.log", "x" * (2 * PIECE_BYTES + 7)))
    assert "".join(file.new_lines(whole=False)) == "x" * 2 * PIECE_BYTES
    assert list(file.new_lines(whole=True)) == ["x" * 7]
