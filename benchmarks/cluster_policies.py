"""Every policy on every workload: JCT at equal costs, over loads, sources, costs of a resize, and what is known of lengths."""

from __future__ import annotations

import re
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from cluster_workloads import at_load, first_jobs, read_elsewhere
from jobs import BenchmarkError

from lightning_dlrover.lab.simulate.baselines import ELASTIC_POLICIES
from lightning_dlrover.lab.simulate.page import REPORT, write_report
from lightning_dlrover.lab.simulate.simulator import Cluster, Lengths
from lightning_dlrover.lab.simulate.study import (
    BY_MODEL,
    LIVE,
    Cost,
    Inputs,
    Results,
    Simulated,
    Trace,
    questions,
    read_inputs,
    run_study,
)

OURS = "jct"
EQUAL_S = 30.0
EQUAL = f"{EQUAL_S:g}"
LOADS = (0.5, 1.5, 2.0)
CHOSEN_ON = ("workload-1", "workload-2")
"""Workloads on which constants of policies were chosen."""
NEAR = (*("srtf", "elastic-srtf", "las", "dlrover-rm", "afs", "sia"), OURS)
"""Policies of the further comparisons. Pollux searches slowly, heSRPT is behind AFS and DLRover-RM, others are far off."""
QUICK_JOBS = 40


@dataclass(frozen=True)
class Found:
    """Simulations of one comparison at one cost, by policy and workload; several of a workload have other seeds."""

    by_place: Mapping[tuple[str, str], Sequence[Simulated]]
    workloads: tuple[str, ...]
    policies: tuple[str, ...]

    @classmethod
    def of(cls, simulations: Sequence[Simulated]) -> Found:
        groups: defaultdict[tuple[str, str], list[Simulated]] = defaultdict(list)
        for simulated in simulations:
            groups[simulated.policy, simulated.trace].append(simulated)
        names = tuple(dict.fromkeys(s.trace for s in simulations))
        return cls(groups, names, tuple(dict.fromkeys(s.policy for s in simulations)))

    @property
    def others(self) -> tuple[str, ...]:
        return tuple(policy for policy in self.policies if policy != OURS)

    def mean(self, policy: str, workloads: Collection[str], figure: Callable[[Simulated], float]) -> float:
        """Return the mean of a figure; each workload and seed has the same weight."""
        return statistics.fmean(figure(s) for name in workloads for s in self.by_place[policy, name])

    def mean_s(self, policy: str, workloads: Collection[str]) -> float:
        return self.mean(policy, workloads, lambda s: s.mean_completion_s)

    def resizes(self, policy: str) -> float:
        return self.mean(policy, self.workloads, lambda s: s.resizes_per_job)

    def ratios(
        self, policy: str, workloads: Collection[str], figure: Callable[[Simulated], float] = lambda s: s.mean_completion_s
    ) -> list[float]:
        """Return a figure of ours over a policy's, for each workload."""
        return [self.mean(OURS, [name], figure) / self.mean(policy, [name], figure) for name in workloads]

    def best_other(self, workloads: Collection[str]) -> str:
        """Return the policy with the lowest mean JCT but ours."""
        return min(self.others, key=lambda policy: self.mean_s(policy, workloads))

    def worst_ratio(self) -> float:
        """Return the largest mean JCT of ours in a workload over that of the policy that is best there."""
        return max(self.ratios(self.best_other([name]), [name])[0] for name in self.workloads)


def compare(
    traces: Path,
    speeds: Path,
    out: Path,
    *,
    num_seeds: int,
    processes: int,
    quick: bool,
    policies: Sequence[str] = tuple(ELASTIC_POLICIES),
    workloads: Collection[int] = (),
    elsewhere: Sequence[Path] = (),
) -> dict[str, float | int | str]:
    """Run all simulations that are not on record, print tables, write the report, and return the figures of the last line.

    Args:
        policies: at least ours and one other.
        num_seeds: of the first comparison; all others have one.
        workloads: numbers of those to run; all if there are none.
        elsewhere: traces of ElasticFlow and Gavel.
    Raises:
        ValueError: a trace or a file of step times cannot be used.
    """
    if OURS not in policies or len(policies) < 2:
        raise BenchmarkError(f"the figures need {OURS} and another policy; --policy names only {', '.join(policies)}")
    inputs, read = read_inputs(workload_files(traces, workloads), speeds, Cluster(16, 4), start_cost=BY_MODEL)
    if quick:
        num_seeds, read = 1, [first_jobs(trace, QUICK_JOBS) for trace in (read[0], read[-1])]
    near = [policy for policy in policies if policy in NEAR]
    with Results(out) as results, _counted() as ended:

        def simulated(
            title: str, read: Sequence[Trace], policies: Sequence[str], lengths: Lengths, cost: Cost = EQUAL_S, seeds: int = 1
        ) -> Found:
            asked = questions(read, policies, [cost], range(seeds))
            found = Found.of(run_study(_knowing(inputs, lengths), asked, results, processes=processes, ended=ended))
            _print(title, found)
            return found

        known = simulated("30 s for a resize, lengths known", read, policies, "known", seeds=num_seeds)
        unknown = simulated("30 s for a resize, lengths unknown", read, policies, "unknown")
        by_model = simulated("a restart by model for a resize, lengths known", read, policies, "known", BY_MODEL)
        live = simulated("live resizes, lengths known", read, near, "known", LIVE)
        if not quick:
            simulated("30 s for a resize, lengths wrong by a random factor", read, near, "wrong")
            for load in LOADS:
                simulated(f"load {load:g}", [at_load(trace, load) for trace in read], near, "known")
            if others := [read_elsewhere(path, inputs) for path in elsewhere]:
                simulated("other sources, lengths known", others, near, "known")
                simulated("other sources, lengths unknown", others, near, "unknown")
        asked = questions(read, near, [EQUAL_S, BY_MODEL, LIVE], [0])
        write_report(out / REPORT, inputs, run_study(inputs, asked, results))
        print(f"report: {out / REPORT}")
    return _figures(known, unknown, live, by_model)


