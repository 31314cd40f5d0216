"""`dlrover top`: jobs, one job and one worker on a full screen, and keys that act on them.

A thread waits for the watcher and hands the newest picture to the screen on top, so that a slow etcd holds up no key. Each
action runs in a thread of its own after a confirmation, with the functions of `dlrover scale`, `drain` and `stacks`.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from rich.text import Text
from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container, Horizontal, Vertical, VerticalScroll
from textual.css.query import NoMatches
from textual.screen import ModalScreen, Screen
from textual.widgets import DataTable, Footer, Input, Static
from textual.worker import get_current_worker

from lightning_dlrover.cli.control import drain_worker, leave_to_planner, scale_job
from lightning_dlrover.cli.errors import EXIT_OK, UsageError
from lightning_dlrover.dashboard import drawing
from lightning_dlrover.output import counted, time_text
from lightning_dlrover.pool.admission import wait_text
from lightning_dlrover.pool.commands import what_if_lines
from lightning_dlrover.pool.view import POOLS_FOLDER, GrantRecord
from lightning_dlrover.rdzv.etcd.types import EtcdError, KeyValue
from lightning_dlrover.rdzv.job.journal import Journal, readable
from lightning_dlrover.rdzv.job.sizes import WorldSizes
from lightning_dlrover.rdzv.membership.worker_records import ask_for_stacks
from lightning_dlrover.report.status import JobNotFoundError, JobPlace, connect
from lightning_dlrover.report.view_model import ShownJob, ShownWorker, clean
from lightning_dlrover.report.watcher import SeenJob, SeenJobs, SourceState, Watcher

AGES_S = 1.0  # seconds after which ages are shown anew although nothing has changed
LIST_S = 1.0  # shortest time in seconds between two pictures of a list
STACKS_S = 10.0  # seconds to wait for the stacks of a worker
WIDE = 120  # columns from which a screen has charts
MAX_STACK_LINES = 2000
MAX_ROWS = 2000  # workers in a table
_TABLE_WIDTH = 100  # columns of the workers' table on a wide screen, where the events are next to it

_REFUSALS = (UsageError, EtcdError, JobNotFoundError, OSError, ValueError)


class Table(DataTable[Any]):
    """A table that is updated in place: its cursor stays on its row, and only changed cells in view are drawn again."""

    def __init__(self, columns: Sequence[str], name: str) -> None:
        super().__init__(id=name, cursor_type="row", zebra_stripes=False, cell_padding=1)
        self._columns = columns
        self._rows: dict[str, tuple[Any, ...]] = {}  # as they are in the table
        self._newest: Callable[[str], tuple[Any, ...]] = self._rows.__getitem__

    def on_mount(self) -> None:
        for column in self._columns:
            self.add_column(column, key=column)

    @property
    def selected(self) -> str | None:
        """Key of the row under the cursor."""
        keys = [*self._rows]
        return keys[self.cursor_row] if 0 <= self.cursor_row < len(keys) else None

    def show(self, keys: Sequence[str], cells_of: Callable[[str], tuple[Any, ...]]) -> None:
        """Show these rows.

        Args:
            cells_of: returns the cells of a row by its key.
        """
        self._newest = cells_of
        if list(keys) == list(self._rows):
            self._update_rows_in_view()
            return
        selected = self.selected
        self.clear()
        self._rows = {key: cells_of(key) for key in keys}
        for key, cells in self._rows.items():
            self.add_row(*cells, key=key)
        if selected is not None and selected in self._rows:
            self.move_cursor(row=list(self._rows).index(selected))

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        super().watch_scroll_y(old_value, new_value)
        self._update_rows_in_view()

    def _update_rows_in_view(self) -> None:
        """Ages change in all rows every second; a thousand updates would hold up the keys."""
        begin = max(0, round(self.scroll_y) - 2)
        for key in list(self._rows)[begin : begin + self.size.height + 4]:
            cells, former_cells = self._newest(key), self._rows[key]
            self._rows[key] = cells
            for column, cell, former in zip(self._columns, cells, former_cells, strict=True):
                if cell != former:
                    self.update_cell(key, column, cell, update_width=len(cell) > len(former))


class Confirmation(ModalScreen[Any]):
    """A question about a change, with its prediction; closes with the answer, or None.

    Args:
        title: text for a value.
        predict: returns the prediction for a value, in lines; runs in a thread.
        value: number of workers to begin with; None: the question is not about a number.
        values: numbers that may be chosen.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y,enter", "answer(True)", "yes"),
        Binding("n,escape,q", "answer(False)", "no"),
        Binding("plus,equals_sign", "add(1)", "more"),
        Binding("minus", "add(-1)", "fewer"),
    ]

    def __init__(
        self,
        title: Callable[[int | None], str],
        predict: Callable[[int | None], Sequence[str]],
        value: int | None = None,
        values: Sequence[int] = (),
    ) -> None:
        super().__init__()
        self._title, self._predict = title, predict
        self.value, self._values = value, values

    def compose(self) -> ComposeResult:
        with Vertical(id="dialog"):
            yield Static(id="question")
            yield Static(id="prediction")
            yield Static(id="answers")

    def on_mount(self) -> None:
        self._ask()

    def _ask(self) -> None:
        self.query_one("#question", Static).update(Text(self._title(self.value), "bold"))
        self.query_one("#prediction", Static).update(Text("predicting ...", "dim"))
        more = "  + - another number" if self._values else ""
        self.query_one("#answers", Static).update(Text(f"y yes   n no{more}", "reverse"))
        self._look_up(self.value)

    @work(thread=True, group="prediction", exclusive=True)
    def _look_up(self, value: int | None) -> None:
        lines = self._predict(value)
        if not get_current_worker().is_cancelled:
            self.app.call_from_thread(self._show, value, lines)

    def _show(self, value: int | None, lines: Sequence[str]) -> None:
        if value == self.value:
            for shown in self.query("#prediction").results(Static):  # none once it was answered
                shown.update(Text("\n".join(clean(line) for line in lines)))

    def action_add(self, change: int) -> None:
        allowed = [each for each in self._values if (each > (self.value or 0)) == (change > 0) and each != self.value]
        if allowed:
            self.value = min(allowed) if change > 0 else max(allowed)
            self._ask()

    def action_answer(self, agrees: bool) -> None:
        self.dismiss((self.value if self.value is not None else True) if agrees else None)


