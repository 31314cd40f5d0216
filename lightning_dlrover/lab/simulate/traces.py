"""Traces of jobs for a simulated cluster: arrivals, work, and measured speeds. Pure.

`read_trace` reads step times, `read_submissions` workloads, `read_work` the work of applications, `read_applications` their
speeds.
"""

from __future__ import annotations

import csv
import dataclasses
import json
import math
import random
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from lightning_dlrover.tuning.cluster import Floats
from lightning_dlrover.tuning.samples import STEP_PARTS, StepProfile, impossible_figure

ALIASES = {
    "num_replicas": "num_workers",
    "local_bsz": "local_batch",
    "step_time": "step_time_s",
    "sync_time": "communication_s",
}
MAX_CONTRADICTION = 1.5  # ratio between step times of one configuration beyond the noise of a mean over many steps
MAX_STEP_TIME_S = 3600.0

_TYPES = {f.name: f.type for f in dataclasses.fields(StepProfile)}  # type names as text, because annotations are postponed
_CONFIGURED_BY = (
    *("num_workers", "num_nodes", "local_batch", "loader_workers", "intra_op_threads", "cores", "device", "dense_bytes"),
    *("prefetch_factor", "dense_flops", "embedding_bytes", "lookups_per_sample"),
)


class TraceError(ValueError):
    """A file that cannot be used, and the reason."""


@dataclass(frozen=True)
class Trace:
    """The rows of one file, and their oddities."""

    samples: tuple[StepProfile, ...]
    placements: tuple[str, ...]  # of each sample, one digit for each node; empty where the row has none
    remarks: tuple[str, ...]


# Read measured step times from files: our own profiles, or the columns of published step-time traces.
#
# A broken file is rejected with its name and line. Figures that are only odd are reported and used.
def read_trace(path: Path) -> Trace:
    """Read the samples of a CSV file with a header, or of JSON lines (``.jsonl``, ``.json``).

    Columns: ``placement`` (a digit for each node: workers on it) or ``num_nodes`` and ``num_workers`` (or ``num_replicas``);
    ``local_batch`` (or ``local_bsz``), samples; ``step_time_s`` (or ``step_time``), seconds. Where known, ``communication_s``
    (or ``sync_time``) holds the seconds of the step that only sent gradients. All other fields of `StepProfile` are read as
    well. Other columns are ignored.

    Raises:
        TraceError: the file cannot be read, lacks a column, or holds a figure that is impossible for a training step.
    """
    samples, remarks = [], []
    seen: dict[tuple[Any, ...], tuple[int, float]] = {}
    try:
        rows = list(_rows(path))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise TraceError(f"cannot read {path}: {error}") from error
    if not rows:
        raise TraceError(f"{path} has no rows: give a CSV file with a header, or JSON lines, with one measured window each")
    for line, row in rows:
        sample = _sample(path, line, row)
        if sample.communication_s > sample.step_time_s:
            remarks.append(
                f"{path}:{line}: sync_time={sample.communication_s:g} s is longer than step_time={sample.step_time_s:g} s; "
                "parts of this row are not used. If all rows are like that, the two are not in the same unit"
            )
            no_parts: dict[str, Any] = {f"{part}_s": 0.0 for part in STEP_PARTS}
            sample = replace(sample, **no_parts)
        key = (row.get("placement"), *(getattr(sample, name) for name in _CONFIGURED_BY))
        before, before_s = seen.setdefault(key, (line, sample.step_time_s))
        if not 1 / MAX_CONTRADICTION <= sample.step_time_s / before_s <= MAX_CONTRADICTION:
            remarks.append(
                f"{path}:{line}: step_time={sample.step_time_s:g} s contradicts {before_s:g} s in line {before}, "
                "which has the same configuration; both are used"
            )
        samples.append(sample)
    return Trace(tuple(samples), tuple(str(row.get("placement") or "") for _, row in rows), tuple(remarks))


