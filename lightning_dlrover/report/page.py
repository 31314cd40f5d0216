"""Write a job's report: one HTML file with pictures that matplotlib draws as SVG, and a text that fits one screen.

`write_report` writes the page, `summary_text` returns the text. `timeline.py` interprets the events.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import re
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_dlrover.files import atomic_write
from lightning_dlrover.output import counted, text_table
from lightning_dlrover.rdzv.job.records import EventRecord
from lightning_dlrover.report.timeline import JobTimeline, Profile, cost_text, outcome_of, timeline_of
from lightning_dlrover.tuning.plan import Candidate, Decision, Settings
from lightning_dlrover.tuning.samples import STEP_PARTS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Pictures of a job's timeline, as SVG text for embedding in an HTML page. Axes and text use a placeholder colour that becomes
# `currentColor`, so a picture follows the page's light or dark theme. The data's colours (Okabe and Ito, 2008) are legible on
# both and to colour-blind readers.

KIND_COLOURS = {
    "start": "#8a8a8a",
    "grow": "#009e73",
    "shrink": "#8566d0",
    "replace": "#cc79a7",
    "loss": "#d55e00",
    "retry": "#e69f00",
    "undo": "#c2185b",
    "stop": "#8a8a8a",
}
PART_COLOURS = {
    "data_wait": "#e69f00",
    "forward": "#56b4e9",
    "backward": "#0072b2",
    "communication": "#d55e00",
    "optimizer": "#009e73",
    "other": "#9a9a9a",
}
MEASURED = "#3d8fd1"
PREDICTED = "#d55e00"
WRONG = "#c2185b"
MAX_SETTINGS = 12  # drawn side by side
MAX_PLANS = 40
INK = "#123457"  # placeholder for the page's text colour
STYLE: Any = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.7,
    "axes.axisbelow": True,
    "axes.formatter.useoffset": False,
    "xtick.color": INK,
    "ytick.color": INK,
    "text.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "grid.color": "#8a8a8a",
    "grid.alpha": 0.25,
    "grid.linewidth": 0.6,
}
WIDTH_INCHES = 10.0
MAX_POINTS = 600


def in_our_style(**more: Any) -> contextlib.AbstractContextManager[None]:
    """Draw in our style and with matplotlib's defaults, ignoring the user's matplotlibrc, such as `text.usetex`."""
    import matplotlib.style

    context: contextlib.AbstractContextManager[None] = matplotlib.style.context(["default", {**STYLE, **more}])
    return context


def _styled(draw: Callable[[JobTimeline], Figure]) -> Callable[[JobTimeline], Figure]:
    """Wrap `draw` in our style. matplotlib reads most of a style when it creates an artist, not when it draws one."""

    @functools.wraps(draw)
    def drawn(timeline: JobTimeline) -> Figure:
        with in_our_style():
            return draw(timeline)

    return drawn


@_styled
def throughput_picture(timeline: JobTimeline) -> Figure:
    """Plot samples per second over time with every round marked, above the number of workers."""
    from matplotlib.ticker import MaxNLocator

    figure, (rate, workers) = _figure(4.0, rows=2, sharex=True, height_ratios=[3.2, 1])
    _scale_time(timeline, rate, workers)
    unit = _time_unit(timeline)
    profiles = _thin(timeline.profiles)
    in_order = sorted(timeline.rounds, key=lambda r: r.number)
    ended_at = {one.number: later.at for one, later in itertools.pairwise(in_order)}
    for first, run in _runs(timeline, profiles):
        # A round's last window is recorded after the next round has begun.
        ends = [_x(timeline, min(p.at, ended_at.get(p.round_number, p.at))) for p in run]
        label = "samples per second" if first else None
        rates = [p.samples_per_s for p in run]
        rate.plot(ends, rates, "o-", color=MEASURED, markersize=3, linewidth=1.4, label=label)
    rate.set_ylim(0, 1.25 * max((p.samples_per_s for p in profiles), default=1.0))
    if not profiles:
        rate.set_yticks([])
    rate.set_ylabel("throughput (samples/s)")
    rate.yaxis.set_major_formatter(_thousands())
    drawn = set()
    for number, round_ in enumerate(timeline.rounds):
        x = _x(timeline, round_.at)
        colour = KIND_COLOURS.get(round_.kind, "#8a8a8a")
        kind = round_.kind if round_.kind in KIND_COLOURS else "other"
        label = None if kind in drawn else kind
        drawn.add(kind)
        for axes in (rate, workers):
            axes.axvline(x, color=colour, linewidth=1.5, linestyle=(0, (4, 2)), label=label if axes is rate else None)
        if round_.stall_s:
            end = _x(timeline, round_.stalled_until)
            rate.axvspan(end - round_.stall_s / unit[0], end, color=colour, alpha=0.18, linewidth=0)
        if len(timeline.rounds) <= 40:
            # Numbers of adjacent rounds alternate in height to avoid overprinting.
            height = 0.995 if number % 2 == 0 else 0.93
            rate.annotate(
                str(round_.number),
                (x, height),
                xytext=(3, 0),
                va="top",
                color=colour,
                fontsize=9,
                weight="bold",
                xycoords=("data", "axes fraction"),
                textcoords="offset points",
            )
    if timeline.rounds:
        times = [_x(timeline, r.at) for r in timeline.rounds] + [_x(timeline, timeline.ended_at)]
        counts = [r.num_workers for r in timeline.rounds]
        workers.step(times, [*counts, counts[-1]], where="post", color=INK, linewidth=1.8)
        workers.fill_between(times, [*counts, counts[-1]], step="post", color="#8a8a8a", alpha=0.25, linewidth=0)
        workers.set_ylim(0, max(counts) + 0.6)
    workers.set_ylabel("workers")
    workers.yaxis.set_major_locator(MaxNLocator(integer=True))
    if handles := rate.get_legend_handles_labels()[0]:
        rate.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(handles), columnspacing=1.4)
    return figure


@_styled
def step_parts_picture(timeline: JobTimeline) -> Figure:
    """Plot milliseconds of a step by part: over time, and the mean for each number of workers."""
    figure, (over_time, by_size) = _figure(3.4, columns=2, width_ratios=[2.4, 1], sharey=True)
    _scale_time(timeline, over_time)
    profiles = _thin(timeline.profiles)
    for first, run in _runs(timeline, profiles):
        # Bars from window to window, as edges: one path for each part, regardless of the number of windows.
        begin = max(timeline.started_at, run[0].at - run[0].num_steps * run[0].step_time_s)
        edges = [_x(timeline, at) for at in (begin, *(p.at for p in run))]
        below = [0.0] * len(run)
        for part in STEP_PARTS:
            top = [b + 1000 * p.part_s[part] for b, p in zip(below, run, strict=True)]
            over_time.stairs(
                top,
                edges,
                baseline=below,
                fill=True,
                color=PART_COLOURS[part],
                label=part.replace("_", " ") if first else None,
                linewidth=0,
            )
            below = top
    sizes = sorted({p.num_workers for p in timeline.profiles})
    for place, size in enumerate(sizes):
        chosen = [p for p in timeline.profiles if p.num_workers == size]
        num_steps = max(sum(p.num_steps for p in chosen), 1)
        base = 0.0
        for part in STEP_PARTS:
            mean_ms = 1000 * sum(p.part_s[part] * p.num_steps for p in chosen) / num_steps
            by_size.bar(place, mean_ms, bottom=base, width=0.62, color=PART_COLOURS[part], linewidth=0)
            base += mean_ms
        by_size.annotate(f"{base:.0f} ms", (place, base), xytext=(0, 3), textcoords="offset points", ha="center", fontsize=9)
    by_size.set_xticks(range(len(sizes)), [str(size) for size in sizes])
    by_size.set_xlim(-0.6, max(len(sizes), 1) - 0.4)
    by_size.set_xlabel("workers")
    by_size.set_title("mean by number of workers")
    over_time.set_title("over time")
    over_time.set_ylabel("step time (ms)")
    _limit_to_typical(over_time, [1000 * sum(p.part_s.values()) for p in timeline.profiles])
    _legend_above(over_time, len(STEP_PARTS))
    return figure


@_styled
def prediction_picture(timeline: JobTimeline) -> Figure:
    """Plot measured step times against the planner's predictions: over time, and for each settings of the last decision."""
    figure, (over_time, by_settings) = _figure(3.6, columns=2, width_ratios=[1.5, 1], sharey=True)
    _scale_time(timeline, over_time)
    profiles = _thin(timeline.profiles)
    over_time.plot(
        [_x(timeline, p.at) for p in profiles],
        [1000 * p.step_time_s for p in profiles],
        "o",
        color=MEASURED,
        markersize=3.5,
        label="measured",
    )
    labelled = False
    for decision, until in zip(timeline.decisions, [*(d.at for d in timeline.decisions[1:]), timeline.ended_at], strict=False):
        predicted = {c.settings: c for c in decision.candidates}
        # A decision holds until the next one. Within it, the settings change when the decision is carried out.
        for begin, end, settings in _stretches(timeline, decision, until):
            if (candidate := predicted.get(settings)) is None:
                continue
            span = [_x(timeline, begin), _x(timeline, end)]
            label = None if labelled else "predicted for what ran"
            over_time.plot(span, [1000 * candidate.step_time_s] * 2, color=PREDICTED, linewidth=1.8, label=label)
            low, high = 1000 * candidate.low_s, 1000 * candidate.high_s
            over_time.fill_between(span, low, high, color=PREDICTED, alpha=0.16, linewidth=0)
            labelled = True
    shown = next((d for d in reversed(timeline.decisions) if d.candidates), None)
    considered = _shown_candidates(shown) if shown is not None else []
    ran = [p.settings for p in profiles]
    places = {each: i for i, each in enumerate(sorted({*(c.settings for c in considered), *ran[-MAX_SETTINGS:]}))}
    drawn = [p for p in profiles if p.settings in places]
    by_settings.plot(
        [places[p.settings] - 0.12 for p in drawn],
        [1000 * p.step_time_s for p in drawn],
        "o",
        color=MEASURED,
        markersize=3.5,
        alpha=0.5,
    )
    _draw_predictions(by_settings, [(places[c.settings] + 0.12, c) for c in considered], PREDICTED)
    by_settings.set_xticks(range(len(places)), [each.short for each in places], rotation=60 if len(places) > 4 else 0)
    by_settings.set_xlim(-0.6, max(len(places), 1) - 0.4)
    by_settings.set_xlabel("workers x threads + loader workers each")
    by_settings.set_title("by settings (last decision)" if shown else "by settings")
    over_time.set_title("over time")
    over_time.set_ylabel("step time (ms)")
    _limit_to_typical(over_time, [1000 * p.step_time_s for p in timeline.profiles] + [1000 * c.high_s for c in considered])
    _legend_above(over_time, 2)
    return figure


