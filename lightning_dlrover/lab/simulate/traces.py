"""Speed of applications with any placement and global batch, interpolated between measured step times.

A folder holds two files for each application. `NAME-placements.csv` was measured on a few nodes with every number of devices on
each, `NAME-scalability.csv` on more nodes with the devices spread evenly. The global batch is fixed, so a worker's local batch
depends on the number of workers. A local batch above the largest measured one is accumulated in several passes, of which only
the last one synchronises.
"""

from __future__ import annotations

import csv
import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from lightning_dlrover.perf.samples import StepProfile
from lightning_dlrover.perf.traces import TraceError, read_trace
from lightning_dlrover.planner.cluster.policy import Floats

__all__ = ["MeasuredApplication", "Placement", "StepTime", "even_placement", "read_applications"]

Placement = tuple[int, ...]
"""Devices on each node, none of them 0, in the order in which the nodes form a ring."""

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
        where = math.log(local_batch)
        return float(np.interp(where, self.log_batch, self.log_step_s)), float(
            np.interp(where, self.log_batch, self.sync_share)
        )


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
    by_nodes: Mapping[int, Sequence[tuple[float, _Curve]]] = field(repr=False)
    _found: dict[tuple[Placement, int], StepTime] = field(default_factory=dict, repr=False, compare=False)

    def most_devices(self, global_batch: int) -> int:
        """Return the largest number of devices on which each has a local batch that was measured; 0 if there is none."""
        return min(self.max_devices, global_batch // self.min_local_batch)

    def step_time(self, placement: Placement, global_batch: int) -> StepTime:
        """Return the time of one step.

        A placement that was not measured, nor its mirror image, is interpolated between the means by numbers of nodes and of
        devices. More nodes than were measured count as the most that were.

        Raises:
            ValueError: the local batch is below the smallest measured one, or a node has more devices than were measured.
        """
        key = placement, global_batch
        if key not in self._found:
            self._found[key] = self._step_time(placement, global_batch)
        return self._found[key]

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
            (of_nodes * of_density, curve)
            for of_nodes, count in _between(nodes, sorted(self.by_nodes))
            for of_density, curve in self._on_nodes(int(count), per_node)
        ]

    def _on_nodes(self, num_nodes: int, per_node: float) -> list[tuple[float, _Curve]]:
        curves = dict(self.by_nodes[num_nodes])
        return [(weight, curves[density]) for weight, density in _between(per_node, sorted(curves))]


def even_placement(num_devices: int, num_nodes: int) -> Placement:
    """Return devices spread over nodes as evenly as can be, the fullest nodes last."""
    least, more = divmod(num_devices, num_nodes)
    return (least,) * (num_nodes - more) + (least + 1,) * more


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
    samples = read_trace(path).samples
    groups: defaultdict[Placement, list[StepProfile]] = defaultdict(list)
    for sample, placement in zip(samples, _placements(path), strict=True):
        groups[_smallest_rotation(placement)].append(sample)
    shapes: defaultdict[tuple[int, int], list[StepProfile]] = defaultdict(list)
    for sample in samples:
        shapes[sample.num_nodes, sample.num_workers].append(sample)
    further = folder / f"{name}{SCALABILITY}"
    if further.exists():
        for sample in read_trace(further).samples:
            shapes[sample.num_nodes, sample.num_workers].append(sample)
    by_nodes: defaultdict[int, list[tuple[float, _Curve]]] = defaultdict(list)
    for (nodes, devices), found in sorted(shapes.items()):
        by_nodes[nodes].append((devices / nodes, _Curve.of(found)))
    return MeasuredApplication(
        name,
        min_local_batch=min(sample.local_batch for sample in samples),
        max_devices=max(devices for _, devices in shapes),
        max_on_node=max(sample.fullest_node for sample in samples),
        by_placement={placement: _Curve.of(found) for placement, found in groups.items()},
        by_nodes=dict(by_nodes),
    )


def _placements(path: Path) -> list[Placement]:
    """Return the placement of each row. `read_trace` has checked that it is made of digits above 0, where there is one."""
    reader = csv.DictReader(path.read_text(encoding="utf-8-sig").splitlines())
    if "placement" not in (reader.fieldnames or ()):
        raise TraceError(f"{path}:1 has no column placement: one digit for each node, devices on it")
    found = []
    for row in reader:
        if not row["placement"]:
            raise TraceError(f"{path}:{reader.line_num} has no placement: one digit for each node, devices on it")
        found.append(tuple(map(int, row["placement"])))
    return found


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
