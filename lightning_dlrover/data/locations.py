"""Find files by paths, folders and patterns, here or at URLs, and retry transient errors of object stores.

A store that throttles, hangs or is briefly unavailable delays a read. The read fails once the store has failed for `GIVE_UP_S`,
or at once if the file is gone or may not be read.
"""

from __future__ import annotations

import glob
import io
import logging
import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, TypeVar

from lightning_dlrover.data.source import DataError

log = logging.getLogger(__name__)

T = TypeVar("T")

GIVE_UP_S = 300.0
"""Seconds for which a store may fail before a read fails."""

REQUEST_TIMEOUT_S = 60.0
"""Seconds after which a request without an answer is repeated."""

FIRST_PAUSE_S, MAX_PAUSE_S = 0.1, 20.0
"""Seconds between two attempts: doubled from the first to the maximum, and shortened at random by up to a half."""

READ_AHEAD_BYTES = 4 * 2**20
"""Minimum bytes of one request to a store."""

MAX_REQUEST_BYTES = 4 * READ_AHEAD_BYTES
"""Maximum bytes of one request, so that it ends within `REQUEST_TIMEOUT_S` on a slow connection."""

NUM_THREADS = 32
"""Parallel requests for the sizes of files, where a store lists none."""

HIDDEN = ("_", ".")
"""First letters of files that Spark, Hive and others write next to the data."""

TABLES = {"_delta_log": "Delta Lake", ".hoodie": "Apache Hudi", "metadata/*.metadata.json": "Apache Iceberg"}
"""Where tables keep the lists of their files. Their folders hold more than the rows of one version."""

TRANSIENT_STATUSES = (408, 425, 429)
"""HTTP statuses below 500 that may pass: timeout, too early, too many requests."""

CHANGED = "which rows were trained is no longer certain. Restore the old file, or start a new job on the new data"


class Store:
    """A file system of fsspec, recreated in each process: neither event loops nor connections survive a fork."""

    def __init__(self, filesystem: Any) -> None:
        self._filesystem = filesystem
        self._pid = os.getpid()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._filesystem,)  # file systems are pickled by their arguments

    @property
    def filesystem(self) -> Any:
        if self._pid != os.getpid():
            old = self._filesystem
            self._filesystem, self._pid = type(old)(*old.storage_args, **old.storage_options), os.getpid()
        return self._filesystem


@dataclass(frozen=True)
class Location:
    """One file."""

    key: str  # its path or URL
    path: str
    version: str  # size and time of modification, or ETag
    size: int
    store: Store | None = field(default=None, repr=False, compare=False)  # file system of a URL; None: a local file
    # Headers that make an HTTP server refuse to send another version.
    conditions: dict[str, str] = field(default_factory=dict, repr=False, compare=False)

    def open(self, version: str | None = None, ahead_bytes: int = 0) -> Any:
        """Open the file for random access by `pyarrow`.

        Args:
            version: the version that was counted; another one is refused.
            ahead_bytes: minimum bytes of one request to a store; 0: `READ_AHEAD_BYTES`.

        Raises:
            DataError: the file is gone or has changed, or its store has failed for too long.
        """
        if (store := self.store) is not None:
            if version is not None:
                patiently(lambda: self.check_store(store, version), self.key)
            return io.BufferedReader(_PatientFile(self, store), ahead_bytes or READ_AHEAD_BYTES)
        try:
            now = _local_version(os.stat(self.path))
        except OSError as error:
            raise DataError(f"{self.key} is gone or cannot be read: {error}. It was there when the job began") from error
        self.check_version(now, now if version is None else version)
        import pyarrow as pa

        return pa.OSFile(self.path)

    def check_store(self, store: Store, version: str | None = None) -> None:
        """Ask the store once whether it still has this version. Raises `DataError` if not."""
        store.filesystem.invalidate_cache(self.path)
        self.check_version(_remote_version(store.filesystem.info(self.path)), version)

    def check_version(self, now: str, version: str | None = None) -> None:
        """Raise `DataError` unless this is the version that was counted."""
        counted = self.version if version is None else version
        if now != counted:
            raise DataError(
                f"{self.key} has changed since the job counted its rows (size and time were {counted}, now {now}): {CHANGED}"
            )