class Page(ModalScreen[None]):
    """A long text to scroll through."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q,enter", "dismiss", "back")]

    def __init__(self, title: str, lines: Sequence[Text]) -> None:
        super().__init__()
        self._title, self._lines = title, lines

    def compose(self) -> ComposeResult:
        with Vertical(id="page"):
            yield Static(Text(self._title, "bold"))
            with VerticalScroll():
                yield Static(Text("\n").join(self._lines), id="text")
            yield Static(Text("Esc back   arrows and PgDn scroll", "reverse"))

    def on_mount(self) -> None:
        self.query_one(VerticalScroll).focus()

    async def action_dismiss(self, result: None = None) -> None:
        self.dismiss(None)


class Live(Screen[None]):
    """A screen that shows the newest picture."""

    app: Top

    def fetch(self) -> Any:
        """Return what to show. Called from a thread."""
        raise NotImplementedError

    def show(self, seen: Any) -> None:
        raise NotImplementedError

    def on_mount(self) -> None:
        self.call_after_refresh(self.app.refresh_now)

    def on_screen_resume(self) -> None:
        self.app.refresh_now()

    def on_resize(self) -> None:
        self.set_class(self.size.width >= WIDE, "wide")
        self.app.refresh_now()

    def head(self, title: Text, source: SourceState | None, now: float, is_over: bool = False) -> Text:
        """Return the first line: the title, and whether the picture is current."""
        if source is None:
            state = Text("reading", "yellow")
        elif is_over:
            state = Text("ended", "bold")
        elif source.is_connected:
            state = Text("live", "green")
        elif source.as_of:
            state = Text(f"STALE for {time_text(max(0.0, now - source.as_of))}", "bold red")
        else:
            state = Text("no answer", "bold red")
        title.truncate(max(10, self.size.width - len(state) - 1), overflow="ellipsis")
        return title + Text(" " * max(1, self.size.width - len(title) - len(state))) + state


def waiting_in_pools(entries: Mapping[str, KeyValue], now: float) -> dict[str, str]:
    """Return the jobs that wait for a place in a pool, first in the queue first, with their waits in words.

    Args:
        entries: the records of all pools, by key.
    """
    found: list[tuple[str, int, str, str]] = []
    for key, entry in entries.items():
        pool, _, path = key.partition(f"/{POOLS_FOLDER}/")[2].partition("/")
        folder, _, name = path.partition("/")
        grant = readable(GrantRecord, entry) if folder == "grants" else None
        if grant is not None and grant.state == "waiting":
            found.append((pool, grant.place, clean(name, 100), clean(f"pool {pool}: {wait_text(grant, now)}")))
    return {name: text for _, _, name, text in sorted(found)}


class JobsScreen(Live):
    """All jobs."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "open", "open job", show=True, priority=True),
        Binding("slash", "filter", "filter"),
        Binding("question_mark", "help", "help"),
        Binding("q", "app.quit", "quit"),
    ]

    COLUMNS = ("JOB", "STATE", "WORKERS", "SAMPLES/S", "PROGRESS", "GOODPUT", "TREND", "LAST EVENT")

    def __init__(self) -> None:
        super().__init__()
        self._jobs: dict[str, ShownJob] = {}
        self._waits: dict[str, str] = {}  # jobs that wait in the queue of a pool, and how long they will
        self._problem = ""

    def compose(self) -> ComposeResult:
        yield Static(id="head")
        yield Input(placeholder="show jobs whose name or state contains ... (Enter keeps, Esc clears)", id="filter")
        yield Table(self.COLUMNS, "jobs")
        yield Static(id="notice")
        yield Footer(compact=True, show_command_palette=False)

    def on_mount(self) -> None:
        super().on_mount()
        self.query_one("#filter").display = False
        self.query_one("#jobs").focus()

    def fetch(self) -> SeenJobs:
        return self.app.watcher.jobs()

    def show(self, seen: SeenJobs) -> None:
        now, wanted = time.time(), self.query_one("#filter", Input).value.lower()
        jobs = [job for job in seen.jobs if wanted in f"{job.run_id} {job.state}".lower()]
        worst = min(seen.sources, key=lambda source: (source.is_connected, source.as_of), default=None)
        running = sum(not job.is_over for job in seen.jobs)
        title = Text(f"dlrover top · {counted(len(seen.jobs), 'job')}, {running} running · {self.app.watcher.place}", "bold")
        self.query_one("#head", Static).update(self.head(title, worst, now))
        room = max(20, self.size.width - 86)
        listed = {job.run_id: job for job in jobs[:MAX_ROWS]}
        queued = waiting_in_pools(self.app.watcher.entries_below(f"{POOLS_FOLDER}/"), now)
        self._waits = {name: text for name, text in queued.items() if name not in listed and wanted in f"{name} queued".lower()}

        def cells_of(name: str) -> tuple[Any, ...]:
            if name in listed:
                return self._cells(listed[name], room)
            return (Text(name[:24], "bold"), Text("queued", "yellow"), *("-",) * 4, Text(), Text(self._waits[name][:room]))

        self.query_one("#jobs", Table).show([*listed, *self._waits], cells_of)
        problems = [source.problem for source in seen.sources if source.problem and not source.is_connected]
        text = problems[0] if problems else "" if seen.jobs else f"no jobs yet in {self.app.watcher.place}"
        self._jobs = {job.run_id: job for job in jobs}
        self._problem = text
        self._show_last_event()

    def _show_last_event(self) -> None:
        """Show what the selected job has done last: a narrow screen has no column for it."""
        selected = self.query_one("#jobs", Table).selected or ""
        job = self._jobs.get(selected)
        text = Text(self._problem or self._waits.get(selected, ""), "yellow")
        if not self._problem and job is not None and job.events:
            last = job.events[-1]
            text = Text.assemble((f"{job.run_id[:24]}, {drawing.clock_text(last.at)}: ", "bold"), job.last_event)
        text.truncate(2 * self.size.width, overflow="ellipsis")
        self.query_one("#notice", Static).update(text)

    def on_data_table_row_highlighted(self) -> None:
        self._show_last_event()

    @staticmethod
    def _cells(job: ShownJob, room: int) -> tuple[Any, ...]:
        trend = Text(drawing.sparkline([point.samples_per_s for point in job.series], 10), "cyan")
        goodput = f"{job.goodput:.0%}" if job.goodput is not None else "-"
        event = Text(job.last_event[:room], no_wrap=True, overflow="ellipsis")
        rate, progress = drawing.rate_text(job.samples_per_s), drawing.progress_text(job) or "-"
        name = Text(job.run_id[:24], "bold")
        return name, drawing.state_text(job.state), drawing.size_text(job), rate, progress, goodput, trend, event

    def action_open(self) -> None:
        box = self.query_one("#filter", Input)
        if box.has_focus:
            self.query_one("#jobs").focus()
            return
        if (run_id := self.query_one("#jobs", Table).selected) is not None:
            self.app.push_screen(JobScreen(run_id))

    def on_data_table_row_selected(self) -> None:
        self.action_open()

    def action_filter(self) -> None:
        box = self.query_one("#filter", Input)
        box.display = True
        box.focus()

    def on_input_changed(self) -> None:
        self.app.refresh_now()

    def key_escape(self) -> None:
        box = self.query_one("#filter", Input)
        box.value, box.display = "", False
        self.query_one("#jobs").focus()

    def action_help(self) -> None:
        self.app.push_screen(Page("Keys and columns", [Text(line) for line in _HELP]))


