"""Signs of life of a worker: its pulse, and the stacks of its threads when it hangs."""

from __future__ import annotations

import os
import site
import sysconfig
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch
from torch.nn.parallel import DistributedDataParallel

from lightning_dlrover.host import CGROUPS, PROC, cgroup_folders, current_frames, main_thread_frame
from lightning_dlrover.tuning.profiler import StepTimes
from lightning_dlrover.tuning.samples import OwnTimes

MAX_FRAMES = (40, 20, 10, 5)  # frames per thread: the largest number with which all threads fit

MAX_CHARACTERS = 8000  # characters of all threads together

_DEBUGGERS = ("pdb", "bdb", "pudb", "pydevd", "_pydevd_bundle", "debugpy")
_LIBRARIES = tuple({sysconfig.get_paths()["stdlib"], *site.getsitepackages(), os.path.dirname(os.path.dirname(__file__))})


def stacks() -> str:
    """Return stack traces of all Python threads but ours: main thread first, innermost call last, shortened if long."""
    frames = current_frames()
    main = threading.main_thread()
    others = [t for t in threading.enumerate() if t is not main and not _is_idle_service(t, frames.get(t.ident or 0))]
    shown = [(thread.name, frames[thread.ident]) for thread in (main, *others) if thread.ident in frames]
    text = ""
    for max_frames in MAX_FRAMES:
        text = "\n".join(_of_thread(name, frame, max_frames) for name, frame in shown)
        if len(text) <= MAX_CHARACTERS:
            return text
    return text[: MAX_CHARACTERS - 20] + "\n... (shortened)"


def innermost_user_place() -> str:
    """Return the main thread's FILE:LINE in FUNCTION at the innermost call of code outside of installed libraries."""
    frame = main_thread_frame()
    innermost = frame
    while frame is not None and frame.f_code.co_filename.startswith((*_LIBRARIES, "<")):
        frame = frame.f_back
    found = frame or innermost
    return f"{found.f_code.co_filename}:{found.f_lineno} in {found.f_code.co_name}" if found is not None else "unknown"


def is_in_debugger() -> bool:
    """Return whether this process is held by a Python debugger, or from outside by one such as gdb."""
    frame = main_thread_frame()
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).partition(".")[0] in _DEBUGGERS:
            return True
        frame = frame.f_back
    try:
        with open("/proc/self/status") as file:
            return any(line.startswith("TracerPid:") and int(line.split()[1]) > 0 for line in file)
    except (OSError, ValueError):
        return False


def _is_idle_service(thread: threading.Thread, frame: FrameType | None) -> bool:
    """Return whether this is a thread of ours or of etcd's client, which gives no evidence of the cause of a hang."""
    if thread.name.startswith("dlrover-") or frame is None:
        return True
    names = set()
    walked: FrameType | None = frame
    while walked is not None:
        names.add(str(walked.f_globals.get("__name__", "")).partition(".")[0])
        walked = walked.f_back
    return bool(names & {"grpc", "pyetcd"})


def _of_thread(name: str, frame: FrameType, max_frames: int) -> str:
    summary = traceback.extract_stack(frame)
    skipped = len(summary) - max_frames
    lines = [f"thread {name}:"]
    if skipped > 0:
        # The innermost calls matter more than the callers of the training.
        summary = traceback.StackSummary.from_list(summary[skipped:])
        lines.append(f"  ... {skipped} calls left out")
    for entry in summary:
        lines.append(f"  {entry.filename}:{entry.lineno} in {entry.name}")
        if entry.line:
            lines.append(f"    {entry.line}")
    return "\n".join(lines)


# Measure the time of each worker's own work in a step, and share it with all workers.
#
# In synchronous training every step takes equally long on all workers, because the others wait in collectives for the slow
# one. Each worker therefore has a clock that pauses while it is blocked in one (`OwnClock`). It adds its times by that
# clock to the vote that the workers take between steps anyway (`Pulse`, `World.wishes`). One step later every worker has
# the times of all, without an additional message.
#
# With an accelerator the host waits for the device once per step. From that wait the clock leaves out the time in which the
# device itself waited for others (`StepTimes.late_s`), one step late.

NUM_KEPT = 100
NUM_PER_WORKER = 5  # numbers per worker in a vote
_UNKNOWN = 1 << 62


