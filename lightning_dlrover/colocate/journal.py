"""The jobs of a queue: read from `jobs.yaml`, and their history on disk before the dispatcher acts on it.

`JobSpec` is one job of the file. `Journal` appends records, and `read_records` reads them back.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
import shlex
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from lightning_dlrover.colocate.devices import VISIBLE
from lightning_dlrover.colocate.tenants import Where
from lightning_dlrover.files import RecordFile, RecordForm, read_lines

DEVICES = ("any", "cpu", "gpu")
MAX_JOBS = 10_000
MAX_PRIORITY = 1_000
MAX_MEMORY_BYTES = 64 << 40
FIELDS = ("name", "command", "folder", "env", "priority", "device", "memory", "gpu_memory", "copies", "owner", "kind")
INTERPRETERS = re.compile(r"(ba|da|z)?sh|env|python[\d.]*")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class JobsFileError(ValueError):
    """A file of jobs that cannot be run as it is."""


@dataclass(frozen=True)
class JobSpec:
    """One job of a queue.

    Args:
        command: the program and its arguments.
        folder: the working folder.
        env: variables of the job, in addition to those of the dispatcher.
        priority: jobs with a higher one go first.
        device: type of the device that it runs on: `cpu`, `gpu`, or `any` of them.
        memory_bytes: peak of all its processes together, as its owner states it; 0: unknown.
        gpu_memory_bytes: the same of its GPU's memory.
        declared_kind: jobs with the same one share their measurements; empty: those with the same command, folder and
            variables do.

    Example:
        >>> job = JobSpec("small", ("python", "train.py", "--epochs", "3"), folder="/work", priority=1)
        >>> job.kin == JobSpec("large", ("python", "train.py", "--epochs", "9"), folder="/work").kin  # the same script
        True
    """

    name: str
    command: tuple[str, ...]
    folder: str
    env: dict[str, str] = field(default_factory=dict)
    priority: int = 0
    device: str = "any"
    memory_bytes: int = 0
    owner: str = ""
    gpu_memory_bytes: int = 0
    declared_kind: str = ""

    def __post_init__(self) -> None:
        for what, text in (("name", self.name), ("kind", self.declared_kind or self.name)):
            if not NAME.fullmatch(text):
                raise ValueError(f"{what} {text!r}: up to 100 letters, digits and `._-`, the first a letter or digit")
        if not self.command or not all(self.command[:1]):
            raise ValueError("command is empty; give the program and its arguments")
        if self.device not in DEVICES:
            raise ValueError(f"device {self.device!r} is none of {', '.join(DEVICES)}")
        if self.device == "cpu" and self.gpu_memory_bytes:
            raise ValueError("it has gpu_memory, and device cpu; leave one of them out")
        for name, value in self.env.items():
            if not name or "=" in name or "\0" in name + value:
                raise ValueError(f"env has the name {name!r}, or a value with a zero byte, which no variable can have")
        if any("\0" in part for part in self.command):
            raise ValueError("command has a zero byte, which no argument can have")
        if not 0 <= self.priority <= MAX_PRIORITY:
            raise ValueError(f"priority {self.priority} is not between 0 and {MAX_PRIORITY}")

    @property
    def kind(self) -> str:
        """A hash of the declared kind, or of command, folder and variables. Jobs with the same one need the same resources."""
        if self.declared_kind:
            return _hash(self.declared_kind)
        return _hash(self.command, self.folder, tuple(sorted(self.env.items())))

    @property
    def kin(self) -> str:
        """A hash of the script and its folder, which jobs have in common that differ in arguments; empty: it has no script.

        A script is the module after `-m`, a file of Python or of a shell, or a program of its own.
        """
        script = _script(self.command)
        return _hash(script, self.folder) if script else ""


def _script(command: tuple[str, ...]) -> tuple[str, ...]:
    """Return the words of a command up to its script."""
    is_interpreted = INTERPRETERS.fullmatch(command[0].rpartition("/")[2]) is not None
    for number, word in enumerate(command):
        if word.endswith((".py", ".sh")) or (is_interpreted and number and command[number - 1] == "-m"):
            return command[: number + 1]
    return () if is_interpreted else command[:1]


@functools.lru_cache(4 * MAX_JOBS)  # a dispatcher asks for it at every look
def _hash(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def read_jobs(path: Path) -> list[JobSpec]:
    """Read a file of jobs. Relative folders count from the file's own.

    Raises:
        JobsFileError: the file cannot be read, or a job in it cannot be run; the message names the job and the field.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder, "jobs.yaml")
        ...     _ = path.write_text("jobs:\\n- {name: ctr, command: python train.py, copies: 2}\\n")
        ...     [job.name for job in read_jobs(path)]
        ['ctr-1', 'ctr-2']
    """
    import yaml

    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise JobsFileError(f"{path} cannot be read: {error}") from error
    except yaml.YAMLError as error:
        raise JobsFileError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    jobs = document.get("jobs") if isinstance(document, dict) else document
    if not isinstance(jobs, list) or not jobs:
        raise JobsFileError(f"{path} has no jobs; it must hold `jobs:` with a list of jobs, each with a `command`")
    if isinstance(document, dict) and (unknown := sorted(map(str, {*document} - {"jobs"}))):
        raise JobsFileError(f"{path}: unknown: {', '.join(unknown)}; the file has only the field `jobs`")
    specs: list[JobSpec] = []
    for number, job in enumerate(jobs, 1):
        specs += _specs(job, f"{path}, job {number}", path.parent.resolve(), number)
        if len(specs) > MAX_JOBS:
            raise JobsFileError(f"{path} has more than {MAX_JOBS} jobs")
    seen: set[str] = set()
    for spec in specs:
        if spec.name in seen:
            raise JobsFileError(f"{path}: two jobs have the name {spec.name!r}; give one of them another `name`")
        seen.add(spec.name)
    return specs


def _specs(job: Any, where: str, base: Path, number: int) -> list[JobSpec]:
    """Return a job of the file as often as its field `copies` asks for."""
    if not isinstance(job, dict):
        raise JobsFileError(f"{where} is {job!r:.80}, not a list of fields such as `command: python train.py`")
    if unknown := sorted(map(str, {*job} - {*FIELDS})):
        raise JobsFileError(f"{where}: unknown: {', '.join(unknown)}; the fields are {', '.join(FIELDS)}")
    command = _command(job.get("command"), where)
    name = job.get("name", f"job-{number}")
    if not isinstance(name, str):
        raise JobsFileError(f"{where}: name {name!r} is not a text; quote it")
    folder = (base / str(job.get("folder", "."))).resolve()
    if not folder.is_dir():
        raise JobsFileError(f"{where}: folder {folder} does not exist")
    copies = _number(job, "copies", 1, where)
    if not 1 <= copies <= MAX_JOBS:
        raise JobsFileError(f"{where}: copies {copies} is not between 1 and {MAX_JOBS}")
    names = [name] if copies == 1 else [f"{name}-{copy}" for copy in range(1, copies + 1)]
    try:
        return [
            JobSpec(
                each,
                command,
                str(folder),
                _variables(job.get("env", {}), where),
                _number(job, "priority", 0, where),
                str(job.get("device", "any")),
                _memory(job, "memory", where),
                str(job.get("owner", "")),
                _memory(job, "gpu_memory", where),
                _kind(job, where),
            )
            for each in names
        ]
    except JobsFileError:
        raise
    except ValueError as error:
        raise JobsFileError(f"{where}: {error}") from error


def _command(command: Any, where: str) -> tuple[str, ...]:
    if isinstance(command, str):
        try:
            return tuple(shlex.split(command))
        except ValueError as error:
            raise JobsFileError(f"{where}: command {command!r}: {error}") from error
    if isinstance(command, list) and all(
        isinstance(part, str | int | float) and not isinstance(part, bool) for part in command
    ):
        return tuple(map(str, command))
    raise JobsFileError(f"{where}: command {command!r:.80} is neither a text nor a list of texts")


def _kind(job: Mapping[str, Any], where: str) -> str:
    kind = job.get("kind", "")
    if not isinstance(kind, str) or (not kind and "kind" in job):
        raise JobsFileError(f"{where}: kind {kind!r} is not a text; quote it, or leave it out")
    return kind


def _number(job: Mapping[str, Any], name: str, default: int, where: str) -> int:
    value = job.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool):
        raise JobsFileError(f"{where}: {name} {value!r} is not a whole number")
    return value


def _variables(env: Any, where: str) -> dict[str, str]:
    if not isinstance(env, dict) or not all(isinstance(value, str | int | float) for value in env.values()):
        raise JobsFileError(f"{where}: env {env!r:.80} is not a list of NAME: VALUE")
    if VISIBLE in env:
        raise JobsFileError(f"{where}: env has {VISIBLE}, which the queue sets; use `device`, and the queue's --devices")
    return {str(name): str(value) for name, value in env.items()}


def _memory(job: Mapping[str, Any], name: str, where: str) -> int:
    size = job.get(name)
    if size is None:
        return 0
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([MGT])(?:i?B?)", str(size), re.I)
    if match is None or not float(match[1]):
        raise JobsFileError(f"{where}: {name} {size!r} is not a size such as 512M or 16G")
    num_bytes = float(match[1]) * {"M": 2**20, "G": 2**30, "T": 2**40}[match[2].upper()]
    if num_bytes > MAX_MEMORY_BYTES:
        raise JobsFileError(f"{where}: {name} {size} is more than {MAX_MEMORY_BYTES >> 40}T")
    return int(num_bytes)


FILE_NAME = "queue.jsonl"
FORMAT = 1


class JournalError(ValueError):
    """A queue's folder that cannot be continued."""


