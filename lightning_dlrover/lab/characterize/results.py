"""Results of points: stored as they are measured, summarized, exported, and kept as history for later jobs."""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lightning_dlrover._version import __version__
from lightning_dlrover.files import RecordFile, RecordForm, read_lines
from lightning_dlrover.lab.characterize.points import (
    PARTS,
    WORKLOADS,
    Limit,
    Machine,
    Point,
    Study,
    Visit,
    dense_bytes,
    descriptor,
    half_widths,
    has,
    lookup_bytes,
    mlp_flops,
    sensitivity,
    step_flops,
    table_bytes,
)
from lightning_dlrover.tuning.history import JobEntry, JobHistory
from lightning_dlrover.tuning.samples import StepProfile


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
    """Merge visits. Points without any figures are skipped."""
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
        # Each visit has the same weight, because visits differ more than the blocks of one.
        median = math.exp(statistics.fmean(math.log(statistics.median(visit.blocks)) for visit in visits))
        low, high = median * math.exp(-half_width), median * math.exp(half_width)
    joules = [visit.joules_per_step for visit in visits if visit.joules_per_step is not None]
    parts = visits[0].part_s
    # The visits with the median ratio of parts to step: parts of different visits would not add up to any step.
    ordered = sorted(visits, key=lambda visit: sum(visit.part_s.values()) / statistics.median(visit.blocks))
    middle = ordered[(len(ordered) - 1) // 2 : len(ordered) // 2 + 1]
    return Result(
        point=point,
        num_visits=len(visits),
        num_blocks=len(blocks),
        median=median,
        low=low,
        high=high,
        part_s={
            part: statistics.mean(v.part_s[part] * median / statistics.median(v.blocks) for v in middle)
            for part in dict.fromkeys((*PARTS, *parts))
            if part in parts
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
    visits: list[Visit]
    limits: list[Limit]

    @staticmethod
    def of(header: Header, records: Sequence[Visit | Limit]) -> Measurements:
        visits = [record for record in records if isinstance(record, Visit)]
        return Measurements(header, visits, [record for record in records if isinstance(record, Limit)])


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
        if isinstance(record, Visit):
            self.found.visits.append(record)
        else:
            self.found.limits.append(record)

    def _check(self, machine: Machine) -> None:
        header = self.found.header
        if header.version != __version__:
            raise StoreError(
                f"{self.path} was measured with release {header.version}, this is {__version__}, whose figures may differ; "
                "give another --out"
            )
        if header.machine != machine:
            there = vars(header.machine)
            differences = ", ".join(
                f"{name} {there[name]!r} there, {here!r} here" for name, here in vars(machine).items() if there[name] != here
            )
            raise StoreError(f"{self.path} was measured on another machine ({differences}); give another --out")


def read_store(folder: Path) -> Measurements:
    """Read the measurements of a folder. A last line without an end is ignored.

    Raises:
        StoreError: the folder has no measurements, or a line is not one.
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


Cell = str | float | int | None


def _row(study: Study, result: Result) -> dict[str, Cell]:
    """Return one row of a study's table."""
    point = result.point
    is_loss, is_known = point.measures_loss, not (point.measures_loss or point.model)
    interval = (result.median, result.low, result.high)
    step, entropy = ((None,) * 3, interval) if is_loss else (interval, (None,) * 3)
    return {
        "study": study.name,
        **asdict(point),
        "visits": result.num_visits,
        "blocks": result.num_blocks,
        **dict(zip(("step_s", "step_low_s", "step_high_s"), step, strict=True)),
        "samples_per_s": None if is_loss else result.samples_per_s,
        **dict(zip(("normalized_entropy", "entropy_low", "entropy_high"), entropy, strict=True)),
        **{f"{name}_s": result.part_s.get(name) for name in (*PARTS, *(("forward", "backward") if point.model else ()))},
        "parts_over_step": result.parts_s / result.median if result.parts_s and not is_loss else None,
        "cpu_percent": None if is_loss else result.cpu_percent,
        "peak_memory_bytes": None if is_loss else result.peak_memory_bytes,
        "flops_per_s": result.flops_per_s if is_known else None,
        "mlp_flops_per_s": result.mlp_flops_per_s if is_known else None,
        "lookup_bytes_per_s": result.lookup_bytes_per_s if is_known else None,
        "joules_per_step": result.joules_per_step,
    }


def write_tables(folder: Path, studies: Sequence[Study], results: Mapping[Point, Result]) -> list[Path]:
    """Write `{study}.csv`, and `{study}.parquet` where pyarrow is installed. Return the files."""
    written = []
    for study in studies:
        rows = [_row(study, results[point]) for point in study.points if point in results]
        if not rows:
            continue
        names = list(dict.fromkeys(name for row in rows for name in row))
        path = folder / f"{study.name}.csv"
        with path.open("w", newline="", encoding="utf-8") as file:
            table = csv.DictWriter(file, names, lineterminator="\n")
            table.writeheader()
            table.writerows(rows)
        written.append(path)
        if has("pyarrow"):
            import pyarrow as pa
            import pyarrow.parquet as pq

            written.append(folder / f"{study.name}.parquet")
            pq.write_table(pa.table({name: [row.get(name) for row in rows] for name in names}), written[-1])
    return written


PREFETCH_FACTOR = 2
"""Batches that a DataLoader's worker prepares ahead by default."""


def record_in_history(history: JobHistory, machine: Machine, visits: Iterable[Visit]) -> int:
    """Write each reference model as a job that has tried its settings one after the other. Return the number of jobs.

    Only points on CPU with a DataLoader count: they differ in workers, threads and loader workers, as a job's settings do.

    Raises:
        HistoryError: the history cannot be written.
    """
    by_workload: dict[str, list[Visit]] = {}
    for visit in visits:
        if _has_settings(visit.point) and visit.blocks:
            by_workload.setdefault(visit.point.workload, []).append(visit)
    for workload, found in by_workload.items():
        found.sort(key=lambda visit: visit.at)
        whole = WORKLOADS[workload].batch
        windows = [as_window(visit, machine.cores, whole) for visit in found]
        name = f"characterize-{workload}"
        entry = JobEntry(
            key=f"{name}-{machine.name}",
            run_id=name,
            started_at=found[0].at,
            updated_at=found[-1].at + found[-1].took_s,
            outcome="finished",
            descriptor=descriptor(WORKLOADS[workload], machine.cores),
        )
        history.record(entry, windows)
    return len(by_workload)


def _has_settings(point: Point) -> bool:
    """Whether a point is a reference model as a job would run it, changed in its settings only."""
    base = WORKLOADS.get(point.workload)
    if base is None or point.device != "cpu" or point.data == "memory" or point.placement not in ("local", "table_wise"):
        return False
    model = ("num_dense", "num_sparse", "rows", "dim", "lookups", "skew", "width", "depth")
    data = "packed" if point.workload == "input" else "rows"
    return point.data == data and all(getattr(point, name) == getattr(base, name) for name in model)


def as_window(visit: Visit, node_cores: float, global_batch: int) -> StepProfile:
    """Return a visit as a window of steps.

    Args:
        global_batch: batch of the reference model. A point's own may be a few samples smaller, to be divisible.
    """
    point = visit.point
    step_s = statistics.median(visit.blocks) * global_batch / point.batch
    parts = visit.part_s
    compute_s = sum(s for name, s in parts.items() if name not in ("data", "communication", "optimizer"))
    # Parts come from blocks of their own, so they do not add up to the other blocks' steps exactly.
    scale = min(1.0, step_s / sum(parts.values())) if any(parts.values()) else 0.0
    known: dict[str, Any] = {
        "data_wait_s": parts.get("data", 0.0) * scale,
        "forward_s": visit.forward_s * scale,
        "backward_s": max(0.0, compute_s - visit.forward_s) * scale,
        "communication_s": parts.get("communication", 0.0) * scale,
        "optimizer_s": parts.get("optimizer", 0.0) * scale,
    }
    return StepProfile(
        worker_id="characterize",
        round_number=1,
        global_rank=0,
        num_workers=point.num_workers,
        num_nodes=1,
        first_step=0,
        num_steps=len(visit.blocks),
        global_batch=global_batch,
        local_batch=max(1, global_batch // point.num_workers),
        loader_workers=point.loader_workers,
        intra_op_threads=point.threads,
        cores=node_cores,
        device="cpu",
        step_time_s=step_s,
        **known,
        other_s=max(0.0, step_s - sum(known.values())),
        samples_per_s=global_batch / step_s,
        memory_bytes=visit.peak_memory_bytes // point.num_workers,
        cpu_percent=visit.cpu_percent / point.num_workers,
        dense_bytes=dense_bytes(point),
        at=visit.at,
        peak_memory_bytes=visit.peak_memory_bytes // point.num_workers,
        dense_flops=int(mlp_flops(point)),
        embedding_bytes=table_bytes(point),
        lookups_per_sample=float(point.num_sparse * point.lookups),
        fullest_node=point.num_workers,
        emptiest_node=point.num_workers,
        prefetch_factor=PREFETCH_FACTOR if point.loader_workers else 0,
    )
