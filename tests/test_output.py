"""Text output: messages, findings and tables."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from lightning_dlrover.output import counted, number_text, printable, say, show, show_transient, text_table

PRINTER = """
import sys
from lightning_dlrover.output import complain, flush, say
for number in range(3):
    say(f"line {number}" + "x" * 9000)
complain("the end")
flush()
sys.exit(7)
"""

WORKER = """
import sys
from lightning_dlrover.output import drop_what_cannot_be_written
drop_what_cannot_be_written()
drop_what_cannot_be_written()
for number in range(3):
    print("x" * 9000, flush=True)
    sys.stdout.write("y")
sys.exit(7)
"""


def run(program: str, out: int | IO[str], errors: int | IO[str], *python: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *python, "-c", program]
    return subprocess.run(command, stdout=out, stderr=errors, text=True, timeout=60, check=False)


@pytest.fixture
def full() -> Iterator[IO[str]]:
    """A disk without any space left."""
    with open("/dev/full", "w") as stream:
        yield stream


@pytest.fixture
def lost_terminal() -> Iterator[int]:
    """A terminal without its window: writing to it fails with EIO."""
    window, terminal = pty.openpty()
    os.close(window)
    yield terminal
    os.close(terminal)


def test_full_disk_is_reported_once(full: IO[str]) -> None:
    done = run(PRINTER, full, subprocess.PIPE)
    assert done.returncode == 7
    lines = done.stderr.splitlines()
    assert [line.partition("(")[0] for line in lines] == ["dlrover: standard output cannot be written ", "dlrover: the end"]
    assert "No space left on device" in lines[0]


def test_lost_terminal_changes_no_exit_code(lost_terminal: int) -> None:
    assert run(PRINTER, lost_terminal, lost_terminal).returncode == 7


def test_closed_pipe_changes_no_exit_code() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe:
        done = run(PRINTER, pipe, subprocess.PIPE)
    assert (done.returncode, done.stderr) == (7, "dlrover: the end\n")


@pytest.mark.parametrize("python", [(), ("-u",)])
def test_worker_outlives_its_full_log(full: IO[str], python: tuple[str, ...]) -> None:
    done = run(WORKER, full, subprocess.PIPE, *python)
    assert done.returncode == 7
    [line] = done.stderr.splitlines()
    assert "output of this process cannot be written (No space left on device)" in line


def test_worker_outlives_a_lost_terminal(lost_terminal: int) -> None:
    assert run(WORKER, lost_terminal, lost_terminal).returncode == 7


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, ünïcode, 漢字 and 💡\n\tindented", "plain, ünïcode, 漢字 and 💡\n\tindented"),
        ("\x1b]0;title\x07", "\\x1b]0;title\\x07"),
        ("a\rb\x7f\x9b2J", "a\\rb\\x7f\\x9b2J"),
        ("a\u202eb\u2066", "a\\u202eb\\u2066"),
    ],
)
def test_control_characters_are_spelled_out(text: str, shown: str) -> None:
    assert printable(text) == shown


@pytest.mark.parametrize(("module", "name"), [("main", "build_parser"), ("run", "check_target")])
def test_early_ctrl_c_gets_one_line(module: str, name: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    program = f"""
import os, signal, sys
from lightning_dlrover.cli import main, {module}
called = {module}.{name}
{module}.{name} = lambda *given: (os.kill(os.getpid(), signal.SIGINT), called(*given))[1]
sys.exit(main.main(["run", {str(script)!r}, "--endpoint", "127.0.0.1:1"]))
"""
    done = run(program, subprocess.PIPE, subprocess.PIPE)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "dlrover: interrupted\n")


@pytest.mark.parametrize("encoding", ["gbk", "ascii:surrogateescape"])
def test_any_output_can_be_printed_in_any_encoding(encoding: str, tmp_path: Path) -> None:
    node = tmp_path / "runs/job/logs/node1"
    node.mkdir(parents=True)
    (node / "stdout.log").write_bytes(b"caf\xc3\xa9 \xff\n")
    program = "import sys; from lightning_dlrover.cli.main import main; sys.exit(main(['logs', 'job']))"
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.startswith(b"[node1] caf")
    assert done.stdout.endswith(b"\\ufffd\n")


def test_one_takes_no_plural() -> None:
    assert [counted(number, "worker") for number in (0, 1, 2)] == ["0 workers", "1 worker", "2 workers"]


def test_transient_line_is_replaced_cut_and_removed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "10")
    for line in ("one of two lines", "one of twenty", "two\x1b"):  # the first nine characters of the first two are equal
        show_transient(line)
    say("event")
    show_transient("three")
    show_transient("")
    assert capsys.readouterr().out == "one of tw\r\x1b[Ktwo\\x1b\r\x1b[Kevent\nthree\r\x1b[K"


@pytest.mark.parametrize(
    ("is_terminal", "no_color", "shown"), [(True, "", "\x1b[32mok\x1b[0m  all"), (False, "", "ok  all"), (True, "1", "ok  all")]
)
def test_colours_reach_only_a_terminal_that_wants_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_terminal: bool, no_color: str, shown: str
) -> None:
    monkeypatch.setattr("lightning_dlrover.output.has_terminal", lambda: is_terminal)
    monkeypatch.setenv("NO_COLOR", no_color)
    show("ok  all", "green")
    assert capsys.readouterr().out == f"{shown}\n"


@pytest.mark.parametrize(
    ("number", "text"), [(18830.4, "18,830"), (1234567.0, "1,234,567"), (12.3456, "12.35"), (0.012345, "0.01235"), (0, "0")]
)
def test_large_numbers_are_not_written_as_powers_of_ten(number: float, text: str) -> None:
    assert number_text(number) == text


# --- tables ------------------------------------------------------------------------------------------------------------------


def test_columns_are_as_wide_as_their_longest_cell() -> None:
    rows = [("job", "steps", ""), ("a", "1,000,000", "finished"), ("longest", "5", "")]
    assert text_table("<><", rows, indent=2) == [
        "  job          steps",
        "  a        1,000,000  finished",
        "  longest          5",
    ]


def test_a_table_without_rows_has_no_lines() -> None:
    assert text_table("<>", []) == []
