"""Text output: messages of all processes, findings of a check, and tables."""

from __future__ import annotations

import errno
import io
import logging
import os
import shutil
import sys
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Verdict = Literal["ok", "warning", "error"]


@dataclass(frozen=True)
class Finding:
    """Result of one check, or of a part of it."""

    check: str  # short name, such as "etcd size"
    verdict: Verdict
    text: str  # one line
    next_move: str = ""  # remedy; empty if `verdict` is ok


def ok(check: str, text: str) -> Finding:
    return Finding(check, "ok", text)


def warning(check: str, text: str, next_move: str) -> Finding:
    return Finding(check, "warning", text, next_move)


def error(check: str, text: str, next_move: str) -> Finding:
    return Finding(check, "error", text, next_move)


def worst(findings: Sequence[Finding]) -> Verdict:
    """Return the worst verdict; ok if there are no findings."""
    verdicts = {finding.verdict for finding in findings}
    return "error" if "error" in verdicts else "warning" if "warning" in verdicts else "ok"


def lacks_matplotlib(error: Exception) -> str:
    """Return what an error of a slim installation means, and the next move; empty for any other error."""
    if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] == "matplotlib":
        return "matplotlib, which draws reports and pictures, is not installed; run `pip install matplotlib`"
    return ""


# An unwritable terminal or log does not end a job, and control characters do not reach a terminal.

log = logging.getLogger(__name__)

_BIDI = {*range(0x202A, 0x202F), *range(0x2066, 0x206A)}  # characters that reorder the text after them on a screen


def printable(text: str) -> str:
    """Return `text` with its control characters spelled out, except line ends and tabs. Others may have written it."""

    def controls(character: str) -> bool:
        return unicodedata.category(character) == "Cc" or ord(character) in _BIDI

    return "".join(c if c in "\n\t" or not controls(c) else c.encode("unicode_escape").decode() for c in text)


def counted(number: object, noun: str, plural: str = "") -> str:
    """Return the number with its noun, which takes an s unless the number is 1: `1 worker`, `2 workers`.

    Args:
        plural: where it is not the noun with an s.
    """
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def time_text(seconds: float) -> str:
    """Format a duration: `40 s`, `12 min`, `3.5 h`."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def number_text(number: float) -> str:
    """Format a rate or an amount with four digits, and never as a power of ten: `12,345`, `12.34`, `0.01234`."""
    return f"{number:,.0f}" if abs(number) >= 1000 else f"{number:.4g}"


def say(line: str) -> None:
    """Print a line of a job's progress as it is. A line that cannot be written is dropped, and only the first is reported."""
    try:
        print(_erased() + line, flush=True)
    except OSError as error:
        _renew("stdout")
        if error.errno != errno.EPIPE and not _State.is_reported:
            _State.is_reported = True
            complain(f"standard output cannot be written ({error.strerror}); the job continues, its run folder has its events")


def has_terminal() -> bool:
    """Whether standard output is a terminal on which a line can be replaced."""
    try:
        return sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    except (AttributeError, ValueError):  # there is no standard output, or it is closed
        return False


def show_transient(line: str) -> None:
    """Show a line at the bottom of the terminal until the next output replaces it. An empty line only removes the last one.

    Requires `has_terminal`. A line wider than the terminal is cut off: one that wraps could not be replaced.
    """
    line = printable(line)[: shutil.get_terminal_size().columns - 1]
    if line == _State.transient:
        return
    try:
        print(_erased() + line, end="", flush=True)
        _State.transient = line
    except OSError:
        _renew("stdout")


def _erased() -> str:
    """Return the characters that remove the transient line, if one is shown."""
    erase, _State.transient = "\r\x1b[K" if _State.transient else "", ""
    return erase


COLOURS = {"red": "31", "green": "32", "yellow": "33"}


def show(text: str, colour: str = "") -> None:
    """Print the output of a command.

    Args:
        colour: of the first word, on a terminal whose user has not set NO_COLOR.

    Raises:
        OSError: standard output cannot be written.
    """
    text = printable(text)
    word, space, rest = text.partition(" ")
    if word and colour and has_terminal() and not os.environ.get("NO_COLOR"):
        text = f"\x1b[{COLOURS[colour]}m{word}\x1b[0m{space}{rest}"
    print(text)


def complain(text: str, prefix: str = "dlrover: ") -> None:
    """Print to standard error. A failure of this is not reported."""
    if _State.transient:
        show_transient("")
    try:
        print(prefix + printable(text), file=sys.stderr, flush=True)
    except OSError:
        _renew("stderr")


def escape_what_cannot_be_encoded() -> None:
    """Let standard output take any character, whatever its encoding: nodes may print any bytes, which must not end a job."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            try:
                stream.reconfigure(errors="backslashreplace")
            except OSError:  # it was opened as a file, and has become a pipe since
                buffering = 1 if stream.line_buffering else -1
                new = open(stream.fileno(), "w", buffering, stream.encoding, "backslashreplace", closefd=False)  # noqa: SIM115
                setattr(sys, name, new)


def flush() -> OSError | None:
    """Write buffered output, so that the interpreter does not fail at its exit. Return standard output's error, if any."""
    problem = None
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        try:
            if stream is not None:
                stream.flush()
        except OSError as error:
            problem = error if name == "stdout" else problem
            _renew(name)
    return problem


def drop_what_cannot_be_written() -> None:
    """Let this process continue to print, such as its progress bar, when its log is full. Only the first failure is logged."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not hasattr(stream, "_dlrover_drops"):
            stream.write = _dropping(stream.write)  # type: ignore[method-assign]
            stream.flush = _dropping(stream.flush)  # type: ignore[method-assign]
            stream._dlrover_drops = True  # type: ignore[union-attr]


def _dropping(write: Callable[..., Any]) -> Callable[..., Any]:
    def write_if_possible(*text: str) -> Any:
        try:
            return write(*text)
        except OSError as error:
            if not _State.is_reported:
                _State.is_reported = True
                log.warning("output of this process cannot be written (%s); training continues without it", error.strerror)
            return len(text[0]) if text else None

    return write_if_possible


class _State:
    is_reported = False
    transient = ""


def _renew(name: Literal["stdout", "stderr"]) -> None:
    """Discard a stream's buffer: the next line must not wait for it, nor the interpreter's exit fail because of it."""
    old = getattr(sys, name)
    try:
        new = open(old.fileno(), "w", encoding=old.encoding, errors=old.errors, closefd=False)  # noqa: SIM115
    except (OSError, AttributeError, ValueError):
        new = open(os.devnull, "w")  # noqa: SIM115
    setattr(sys, name, new)


def text_table(alignment: str, rows: Sequence[Sequence[str]], indent: int = 0) -> list[str]:
    """Return the lines of a table. Each column is as wide as its longest cell.

    Args:
        alignment: ``<`` (left) or ``>`` (right) for each column.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = (f"{cell:{side}{width}}" for cell, side, width in zip(row, alignment, widths, strict=True))
        lines.append((" " * indent + "  ".join(cells)).rstrip())
    return lines
