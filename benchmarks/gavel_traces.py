"""Measured speeds of jobs alone and in pairs, from Gavel's artefact (Narayanan et al., OSDI 2020).

`throughputs.csv` holds device, job, num_devices, steps_per_s. `pair_throughputs.csv` holds device, job_a, num_devices_a, job_b,
num_devices_b, steps_per_s_a, steps_per_s_b, with 0 for pairs that do not fit. A job is named by its model and batch size:
"ResNet-18 (batch size 16)".
"""

from __future__ import annotations

import csv
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.optimize import linprog

from lightning_dlrover.tuning.cluster import Device, Floats, Job, Profile

MEMORY_BYTES = 12 * 10**9
"""Memory of a device. The traces tell which pairs fit, not how much each job needs; see `_memory_of`."""


class TraceError(RuntimeError):
    """A trace is missing or holds what no trace can."""


def default_folder() -> Path:
    data = os.environ.get("DLROVER_SHARED_DATA", Path(__file__).resolve().parents[2] / "shared" / "data")
    return Path(data) / "job_traces" / "gavel"


@dataclass(frozen=True)
class MeasuredPairs:
    """One kind of device: jobs by name, and the relative speed of the first of each pair; pairs that do not fit are absent."""

    device: Device
    jobs: Mapping[str, Job]
    speeds: Mapping[tuple[str, str], float]


def read_pairs(folder: Path, device: str) -> MeasuredPairs:
    """Read the pairs of jobs on one device of that kind each.

    Raises:
        TraceError: a file is missing or wrong, or has nothing of that device.
    """
    alone = {
        (r["device"], r["job"], r["num_devices"]): _number(r["steps_per_s"], at) for r, at in _rows(folder / "throughputs.csv")
    }
    speeds: dict[tuple[str, str], float] = {}
    unfit: set[tuple[str, str]] = set()
    names: set[str] = set()
    for row, at in _rows(folder / "pair_throughputs.csv"):
        if row["device"] != device or row["num_devices_a"] != "1" or row["num_devices_b"] != "1":
            continue
        pair = row["job_a"], row["job_b"]
        for name, column, key in ((pair[0], "steps_per_s_a", pair), (pair[1], "steps_per_s_b", pair[::-1])):
            solo = alone.get((device, name, "1"), 0.0)
            if not solo > 0:
                raise TraceError(f"{at}: no throughput of {name!r} alone on {device} in {folder / 'throughputs.csv'}")
            speed = _number(row[column], at)
            names.add(name)
            if speed > 0:
                speeds[key] = speed / solo
            else:
                unfit.add(key)
    if not speeds:
        raise TraceError(f"{folder / 'pair_throughputs.csv'} has no pair on one {device}; give another --device")
    memory = _memory_of(sorted(names), {key for key in speeds if key not in unfit}, unfit)
    kinds = sorted({d for d, _, _ in alone if not d.endswith("_unconsolidated")})
    jobs = {
        name: Job(
            name,
            {k: Profile(memory[name], alone[k, name, "1"]) for k in kinds if alone.get((k, name, "1"), 0.0) > 0},
            family=_family(name)[0],
            batch_size=_family(name)[1],
        )
        for name in sorted(names)
    }
    return MeasuredPairs(Device(device, device, "node", MEMORY_BYTES, places=2), jobs, speeds)


def _rows(path: Path) -> Iterator[tuple[dict[str, str], str]]:
    """Each row, and where it is."""
    try:
        with path.open(newline="") as file:
            reader = csv.DictReader(file)
            for row in reader:
                at = f"{path}:{reader.line_num}"
                if any(value is None or key is None for key, value in row.items()):
                    raise TraceError(f"{at}: the row has more or fewer values than the {len(reader.fieldnames or ())} columns")
                yield row, at
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{path} cannot be read ({error}); give the folder with Gavel's traces with --data") from error


def _number(text: str, at: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise TraceError(f"{at}: {text!r} is no finite number")
    return number


def _family(name: str) -> tuple[str, float]:
    match = re.fullmatch(r"(.+) \(batch size (\d+)\)", name)
    return (match[1], float(match[2])) if match else (name, 0.0)


def _memory_of(names: Sequence[str], fit: set[tuple[str, str]], unfit: set[tuple[str, str]]) -> dict[str, int]:
    """Bytes of each job, such that the pairs that were measured fit and as few of the others as possible do.

    A linear programme: shares m >= 0.01 with m_a + m_b <= 1 for pairs that fit, m_a + m_b >= 1.01 - s for the others, s least.
    """
    at = {name: i for i, name in enumerate(names)}
    others = sorted({(min(p), max(p)) for p in unfit})
    rows, bounds = [], []
    for a, b in sorted({(min(p), max(p)) for p in fit}):
        rows.append(_row(len(names) + len(others), {at[a]: 1.0}, {at[b]: 1.0}))
        bounds.append(1.0)
    for i, (a, b) in enumerate(others):
        rows.append(_row(len(names) + len(others), {at[a]: -1.0}, {at[b]: -1.0}, {len(names) + i: -1.0}))
        bounds.append(-1.01)
    # A small cost of memory makes the solution unique where the pairs leave it open.
    cost = np.concatenate([np.full(len(names), 1e-3), np.ones(len(others))])
    limits = [(0.01, 1.0)] * len(names) + [(0.0, None)] * len(others)
    solution = linprog(cost, A_ub=np.array(rows), b_ub=np.array(bounds), bounds=limits)
    if solution.status != 0:
        raise TraceError(f"no amounts of memory explain which pairs fit: {solution.message}")
    return {name: int(solution.x[i] * MEMORY_BYTES * (1 - 1e-6)) for name, i in at.items()}


def _row(size: int, *terms: dict[int, float]) -> Floats:
    row = np.zeros(size)
    for term in terms:
        for index, value in term.items():
            row[index] += value
    return row
