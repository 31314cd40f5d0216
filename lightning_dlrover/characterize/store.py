"""The measurements of a folder: one line of JSON each, appended as soon as it is made."""

from __future__ import annotations

import fcntl
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from lightning_dlrover._version import __version__
from lightning_dlrover.characterize.machine import Machine
from lightning_dlrover.characterize.point import Limit, Visit
from lightning_dlrover.codec import RecordError, from_fields, to_json

__all__ = ["FILE_NAME", "Header", "Measurements", "Store", "StoreError", "read_store"]

FILE_NAME = "points.jsonl"
FORMAT = 1


class StoreError(ValueError):
    """A folder with measurements that cannot be read or continued."""


@dataclass(frozen=True)
class Header:
    """First line of the file."""

    format: int
    version: str
    machine: Machine


@dataclass
class Measurements:
    """Content of a folder."""

    header: Header
    visits: list[Visit] = field(default_factory=list)
    limits: list[Limit] = field(default_factory=list)


class Store:
    """The measurements of one folder, which this process alone may add to. Use as a context manager.

    A last line without an end, as a killed process leaves it, is removed.

    Raises:
        StoreError: the folder holds measurements of another machine or release, unreadable ones, or is in use.
        OSError: the folder cannot be written.
    """

    def __init__(self, folder: Path, machine: Machine) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / FILE_NAME
        self._file = self.path.open("ab")
        try:
            self._lock()
            if self.path.stat().st_size:
                self._repair()
            if not self.path.stat().st_size:
                self.found = Measurements(Header(FORMAT, __version__, machine))
                self._append(to_json(self.found.header, kind="header"))
            else:
                self.found = read_store(folder)
                self._check(machine)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Store:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()

    def add(self, record: Visit | Limit) -> None:
        """Append a measurement."""
        if isinstance(record, Visit):
            self.found.visits.append(record)
            self._append(to_json(record, kind="visit"))
        else:
            self.found.limits.append(record)
            self._append(to_json(record, kind="limit"))

    def _append(self, line: bytes) -> None:
        self._file.write(line + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise StoreError(
                f"{self.path} is in use by another `dlrover characterize`; wait for it, or give another --out"
            ) from error

    def _repair(self) -> None:
        data = self.path.read_bytes()
        if not data.endswith(b"\n"):
            os.truncate(self.path, data.rfind(b"\n") + 1)

    def _check(self, machine: Machine) -> None:
        header = self.found.header
        if header.version != __version__:
            raise StoreError(
                f"{self.path} was measured with release {header.version}, this is {__version__}, whose figures may differ; "
                "give another --out"
            )
        if header.machine != machine:
            names = [name for name, value in vars(machine).items() if getattr(header.machine, name) != value]
            told = ", ".join(
                f"{name} {getattr(header.machine, name)!r} there, {getattr(machine, name)!r} here" for name in names
            )
            raise StoreError(f"{self.path} was measured on another machine ({told}); give another --out")


def read_store(folder: Path) -> Measurements:
    """Read the measurements of a folder. A last line without an end is ignored.

    Raises:
        StoreError: there are none, or a line is not a measurement.
    """
    path = folder / FILE_NAME
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except FileNotFoundError as error:
        raise StoreError(f"{folder} has no {FILE_NAME}: `dlrover characterize --out {folder}` makes one") from error
    found: Measurements | None = None
    for number, line in enumerate(lines, 1):
        if not line.endswith(b"\n"):
            break
        where = f"{path}, line {number}"
        try:
            document = json.loads(line)
            kind = document.pop("kind", "") if isinstance(document, dict) else ""
            if found is None:
                found = Measurements(_header(kind, document, where))
            elif kind == "visit":
                found.visits.append(from_fields(Visit, document, where))
            elif kind == "limit":
                found.limits.append(from_fields(Limit, document, where))
            else:
                raise RecordError(f"{where} is {line[:60]!r}, not a measurement")
        except StoreError:
            raise
        except ValueError as error:
            text = str(error) if str(error).startswith(str(path)) else f"{where} is not JSON: {error}"
            raise StoreError(f"{text}; remove the line, or give another --out") from error
    if found is None:
        raise StoreError(f"{path} is empty; remove it, or give another folder")
    return found


def _header(kind: str, document: object, where: str) -> Header:
    if kind != "header" or not isinstance(document, dict):
        raise RecordError(f"{where} is not the header of a characterization")
    if document.get("format") != FORMAT:
        raise StoreError(f"{where}: format {document.get('format')!r}, this release reads {FORMAT}; give another --out")
    return from_fields(Header, document, where)
