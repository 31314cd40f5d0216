"""The tables of a characterization: one row per point, as CSV and as Parquet."""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from lightning_dlrover.characterize.machine import has
from lightning_dlrover.characterize.point import PARTS, Point
from lightning_dlrover.characterize.results import Result
from lightning_dlrover.characterize.studies import Study

__all__ = ["rows_of", "write_tables"]

Cell = str | float | int | None


def rows_of(study: Study, results: Mapping[Point, Result]) -> list[dict[str, Cell]]:
    """Return one row for each measured point of a study."""
    return [{"study": study.name, **_row(results[point])} for point in study.points if point in results]


def _row(result: Result) -> dict[str, Cell]:
    point = result.point
    row: dict[str, Cell] = dict(dataclasses.asdict(point))
    is_loss = point.measures_loss
    row |= {
        "visits": result.num_visits,
        "blocks": result.num_blocks,
        "step_s": None if is_loss else result.median,
        "step_low_s": None if is_loss else result.low,
        "step_high_s": None if is_loss else result.high,
        "samples_per_s": None if is_loss else result.samples_per_s,
        "normalized_entropy": result.median if is_loss else None,
        "entropy_low": result.low if is_loss else None,
        "entropy_high": result.high if is_loss else None,
    }
    names = list(dict.fromkeys([*PARTS, *(("forward", "backward") if point.model else ())]))
    row |= {f"{name}_s": result.part_s.get(name) for name in names}
    is_known = not (is_loss or point.model)
    row |= {
        "parts_over_step": result.parts_s / result.median if result.parts_s and not is_loss else None,
        "cpu_percent": None if is_loss else result.cpu_percent,
        "peak_memory_bytes": None if is_loss else result.peak_memory_bytes,
        "flops_per_s": result.flops_per_s if is_known else None,
        "mlp_flops_per_s": result.mlp_flops_per_s if is_known else None,
        "lookup_bytes_per_s": result.lookup_bytes_per_s if is_known else None,
        "joules_per_step": result.joules_per_step,
    }
    return row


def write_tables(folder: Path, studies: Sequence[Study], results: Mapping[Point, Result]) -> list[Path]:
    """Write `{study}.csv`, and `{study}.parquet` where pyarrow is installed. Return the files."""
    written = []
    for study in studies:
        rows = rows_of(study, results)
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
