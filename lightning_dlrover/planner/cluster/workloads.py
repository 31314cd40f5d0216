"""Workloads: jobs as their users submitted them, from the lines of a trace.

Two forms are read, told apart by their columns:

- Pollux's artefact (Qiao et al., OSDI 2021): `time` (s), `application`, `num_replicas`, `batch_size`, and perhaps `name`. The
  work and the speed of an application are not in the trace.
- ElasticFlow's traces (Gu et al., ASPLOS 2023): `job_id`, `submission_time` (s), `duration` (s, with the devices that the job
  had), `num_gpu`. The application is not in the trace.
"""

from __future__ import annotations

import csv
import math
import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

__all__ = ["Submission", "WorkloadError", "read_submissions", "shaken"]

MAX_TIME_S = 1e8
"""Latest arrival and longest duration of a job, three years: a simulation decides every minute."""

MAX_COUNT = 10**9
"""Largest batch and number of devices of a job."""

SHAKE_S = 60.0
"""Seconds by which `shaken` moves an arrival at most, to either side."""


class WorkloadError(ValueError):
    """A trace holds a job that cannot be, or cannot run on the cluster."""


@dataclass(frozen=True)
class Submission:
    """A job as its user asked for it.

    Args:
        application: "" where the trace does not name it.
        batch_size: samples per step, all devices together; 0 where the trace does not hold it.
        duration_s: seconds that it took with `num_devices`; None where the trace does not hold them.
        where: file and line, for messages.
    """

    name: str
    application: str
    at_s: float
    num_devices: int
    batch_size: int
    duration_s: float | None = None
    where: str = field(default="", compare=False)


_Row: TypeAlias = Mapping[str, str | None]


def read_submissions(lines: Iterable[str], source: str, applications: Collection[str], num_devices: int) -> list[Submission]:
    """Return the jobs of a trace in order of time; jobs without a name are named after application and line.

    Args:
        source: the trace's name, for messages.
        applications: those whose speed is known.
        num_devices: of the cluster.
    Raises:
        WorkloadError: with source and line.
    """
    reader = csv.DictReader(lines)
    read = _form(reader.fieldnames or (), source)
    found: list[Submission] = []
    names: dict[str, int] = {}
    for row in reader:
        at = f"{source}:{reader.line_num}"
        if missing := [name for name in reader.fieldnames or () if row[name] is None]:
            num_columns = len(reader.fieldnames or ())
            raise WorkloadError(f"{at}: the line has {num_columns - len(missing)} of {num_columns} fields")
        job = read(row, at, reader.line_num)
        if job.application and job.application not in applications:
            raise WorkloadError(f"{at}: model {job.application!r} is unknown; known are {', '.join(sorted(applications))}")
        if job.num_devices > num_devices:
            raise WorkloadError(f"{at}: the job asks for {job.num_devices} devices, the cluster has {num_devices}")
        if job.name in names:
            raise WorkloadError(f"{at}: the name {job.name!r} is that of line {names[job.name]}, too")
        names[job.name] = reader.line_num
        found.append(job)
    return sorted(found, key=lambda job: (job.at_s, job.name))


def shaken(submissions: Sequence[Submission], seed: int) -> list[Submission]:
    """Move each arrival by up to `SHAKE_S`, in order of time; seed 0 moves none.

    A result that small perturbations of the input turn around is none (Tsafrir et al., "Instability in parallel job scheduling
    simulation", IPDPS 2007).
    """
    if seed == 0:
        return list(submissions)
    rng = random.Random(seed)
    moved = [replace(job, at_s=max(0.0, job.at_s + rng.uniform(-SHAKE_S, SHAKE_S))) for job in submissions]
    return sorted(moved, key=lambda job: (job.at_s, job.name))


def _pollux(row: _Row, at: str, line: int) -> Submission:
    application = row["application"] or ""
    name = row.get("name") or f"{application}-{line}"
    if not application:
        raise WorkloadError(f"{at}: the job names no application")
    at_s = _arrival(row, "time", at)
    return Submission(name, application, at_s, _count(row, "num_replicas", at), _count(row, "batch_size", at), where=at)


def _elasticflow(row: _Row, at: str, line: int) -> Submission:
    at_s, duration_s = _arrival(row, "submission_time", at), _number(row["duration"], "duration", at, MAX_TIME_S)
    if duration_s <= 0:
        raise WorkloadError(f"{at}: duration is {duration_s:g} s; a job takes longer than 0 s")
    return Submission(row["job_id"] or f"job-{line}", "", at_s, _count(row, "num_gpu", at), 0, duration_s, where=at)


_FORMS: Mapping[tuple[str, ...], Callable[[_Row, str, int], Submission]] = {
    ("time", "application", "num_replicas", "batch_size"): _pollux,
    ("job_id", "submission_time", "duration", "num_gpu"): _elasticflow,
}


def _form(columns: Sequence[str], source: str) -> Callable[[_Row, str, int], Submission]:
    """Return the reader of a row by the columns of a trace."""
    known = max(_FORMS, key=lambda names: sum(name in columns for name in names))
    missing = [name for name in known if name not in columns]
    if missing:
        forms = "; or ".join(", ".join(names) for names in _FORMS)
        raise WorkloadError(f"{source}:1: no column {', '.join(missing)}; the columns are {forms}")
    return _FORMS[known]


def _arrival(row: _Row, column: str, at: str) -> float:
    at_s = _number(row[column], column, at, MAX_TIME_S)
    if at_s < 0:
        raise WorkloadError(f"{at}: the job comes at {at_s:g} s; times begin at 0")
    return at_s


def _count(row: _Row, column: str, at: str) -> int:
    value = _number(row[column], column, at, MAX_COUNT)
    if value < 1 or value != int(value):
        raise WorkloadError(f"{at}: {column} is {value:g}; it is a whole number above 0")
    return int(value)


def _number(text: str | None, column: str, at: str, most: float) -> float:
    try:
        number = float(text or "")
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise WorkloadError(f"{at}: {column} is {text!r}, which is not a finite number")
    if number > most:
        raise WorkloadError(f"{at}: {column} is {text}, and the largest is {most:,.0f}")
    return number
