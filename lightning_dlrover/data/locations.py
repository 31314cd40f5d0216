"""Find files by paths, folders and patterns, here or at URLs, and open them such that failures of an object store pass.

A store that throttles, hangs, or is away for a moment, delays a read. The read fails once the store has failed for `GIVE_UP_S`,
and at once if the store refuses it: a file is gone, or may not be read.
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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, TypeVar

from lightning_dlrover.data.source import DataError

log = logging.getLogger(__name__)

T = TypeVar("T")

GIVE_UP_S = 300.0
"""Seconds for which a store may fail before a read of it does."""

REQUEST_TIMEOUT_S = 60.0
"""Seconds after which a request without an answer is made anew."""

FIRST_PAUSE_S, MAX_PAUSE_S = 0.1, 20.0
"""Seconds between two attempts: the first, doubled up to the maximum, each shortened at random by up to a half."""

READ_AHEAD_BYTES = 4 * 2**20
"""Bytes that one request to a store asks for at least."""

MAX_REQUEST_BYTES = 4 * READ_AHEAD_BYTES
"""Bytes that one request asks for at most, so that it ends within `REQUEST_TIMEOUT_S` on a slow line."""

NUM_THREADS = 32
"""Sizes of files that are requested at once, where a store lists none."""

HIDDEN = ("_", ".")
"""First letters of names that Spark, Hive and others give to files which are no data."""

TABLES = {"_delta_log": "Delta Lake", ".hoodie": "Apache Hudi", "metadata/*.metadata.json": "Apache Iceberg"}
"""Where tables whose folders hold more than the rows of one version keep the lists of their files."""

TRANSIENT_STATUSES = (408, 425, 429)
"""HTTP statuses below 500 that another attempt may not get: timeout, too early, too many requests."""

CHANGED = "which rows were trained is no longer certain. Put the old file back, or start a new job on the new data"


class Store:
    """A file system of fsspec, made anew in each process: neither event loops nor connections survive a fork."""

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
    """One file.

    Args:
        key: its path or URL.
        version: size and time of modification, or ETag.
        store: where a URL leads to; None: a local file.
        conditions: headers with which an HTTP server refuses to send another version.
    """

    key: str
    path: str
    version: str
    size: int
    store: Store | None = field(default=None, repr=False, compare=False)
    conditions: dict[str, str] = field(default_factory=dict, repr=False, compare=False)

    def open(self, version: str | None = None, ahead_bytes: int = 0) -> Any:
        """Open the file for reading at any place, as `pyarrow` reads it.

        Args:
            version: the version that was counted; another one is refused.
            ahead_bytes: bytes that one request to a store asks for at least; 0: `READ_AHEAD_BYTES`.

        Raises:
            DataError: the file is gone, is another one, or its store has failed for too long.
        """
        if self.store is None:
            now = self._local_version_now()
            self.check_version(now, now if version is None else version)
            import pyarrow as pa

            return pa.OSFile(self.path)
        if version is not None:
            store = self.store
            patiently(lambda: self.check_store(store, version), self.key)
        return io.BufferedReader(_PatientFile(self, self.store), ahead_bytes or READ_AHEAD_BYTES)

    def check_store(self, store: Store, version: str | None = None) -> None:
        """Ask the store once whether it still has this version.

        Raises:
            DataError: it has another one.
        """
        store.filesystem.invalidate_cache(self.path)
        self.check_version(_remote_version(store.filesystem.info(self.path)), version)

    def check_version(self, now: str, version: str | None = None) -> None:
        """Compare with the version that was counted.

        Raises:
            DataError: it is another one.
        """
        counted = self.version if version is None else version
        if now != counted:
            raise DataError(
                f"{self.key} has changed since the job counted its rows (size and time were {counted}, now {now}): {CHANGED}"
            )

    def _local_version_now(self) -> str:
        try:
            return _local_version(os.stat(self.path))
        except OSError as error:
            raise DataError(f"{self.key} is gone or cannot be read: {error}. It was there when the job began") from error


class _PatientFile(io.RawIOBase):
    """A file at a URL. A read that fails is repeated on a new connection."""

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
        """Return the file, opened, and its bytes. An attempt that was given up may still end, so none shares a file with it."""
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
            # fsspec asks for the size of a file that is opened without one.
            return filesystem.open(location.path, "rb", cache_type="none", size=location.size, headers=headers)
        file = filesystem.open(location.path, "rb", cache_type="none")
        details = getattr(file, "details", None)
        if isinstance(details, dict) and details.get("size") is not None:
            location.check_version(_remote_version(details))  # s3fs reads no other version than this one
        return file

    def _drop(self) -> None:
        self._file = None  # not closed: a thread may still wait in it for an answer
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
        DataError: the file is gone, is another one, may not be read, or the store has failed for `GIVE_UP_S`.
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
    """Return what a call returns, unless it takes too long: its thread is then left to itself.

    File systems have timeouts of their own, or none, and no common way to set them.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="request to a store", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if thread.is_alive():
        raise TimeoutError(f"no answer within {timeout_s:.0f} s")
    if errors:
        raise errors[0]
    return results[0]


