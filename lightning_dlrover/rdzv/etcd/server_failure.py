"""Extract from etcd's output the reason for a failed start, in one line, and suggest a remedy."""

from __future__ import annotations

import json
import re
import signal

__all__ = ["advice", "ending", "reason"]

_MAX_CHARACTERS = 400

_REMEDIES = (
    (r"no space left|disk quota exceeded", "free space there, or choose another folder (TMPDIR)"),
    (r"file descriptor limit|too many open files", "raise the limit of open files (ulimit -n) to 150 or more"),
    (r"file too large", "raise the limit of file sizes (ulimit -f)"),
    (r"pthread_create|newosproc|resource temporarily unavailable", "raise the limit of processes and threads (ulimit -u)"),
    (r"cannot allocate memory|out of memory|failed to reserve", "give it more memory: 256 MiB, and no ulimit -v"),
    (r"SIGKILL", "another process killed it, or the host ran out of memory (dmesg shows that); it needs 256 MiB"),
    (r"permission denied|read-only file system", "make the folder writable, or choose another one (TMPDIR)"),
)


def reason(log: str) -> str:
    """Return the fatal message in the log of etcd or of the Go runtime, empty if there is none."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    for levels in ({"fatal", "panic"}, {"error"}):
        for line in reversed(lines):
            entry = _entry(line)
            if entry.get("level") in levels:
                skipped = ("level", "ts", "caller", "msg", "stacktrace")
                details = [f"{key} {value}" for key, value in entry.items() if key not in skipped]
                return _short(
                    ": ".join([str(entry.get("msg", "")), ", ".join(details)]) if details else str(entry.get("msg", ""))
                )
        # Messages of the Go runtime or its C library have no level, and the first one is the cause.
        for line in lines:
            if re.match(r"(fatal error|panic|runtime|runtime/cgo|\S*etcd): ", line):
                return _short(line)
    return _short(lines[-1]) if lines and not _entry(lines[-1]) else ""


def advice(problem: str) -> str:
    """Return the remedy for a common problem, empty for any other."""
    return next((remedy for pattern, remedy in _REMEDIES if re.search(pattern, problem, re.IGNORECASE)), "")


def ending(exit_code: int) -> str:
    """Describe how a process ended, given its exit code from `subprocess`."""
    if exit_code >= 0:
        return f"exited with code {exit_code}"
    try:
        return f"was killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"was killed by signal {-exit_code}"


def _entry(line: str) -> dict[str, object]:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return entry if isinstance(entry, dict) else {}


def _short(text: str) -> str:
    return text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]} ..."
