"""Run the studies: limits first, then the points that the budget allows, each stored as soon as it is measured."""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_dlrover.characterize.budget import Aim, in_order, next_point, seconds_left
from lightning_dlrover.characterize.limits import GPU, LIMITS
from lightning_dlrover.characterize.measure import Effort
from lightning_dlrover.characterize.point import Point
from lightning_dlrover.characterize.store import Store
from lightning_dlrover.characterize.studies import Scope, Study
from lightning_dlrover.characterize.worker_pool import WorkerPool

__all__ = ["AIMS", "BUDGETS_S", "EFFORTS", "Progress", "measure_studies"]

BUDGETS_S = {"quick": 240.0, "full": 3600.0}
"""Seconds for measurements without --budget. The report takes a few more."""

AIMS = {"quick": Aim(), "full": Aim(min_visits=3, max_visits=8, spread=0.05)}
EFFORTS = {"quick": Effort(), "full": Effort(warm_s=0.5, block_s=0.3, num_blocks=5)}

LIMITS_SHARE = 0.2
"""Largest fraction of the budget for one visit to the machine's limits."""

WORK_PREFIX = ".work-"
"""Names of folders with input files and the workers' output; they last as long as their run."""


@dataclass
class Progress:
    """A bar with an estimate on a terminal, a line every ten measurements elsewhere."""

    total: int
    done: int = 0
    _last: int = -1

    def show(self, text: str, left_s: float) -> None:
        bar = "#" * round(24 * self.done / max(1, self.total))
        line = f"[{bar:24}] {self.done}/{self.total}, about {left_s / 60:.1f} min left: {text}"
        if sys.stderr.isatty():
            print(f"\r{line[:118]:118}", end="", file=sys.stderr, flush=True)
        elif self.done // 10 != self._last:
            self._last = self.done // 10
            print(line, file=sys.stderr, flush=True)

    def end(self) -> None:
        if sys.stderr.isatty():
            print(file=sys.stderr)


def measure_studies(store: Store, studies: Sequence[Study], scope: Scope, budget_s: float) -> None:
    """Measure the points that are missing in the store, until the budget is used or nothing is worth another visit."""
    deadline = time.monotonic() + budget_s
    for left in store.path.parent.glob(f"{WORK_PREFIX}*"):  # left by a killed run: this one alone has the folder now
        shutil.rmtree(left, ignore_errors=True)
    aim, points = AIMS[scope.size], in_order(studies)
    progress = Progress(len(points))
    with (
        tempfile.TemporaryDirectory(prefix=WORK_PREFIX, dir=store.path.parent) as work,
        WorkerPool(Path(work), EFFORTS[scope.size]) as pool,
    ):
        share_s = LIMITS_SHARE * budget_s
        later_s = seconds_left(points, store.found.visits, budget_s - share_s, aim)
        took_s = min(share_s, _measure_limits(store, scope, pool, progress, 1, deadline - budget_s + share_s, later_s))
        while True:
            left_s = deadline - time.monotonic() - took_s
            visits = store.found.visits
            point = next_point(points, visits, left_s, aim)
            if point is None:
                break
            progress.done = len({visit.point for visit in visits} & {*points})
            progress.show(_brief(point), seconds_left(points, visits, left_s, aim))
            store.add(pool.visit(point))
        _measure_limits(store, scope, pool, progress, 2, deadline, 0.0)  # minutes later: their better visit is the limit
        progress.end()


def _measure_limits(
    store: Store, scope: Scope, pool: WorkerPool, progress: Progress, visits: int, deadline: float, later_s: float
) -> float:
    """Measure the limits that have fewer visits. Return the seconds that it took.

    Args:
        later_s: estimate for the points that follow, which counts as time left.
    """
    began = time.monotonic()
    for name, threads in _missing_limits(store, scope, visits):
        if time.monotonic() >= deadline:
            break
        progress.show(LIMITS[name][0], deadline - time.monotonic() + later_s)
        store.add(pool.limit(name, threads))
    return time.monotonic() - began


def _missing_limits(store: Store, scope: Scope, visits: int) -> list[tuple[str, int]]:
    known = Counter((limit.name, limit.threads) for limit in store.found.limits)
    wanted = [(name, scope.cores) for name in LIMITS if scope.device == "cuda" or not name.startswith(GPU)]
    wanted += [(name, 1) for name in ("copy", "rows", "multiply", "multiply_torch")]
    return [each for each in dict.fromkeys(wanted) if known[each] < visits]


def _brief(point: Point) -> str:
    """Return the fields in which a point differs from the default."""
    default = Point(point.workload)
    changed = [f"{name}={value}" for name, value in vars(point).items() if value != getattr(default, name)]
    return f"{point.workload} {' '.join(changed)}"
