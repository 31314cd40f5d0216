"""Files with the nodes' output, and the new lines in them."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

__all__ = ["LogFile", "log_files", "read_tail", "set_aside"]

TAIL_BYTES = 256 * 1024
"""Bytes at a file's end to search for why a node ended: all ranks' tracebacks fit, hours of progress bars do not."""

LONG_LINE_BYTES = 64 * 1024
"""Bytes of an unfinished line above which only its newest state is kept, as for a progress bar."""


PIECE_BYTES = 256 * 1024
"""Bytes to read at once. A longer line is given in parts."""


def set_aside(file: Path) -> None:
    """Rename a file of an earlier job with a node of this name, so that its content does not count as the new node's.

    `log_files` finds the new name no more. An even earlier file of that name is lost.

    Raises:
        OSError: the file cannot be renamed.
    """
    with contextlib.suppress(FileNotFoundError):
        file.replace(file.with_name(f"former-{file.name}"))


def read_tail(file: Path, num_bytes: int = TAIL_BYTES) -> str:
    """Return the end of a file, from the start of a line.

    Raises:
        OSError: the file cannot be read.
    """
    with file.open("rb") as stream:
        size = stream.seek(0, os.SEEK_END)
        stream.seek(max(0, size - num_bytes))
        tail = stream.read(num_bytes)
    if size > num_bytes:
        tail = re.split(rb"[\r\n]", tail, maxsplit=1)[-1]
    return tail.decode(errors="replace")


def log_files(folder: Path) -> dict[str, list[Path]]:
    """Return each node's output files in a job's log folder, in the order of the nodes' start."""
    found: dict[str, list[Path]] = {}
    for name in ("stdout", "stderr"):
        for file in sorted(folder.rglob(f"{name}.log")):
            # Slurm: node3/stdout.log. TorchX's local scheduler: SESSION/node3-x1y2z3/worker/0/stdout.log.
            parts = file.relative_to(folder).parts
            node = next((match[1] for part in parts if (match := re.match(r"(node\d+)(?:-|$)", part))), None)
            if node is not None:
                found.setdefault(node, []).append(file)
    return dict(sorted(found.items(), key=lambda item: int(item[0].removeprefix("node"))))


class LogFile:
    """Read a growing file line by line."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.num_read = 0  # bytes already read

    def skip(self) -> None:
        """Skip the existing content."""
        self.num_read = self.file.stat().st_size

    def new_lines(self, whole: bool) -> Iterator[str]:
        """Yield the lines since the last call. The file is read in pieces, so it may be of any size.

        A file that has become shorter, as logrotate's `copytruncate` makes it, is read from its start.

        Args:
            whole: the file is complete, so an unfinished last line is included.
        """
        with self.file.open("rb") as stream:
            if stream.seek(0, os.SEEK_END) < self.num_read:
                self.num_read = 0
                yield f"({self.file.name} was cut short, so some of its lines may be missing here)"
            stream.seek(self.num_read)
            rest = b""  # a line whose end has not come
            while piece := stream.read(PIECE_BYTES):
                *lines, rest = (rest + piece).split(b"\n")
                for line in lines:
                    self.num_read += len(line) + 1
                    yield _newest_state(line)
                if len(rest) > LONG_LINE_BYTES:  # otherwise each call would read it again
                    num_passed = rest.rfind(b"\r", 0, -1) + 1
                    self.num_read += num_passed
                    rest = rest[num_passed:]
                if len(rest) > PIECE_BYTES:
                    self.num_read += len(rest)
                    yield _newest_state(rest)
                    rest = b""
            if rest and whole:
                self.num_read += len(rest)
                yield _newest_state(rest)


def _newest_state(line: bytes) -> str:
    """Return what is left of a line that a progress bar has overwritten."""
    return line.decode(errors="replace").rstrip("\r").rsplit("\r", 1)[-1]
