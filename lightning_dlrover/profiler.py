"""Measure training steps: where their time goes and what they use. Decides nothing and writes nothing.

The training thread only adds a few numbers per step; looking at processes and devices happens when a window is closed.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import psutil
import torch
from torch.nn.parallel import DistributedDataParallel

from lightning_dlrover.perf.samples import StepProfile

if TYPE_CHECKING:
    from lightning_dlrover.strategy import StepTimes

__all__ = ["Place", "ProcessUse", "StepProfiler", "available_cores", "communication_s", "process_use"]

COMMUNICATION_SAMPLE_STEPS = 20
"""DDP times every so many-th iteration."""


@dataclass(frozen=True)
class Place:
    """What a window of steps has in common; a window ends when any of it changes."""

    round_number: int
    global_rank: int
    num_workers: int
    num_nodes: int
    global_batch: int
    local_batch: int
    loader_workers: int


@dataclass(frozen=True)
class ProcessUse:
    """What a worker and its loader workers used so far."""

    cpu_s: float
    memory_bytes: int
    at: float


@dataclass
class _Window:
    place: Place
    first_step: int
    started: float
    use: ProcessUse
    step_times_s: list[float] = field(default_factory=list)
    parts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("data_wait", "forward", "backward", "run"), 0.0))


class StepProfiler:
    """Collects steps into windows.

    Args:
        worker_id: recorded in every window.
        device: where the model runs.
        times: filled by the strategy during each step.
    """

    def __init__(self, worker_id: str, device: torch.device, times: StepTimes) -> None:
        self._worker_id = worker_id
        self._device = device
        self._times = times
        self._window: _Window | None = None
        self._last_end: float | None = None
        self._paused_s = 0.0
        self._paused_at: float | None = None

    def pause(self) -> None:
        """Something that is no step begins: validation, a checkpoint."""
        if self._paused_at is None:
            self._paused_at = time.perf_counter()

    def resume(self) -> None:
        if self._paused_at is not None:
            self._paused_s += time.perf_counter() - self._paused_at
            self._paused_at = None

    def step_ended(self, place: Place, step: int) -> None:
        """A step's end. The first step after a change of place is left out: it holds the change itself.

        Args:
            step: optimizer steps done by the job.
        """
        now = time.perf_counter()
        self.resume()
        times = self._times
        window = self._window
        if window is None or window.place != place:
            self._window = _Window(place, step, now, process_use())
        elif self._last_end is not None:
            window.step_times_s.append(max(0.0, now - self._last_end - self._paused_s))
            window.parts["data_wait"] += times.data_wait_s
            window.parts["forward"] += times.forward_s
            window.parts["backward"] += times.backward_s
            window.parts["run"] += times.run_s
        times.reset()
        self._last_end, self._paused_s = now, 0.0

    @property
    def num_steps(self) -> int:
        return len(self._window.step_times_s) if self._window else 0

    @property
    def age_s(self) -> float:
        """Seconds since the window began."""
        return time.perf_counter() - self._window.started if self._window else 0.0

    def close_window(self, step: int, model: torch.nn.Module | None) -> StepProfile | None:
        """The steps since the last call as one profile; None if there were none.

        Args:
            step: optimizer steps done by the job.
            model: the wrapped model, asked for its communication times.
        """
        window, num_steps = self._window, self.num_steps
        if window is None or num_steps == 0:
            return None
        place = window.place
        mean = {name: seconds / num_steps for name, seconds in window.parts.items()}
        # The mean over steps that were not hit by something rare (a file written, a page cache flushed) on this machine.
        ordered = sorted(window.step_times_s)
        kept = ordered[: max(1, round(0.95 * num_steps))]
        step_time_s = sum(kept) / len(kept)
        scale = step_time_s / (sum(ordered) / num_steps) if sum(ordered) else 1.0
        data_wait, forward, backward, run = (mean[k] * scale for k in ("data_wait", "forward", "backward", "run"))
        communication = min(communication_s(model), backward)
        optimizer = max(0.0, run - forward - backward)
        use = process_use()
        elapsed = max(1e-9, use.at - window.use.at)
        gpu_memory, gpu_percent = _gpu_use(self._device)
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
            intra_op_threads=torch.get_num_threads(),
            cores=available_cores(),
            device="cpu" if self._device.type == "cpu" else torch.cuda.get_device_name(self._device),
            step_time_s=step_time_s,
            data_wait_s=data_wait,
            forward_s=forward,
            backward_s=backward - communication,
            communication_s=communication,
            optimizer_s=optimizer,
            other_s=max(0.0, step_time_s - data_wait - max(run, forward + backward)),
            samples_per_s=place.global_batch / step_time_s if step_time_s else 0.0,
            memory_bytes=use.memory_bytes,
            cpu_percent=100 * max(0.0, use.cpu_s - window.use.cpu_s) / elapsed,
            dense_bytes=_gradient_bytes(model),
            gpu_memory_bytes=gpu_memory,
            gpu_percent=gpu_percent,
            at=time.time(),
        )


def communication_s(model: torch.nn.Module | None) -> float:
    """Seconds of the newest sampled step in which gradients travelled and nothing was computed meanwhile."""
    if not isinstance(model, DistributedDataParallel):
        return 0.0
    sampled: dict[str, int] = model._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    exposed_ns = sampled.get("backward_comm_time", 0) - sampled.get("backward_compute_comm_overlap_time", 0)
    return float(max(0, exposed_ns)) / 1e9


def process_use() -> ProcessUse:
    """CPU time and resident memory of this process and its children."""
    process = psutil.Process()
    cpu_s, memory_bytes = 0.0, 0
    for each in (process, *process.children(recursive=True)):
        try:
            times = each.cpu_times()
            cpu_s += times.user + times.system
            memory_bytes += each.memory_info().rss
        except psutil.Error:
            continue  # it has ended since it was listed
    return ProcessUse(cpu_s, memory_bytes, time.perf_counter())


def available_cores() -> float:
    """Cores that this process may use."""
    return float(len(os.sched_getaffinity(0)))


def _gradient_bytes(model: torch.nn.Module | None) -> int:
    return sum(p.nbytes for p in model.parameters() if p.requires_grad) if model is not None else 0


def _gpu_use(device: torch.device) -> tuple[int, float]:
    """Peak memory in bytes and utilisation in percent of the accelerator; zeros without one."""
    if device.type != "cuda":
        return 0, 0.0
    try:
        percent = float(torch.cuda.utilization(device))
    except (ModuleNotFoundError, RuntimeError):
        percent = 0.0  # NVML is not installed
    return torch.cuda.max_memory_allocated(device), percent
