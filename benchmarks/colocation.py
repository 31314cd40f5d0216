"""Jobs that share devices: real ones on this machine; and slowdowns and sets of pairs measured elsewhere.

    python benchmarks/colocation.py [--mixes NAME...] [--policies NAME...] [--rounds N] [--job-seconds S] [--minutes M] [--cold]
    python benchmarks/colocation.py --gpu N [--copies N] [--policies NAME...] [--rounds N] [--job-seconds S]
    python benchmarks/colocation.py --rehearse [--mixes NAME...] [--policies NAME...] [--seeds N] [--cold] [--with-gpu]
    python benchmarks/colocation.py --tune [--rehearse] [--policies NAME...] [--rounds N] [--seeds N] [--job-seconds S]
    python benchmarks/colocation.py --pairs [--data DIR] [--device NAME] [--seeds N] [--quick]

Without an option, queues of twelve small DLRM-like jobs run with `dlrover colocate` under several policies, in interleaved
rounds (`colocation_mixes.py`), and models train after an estimate of their peak memory (`colocation_memory.py`). Each kind of
job has run alone before, so peaks and profiles are known to all policies. Policies are compared within a round, and a result is
the geometric mean over the rounds. The last line holds the throughput of ours over one job at a time in the balanced mix, the
smallest over any other policy in any mix, that over random pairs in the balanced mix, the errors of estimates and
predictions, and the smallest over any other policy where steps are slow. --minutes ends the rounds after some time,
--without-memory leaves the models out. --cold: no kind has run before, so that ours measures each alone first.

--tune: the calibration mixes, which are in no other result, under each policy with several numbers of jobs at once, and the
best number of each. `POLICIES` holds the result: every policy runs with its own best number. `--policies fifo@3` takes another.

--gpu: 24 such jobs share a GPU, the one that `nvidia-smi` shows with this number. The last line holds `gpu=`, the throughput of
ours over one job at a time.

--rehearse: the same mixes on a simulated machine of two cores, by the scheduler of `dlrover colocate`
(`colocation_rehearsal.py`): mean makespan, how many times ours that is, and the used part of the cores' time. It takes minutes.
--with-gpu: the machine has a GPU, too, and jobs run on either; the makespan on the GPU alone stands behind.

DIR holds Gavel's traces (default: $DLROVER_SHARED_DATA/job_traces/gavel, else ../shared/data/job_traces/gavel), whose form
`gavel_traces.py` describes.

--pairs: a random quarter of the pairs on one device is known and the rest predicted; then all pairs of each model are left out.
100 random queues of 24 jobs are put into pairs from a quarter of the pairs. There are two measures: the sets of our policy by
device time, where a job may stay alone, and as many pairs as fit by their steps/s. The last line holds the median errors of the
two splits, the smaller of the two throughputs relative to the oracle's, and the largest median time of a decision, ms.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from colocation_memory import memory_errors
from colocation_mixes import (
    CALIBRATION,
    GPU_MIX,
    MIXES,
    NUMBERS,
    OURS,
    POLICIES,
    SEQUENTIAL,
    SLOW_MIX,
    Length,
    figures,
    measure_mixes,
    table,
    variant_of,
)
from colocation_pairs import (
    Choice,
    Errors,
    choose_pairs,
    choose_sets,
    decision_times_ms,
    known_errors,
    learn,
    left_out_errors,
    quarter,
)
from colocation_rehearsal import GPU_KINDS, rehearse
from gavel_traces import MeasuredPairs, TraceError, default_folder, read_pairs
from jobs import BenchmarkError, describe_machine, result_line

NUM_QUEUES, NUM_JOBS = 100, 24


def report_errors(title: str, errors: Sequence[Errors]) -> float:
    """Print the median error of each part; return that of all together."""
    print(f"\n{title}: median error of the relative speed, and of trees")
    for part in errors:
        ours, trees = 100 * statistics.median(part.values), 100 * statistics.median(part.trees)
        print(f"  {part.of:<24} {ours:6.2f} %  {trees:6.2f} %  of {len(part.values)}")
    for name in ("values", "trees"):
        parts = [getattr(part, name) for part in errors]
        together = 100 * statistics.median([value for part in parts for value in part])
        mean = 100 * statistics.fmean(statistics.median(part) for part in parts)
        print(f"  {'ours' if name == 'values' else name}: {together:.2f} % all together, mean of the medians {mean:.2f} %")
    return statistics.median([value for part in errors for value in part.values])


def report_choices(title: str, choices: Sequence[Choice]) -> float:
    """Print throughputs; return ours over the oracle's."""
    ours, oracle, chance = (statistics.fmean(getattr(c, name) for c in choices) for name in ("ours", "oracle", "random"))
    print(f"  {title:<32} ours {ours:.4g}, oracle {oracle:.4g}, random {chance:.4g}: ", end="")
    print(f"{ours / oracle:.3f} of the oracle's, {ours / chance:.3f} times random; the oracle {oracle / chance:.3f} times")
    return ours / oracle