@_styled
def plans_picture(timeline: JobTimeline) -> Figure:
    """Plot every plan's prediction with the measurement after it, and the candidates of the last plan."""
    figure, (plans, choice) = _figure(3.8, columns=2, width_ratios=[1.5, 1])
    decisions = [d for d in timeline.decisions if d.is_change or outcome_of(timeline, d) is not None][-MAX_PLANS:]
    _draw_predictions(plans, [(i, d.choice) for i, d in enumerate(decisions)], "#8a8a8a", label="predicted, 90 % interval")
    for expected, colour, label in ((True, MEASURED, "measured, as predicted"), (False, WRONG, "measured, not as predicted")):
        found = [
            (i, o) for i, d in enumerate(decisions) if (o := outcome_of(timeline, d)) is not None and o.expected == expected
        ]
        if found:
            times = [1000 * o.observed_step_time_s for _, o in found]
            plans.plot([i for i, _ in found], times, "o", color=colour, markersize=7, label=label)
    pending = [(i, d) for i, d in enumerate(decisions) if outcome_of(timeline, d) is None]
    if pending:
        times = [1000 * d.predicted_step_time_s for _, d in pending]
        plans.plot([i for i, _ in pending], times, "x", color=INK, markersize=8, label="never measured")
    names = [f"{d.decision_id}\n{d.chosen.short}" for d in decisions]
    plans.set_xticks(range(len(names)), names, fontsize=8 if len(names) <= 8 else 7, rotation=0 if len(names) <= 12 else 90)
    plans.set_xlim(-0.6, max(len(names), 1) - 0.4)
    plans.margins(y=0.12)  # room for the whole of the highest mark
    plans.set_ylim(0)
    plans.set_ylabel("step time (ms)")
    plans.set_xlabel("plan, and its workers x threads + loader workers each")
    plans.set_title("predicted and measured, for every plan")
    shown = next((d for d in reversed(timeline.decisions) if d.candidates), None)
    if shown is not None:
        _draw_choice(choice, shown)
    choice.set_ylabel("throughput (samples/s)")
    choice.yaxis.set_major_formatter(_thousands())
    _legend_above(plans, 4)
    return figure