class _PatientFile(io.RawIOBase):
    """A file at a URL. A failed read is repeated on a new connection."""

    def __init__(self, location: Location, store: Store) -> None:
        self._location = location
        self._store = store
        self._position = 0
        self._file: Any = None
        self._has_failed = False  # the store may be back with another file

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
        start = self._position
        wanted = min(len(buffer), self._location.size - start, MAX_REQUEST_BYTES)
        if wanted <= 0:
            return 0
        self._file, data = patiently(lambda: self._read(self._file, start, wanted), self._location.key, self._drop)
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)

    def _read(self, file: Any, start: int, wanted: int) -> tuple[Any, bytes]:
        """Return the file, opened, and its bytes. An abandoned attempt may still be running, so it keeps its own file."""
        if file is None:
            if self._has_failed:
                self._location.check_store(self._store)
            file = self._opened()
        file.seek(start)
        data: bytes = file.read(wanted)
        if not data:
            raise OSError(f"no bytes at {start} of {self._location.size}")
        return file, data[:wanted]

    def _opened(self) -> Any:
        filesystem, location = self._store.filesystem, self._location
        if _is_http(filesystem):
            headers = {**filesystem.kwargs.get("headers", {}), **location.conditions}
            # Without a size, fsspec would request it.
            return filesystem.open(location.path, "rb", cache_type="none", size=location.size, headers=headers)
        file = filesystem.open(location.path, "rb", cache_type="none")
        details = getattr(file, "details", None)
        if isinstance(details, dict) and details.get("size") is not None:
            location.check_version(_remote_version(details))  # s3fs reads no other version than this one
        return file

    def _drop(self) -> None:
        self._file = None  # not closed: an abandoned thread may still be waiting in it
        self._has_failed = True

    def close(self) -> None:
        self._file = None
        super().close()


def patiently(
    call: Callable[[], T],
    key: str,
    between: Callable[[], None] = lambda: None,
    timeout_s: float | None = None,
    at_start: bool = False,
) -> T:
    """Return the result of a request to a store; repeat it, with growing pauses, while the store fails.

    Args:
        key: name of the file for errors.
        between: called after each failure.
        timeout_s: seconds after which the request has failed; None: `REQUEST_TIMEOUT_S`.
        at_start: whether the file was never seen before.

    Raises:
        DataError: the file is gone, has changed or may not be read, or the store has failed for `GIVE_UP_S`.
    """
    began, pause_s = time.monotonic(), FIRST_PAUSE_S
    while True:
        try:
            return _limited(call, REQUEST_TIMEOUT_S if timeout_s is None else timeout_s)
        except DataError:
            raise
        except Exception as error:  # each store has errors of its own
            if _is_other_version(error):
                raise DataError(f"{key} has changed while it was read: {CHANGED}") from error
            if _is_permanent(error):
                when = "Check the address and the credentials" if at_start else "It was there when the job began"
                raise DataError(f"{key} is gone or cannot be read: {_text(error)}. {when}") from error
            waited_s = time.monotonic() - began
            if waited_s + pause_s > GIVE_UP_S:
                raise DataError(
                    f"{key} could not be read for {waited_s:.0f} s, the last time because of: {_text(error)}"
                ) from error
            log.warning("%s: %s; trying again in %.1f s", key, _text(error), pause_s)
        between()
        time.sleep(pause_s * random.SystemRandom().uniform(0.5, 1.0))
        pause_s = min(2 * pause_s, MAX_PAUSE_S)


def _limited(call: Callable[[], T], timeout_s: float) -> T:
    """Return the result of a call, or abandon its thread after a time: file systems have no common way to set timeouts."""
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(call())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, name="request to a store", daemon=True).start()
    if not wait([result], timeout_s).done:
        raise TimeoutError(f"no answer within {timeout_s:.0f} s")
    return result.result()


def _is_permanent(error: Exception) -> bool:
    """Return whether another attempt would fail, too."""
    if isinstance(error, TypeError | AttributeError | NotImplementedError | ImportError) or type(error) is ValueError:
        return True
    if "Credentials" in type(error).__name__:  # botocore has none
        return True
    status = _status(error)
    if status is not None:
        return 400 <= status < 500 and status not in TRANSIENT_STATUSES
    if not isinstance(error, FileNotFoundError | PermissionError | IsADirectoryError | NotADirectoryError):
        return False
    # fsspec's HTTP file system reports any failed request for a file's size, also a lost connection, as a file not found.
    return not isinstance(error.__cause__, Exception) or _is_permanent(error.__cause__)


