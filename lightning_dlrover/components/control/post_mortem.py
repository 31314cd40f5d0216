"""The output of nodes: which lines of it are shown, and why a node failed.

`examine` determines the cause of a failure. `ShownLog` follows a file of output, and shows each traceback once.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import signal
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_dlrover.components.targets.target import CANNOT_START, LogFile

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
    """Lines of one file. Lines of a traceback are held back until it is complete."""

    def __init__(self) -> None:
        self._held: list[str] = []  # lines of an incomplete traceback

    def shown(self, lines: Iterable[str], is_complete: bool) -> Iterator[str]:
        """Yield the lines to show of new ones; with `is_complete`, no others follow."""
        for line in lines:
            plain = RANK_PREFIX.sub("", line, count=1)
            is_start = plain.startswith(START)
            if is_start:
                yield from self._released()
            if not is_start and not self._held:
                yield line
                continue
            self._held.append(line)
            if not is_start and _ends(plain):
                yield from self._shown_of(self._released(), line, plain)
            elif len(self._held) > _MAX_LINES:
                yield from self._released()
        if is_complete:
            yield from self._released()

    def _released(self) -> list[str]:
        held, self._held = self._held, []
        return held

    def _shown_of(self, held: list[str], line: str, plain: str) -> Iterator[str]:
        """Yield the lines to show of a traceback. Its last line is `line`, and `plain` without the rank."""
        raise NotImplementedError


class TracebackFilter(_Filter):
    """Shows one line for each traceback that was shown before.

    An error that this package raises names the cause and the next move, so it is always shown as one line: its traceback leads
    through our code. The files of the nodes' output keep all tracebacks.
    """

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
            error = error if len(error) <= _MAX_REPEATED else error[:_MAX_REPEATED].rstrip() + "..."
            yield f"{rank}{error} ({'its traceback was ' if own is None else ''}shown above)"


class ShownLog:
    """A growing file of output, and the filter of its lines."""

    def __init__(self, file: Path, shown: _Filter) -> None:
        self._log = LogFile(file)
        self._filter = shown
        self.skip = self._log.skip

    def new_lines(self, whole: bool) -> list[str]:
        """Return the lines to show since the last call; with `whole`, the file is complete."""
        return list(self._filter.shown(list(self._log.new_lines(whole)), whole))


class SignalFilter(_Filter):
    """Replaces the traceback of torch's agent after a signal by one line, and passes all others unchanged."""

    def _shown_of(self, held: list[str], line: str, plain: str) -> Iterator[str]:
        if (found := _SIGNAL.search(plain)) is None:
            yield from held
            return
        with contextlib.suppress(ValueError):
            yield f"this node's agent was ended by {signal.Signals(int(found['number'])).name}"


def _ends(line: str) -> bool:
    """Whether a line after a traceback's first one names the error."""
    return bool(line) and not line[0].isspace()


def _identity(traceback: Sequence[str]) -> Identity:
    frames = [f"{match['file']}:{match['line']}" for line in traceback if (match := _FRAME.match(line))]
    return (traceback[-1].partition(":")[0], *frames[-2:])


_CHAINED = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)
_AGENT_LINE = re.compile(r"[DIWEF]\d{4} \d\d:\d\d:\d\d")
_AGENT_FILE = "torch/distributed/run.py"
_OUR_FILE = "/lightning_dlrover/"
_START_OF_MODULE = re.compile(r'File "(?:<frozen runpy>|.*/runpy\.py)", line \d+, in _run_module_as_main')
_CAUSE = re.compile(r"(?:this machine|Kubernetes|Slurm): (.+)$")
_NO_PACKAGE = re.compile(r"(?:Error while finding module specification for '|No module named '?)lightning_dlrover\b")
_EXIT_CODE = re.compile(r"exitcode\s*: (-?\d+)")

_FATAL = "Fatal Python error:"
_FATAL_LINES = 40

# SIGHUP, SIGINT, SIGKILL, SIGTERM, as Python and as a shell report them. Another process ended this one.
_ENDED_BY_OTHERS = {sign for number in (1, 2, 9, 15) for sign in (-number, 128 + number)}

# SIGILL, SIGTRAP, SIGABRT, SIGBUS, SIGFPE, SIGSEGV: faults of the process itself. A shell reports them as 128 more.
_FAULTS = {4, 5, 6, 7, 8, 11}


@dataclass(frozen=True)
class PostMortem:
    """Cause of a node's failure."""

    error: str  # one line; empty if another process ended it
    traceback: str  # empty if there is none
    place: str = ""  # innermost frame of the script; empty if the error was raised outside of its code
    cause: str = ""  # the place's reason for ending it, if it was appended to the node's output
    could_not_start: bool = False  # its command never ran


