"""Effect of resizing on the result: test AUC of a job that is resized and loses workers, and of an undisturbed one.

    python benchmarks/accuracy.py [--tables] [--data DIR] [--seeds N] [--quick]

Both train `examples/train_ctr.py` with the same arguments and seed, on the rows of DIR or on generated ones.

    unresized   plain `python`, one worker
    elastic     1 -> 2 workers, SIGKILL to rank 1, a spare takes its place, 3 workers, SIGTERM to rank 0, 1 worker to the end

With `--tables` they train `examples/train_dlrm.py`, whose embedding tables are sharded over the workers:

    elastic     1 -> 3 workers, SIGKILL to rank 0 and a spare takes its place, 2 workers, SIGKILL to rank 1 and again a spare
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from jobs import BenchmarkError, LiveJob, Workspace, describe_machine, result_line

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
CHANGE_TIMEOUT_S = 60.0
TRAINING_TIMEOUT_S = 900.0


def read_metrics(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "metrics.json").read_text())
    return found


def train_unresized(script: Path, folder: Path, arguments: list[str]) -> dict[str, Any]:
    command = [sys.executable, str(script), "--output", str(folder), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=TRAINING_TIMEOUT_S, env=environment, check=False)
    if done.returncode != 0:
        raise BenchmarkError(f"the unresized run ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return read_metrics(folder)


def train_elastic(job: LiveJob, folder: Path, with_tables: bool) -> tuple[dict[str, Any], int]:
    """Metrics, and the number of rounds."""

    def kill(rank: int) -> None:
        if with_tables:
            job.wait_for_snapshot()
        os.kill(job.member_pids()[rank], signal.SIGKILL)

    def change(act: Callable[[], None], num_workers: int) -> None:
        before = job.view().round
        assert before is not None
        act()

        def look() -> bool | None:
            view = job.view()
            if view.job is not None and view.job.phase == "finished":
                raise BenchmarkError("the job finished before all changes were made: raise --max-steps and --epochs")
            has_come = view.round is not None and view.round.number > before.number
            return True if has_come and len(view.survivors) == num_workers else None

        job.wait_for(f"a round of {num_workers} workers", look, CHANGE_TIMEOUT_S)

    job.plan(1)
    for _ in range(4 if with_tables else 3):
        job.start_worker()
    job.wait_for("the first round", lambda: True if job.view().round else None, CHANGE_TIMEOUT_S)
    if with_tables:
        job.wait_for_ready(3)
        change(lambda: job.plan(3), 3)
        change(lambda: kill(0), 3)  # a spare takes its place
        job.start_worker()
        change(lambda: job.plan(2), 2)
        job.wait_for_ready(1)
        change(lambda: kill(1), 2)
    else:
        job.wait_for_ready(2)
        change(lambda: job.plan(2), 2)
        change(lambda: kill(1), 2)
        job.wait_for_ready(1)
        change(lambda: job.plan(3), 3)
        change(lambda: os.kill(job.member_pids()[0], signal.SIGTERM), 2)
        change(lambda: job.plan(1), 1)
    last = job.view().round
    assert last is not None
    codes = job.wait_until_ended(TRAINING_TIMEOUT_S)
    if any(codes):
        raise BenchmarkError(f"the elastic job's agents ended with {codes}")
    return read_metrics(folder), last.number


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", action="store_true", help="a model with sharded embedding tables")
    parser.add_argument("--data", type=Path, help="data for train_ctr.py: Adult folder or Criteo-format TSV")
    parser.add_argument("--seeds", type=int, default=2, help="how many pairs of runs, each with a seed of its own")
    parser.add_argument("--epochs", type=int, default=32, help="at most")
    parser.add_argument("--max-steps", type=int, default=1500)
    parser.add_argument("--quick", action="store_true", help="one pair, a smaller model, under 60 s")
    parser.add_argument("--keep", action="store_true", help="keep logs and records")
    options = parser.parse_args()
    script = EXAMPLES / ("train_dlrm.py" if options.tables else "train_ctr.py")
    common = ["--rows=1000000"] if options.tables else ["--lr=3e-4", "--width=1024"]
    if options.quick:
        options.seeds, options.epochs, options.max_steps = 1, 1000, 700
        common = ["--rows=100000"] if options.tables else ["--lr=3e-4", "--width=384", "--rows=30000"]
    common += [f"--epochs={options.epochs}", f"--max-steps={options.max_steps}"]
    if options.data is not None:
        common.append(f"--data={options.data.resolve()}")
    print(describe_machine(), flush=True)
    pairs: list[tuple[float, float]] = []
    with Workspace("accuracy", options.keep) as space:
        etcd = space.etcd()
        for seed in range(1, options.seeds + 1):
            arguments = [*common, f"--seed={seed}"]
            folder = space.folder / f"metrics-{seed}"
            with (
                ThreadPoolExecutor(1) as pool,
                space.live_job(f"elastic-{seed}", etcd, "1:4", [*arguments, f"--output={folder}"], script=script) as job,
            ):
                # Run both at once: the benchmark does not compare speed.
                other = pool.submit(train_unresized, script, space.folder / f"unresized-{seed}", arguments)
                elastic, num_rounds = train_elastic(job, folder, options.tables)
                unresized = other.result(TRAINING_TIMEOUT_S)
            if elastic["steps"] != unresized["steps"]:
                raise BenchmarkError(f"{elastic['steps']} steps of the elastic run against {unresized['steps']}")
            pairs.append((elastic["test_auc"], unresized["test_auc"]))
            print(
                f"seed {seed}, {unresized['data']}, {unresized['steps']} steps: unresized {unresized['test_auc']:.5f}, "
                f"elastic {elastic['test_auc']:.5f} in {num_rounds} rounds",
                flush=True,
            )
    values: dict[str, float | int] = {
        "elastic_auc": statistics.median(elastic for elastic, _ in pairs),
        "unresized_auc": statistics.median(unresized for _, unresized in pairs),
        "largest_difference": max(abs(elastic - unresized) for elastic, unresized in pairs),
    }
    print(result_line(values))
    return 0


if __name__ == "__main__":
    sys.exit(main())
