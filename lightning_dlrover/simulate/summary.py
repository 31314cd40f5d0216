"""Figures of a study: means over all simulations with one policy and one cost of a resize, and their table."""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from lightning_dlrover.simulate.records import Simulated

__all__ = ["COLUMNS", "Row", "by_trace", "cells", "summarize", "table_text"]


@dataclass(frozen=True)
class Row:
    """Means over the simulations with one policy and one cost; each simulation counts alike.

    Args:
        unfairness: largest ratio of a job's JCT to its JCT alone with a fair share.
        unfair: fraction of the jobs with a ratio above 1.
    """

    policy: str
    cost: str
    mean_s: float
    median_s: float
    p99_s: float
    makespan_s: float
    utilisation: float
    resizes_per_job: float
    unfairness: float
    unfair: float


COLUMNS = (
    "policy",
    "resize cost",
    "mean JCT",
    "median",
    "p99",
    "makespan",
    "utilisation",
    "resizes/job",
    "unfairness",
    "unfair jobs",
)
"""Titles of `cells`."""


def summarize(simulations: Sequence[Simulated]) -> list[Row]:
    """Return a row for each cost and policy, in the order in which they first appear."""
    groups: defaultdict[tuple[str, str], list[Simulated]] = defaultdict(list)
    for simulated in simulations:
        groups[simulated.shown_cost, simulated.policy].append(simulated)
    return [_row(policy, cost, found) for (cost, policy), found in groups.items()]


def cells(row: Row) -> tuple[str, ...]:
    """Return a row as text, in the order of `COLUMNS`."""
    return (
        row.policy,
        row.cost,
        *(_hours(seconds) for seconds in (row.mean_s, row.median_s, row.p99_s, row.makespan_s)),
        f"{100 * row.utilisation:.0f} %",
        f"{row.resizes_per_job:.1f}",
        f"{row.unfairness:.2f}",
        f"{100 * row.unfair:.0f} %",
    )


def by_trace(simulations: Sequence[Simulated]) -> list[tuple[str, str, list[str]]]:
    """Return cost, trace and the mean JCT of each policy as text, and policies in the order in which they first appear."""
    policies = list(dict.fromkeys(s.policy for s in simulations))
    groups: defaultdict[tuple[str, str], defaultdict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for simulated in simulations:
        groups[simulated.shown_cost, simulated.trace][simulated.policy].append(simulated.mean_completion_s)
    return [
        (cost, trace, [_hours(float(np.mean(found[policy]))) if found[policy] else "-" for policy in policies])
        for (cost, trace), found in groups.items()
    ]


def table_text(rows: Sequence[Row], width: int) -> str:
    """Return the rows as a table of at most so many columns of text."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for number, title in enumerate(COLUMNS):
        table.add_column(title, justify="left" if number == 0 else "right", overflow="fold", no_wrap=number == 0)
    for row in rows:
        table.add_row(*cells(row))
    text = io.StringIO()
    Console(file=text, width=width, highlight=False, markup=False).print(table)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def _row(policy: str, cost: str, simulations: Sequence[Simulated]) -> Row:
    def mean(figure: Callable[[Simulated], float]) -> float:
        return float(np.mean([figure(simulated) for simulated in simulations]))

    return Row(
        policy,
        cost,
        mean(lambda s: s.mean_completion_s),
        mean(lambda s: s.median_completion_s),
        mean(lambda s: s.p99_completion_s),
        mean(lambda s: s.makespan_s),
        mean(lambda s: s.utilisation),
        mean(lambda s: s.resizes_per_job),
        mean(lambda s: s.unfairness),
        mean(lambda s: float(np.mean(np.array(s.fairness) > 1))),
    )


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:.2f} h" if seconds >= 3600 else f"{seconds / 60:.1f} min"