def _draw_choice(axes: Axes, decision: Decision) -> None:
    """Plot a decision's candidates: throughput against cost, with the Pareto front."""
    from matplotlib.ticker import MaxNLocator

    able = [c for c in decision.candidates if c.feasible]
    priced = bool(able) and all(c.cost_per_hour is not None for c in able)

    def cost(candidate: Candidate) -> float:
        return candidate.cost_per_hour or 0.0 if priced else float(candidate.gpus or candidate.cores)

    axes.plot([cost(c) for c in able], [c.samples_per_s for c in able], "o", color="#8a8a8a", markersize=4, alpha=0.7)
    front = sorted((c for c in able if c.on_front), key=cost)
    axes.plot([cost(c) for c in front], [c.samples_per_s for c in front], "-", color=PREDICTED, linewidth=1.4, label="front")
    now = [c for c in decision.candidates if c.settings == decision.current]
    axes.plot([cost(c) for c in now], [c.samples_per_s for c in now], "s", color=MEASURED, markersize=7, label="ran")
    chosen = decision.choice
    axes.plot([cost(chosen)], [chosen.samples_per_s], "*", color=WRONG, markersize=12, label="chosen")
    for place, candidate in enumerate(front):
        axes.annotate(
            candidate.settings.short,
            (cost(candidate), candidate.samples_per_s),
            xytext=(6, -11 if place % 2 else 5),
            textcoords="offset points",
            fontsize=8,
        )
    axes.set_xlabel("cost per hour" if priced else "GPUs" if any(c.gpus for c in able) else "cores")
    if all(cost(c).is_integer() for c in able):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.margins(x=0.18, y=0.15)
    if len({cost(c) for c in (*able, *now, chosen)}) == 1:
        axes.set_xticks([cost(chosen)], [f"{cost(chosen):g}"])  # a locator would divide the width, which is zero
    axes.set_ylim(0)
    axes.set_title(f"what plan {decision.decision_id} chose from")
    axes.legend(loc="best")