def _is_other_version(error: Exception) -> bool:
    return _status(error) == 412 or type(error).__name__ == "FileExpired"  # of s3fs


def _status(error: BaseException) -> int | None:
    """Return the HTTP status behind an error of any store's library."""
    seen: BaseException | None = error
    while seen is not None:
        response = getattr(seen, "response", None)
        if isinstance(response, dict):  # the form of botocore
            value = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        else:
            name = next((name for name in ("status", "status_code", "code") if hasattr(seen, name)), "")
            value = getattr(seen, name, None)
        if isinstance(value, int) and 400 <= value < 600:
            return value
        # Libraries translate statuses into built-in errors. The causes of their own errors have codes that no server has sent.
        seen = seen.__cause__ if type(seen).__module__ == "builtins" else None
    return None


def _text(error: Exception) -> str:
    cause = error.__cause__
    text = str(error) if not isinstance(error, FileNotFoundError) or cause is None else str(cause) or type(cause).__name__
    return text or type(error).__name__


def as_paths(paths: object) -> list[str]:
    """Return the paths that a user gave as one path or as several. Raises `TypeError`, or `ValueError` if there are none."""
    wanted = "a file, a folder, a pattern, or a list of them"
    return [os.fspath(path) for path in _several("paths", paths, (str, os.PathLike), wanted)]


def as_columns(columns: object) -> list[str] | None:
    """Return the names of columns that a user gave as one name or as several; None: all columns. Raises as `as_paths` does."""
    return None if columns is None else _several("columns", columns, (str,), "a list of names, or None for all columns")


def _several(name: str, given: object, types: tuple[type, ...], wanted: str) -> list[Any]:
    several = [given] if isinstance(given, types) else given
    if not isinstance(several, Sequence) or not all(isinstance(each, types) for each in several):
        raise TypeError(f"{name}={given!r:.200}: give {wanted}")
    if not several:
        raise ValueError(f"{name} is empty: give {wanted}")
    return list(several)


def paths_text(paths: Sequence[str]) -> str:
    """Return paths as a user would write them."""
    return repr(paths[0] if len(paths) == 1 else paths)


def located(paths: Sequence[str], suffix: str = "") -> list[Location]:
    """Return the files at these paths, in the order of their names; of folders, files of any depth with the suffix.

    Raises `DataError` if a path has no files.
    """
    found: dict[str, Location] = {}
    for path in paths:
        here = _remote(path, suffix) if "://" in path else _local(path, suffix)
        if not here:
            kind = f" that end with {suffix}" if suffix and (os.path.isdir(path) or path.endswith("/")) else ""
            raise DataError(f"{path} has no files{kind}: check the path or the pattern, and whether this host can read it")
        found.update((location.key, location) for location in here)
    return [found[key] for key in sorted(found)]


def _local(path: str, suffix: str) -> list[Location]:
    path = os.path.abspath(os.path.expanduser(path))
    is_pattern = not os.path.exists(path)
    if os.path.isdir(path):
        names = [str(file) for file in Path(path).rglob(f"*{suffix}") if _is_data(str(file.relative_to(path)))]
    else:
        names = glob.glob(path, recursive=True) if is_pattern else [path]
    if is_pattern or os.path.isdir(path):
        folders = dict.fromkeys(folder for name in names for folder in _parents(name))
        _refuse_tables(folders, lambda folder, mark: bool(glob.glob(mark, root_dir=folder)))
    files = [(name, os.stat(name)) for name in names if os.path.isfile(name)]
    return [Location(name, name, _local_version(status), status.st_size) for name, status in files]