def pairs_benchmark(pairs: MeasuredPairs, num_seeds: int, quick: bool) -> None:
    known = report_errors("a quarter of the pairs known", list(known_errors(pairs, num_seeds)))
    left_out = report_errors("all pairs of a model left out", list(left_out_errors(pairs)))
    model = learn(pairs, quarter(pairs, 0)[0])
    num_queues = 10 if quick else NUM_QUEUES
    print(f"\n{num_queues} queues of {NUM_JOBS} jobs")
    sets = report_choices("our sets, jobs per device time", list(choose_sets(pairs, model, num_queues, NUM_JOBS, 0)))
    most = report_choices("pairs, steps/s", list(choose_pairs(pairs, model, num_queues, NUM_JOBS, 0)))
    print("\ndecisions with 1,000 queued jobs on 32 devices, ms of CPU time: median, largest, first on an idle cluster")
    times = decision_times_ms(pairs, model, 20 if quick else 100)
    for name, (middle, largest, first) in times.items():
        print(f"  {name:<16} {middle:8.2f} {largest:8.2f} {first:8.2f}")
    decision_ms = max(middle for middle, _, _ in times.values())
    print(
        result_line({"known_error": known, "left_out_error": left_out, "oracle": min(sets, most), "decision_ms": decision_ms})
    )


def real_benchmark(arguments: argparse.Namespace) -> None:
    mixes, length = (
        arguments.mixes,
        Length(arguments.rounds, arguments.job_seconds, 60 * arguments.minutes, is_cold=arguments.cold),
    )
    if arguments.quick:
        mixes, length = mixes[:1], replace(length, rounds=1, job_s=min(arguments.job_seconds, 4.0))
    results = measure_mixes(mixes, arguments.policies, length, arguments.keep)
    print("\n".join(table(results)))
    found = figures(results)
    if not arguments.without_memory:
        from colocation_models import HELD_OUT  # imports torch

        found |= memory_errors(list(HELD_OUT)[:3] if arguments.quick else None)
    names = ("balanced", "worst_vs_others", "vs_random", "memory_error", "memory_under", "ooms", "slowdown_error", "slow_steps")
    print(result_line({name: found.get(name, float("nan")) for name in names}))


def gpu_benchmark(arguments: argparse.Namespace) -> None:
    length = Length(arguments.rounds, arguments.job_seconds, 60 * arguments.minutes, arguments.copies)
    results = measure_mixes([GPU_MIX], arguments.policies, length, arguments.keep, device=f"gpu:{arguments.gpu}")
    print("\n".join(table(results)))
    found = figures(results)
    print(result_line({name: found.get(name, float("nan")) for name in ("gpu", "worst_vs_others", "ooms")}))


def tune(arguments: argparse.Namespace) -> None:
    """Print the makespans of the calibration mixes by policy and number of jobs at once, over the smallest of each mix."""
    policies = [name for name in arguments.policies if name not in (SEQUENTIAL, "random_pairs")]
    times: dict[str, dict[str, float]] = {}  # key: policy with its number, then mix
    if arguments.rehearse:
        for policy in (f"{name}@{number}" for name in policies for number in NUMBERS):
            times[policy] = {mix: _rehearsed_s(CALIBRATION[mix], policy, arguments) for mix in CALIBRATION}
    else:
        length = Length(arguments.rounds, arguments.job_seconds, 60 * arguments.minutes)
        variants = [f"{name}@{number}" for name in policies for number in NUMBERS]
        results = measure_mixes([*CALIBRATION], variants, length, arguments.keep)
        for policy, mix in dict.fromkeys((result.policy, result.mix) for result in results):
            found = [result.makespan_s for result in results if (result.policy, result.mix) == (policy, mix)]
            times.setdefault(policy, {})[mix] = statistics.geometric_mean(found)
    least = {mix: min(of[mix] for of in times.values()) for mix in CALIBRATION}
    means = {policy: statistics.geometric_mean(of[mix] / least[mix] for mix in CALIBRATION) for policy, of in times.items()}
    for policy, mean in means.items():
        print(f"{policy:18}" + "".join(f"{mix} {times[policy][mix]:7.1f} s  " for mix in CALIBRATION) + f"{mean:6.3f}")
    best = {name: min((mean, policy) for policy, mean in means.items() if policy.split("@")[0] == name)[1] for name in policies}
    print("best:", ", ".join(best.values()))


def _rehearsed_s(counts: Mapping[str, int], policy: str, arguments: argparse.Namespace) -> float:
    variant = variant_of(policy)
    return statistics.fmean(
        rehearse(counts, variant.policy, variant.at_once, seed, is_cold=arguments.cold).now for seed in range(arguments.seeds)
    )