def _knowing(inputs: Inputs, lengths: Lengths) -> Inputs:
    return replace(
        inputs, lengths=lengths, digest=f"{inputs.digest}, {lengths}" if lengths != inputs.lengths else inputs.digest
    )


@contextmanager
def _counted() -> Iterator[Callable[[Simulated], None]]:
    """Print how many simulations have run, once a minute."""
    count, shown_s, began_s = 0, time.monotonic(), time.monotonic()

    def ended(simulated: Simulated) -> None:
        nonlocal count, shown_s
        count += 1
        if time.monotonic() - shown_s >= 60:
            shown_s = time.monotonic()
            print(f"  {count} simulations after {(shown_s - began_s) / 60:.0f} min", flush=True)

    yield ended


def _print(title: str, found: Found) -> None:
    """Print mean JCT by workload, and the ratios of ours to each policy with their deviations between workloads."""
    chosen = [name for name in found.workloads if name.partition(" x ")[0] in CHOSEN_ON]
    held_out = [name for name in found.workloads if name not in chosen]
    print(f"\n{title}: mean JCT / p99 in hours, resizes for each job, and ours over the policy, +- deviation over workloads")
    columns = [f"{name.removeprefix('workload-'):>16}" for name in found.workloads]
    print(f"{'policy':14}{''.join(columns)}{'mean':>16}{'resizes':>9}{'chosen on':>11}{'held out':>10}{'all':>17}{'p99':>7}")
    for policy in found.policies:
        cells = [f"{_hours(found, policy, names):>16}" for names in (*([name] for name in found.workloads), found.workloads)]
        groups = [statistics.fmean(found.ratios(policy, names)) if names else float("nan") for names in (chosen, held_out)]
        ratios = found.ratios(policy, found.workloads)
        spread = statistics.stdev(ratios) if len(ratios) > 1 else 0.0
        p99 = statistics.fmean(found.ratios(policy, found.workloads, lambda s: s.p99_completion_s))
        print(
            f"{policy:14}{''.join(cells)}{found.resizes(policy):9.1f}{groups[0]:11.3f}{groups[1]:10.3f}"
            f"{statistics.fmean(ratios):9.3f} +- {spread:.2f}{p99:7.2f}"
        )
    best = found.best_other(found.workloads)
    print(f"best other: {best}; ours over the best other of each workload: at most {found.worst_ratio():.3f}", flush=True)


def _hours(found: Found, policy: str, workloads: Collection[str]) -> str:
    p99 = found.mean(policy, workloads, lambda s: s.p99_completion_s)
    return f"{found.mean_s(policy, workloads) / 3600:.3f} / {p99 / 3600:.2f}"


def _figures(known: Found, unknown: Found, live: Found, by_model: Found) -> dict[str, float | int | str]:
    best, without = known.best_other(known.workloads), unknown.best_other(unknown.workloads)
    by_restart = by_model.best_other(by_model.workloads)
    return {
        "jct_vs_best": statistics.fmean(known.ratios(best, known.workloads)),
        "best": best,
        "jct_unknown": statistics.fmean(unknown.ratios(without, unknown.workloads)),
        "resizes_unknown": unknown.resizes(OURS),
        "worst_workload": known.worst_ratio(),
        "live_gain": 1 - live.mean_s(OURS, live.workloads) / by_model.mean_s(by_restart, by_model.workloads),
        "p99_ratio": statistics.fmean(known.ratios(best, known.workloads, lambda s: s.p99_completion_s)),
    }


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


def _number(path: Path) -> tuple[int, str]:
    found = re.search(r"\d+", path.stem)
    return (int(found[0]) if found else 0), path.stem
