"""Find files by paths, folders and patterns, here or at URLs, and open them such that failures of an object store pass.

A store that throttles, or is away for a moment, delays a read. It fails once the store has failed for `GIVE_UP_S`.
"""

from __future__ import annotations

import glob
import io
import logging
import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from lightning_dlrover.data.source import DataError

__all__ = ["GIVE_UP_S", "Location", "located"]

log = logging.getLogger(__name__)

T = TypeVar("T")

GIVE_UP_S = 300.0
"""Seconds for which a store may fail before a read of it does."""

FIRST_PAUSE_S, MAX_PAUSE_S = 0.1, 20.0
"""Seconds between two attempts: the first, doubled up to the maximum, each shortened at random by up to a half."""

READ_AHEAD_BYTES = 4 * 2**20
"""Bytes that one request to a store asks for at least."""

HIDDEN = ("_", ".")
"""First letters of names that Spark, Hive and others give to files which are no data."""


@dataclass(frozen=True)
class Location:
    """One file.

    Args:
        key: its path or URL.
        version: size and time of modification, or ETag.
        filesystem: fsspec's file system of a URL; None: a local file.
    """

    key: str
    path: str
    version: str
    size: int
    filesystem: Any = field(default=None, repr=False, compare=False)

    def open(self, version: str | None = None) -> Any:
        """Open the file for reading at any place, as `pyarrow` reads it.

        Args:
            version: the version that was counted; another one is refused.

        Raises:
            DataError: the file is gone, is another one, or its store has failed for too long.
        """
        now = self._version_now()
        if version is not None and now != version:
            raise DataError(
                f"{self.key} has changed since the job counted its rows (size and time were {version}, now {now}): which "
                "rows were trained is no longer certain. Put the old file back, or start a new job on the new data"
            )
        if self.filesystem is None:
            import pyarrow as pa

            return pa.OSFile(self.path)
        return io.BufferedReader(_PatientFile(self), READ_AHEAD_BYTES)

    def _version_now(self) -> str:
        if self.filesystem is None:
            try:
                return _local_version(os.stat(self.path))
            except OSError as error:
                raise DataError(f"{self.key} is gone or cannot be read: {error}. It was there when the job began") from error
        return _remote_version(patiently(lambda: self.filesystem.info(self.path, refresh=True), self.key))


class _PatientFile(io.RawIOBase):
    """A file at a URL. A read that fails is repeated on a new connection."""

    def __init__(self, location: Location) -> None:
        self._location = location
        self._position = 0
        self._file: Any = None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._location.size}[whence]
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        wanted = min(len(buffer), self._location.size - self._position)
        if wanted <= 0:
            return 0
        data = patiently(lambda: self._read(wanted), self._location.key, self._drop)
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)

    def _read(self, wanted: int) -> bytes:
        if self._file is None:
            self._file = self._location.filesystem.open(self._location.path, "rb", cache_type="none")
        self._file.seek(self._position)
        data: bytes = self._file.read(wanted)
        if not data:
            raise OSError(f"no bytes at {self._position} of {self._location.size}")
        return data

    def _drop(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def close(self) -> None:
        self._drop()
        super().close()


def patiently(call: Callable[[], T], key: str, between: Callable[[], None] = lambda: None) -> T:
    """Return the result of a request to a store; repeat it, with growing pauses, while the store fails.

    Args:
        key: what is read, for errors.
        between: called after each failure.

    Raises:
        DataError: the file is gone, may not be read, or the store has failed for `GIVE_UP_S`.
    """
    began, pause_s = time.monotonic(), FIRST_PAUSE_S
    while True:
        try:
            return call()
        except (FileNotFoundError, PermissionError) as error:
            raise DataError(f"{key} is gone or cannot be read: {error}. It was there when the job began") from error
        except Exception as error:  # each store has errors of its own
            waited_s = time.monotonic() - began
            if waited_s + pause_s > GIVE_UP_S:
                raise DataError(f"{key} could not be read for {waited_s:.0f} s, the last time because of: {error}") from error
            log.warning("%s: %s; trying again in %.1f s", key, error, pause_s)
        try:
            between()
        except Exception as error:
            log.debug("%s: its connection could not be closed: %s", key, error)
        time.sleep(pause_s * random.uniform(0.5, 1.0))
        pause_s = min(2 * pause_s, MAX_PAUSE_S)


def located(paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], suffix: str = "") -> list[Location]:
    """Return the files at these paths, in the order of their names.

    Args:
        paths: files, folders and patterns. Of a folder, files of any depth with the suffix are taken.

    Raises:
        DataError: a path has no files.
    """
    if isinstance(paths, str | os.PathLike):
        paths = [paths]
    found: dict[str, Location] = {}
    for each in paths:
        path = os.fspath(each)
        here = _remote(path, suffix) if "://" in path else _local(path, suffix)
        if not here:
            kind = f" that end with {suffix}" if suffix and (os.path.isdir(path) or path.endswith("/")) else ""
            raise DataError(f"{path} has no files{kind}: check the path or the pattern, and whether this host can read it")
        found.update((location.key, location) for location in here)
    return [found[key] for key in sorted(found)]


def _local(path: str, suffix: str) -> list[Location]:
    path = os.path.abspath(os.path.expanduser(path))
    if os.path.isdir(path):
        names = [str(file) for file in Path(path).rglob(f"*{suffix}") if _is_data(str(file.relative_to(path)))]
    else:
        names = [path] if os.path.exists(path) else glob.glob(path, recursive=True)
    files = [(name, os.stat(name)) for name in names if os.path.isfile(name)]
    return [Location(name, name, _local_version(status), status.st_size) for name, status in files]


def _remote(url: str, suffix: str) -> list[Location]:
    import fsspec

    filesystem, path = fsspec.core.url_to_fs(url)

    def listed() -> dict[str, Any]:
        if any(letter in path for letter in "*?["):
            return {name: info for name, info in filesystem.glob(path, detail=True).items() if info["type"] == "file"}
        info = filesystem.info(path)
        if info["type"] == "file":
            return {path: info}
        below: dict[str, Any] = filesystem.find(path, detail=True)
        return {name: info for name, info in below.items() if name.endswith(suffix) and _is_data(name[len(path) :].lstrip("/"))}

    return [
        Location(filesystem.unstrip_protocol(name), name, _remote_version(info), int(info["size"] or 0), filesystem)
        for name, info in patiently(listed, url).items()
    ]


def _is_data(path: str) -> bool:
    return not any(part.startswith(HIDDEN) for part in path.split("/"))


def _local_version(status: os.stat_result) -> str:
    return f"{status.st_size} {status.st_mtime_ns}"


def _remote_version(info: dict[str, Any]) -> str:
    when = next(
        (info[name] for name in ("ETag", "etag", "LastModified", "last_modified", "mtime", "created") if info.get(name)), ""
    )
    return f"{info['size']} {when}"