@dataclass(frozen=True)
class Header:
    """First line of the file."""

    format: int
    queue: str  # mark of all processes of this queue's jobs


@dataclass(frozen=True)
class Opened:
    """A dispatcher began to run the queue."""

    policy: str
    cores: float  # the sum over all devices
    memory_bytes: int
    at: float


@dataclass(frozen=True)
class Span:
    """A period that a job spent in one phase (`tenants.py`)."""

    phase: str
    began: float
    ended: float


@dataclass(frozen=True)
class Added:
    """A job of the queue."""

    spec: JobSpec
    at: float  # seconds since the epoch, as everywhere in this file


@dataclass(frozen=True)
class Started:
    """A job's command was started."""

    job: str
    attempt: int  # 1 is the first
    device: str
    at: float


@dataclass(frozen=True)
class Profiled:
    """Needs and speed of a kind of job that runs alone."""

    job_kind: str
    device_kind: str
    use: dict[str, float]  # amount of each resource, mean over a step
    steps_per_s: float  # cores in use of a command that reports no steps
    reports: bool = True


@dataclass(frozen=True)
class Rates:
    """How fast jobs ran side by side, each relative to alone."""

    device: str
    speeds: dict[str, float]  # key: kind of job; a kind that occurs twice has its mean
    kinds: tuple[str, ...]  # one for each job that ran
    seconds: float
    device_kind: str = "cpu"


