"""Simulated time and tasks. Every change is an event of the queue, so one seed gives one history."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Coroutine, Generator
from typing import Any

MAX_EVENTS = 50_000
"""Maximum number of events per run. A typical run has one or two thousand."""


class LivelockError(RuntimeError):
    """Simulated time hardly passes."""


class Kernel:
    """Clock, queue, dice and trace of one run."""

    def __init__(self, seed: int) -> None:
        self.now = 0.0
        self.seed = seed
        self.rng = random.Random(seed)
        self.lines: list[tuple[Any, ...]] = []
        self.num_events = 0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def after(self, delay_s: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now + delay_s, next(self._order), happen))

    def run_until(self, end_s: float, done: Callable[[], bool] = lambda: False) -> None:
        while self._queue and self._queue[0][0] <= end_s:
            self.now, _, happen = heapq.heappop(self._queue)
            self.num_events += 1
            if self.num_events > MAX_EVENTS:
                raise LivelockError(f"more than {MAX_EVENTS} events: everybody is busy with nothing")
            happen()
            if done():
                return
        self.now = end_s

    def log(self, who: str, *what: Any) -> None:
        self.lines.append((self.now, who, *what))


class Wake:
    """Object that a task awaits: an event that another task sets, or the end of a time."""

    def __init__(self) -> None:
        self.value: Any = None
        self.is_set = False
        self._task: _Task | None = None

    def set(self, value: Any = None) -> None:
        if not self.is_set:
            self.is_set, self.value = True, value
            if self._task is not None:
                self._task.resume()

    def __await__(self) -> Generator[Wake, None, Any]:
        if not self.is_set:
            yield self
        if isinstance(self.value, BaseException):
            raise self.value
        return self.value


class Process:
    """A group of tasks that are killed, stopped and continued together, without notice."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.alive = True
        self.stopped = False
        self._tasks: list[_Task] = []
        self._held_up: list[_Task] = []

    def close(self) -> None:
        """Free the remaining tasks after the end of a run."""
        self.alive = False
        for task in self._tasks:
            task._course.close()

    def run(self, course: Coroutine[Any, Any, None]) -> None:
        task = _Task(self, course)
        self._tasks.append(task)
        task.resume()

    def sleep(self, seconds: float) -> Wake:
        wake = Wake()
        self.kernel.after(seconds, wake.set)
        return wake

    def kill(self) -> None:
        """Kill at once: a running task ends at its next await."""
        self.alive = False
        self._held_up = []

    def stop(self) -> None:
        self.stopped = True

    def go_on(self) -> None:
        self.stopped = False
        held_up, self._held_up = self._held_up, []
        for task in held_up:
            task.resume()


class _Task:
    def __init__(self, process: Process, course: Coroutine[Any, Any, None]) -> None:
        self._process = process
        self._course = course

    def resume(self) -> None:
        self._process.kernel.after(0.0, self._step)

    def _step(self) -> None:
        process = self._process
        if not process.alive:
            return
        if process.stopped:
            process._held_up.append(self)
            return
        try:
            wake: Wake = self._course.send(None)
        except StopIteration:
            return
        if wake.is_set:
            self.resume()
        else:
            wake._task = self
