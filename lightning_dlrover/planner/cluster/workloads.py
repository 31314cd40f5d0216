"""Workloads: jobs as their users submitted them, from the lines of a trace.

The form is that of Pollux's artefact (Qiao et al., OSDI 2021): `time` (s), `application`, `num_replicas`, `batch_size`, and
perhaps `name`. The work and the speed of an application are not in the trace.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass

__all__ = ["Submission", "WorkloadError", "read_submissions"]

COLUMNS = ("time", "application", "num_replicas", "batch_size")


class WorkloadError(ValueError):
    """A trace holds a job that cannot be, or cannot run on the cluster."""


@dataclass(frozen=True)
class Submission:
    """A job as its user asked for it."""

    name: str
    application: str
    at_s: float
    num_devices: int
    batch_size: int  # samples per step, all devices together


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
    missing = [column for column in COLUMNS if column not in (reader.fieldnames or ())]
    if missing:
        raise WorkloadError(f"{source}:1: no column {', '.join(missing)}; the columns are {', '.join(COLUMNS)}")
    found: list[Submission] = []
    names: dict[str, int] = {}
    for row in reader:
        at = f"{source}:{reader.line_num}"
        job = _submission(row, at, reader.line_num)
        if job.application not in applications:
            raise WorkloadError(f"{at}: model {job.application!r} is unknown; known are {', '.join(sorted(applications))}")
        if job.num_devices > num_devices:
            raise WorkloadError(f"{at}: the job asks for {job.num_devices} devices, the cluster has {num_devices}")
        if job.name in names:
            raise WorkloadError(f"{at}: the name {job.name!r} is that of line {names[job.name]}, too")
        names[job.name] = reader.line_num
        found.append(job)
    return sorted(found, key=lambda job: (job.at_s, job.name))


def _submission(row: dict[str, str | None], at: str, line: int) -> Submission:
    application = row["application"] or ""
    name = row.get("name") or f"{application}-{line}"
    at_s, num_devices, batch_size = (_number(row[column], column, at) for column in ("time", "num_replicas", "batch_size"))
    if at_s < 0:
        raise WorkloadError(f"{at}: the job comes at {at_s:g} s; times begin at 0")
    for column, value in (("num_replicas", num_devices), ("batch_size", batch_size)):
        if value < 1 or value != int(value):
            raise WorkloadError(f"{at}: {column} is {value:g}; it is a whole number above 0")
    return Submission(name, application, at_s, int(num_devices), int(batch_size))


def _number(text: str | None, column: str, at: str) -> float:
    try:
        number = float(text or "")
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise WorkloadError(f"{at}: {column} is {text!r}, which is no finite number")
    return number