class JobScreen(Live):
    """One job."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("plus,equals_sign", "scale(1)", "size", key_display="+ -"),
        Binding("minus", "scale(-1)", "fewer", show=False),
        Binding("d", "drain(False)", "drain"),
        Binding("r", "drain(True)", "replace"),
        Binding("h", "hold", "hold"),
        Binding("a", "auto", "auto"),
        Binding("s", "stacks", "stacks"),
        Binding("e", "explain", "plan"),
        Binding("v", "events", "events"),
        Binding("enter", "open", "worker", show=False, priority=True),
        Binding("question_mark", "help", "help"),
        Binding("escape", "back", "back", show=False),
        Binding("q", "app.quit", "quit"),
    ]

    COLUMNS = ("RANK", "STATE", "NODE", "SHARE", "STEP", "PARTS", "SLOW", "MEMORY", "SINCE")

    def __init__(self, run_id: str) -> None:
        super().__init__()
        self.run_id = run_id
        self.job: ShownJob | None = None  # the picture that is drawn
        self._drawn: Any = None  # all that the drawing depends on
        self.place: JobPlace | None = None

    def compose(self) -> ComposeResult:
        yield Static(id="head")
        yield Static(id="facts")
        with Horizontal(id="charts"):
            yield Static(id="rate")
            yield Static(id="parts")
        with Container(id="lower"):
            yield Table(self.COLUMNS, "workers")
            yield Static(id="events")
        yield Static(id="notice")
        yield Footer(compact=True, show_command_palette=False)

    def on_mount(self) -> None:
        super().on_mount()
        self.query_one("#workers").focus()

    def fetch(self) -> SeenJob:
        return self.app.watcher.job(self.run_id)

    def show(self, seen: SeenJob) -> None:
        drawn = id(seen.job), seen.source.is_connected, seen.source.problem, self.size
        if seen.job is not None and seen.source.is_connected and drawn == self._drawn:
            return  # another job has changed
        now, width = time.time(), self.size.width
        self.job, self.place, self._drawn = seen.job, seen.place, drawn
        job = seen.job
        place = "its own etcd" if seen.source.place.startswith("unix:") else seen.source.place
        title = Text(f"job {clean(self.run_id, 40)}", "bold")
        if job is not None:
            title = (
                title
                + Text(" · ")
                + drawing.state_text(job.state)
                + Text(f" · {job.target or 'torchrun'}" if job.target else "")
            )
        self.query_one("#head", Static).update(
            self.head(Text.assemble(title, (f" · {place}", "dim")), seen.source, now, job is not None and job.is_over)
        )
        self.query_one("#notice", Static).update(Text(seen.source.problem, "yellow"))
        self.query_one("#notice").display = bool(seen.source.problem)
        if job is None:
            text = "Nothing to show yet." if seen.source.problem else "Reading ..."
            self.query_one("#facts", Static).update(Text(text, "dim"))
            return
        is_wide, height = width >= WIDE, self.size.height
        facts = drawing.facts(job, width)
        room = max(3, height // 3) if not is_wide else len(facts)
        self.query_one("#facts", Static).update(Text("\n").join(facts[:room]))
        self._show_charts(job, is_wide, width, height)
        bar_width = _TABLE_WIDTH - 66 if is_wide else 14
        rows = {each.worker_id: each for each in job.workers[:MAX_ROWS]}
        table = self.query_one("#workers", Table)
        table.show(list(rows), lambda key: drawing.worker_cells(rows[key], now, bar_width))
        left = height - 3 - min(room, len(facts)) - (self._chart_height(height) + 2 if is_wide and job.series else 0)
        num_events = left if is_wide else max(3, min(len(job.events), left - max(5, min(len(rows) + 1, left // 2))))
        lines = drawing.event_lines(job, num_events)
        for line in lines:
            line.truncate(width - _TABLE_WIDTH - 2 if is_wide else width, overflow="ellipsis")
            line.no_wrap = True
        self.query_one("#events", Static).update(Text("\n").join([Text("events, newest last", "bold"), *lines]))

    @staticmethod
    def _chart_height(height: int) -> int:
        return max(4, min(12, height // 5))

    def _show_charts(self, job: ShownJob, is_wide: bool, width: int, height: int) -> None:
        self.query_one("#charts").display = is_wide and len(job.series) > 1
        if not self.query_one("#charts").display:
            return
        rows, half = self._chart_height(height), width // 2 - 2
        begin, end = drawing.clock_text(job.series[0].at), drawing.clock_text(job.series[-1].at)
        rate = [Text(f"samples per second, {begin} to {end}", "bold"), *drawing.rate_chart(job.series, half, rows)]
        self.query_one("#rate", Static).update(Text("\n").join(rate))
        legend = Text("step by parts: ", "bold").append_text(drawing.legend(has_waits=False))
        self.query_one("#parts", Static).update(Text("\n").join([legend, *drawing.parts_chart(job.series, half, rows)]))

    def _selected(self) -> ShownWorker | None:
        key = self.query_one("#workers", Table).selected
        workers = self.job.workers if self.job is not None else ()
        return next((worker for worker in workers if worker.worker_id == key), None)

    def action_open(self) -> None:
        if (worker := self._selected()) is not None:
            self.app.push_screen(WorkerScreen(self.run_id, worker.worker_id))

    def action_back(self) -> None:
        self.app.leave(self)

    def action_help(self) -> None:
        self.app.push_screen(Page("Keys and columns", [Text(line) for line in _HELP]))

    def action_explain(self) -> None:
        if self.job is not None:
            self.app.push_screen(Page(f"Plan of job {self.job.run_id}", drawing.plan_lines(self.job)))

    def action_events(self) -> None:
        if self.job is not None:
            lines = drawing.event_lines(self.job, len(self.job.events))
            self.app.push_screen(Page(f"Events of job {self.job.run_id}, newest last", lines))

    def action_stacks(self) -> None:
        if (worker := self._selected()) is not None:
            screen = WorkerScreen(self.run_id, worker.worker_id)
            self.app.push_screen(screen)
            screen.call_after_refresh(screen.action_stacks)

    # Changes of the job. Each asks first.

    def _may_act(self) -> tuple[ShownJob, JobPlace] | None:
        """Return the job and its place if a key may change it; else show why not."""
        job, place = self.job, self.place
        why = ""
        if self.app.is_read_only:
            why = "this screen was opened with --read-only"
        elif job is None or place is None or job.is_over:
            why = f"job {clean(self.run_id, 60)} is not running"
        if why or job is None or place is None:
            self.notify(why, severity="warning")
            return None
        return job, place

    def action_scale(self, change: int) -> None:
        if (found := self._may_act()) is None:
            return
        job, place = found
        if job.min_workers is None or job.max_workers is None:
            self.notify("the job has not started training yet", severity="warning")
            return
        possible = WorldSizes(job.listed_sizes, job.workers_per_node)
        sizes = [n for n in range(job.min_workers, job.max_workers + 1) if possible.allows(n)]
        present = job.num_workers if job.wanted_workers is None else job.wanted_workers
        allowed = [n for n in sizes if (n > present if change > 0 else n < present)]
        if not allowed:
            bound = f"at most {job.max_workers}" if change > 0 else f"at least {job.min_workers}"
            self.notify(f"job {job.run_id} was started for {bound} workers", severity="warning")
            return
        wants = f", and its plan wants {present}" if present != job.num_workers else ""
        self.app.push_screen(
            Confirmation(
                lambda n: f"Set job {job.run_id} to {counted(n, 'worker')}? It has {job.num_workers}{wants}.",
                lambda n: self.app.prediction(place, n),
                min(allowed) if change > 0 else max(allowed),
                sizes,
            ),
            lambda n: self._act(lambda: self.app.with_job(place, lambda client: scale_job(client, place, n, {})[-1]), n),
        )

    def action_hold(self) -> None:
        if (found := self._may_act()) is not None:
            job, place = found
            size = job.num_workers
            self.app.push_screen(
                Confirmation(
                    lambda _: f"Hold job {job.run_id} at {counted(size, 'worker')}?",
                    lambda _: ["Neither its planner nor its pool changes the number of workers until you press a."],
                ),
                lambda yes: self._act(lambda: self.app.with_job(place, lambda c: scale_job(c, place, size, {})[-1]), yes),
            )

    def action_auto(self) -> None:
        if (found := self._may_act()) is not None:
            job, place = found
            self.app.push_screen(
                Confirmation(
                    lambda _: f"Leave the size of job {job.run_id} to its planner, or its pool, again?",
                    lambda _: ["Settings by hand end. The next plan is made within some seconds."],
                ),
                lambda yes: self._act(lambda: self.app.with_job(place, lambda c: leave_to_planner(c, place)), yes),
            )

    def action_drain(self, replace: bool) -> None:
        worker = self._selected()
        if (found := self._may_act()) is None or worker is None:
            return
        job, place = found
        name, who = (
            worker.worker_id,
            f"worker {worker.worker_id}" + (f" (rank {worker.rank})" if worker.rank is not None else ""),
        )
        each = job.workers_per_node
        node = f" and the other workers of node {worker.node}" if each > 1 else ""

        def predict(_: int | None) -> Sequence[str]:
            if replace:
                return ["It leaves only once another worker is ready to take its place. The size stays the same."]
            rest = max(0, job.num_workers - each)
            return [f"It hands over and leaves; {counted(rest, 'worker')} would train on.", *self.app.prediction(place, rest)]

        self.app.push_screen(
            Confirmation(lambda _: f"{'Replace' if replace else 'Drain'} {who}{node}?", predict),
            lambda yes: self._act(
                lambda: self.app.with_job(place, lambda c: drain_worker(c, place, name, replace, "`dlrover top`")), yes
            ),
        )

    def _act(self, act: Callable[[], str], answer: Any) -> None:
        """Carry out an action in a thread if the user has agreed."""
        if answer is not None:
            self._act_now(act)

    @work(thread=True, group="action")
    def _act_now(self, act: Callable[[], str]) -> None:
        try:
            text, severity = act().partition("; `dlrover status")[0], "information"  # the progress is on this screen
        except _REFUSALS as error:
            text, severity = str(error), "error"
        self.app.call_from_thread(self.notify, clean(text), severity=severity, timeout=10, markup=False)


class WorkerScreen(Live):
    """One worker, and its stack traces on request."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("s", "stacks", "stacks"),
        Binding("escape,q", "back", "back", key_display="Esc"),
    ]

    def __init__(self, run_id: str, worker_id: str) -> None:
        super().__init__()
        self.run_id, self.worker_id = run_id, worker_id
        self.place: JobPlace | None = None

    def compose(self) -> ComposeResult:
        yield Static(id="head")
        yield Static(id="facts")
        with VerticalScroll(id="scroll"):
            yield Static(Text("s shows what the worker's threads are doing right now.", "dim"), id="stacks")
        yield Footer(compact=True, show_command_palette=False)

    def fetch(self) -> SeenJob:
        return self.app.watcher.job(self.run_id)

    def show(self, seen: SeenJob) -> None:
        self.place = seen.place
        title = Text(f"worker {clean(self.worker_id, 60)} of job {clean(self.run_id, 40)}", "bold")
        self.query_one("#head", Static).update(self.head(title, seen.source, time.time()))
        job = seen.job
        worker = next((each for each in job.workers if each.worker_id == self.worker_id), None) if job is not None else None
        if job is None or worker is None:
            lines = [Text("This worker is gone.", "yellow")]
        else:
            lines = drawing.worker_lines(worker, job, self.size.width)
        self.query_one("#facts", Static).update(Text("\n").join(lines))

    def action_back(self) -> None:
        self.app.leave(self)

    def action_stacks(self) -> None:
        if self.place is None:
            self.notify("the job is not running", severity="warning")
            return
        self.query_one("#stacks", Static).update(Text("asking the worker ...", "dim"))
        self._ask(self.place)

    @work(thread=True, group="stacks", exclusive=True)
    def _ask(self, place: JobPlace) -> None:
        try:
            text = self.app.with_job(place, lambda client: self._stacks(client, place))
        except _REFUSALS as error:
            text = str(error)
        lines = [Text(clean(line, 400)) for line in text.splitlines()[:MAX_STACK_LINES]]
        self.app.call_from_thread(self._show_stacks, lines)

    def _show_stacks(self, lines: Sequence[Text]) -> None:
        if self.is_mounted:
            self.query_one("#stacks", Static).update(Text("\n").join(lines))
            self.query_one("#scroll").focus()

    def _stacks(self, client: Any, place: JobPlace) -> str:
        request = ask_for_stacks(Journal(client, place.keys), "dlrover top", "asked for by `dlrover top`")
        deadline = time.monotonic() + STACKS_S
        version = self.app.watcher.version
        while request is not None and time.monotonic() < deadline and not get_current_worker().is_cancelled:
            found = self.app.watcher.stacks(self.run_id, self.worker_id)
            if found is not None and found.request >= request.number:
                waits = ", waits for others in a collective" if found.in_collective else ""
                return f"in {found.phase} since {found.since_s:.1f} s{waits}, at {found.place}\n{found.stacks}"
            version = self.app.watcher.wait_for_change(version, 1.0)
        if request is None:
            return "another process asks the workers for their stacks; try again in a moment"
        return f"no answer within {STACKS_S:g} s: the worker has no DLRoverCallback, was stopped, or runs C code"


