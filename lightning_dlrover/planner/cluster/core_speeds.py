"""Predict how fast jobs are beside each other on the cores of one machine, relative to their speed alone.

Most of a slowdown follows from the division of cores (`cores.py`). The rest is learned from observed groups, as corrections of
the log of the expected speed e of a job i of family f beside jobs j of families g, each of which keeps a fraction b of the
machine's cores busy while the job has one:

    log speed = log e + a_f log t + c_f + sum over j of b_j (d_g + h_fg)

t is the speed with the job's threads if the cores were enough. a is how much better a job's work goes with fewer threads, c the
cost of waking up late, d a job's pressure on caches and memory, h what only these two do to each other. All are small before
anything was observed (a Bayesian linear regression).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lightning_dlrover.planner.cluster.cores import CoreUse, Shares, expected, thread_shares
from lightning_dlrover.planner.cluster.jobs import Device, Job
from lightning_dlrover.planner.cluster.policy import Floats
from lightning_dlrover.planner.cluster.slowdown import LEAST_SPEED, Observation

__all__ = ["CoreSpeeds"]

Group = tuple[CoreUse, ...]

DEVIATIONS = {"threads": 0.3, "wake": 0.1, "pressure": 0.2, "pair": 0.1}
"""Standard deviations of the corrections before anything was observed: a, c, d, h."""
LEAST_REST = 0.5
"""Cores of others beside a job on a single core: they leave their data in its cache."""
NOISE = 0.08
"""Standard deviation of the log of an observed speed."""


@dataclass(frozen=True)
class _Corrections:
    """Corrections of all families that were observed, one number for each column."""

    columns: Mapping[tuple[str, ...], int]
    values: Floats


class CoreSpeeds:
    """Learned from observed groups; a `SpeedPredictor` for CPUs. The limit "cores" of a device is its number of cores.

    Equal observations give equal predictions. Jobs of unknown use are taken to keep one core busy.

    Args:
        shares: threads of jobs side by side.
    """

    def __init__(self, corrections: _Corrections | None = None, shares: Shares = thread_shares) -> None:
        self._corrections, self._shares = corrections, shares
        self._known: dict[tuple[Group, float], Floats] = {}

    @classmethod
    def fit(cls, observations: Sequence[Observation], shares: Shares = thread_shares) -> CoreSpeeds:
        """Fit to everything observed so far."""
        rows: list[dict[tuple[str, ...], float]] = []
        targets: list[float] = []
        for observation in observations:
            group = tuple(_use_of(job, observation.device) for job in observation.group)
            speeds, of_group = _terms(group, _num_cores(observation.device), shares)
            rows += of_group
            targets += [float(np.log(speed / e)) for speed, e in zip(observation.relative_speeds, speeds, strict=True)]
        columns = {name: index for index, name in enumerate(sorted({name for row in rows for name in row}))}
        if not columns:
            return cls(None, shares)
        table = np.array([_row(row, columns) for row in rows])
        precision = np.diag([DEVIATIONS[name[0]] ** -2 for name in columns]) + table.T @ table / NOISE**2
        values = np.linalg.solve(precision, table.T @ np.array(targets) / NOISE**2)
        return cls(_Corrections(columns, values), shares)

    def relative_speeds(self, groups: Sequence[Sequence[Job]], device: Device) -> list[Floats]:
        """Return the mean predictions; see `SpeedPredictor`."""
        found = []
        for group in groups:
            uses = [_use_of(job, device) for job in group]
            order = sorted(range(len(uses)), key=lambda index: uses[index])
            speeds = np.empty(len(uses))
            speeds[order] = self._speeds(tuple(uses[index] for index in order), _num_cores(device))
            found.append(speeds)
        return found

    def _speeds(self, group: Group, num_cores: float) -> Floats:
        known = self._known.get((group, num_cores))
        if known is None:
            known, rows = _terms(group, num_cores, self._shares)
            if self._corrections is not None and len(group) > 1:
                columns, values = self._corrections.columns, self._corrections.values
                known = known * np.exp(np.array([_row(row, columns) for row in rows]) @ values)
            known = self._known[group, num_cores] = np.maximum(known, LEAST_SPEED)
        return known


def _terms(group: Group, num_cores: float, shares: Shares) -> tuple[Floats, list[dict[tuple[str, ...], float]]]:
    """Return expected speeds, and for each job the weights of the corrections that concern it."""
    if len(group) == 1:
        return np.ones(1), [{}]
    found = expected(group, shares([job.cores for job in group], num_cores), num_cores)
    rows = []
    for i, job in enumerate(group):
        # While a job has a core, the others have the rest.
        others = float(found.use.sum() - found.use[i])
        at_once = min(1.0, max(num_cores - 1.0, LEAST_REST) / others) if others else 0.0
        row: dict[tuple[str, ...], float] = {
            ("threads", job.family): float(np.log(found.threaded[i])),
            ("wake", job.family): 1.0,
        }
        for j, other in enumerate(group):
            if j != i:
                for name in (("pressure", other.family), ("pair", job.family, other.family)):
                    row[name] = row.get(name, 0.0) + at_once * float(found.use[j]) / num_cores
        rows.append(row)
    return found.speeds, rows


def _row(row: Mapping[tuple[str, ...], float], columns: Mapping[tuple[str, ...], int]) -> Floats:
    values = np.zeros(len(columns))
    for name, amount in row.items():
        if name in columns:
            values[columns[name]] = amount
    return values


def _num_cores(device: Device) -> float:
    return device.limits.get("cores", 1.0)


def _use_of(job: Job, device: Device) -> CoreUse:
    use = job.profiles[device.kind].use
    return CoreUse(job.family or job.name, use.get("cores", 1.0), use.get("input", 0.0))
