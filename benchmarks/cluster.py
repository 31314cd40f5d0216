"""Many elastic jobs on one cluster: policies that divide it, simulated on published traces.

    python benchmarks/cluster.py [--traces DIR] [--speeds DIR] [--workload N...] [--policy NAME...] [--seeds N]
                                 [--curve-seeds N] [--processes N] [--out DIR]
    python benchmarks/cluster.py --quick [--traces DIR] [--speeds DIR]
    python benchmarks/cluster.py --scale [--speeds DIR] [--quick]
    python benchmarks/cluster.py --real [--quick]
    python benchmarks/cluster.py --fidelity
    python benchmarks/cluster.py --dlrover-rm [--load L] [--quick]

DIR of --traces holds `workload-N.csv` in Pollux's form, and DIR of --speeds measured step times (defaults:
$DLROVER_SHARED_DATA/job_traces/pollux and $DLROVER_SHARED_DATA/step_traces, else those in ../shared/data).

Without --scale and so on, every policy runs every workload on 16 nodes with 4 GPUs each, at a resize cost of 30 s for
all, with N seeds: the first as in the trace, the others with shaken arrivals. Each seed is the same for all policies. Constants
of policies were chosen on the workloads 1 and 2, with and without their longest jobs, so figures are printed for these, for the
others, and for all; `live_gain` and the curve are over all of them. Then a live resize, a cost of 60 s, and those of a restart
by model are simulated with --curve-seeds. A start costs that of a restart by model under every policy.
Finished simulations stay on record in --out, and its report has
the pictures; the same command goes on after an interruption. --quick simulates the first 40 jobs of two workloads once.
--workload and --policy leave out the others, and --curve-seeds 0 all costs but the equal one.

The last line:

    jct_vs_sia, jct_vs_pollux   mean JCT of `ours` over theirs, means over workloads and seeds
    wins, of                    workloads in which the mean JCT of `ours` is below that of every other policy, and workloads
    live_gain                   1 - mean JCT of `ours` with live resizes / that of the best other policy at its restart costs
                                by model; absent with --curve-seeds 0
    p99_ratio                   p99 JCT of `ours` over that of the other policy with the lowest mean JCT

--scale takes one decision of `ours` for 1,000 jobs on 10,000 GPUs, and others on clusters that an integer program can solve.
The last line holds the time of the decision, its peak memory, and the smallest value of `ours` relative to the optimum.

--real runs four jobs of this machine under the brain of a pool, through the faults of `cluster_real.py`. The last line holds
the sum of their completion times over that of first come first served, and how many of them have finished.

--fidelity runs eight jobs of this machine under the brain, and simulates the same ones, see `cluster_fidelity.py`. The last
line holds the largest and the median error of a completion time, and whether the jobs ended in the same order.

--dlrover-rm simulates DLRover-RM's four figures with stated inputs, see `cluster_requests.py`.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import cluster_requests
from cluster_fidelity import fidelity
from cluster_policies import compare
from cluster_real import real
from cluster_scale import scale
from jobs import BenchmarkError, describe_machine, result_line

from lightning_dlrover.planner.cluster.elastic import ELASTIC_POLICIES

SHARED_DATA = Path(os.environ.get("DLROVER_SHARED_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))


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
        default=SHARED_DATA / "job_traces" / "pollux",
        help="folder of workload-N.csv (default: %(default)s)",
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
        help="policies to run, at least ours, sia and pollux (default: all)",
    )
    parser.add_argument("--seeds", type=int, default=10, help="seeds at equal costs (default: %(default)s)")
    parser.add_argument("--curve-seeds", type=int, default=1, help="seeds at each other cost (default: %(default)s)")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="simulations at a time (default: cores)")
    parser.add_argument(
        "--out", type=Path, default=Path("build/cluster"), help="folder of records and report (default: %(default)s)"
    )
    parser.add_argument("--quick", action="store_true", help="fewer workloads, jobs and seeds")
    return parser


def main() -> int:
    parser = _parser()
    options = parser.parse_args()
    if min(options.seeds, options.processes) < 1 or options.curve_seeds < 0:
        parser.error("--seeds and --processes must be above 0, and --curve-seeds not negative")
    print(describe_machine())
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
                options.traces,
                options.speeds,
                options.out,
                num_seeds=options.seeds,
                curve_seeds=options.curve_seeds,
                processes=options.processes,
                quick=options.quick,
                policies=options.policy,
                workloads=options.workload,
            )
    except (BenchmarkError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(result_line(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
