"""Pictures of jobs as coloured text: bars, sparklines, charts and lines of facts. Pure.

Colour only repeats what a letter, a number or a position shows, so the screens are readable without it.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

from rich.text import Text

from lightning_dlrover.output import counted, number_text, time_text
from lightning_dlrover.report.view_model import Point, ShownJob, ShownRound, ShownWorker, StepParts

BLOCKS = "▁▂▃▄▅▆▇█"

PARTS = (("compute", "compute_s", "green"), ("data", "data_s", "yellow"), ("wait", "wait_s", "red"), ("comm", "comm_s", "blue"))
"""Parts of a step as they are drawn: name, field and colour. The rest is `other`."""

_FILLS = {"compute": "█", "data": "▓", "wait": "░", "comm": "▒", "other": "·"}
_STATES = {
    **dict.fromkeys(("training", "active", "finished"), "green"),
    **dict.fromkeys(("failed", "gone", "stopped", "cancelled", "interrupted"), "red"),
    **dict.fromkeys(("starting", "waiting", "standby", "ready", "reforming", "leaving"), "yellow"),
}
_ROUNDS = {"start": "▶", "grow": "▲", "shrink": "▼", "replace": "⇄", "loss": "✗", "retry": "↻", "undo": "↶", "stop": "■"}
_STAGES = {
    "requested": "requested from the scheduler",
    "starting": "starting",
    "importing": "importing what the script needs",
    "building": "building model and data",
    "ready": "ready to be admitted",
}


def state_text(state: str) -> Text:
    return Text(state, _STATES.get(state, ""))


def age_text(since: float, now: float) -> str:
    """Return the time since a moment, in at most five characters; `-` if the moment is unknown."""
    if since <= 0:
        return "-"
    seconds = max(0.0, now - since)
    for limit, unit, name in ((100, 1, "s"), (6000, 60, "m"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / unit:.0f} {name}"
    return f"{seconds / 86400:.0f} d"


def bytes_text(num_bytes: float | None) -> str:
    if num_bytes is None:
        return "-"
    return f"{num_bytes / 2**30:.1f} G" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.0f} M"


def clock_text(at: float) -> str:
    try:
        return time.strftime("%H:%M:%S", time.localtime(at))
    except (ValueError, OverflowError, OSError):  # beyond the calendar's range
        return "--:--:--"


def sparkline(values: Sequence[float], width: int) -> str:
    """Return the newest values as blocks, scaled to the largest of them."""
    newest = list(values[-width:])
    top = max(newest, default=0.0)
    if top <= 0:
        return ""
    return "".join(BLOCKS[min(7, int(8 * max(0.0, value) / top))] for value in newest)


def bar(share: float, width: int) -> Text:
    """Return a share of 1 as a bar."""
    filled = round(max(0.0, min(1.0, share)) * width)
    return Text.assemble(("█" * filled, "green"), ("░" * (width - filled), "dim"))


def parts_bar(parts: StepParts, width: int) -> Text:
    """Return a step by its parts: `█` compute, `▓` data, `░` wait, `▒` comm, `·` other."""
    total, drawn, text = parts.step_s, 0.0, Text()
    if total <= 0:
        return text
    for name, field, colour in (*PARTS, ("other", "other_s", "dim")):
        begin = round(drawn / total * width)
        drawn += getattr(parts, field)
        text.append(_FILLS[name] * (round(drawn / total * width) - begin), colour)
    return text


def legend(has_waits: bool) -> Text:
    """Return the marks of a step's parts.

    Args:
        has_waits: False: the waits for slower workers are part of `comm`, as in a series.
    """
    text = Text()
    for name, _, colour in (*PARTS, ("other", "", "dim")):
        if name != "wait" or has_waits:
            shown = "comm and waits" if name == "comm" and not has_waits else name
            text.append(f"{_FILLS[name]} ", colour).append(f"{shown}  ")
    return text


def parts_line(parts: StepParts, width: int) -> Text:
    """Return the parts of a step with their shares, and the bar between them if there is room."""
    total = parts.step_s
    text = Text()
    for name, field, colour in (*PARTS, ("other", "other_s", "dim")):
        share = getattr(parts, field) / total if total > 0 else 0.0
        if name != "other" or share >= 0.005:
            text.append(f"{_FILLS[name]} ", colour).append(f"{name} {share:.0%}  ")
    text.right_crop(2)
    room = width - len(text) - 2
    return parts_bar(parts, room) + Text("  ") + text if room >= 10 else text


def rate_chart(points: Sequence[Point], width: int, height: int) -> list[Text]:
    """Return throughput over time as a chart of `height` lines, with the number of workers below it."""
    label = max([len("workers"), *(len(number_text(p.samples_per_s)) for p in points)]) + 1
    columns = max(1, width - label)
    shown = _over_time(points, columns)
    top = max((p.samples_per_s for p in shown if p is not None), default=0.0)
    lines = []
    for row in range(height, 0, -1):
        cells = "".join(_cell(p.samples_per_s / top * height - row + 1 if p is not None and top > 0 else 0.0) for p in shown)
        name = number_text(top) if row == height else "0" if row == 1 else ""
        lines.append(Text.assemble((f"{name:>{label - 1}} ", "dim"), (cells, "cyan")))
    lines.append(Text(f"{'workers':>{label - 1}} {_changes([p.num_workers if p else 0 for p in shown])}", "dim"))
    return lines


def _changes(numbers: Sequence[int]) -> str:
    """Return each number where it begins, and `·` for as long as it holds."""
    text = ""
    for column, number in enumerate(numbers):
        is_new = number and (column == 0 or numbers[column - 1] != number)
        if is_new and len(text) <= column:
            text += str(number)
        elif len(text) <= column:
            text += "·" if number else " "
    return text[: len(numbers)]


def parts_chart(points: Sequence[Point], width: int, height: int) -> list[Text]:
    """Return the parts of a step over time as stacked columns, in seconds."""
    having = [p for p in points if p.parts is not None]
    top = max((p.parts.step_s for p in having if p.parts is not None), default=0.0)
    label = len(_seconds_text(top)) + 1
    shown = _over_time(having, max(1, width - label))
    lines = []
    for row in range(height, 0, -1):
        name = _seconds_text(top) if row == height else "0" if row == 1 else ""
        at = (row - 0.5) / height * top
        cells = [_part_at(point.parts, at) if point and point.parts else (" ", "") for point in shown]
        runs = [("".join(mark for mark, _ in run), colour) for colour, run in itertools.groupby(cells, lambda cell: cell[1])]
        lines.append(Text.assemble((f"{name:>{label - 1}} ", "dim"), *runs))
    return lines


def _part_at(parts: StepParts, seconds: float) -> tuple[str, str]:
    """Return the mark and the colour of the part that a step is in after some seconds."""
    passed = 0.0
    for name, field, colour in (*PARTS, ("other", "other_s", "dim")):
        passed += getattr(parts, field)
        if seconds < passed:
            return _FILLS[name], colour
    return " ", ""


def _over_time(points: Sequence[Point], columns: int) -> list[Point | None]:
    """Return the newest point at each of some moments, equally far apart; None before the first."""
    if not points:
        return []
    begin, end = points[0].at, points[-1].at
    shown: list[Point | None] = []
    index = 0
    for column in range(columns):
        at = begin + (end - begin) * (column + 1) / columns
        while index + 1 < len(points) and points[index + 1].at <= at:
            index += 1
        shown.append(points[index] if points[index].at <= at else None)
    return shown


def _cell(filled: float) -> str:
    return " " if filled <= 0 else BLOCKS[min(7, int(filled * 8))]


def _seconds_text(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.3g} s"


def rounds_strip(rounds: Sequence[ShownRound], width: int) -> Text:
    """Return the newest rounds with their sizes and pauses, as many as fit: `▶ start 2  ▲ grow 3 (0.4 s)`."""
    pieces: list[Text] = []
    used = 0
    for each in reversed(rounds):
        mark = _ROUNDS.get(each.kind, "?")
        pause = f" ({each.stall_s:.2g} s)" if each.stall_s is not None else ""
        colour = "red" if each.kind in ("loss", "undo") else ""
        piece = Text.assemble((f"{mark} {each.kind} ", colour), (str(each.num_workers), "bold"), (pause, "dim"))
        if used + len(piece) + 3 > width:
            break
        pieces.append(piece)
        used += len(piece) + 3
    return Text("   ").join(reversed(pieces))


def size_text(job: ShownJob) -> str:
    """Return how many workers a job has, shall have and may have: `2 of 3 (1-4)`."""
    limits = f" ({job.min_workers}-{job.max_workers})" if job.min_workers is not None else ""
    wanted = f" of {job.wanted_workers}" if job.wanted_workers not in (None, job.num_workers) else ""
    return f"{job.num_workers}{wanted}{limits}"


def progress_text(job: ShownJob) -> str:
    """Return how far a job is, in a few words; empty if that is unknown."""
    progress = job.progress
    if progress is None:
        return ""
    done = f"{progress.percent:.0f} %" if progress.percent is not None else f"step {progress.step:,}"
    return done + (f" · {time_text(progress.seconds_left)} left" if progress.seconds_left is not None else "")


def rate_text(rate: float | None) -> str:
    return "-" if rate is None else number_text(float(f"{rate:.3g}"))


def facts(job: ShownJob, width: int) -> list[Text]:
    """Return the facts of a job in lines, the most important first."""
    lines = []
    if job.message:
        lines.append(Text(job.message, "red"))
    progress = job.progress
    if progress is not None:
        batch = f"epoch {progress.epoch + 1}" + (f" of {progress.max_epochs}" if progress.max_epochs else "")
        batch += f", batch {progress.batch:,}" + (f" of {progress.num_batches:,}" if progress.num_batches else "")
        batch += f" · loss {progress.loss}" if progress.loss else ""
        text = Text(f" {progress_text(job)} · {batch}")
        lines.append(
            (bar(progress.percent / 100, max(5, width - len(text))) if progress.percent is not None else Text()) + text
        )
    rates = [point.samples_per_s for point in job.series]
    rate = f"{rate_text(job.samples_per_s)} samples/s " if not job.is_over else f"ran {_duration(job)} "
    line = Text.assemble((rate, "bold"), (sparkline(rates, 12), "cyan"))
    if job.goodput is not None:
        line.append(f"  goodput {job.goodput:.0%}")
    if job.num_losses:
        line.append(f"  {counted(job.num_losses, 'loss', 'losses')}")
    line.append(f"  workers {job.num_workers}" if not job.is_over else f"  {counted(job.num_rounds, 'round')}")
    if not job.is_over and job.wanted_workers not in (None, job.num_workers):
        line.append(f", {job.wanted_workers} wanted", "yellow")
    if job.min_workers is not None:
        line.append(f" (limits {job.min_workers} to {job.max_workers})", "dim")
    lines.append(line)
    if job.parts is not None:
        lines.append(Text(f"step {_seconds_text(job.parts.step_s)}  ") + parts_line(job.parts, width - 14))
    if job.rounds:
        lines.append(Text("rounds  ") + rounds_strip(job.rounds, width - 8))
    if (plan := job.plan) is not None:
        line = Text(f"plan  {counted(plan.num_workers, 'worker')} by {plan.owner}{'' if plan.is_binding else ' (advice)'}: ")
        lines.append(line.append(plan.reason))
    if (made := job.prediction) is not None:
        line = Text(
            f"predicted {_seconds_text(made.step_s)} a step ({_seconds_text(made.low_s)} to {_seconds_text(made.high_s)})"
        )
        line.append(f", measured {_seconds_text(made.measured_s)}: ")
        lines.append(
            line.append("as predicted" if made.is_inside else "not as predicted", "green" if made.is_inside else "yellow")
        )
    if job.held_up:
        lines.append(Text(f"nodes  {job.held_up}", "yellow"))
    for joiner in job.joiners[:3]:
        stage = _STAGES.get(joiner.stage, joiner.stage)
        lines.append(Text(f"joining  {joiner.node} is {stage}, for {age_text(joiner.since, job.at)}", "yellow"))
    if len(job.joiners) > 3:
        lines.append(Text(f"joining  {counted(len(job.joiners) - 3, 'further node')}", "yellow"))
    if (snapshot := job.snapshot) is not None:
        age = f"batch {snapshot.batch}, {age_text(snapshot.at or 0, job.at)} old" if snapshot.batch is not None else "none yet"
        lines.append(Text(f"snapshot  {age}").append(f"  fails: {snapshot.failure}" if snapshot.failure else "", "red"))
    for stream in job.streams:
        done = f"{stream.rows_done:,} of {stream.num_rows:,} rows, " if stream.rows_done is not None and stream.num_rows else ""
        skipped = f", {stream.rows_skipped:,} skipped" if stream.rows_skipped else ""
        lines.append(Text(f"reads  {done}{stream.text}{skipped}"))
    lines += [Text(f"unreadable  {problem}", "red") for problem in job.problems[:2]]
    for line in lines:
        line.truncate(width, overflow="ellipsis")
        line.no_wrap = True
    return lines


def _duration(job: ShownJob) -> str:
    return time_text(max(0.0, job.newest_at - job.started_at))


def memory_text(worker: ShownWorker, now: float) -> Text:
    """Return a worker's memory relative to its limit, and when it will be full."""
    used, limit = worker.memory_bytes, worker.memory_limit_bytes
    if used is None:
        return Text("-", "dim")
    if limit is None:
        return Text(bytes_text(used))
    share = used / limit
    text = Text(f"{bytes_text(used)} {share:.0%}", "red" if share > 0.9 else "yellow" if share > 0.75 else "")
    if worker.full_at is not None:
        text.append(f" full in {time_text(max(0.0, worker.full_at - now))}", "red")
    return text


