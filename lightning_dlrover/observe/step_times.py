"""Time of a step, by its parts, on the timeline of the device that computes it.

A step is a row of marks: moments at which one part ends and another begins. On a CPU a mark is a moment of the host's clock.
On a GPU it is a CUDA event on the stream that computes, because the host runs ahead of it. The host never waits for an event:
a step is read once the device has reached all of its marks, usually when the next step begins.

What the parts of a step on a GPU contain:

- `communication` is the time in which the stream stands still for other workers: from the last gradient until DDP's reductions
  have ended, and waits of the script's collectives. Reductions that the backward pass hides are part of `backward`.
  NCCL runs a collective without `async_op` on the computing stream itself, so that one counts as the pass that contains it.
- Time in which the device has nothing to do, because the host is late, belongs to the part that it waits for.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Protocol

import torch

__all__ = ["CudaMark", "HostMark", "Mark", "Part", "StepParts", "StepTimes", "marks_of"]

Part = Literal["between", "forward", "backward", "communication", "optimizer"]
"""`between`: from one step's end to the next one's begin. `optimizer`: everything else in a step."""


class Mark(Protocol):
    """A moment on a device's timeline."""

    def is_reached(self) -> bool:
        """Whether the device has come so far. Does not wait for it."""

    def seconds_since(self, earlier: Any) -> float:
        """Return the seconds between two marks of one device, both reached."""


class HostMark:
    """The moment at which it is created."""

    def __init__(self) -> None:
        self._at = time.perf_counter()

    def is_reached(self) -> bool:
        return True

    def seconds_since(self, earlier: HostMark) -> float:
        return self._at - earlier._at


class CudaMark:
    """The moment at which a device's current stream has done all work that it was given so far."""

    def __init__(self, device: torch.device) -> None:
        self._event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._event.record(torch.cuda.current_stream(device))

    def is_reached(self) -> bool:
        return bool(self._event.query())

    def seconds_since(self, earlier: CudaMark) -> float:
        return float(earlier._event.elapsed_time(self._event)) / 1e3


def marks_of(device: torch.device) -> Callable[[], Mark]:
    """Return what creates marks on the timeline of a device."""
    return partial(CudaMark, device) if device.type == "cuda" else HostMark


@dataclass
class StepParts:
    """One step's marks, each with the part that begins there; the last one is the step's end."""

    data_wait_s: float  # seconds in which the host waited for its batch
    waited_s: float  # seconds in which the host waited for other workers
    _marks: list[tuple[Part, Mark]] = field(default_factory=list)
    _seconds: dict[Part, float] | None = None

    def seconds(self) -> dict[Part, float] | None:
        """Return the seconds of each part; None while the device has not reached the step's end."""
        if self._seconds is None and all(mark.is_reached() for _, mark in reversed(self._marks)):
            sums: dict[Part, float] = dict.fromkeys(("between", "forward", "backward", "communication", "optimizer"), 0.0)
            for (part, begin), (_, end) in itertools.pairwise(self._marks):
                sums[part] += max(0.0, end.seconds_since(begin))
            self._seconds = sums
            self._marks.clear()
        return self._seconds


class StepTimes:
    """Marks of the step that runs. Records nothing before `start`."""

    def __init__(self) -> None:
        self.data_wait_s = 0.0
        self.late_s = 0.0
        """Seconds of waiting for other workers, in all steps read so far, that only the device has waited."""
        self._new_mark: Callable[[], Mark] | None = None
        self._part: Part = "between"
        self._waits_from: Part = "between"  # part that a wait for other workers interrupts
        self._waited_s = 0.0
        self._marks: list[tuple[Part, Mark]] = []
        self._unread: deque[StepParts] = deque()  # the device has not reached their ends yet

    def start(self, new_mark: Callable[[], Mark]) -> None:
        """Record marks until `stop`. `end_step` must be called after each step."""
        self.stop()
        self._new_mark = new_mark

    def stop(self) -> None:
        """Record nothing any more, and forget what was not read."""
        self._new_mark = None
        self._marks = []
        self._unread.clear()

    @contextmanager
    def measure(self, part: Part) -> Iterator[None]:
        """Count the time of a block, without the parts measured within, as time of a part of the step."""
        if self._part == "between":
            self._read()
        outer = self._part
        self._switch(part)
        try:
            yield
        finally:
            self._switch(outer)

    def wait_begins(self) -> None:
        """Count the time from now on as communication, within the passes of a step."""
        if self._part in ("forward", "backward"):
            self._waits_from = self._part
            self._switch("communication")

    def wait_ends(self, waited_s: float) -> None:
        """Return to the interrupted pass. The host has waited for `waited_s`."""
        if self._part == "communication":
            self._waited_s += waited_s
            self._switch(self._waits_from)

    def end_step(self) -> StepParts:
        """Return the step that has ended, and begin the next one."""
        # Nothing was recorded since the step's last mark, where the time between two steps began.
        step = StepParts(self.data_wait_s, self._waited_s, self._marks)
        self._unread.append(step)
        self._marks = self._marks[-1:]
        self.data_wait_s = self._waited_s = 0.0
        return step

    def _switch(self, part: Part) -> None:
        self._part = part
        if self._new_mark is not None:
            self._marks.append((part, self._new_mark()))

    def _read(self) -> None:
        while self._unread and (seconds := self._unread[0].seconds()) is not None:
            self.late_s += max(0.0, seconds["communication"] - self._unread.popleft().waited_s)
