"""Write a study's report: one HTML file with its tables and pictures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lightning_dlrover.atomic_files import atomic_write
from lightning_dlrover.output import counted
from lightning_dlrover.report.page import render_page
from lightning_dlrover.simulate.figures import completions_figure, costs_figure, sizes_figure, use_figure
from lightning_dlrover.simulate.records import Simulated
from lightning_dlrover.simulate.study import Inputs
from lightning_dlrover.simulate.summary import COLUMNS, by_trace, cells, summarize

__all__ = ["REPORT", "write_report"]

REPORT = "report.html"
FAVOURITE = "jct"
"""Policy that is drawn first where there is room for a few only."""


def write_report(path: Path, inputs: Inputs, simulations: Sequence[Simulated]) -> None:
    """Write the report of at least one simulation to `path`, whole or not at all.

    Raises:
        OSError: `path` cannot be written.
    """
    from lightning_dlrover.report.pictures import to_svg

    first = simulations[0]
    at_first_cost = [s for s in simulations if s.cost == first.cost]
    example = [s for s in at_first_cost if (s.trace, s.seed) == (first.trace, first.seed)]
    costs = costs_figure(simulations)
    page = render_page(
        "simulate",
        "page.html.j2",
        facts=_facts(inputs, simulations),
        columns=COLUMNS,
        rows=[cells(row) for row in summarize(simulations)],
        policies=list(dict.fromkeys(s.policy for s in simulations)),
        traces=by_trace(simulations),
        example=example[0],
        completions=to_svg(completions_figure(at_first_cost), "completions"),
        costs=to_svg(costs, "costs") if costs is not None else None,
        use=to_svg(use_figure(example), "use"),
        sizes=to_svg(sizes_figure(sorted(example, key=lambda s: s.policy != FAVOURITE)), "sizes"),
        oracle=inputs.oracle,
        lengths=inputs.lengths,
        every_s=inputs.every_s,
    )
    atomic_write(path, page)


def _facts(inputs: Inputs, simulations: Sequence[Simulated]) -> list[tuple[str, str, str]]:
    jobs = {(s.trace, name) for s in simulations for name in s.jobs}
    return [
        ("Cluster", f"{inputs.cluster.num_nodes} x {inputs.cluster.per_node}", "nodes x devices"),
        ("Traces", str(len({s.trace for s in simulations})), counted(len(jobs), "job")),
        ("Seeds", str(len({s.seed for s in simulations})), "0: arrivals as in the trace"),
        ("Simulations", str(len(simulations)), ""),
    ]