def worker_cells(worker: ShownWorker, now: float, bar_width: int) -> tuple[Text | str, ...]:
    """Return a worker's row: rank, state, host, share, step, parts, slow factor, memory, age."""
    slow = worker.slow_factor
    step = _seconds_text(worker.parts.step_s) if worker.parts is not None else "-"
    return (
        "-" if worker.rank is None else str(worker.rank),
        state_text(worker.state),
        worker.node or worker.host[:16] or "-",
        "-" if worker.samples is None else str(worker.samples),
        step,
        parts_bar(worker.parts, bar_width) if worker.parts is not None else Text("-", "dim"),
        Text("-" if slow is None else f"{slow:.2f}", "red" if slow is not None and slow >= 1.2 else ""),
        memory_text(worker, now),
        age_text(worker.since, now),
    )


def worker_lines(worker: ShownWorker, job: ShownJob, width: int) -> list[Text]:
    """Return all that is known of a worker, in lines."""
    place = f"{worker.host}:{worker.pid}" + (f" on {worker.node}" if worker.node else "")
    rank = f"rank {worker.rank}" if worker.rank is not None else "no rank"
    lines = [Text.assemble(rank, ", ", state_text(worker.state), f" for {age_text(worker.since, job.at)}, process {place}")]
    if worker.waits:
        lines.append(Text(worker.waits, "yellow"))
    if worker.parts is not None:
        lines.append(Text(f"step {_seconds_text(worker.parts.step_s)}  ") + parts_line(worker.parts, width - 14))
        factor = f", {worker.slow_factor:.2f} times the median" if worker.slow_factor is not None else ""
        share = f"; share {worker.samples} of {job.global_batch_size} samples" if worker.samples is not None else ""
        lines.append(Text(f"own work {_seconds_text(worker.own_s or 0.0)} of each step{factor}{share}"))
    if worker.memory_bytes is not None:
        peak = f", peak {bytes_text(worker.peak_memory_bytes)}" if worker.peak_memory_bytes else ""
        limit = f" of {bytes_text(worker.memory_limit_bytes)}" if worker.memory_limit_bytes else ", no limit known"
        full = (
            f", full in {time_text(max(0.0, worker.full_at - job.at))}"
            if worker.full_at is not None
            else ", no shortage forecast"
        )
        lines.append(Text(f"memory {bytes_text(worker.memory_bytes)}{limit}{peak}{full}"))
        counts = f"{counted(worker.intra_op_threads, 'thread')}, {counted(worker.loader_workers, 'loader worker')}"
        lines.append(Text(f"device {worker.device}, {worker.cpu_percent or 0:.0f} % of a core, {counts}"))
    if worker.gpu_memory_bytes:
        of = f" of {bytes_text(worker.gpu_limit_bytes)}" if worker.gpu_limit_bytes else ""
        lines.append(Text(f"GPU memory {bytes_text(worker.gpu_memory_bytes)}{of}, busy {worker.gpu_percent or 0:.0f} %"))
    if worker.measured_at is not None:
        lines.append(Text(f"measured {age_text(worker.measured_at, job.at)} ago", "dim"))
    else:
        lines.append(Text("no step of it was measured yet", "dim"))
    return lines