def rehearsal_with_gpu(policies: Sequence[str], num_seeds: int, is_cold: bool) -> None:
    for mix in [mix for mix in MIXES if mix != SLOW_MIX]:
        print(mix)
        for policy in policies:
            both, alone = (
                statistics.fmean(
                    rehearse(MIXES[mix], policy, 0, seed, GPU_KINDS, True, with_cores=cores, is_cold=is_cold).now
                    for seed in range(num_seeds)
                )
                for cores in (True, False)
            )
            print(f"  {policy:15}{both:8.1f} s  on the GPU alone {alone:8.1f} s", flush=True)


def rehearsal(mixes: Sequence[str], policies: Sequence[str], num_seeds: int, is_cold: bool) -> None:
    for mix in mixes:
        variants = {policy: variant_of(policy) for policy in dict.fromkeys((OURS, *policies))}
        runs = {
            policy: [rehearse(MIXES[mix], variant.policy, variant.at_once, seed, is_cold=is_cold) for seed in range(num_seeds)]
            for policy, variant in variants.items()
        }
        ours = statistics.fmean(machine.now for machine in runs[OURS])
        print(mix)
        for policy, machines in runs.items():
            makespan_s = statistics.fmean(machine.now for machine in machines)
            used = statistics.fmean(machine.utilisation for machine in machines)
            print(f"  {policy:15}{makespan_s:8.1f} s  {makespan_s / ours:5.2f}  {100 * used:3.0f} % of the cores")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", action="store_true", help="predict and choose pairs, and time decisions")
    parser.add_argument("--gpu", type=int, metavar="N", help="jobs share this GPU")
    parser.add_argument("--copies", type=int, help="jobs of each of the four kinds with --gpu (default: 6)")
    parser.add_argument("--rehearse", action="store_true", help="run the mixes on a simulated machine of two cores")
    parser.add_argument("--tune", action="store_true", help="find the best number of jobs at once of each policy")
    parser.add_argument("--cold", action="store_true", help="no kind of job was measured before")
    parser.add_argument("--with-gpu", action="store_true", help="with --rehearse: the simulated machine has a GPU, too")
    mixes = [mix for mix in MIXES if mix != GPU_MIX]
    parser.add_argument("--mixes", nargs="+", choices=mixes, default=mixes, help="mixes of real jobs (default: all)")
    parser.add_argument(
        "--policies",
        nargs="+",
        default=[name for name in POLICIES if name != "random_sets"],
        help="policies of real jobs; one job at a time runs in the first round only (default: all but random_sets)",
    )
    parser.add_argument("--rounds", type=int, default=3, help="most rounds of each mix (default: %(default)s)")
    parser.add_argument(
        "--minutes", type=float, default=240.0, help="start no further mix after this time (default: %(default)s)"
    )
    parser.add_argument("--without-memory", action="store_true", help="train no models after estimates of their memory")
    parser.add_argument("--keep", type=Path, help="new folder for the journals of all queues (default: they are removed)")
    parser.add_argument(
        "--job-seconds", type=float, default=8.0, help="seconds that a job's steps take alone (default: %(default)s)"
    )
    parser.add_argument("--data", type=Path, default=default_folder(), help="folder with Gavel's traces (default: %(default)s)")
    parser.add_argument("--device", default="k80", help="kind of device (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=5, help="random quarters, and rehearsals (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="fewer queues, decisions and jobs")
    arguments = parser.parse_args()
    counts = (arguments.seeds, arguments.rounds, 1 if arguments.copies is None else arguments.copies)
    if min(counts) < 1 or min(arguments.job_seconds, arguments.minutes) <= 0:
        parser.error("--seeds, --rounds, --copies, --job-seconds and --minutes must be above 0")
    try:
        for policy in arguments.policies:
            variant_of(policy)
    except ValueError as error:
        parser.error(f"--policies: {error}")
    try:
        if arguments.tune:
            tune(arguments)
            return 0
        if arguments.rehearse and arguments.with_gpu:
            rehearsal_with_gpu([OURS, "rmixer_mixed", "rmixer", "fifo"], arguments.seeds, arguments.cold)
            return 0
        if arguments.rehearse:
            rehearsal(arguments.mixes, arguments.policies, arguments.seeds, arguments.cold)
            return 0
        if not arguments.pairs:
            print(describe_machine())
            benchmark = real_benchmark if arguments.gpu is None else gpu_benchmark
            benchmark(arguments)
            return 0
        pairs = read_pairs(arguments.data, arguments.device)
        print(describe_machine())
        pairs_benchmark(pairs, arguments.seeds, arguments.quick)
    except (BenchmarkError, RuntimeError, TraceError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