def examine(output: str) -> PostMortem:
    """Determine why the node with this output failed.

    To a scheduler, a killed node and a node with an error in its script look the same. Only the killed one is worth restarting
    without further analysis.
    """
    lines = [RANK_PREFIX.sub("", line, count=1) for line in output.splitlines()]
    cause = found[1] if lines and (found := _CAUSE.search(lines[-1])) else ""
    tracebacks = list(_tracebacks(lines))
    if not tracebacks and (why := _why_not_started(lines, cause)):
        return PostMortem(why, "", cause=cause, could_not_start=True)
    own = next((t for t in tracebacks if not any(_AGENT_FILE in line for line in t)), None)
    codes = [int(code) for code in _EXIT_CODE.findall(output)]
    faults = [code for code in codes if code not in _ENDED_BY_OTHERS]
    if faults and (name := _signal(faults[0])):
        # A warning above is unrelated. A traceback may be, too, or the process received the signal while exiting after it.
        after = f", after {_message(own)}" if own else ""
        text = "\n".join([*(own or []), *_fatal_error(lines)])
        return PostMortem(f"the script was ended by {name}{after}", text, cause=cause)
    if faults:
        error = _message(own) if own else f"the script ended with exit code {faults[0]}{_last_words(lines)}"
        return PostMortem(error, "\n".join(own or []), place_of(own or []), cause)
    if codes:
        return PostMortem("", "", cause=cause)
    # No worker has failed, so the agent itself has: it was killed, received a signal, or could not start a worker.
    signalled = any("SignalException" in _message(t) for t in tracebacks)
    for fault in tracebacks:
        if "SignalException" not in _message(fault) and _has_ended_agent(fault, before_torchrun=not signalled):
            return PostMortem(_message(fault), "\n".join(fault), cause=cause)
    # A script may log the traceback of an error that it handles, long before its node is killed as a whole. Only one that
    # nothing follows, not even the reason of the place, is the end of the node.
    last = tracebacks[-1] if tracebacks and not cause and not signalled else []
    if last and _message(last) == next(line for line in reversed(lines) if line):
        return PostMortem(_message(last), "\n".join(last))
    return PostMortem("", "", cause=cause)


def _why_not_started(lines: Sequence[str], cause: str) -> str:
    """Return why a node's command never ran; empty if it did."""
    if cause.startswith(CANNOT_START):
        return cause
    last = next((line for line in reversed(lines) if line and not _CAUSE.match(line)), "")
    return f"its Python has no package lightning_dlrover: {last}" if _NO_PACKAGE.search(last) else ""


def _has_ended_agent(traceback: list[str], before_torchrun: bool) -> bool:
    """Whether the agent's process has ended with this error: one that was handled has no such outer frames."""
    if any(_AGENT_FILE in line for line in traceback):
        return True
    return before_torchrun and any(_START_OF_MODULE.search(x) for x in traceback) and any(_OUR_FILE in x for x in traceback)


def _signal(code: int) -> str:
    """Return the name of the signal behind an exit code of Python or a shell; empty for any other exit code."""
    number = -code if code < 0 else code - 128
    if code >= 0 and number not in _FAULTS:
        return ""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _fatal_error(lines: list[str]) -> list[str]:
    """Return the report of Python's faulthandler on the last fatal signal."""
    start = next((i for i in reversed(range(len(lines))) if lines[i].startswith(_FATAL)), len(lines))
    return list(itertools.takewhile(lambda line: not _AGENT_LINE.match(line), lines[start : start + _FATAL_LINES]))


def _last_words(lines: list[str]) -> str:
    """Return the script's last line of output before its agent reported the failure."""
    end = next((i for i, line in enumerate(lines) if _AGENT_LINE.match(line) and "failed (exitcode" in line), 0)
    last = next((line for line in reversed(lines[:end]) if line.strip() and not _AGENT_LINE.match(line)), "")
    return f": {last}" if last else ""


def _tracebacks(lines: list[str]) -> Iterator[list[str]]:
    """Yield tracebacks with their chained exceptions, in the order of output."""
    start = 0
    while start < len(lines):
        if not lines[start].startswith(START):
            start += 1
            continue
        end = start + 1
        while end < len(lines):
            line = lines[end]
            if _AGENT_LINE.match(line) or line.startswith(START):
                break
            if line == "":
                if end + 1 < len(lines) and lines[end + 1] in _CHAINED:
                    end += 4  # skips the chaining sentence, an empty line, and the next traceback's first line
                    continue
                break
            end += 1
        yield lines[start : min(end, len(lines))]
        start = end


def _message(traceback: list[str]) -> str:
    """Return the line of the last exception."""
    last_start = max((i for i, line in enumerate(traceback) if line.startswith(START)), default=0)
    return next((line for line in traceback[last_start + 1 :] if line and not line.startswith(" ")), "")