class OwnTime(NamedTuple):
    """Seconds of this worker's own work, without those blocked in a collective."""

    busy_s: float  # total time until it was done
    queued_s: float  # part of it without a core although ready, because other processes of the host used the cores

    def since(self, start: OwnTime) -> OwnTime:
        return OwnTime(self.busy_s - start.busy_s, self.queued_s - start.queued_s)


class OwnClock:
    """A clock that pauses while the thread that created it is blocked in a collective.

    Args:
        times: record the begin and the end of each such wait; None: nothing does.
    """

    def __init__(self, times: StepTimes | None = None) -> None:
        self._times = times or StepTimes()
        self._thread = threading.get_ident()
        self._schedstat = -1
        with suppress(OSError):  # some kernels are built without it
            self._schedstat = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY | os.O_CLOEXEC)
            self._descriptor = weakref.finalize(self, _close, self._schedstat)
        self.is_stopped = False
        self._blocked = OwnTime(0.0, 0.0)
        self._computed: OwnTime | None = None

    def close(self) -> None:
        if self._schedstat >= 0:
            self._descriptor()
            self._schedstat = -1

    def read(self) -> OwnTime:
        return self._now().since(OwnTime(self._blocked.busy_s + self._times.late_s, self._blocked.queued_s))

    def _now(self) -> OwnTime:
        queued_s = 0.0
        if self._schedstat >= 0:
            with suppress(OSError, ValueError, IndexError):
                queued_s = int(os.pread(self._schedstat, 64, 0).split()[1]) / 1e9
        return OwnTime(time.perf_counter(), queued_s)

    def _stop(self) -> OwnTime:
        self.is_stopped = True
        self._times.wait_begins()
        return self._now()

    def _was_blocked_since(self, start: OwnTime) -> None:
        self.is_stopped = False
        blocked = self._now().since(start)
        self._times.wait_ends(blocked.busy_s)
        self._blocked = OwnTime(self._blocked.busy_s + blocked.busy_s, self._blocked.queued_s + blocked.queued_s)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Stop the clock while its thread waits for a collective from Python, such as torchrec's exchanges."""
        # On a GPU autograd has threads of its own. The clock's thread waits for them.
        is_own = threading.get_ident() == self._thread or torch._C._current_graph_task_id() != -1
        if not is_own or self.is_stopped:
            yield
            return
        started = self._stop()
        try:
            yield
        finally:
            self._was_blocked_since(started)

    def stop_in_forward(self, model: torch.nn.Module) -> None:
        """Stop the clock while DDP's forward pass waits for rank 0's buffers."""
        if not isinstance(model, DistributedDataParallel):
            return
        # A bound method would form a cycle with the model, and keep it and its hooks on parameters past its round.
        its_model = weakref.ref(model)

        def timed_sync() -> None:
            started = self._stop()
            try:
                DistributedDataParallel._sync_buffers(its_model())  # type: ignore[arg-type,no-untyped-call]
            finally:
                self._was_blocked_since(started)

        model._sync_buffers = timed_sync  # type: ignore[method-assign]

    def backward_begins(self, loss: torch.Tensor) -> None:
        """Arrange to record the end of the backward pass's own work; after it DDP waits for the gradients of the others."""
        self._computed, self.is_stopped = None, False
        if loss.requires_grad:
            loss.register_hook(self._queue_note)  # type: ignore[no-untyped-call]

    def backward_ended(self) -> None:
        if self._computed is not None:
            self._was_blocked_since(self._computed)
            self._computed = None

    def _queue_note(self, gradient: torch.Tensor) -> None:
        # Called before any gradient is ready, so the engine runs it before the callback that DDP queues at the last one.
        torch.autograd.Variable._execution_engine.queue_callback(self._note)

    def _note(self) -> None:
        self._computed = self._stop()


def _close(fd: int) -> None:
    with suppress(OSError):
        os.close(fd)


