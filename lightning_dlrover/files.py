"""Files on a host: their place, how the package writes them, whole or record by record, and whether others have changed."""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import json
import os
import tempfile
from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from lightning_dlrover.codec import RecordError, from_fields, to_json

if TYPE_CHECKING:
    from typing_extensions import Self


def home(environ: Mapping[str, str] = os.environ) -> str:
    """Return the user's home; without one, as in many containers, a temporary folder of this user alone."""
    found = environ.get("HOME") or os.path.expanduser("~")
    if os.path.isabs(found):
        return found
    folder = os.path.join(tempfile.gettempdir(), f"dlrover-home-{os.getuid()}")
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    if os.lstat(folder).st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user: set HOME to a folder of your own")
    return folder


def give_home(environ: MutableMapping[str, str] = os.environ) -> None:
    """Give a home and a name to a user who has none: TorchX, torch's compiler and others fail without them.

    Raises:
        PermissionError: the place for a home is another user's.
    """
    environ["HOME"] = home(environ)
    try:
        getpass.getuser()
    except (KeyError, OSError):  # OSError since Python 3.13
        environ["LOGNAME"] = f"user-{os.getuid()}"


def atomic_write(path: Path, content: str | bytes) -> None:
    """Write a file whole or not at all; text is written as UTF-8.

    Raises:
        OSError: `path` cannot be written.
    """
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_bytes(content.encode() if isinstance(content, str) else content)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


# Files of records: a header and then records, one line of JSON each, on disk as soon as it is added. One process adds at a
# time. A process that was killed may leave a last line without an end, which does not count.

H = TypeVar("H")
WAY_OUT = "give another --out"


@dataclass(frozen=True)
class RecordForm(Generic[H]):
    """The form of a kind of files."""

    header: type[H]  # dataclass of the first line, with a field `format`
    records: Mapping[str, type]  # dataclasses of the other lines, by the field `kind` of a line
    format: int  # number of the format that this release reads
    file_of: str  # the file as messages name it, such as `a queue`
    line_of: str  # one line, such as `a record of a queue`
    user: str  # the program that adds lines
    error: type[ValueError]  # for files that cannot be read or added to


class RecordFile(Generic[H]):
    """A file that this process alone may add records to. Use as a context manager, or close it.

    A last line without an end is removed. A new file gets `header`.

    Attributes:
        header: the file's own header.
        records: all records, those of earlier processes included.

    Raises:
        ValueError: another process has it open, or a line has another form; of the form's own type.
        OSError: the file cannot be written.
    """

    def __init__(self, path: Path, form: RecordForm[H], header: H) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._kinds = {record_type: kind for kind, record_type in form.records.items()} | {form.header: "header"}
        self._file = path.open("ab")
        try:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as busy:
                raise form.error(f"{path} is in use by another {form.user}; wait for it, or {WAY_OUT}") from busy
            data = path.read_bytes()
            content = data[: data.rfind(b"\n") + 1]
            if len(content) < len(data):
                os.truncate(path, len(content))
            found = read_lines(content, path, form)
            self.header, self.records = found[0] or header, found[1]
            if found[0] is None:
                self._append(header)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def add(self, record: Any) -> None:
        """Add a record; it is on disk when this returns.

        Raises:
            OSError: it cannot be written.
        """
        self._append(record)
        self.records.append(record)

    def close(self) -> None:
        self._file.close()

    def _append(self, line: Any) -> None:
        self._file.write(to_json(line, kind=self._kinds[type(line)]) + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())


def read_lines(data: bytes, path: Path, form: RecordForm[H]) -> tuple[H | None, list[Any]]:
    """Return the header and the records in `data`; no header if there is no line. A last line without an end is ignored.

    Args:
        path: the file, for messages.

    Raises:
        ValueError: a line has another form; of the form's own type.
    """
    header: H | None = None
    records: list[Any] = []
    for number, line in enumerate(data[: data.rfind(b"\n") + 1].splitlines(), 1):
        where = f"{path}, line {number}"
        try:
            document = json.loads(line)
            kind = document.pop("kind", "") if isinstance(document, dict) else ""
            if header is None:
                header = _header(kind, document, where, form)
            elif isinstance(kind, str) and kind in form.records:
                records.append(from_fields(form.records[kind], document, where))
            else:
                raise RecordError(f"{where} is {line[:60]!r}, not {form.line_of}")
        except form.error:
            raise
        except ValueError as error:
            text = str(error) if str(error).startswith(str(path)) else f"{where} is not JSON: {error}"
            raise form.error(f"{text}; remove the line, or {WAY_OUT}") from error
    return header, records


def _header(kind: object, document: object, where: str, form: RecordForm[H]) -> H:
    if kind != "header" or not isinstance(document, dict):
        raise RecordError(f"{where} is not the header of {form.file_of}")
    if document.get("format") != form.format:
        raise form.error(f"{where}: format {document.get('format')!r}, this release reads {form.format}; {WAY_OUT}")
    return from_fields(form.header, document, where)


class FileStamps:
    """Find files that have changed, by the times and sizes of now."""

    def __init__(self, files: Iterable[str]) -> None:
        self._stamps: dict[str, tuple[int, int]] = {}
        for file in files:
            with contextlib.suppress(OSError):
                self._stamps[file] = _stamp(file)

    def changed(self) -> str:
        """Return a file that has changed or is gone, empty if there is none."""
        for file, stamp in self._stamps.items():
            try:
                if _stamp(file) != stamp:
                    return file
            except OSError:
                return file
        return ""


def _stamp(file: str) -> tuple[int, int]:
    found = os.stat(file)
    return found.st_mtime_ns, found.st_size
