"""Quality of `dlrover lab characterize --quick`: its time, its repeatability, its limits, and the start that jobs get from it.

    python benchmarks/characterize.py [--out DIR] [--jobs dense,embedding,input,images] [--reuse]

runs      Two runs of the command, one after the other. `minutes` is the longer one's wall time. Two measurements of a point
          agree if the figure of one lies within the other's 90 % interval, at the same speed of the machine. `width` is
          the median over all points of that interval's width relative to the figure.
parts     Sum of a step's parts against its time, which is measured in other steps. The figure is the median over all points.
limits    Memory copy against a STREAM-like program in C, matrix multiply against scipy's BLAS (`limit_references.py`).
warm      Jobs of `auto_config_jobs.py` start with the history of the first run. The settings of their first plan are measured
          in turn with the best of a grid. They have visited no other settings. `warm_min` is the worst of the jobs that the
          reference models resemble, `warm_unlike` the job `images`, which none of them does.

The last line holds `minutes= agree= width= parts_error= copy_error= gemm_error= warm_min= warm_unlike=`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from auto_config import FULL, Grid, careful_user, measure_grid, plan_live
from auto_config_jobs import JOBS
from jobs import BenchmarkError, Workspace, describe_machine, result_line

from lightning_dlrover.lab.characterize.results import Result, agreement, read_store, results_of

SIZE = replace(FULL, ahead=(2,), rounds=1, measure_s=0.6, comparisons=3, compare_s=1.0)
RUN_TIMEOUT_S = 600.0
UNLIKE = "images"


def run_quick(out: Path, history: Path) -> float:
    """Run the command; return its wall time in minutes."""
    began = time.monotonic()
    command = [sys.executable, "-m", "lightning_dlrover.cli", "lab", "characterize", "--quick", "--out", str(out)]
    log = out.with_suffix(".log")
    with log.open("w") as output:
        done = subprocess.run(
            command,
            env={**os.environ, "DLROVER_HISTORY": str(history)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            timeout=RUN_TIMEOUT_S,
        )
    if done.returncode:
        raise BenchmarkError(f"`{' '.join(command)}` ended with {done.returncode}, see {log}")
    return (time.monotonic() - began) / 60


def limit_errors() -> dict[str, float]:
    """Return the differences that `limit_references.py` finds, in a process with the command's settings."""
    command = [sys.executable, str(Path(__file__).with_name("limit_references.py"))]
    output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=RUN_TIMEOUT_S).stdout
    print("\n".join(output.splitlines()[1:-1]), flush=True)
    return {name: float(value) for name, _, value in (word.partition("=") for word in output.splitlines()[-1].split())}


def parts_error(results: list[Result]) -> float:
    errors = [abs(r.parts_s / r.median - 1) for r in results if r.parts_s]
    within = sum(error <= 0.05 for error in errors)
    print(f"parts: {within} of {len(errors)} points within 5 % of the step, largest difference {max(errors):.1%}", flush=True)
    total = abs(sum(r.parts_s for r in results if r.parts_s) / sum(r.median for r in results if r.parts_s) - 1)
    print(f"parts: all points together differ by {total:.1%}", flush=True)
    return statistics.median(errors)


def warm_starts(history: Path, kinds: list[str], grid_file: Path) -> dict[str, float]:
    """Return the fraction of the best that each job's first plan reaches."""
    found = {}
    grids = {k: Grid.from_data(v) for k, v in json.loads(grid_file.read_text()).items()} if grid_file.exists() else {}
    with Workspace("characterize", keep=False) as space:
        endpoint = space.etcd().endpoint
        for kind in kinds:
            if kind not in grids:
                grids[kind] = measure_grid(space, endpoint, kind, SIZE, random.Random(0))
                grid_file.write_text(json.dumps({k: grid.to_data() for k, grid in grids.items()}))
            print(grids[kind].table(careful_user(SIZE)), flush=True)
            own = space.folder / f"{kind}.sqlite"  # a job adds its own windows, which the next one must not see
            shutil.copy(history, own)
            found[kind] = plan_live(space, endpoint, kind, SIZE, grids[kind], own, is_warm=True).fraction
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for both runs (default: a temporary one)")
    known = (*JOBS, UNLIKE)
    parser.add_argument("--jobs", default=",".join(known), help=f"jobs that start warm, of {', '.join(known)}")
    parser.add_argument(
        "--reuse", action="store_true", help="take the runs that --out already holds; `minutes` is unknown then"
    )
    options = parser.parse_args()
    kinds = [kind for kind in options.jobs.split(",") if kind]
    if unknown := sorted({*kinds} - {*known}):
        parser.error(f"--jobs names {unknown}, the jobs are {', '.join(known)}")
    print(describe_machine(), flush=True)
    with tempfile.TemporaryDirectory(prefix="dlrover-benchmark-") as temporary:
        out = options.out or Path(temporary)
        out.mkdir(parents=True, exist_ok=True)
        folders, history = [out / "one", out / "two"], out / "history.sqlite"
        minutes = 0.0
        if not options.reuse:
            minutes = max(run_quick(folder, history if i == 0 else out / "other.sqlite") for i, folder in enumerate(folders))
        one, two = (read_store(folder) for folder in folders)
        results = results_of(one.visits), results_of(two.visits)
        agreeing, count = agreement(*results)
        print(f"runs: {agreeing} of {count} points agree", flush=True)
        spreads = [r.spread for found in results for r in found.values() if not r.point.measures_loss]
        found = warm_starts(history, kinds, out / "grid.json")
        values: dict[str, float | int] = {
            "minutes": minutes,
            "agree": agreeing / count,
            "width": statistics.median(spreads),
            "parts_error": parts_error([*results[0].values(), *results[1].values()]),
            **limit_errors(),
            "warm_min": min((fraction for kind, fraction in found.items() if kind != UNLIKE), default=float("nan")),
            "warm_unlike": found.get(UNLIKE, float("nan")),
        }
    print(result_line(values))
    return 0


if __name__ == "__main__":
    sys.exit(main())
