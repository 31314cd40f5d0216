"""Measure the time and the resources of training steps. Decides nothing and writes nothing.

The training thread only adds a few numbers per step. Processes and devices are examined when a window is closed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from lightning_dlrover.observe.descriptors import Descriptors
from lightning_dlrover.observe.gpu_memory import GpuPeak, gpu_limit_bytes
from lightning_dlrover.observe.nvml import BusyTime
from lightning_dlrover.observe.resources import (
    CpuUse,
    MemoryWatch,
    available_cores,
    cpu_use,
    memory_limit_bytes,
    own_memory_limit_bytes,
)
from lightning_dlrover.observe.step_times import Part, StepParts, StepTimes, marks_of
from lightning_dlrover.perf.samples import STEP_PARTS, StepProfile

__all__ = ["Model", "ProfileKey", "StepProfiler"]

MAX_SETTLING_STEPS = 20
"""Maximum number of steps at the start of a window that use batches prepared before it."""


@dataclass(frozen=True)
class ProfileKey:
    """Conditions common to all steps of a window; a window ends when any of them changes."""

    round_number: int
    global_rank: int
    num_workers: int
    num_nodes: int
    global_batch: int
    local_batch: int
    loader_workers: int
    prefetch_factor: int
    intra_op_threads: int
    fullest_node: int = 0
    emptiest_node: int = 0
    workers_here: int = 1  # workers on this worker's node
    pass_limit: int = 0  # most samples that this worker computes at once; 0: it never computes a share in parts

    @property
    def settling_steps(self) -> int:
        """Number of first steps to leave out: that of the change, and those with batches prepared before it."""
        return 1 + min(MAX_SETTLING_STEPS, self.loader_workers * self.prefetch_factor)


@dataclass(frozen=True)
class Model:
    """Work of the steps."""

    descriptors: Descriptors
    dense_bytes: int  # gradient bytes reduced per step
    embedding_bytes: int  # bytes of all tables of the job


@dataclass(frozen=True)
class _Step:
    seconds: float
    parts: StepParts


@dataclass
class _Window:
    place: ProfileKey
    first_step: int
    started: float
    use: CpuUse
    to_settle: int = 0  # first steps still to leave out
    steps: list[_Step] = field(default_factory=list)


class StepProfiler:
    """Collects steps into windows.

    Args:
        worker_id: recorded in every window.
        times: filled by the strategy during each step.
    """

    def __init__(self, worker_id: str, device: torch.device, times: StepTimes) -> None:
        self._worker_id = worker_id
        self._device = device
        self._times = times
        times.start(marks_of(device))
        self._window: _Window | None = None
        self._last_end: float | None = None
        self._newest_step_s: float | None = None
        self._paused_s = 0.0
        self._paused_at: float | None = None
        self._memory = MemoryWatch()
        self._gpu_peak, self._busy_time = GpuPeak(device), BusyTime(device)
        self._memory_limit_bytes = memory_limit_bytes(os.environ)
        self._own_memory_limit_bytes = own_memory_limit_bytes(os.environ) or self._memory_limit_bytes

    def close(self) -> None:
        self._memory.close()
        self._times.stop()

    def pause(self) -> None:
        """Stop the clock during validation, a checkpoint or anything else that is no step."""
        if self._paused_at is None:
            self._paused_at = time.perf_counter()

    def resume(self) -> None:
        if self._paused_at is not None:
            self._paused_s += time.perf_counter() - self._paused_at
            self._paused_at = None

    def step_ended(self, place: ProfileKey, step: int) -> None:
        """Record a step's end. The first steps after a change of place are left out, see `ProfileKey.settling_steps`.

        Args:
            step: batches done by the job.
        """
        now = time.perf_counter()
        self.resume()
        parts = self._times.end_step()
        window = self._window
        if self._last_end is not None:
            self._newest_step_s = max(0.0, now - self._last_end - self._paused_s)
        if window is None or window.place != place or window.to_settle:
            self._gpu_peak.take()  # a step before the window has no part in its peak
        if window is None or window.place != place:
            self._busy_time.take()
            self._window = _Window(place, step, now, cpu_use(self._memory.children), place.settling_steps - 1)
        elif window.to_settle:
            window.to_settle -= 1
            window.first_step, window.started = step, now
        elif self._newest_step_s is not None:
            window.steps.append(_Step(self._newest_step_s, parts))
        self._last_end, self._paused_s = now, 0.0

    @property
    def num_steps(self) -> int:
        return len(self._window.steps) if self._window else 0

    @property
    def newest_step_s(self) -> float | None:
        """Seconds of the last step, whether or not it counts; None for the first one."""
        return self._newest_step_s

    @property
    def age_s(self) -> float:
        """Seconds since the window began."""
        return time.perf_counter() - self._window.started if self._window else 0.0

    def close_window(self, step: int, model: Model) -> StepProfile | None:
        """Return the steps since the last call as one profile; None if there were none.

        Args:
            step: batches done by the job.
        """
        window, num_steps = self._window, self.num_steps
        if window is None or num_steps == 0:
            return None
        place = window.place
        # The mean leaves out steps hit by something rare on this machine: a file written, a page cache flushed.
        kept = sorted(window.steps, key=lambda step: step.seconds)[: max(1, round(0.95 * num_steps))]
        step_time_s = sum(step.seconds for step in kept) / len(kept)
        use, memory = cpu_use(self._memory.children), self._memory.take()
        elapsed = max(1e-9, use.at - window.use.at)
        gpu_memory, gpu_percent = self._gpu_peak.take(), self._busy_time.take()
        self._window = _Window(place, step, time.perf_counter(), use)
        return StepProfile(
            worker_id=self._worker_id,
            round_number=place.round_number,
            global_rank=place.global_rank,
            num_workers=place.num_workers,
            num_nodes=place.num_nodes,
            first_step=window.first_step,
            num_steps=num_steps,
            global_batch=place.global_batch,
            local_batch=place.local_batch,
            loader_workers=place.loader_workers,
            prefetch_factor=place.prefetch_factor,
            intra_op_threads=place.intra_op_threads,
            fullest_node=place.fullest_node,
            emptiest_node=place.emptiest_node,
            pass_limit=place.pass_limit,
            cores=available_cores(),
            device="cpu" if self._device.type == "cpu" else torch.cuda.get_device_name(self._device),
            step_time_s=step_time_s,
            **_mean_parts(kept, step_time_s),
            samples_per_s=place.global_batch / step_time_s if step_time_s else 0.0,
            memory_bytes=memory.resident_bytes,
            peak_memory_bytes=memory.peak_bytes,
            memory_limit_bytes=min(self._memory_limit_bytes // max(1, place.workers_here), self._own_memory_limit_bytes),
            cpu_percent=100 * max(0.0, use.cpu_s - window.use.cpu_s) / elapsed,
            dense_bytes=model.dense_bytes,
            dense_flops=model.descriptors.dense_flops,
            embedding_bytes=model.embedding_bytes,
            lookups_per_sample=model.descriptors.lookups_per_sample,
            gpu_memory_bytes=gpu_memory,
            gpu_limit_bytes=gpu_limit_bytes(self._device),
            gpu_percent=gpu_percent,
            at=time.time(),
        )


def _mean_parts(steps: Sequence[_Step], step_time_s: float) -> dict[str, float]:
    """Return the fields of all parts of a step; zeros if the device has reached the end of none of these steps."""
    read = [(step, seconds) for step in steps if (seconds := step.parts.seconds()) is not None]
    if not read:
        return {f"{part}_s": 0.0 for part in STEP_PARTS}
    scale = step_time_s / max(1e-9, sum(step.seconds for step, _ in read))
    names: tuple[Part, ...] = ("forward", "backward", "communication", "optimizer")
    found = {f"{name}_s": scale * sum(seconds[name] for _, seconds in read) for name in names}
    # A wait of the host that a GPU has spent computing delays nothing.
    found["data_wait_s"] = scale * sum(min(step.parts.data_wait_s, seconds["between"]) for step, seconds in read)
    return {**found, "other_s": max(0.0, step_time_s - sum(found.values()))}
