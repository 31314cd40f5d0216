"""The nodes' output: which files hold it, and what is new in them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

__all__ = ["LogFile", "log_files", "read_tail"]

TAIL_BYTES = 256 * 1024
"""Last part of a file that tells why a node ended: tracebacks of all ranks fit, hours of progress bars do not."""

LONG_LINE_BYTES = 64 * 1024
"""Length of an unfinished line from which on only its newest state is kept, as a progress bar shows it."""


def read_tail(file: Path, num_bytes: int = TAIL_BYTES) -> str:
    """The end of a file, from the start of a line.

    Raises:
        OSError: it cannot be read.
    """
    with file.open("rb") as stream:
        size = stream.seek(0, os.SEEK_END)
        stream.seek(max(0, size - num_bytes))
        tail = stream.read(num_bytes)
    if size > num_bytes:
        tail = re.split(rb"[\r\n]", tail, maxsplit=1)[-1]
    return tail.decode(errors="replace")


def log_files(folder: Path) -> dict[str, list[Path]]:
    """Files of each node's output in a job's folder of logs, in the order in which the nodes were started."""
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
    """A file that is being written, read line by line."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.num_read = 0  # bytes that are not read again

    def skip(self) -> None:
        """Leave out what is there already."""
        self.num_read = self.file.stat().st_size

    def new_lines(self, whole: bool) -> Iterator[str]:
        """Lines since the last call.

        Args:
            whole: the last one is given, too, though its end is missing: nothing more will come.
        """
        with self.file.open("rb") as stream:
            stream.seek(self.num_read)
            chunk = stream.read()
        if not whole:
            if len(chunk) > LONG_LINE_BYTES and b"\n" not in chunk:
                self.num_read += chunk.rfind(b"\r") + 1  # or it would be read again with each call
            chunk = chunk[: chunk.rfind(b"\n") + 1]
        self.num_read += len(chunk)
        for line in chunk.decode(errors="replace").removesuffix("\n").split("\n") if chunk else []:
            # A progress bar writes over its line: its last state is enough.
            yield line.rstrip("\r").rsplit("\r", 1)[-1]
