"""The nine studies: the points of each, quick or full, on a given machine. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

from lightning_dlrover.characterize.point import Data, Placement, Point
from lightning_dlrover.characterize.work import table_bytes

__all__ = ["STUDIES", "WORKLOADS", "Scope", "Study", "all_studies"]

STUDIES = ("features", "batch", "rows", "mlp", "lookups", "placement", "workers", "loader", "devices")
MEMORY_SHARE = 0.3
"""Largest fraction of the free memory that the tables of a point may take: the machine has other users."""

WORKLOADS = {
    "balanced": Point("balanced"),
    "compute": Point("compute", num_dense=256, num_sparse=0, width=512, depth=4),
    "memory": Point("memory", num_dense=16, num_sparse=4, lookups=32, width=64, depth=1, batch=384),
    "input": Point("input", num_dense=256, num_sparse=0, width=64, depth=2, batch=48, data="packed"),
}
"""Reference models. `compute` and `input` have no tables, so that they stand for models without any, too."""


@dataclass(frozen=True)
class Scope:
    """Resources that a run may use."""

    size: Literal["quick", "full"]
    device: Literal["cpu", "cuda"]
    cores: int
    memory_bytes: int  # free
    has_torchrec: bool
    has_pyarrow: bool
    users_model: str = ""

    @property
    def is_full(self) -> bool:
        return self.size == "full"


@dataclass(frozen=True)
class Study:
    """A sweep with a figure. `x` is the field on the axis; points that differ in `series` make lines of their own."""

    name: str
    title: str
    x: str
    series: tuple[str, ...]
    points: tuple[Point, ...]
    skipped: tuple[str, ...] = ()  # left-out points, and the reasons


def all_studies(scope: Scope, names: Iterable[str] = STUDIES) -> list[Study]:
    """Return the studies in their order. Points with tables that do not fit into the memory are left out, with a line."""
    makers = {
        "features": _features,
        "batch": _batch,
        "rows": _rows,
        "mlp": _mlp,
        "lookups": _lookups,
        "placement": _placement,
        "workers": _workers,
        "loader": _loader,
        "devices": _devices,
    }
    wanted = set(names)
    return [_fitting(makers[name](scope), scope) for name in STUDIES if name in wanted]


def _fitting(study: Study, scope: Scope) -> Study:
    room = MEMORY_SHARE * scope.memory_bytes
    copies = [point.num_workers if point.placement in ("local", "replicated") else 1 for point in study.points]
    large = [p for p, n in zip(study.points, copies, strict=True) if p.device == "cpu" and n * table_bytes(p) > room]
    if not large:
        return study
    least = min(table_bytes(p) for p in large) / 2**30
    text = f"{len(large)} points with tables of {least:.1f} GiB and more: {room / 2**30:.1f} GiB may be used here"
    kept = tuple(point for point in study.points if point not in large)
    return replace(study, points=kept, skipped=(*study.skipped, text))


def _base(scope: Scope, workload: str = "balanced") -> Point:
    """Return a reference model on one worker that uses all cores, or the GPU."""
    point = replace(WORKLOADS[workload], threads=scope.cores, device=scope.device)
    if scope.device == "cuda":
        return replace(point, batch=8 * point.batch)
    return point


def _features(scope: Scope) -> Study:
    base = _base(scope)
    dense, sparse = ((16, 128, 1024), (2, 8, 32)) if not scope.is_full else ((16, 64, 256, 1024, 4096), (4, 8, 16, 32, 64, 128))
    points = [replace(base, num_dense=d, num_sparse=s) for s, d in product(sparse, dense)]
    return Study("features", "Dense and sparse features", "num_dense", ("num_sparse",), tuple(points))


def _batch(scope: Scope) -> Study:
    base = _base(scope)
    sizes: tuple[int, ...] = (32, 128, 512, 2048) if not scope.is_full else (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
    if scope.device == "cuda":
        sizes = tuple(8 * size for size in sizes)
    speed = [replace(base, batch=size) for size in sizes]
    planted = Point("planted", num_dense=16, rows=2000, dim=8, width=32, depth=1, threads=scope.cores)
    small, *larger = (64, 512, 4096) if not scope.is_full else (64, 256, 1024, 4096, 16384)
    # Adagrad's step, scaled with the square root of the batch, is the usual first attempt at a larger one.
    rates = [(small, 0.02), *((b, rate) for b in larger for rate in (0.02, 0.02 * (b / small) ** 0.5))]
    loss = [replace(planted, batch=b, learning_rate=rate) for b, rate in rates]
    return Study("batch", "Batch size", "batch", (), (*speed, *loss))


def _rows(scope: Scope) -> Study:
    base = replace(_base(scope), lookups=32, width=64, depth=1)
    sizes = [1_000, 10_000, 100_000, 1_000_000]
    if scope.is_full:
        sizes = [1_000, 3_000, 10_000, 30_000, 100_000, 300_000, 1_000_000, 3_000_000, 10_000_000, 30_000_000]
    return Study("rows", "Rows per table", "rows", (), tuple(replace(base, rows=rows) for rows in sizes))


def _mlp(scope: Scope) -> Study:
    base = _base(scope)
    widths, depths = ((64, 256, 768), (1, 4)) if not scope.is_full else ((64, 128, 256, 512, 1024, 2048), (1, 2, 4, 8))
    points = [replace(base, width=width, depth=depth) for depth, width in product(depths, widths)]
    return Study("mlp", "MLP width and depth", "width", ("depth",), tuple(points))


def _lookups(scope: Scope) -> Study:
    base = replace(_base(scope), rows=1_000_000 if scope.is_full else 300_000)
    counts, skews = ((1, 8, 64), (0.0, 1.2)) if not scope.is_full else ((1, 4, 16, 64, 128), (0.0, 0.8, 1.05, 1.2))
    points = [replace(base, lookups=n, skew=skew) for skew, n in product(skews, counts)]
    return Study("lookups", "Lookups per table, and skew of the ids", "lookups", ("skew",), tuple(points))


def _placement(scope: Scope) -> Study:
    skipped: list[str] = []
    kinds: list[Placement] = ["replicated"]
    if scope.has_torchrec:
        kinds += ["table_wise", "row_wise", "column_wise", "remote"]
    else:
        skipped.append("tables divided over workers: torchrec is not installed")
    if scope.device == "cpu":
        skipped.append("host memory with a GPU (UVM): needs a GPU (--device cuda)")
    else:
        skipped.append("host memory with a GPU (UVM): measured as `mix` in the study `devices`, where tables stay on the CPU")
    counts = (2,) if not scope.is_full else tuple(sorted({2, max(2, scope.cores)}))
    bases = [WORKLOADS["balanced"], WORKLOADS["memory"]]
    points = [
        replace(base, num_workers=n, threads=max(1, scope.cores // n), placement=kind, batch=base.batch // n * n)
        for base, n, kind in product(bases, counts, kinds)
    ]
    return Study(
        "placement", "Placement of the tables", "placement", ("workload", "num_workers"), tuple(points), tuple(skipped)
    )


def _over_workers(point: Point, scope: Scope) -> Point | None:
    """Return the point with tables that several workers can share; None where that is impossible."""
    if not point.num_sparse:
        return replace(point, placement="local")
    return replace(point, placement="table_wise") if scope.has_torchrec else None


def _workers(scope: Scope) -> Study:
    powers = [2**k for k in range(11) if 2**k <= scope.cores]
    counts = sorted({*powers, scope.cores, scope.cores + 1})
    threads = sorted({*powers, scope.cores})
    shapes = [(n, t) for n, t in product(counts, threads) if n * t <= scope.cores or (t == 1 and n == scope.cores + 1)]
    points, skipped = [], []
    for workload in ("compute", "memory", "balanced"):
        base = _over_workers(replace(WORKLOADS[workload], data="rows"), scope)
        if base is None:
            skipped.append(f"{workload}: several workers share its tables through torchrec, which is not installed")
            continue
        loaders = (0, 1) if workload != "balanced" or scope.is_full else (0,)
        points += [_divided(base, n, t, loader) for loader, (n, t) in product(loaders, shapes)]
    series = ("workload", "threads", "loader_workers")
    return Study("workers", "Workers, and cores per worker", "num_workers", series, tuple(points), tuple(skipped))


def _divided(base: Point, num_workers: int, threads: int, loader_workers: int) -> Point:
    batch = max(1, base.batch // num_workers) * num_workers
    return replace(base, num_workers=num_workers, threads=threads, loader_workers=loader_workers, batch=batch)


def _loader(scope: Scope) -> Study:
    small = WORKLOADS["input"]
    formats: list[Data] = ["rows", "parquet", "packed"] if scope.has_pyarrow else ["rows", "packed"]
    skipped = () if scope.has_pyarrow else ("Parquet: pyarrow is not installed",)
    counts = sorted({0, 1, 2, *((scope.cores,) if scope.is_full else ())})
    points = [replace(small, data=name, loader_workers=n) for name, n in product(formats, counts)]
    workers = sorted({min(2, scope.cores + 1), scope.cores + 1}) if not scope.is_full else [2, scope.cores, scope.cores + 1]
    points += [_divided(small, w, 1, n) for w, n in product(sorted({*workers}), counts)]
    title = "Loader workers and input format"
    return Study("loader", title, "loader_workers", ("data", "num_workers"), tuple(dict.fromkeys(points)), skipped)


def _devices(scope: Scope) -> Study:
    names: Sequence[str] = ("balanced", "compute", "memory")
    on_cpu = [replace(_base(replace(scope, device="cpu"), name), batch=_base(scope, name).batch) for name in names]
    points, skipped = list(on_cpu), []
    if scope.device == "cuda":
        points += [replace(point, device=device) for device in ("cuda", "mix") for point in on_cpu]
    else:
        skipped.append("GPU, and the mix of both: --device cpu")
    if scope.users_model:
        points.append(Point("yours", model=scope.users_model, threads=scope.cores, device=scope.device))
    else:
        skipped.append("your own model: give --model MODULE:CLASS")
    return Study("devices", "Reference models on each device", "workload", ("device",), tuple(points), tuple(skipped))
