"""The live table of a queue on a terminal, and plain lines where there is none."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from lightning_dlrover.colocate.dispatcher import Dispatcher
from lightning_dlrover.colocate.journal import Ended
from lightning_dlrover.colocate.tenants import Memory
from lightning_dlrover.colocate.watched import WatchedJob
from lightning_dlrover.output import printable, say

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["LiveTable"]

DRAW_S = 0.5
MAX_ROWS = 30


class LiveTable:
    """Shows a dispatcher's jobs: as a table that changes on a terminal, else one line for each start and end.

    Use as a context manager.
    """

    def __init__(self, is_terminal: bool | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._is_terminal = sys.stdout.isatty() if is_terminal is None else is_terminal
        self._clock = clock
        self._drawn_s = -DRAW_S
        self._live: Any = nullcontext()
        self._started: set[tuple[str, int]] = set()  # jobs and attempts that were shown
        self._num_ended = 0
        if self._is_terminal:
            from rich.live import Live

            self._live = Live(auto_refresh=False, transient=True)

    def __enter__(self) -> LiveTable:
        self._context: AbstractContextManager[Any] = self._live
        self._context.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._context.__exit__(*error)

    def shown(self, dispatcher: Dispatcher) -> None:
        """Draw the present state, or print the changes."""
        for line in self._changes(dispatcher):
            if self._is_terminal:
                self._live.console.print(line, markup=False, highlight=False)
            else:
                say(printable(line))
        if self._is_terminal and self._clock() - self._drawn_s >= DRAW_S:
            self._drawn_s = self._clock()
            self._live.update(_table(dispatcher, self._clock()), refresh=True)

    def _changes(self, dispatcher: Dispatcher) -> list[str]:
        lines = []
        ended = dispatcher.past[self._num_ended :]
        self._num_ended = len(dispatcher.past)
        for job in [*ended, *dispatcher.running.values()]:
            if (key := (job.spec.name, job.attempt)) not in self._started:
                self._started.add(key)
                again = f" again, attempt {job.attempt}" if job.attempt > 1 else ""
                lines.append(f"{job.spec.name}: started on {job.device}{again}")
        # The end of a job is missing where it could not be written.
        ends = [dispatcher.ends.get((job.spec.name, job.attempt)) for job in ended]
        return lines + [_end_line(end) for end in ends if end is not None]


def _end_line(ended: Ended) -> str:
    paused = f", paused {ended.paused_s:.1f} s" if ended.paused_s >= 0.05 else ""
    line = f"{ended.job}: {ended.result} after {ended.run_s:.1f} s{paused}, peak {ended.peak_bytes >> 20} MiB"
    if ended.gpu_peak_bytes:
        line += f", {ended.gpu_peak_bytes >> 20} MiB of the GPU"
    return f"{line}: {ended.reason}" if ended.reason else line


def _table(dispatcher: Dispatcher, now: float) -> Table:
    from rich.table import Table

    waiting = dispatcher.waiting()
    done = len(dispatcher.ended)
    table = Table(title=f"{len(dispatcher.running)} with processes, {len(waiting)} waiting, {done} ended", title_justify="left")
    for name, justify in (("job", "left"), ("state", "left"), ("device", "left"), ("time", "right"), ("steps", "right")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    table.add_column("memory / charge (MiB)", justify="right")
    table.add_column("cores", justify="right")
    for job in sorted(dispatcher.running.values(), key=lambda job: job.at_s)[:MAX_ROWS]:
        table.add_row(*_cells(job, now))
    for each in waiting[: max(0, MAX_ROWS - len(dispatcher.running))]:
        sizes = each.expected.get("gpu") or each.expected.get("cpu", {})
        expected = ", ".join(_size(memory, f"{size >> 20}") for memory, size in sizes.items() if size) or "unknown"
        table.add_row(each.name, "waiting", "", f"{max(0.0, now - each.submitted_s):.0f} s", "", expected, "")
    return table


def _cells(job: WatchedJob, now: float) -> tuple[str, ...]:
    state = "paused for memory" if job.short_of else job.phase
    left = f" of {job.num_steps + job.steps_left:,}" if job.steps_left is not None else ""
    steps = f"{job.num_steps:,}{left}" if job.reports else ""
    cores = f"{job.cores:.1f}" if job.phase in ("starting", "running") else ""
    sizes = [(memory, f"{job.resident_bytes(memory) >> 20} / {charge >> 20}") for memory, charge in job.charges.items()]
    memory = ", ".join(_size(memory, text) for memory, text in sizes)
    return job.spec.name, state, job.device, f"{now - job.at_s:.0f} s", steps, memory, cores


def _size(memory: Memory, text: str) -> str:
    return f"GPU {text}" if memory == "gpu" else text
