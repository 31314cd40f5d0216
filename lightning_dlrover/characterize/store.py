"""The measurements of a folder: one line of JSON each, appended as soon as it is made."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from lightning_dlrover._version import __version__
from lightning_dlrover.characterize.machine import Machine
from lightning_dlrover.characterize.point import Limit, Visit
from lightning_dlrover.record_file import RecordFile, RecordForm, read_lines

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

    @staticmethod
    def of(header: Header, records: Iterable[Visit | Limit]) -> Measurements:
        found = Measurements(header)
        for record in records:
            found.add(record)
        return found

    def add(self, record: Visit | Limit) -> None:
        if isinstance(record, Visit):
            self.visits.append(record)
        else:
            self.limits.append(record)


FORM = RecordForm(
    header=Header,
    records={"visit": Visit, "limit": Limit},
    format=FORMAT,
    file_of="a characterization",
    line_of="a measurement",
    user="`dlrover lab characterize`",
    error=StoreError,
)


class Store(RecordFile[Header]):
    """The measurements of one folder, which this process alone may add to. Use as a context manager.

    Raises:
        StoreError: the folder holds measurements of another machine or release, unreadable ones, or is in use.
        OSError: the folder cannot be written.
    """

    def __init__(self, folder: Path, machine: Machine) -> None:
        self.path = folder / FILE_NAME
        super().__init__(self.path, FORM, Header(FORMAT, __version__, machine))
        self.found = Measurements.of(self.header, self.records)
        try:
            self._check(machine)
        except StoreError:
            self.close()
            raise

    def add(self, record: Visit | Limit) -> None:
        """Append a measurement."""
        super().add(record)
        self.found.add(record)

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
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise StoreError(f"{folder} has no {FILE_NAME}: `dlrover lab characterize --out {folder}` makes one") from error
    read = read_lines(data, path, FORM)
    if read[0] is None:
        raise StoreError(f"{path} is empty; remove it, or give another folder")
    return Measurements.of(read[0], read[1])