def _rows(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield line numbers and fields."""
    text = path.read_text(encoding="utf-8-sig")
    if path.suffix in (".jsonl", ".json"):
        for line, record in enumerate(text.splitlines(), start=1):
            if record.strip():
                try:
                    fields = json.loads(record)
                except json.JSONDecodeError as error:
                    raise TraceError(f"{path}:{line} is not a JSON object of a profile: {error}") from error
                if not isinstance(fields, dict):
                    raise TraceError(f"{path}:{line} is not a JSON object of a profile: {fields!r}")
                yield line, fields
        return
    reader = csv.DictReader(text.splitlines())
    for row in reader:
        if None in row or None in row.values():
            raise TraceError(f"{path}:{reader.line_num} has another number of fields than the header")
        yield reader.line_num, row


def _sample(path: Path, line: int, row: Mapping[str, Any]) -> StepProfile:
    fields: dict[str, Any] = {}
    for column, value in row.items():
        name = ALIASES.get(column, column)
        if name in _TYPES and value not in (None, ""):
            fields[name] = _value(path, line, column, value, _TYPES[name])
    if row.get("placement"):
        fields |= _placed(path, line, str(row["placement"]))
    for name, also in (("num_workers", "num_replicas or placement"), ("num_nodes", "placement"), ("local_batch", "local_bsz")):
        if name not in fields:
            raise TraceError(f"{path}:{line} has no {name} ({also}); columns are: {', '.join(map(str, row))}")
        if fields[name] < 1:
            raise TraceError(f"{path}:{line}: {name}={fields[name]!r} must be 1 or more")
    if "step_time_s" not in fields:
        raise TraceError(f"{path}:{line} has no step_time_s (step_time), in seconds; columns are: {', '.join(map(str, row))}")
    step_s, workers = fields["step_time_s"], fields["num_workers"]
    if not 0 < step_s < math.inf:
        raise TraceError(f"{path}:{line}: step_time={step_s!r} is not a time: give seconds above 0")
    if step_s > MAX_STEP_TIME_S:
        raise TraceError(f"{path}:{line}: step_time={step_s:g} would be hours; if it is in milliseconds, convert it to seconds")
    if workers < fields["num_nodes"]:
        raise TraceError(f"{path}:{line}: {workers} workers cannot be on {fields['num_nodes']} nodes: are the columns swapped?")
    communication_s = fields.get("communication_s")
    if communication_s is not None and not any(f"{part}_s" in fields for part in STEP_PARTS if part != "communication"):
        # The trace has no other part, so the rest of the step counts as computing.
        fields["forward_s"] = max(0.0, step_s - communication_s)
    sample = StepProfile(**{**_UNKNOWN, "global_batch": fields["local_batch"] * workers, "first_step": line, **fields})
    if problem := impossible_figure(sample):
        name, rule = problem
        raise TraceError(f"{path}:{line}: {name}={getattr(sample, name)!r} {rule}")
    return sample


_UNKNOWN: Mapping[str, Any] = {
    **dict.fromkeys(("round_number", "global_rank", "loader_workers", "memory_bytes"), 0),
    **dict.fromkeys((*(f"{part}_s" for part in STEP_PARTS), "samples_per_s", "cpu_percent"), 0.0),
    **dict.fromkeys(("num_steps", "intra_op_threads"), 1),
    "cores": 1.0,
    "worker_id": "trace",
    "device": "unknown",
}


def _placed(path: Path, line: int, placement: str) -> dict[str, int]:
    workers = [int(digit) for digit in placement if digit.isdecimal() and digit != "0"]
    if len(workers) != len(placement):
        raise TraceError(f"{path}:{line}: placement={placement!r} is not one digit from 1 to 9 for each node")
    nodes = {"num_nodes": len(workers), "num_workers": sum(workers)}
    return {**nodes, "fullest_node": max(workers), "emptiest_node": min(workers)}


def _value(path: Path, line: int, column: str, value: Any, kind: Any) -> Any:
    """Return `value` as the type of the profile's field; never negative."""
    if kind == "str":
        return str(value)
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise TraceError(f"{path}:{line}: {column}={value!r} is not a number") from None
    if not 0 <= number < math.inf:
        raise TraceError(f"{path}:{line}: {column}={value!r} must be finite and not negative")
    if kind == "int":
        if number != int(number):
            raise TraceError(f"{path}:{line}: {column}={value!r} must be a whole number")
        return int(number)
    return number


MAX_TIME_S = 1e8
"""Latest arrival and longest duration of a job, three years: a simulation decides every minute."""

MAX_COUNT = 10**9
"""Largest batch and number of devices of a job."""

SHAKE_S = 60.0
"""Maximum shift of an arrival by `shaken`, in seconds, to either side."""


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


# Workloads: jobs as their users submitted them, from the lines of a trace.
#
# Two formats are read, recognised by their columns:
#
# - Pollux's artefact (Qiao et al., OSDI 2021): `time` (s), `application`, `num_replicas`, `batch_size`, and optionally
#   `name`. The work and the speed of an application are not in the trace.
# - ElasticFlow's traces (Gu et al., ASPLOS 2023): `job_id`, `submission_time` (s), `duration` (s, with the devices that the
#   job had), `num_gpu`. The application is not in the trace.
def read_submissions(lines: Iterable[str], source: str, applications: Collection[str], num_devices: int) -> list[Submission]:
    """Return the jobs of a trace in order of time; jobs without a name are named after application and line.

    Args:
        source: the trace's name, for messages.
        applications: names of those with a known speed.
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


SAMPLES: Mapping[str, int] = {
    "bert": 2 * 88_641,  # SQuAD 1.1 in windows of 384 tokens
    "cifar10": 100 * 50_000,
    "deepspeech2": 80 * 7_135,  # utterances of CMU Arctic
    "imagenet": 90 * 1_281_167,
    "ncf": 10 * 4_970_845,  # MovieLens 1M with four negatives for each rating
    "yolov3": 50 * 16_551,  # PASCAL VOC 2007 and 2012
}
"""Samples that a job of each application reads before it ends: epochs times samples of its data set."""

MAX_SAMPLES = 10**11
"""Largest work of a job: a thousand times that of any here."""

RESTART_S: Mapping[str, float] = {
    "bert": 120.0,
    "cifar10": 30.0,
    "deepspeech2": 25.0,
    "imagenet": 250.0,
    "ncf": 15.0,
    "yolov3": 45.0,
}
"""Seconds that a restart from a checkpoint costs, as Sia's artefact takes them (Subramanya et al., SOSP 2023)."""

USUAL_BATCHES: Mapping[str, tuple[int, ...]] = {
    "bert": (384,),
    "cifar10": (2048, 4096),
    "deepspeech2": (320, 640),
    "imagenet": (3200, 6400),
    "ncf": (32768,),
    "yolov3": (64,),
}
"""Global batches that jobs of Pollux's workloads ask for, for traces that hold none."""


# Work of an application: a fixed number of samples, the same for all policies. Traces do not hold it.
#
# A job trains as many epochs as in Pollux's artefact (simulator/applications.py in github.com/petuum/adaptdl, branch
# osdi21-artifact) on a data set of the size that its validation traces imply. That artefact lets the number of steps depend
# on how much a batch teaches; here a global batch never changes, so an epoch is an epoch.
def read_work(path: Path) -> dict[str, int]:
    """Read samples by application from a CSV file with the columns `application` and `samples`.

    Raises:
        WorkloadError: with file and line.
        OSError: the file cannot be read.
    """
    reader = csv.DictReader(path.read_text(encoding="utf-8-sig").splitlines())
    missing = [column for column in ("application", "samples") if column not in (reader.fieldnames or ())]
    if missing:
        raise WorkloadError(f"{path}:1: no column {' and '.join(missing)}; the columns are application and samples")
    found: dict[str, int] = {}
    for row in reader:
        at = f"{path}:{reader.line_num}"
        samples = _number(row["samples"], "samples", at, MAX_SAMPLES)
        if samples < 1:
            raise WorkloadError(f"{at}: samples is {row['samples']!r}; it is a number above 0")
        if not row["application"]:
            raise WorkloadError(f"{at}: the application has no name")
        found[row["application"]] = round(samples)
    return found


Placement = tuple[int, ...]
"""Devices on each node, none of them 0, in the order of the nodes in the ring."""

PLACEMENTS, SCALABILITY = "-placements.csv", "-scalability.csv"


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step with the whole global batch, and the part of them that only synchronises."""

    step_s: float
    sync_s: float


@dataclass(frozen=True)
class _Curve:
    """Step time over the local batch, at one placement; arrays of shape ``(num_batches,)``."""

    log_batch: Floats
    log_step_s: Floats
    sync_share: Floats

    @classmethod
    def of(cls, samples: Iterable[StepProfile]) -> _Curve:
        """Average the samples of each local batch."""
        groups: defaultdict[int, list[StepProfile]] = defaultdict(list)
        for sample in samples:
            groups[sample.local_batch].append(sample)
        batches = sorted(groups)
        shares = [[min(1.0, s.communication_s / s.step_time_s) for s in groups[batch]] for batch in batches]
        return cls(
            np.log(batches),
            np.array([np.mean([math.log(s.step_time_s) for s in groups[batch]]) for batch in batches]),
            np.array([np.mean(found) for found in shares]),
        )

    @property
    def max_batch(self) -> int:
        return round(math.exp(self.log_batch[-1]))

    def at(self, local_batch: float) -> tuple[float, float]:
        """Return the log of the step's seconds and the share of synchronisation; log-linear in the local batch."""
        log_step_s, sync_share = (
            float(np.interp(math.log(local_batch), self.log_batch, known)) for known in (self.log_step_s, self.sync_share)
        )
        return log_step_s, sync_share


@dataclass(frozen=True)
class MeasuredApplication:
    """Measured step times of one application.

    Args:
        min_local_batch: smallest measured one, samples per device and step.
        max_devices: most devices that were measured together.
        max_on_node: most devices of one node that were measured together.
        by_placement: curves of the placements file; each key is the smallest rotation.
        by_nodes: for each number of nodes, the curves by devices per node.
    """

    name: str
    min_local_batch: int
    max_devices: int
    max_on_node: int
    by_placement: Mapping[Placement, _Curve] = field(repr=False)
    by_nodes: Mapping[int, Mapping[float, _Curve]] = field(repr=False)
    _found: dict[tuple[Placement, int], StepTime] = field(default_factory=dict, repr=False, compare=False)

    def most_devices(self, global_batch: int) -> int:
        """Return the largest number of devices with a measured local batch on each; 0 if no number has one."""
        return min(self.max_devices, global_batch // self.min_local_batch)

    def step_time(self, placement: Placement, global_batch: int) -> StepTime:
        """Return the time of one step.

        A placement that was not measured, nor its mirror image, is interpolated between the means by numbers of nodes and of
        devices. More nodes than were measured count as the measured maximum.

        Raises:
            ValueError: the local batch is below the smallest measured one, or a node has more devices than were measured.
        """
        if (found := self._found.get((placement, global_batch))) is None:
            found = self._found[placement, global_batch] = self._step_time(placement, global_batch)
        return found

    def steps_per_s(self, placement: Placement, global_batch: int) -> float:
        """Return the steps/s of a job with this placement. Raises as `step_time` does."""
        return 1 / self.step_time(placement, global_batch).step_s

    def _step_time(self, placement: Placement, global_batch: int) -> StepTime:
        devices = sum(placement)
        local_batch = math.ceil(global_batch / devices) if devices else 0
        if global_batch < devices * self.min_local_batch or not placement or max(placement) > self.max_on_node:
            raise ValueError(
                f"{self.name} was not measured on {placement} with {global_batch} samples per step: it needs at least "
                f"{self.min_local_batch} samples per device, and at most {self.max_on_node} devices on a node"
            )
        weighted = self._curves(placement)
        passes = math.ceil(local_batch / min(curve.max_batch for _, curve in weighted))
        log_step_s = sync_share = 0.0
        for weight, curve in weighted:
            log_s, share = curve.at(math.ceil(local_batch / passes))
            log_step_s += weight * log_s
            sync_share += weight * share
        pass_s = math.exp(log_step_s)
        sync_s = sync_share * pass_s
        return StepTime(passes * (pass_s - sync_s) + sync_s, sync_s)

    def _curves(self, placement: Placement) -> list[tuple[float, _Curve]]:
        """Return the curves to average, with weights that add up to 1."""
        for turned in (placement, placement[::-1]):
            curve = self.by_placement.get(_smallest_rotation(turned))
            if curve is not None:
                return [(1.0, curve)]
        nodes, per_node = len(placement), sum(placement) / len(placement)
        return [
            (of_nodes * of_density, self.by_nodes[int(count)][density])
            for of_nodes, count in _between(nodes, sorted(self.by_nodes))
            for of_density, density in _between(per_node, sorted(self.by_nodes[int(count)]))
        ]


def even_placement(num_devices: int, num_nodes: int) -> Placement:
    """Return devices spread over nodes as evenly as can be, the fullest nodes last."""
    least, more = divmod(num_devices, num_nodes)
    return (least,) * (num_nodes - more) + (least + 1,) * more


# Speed of applications with any placement and global batch, interpolated between measured step times.
#
# A folder holds two files for each application. `NAME-placements.csv` was measured on a few nodes with every number of
# devices on each, `NAME-scalability.csv` on more nodes with the devices spread evenly. The global batch is fixed, so a
# worker's local batch depends on the number of workers. A local batch above the largest measured one is accumulated in
# several passes, and only the last one synchronises.
def read_applications(folder: Path) -> dict[str, MeasuredApplication]:
    """Read the step times of all applications in a folder, by name.

    Raises:
        TraceError: there are none, or a file holds a row that cannot be; with file and line.
    """
    names = sorted(path.name.removesuffix(PLACEMENTS) for path in folder.glob(f"*{PLACEMENTS}"))
    if not names:
        raise TraceError(f"{folder} holds no file NAME{PLACEMENTS}; give a folder of measured step times with --speeds")
    return {name: _application(folder, name) for name in names}


def _application(folder: Path, name: str) -> MeasuredApplication:
    path = folder / f"{name}{PLACEMENTS}"
    trace = read_trace(path)
    samples = trace.samples
    groups: defaultdict[Placement, list[StepProfile]] = defaultdict(list)
    for number, (sample, placement) in enumerate(zip(samples, trace.placements, strict=True), 1):
        if not placement:
            raise TraceError(f"{path}, row {number}, has no placement: one digit for each node, devices on it")
        groups[_smallest_rotation(tuple(map(int, placement)))].append(sample)
    further = folder / f"{name}{SCALABILITY}"
    shapes: defaultdict[tuple[int, int], list[StepProfile]] = defaultdict(list)
    for sample in (*samples, *(read_trace(further).samples if further.exists() else ())):
        shapes[sample.num_nodes, sample.num_workers].append(sample)
    by_nodes: defaultdict[int, dict[float, _Curve]] = defaultdict(dict)
    for (nodes, devices), found in sorted(shapes.items()):
        by_nodes[nodes][devices / nodes] = _Curve.of(found)
    return MeasuredApplication(
        name,
        min_local_batch=min(sample.local_batch for sample in samples),
        max_devices=max(devices for _, devices in shapes),
        max_on_node=max(sample.fullest_node for sample in samples),
        by_placement={placement: _Curve.of(found) for placement, found in groups.items()},
        by_nodes=by_nodes,
    )


def _smallest_rotation(placement: Placement) -> Placement:
    return min(placement[start:] + placement[:start] for start in range(len(placement)))


def _between(value: float, known: Sequence[float]) -> list[tuple[float, float]]:
    """Return the neighbours of a value among sorted ones, and their weights, linear in the log; beyond the ends, the end."""
    after = bisect_left(known, value)
    if after == len(known):
        return [(1.0, known[-1])]
    if after == 0 or known[after] == value:
        return [(1.0, known[after])]
    low, high = known[after - 1], known[after]
    weight = math.log(value / low) / math.log(high / low)
    return [(1 - weight, low), (weight, high)]