@dataclass(frozen=True)
class Ended:
    """A job's command has ended.

    Args:
        result: `done`, `failed`, `evicted` (it goes back to the queue), or `stopped` with the dispatcher.
        peak_bytes: of the host's memory.
        estimate_bytes: the peak that was expected; 0: none was.
        margin_bytes: by how much the peak might have been higher.
        gpu_peak_bytes: the same three of a GPU's memory.
        where: type of the device that it ran on.
    """

    job: str
    attempt: int
    result: str
    code: int
    reason: str
    at: float
    run_s: float  # paused time excluded
    paused_s: float
    cpu_s: float
    peak_bytes: int
    estimate_bytes: int = 0
    margin_bytes: int = 0
    num_steps: int = 0
    spans: tuple[Span, ...] = ()
    gpu_peak_bytes: int = 0
    gpu_estimate_bytes: int = 0
    gpu_margin_bytes: int = 0
    where: Where = "cpu"

    def __post_init__(self) -> None:
        if self.result not in ("done", "failed", "evicted", "stopped"):
            raise ValueError(f"result {self.result!r} is unknown")


Record: TypeAlias = Opened | Added | Started | Profiled | Rates | Ended
FORM = RecordForm(
    header=Header,
    records={"opened": Opened, "added": Added, "started": Started, "profiled": Profiled, "rates": Rates, "ended": Ended},
    format=FORMAT,
    file_of="a queue",
    line_of="a record of a queue",
    user="dispatcher",
    error=JournalError,
)


class Journal(RecordFile[Header]):
    """The history of one folder's queue, which this process alone may add to. Use as a context manager.

    Records are lines of JSON, each on disk before the dispatcher acts on it. A dispatcher that was killed leaves the file as
    it is, and the next one continues it.

    Raises:
        JournalError: the folder's journal is unreadable, or in use.
        OSError: the folder cannot be written.
    """

    records: list[Record]

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / FILE_NAME, FORM, Header(FORMAT, uuid.uuid4().hex))
        self.queue = self.header.queue


def read_records(folder: Path) -> list[Record]:
    """Read the journal of a queue, which may be in use. A last line without an end is ignored.

    Raises:
        JournalError: the journal is missing, or a line is not a record.
    """
    path = folder / FILE_NAME
    try:
        data = path.read_bytes()
    except OSError as error:
        raise JournalError(f"{folder} holds no queue: {error}") from error
    return read_lines(data, path, FORM)[1]
