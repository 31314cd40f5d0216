"""Many elastic jobs on one cluster: policies that divide it, simulated on published traces.

    python benchmarks/cluster.py [--traces DIR] [--speeds DIR] [--workload N...] [--policy NAME...] [--seeds N]
                                 [--processes N] [--out DIR]
    python benchmarks/cluster.py --quick [--traces DIR] [--speeds DIR]
    python benchmarks/cluster.py --scale [--speeds DIR] [--quick]
    python benchmarks/cluster.py --real [--quick]
    python benchmarks/cluster.py --fidelity
    python benchmarks/cluster.py --dlrover-rm [--load L] [--quick]

DIR of --traces holds the folders `pollux` with `workload-N.csv`, `elasticflow` and `gavel`, DIR of --speeds measured step times
(defaults: $DLROVER_SHARED_DATA/job_traces and $DLROVER_SHARED_DATA/step_traces, else those in ../shared/data).

Without --scale and so on, every policy runs Pollux's workloads on 16 nodes with 4 GPUs each, at a resize cost of 30 s for all
and the cost of a restart by model for each start, with N seeds: the first as in the trace, the others with shaken arrivals.
Then, with one seed: all ends of jobs unknown; and the cost of a restart by model for each resize. `jct` and the policies
near to it also have live resizes, lengths that are wrong by a random factor, 0.5, 1.5 and 2 times the arrivals, and jobs of
ElasticFlow's and Gavel's traces (see `cluster_workloads.py`). Constants of policies were chosen on the workloads 1 and 2,
with known and unknown lengths, so figures are printed for these, for the others, and for all. Deviations are those between
workloads: seeds move arrivals by less than a minute. Finished simulations stay on record in --out, and its report has the
pictures; the same command goes on after an interruption. --quick simulates the first 40 jobs of two workloads once, without
wrong lengths, loads and other sources. --workload and --policy leave out the others.

The last line:

    jct_vs_best       mean JCT of `jct` over that of the best other policy, mean over workloads; best is the lowest mean JCT
    best              its name
    jct_unknown       the same with all ends of jobs unknown, over the policy that is best then
    resizes_unknown   changes and pauses of each job under `jct` then
    worst_workload    largest mean JCT of `jct` in a workload over that of the other policy that is best in this workload
    live_gain         1 - mean JCT of `jct` with live resizes / that of the best other policy at its restart costs by model
    p99_ratio         p99 JCT of `jct` over that of the best other policy, mean over workloads

--scale takes one decision of `jct` for 1,000 jobs on 10,000 GPUs, and others on clusters that an integer program can solve.
The last line holds the time of the decision, its peak memory, and the smallest value of `jct` relative to the optimum.

--real runs four jobs of this machine under the brain of a pool, through the faults of `cluster_real.py`. The last line holds
the sum of their completion times over that of first come first served, and how many of them have finished.

--fidelity runs eight jobs of this machine under the brain, and simulates the same ones, see `cluster_fidelity.py`. The last
line holds the largest and the median error of a completion time, whether the jobs ended in the same order, the speedup by a
second worker, and the numbers of changes of size, real and simulated.

--dlrover-rm simulates DLRover-RM's four figures with stated inputs, see `cluster_requests.py`.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import cluster_requests
from cluster_fidelity import fidelity
from cluster_policies import compare
from cluster_real import real
from cluster_scale import scale
from jobs import BenchmarkError, describe_machine, result_line

from lightning_dlrover.lab.simulate.baselines import ELASTIC_POLICIES

SHARED_DATA = Path(os.environ.get("DLROVER_SHARED_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))

ELSEWHERE = ("elasticflow/cluster01.csv", "elasticflow/cluster06.csv", "gavel/jobs-1.csv")
"""Traces of other sources, in the folder of --traces; those that are not there are left out."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Compare policies for a cluster of elastic jobs.")
    parser.add_argument("--scale", action="store_true", help="time one decision for 1,000 jobs on 10,000 GPUs")
    parser.add_argument("--real", action="store_true", help="divide this machine among four real jobs, with faults")
    parser.add_argument("--fidelity", action="store_true", help="real jobs of this machine, and the same ones simulated")
    parser.add_argument("--dlrover-rm", action="store_true", help="jobs of users with too large requests")
    parser.add_argument(
        "--load",
        type=float,
        default=cluster_requests.LOAD,
        help="requests that arrive, over the cluster, with --dlrover-rm (default: %(default)s)",
    )
    parser.add_argument(
        "--traces",
        type=Path,
        default=SHARED_DATA / "job_traces",
        help="folder of pollux/workload-N.csv, elasticflow/*.csv and gavel/jobs-N.csv (default: %(default)s)",
    )
    parser.add_argument(
        "--speeds", type=Path, default=SHARED_DATA / "step_traces", help="folder of step times (default: %(default)s)"
    )
    parser.add_argument("--workload", type=int, nargs="+", default=[], metavar="N", help="workloads to run (default: all)")
    parser.add_argument(
        "--policy",
        nargs="+",
        choices=list(ELASTIC_POLICIES),
        default=list(ELASTIC_POLICIES),
        metavar="NAME",
        help="policies to run, ours and others (default: all)",
    )
    parser.add_argument("--seeds", type=int, default=1, help="seeds of the first comparison (default: %(default)s)")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="simulations at a time (default: cores)")
    parser.add_argument(
        "--out", type=Path, default=Path("build/cluster"), help="folder of records and report (default: %(default)s)"
    )
    parser.add_argument("--quick", action="store_true", help="fewer workloads, jobs and seeds")
    return parser


def main() -> int:
    parser = _parser()
    options = parser.parse_args()
    if min(options.seeds, options.processes) < 1:
        parser.error("--seeds and --processes must be above 0")
    print(describe_machine())
    figures: Mapping[str, float | int | str]
    try:
        if options.real:
            figures = real(quick=options.quick)
        elif options.fidelity:
            figures = fidelity()
        elif options.dlrover_rm:
            figures = cluster_requests.compare(options.load, quick=options.quick)
        elif options.scale:
            figures = scale(options.speeds, quick=options.quick)
        else:
            figures = compare(
                options.traces / "pollux",
                options.speeds,
                options.out,
                num_seeds=options.seeds,
                processes=options.processes,
                quick=options.quick,
                policies=options.policy,
                workloads=options.workload,
                elsewhere=[path for name in ELSEWHERE if (path := options.traces / name).is_file()],
            )
    except (BenchmarkError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(result_line(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
