"""Read Python's tracebacks in the output of nodes, and show each error of the script once.

An error that this package raises names the cause and the next move, so its traceback is left out: it leads through our code.
The files of the nodes' output keep all of them.
"""

from __future__ import annotations

import contextlib
import re
import signal
from collections.abc import Iterator, Sequence

__all__ = ["RANK_PREFIX", "START", "ShownTracebacks", "SignalFilter", "TracebackFilter", "place_of"]

START = "Traceback (most recent call last):"
RANK_PREFIX = re.compile(r"(?:\[(?:rank|default)?\d+\]:? ?)+")

_FRAME = re.compile(r'\s+File "(?P<file>.+)", line (?P<line>\d+), in (?P<function>.+)')
_LIBRARY = re.compile(r"/(?:site|dist)-packages/|/lightning_dlrover/|/lib/python3|^<frozen |^<string>$")
_LOOPS = re.compile(r"/(?:lightning/(?:pytorch|fabric)|pytorch_lightning|lightning_fabric)/")
_OWN_ERROR = re.compile(r"lightning_dlrover\.(?:\w+\.)*(?P<error>\w+: .+)", re.S)
_SIGNAL = re.compile(r"torch\.distributed\.elastic\.multiprocessing\.api\.SignalException: .* got signal: (?P<number>\d+)")
_MAX_REPEATED = 120
"""Characters of an error's message when it is shown again."""

_MAX_LINES = 5000
"""Lines after which a traceback without an end is shown as it is."""

Identity = tuple[str, ...]


def place_of(traceback: Sequence[str]) -> str:
    """Return the innermost frame of the script, as file, line and function; empty if it had only called Lightning there."""
    last_start = max((i for i, line in enumerate(traceback) if line.startswith(START)), default=0)
    for frame in reversed([match for line in traceback[last_start:] if (match := _FRAME.match(line))]):
        if not _LIBRARY.search(frame["file"]):
            return f"{frame['file']}:{frame['line']} ({frame['function']})"
        if _LOOPS.search(frame["file"]):
            return ""
    return ""


class ShownTracebacks:
    """The tracebacks of one job that were shown, by type of the error and its two innermost frames.

    Outer frames differ: a worker reports an error where Lightning catches it, and prints it at its end.
    """

    def __init__(self) -> None:
        self._shown: set[Identity] = set()

    def add(self, traceback: Sequence[str]) -> bool:
        """Note one traceback, from its first line to that of the error. Return whether it was not shown before."""
        identity = _identity(traceback)
        is_new = identity not in self._shown
        self._shown.add(identity)
        return is_new

    def __contains__(self, text: str) -> bool:
        """Whether the last traceback in a text was shown."""
        lines = text.splitlines()
        start = max((i for i, line in enumerate(lines) if line.startswith(START)), default=None)
        if start is None:
            return False
        end = next((i for i in range(start + 1, len(lines)) if _ends(lines[i])), len(lines) - 1)
        error, *frames = _identity(lines[start : end + 1])
        # A report may begin at the innermost frame.
        return any(shown[0] == error and [*shown[1:]][-len(frames) :] == frames for shown in self._shown)


class _Filter:
    """Lines of one file, whose tracebacks are held until they are whole."""

    def __init__(self) -> None:
        self._held: list[str] = []  # lines of a traceback whose end has not come

    def lines(self, line: str) -> Iterator[str]:
        """Yield what to show once `line` has come."""
        plain = RANK_PREFIX.sub("", line, count=1)
        if plain.startswith(START):
            yield from self.rest()
            self._held.append(line)
        elif not self._held:
            yield line
        else:
            self._held.append(line)
            if _ends(plain):
                held, self._held = self._held, []
                yield from self._shown_of(held, line, plain)
            elif len(self._held) > _MAX_LINES:
                yield from self.rest()

    def rest(self) -> Iterator[str]:
        """Yield the lines of a traceback that has no end."""
        held, self._held = self._held, []
        yield from held

    def _shown_of(self, held: list[str], line: str, plain: str) -> Iterator[str]:
        """Yield what to show of a traceback, whose last line is `line`, and `plain` without its rank."""
        raise NotImplementedError


class TracebackFilter(_Filter):
    """Shows one line for each traceback that was shown before."""

    def __init__(self, shown: ShownTracebacks) -> None:
        super().__init__()
        self._shown = shown

    def _shown_of(self, held: list[str], line: str, plain: str) -> Iterator[str]:
        traceback = [RANK_PREFIX.sub("", each, count=1) for each in held]
        is_new, own = self._shown.add(traceback), _OWN_ERROR.fullmatch(plain)
        rank, error = line.removesuffix(plain), own["error"] if own is not None else plain
        if is_new and own is None:
            yield from held
        elif is_new:
            at = place_of(traceback)
            yield f"{rank}{error} (at {at})" if at else f"{rank}{error}"
        else:
            yield f"{rank}{_shortened(error)} ({'its traceback was ' if own is None else ''}shown above)"


class SignalFilter(_Filter):
    """Shows one line for the traceback with which torch's agent ends at a signal, and all others as they are."""

    def _shown_of(self, held: list[str], line: str, plain: str) -> Iterator[str]:
        if (found := _SIGNAL.search(plain)) is None:
            yield from held
            return
        with contextlib.suppress(ValueError):
            yield f"this node's agent was ended by {signal.Signals(int(found['number'])).name}"


def _shortened(message: str) -> str:
    return message if len(message) <= _MAX_REPEATED else message[:_MAX_REPEATED].rstrip() + "..."


def _ends(line: str) -> bool:
    """Whether a line after a traceback's first one names the error."""
    return bool(line) and not line[0].isspace()


def _identity(traceback: Sequence[str]) -> Identity:
    frames = [f"{match['file']}:{match['line']}" for line in traceback if (match := _FRAME.match(line))]
    return (traceback[-1].partition(":")[0], *frames[-2:])