def _remote(url: str, suffix: str) -> list[Location]:
    import fsspec

    try:
        filesystem, path = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise DataError(f"{url} cannot be read: {error}") from error
    is_http = _is_http(filesystem)

    def has_mark(folder: str, mark: str) -> bool:
        try:
            return bool(filesystem.glob(f"{folder}/{mark}"))
        except Exception as error:  # each store has errors of its own, and a parent folder may be inaccessible
            log.debug("%s cannot be listed: %s", folder, error)
            return False

    def listed() -> dict[str, Any]:
        filesystem.invalidate_cache()  # a listing of an earlier fit may be out of date
        if any(letter in path for letter in ("*[" if is_http else "*?[")):  # an address may have a query
            if not is_http:
                _refuse_tables(_parents(re.split(r"[*?\[]", path)[0]), has_mark)
            return {name: info for name, info in filesystem.glob(path, detail=True).items() if info["type"] == "file"}
        if not (is_http and url.endswith("/")):
            info = filesystem.info(path)
            if info["type"] == "file":
                return {path: info}
        below: dict[str, Any] = filesystem.find(path, detail=True)
        for name in below:
            for mark, kind in TABLES.items():
                if fnmatch(f"/{name}", f"*/{mark}" if "*" in mark else f"*/{mark}/*"):
                    raise DataError(_is_table(f"{url}: {name}", kind))
        if not is_http:
            _refuse_tables(_parents(f"{path}/"), has_mark)
        return {name: info for name, info in below.items() if name.endswith(suffix) and _is_data(name[len(path) :].lstrip("/"))}

    infos = patiently(listed, url, timeout_s=GIVE_UP_S, at_start=True)  # many files need many requests
    store = Store(filesystem)
    with ThreadPoolExecutor(NUM_THREADS) as threads:
        return list(threads.map(lambda name: _found(store, name, infos[name]), infos))


def _parents(path: str) -> list[str]:
    """Return all parent folders of a path, and the path itself if it ends with a slash."""
    parts = path.split("/")[:-1]
    return ["/".join(parts[:number]) for number in range(len(parts), 0, -1) if parts[number - 1]]


def _refuse_tables(folders: Iterable[str], has_mark: Callable[[str, str], bool]) -> None:
    """Raise `DataError` if a folder belongs to a table that keeps a list of its files: `has_mark` finds a pattern in it."""
    for folder in folders:
        for mark, kind in TABLES.items():
            if has_mark(folder, mark):
                raise DataError(_is_table(f"{folder} has {mark}", kind))


def _is_table(found: str, kind: str) -> str:
    return (
        f"{found}, so this is a table of {kind}, whose folder also holds rows that were deleted or replaced. "
        "Give the files of one version as a list: DeltaTable(...).file_uris() of deltalake, or the files of a scan's "
        "plan_files() of pyiceberg; or write that version to plain Parquet files"
    )


def _found(store: Store, name: str, info: dict[str, Any]) -> Location:
    filesystem = store.filesystem
    key = filesystem.unstrip_protocol(name)
    if info.get("size") is None:  # from an HTTP server's page of links
        info = patiently(lambda: filesystem.info(name), key, at_start=True)
    if info.get("size") is None:
        raise DataError(f"{key}: its server gives no size (Content-Length), so it cannot be read from any row on")
    conditions = _conditions(info) if _is_http(filesystem) else {}
    return Location(key, name, _remote_version(info), int(info["size"]), store, conditions)


def _conditions(info: dict[str, Any]) -> dict[str, str]:
    headers = {"Accept-Encoding": "identity"}
    if info.get("ETag") and not info["ETag"].startswith("W/"):  # weak ones never match
        headers["If-Match"] = info["ETag"]
    elif info.get("Last-Modified"):
        headers["If-Unmodified-Since"] = info["Last-Modified"]
    return headers


def _is_http(filesystem: Any) -> bool:
    protocols = filesystem.protocol
    return "http" in ((protocols,) if isinstance(protocols, str) else protocols)


def _is_data(path: str) -> bool:
    return not any(part.startswith(HIDDEN) for part in path.split("/"))


def _local_version(status: os.stat_result) -> str:
    return f"{status.st_size} {status.st_mtime_ns}"


def _remote_version(info: dict[str, Any]) -> str:
    names = ("ETag", "etag", "LastModified", "Last-Modified", "last_modified", "mtime", "created")
    when = next((info[name] for name in names if info.get(name)), "")
    # Some of Azure's answers have the ETag in quotes, others do not.
    return f"{info['size']} {str(when).removeprefix('W/').strip(chr(34))}"