def _draw_predictions(axes: Axes, placed: Sequence[tuple[float, Candidate]], colour: str, label: str | None = None) -> None:
    if not placed:
        return
    axes.errorbar(
        [place for place, _ in placed],
        [1000 * c.step_time_s for _, c in placed],
        yerr=[
            [max(0.0, 1000 * (c.step_time_s - c.low_s)) for _, c in placed],
            [max(0.0, 1000 * (c.high_s - c.step_time_s)) for _, c in placed],
        ],
        fmt="D",
        color=colour,
        markersize=5,
        capsize=4,
        linewidth=1.4,
        label=label,
    )


def _shown_candidates(decision: Decision) -> list[Candidate]:
    """Return the current candidate, the chosen one and the fastest of the others."""
    ordered = sorted(
        decision.candidates,
        key=lambda c: (c.settings not in (decision.current, decision.chosen), not c.feasible, c.step_time_s),
    )
    return sorted(ordered[:MAX_SETTINGS], key=lambda c: c.settings)


def _stretches(timeline: JobTimeline, decision: Decision, until: float) -> list[tuple[float, float, Settings]]:
    """Return begin, end and settings of each stretch under a decision, from its windows."""
    found: list[tuple[float, float, Settings]] = []
    begin, settings = decision.at, decision.current
    for profile in timeline.profiles:
        if not decision.at < profile.at <= until:
            continue
        if profile.settings != settings:
            started = max(begin, profile.at - profile.num_steps * profile.step_time_s)
            if started > begin:
                found.append((begin, started, settings))
            begin, settings = started, profile.settings
    if until > begin:
        found.append((begin, until, settings))
    return found


def to_svg(figure: Figure, name: str) -> str:
    """Return the figure as an `<svg>` element. All its ids begin with `name`, because a page may hold several figures."""
    text = io.StringIO()
    with in_our_style(**{"svg.hashsalt": name}):
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :].replace(INK, "currentColor")
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r"url\(#", f"url(#{name}-", svg)
    svg = re.sub(r'href="#', f'href="#{name}-', svg)
    svg = re.sub(r"<style.*?</style>", "", svg, flags=re.DOTALL)  # its rules would apply to the whole page
    # The page sets the width; the viewBox keeps the aspect ratio.
    return re.sub(r'<svg [^>]*?(viewBox="[^"]*")[^>]*>', rf'<svg \1 role="img" aria-label="{name}">', svg, count=1)


