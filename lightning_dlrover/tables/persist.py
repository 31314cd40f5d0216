"""Copy parts of snapshots from shared memory to disk, in a separate process of the lowest priority, so that nothing waits.

Its worker writes a line of JSON to its standard input for each part: `from` and `to`. An empty line on its output acknowledges
the part. A part that is overwritten during the copy is discarded; its first bytes show that (see `snapshot_store.py`). The
process ends when its input does. Only the standard library is imported.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

CHUNK_BYTES = 8 << 20
HEAD_BYTES = 4096
"""Bytes that show whether a part is still the same: its header begins with the snapshot's name."""

NUM_KEPT = 2
"""Number of snapshots that stay on disk."""

PREFIX = struct.Struct("<8sQQQ")
"""Prefix of a part's header: magic, whether it is complete, length of the header, offset of the values."""

MAX_HEADER_BYTES = 1 << 28


class Persister:
    """The worker's side: starts the process at its first use."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._num_waiting = 0

    def persist(self, source: Path, target: Path) -> None:
        """Start the copy of a part and return at once. An older part that is still being copied is finished first."""
        if self._process is None or self._process.poll() is not None:
            command = [sys.executable, "-m", __name__]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            assert self._process.stdout is not None
            os.set_blocking(self._process.stdout.fileno(), False)
            self._num_waiting = 0
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the process was ended; another one is started for the next part
            self._process.stdin.write(json.dumps({"from": str(source), "to": str(target)}).encode() + b"\n")
            self._process.stdin.flush()
            self._num_waiting += 1

    @property
    def is_busy(self) -> bool:
        """Whether parts are still being copied."""
        if self._process is None or self._process.poll() is not None:
            return False
        assert self._process.stdout is not None
        with contextlib.suppress(BlockingIOError):
            self._num_waiting -= os.read(self._process.stdout.fileno(), 4096).count(b"\n")
        return self._num_waiting > 0

    def close(self, timeout_s: float = 60.0) -> None:
        """Let the process end after its present part."""
        if self._process is None:
            return
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


def persist(source: Path, target: Path) -> bool:
    """Copy a part; False if it was overwritten during the copy or is missing."""
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(f".{target.name}.unfinished")
    try:
        with source.open("rb") as part, unfinished.open("wb") as copy:
            head = part.read(HEAD_BYTES)
            copy.write(head)
            while chunk := part.read(CHUNK_BYTES):
                copy.write(chunk)
            copy.flush()
            os.fsync(copy.fileno())
            part.seek(0)
            if part.read(HEAD_BYTES) != head:
                unfinished.unlink()
                return False
        unfinished.rename(target)
    except FileNotFoundError:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        return False
    return True


def keep_newest(target: Path) -> None:
    """Remove obsolete parts next to `target`, a worker's part of its newest snapshot on disk.

    These are all snapshots before the newest complete ones, with the parts of workers that have left, and this worker's older
    parts of newer snapshots that the others have not completed.
    """
    folders = sorted((folder for folder in target.parent.parent.iterdir() if folder.is_dir()), reverse=True)
    complete = [folder for folder in folders if _is_complete(folder)][:NUM_KEPT]
    mine = [folder for folder in folders if (folder / target.name).exists()]
    for folder in folders:
        if len(complete) == NUM_KEPT and folder < complete[-1]:
            shutil.rmtree(folder, ignore_errors=True)
        elif folder in mine[NUM_KEPT:] and folder not in complete:
            with contextlib.suppress(OSError):
                (folder / target.name).unlink()
                folder.rmdir()  # fails while it has others' parts


def parts_in(folder: Path) -> list[Path]:
    """Return the finished parts, without copies cut short by their process's end."""
    return sorted(path for path in folder.glob("*-*-*") if not path.name.startswith("."))


def _is_complete(folder: Path) -> bool:
    """Return whether the parts of all workers of a snapshot are there; each part's header contains their number."""
    parts = parts_in(folder)
    with contextlib.suppress(OSError, ValueError, LookupError, struct.error), parts[0].open("rb") as part:
        _, _, length, _ = PREFIX.unpack(part.read(PREFIX.size))
        return len(parts) >= len(json.loads(part.read(min(length, MAX_HEADER_BYTES)))["members"])
    return False


def main() -> None:
    os.nice(19)
    for line in sys.stdin:
        request = json.loads(line)
        target = Path(request["to"])
        try:
            if persist(Path(request["from"]), target):
                keep_newest(target)
        except OSError as error:
            print(f"a snapshot was not written to {target}: {error.strerror}", file=sys.stderr, flush=True)
        with contextlib.suppress(OSError):  # the worker has ended
            os.write(1, b"\n")


if __name__ == "__main__":
    main()
