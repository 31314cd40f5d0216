"""Determine why a node failed, from the output of the node and its worker."""

from __future__ import annotations

import itertools
import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass

from lightning_dlrover.components.control.tracebacks import RANK_PREFIX, START, place_of

__all__ = ["PostMortem", "examine"]

_CHAINED = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)
_AGENT_LINE = re.compile(r"[DIWEF]\d{4} \d\d:\d\d:\d\d")
_AGENT_FILE = "torch/distributed/run.py"
_OUR_FILE = "/lightning_dlrover/"
_START_OF_MODULE = re.compile(r'File "(?:<frozen runpy>|.*/runpy\.py)", line \d+, in _run_module_as_main')
_CAUSE = re.compile(r"(?:this machine|Kubernetes|Slurm): (.+)$")
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


def examine(output: str) -> PostMortem:
    """Determine why the node with this output failed.

    To a scheduler, a killed node and one whose script raised an error look alike. Only the killed one is worth restarting
    without further analysis.
    """
    lines = [RANK_PREFIX.sub("", line, count=1) for line in output.splitlines()]
    cause = said[1] if lines and (said := _CAUSE.search(lines[-1])) else ""
    tracebacks = list(_tracebacks(lines))
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


def _has_ended_agent(traceback: list[str], before_torchrun: bool) -> bool:
    """Whether the agent's process has ended with this error: one that was handled has no such outer frames."""
    if any(_AGENT_FILE in line for line in traceback):
        return True
    return before_torchrun and any(_START_OF_MODULE.search(x) for x in traceback) and any(_OUR_FILE in x for x in traceback)


def _signal(code: int) -> str:
    """Return the name of the signal behind an exit code of Python or a shell; empty if it stands for none."""
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
    said = next((line for line in reversed(lines[:end]) if line.strip() and not _AGENT_LINE.match(line)), "")
    return f": {said}" if said else ""


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
