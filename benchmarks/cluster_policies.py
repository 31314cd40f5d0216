"""Every policy on every workload, paired by seeds: JCT at equal costs, and over the cost of a resize."""

from __future__ import annotations

import re
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from jobs import BenchmarkError

from lightning_dlrover.planner.cluster.elastic import ELASTIC_POLICIES
from lightning_dlrover.planner.cluster.elastic_jobs import Cluster
from lightning_dlrover.simulate.page import REPORT, write_report
from lightning_dlrover.simulate.records import BY_MODEL, LIVE, Results, Simulated
from lightning_dlrover.simulate.run import run_study
from lightning_dlrover.simulate.study import Cost, Inputs, Question, Trace, questions, read_inputs

__all__ = ["CHOSEN_ON", "EQUAL_S", "OURS", "compare", "first_jobs", "workload_files"]

OURS, SIA, POLLUX = "ours", "sia", "pollux"
EQUAL_S = 30.0
EQUAL = f"{EQUAL_S:g}"
CURVE: tuple[Cost, ...] = (LIVE, 60.0, BY_MODEL)
CHOSEN_ON = ("workload-1", "workload-2")
"""Workloads on which constants of policies were chosen."""
QUICK_JOBS = 40


@dataclass(frozen=True)
class Found:
    """Simulations by cost, policy and workload."""

    by_place: Mapping[tuple[str, str, str], Sequence[Simulated]]
    workloads: tuple[str, ...]
    policies: tuple[str, ...]

    @property
    def others(self) -> tuple[str, ...]:
        return tuple(policy for policy in self.policies if policy != OURS)

    def mean_s(self, cost: str, policy: str, workloads: Collection[str]) -> float:
        """Return the mean JCT, each workload and seed alike."""
        return statistics.fmean(s.mean_completion_s for name in workloads for s in self.by_place[cost, policy, name])

    def p99_s(self, cost: str, policy: str, workloads: Collection[str]) -> float:
        return statistics.fmean(s.p99_completion_s for name in workloads for s in self.by_place[cost, policy, name])

    def ratio(self, policy: str, workloads: Collection[str]) -> tuple[float, float]:
        """Return the mean JCT of ours over a policy's at equal costs, and its deviation between seeds; 0 for one seed."""
        pairs = [(self.by_place[EQUAL, OURS, name], self.by_place[EQUAL, policy, name]) for name in workloads]
        by_seed = [
            sum(ours[i].mean_completion_s for ours, _ in pairs) / sum(theirs[i].mean_completion_s for _, theirs in pairs)
            for i in range(len(pairs[0][0]))
        ]
        mean = self.mean_s(EQUAL, OURS, workloads) / self.mean_s(EQUAL, policy, workloads)
        return mean, statistics.stdev(by_seed) if len(by_seed) > 1 else 0.0

    def best_other(self, cost: str, workloads: Collection[str]) -> str:
        """Return the policy with the lowest mean JCT but ours."""
        return min(self.others, key=lambda policy: self.mean_s(cost, policy, workloads))

    def wins(self, cost: str, workloads: Collection[str]) -> list[str]:
        return [
            name
            for name in workloads
            if self.mean_s(cost, OURS, [name]) < self.mean_s(cost, self.best_other(cost, [name]), [name])
        ]


def compare(
    traces: Path,
    speeds: Path,
    out: Path,
    *,
    num_seeds: int,
    curve_seeds: int,
    processes: int,
    quick: bool,
    policies: Sequence[str] = tuple(ELASTIC_POLICIES),
    workloads: Collection[int] = (),
) -> dict[str, float | int]:
    """Run all simulations that are not on record, print tables, write the report, and return the figures of the last line.

    Args:
        policies: at least ours, Sia and Pollux.
        curve_seeds: 0 leaves out the costs other than the equal one, and `live_gain`.
        workloads: numbers of those to run; all if there are none.
    Raises:
        ValueError: a trace or a file of step times cannot be used.
    """
    inputs, read = read_inputs(workload_files(traces, workloads), speeds, Cluster(16, 4), start_cost=BY_MODEL)
    if missing := {OURS, SIA, POLLUX} - set(policies):
        raise BenchmarkError(f"the figures need {', '.join(sorted(missing))}, too: add them to --policy")
    if quick:
        num_seeds = curve_seeds = 1
        read = [first_jobs(trace) for trace in (read[0], read[-1])]
    names = tuple(trace.name for trace in read)
    asked = questions(read, policies, [EQUAL_S], range(num_seeds))
    asked += questions(read, policies, [LIVE, BY_MODEL] if quick else CURVE, range(curve_seeds))
    print(f"{len(asked)} simulations: {len(names)} workloads, {len(policies)} policies, 16 nodes with 4 GPUs each")
    simulations = _run(inputs, asked, out, processes)
    found = _grouped(simulations, names, tuple(policies))
    _print_equal(found)
    if curve_seeds:
        _print_curve(simulations, found)
    return _figures(found, with_live=curve_seeds > 0)


def _run(inputs: Inputs, asked: Sequence[Question], out: Path, processes: int) -> list[Simulated]:
    with Results(out) as results, _counted(len(asked)) as ended:
        simulations = run_study(inputs, asked, results, processes=processes, ended=ended)
    write_report(out / REPORT, inputs, simulations)
    print(f"report: {out / REPORT}")
    return simulations


