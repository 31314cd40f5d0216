"""Storage for the parts of snapshots: files in the hosts' shared memory, and on disk.

Each worker has two slots for its own part and for each copy, so that the former part is valid until the next one is. The files
remain when a worker is killed, so another worker on the same host finds them, even if it starts later.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import shutil
import struct
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import torch

from lightning_dlrover.rdzv.job.snapshot_folders import (
    JOB_FILE,
    ROOT,
    hold,
    is_held,
    is_private,
    short,
    users_folder,
)
from lightning_dlrover.tables.arena import touch
from lightning_dlrover.tables.persist import PREFIX, parts_in
from lightning_dlrover.tables.snapshot import MAGIC, Part, PartHeader, PartWriter, SnapshotError

__all__ = ["SnapshotStore"]

log = logging.getLogger(__name__)

ALIGN = 4096

SLACK_BYTES = 8 << 20
"""Bytes, beside a quarter of a part, by which its memory may exceed the part."""


class SnapshotStore:
    """The parts that this host's workers of one job hold.

    Args:
        job: name of the job; workers of other jobs do not see its parts.
        life: distinguishes it from former jobs of that name; their parts are removed.
        holder: this worker.
        fit: number of the script's `fit`, from 1; parts of earlier ones are removed.
        max_bytes: limit for this worker's parts, its own and copies; None: half of the free shared memory at the start.
        disk: folder, visible to all hosts, for copies that survive the loss of all hosts' memory.

    Raises:
        SnapshotError: shared memory is missing, or another user owns the folder in it.
    """

    def __init__(
        self,
        job: str,
        holder: str,
        max_bytes: int | None = None,
        disk: Path | None = None,
        root: Path = ROOT,
        life: str = "",
        fit: int = 1,
    ) -> None:
        if not root.is_dir():
            raise SnapshotError(f"{root} is not there: this system has no shared memory to keep snapshots in")
        self._job, self._life = short(job), short(life)
        self.folder = users_folder(root) / self._name_of_fit(fit)
        self._disk = disk.absolute() / self.folder.name if disk is not None else None
        self.holder = holder
        self._mark: BinaryIO | None = None  # shows others that a worker of the job lives on this host
        self._make_folder()
        self._remove_former(fit)
        self.max_bytes = max_bytes if max_bytes is not None else shutil.disk_usage(root).free // 2
        self._mappings: dict[Path, mmap.mmap] = {}
        self._creating = threading.Lock()
        self._is_closed = False

    def begin_fit(self, number: int) -> None:
        """Switch to the snapshots of a later `fit`, and remove those of earlier ones, because each counts batches from 0."""
        self._mappings = {}
        self._mark = None
        self.folder = self.folder.with_name(self._name_of_fit(number))
        self._disk = self._disk.with_name(self.folder.name) if self._disk is not None else None
        self._remove_former(number)

    def _name_of_fit(self, number: int) -> str:
        return f"{self._job}-{self._life}" + (f"-{number}" if number > 1 else "")

    def _remove_former(self, fit: int) -> None:
        """Remove the parts of former jobs of this name and of earlier fits, but not of later ones: this worker may lag."""
        earlier = {self._name_of_fit(number) for number in range(1, fit)}
        for parent in (self.folder.parent, *([self._disk.parent] if self._disk is not None else [])):
            for former in parent.glob(f"{self._job}-*"):
                if former.name in earlier or former.name.split("-")[1] != self._life:
                    shutil.rmtree(former, ignore_errors=True)

    def _make_folder(self) -> None:
        for folder in (self.folder.parent, self.folder):
            with contextlib.suppress(FileExistsError):
                folder.mkdir(mode=0o700)
            if not is_private(folder):
                raise SnapshotError(f"{folder} is not a folder of this user's alone: remove it, or switch snapshots off")
        mark = self.folder / JOB_FILE
        if self._mark is None or not mark.exists() or not os.path.samestat(os.fstat(self._mark.fileno()), mark.stat()):
            try:
                self._mark = hold(self.folder, self._disk)
            except OSError as error:
                raise SnapshotError(f"{mark} cannot be written: {error.strerror}") from error

    # --- writing -------------------------------------------------------------------------------------------------------

    def begin(self, header: PartHeader, keep: tuple[int, int] | None = None) -> PartWriter:
        """Make room for a part, in place of the older one of the same owner that this worker holds.

        Args:
            keep: name of the newest snapshot that counts; its part stays, even if there is a newer one.

        Raises:
            SnapshotError: it would take more memory than is allowed or available.
        """
        paths = [self._path(header.owner, slot) for slot in (0, 1)]
        path = min(paths, key=lambda p: ((name := self._name(p)) == keep, name))
        encoded = header.encode()
        start = -(-(PREFIX.size + len(encoded)) // ALIGN) * ALIGN
        size = start + header.num_bytes
        taken = sum(p.stat().st_size for p in self.folder.glob(f"{short(self.holder)}-*") if p != path)
        if taken + size > self.max_bytes:
            raise SnapshotError(
                f"a snapshot takes {size >> 20} MiB beside {taken >> 20} MiB, and {self.max_bytes >> 20} MiB are allowed "
                "(snapshot max_bytes); fewer replicas, or a higher limit, would do"
            )
        former = self._read(path) if path in self._mappings else None
        self._shrink(path, size)
        mapping = self._open(path, size)
        is_base = (
            former is not None
            and former.header.blocks == header.blocks
            and former.header.owner == header.owner
            and PREFIX.unpack_from(mapping)[3] == start
        )
        base = former.header.name if former is not None and is_base else None
        os.utime(path)  # a write through a mapping does not update the file's time, see `sweep`
        mapping[: PREFIX.size] = PREFIX.pack(MAGIC, 0, len(encoded), start)
        mapping[PREFIX.size : PREFIX.size + len(encoded)] = encoded
        return PartWriter(mapping, header, self.holder, start, paths.index(path), base)

    def _name(self, path: Path) -> tuple[int, int]:
        part = self._read(path) if path.exists() else None
        return part.header.name if part is not None else (-1, -1)

    def reserve(self, owner: str, num_bytes: int) -> None:
        """Reserve and touch memory for both parts of an owner, each of `num_bytes`.

        Raises:
            SnapshotError: it is more memory than is allowed or available.
        """
        size = num_bytes + (1 << 20)  # reserve for headers
        if 2 * size > self.max_bytes:
            raise SnapshotError(
                f"two snapshots of {size >> 20} MiB are more than the {self.max_bytes >> 20} MiB that are allowed "
                "(snapshot max_bytes)"
            )
        for slot in (0, 1):
            touch(self._open(self._path(owner, slot), size))

    def _open(self, path: Path, size: int) -> mmap.mmap:
        mapping = self._mappings.get(path)
        if mapping is not None and len(mapping) >= size and path.exists():
            return mapping
        try:
            with self._open_file(path) as file:
                # Allocated now, because a failure at the first use of a page would end the process.
                os.posix_fallocate(file.fileno(), 0, size)
                mapping = self._mappings[path] = mmap.mmap(file.fileno(), max(size, os.fstat(file.fileno()).st_size))
        except OSError as error:
            raise SnapshotError(f"no shared memory for a snapshot of {size >> 20} MiB: {error.strerror}") from error
        return mapping

    def _open_file(self, path: Path) -> BinaryIO:
        with self._creating:
            if self._is_closed:
                raise SnapshotError("no more memory is allocated for snapshots: this worker's part of the job has ended")
            self._make_folder()  # the folder may have been removed
            return path.open("a+b")

    def _shrink(self, path: Path, size: int) -> None:
        """Give back the memory of a part that was much larger, such as before its worker gave rows to others."""
        with contextlib.suppress(OSError):
            if path.stat().st_size > 1.25 * size + SLACK_BYTES:
                self._mappings.pop(path, None)  # the former content has no readers left and is about to be overwritten
                os.truncate(path, size)

    def _path(self, owner: str, slot: int) -> Path:
        return self.folder / f"{short(self.holder)}-{short(owner)}-{slot}"

    # --- reading -------------------------------------------------------------------------------------------------------

    def parts(self) -> list[Part]:
        """Return all complete parts on this host, also of workers that have ended; then those on disk."""
        paths = parts_in(self.folder)
        if self._disk is not None:
            paths += [path for folder in sorted(self._disk.glob("*")) for path in parts_in(folder)]
        return [part for path in paths if (part := self._read(path)) is not None]

    def part_of(self, owner: str, name: tuple[int, int]) -> Part | None:
        """Return the owner's own part of a snapshot, if it is in this host's memory and complete."""
        paths = (self.folder / f"{short(owner)}-{short(owner)}-{slot}" for slot in (0, 1))
        found = [part for path in paths if path.exists() and (part := self._read(path)) is not None]
        return next((part for part in found if part.header.name == name and part.header.owner == owner), None)

    def on_disk(self, name: tuple[int, int]) -> tuple[Path, Path] | None:
        """Return the path of this worker's own part of a snapshot, and its target on disk; None if it is missing."""
        if self._disk is None:
            return None
        path = next((p for slot in (0, 1) if self._name(p := self._path(self.holder, slot)) == name), None)
        # One name for both slots, so that older parts are found.
        target = self._path(self.holder, 0).name
        return (path, self._disk / f"{name[0]:08d}-{name[1]:012d}" / target) if path is not None else None

    def _read(self, path: Path) -> Part | None:
        try:
            if path in self._mappings:
                mapping = self._mappings[path]
            else:
                with path.open("rb") as file:
                    if os.fstat(file.fileno()).st_size == 0:
                        return None  # its memory is being reserved
                    mapping = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
            magic, is_complete, length, start = PREFIX.unpack_from(mapping)
            if magic != MAGIC or not is_complete:
                return None
            header = PartHeader.decode(mapping[PREFIX.size : PREFIX.size + length])
            values = torch.frombuffer(mapping, dtype=torch.uint8, count=header.num_bytes, offset=start)
        except (OSError, ValueError, OverflowError, struct.error, SnapshotError) as error:
            if path.exists():
                log.warning("ignored %s, which is not a part of a snapshot: %s", path, error)
            return None
        return Part(header, path.name.split("-")[0], values, path.parent == self.folder)

    # --- cleaning up ---------------------------------------------------------------------------------------------------

    @property
    def num_bytes(self) -> int:
        """Bytes of memory that this worker's parts take."""
        total = 0
        for path in self.folder.glob(f"{short(self.holder)}-*"):
            with contextlib.suppress(OSError):
                total += path.stat().st_size
        return total

    def drop_others(self, members: Sequence[str], owners: Sequence[str]) -> None:
        """Remove parts held by former members, and this worker's copies of parts of workers other than `owners`."""
        holders = {short(member) for member in members}
        wanted = {short(owner) for owner in (*owners, self.holder)}
        for path in self._files():
            holder, owner, _ = path.name.split("-")
            if holder not in holders or (holder == short(self.holder) and owner not in wanted):
                self._remove(path)

    def close(self) -> None:
        """Create no more files, not even from a thread that was left behind."""
        with self._creating:
            self._is_closed = True
            self._mark = None

    def clear(self) -> None:
        """Remove everything permanently, because the job has ended."""
        self.close()
        self.clear_memory()
        if self._disk is not None:
            shutil.rmtree(self._disk, ignore_errors=True)
        with contextlib.suppress(OSError):
            (self.folder / JOB_FILE).unlink(missing_ok=True)
            self.folder.rmdir()

    def clear_memory(self) -> None:
        """Remove all parts in memory, because no worker on this host will read them."""
        for path in self._files():
            self._remove(path)

    def _files(self) -> list[Path]:
        """Return the files of all workers of this host, without foreign files."""
        return [path for path in self.folder.glob("*-*-*") if path.name.count("-") == 2]

    def _remove(self, path: Path) -> None:
        self._mappings.pop(path, None)
        with contextlib.suppress(OSError):
            path.unlink()

    def sweep(self, older_than_s: float) -> None:
        """Remove the parts of jobs that were killed long ago and never restarted.

        A job with a living worker on this host keeps its parts: it may have waited for other nodes since its last snapshot.
        """
        for folder in self.folder.parent.iterdir():
            with contextlib.suppress(OSError):
                newest = max((p.stat().st_mtime for p in (folder, *folder.iterdir())), default=0.0)
                if folder != self.folder and time.time() - newest > older_than_s and not is_held(folder):
                    shutil.rmtree(folder, ignore_errors=True)
