"""Results of points: the median over their visits, its interval, and figures that follow from it. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from lightning_dlrover.characterize.intervals import half_widths, sensitivity
from lightning_dlrover.characterize.point import PARTS, Limit, Point, Visit
from lightning_dlrover.characterize.work import lookup_bytes, mlp_flops, step_flops

__all__ = ["Result", "agreement", "limit_values", "results_of"]


@dataclass(frozen=True)
class Result:
    """All that was measured of one point."""

    point: Point
    num_visits: int
    num_blocks: int
    median: float  # seconds per step, or normalized entropy
    low: float  # 90 % interval of another run's median; range over the seeds where the loss is measured
    high: float
    part_s: Mapping[str, float]
    peak_memory_bytes: int
    cpu_percent: float
    joules_per_step: float | None
    log_reference: float = 0.0  # mean over the visits of the log of the reference program's seconds; 0: not run
    sensitivity: float = 0.0  # change in log of a step's time per change in log of the reference program's

    @property
    def spread(self) -> float:
        """Width of the interval as a fraction of the median."""
        return (self.high - self.low) / self.median

    @property
    def samples_per_s(self) -> float:
        return self.point.batch / self.median

    @property
    def parts_s(self) -> float:
        return sum(self.part_s.values())

    @property
    def flops_per_s(self) -> float:
        """FLOP/s of whole steps."""
        return step_flops(self.point) / self.median

    @property
    def mlp_flops_per_s(self) -> float | None:
        """FLOP/s while the MLPs compute, all workers together."""
        return self._rate(self.point.batch * mlp_flops(self.point), "bottom_mlp", "top_mlp")

    @property
    def lookup_bytes_per_s(self) -> float | None:
        """Bytes of rows moved per second while tables are read and updated."""
        if not self.point.num_sparse:
            return None
        return self._rate(lookup_bytes(self.point), "embedding", "optimizer")

    def _rate(self, amount: float, *parts: str) -> float | None:
        seconds = sum(self.part_s.get(part, 0.0) for part in parts)
        return amount / seconds if seconds > 0 and not self.point.model else None

    def share(self, part: str) -> float:
        """Fraction of a step that a part takes."""
        return self.part_s.get(part, 0.0) / self.parts_s if self.parts_s else 0.0

    @property
    def largest_part(self) -> str:
        return max(self.part_s, key=lambda part: self.part_s[part], default="")


def results_of(visits: Iterable[Visit]) -> dict[Point, Result]:
    """Merge visits. Points without any figures are left out."""
    by_point: dict[Point, list[Visit]] = {}
    for visit in visits:
        if visit.blocks:
            by_point.setdefault(visit.point, []).append(visit)
    timed = {point: found for point, found in by_point.items() if not point.measures_loss}
    logs = [[(math.log(statistics.median(visit.blocks)), _log_reference(visit)) for visit in found] for found in timed.values()]
    widths, slope = half_widths(logs), sensitivity(logs)
    known = dict(zip(timed, widths, strict=True)) if widths is not None else {}
    results = {point: _merged(point, found, known.get(point)) for point, found in by_point.items()}
    for point, visits_logs in zip(timed, logs, strict=True):
        reference = statistics.fmean(log for _, log in visits_logs)
        results[point] = replace(results[point], log_reference=reference, sensitivity=slope)
    return results


def _log_reference(visit: Visit) -> float:
    return math.log(statistics.median(visit.reference_s)) if visit.reference_s else 0.0


def _merged(point: Point, visits: list[Visit], half_width: float | None) -> Result:
    """Return the result of a point.

    Args:
        half_width: of the interval of the log; None: take the range of the blocks, as long as no point has two visits.
    """
    blocks = [block for visit in visits for block in visit.blocks]
    median = statistics.median(blocks)
    if half_width is None:
        low, high = min(blocks), max(blocks)
    else:
        # Each visit counts alike, since they differ more than the blocks of one.
        median = math.exp(statistics.fmean(math.log(statistics.median(visit.blocks)) for visit in visits))
        low, high = median * math.exp(-half_width), median * math.exp(half_width)
    joules = [visit.joules_per_step for visit in visits if visit.joules_per_step is not None]
    parts = visits[0].part_s
    # The visits with the median ratio of parts to step: parts of different visits would not add up to any step.
    ordered = sorted(visits, key=lambda visit: sum(visit.part_s.values()) / statistics.median(visit.blocks))
    middle = ordered[(len(ordered) - 1) // 2 : len(ordered) // 2 + 1]
    names = [part for part in (*PARTS, *parts) if part in parts]
    return Result(
        point=point,
        num_visits=len(visits),
        num_blocks=len(blocks),
        median=median,
        low=low,
        high=high,
        part_s={
            part: statistics.mean(v.part_s[part] * median / statistics.median(v.blocks) for v in middle)
            for part in dict.fromkeys(names)
        },
        peak_memory_bytes=max(visit.peak_memory_bytes for visit in visits),
        cpu_percent=statistics.median(visit.cpu_percent for visit in visits),
        joules_per_step=statistics.median(joules) if joules else None,
    )


def limit_values(limits: Iterable[Limit]) -> dict[tuple[str, int], float]:
    """Return each limit, by its name and number of threads: the median of its best visit, since others were disturbed more."""
    found: dict[tuple[str, int], float] = {}
    for limit in limits:
        if limit.blocks:
            key, value = (limit.name, limit.threads), statistics.median(limit.blocks)
            better = min if limit.unit == "us" else max  # a latency
            found[key] = better(found.get(key, value), value)
    return found


def agreement(one: Mapping[Point, Result], other: Mapping[Point, Result]) -> tuple[int, int]:
    """Return how many points of two runs agree, and how many both have.

    Two results agree if the figure of one lies within the other's interval, both at the same speed of the machine: what the
    reference program's times explain is taken out.
    """
    both = [(result, other[point]) for point, result in one.items() if point in other]
    return sum(_agree(a, b) for a, b in both), len(both)


def _agree(a: Result, b: Result) -> bool:
    if a.point.measures_loss:
        return a.low <= b.median <= a.high or b.low <= a.median <= b.high
    slower = math.exp((a.sensitivity + b.sensitivity) / 2 * (b.log_reference - a.log_reference))
    return a.low <= b.median / slower <= a.high or b.low <= a.median * slower <= b.high