def event_lines(job: ShownJob, most: int) -> list[Text]:
    """Return the newest events, oldest first."""
    return [
        Text.assemble((f"{clock_text(event.at)} ", "dim"), (event.text, "red" if event.kind in ("error", "loss") else ""))
        for event in job.events[-most:]
        if most > 0
    ]


def plan_lines(job: ShownJob) -> list[Text]:
    """Return the plan, its reason, and the predictions of the planner for each size."""
    lines = []
    if (plan := job.plan) is not None:
        lines += [Text(f"{counted(plan.num_workers, 'worker')}, decided by {plan.owner}: {plan.reason}")]
        if not plan.is_binding:
            lines.append(Text("This is advice: no controller can change the number of workers of this job.", "yellow"))
        if plan.settings:
            lines.append(Text("each with " + ", ".join(f"{name} {value}" for name, value in plan.settings.items())))
    else:
        lines.append(Text("No plan yet: the planner decides after some steps."))
    if (made := job.prediction) is not None:
        lines += [
            Text(),
            Text(f"plan {made.decision_id} ({made.settings}) predicted {_seconds_text(made.step_s)} a step, between"),
            Text(f"{_seconds_text(made.low_s)} and {_seconds_text(made.high_s)}; measured: {_seconds_text(made.measured_s)}"),
        ]
    if job.sizes:
        top = max(size.high_per_s for size in job.sizes)
        lines += [Text(), Text("workers  samples/s  interval of 90 %", "dim")]
        for size in job.sizes:
            interval = f"{rate_text(size.low_per_s)} to {rate_text(size.high_per_s)}"
            line = Text(f"{size.num_workers:>7}  {rate_text(size.samples_per_s):>9}  {interval:<18}")
            lines.append(
                line + bar(size.samples_per_s / top, 16) + Text(" measured" if size.is_measured else " predicted", "dim")
            )
    return lines
