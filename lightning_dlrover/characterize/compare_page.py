"""Write the report of two machines: limits, and the figures of each study side by side, in one HTML file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lightning_dlrover.atomic_files import atomic_write
from lightning_dlrover.characterize.compare import Comparison, compared
from lightning_dlrover.characterize.figures import roofline_figure, study_figure
from lightning_dlrover.characterize.point import Point
from lightning_dlrover.characterize.results import Result, limit_values, results_of
from lightning_dlrover.characterize.store import Measurements
from lightning_dlrover.characterize.studies import Scope, Study, all_studies
from lightning_dlrover.report.page import render_page

__all__ = ["write_comparison"]


@dataclass(frozen=True)
class _Pair:
    title: str
    figures: tuple[str | None, str | None]


def write_comparison(path: Path, one: Measurements, other: Measurements) -> None:
    """Write the report to `path`, whole or not at all.

    Raises:
        OSError: `path` cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, _page(one, other, compared(one, other)))


def _page(one: Measurements, other: Measurements, found: Comparison) -> str:
    return render_page(
        "characterize",
        "compare_page.html.j2",
        machines=(one.header.machine, other.header.machine),
        summary=found.summary,
        limits=found.limits,
        points=found.points,
        pairs=_pairs(one, other),
    )


def _pairs(one: Measurements, other: Measurements) -> list[_Pair]:
    """Return the figures of both machines by study. A study that neither has is left out."""
    from lightning_dlrover.report.pictures import to_svg

    sides = [(side, results_of(side.visits)) for side in (one, other)]
    roofs = [roofline_figure([*results.values()], limit_values(side.limits), _cores(side)) for side, results in sides]
    titles = {"roofline": "Achieved and attainable"}
    drawn = {"roofline": roofs}
    for side, results in sides:
        for study in _studies(side, results):
            titles.setdefault(study.name, study.title)
            drawn.setdefault(study.name, []).append(study_figure(study, results))
    return [
        _Pair(
            titles[name],
            (
                to_svg(figures[0], f"{name}-a") if figures[0] is not None else None,
                to_svg(figures[1], f"{name}-b") if figures[1] is not None else None,
            ),
        )
        for name, figures in drawn.items()
        if any(figure is not None for figure in figures)
    ]


def _cores(side: Measurements) -> int:
    return max(1, int(side.header.machine.cores))


def _studies(side: Measurements, results: dict[Point, Result]) -> list[Study]:
    """Return the studies of the size, quick or full, to which more of the measured points belong."""
    machine = side.header.machine
    models = {point.model for point in results} - {""}

    def studies(size: str) -> list[Study]:
        return all_studies(
            Scope(
                size="full" if size == "full" else "quick",
                device="cuda" if machine.gpu else "cpu",
                cores=_cores(side),
                memory_bytes=machine.memory_gib << 30,
                has_torchrec=True,
                has_pyarrow=True,
                users_model=min(models, default=""),
            )
        )

    return max(
        (studies(size) for size in ("quick", "full")),
        key=lambda made: len({point for study in made for point in study.points} & results.keys()),
    )