class Pulse:
    """This worker's own times on their way into the votes, and all workers' times from past votes."""

    def __init__(self) -> None:
        self._observations: deque[OwnTimes] = deque(maxlen=NUM_KEPT)  # times of round `_round`
        self.num_observations = 0  # count over all rounds
        self.threads: tuple[int, ...] = ()  # computing threads of each worker, by rank
        self.largest_shares: tuple[float, ...] = ()  # that each worker may take, in equal shares, by rank
        self._round = 0
        self._num_steps = self._encoded_steps = 0
        self._is_mixed = False  # whether the shares changed since the last vote
        self._times = [0.0, 0.0, 0.0]
        self._throttling = Throttling()
        self._throttled_s = self._throttling.seconds()

    def step_ended(self, compute: OwnTime, data: OwnTime) -> None:
        """Add one more step: the time of its computing, and before that of its wait for data."""
        self._num_steps += 1
        for i, seconds in enumerate(_parts(compute, data)):
            self._times[i] += seconds

    def observations(self, round_number: int) -> list[OwnTimes]:
        """Return all workers' times in this round, oldest first."""
        return list(self._observations) if self._round == round_number else []

    def shares_changed(self) -> None:
        """Leave the steps since the last vote out: they had different shares."""
        self._is_mixed = True

    def encode(self, round_number: int, rank: int, size: int, largest_share: float = 1.0) -> list[int]:
        """Return the numbers for the next vote: means over the steps since the last one, if the world did not change.

        Args:
            largest_share: largest share that this worker may take, in equal shares; 0 if all shares must be equal.
        """
        ballot = [_UNKNOWN] * (NUM_PER_WORKER * size)
        self._encoded_steps = self._num_steps
        before, self._throttled_s = self._throttled_s, self._throttling.seconds()
        if round_number != self._round:
            self._observations.clear()  # cleared first: another thread may read the times of the new round
            self._round = round_number
        elif self._num_steps and not self._is_mixed:
            # The kernel counts time lost to the worker's own quota as time in the queue, but its host is not to blame.
            back = min(max(0.0, self._throttled_s - before), self._times[2])
            self._times[0] += back
            self._times[2] -= back
            first = NUM_PER_WORKER * rank
            ballot[first : first + 3] = [round(seconds / self._num_steps * 1e6) for seconds in self._times]
            ballot[first + 3] = min(torch.get_num_threads(), len(os.sched_getaffinity(0)))
            ballot[first + 4] = round(1000 * largest_share)
        self._num_steps, self._is_mixed = 0, False
        self._times = [0.0, 0.0, 0.0]
        return ballot

    def decode(self, voted: Sequence[int], step_time_s: float, speeds: tuple[int, ...] = ()) -> None:
        """Record every worker's numbers from the vote.

        Args:
            speeds: to which the workers' shares were proportional; empty: equal shares.
        """
        if not self._encoded_steps or _UNKNOWN in voted:
            return
        compute_s, data_s, queued_s = (tuple(number / 1e6 for number in voted[i::NUM_PER_WORKER]) for i in range(3))
        self.threads = tuple(voted[3::NUM_PER_WORKER])
        self.largest_shares = tuple(number / 1000 for number in voted[4::NUM_PER_WORKER])
        self._observations.append(OwnTimes(self._encoded_steps, step_time_s, compute_s, data_s, queued_s, speeds))
        self.num_observations += 1


def _parts(compute: OwnTime, data: OwnTime) -> tuple[float, float, float]:
    """Return the time of computing and of getting data, both without time in the queue, and that queued time."""
    return (
        max(0.0, compute.busy_s - compute.queued_s),
        max(0.0, data.busy_s - data.queued_s),
        max(0.0, compute.queued_s + data.queued_s),
    )


class Throttling:
    """The time in which this process's control group, or one above it, had used up its CPU quota.

    The files are found and opened once, because every vote reads them.
    """

    def __init__(self, proc: Path = PROC, cgroups: Path = CGROUPS) -> None:
        self._files: list[int] = []
        for folder in cgroup_folders("cpu", proc, cgroups):
            with suppress(OSError):
                self._files.append(os.open(folder / "cpu.stat", os.O_RDONLY | os.O_CLOEXEC))
        self._descriptors = [weakref.finalize(self, _close, file) for file in self._files]

    def seconds(self) -> float:
        """Return the seconds so far; 0 if unknown."""
        return max(map(_throttled_s, self._files), default=0.0)


def _throttled_s(file: int) -> float:
    with suppress(OSError, ValueError):
        words = os.pread(file, 4096, 0).split()
        values = dict(zip(words[::2], words[1::2], strict=False))
        return max(int(values.get(b"throttled_usec", 0)) / 1e6, int(values.get(b"throttled_time", 0)) / 1e9)
    return 0.0