def _is_permanent(error: Exception) -> bool:
    """Return whether another attempt would fail as well."""
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
    return _status(error) == 412 or type(error).__name__ == "FileExpired"  # s3fs has a name for it


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
        # Libraries translate statuses into errors of Python. The causes of their own errors have codes that no server has sent.
        seen = seen.__cause__ if type(seen).__module__ == "builtins" else None
    return None


def _text(error: Exception) -> str:
    cause = error.__cause__
    text = str(error) if not isinstance(error, FileNotFoundError) or cause is None else str(cause) or type(cause).__name__
    return text or type(error).__name__


def as_paths(paths: object) -> list[str]:
    """Return the paths that a user gave as one path or as several.

    Raises:
        TypeError: they are neither.
        ValueError: there are none.
    """
    return [
        os.fspath(path)
        for path in _several("paths", paths, (str, os.PathLike), "a file, a folder, a pattern, or a list of them")
    ]


def as_columns(columns: object) -> list[str] | None:
    """Return the names of columns that a user gave as one name or as several; None: all columns.

    Raises:
        TypeError: they are no names.
        ValueError: there are none.
    """
    return None if columns is None else _several("columns", columns, (str,), "a list of names, or None for all columns")


def _several(name: str, given: object, types: tuple[type, ...], wanted: str) -> list[Any]:
    """Return what a user gave as one value of these types or as several."""
    several = [given] if isinstance(given, types) else given
    if not isinstance(several, Sequence) or not all(isinstance(each, types) for each in several):
        raise TypeError(f"{name}={given!r:.200}: give {wanted}")
    if not several:
        raise ValueError(f"{name} is empty: give {wanted}")
    return list(several)


def paths_text(paths: Sequence[str]) -> str:
    """Return paths as a user would give them."""
    return repr(paths[0] if len(paths) == 1 else paths)


def located(paths: Sequence[str], suffix: str = "") -> list[Location]:
    """Return the files at these paths, in the order of their names.

    Args:
        paths: files, folders and patterns. Of a folder, files of any depth with the suffix are taken.

    Raises:
        DataError: a path has no files.
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
        except Exception as error:  # each store has errors of its own, and a folder above may be closed to us
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

    # A listing of many files consists of many requests.
    infos = patiently(listed, url, timeout_s=GIVE_UP_S, at_start=True)
    store = Store(filesystem)
    with ThreadPoolExecutor(NUM_THREADS) as threads:
        return list(threads.map(lambda name: _found(store, name, infos[name]), infos))


def _parents(path: str) -> list[str]:
    """Return all folders that a path is in; the path itself, if it ends with a slash."""
    parts = path.split("/")[:-1]
    return ["/".join(parts[:number]) for number in range(len(parts), 0, -1) if parts[number - 1]]


def _refuse_tables(folders: Iterable[str], has_mark: Callable[[str, str], bool]) -> None:
    """Check that no folder belongs to a table that keeps a list of its files.

    Args:
        has_mark: whether a folder has something that fits a pattern.

    Raises:
        DataError: one does.
    """
    for folder in folders:
        for mark, kind in TABLES.items():
            if has_mark(folder, mark):
                raise DataError(_is_table(f"{folder} has {mark}", kind))


def _is_table(found: str, kind: str) -> str:
    return (
        f"{found}, so this is a table of {kind}, whose folder also holds deleted rows and those of former versions. "
        "Give the files of one version as a list: DeltaTable(...).file_uris() of deltalake, or the files of a scan's "
        "plan_files() of pyiceberg; or write that version to plain Parquet files"
    )


def _found(store: Store, name: str, info: dict[str, Any]) -> Location:
    filesystem = store.filesystem
    key = filesystem.unstrip_protocol(name)
    if info.get("size") is None:  # an HTTP server's page of links
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
    when = next(
        (
            info[name]
            for name in ("ETag", "etag", "LastModified", "Last-Modified", "last_modified", "mtime", "created")
            if info.get(name)
        ),
        "",
    )
    # Azure gives an ETag with quotes in some of its answers, and without in others.
    return f"{info['size']} {str(when).removeprefix('W/').strip(chr(34))}"