_HELP = (
    "+ -      set the number of workers, after a prediction",
    "d r      drain the selected worker; replace it once another one is ready",
    "h a      hold the job at its size; leave it to the planner again",
    "s        stacks of the selected worker",
    "e v      the plan and its predictions; all events",
    "Enter    open a job or a worker; Esc goes back, / filters jobs, q quits",
    "",
    "WORKERS  present of wanted ones, and the limits of the job's start",
    "GOODPUT  time in steps that counted, over all time since the start",
    "SHARE    samples of each global batch",
    "STEP     seconds of a step",
    "PARTS    █ compute, ▓ wait for data, ░ wait for slower workers,",
    "         ▒ exchange of gradients, · other",
    "SLOW     own work relative to that of the median worker",
    "MEMORY   used, and its part of the limit",
    "rounds   each change of the workers: new number, and the pause for it",
)


class Top(App[int]):
    """The application.

    Args:
        job: the job to begin with; None: the list of jobs.
    """

    CSS = """
    Screen { layout: vertical; }
    #head { height: 1; background: $panel; }
    #facts { height: auto; }
    #charts { height: auto; margin: 1 0 0 0; }
    #rate { width: 1fr; height: auto; }
    #parts { width: 1fr; height: auto; }
    #notice { height: auto; max-height: 3; }
    #lower { height: 1fr; layout: vertical; }
    #events { height: auto; }
    .wide #lower { layout: horizontal; margin: 1 0 0 0; }
    .wide #lower Table { width: 100; }
    .wide #events { width: 1fr; height: 1fr; padding: 0 0 0 2; }
    DataTable { height: 1fr; scrollbar-size-horizontal: 0; }
    #scroll { height: 1fr; margin: 1 0 0 0; }
    #dialog { width: 76; max-width: 96%; height: auto; max-height: 90%; border: round $accent; padding: 0 1; }
    #dialog Static { height: auto; }
    #page { width: 96%; height: 90%; border: round $accent; padding: 0 1; background: $surface; }
    #page VerticalScroll { height: 1fr; }
    Confirmation, Page { align: center middle; }
    """
    TITLE = "dlrover top"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [Binding("ctrl+c", "quit", "quit", show=False, priority=True)]

    def __init__(self, watcher: Watcher, job: str | None = None, pool: str = "default", read_only: bool = False) -> None:
        super().__init__()
        self.watcher = watcher
        self.is_read_only = read_only
        self._job, self._pool = job, pool
        self._is_due = False

    def on_mount(self) -> None:
        self.push_screen(JobsScreen() if self._job is None else JobScreen(self._job))
        self._follow()

    def leave(self, screen: Live) -> None:
        """Close a screen. The first one closes the application."""
        if sum(isinstance(each, Live) for each in self.screen_stack) > 1:
            self.pop_screen()
        else:
            self.exit(EXIT_OK)

    def refresh_now(self) -> None:
        """Let the screen on top fetch its picture, soon."""
        screen = next((each for each in reversed(self.screen_stack) if isinstance(each, Live)), None)
        if screen is not None and self.is_running:
            self._fetch(screen)

    @work(thread=True, group="fetch", exclusive=True)
    def _fetch(self, screen: Live) -> None:
        seen = screen.fetch()
        if not get_current_worker().is_cancelled:
            self.call_from_thread(self._show, screen, seen)

    @work(thread=True, group="follow")
    def _follow(self) -> None:
        worker, version = get_current_worker(), -1
        while True:
            version = self.watcher.wait_for_change(version, AGES_S)
            if worker.is_cancelled:
                return
            with contextlib.suppress(RuntimeError):  # the application has just ended
                self.call_from_thread(self.refresh_now)
            # Changes of many jobs come all the time, and each draws the list again.
            time.sleep(LIST_S if isinstance(next(reversed(self.screen_stack), None), JobsScreen) else 0.1)

    def _show(self, screen: Live, seen: Any) -> None:
        if screen.is_mounted and screen in self.screen_stack:
            with contextlib.suppress(NoMatches):  # the screen has just been closed
                screen.show(seen)

    def with_job(self, place: JobPlace, act: Callable[[Any], str]) -> str:
        """Return the result of an action with a client of the job's etcd. Called from a thread; raises the action's errors."""
        with connect(place) as client:
            return act(client)

    def prediction(self, place: JobPlace, num_workers: int | None) -> Sequence[str]:
        """Return the lines of `dlrover what-if`, or why there are none. Called from a thread."""
        try:
            with connect(place) as client:
                return [line for line in what_if_lines(client, place, self._pool, num_workers) if line]
        except _REFUSALS as error:
            return [f"No prediction: {error}"]


def run_top(
    job: str | None,
    endpoint: str | None,
    prefix: str | None,
    run_dir: Path,
    access: Mapping[str, str],
    pool: str,
    read_only: bool,
) -> int:
    """Run `dlrover top` until its user quits; return the exit code."""
    for handler in [*logging.root.handlers]:  # a line of a log would land in the middle of the screen
        logging.root.removeHandler(handler)
    logging.root.addHandler(logging.NullHandler())
    with Watcher(endpoint, prefix, run_dir, access, job) as watcher:
        return Top(watcher, job, pool, read_only).run() or EXIT_OK