def _figure(height: float, rows: int = 1, columns: int = 1, **grid: Any) -> tuple[Figure, Sequence[Axes]]:
    from matplotlib.figure import Figure as NewFigure

    # A Figure without pyplot uses the Agg canvas and leaves the user's backend unchanged.
    figure = NewFigure(figsize=(WIDTH_INCHES, height), layout="constrained")
    axes = figure.subplots(rows, columns, **grid)
    for one in axes:
        one.grid(axis="y")
    return figure, list(axes)


def _time_unit(timeline: JobTimeline) -> tuple[float, str]:
    if timeline.duration_s <= 600:
        return 1.0, "s"
    return (60.0, "min") if timeline.duration_s <= 4 * 3600 else (3600.0, "h")


def _scale_time(timeline: JobTimeline, *axes: Axes) -> None:
    seconds, name = _time_unit(timeline)
    span = max(timeline.duration_s, 1.0) / seconds
    for one in axes:
        one.set_xlim(-0.01 * span, 1.01 * span)
    axes[-1].set_xlabel(f"time since the job's first event ({name})")


def _x(timeline: JobTimeline, at: float) -> float:
    return (at - timeline.started_at) / _time_unit(timeline)[0]


def _thin(profiles: Sequence[Profile]) -> Sequence[Profile]:
    """Return every n-th window: a picture of 10 inches cannot show more."""
    return profiles[:: 1 + len(profiles) // MAX_POINTS]


def _runs(timeline: JobTimeline, profiles: Sequence[Profile]) -> list[tuple[bool, list[Profile]]]:
    """Group windows by round. The flag marks the first round."""
    rounds: dict[int, list[Profile]] = {}
    for profile in sorted(profiles, key=lambda p: p.at):
        rounds.setdefault(profile.round_number, []).append(profile)
    return [(i == 0, run) for i, run in enumerate(rounds.values())]


def _limit_to_typical(axes: Axes, values: Sequence[float]) -> None:
    """Limit the axis so that one slow window (the first step of a round) does not flatten all the others."""
    if not values:
        axes.set_ylim(0, 1)
        return
    typical = sorted(values)[int(0.95 * (len(values) - 1))]
    top = max(values) if max(values) < 2 * typical else 1.6 * typical
    axes.set_ylim(0, 1.15 * top or 1.0)
    if max(values) > 1.15 * top:
        text = f"cut off: up to {max(values):,.0f} ms"
        axes.annotate(text, (0.99, 0.98), xycoords="axes fraction", ha="right", va="top", fontsize=8.5)


def _legend_above(axes: Axes, num_columns: int) -> None:
    """Show the legend of one part of a figure above the whole figure, if anything was drawn there."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        axes.figure.legend(handles, labels, loc="outside upper center", ncols=num_columns)


def _thousands() -> Any:
    from matplotlib.ticker import FuncFormatter

    return FuncFormatter(lambda value, _: f"{value:,.0f}")


MAX_COLUMNS = 80
MAX_LINES = 24
MAX_TABLE_ROWS = 200


# The report as one HTML file, which `report/page.html.j2` arranges, and as text. All text from the job is escaped. Only
# recorded data is shown, and missing data is named.


def write_report(run_id: str, events: Sequence[EventRecord], path: Path) -> None:
    """Write the report of one job to `path`, whole or not at all. Create the folder if it is missing.

    Raises:
        OSError: `path` cannot be written.
    """
    timeline = timeline_of(run_id, events)
    profiled, planned = bool(timeline.profiles), bool(timeline.decisions)
    page = render_page(
        "report",
        "page.html.j2",
        timeline=timeline,
        facts=_facts(timeline),
        began=time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(timeline.started_at)),
        # None where nothing was recorded.
        throughput=to_svg(throughput_picture(timeline), "throughput") if profiled or timeline.rounds else None,
        parts=to_svg(step_parts_picture(timeline), "parts") if profiled else None,
        predicted=to_svg(prediction_picture(timeline), "prediction") if profiled or planned else None,
        plans=to_svg(plans_picture(timeline), "plans") if planned else None,
        cost=cost_text(timeline),
        outcome_of=outcome_of,
        colours=KIND_COLOURS,
        max_rows=MAX_TABLE_ROWS,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, page)


def render_page(room: str, template: str, **values: Any) -> str:
    """Return an HTML page from a template of a room. All pages share the style of the job's report, and escape all text."""
    from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=ChoiceLoader([PackageLoader("lightning_dlrover", name) for name in dict.fromkeys((room, "report"))]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"clock": _clock, "ms": _ms}
    environment.globals["counted"] = counted
    return environment.get_template(template).render(**values)


def summary_text(run_id: str, events: Sequence[EventRecord]) -> str:
    """Summarize a job in at most 24 lines of 80 columns."""
    timeline = timeline_of(run_id, events)
    facts = [(fact.name, fact.value + (f" ({fact.remark})" if fact.remark else "")) for fact in _facts(timeline)]
    lines = [_clip(f"job {_one_line(run_id)}"), *text_table("<<", facts, indent=2)]
    rows = [("round", "time", "kind", "workers", "stall", "reason")]
    for r in timeline.rounds:
        at, kind = _clock(r.at - timeline.started_at), _one_line(r.kind)[:8]
        rows.append((str(r.number), at, kind, str(r.num_workers), _ms(r.stall_s), _one_line(r.reason)))
    rounds = [_clip(line) for line in text_table(">><>><", rows, indent=2)]
    notes = [f"  {line}" for sentence in _remarks(timeline) for line in textwrap.wrap(sentence, MAX_COLUMNS - 2)][:6]
    room = MAX_LINES - len(lines) - len(notes) - 1
    if len(rounds) > room:
        # At the end of a job, its newest rounds matter most.
        num_hidden = len(rounds) - room + 1
        rounds = [rounds[0], f"  ... {num_hidden} earlier rounds", *rounds[num_hidden + 1 :]]
    if timeline.rounds:
        lines += rounds
    return "\n".join([*lines, *notes])


@dataclass(frozen=True)
class _Fact:
    name: str
    value: str
    remark: str = ""


def _facts(timeline: JobTimeline) -> list[_Fact]:
    sizes = [r.num_workers for r in timeline.rounds if r.kind != "stop"]
    seconds = sum(p.num_steps * p.step_time_s for p in timeline.profiles)
    num_stalls = sum(r.stall_s is not None and r.kind != "start" for r in timeline.rounds)
    if num_stalls:
        stall = _Fact("total stall", _ms(timeline.total_stall_s), f"in {counted(num_stalls, 'change')}")
    else:
        stall = _Fact("total stall", "not measured" if timeline.num_resizes else "none")
    return [
        _Fact("duration", _clock(timeline.duration_s), timeline.end or "not finished"),
        _Fact("steps", f"{timeline.num_steps:,}"),
        _Fact(
            "samples profiled",
            f"{timeline.num_profiled_samples:,}",
            f"{timeline.num_profiled_samples / seconds:,.0f}/s in steps" if seconds else "",
        ),
        _Fact("rounds", str(len(timeline.rounds)), f"{timeline.num_resizes} of them changes"),
        _Fact("workers", " to ".join(str(n) for n in sorted({min(sizes), max(sizes)})) if sizes else "unknown"),
        _Fact("workers lost", str(timeline.num_losses)),
        stall,
    ]


def _remarks(timeline: JobTimeline) -> list[str]:
    remarks = list(timeline.missing)
    if timeline.errors:
        last_line = (timeline.errors[-1].text.strip().splitlines() or ["(no text)"])[-1]
        remarks.append(_clip(f"last of {counted(len(timeline.errors), 'error')}: {_one_line(last_line)}", MAX_COLUMNS - 2))
    if timeline.num_skipped:
        remarks.append(f"{counted(timeline.num_skipped, 'event')} could not be read and left out.")
    return remarks


def _clock(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02} min"


def _ms(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{1000 * seconds:,.0f} ms" if seconds >= 0.01 else f"{1000 * seconds:.1f} ms"


def _one_line(text: str) -> str:
    """Return `text` without line breaks and control characters, which could rewrite the user's terminal."""
    return "".join(c if c.isprintable() else " " for c in text)


def _clip(text: str, num_columns: int = MAX_COLUMNS) -> str:
    return text if len(text) <= num_columns else text[: num_columns - 3] + "..."