@contextmanager
def _counted(total: int) -> Iterator[Callable[[Simulated], None]]:
    """Print how many simulations have run, once a minute."""
    count, shown_s, began_s = 0, time.monotonic(), time.monotonic()

    def ended(simulated: Simulated) -> None:
        nonlocal count, shown_s
        count += 1
        if time.monotonic() - shown_s >= 60:
            shown_s = time.monotonic()
            print(f"  {count} of at most {total} simulations after {(shown_s - began_s) / 60:.0f} min", flush=True)

    yield ended


def _grouped(simulations: Sequence[Simulated], names: tuple[str, ...], policies: tuple[str, ...]) -> Found:
    groups: defaultdict[tuple[str, str, str], list[Simulated]] = defaultdict(list)
    for simulated in simulations:
        groups[simulated.cost, simulated.policy, simulated.trace].append(simulated)
    return Found(groups, names, policies)


def _print_equal(found: Found) -> None:
    print(f"\nmean JCT / p99 JCT in hours at {EQUAL} s for all, mean over seeds, +- deviation of the mean JCT between seeds")
    print(f"{'policy':10}" + "".join(f"{name:>24}" for name in found.workloads))
    for policy in found.policies:
        print(f"{policy:10}" + "".join(f"{_cell(found.by_place[EQUAL, policy, name]):>24}" for name in found.workloads))
    groups = {name: [name] for name in found.workloads} | {
        "those of the constants": [name for name in found.workloads if name in CHOSEN_ON],
        "the others": [name for name in found.workloads if name not in CHOSEN_ON],
        "all": list(found.workloads),
    }
    print("\nJCT of ours over that of each policy +- deviation between seeds, and p99 over p99: ratios of means")
    print(f"{'workloads':24}" + "".join(f"{policy:>20}" for policy in found.others))
    for title, names in groups.items():
        if names:
            print(f"{title:24}" + "".join(f"{_ratios(found, policy, names):>20}" for policy in found.others))
    seeds = [
        all(ours.mean_completion_s < found.by_place[EQUAL, p, name][i].mean_completion_s for p in found.others)
        for name in found.workloads
        for i, ours in enumerate(found.by_place[EQUAL, OURS, name])
    ]
    print(f"ours is best in {sum(seeds)} of {len(seeds)} pairs of workload and seed")


def _cell(simulations: Sequence[Simulated]) -> str:
    means = [s.mean_completion_s / 3600 for s in simulations]
    p99 = statistics.fmean(s.p99_completion_s for s in simulations) / 3600
    deviation = f" +- {statistics.stdev(means):.3f}" if len(means) > 1 else ""
    return f"{statistics.fmean(means):.3f}{deviation} / {p99:.2f}"


def _ratios(found: Found, policy: str, names: Sequence[str]) -> str:
    mean, deviation = found.ratio(policy, names)
    p99 = found.p99_s(EQUAL, OURS, names) / found.p99_s(EQUAL, policy, names)
    return f"{mean:.3f} +- {deviation:.3f} {p99:.2f}"


def _print_curve(simulations: Sequence[Simulated], found: Found) -> None:
    """Print mean JCT over the cost, of the seeds that every cost has."""
    seeds = set.intersection(*({s.seed for s in simulations if s.cost == cost} for cost in {s.cost for s in simulations}))
    common = _grouped([s for s in simulations if s.seed in seeds], found.workloads, found.policies)
    costs = sorted({s.cost for s in simulations}, key=lambda cost: float("inf") if cost in (BY_MODEL, LIVE) else float(cost))
    print(f"\nmean JCT in hours over the cost of a resize, {len(seeds)} seed{'s' if len(seeds) > 1 else ''}")
    print(f"{'policy':10}" + "".join(f"{cost:>10}" for cost in costs))
    for policy in found.policies:
        print(f"{policy:10}" + "".join(f"{common.mean_s(cost, policy, found.workloads) / 3600:>10.3f}" for cost in costs))


def _figures(found: Found, *, with_live: bool) -> dict[str, float | int]:
    names = found.workloads
    figures: dict[str, float | int] = {
        "jct_vs_sia": found.ratio(SIA, names)[0],
        "jct_vs_pollux": found.ratio(POLLUX, names)[0],
        "wins": len(found.wins(EQUAL, names)),
        "of": len(names),
    }
    if with_live:
        by_restart = found.best_other(BY_MODEL, names)
        figures["live_gain"] = 1 - found.mean_s(LIVE, OURS, names) / found.mean_s(BY_MODEL, by_restart, names)
    figures["p99_ratio"] = found.p99_s(EQUAL, OURS, names) / found.p99_s(EQUAL, found.best_other(EQUAL, names), names)
    return figures


def workload_files(traces: Path, workloads: Collection[int] = ()) -> list[Path]:
    """Return the files of workloads, by their numbers.

    Args:
        workloads: numbers of those to return; all if there are none.
    Raises:
        BenchmarkError: there are none.
    """
    paths = sorted(traces.glob("workload-*.csv"), key=_number)
    paths = [path for path in paths if not workloads or _number(path)[0] in workloads]
    if not paths:
        raise BenchmarkError(f"{traces} holds no workload-N.csv: name the folder of Pollux's workloads with --traces")
    return paths


def first_jobs(trace: Trace) -> Trace:
    """Return a trace of the first jobs of one."""
    return replace(trace, submissions=trace.submissions[:QUICK_JOBS], digest=f"{trace.digest}, first {QUICK_JOBS}")


def _number(path: Path) -> tuple[int, str]:
    found = re.search(r"\d+", path.stem)
    return (int(found[0]) if found else 0), path.stem
