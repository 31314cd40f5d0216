"""Read measured step times from files: our own profiles, or the columns of published step-time traces.

A broken file is rejected with its name and line. Figures that are only odd are reported and used.
"""

from __future__ import annotations

import csv
import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_dlrover.perf.samples import STEP_PARTS, StepProfile, impossible_figure

__all__ = ["Trace", "TraceError", "read_trace"]

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
    remarks: tuple[str, ...]


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
            sample = dataclasses.replace(sample, **no_parts)
        key = (row.get("placement"), *(getattr(sample, name) for name in _CONFIGURED_BY))
        before, before_s = seen.setdefault(key, (line, sample.step_time_s))
        if not 1 / MAX_CONTRADICTION <= sample.step_time_s / before_s <= MAX_CONTRADICTION:
            remarks.append(
                f"{path}:{line}: step_time={sample.step_time_s:g} s contradicts {before_s:g} s in line {before}, "
                "which has the same configuration; both are used"
            )
        samples.append(sample)
    return Trace(tuple(samples), tuple(remarks))


def _rows(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield line numbers and fields."""
    text = path.read_text(encoding="utf-8-sig")
    if path.suffix in (".jsonl", ".json"):
        for line, record in enumerate(text.splitlines(), start=1):
            if record.strip():
                try:
                    fields = json.loads(record)
                except json.JSONDecodeError as error:
                    raise TraceError(f"{path}:{line} is no JSON object of a profile: {error}") from error
                if not isinstance(fields, dict):
                    raise TraceError(f"{path}:{line} holds {fields!r}, not a JSON object of a profile")
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
        raise TraceError(f"{path}:{line}: step_time={step_s!r} is no time of a step: seconds above 0")
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
    return {
        "num_nodes": len(workers),
        "num_workers": sum(workers),
        "fullest_node": max(workers),
        "emptiest_node": min(workers),
    }


def _value(path: Path, line: int, column: str, value: Any, kind: Any) -> Any:
    """Return `value` as the type of the profile's field; never negative."""
    if kind == "str":
        return str(value)
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise TraceError(f"{path}:{line}: {column}={value!r} is no number") from None
    if not 0 <= number < math.inf:
        raise TraceError(f"{path}:{line}: {column}={value!r} must be finite and not negative")
    if kind == "int":
        if number != int(number):
            raise TraceError(f"{path}:{line}: {column}={value!r} must be a whole number")
        return int(number)
    return number
