"""Say why a node failed, from what it and its worker printed."""

from __future__ import annotations

import itertools
import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["PostMortem", "examine"]

_START = "Traceback (most recent call last):"
_CHAINED = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)
_AGENT_LINE = re.compile(r"[DIWEF]\d{4} \d\d:\d\d:\d\d")
_AGENT_FILE = "torch/distributed/run.py"
_RANK_PREFIX = re.compile(r"\[(?:rank|default)?\d+\]:? ?")
_CAUSE = re.compile(r"(?:this machine|Kubernetes|Slurm): (.+)$")
_EXIT_CODE = re.compile(r"exitcode\s*: (-?\d+)")

_FATAL = "Fatal Python error:"
_FATAL_LINES = 40

# SIGHUP, SIGINT, SIGKILL, SIGTERM, as Python and as a shell report them: somebody ended the process, it did not end itself.
_ENDED_BY_OTHERS = {sign for number in (1, 2, 9, 15) for sign in (-number, 128 + number)}

# SIGILL, SIGTRAP, SIGABRT, SIGBUS, SIGFPE, SIGSEGV: faults of the process itself. A shell reports them as 128 more.
_FAULTS = {4, 5, 6, 7, 8, 11}


@dataclass(frozen=True)
class PostMortem:
    """Why a node failed."""

    error: str  # one line; empty when somebody else ended it
    traceback: str  # empty if there is none
    cause: str = ""  # why its place has ended it, if that has said so below the node's output


def examine(output: str) -> PostMortem:
    """Why the node with this output failed.

    A killed node and one whose script raised an error look alike to a scheduler, but only the first is worth
    starting again without further thought.
    """
    lines = [_RANK_PREFIX.sub("", line, count=1) for line in output.splitlines()]
    cause = said[1] if lines and (said := _CAUSE.search(lines[-1])) else ""
    tracebacks = list(_tracebacks(lines))
    own = next((t for t in tracebacks if not any(_AGENT_FILE in line for line in t)), None)
    codes = [int(code) for code in _EXIT_CODE.findall(output)]
    faults = [code for code in codes if code not in _ENDED_BY_OTHERS]
    if faults and (name := _signal(faults[0])):
        # A warning above is of something else. A traceback may be, or the process met the signal while it ended after that.
        after = f", after {_message(own)}" if own else ""
        return PostMortem(f"the script was ended by {name}{after}", "\n".join([*(own or []), *_fatal_error(lines)]), cause)
    if faults:
        error = _message(own) if own else f"the script ended with exit code {faults[0]}{_last_words(lines)}"
        return PostMortem(error, "\n".join(own or []), cause)
    if codes:
        return PostMortem("", "", cause)
    # No worker has failed, so the agent itself has: it was killed, was told to end, or could not even start one.
    agents = [t for t in tracebacks if t is not own and "SignalException" not in _message(t)]
    if agents or (own and not any("SignalException" in _message(t) for t in tracebacks)):
        fault = agents[0] if agents else own or []
        return PostMortem(_message(fault), "\n".join(fault), cause)
    return PostMortem("", "", cause)


def _signal(code: int) -> str:
    """Name of the signal that an exit code of Python's or of a shell stands for; empty if it stands for none."""
    number = -code if code < 0 else code - 128
    if code >= 0 and number not in _FAULTS:
        return ""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _fatal_error(lines: list[str]) -> list[str]:
    """What Python's faulthandler has written about the last fatal signal."""
    start = next((i for i in reversed(range(len(lines))) if lines[i].startswith(_FATAL)), len(lines))
    return list(itertools.takewhile(lambda line: not _AGENT_LINE.match(line), lines[start : start + _FATAL_LINES]))


def _last_words(lines: list[str]) -> str:
    """What the script printed last, before its agent said that it has failed."""
    end = next((i for i, line in enumerate(lines) if _AGENT_LINE.match(line) and "failed (exitcode" in line), 0)
    said = next((line for line in reversed(lines[:end]) if line.strip() and not _AGENT_LINE.match(line)), "")
    return f": {said}" if said else ""


def _tracebacks(lines: list[str]) -> Iterator[list[str]]:
    """Tracebacks with everything that Python chains to them, in the order in which they were printed."""
    start = 0
    while start < len(lines):
        if not lines[start].startswith(_START):
            start += 1
            continue
        end = start + 1
        while end < len(lines):
            line = lines[end]
            if _AGENT_LINE.match(line) or line.startswith(_START):
                break
            if line == "":
                if end + 1 < len(lines) and lines[end + 1] in _CHAINED:
                    end += 4  # the sentence, an empty line, and the next traceback's first line
                    continue
                break
            end += 1
        yield lines[start : min(end, len(lines))]
        start = end


def _message(traceback: list[str]) -> str:
    """The last exception's own line."""
    last_start = max((i for i, line in enumerate(traceback) if line.startswith(_START)), default=0)
    return next((line for line in traceback[last_start + 1 :] if line and not line.startswith(" ")), "")
