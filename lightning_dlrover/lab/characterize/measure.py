"""Measure one point in this worker: warm-up, then blocks of whole steps and of cut steps in turn."""

from __future__ import annotations

import contextlib
import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from lightning_dlrover.characterize.energy import EnergyMeter
from lightning_dlrover.characterize.inputs import Batches
from lightning_dlrover.characterize.model import Clock, LocalTables, Model, Tables
from lightning_dlrover.characterize.point import Point
from lightning_dlrover.characterize.reference import ReferenceProgram
from lightning_dlrover.observe.gpu_memory import GpuPeak
from lightning_dlrover.observe.resources import MemoryWatch

__all__ = ["Effort", "Share", "measure"]

MIN_WARM_STEPS = 2
MIN_BLOCK_STEPS, MAX_BLOCK_STEPS = 2, 400
STEPS_PER_LOADER = 4
"""Steps of a block for each loader worker: their batches come in bursts, which a shorter block would see in part."""


@dataclass(frozen=True)
class Effort:
    """Extent of one visit."""

    warm_s: float = 0.06
    block_s: float = 0.1  # time of whole steps; cut steps take as long
    num_blocks: int = 2  # few, so that the time suffices for more visits, minutes apart


@dataclass(frozen=True)
class Share:
    """One worker's part of a visit."""

    blocks: tuple[float, ...]
    part_s: dict[str, float]
    forward_s: float
    peak_memory_bytes: int
    cpu_percent: float
    gpu_memory_bytes: int
    joules_per_step: float | None
    reference_s: tuple[float, ...] = ()  # seconds of the reference program within each block


def measure(point: Point, global_rank: int, effort: Effort, folder: Path) -> Share:
    """Measure a point together with the other workers of the default process group."""
    try:
        return _measured(point, global_rank, effort, folder)
    finally:
        gc.collect()  # a large table must not count against the next point


def _measured(point: Point, global_rank: int, effort: Effort, folder: Path) -> Share:
    torch.set_num_threads(point.threads)
    torch.manual_seed(0)
    cuda = point.device != "cpu"
    dense_device = torch.device("cuda" if cuda else "cpu")
    table_device = torch.device("cuda" if point.device == "cuda" else "cpu")
    local_batch = point.batch // point.num_workers
    gpu_peak = GpuPeak(dense_device)
    with contextlib.ExitStack() as stack:
        memory = stack.enter_context(MemoryWatch())
        batches = stack.enter_context(contextlib.closing(Batches(point, local_batch, global_rank, folder)))
        tables = _tables(point, table_device, stack)
        model = Model(point, dense_device, tables)

        def step() -> None:
            model.step(next(batches).to(dense_device, table_device))

        def cut_step(clock: Clock) -> None:
            batch = next(batches).to(dense_device, table_device)
            clock.mark("data")
            model.cut_step(batch, clock)

        reference = ReferenceProgram(dense_device)
        return _run(point, effort, step, cut_step, reference, memory, gpu_peak, cuda)


def _tables(point: Point, device: torch.device, stack: contextlib.ExitStack) -> Tables | None:
    if not point.num_sparse:
        return None
    if point.placement in ("local", "replicated"):
        return LocalTables(point, device)
    from lightning_dlrover.characterize.sharded import TablesOverWorkers

    return stack.enter_context(contextlib.closing(TablesOverWorkers(point, device)))


def _run(
    point: Point,
    effort: Effort,
    step: Callable[[], None],
    cut_step: Callable[[Clock], None],
    reference: ReferenceProgram,
    memory: MemoryWatch,
    gpu_peak: GpuPeak,
    cuda: bool,
) -> Share:
    num_steps = _warm_up(point, effort, step, cut_step, cuda)
    energy = EnergyMeter.of_machine(cuda)
    whole, parts, reference_s, reference_total_s = [], [], [], 0.0
    reference.seconds()
    with _no_collection():
        began, cpu_before, spent_before = _synced(point, cuda), _cpu_s(), energy.joules()
        for _ in range(effort.num_blocks):
            clock, whole_s, runs_s = Clock(cuda), 0.0, []
            for number in range(2 * num_steps):
                if number % max(1, num_steps // 4) == 0:  # the same steps on every worker, so that none waits for another
                    runs_s.append(reference.seconds())
                if number.bit_count() % 2:  # both kinds in turn, in an order (Thue, Morse) without a period: loaders have one
                    clock.begin()
                    cut_step(clock)
                else:
                    started = _now(cuda)
                    step()
                    whole_s += _now(cuda) - started
            whole.append(whole_s / num_steps)
            parts.append(clock.seconds())
            reference_s.append(statistics.fmean(runs_s))
            reference_total_s += sum(runs_s)
        took_s = _synced(point, cuda) - began
        cpu_s, spent = _cpu_s() - cpu_before, energy.joules()
    part_s, forward_s = _relative_parts(whole, parts, num_steps)
    per_step = None
    if spent is not None and spent_before is not None:
        of_steps = max(0.0, 1 - reference_total_s / took_s)  # the reference program takes its share
        per_step = of_steps * (spent - spent_before) / (2 * effort.num_blocks * num_steps)
    return Share(
        blocks=tuple(whole),
        part_s=part_s,
        forward_s=forward_s,
        peak_memory_bytes=memory.take().peak_bytes,
        cpu_percent=100 * cpu_s / took_s,
        gpu_memory_bytes=gpu_peak.take(),
        joules_per_step=per_step,
        reference_s=tuple(reference_s),
    )


def _relative_parts(
    whole: Sequence[float], parts: Sequence[tuple[dict[str, float], float]], num_steps: int
) -> tuple[dict[str, float], float]:
    """Return seconds per step of each part, and of the forward pass, as they relate to the median of whole steps.

    Whole and cut steps of a block ran in turn, under the same conditions, so the block with the median ratio of both counts.
    """
    step_s = statistics.median(whole)
    ordered = sorted(zip(whole, parts, strict=True), key=lambda block: sum(block[1][0].values()) / block[0])
    middle = ordered[(len(ordered) - 1) // 2 : len(ordered) // 2 + 1]
    scales = [step_s / (whole_s * num_steps * len(middle)) for whole_s, _ in middle]
    part_s = {
        part: sum(scale * block[0][part] for scale, (_, block) in zip(scales, middle, strict=True)) for part in middle[0][1][0]
    }
    return part_s, sum(scale * block[1] for scale, (_, block) in zip(scales, middle, strict=True))


def _warm_up(point: Point, effort: Effort, step: Callable[[], None], cut_step: Callable[[Clock], None], cuda: bool) -> int:
    """Warm up, and return the number of steps of a block. All workers make the same number of steps."""
    least = MIN_WARM_STEPS + 2 * point.loader_workers  # batches fetched ahead would look like a fast loader
    cut_step(Clock(cuda))
    step()
    began = _synced(point, cuda)
    for _ in range(least):
        step()
    step_s = _agreed((_synced(point, cuda) - began) / least, point)
    more = math.ceil(effort.warm_s / step_s) - least
    for _ in range(min(more, MAX_BLOCK_STEPS)):
        step()
    if more > 0:
        began = _synced(point, cuda)
        for _ in range(least):
            step()
        step_s = _agreed((_synced(point, cuda) - began) / least, point)
    fewest = max(MIN_BLOCK_STEPS, STEPS_PER_LOADER * point.loader_workers)
    return min(MAX_BLOCK_STEPS, max(fewest, round(effort.block_s / step_s / 2) * 2))


def _agreed(seconds: float, point: Point) -> float:
    if point.num_workers == 1:
        return seconds
    found = torch.tensor(seconds, dtype=torch.float64)
    dist.broadcast(found, 0)
    return float(found)


def _now(cuda: bool) -> float:
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter()


def _synced(point: Point, cuda: bool) -> float:
    if point.num_workers > 1:
        dist.barrier()
    return _now(cuda)


def _cpu_s() -> float:
    """CPU time of this worker and of its loader workers."""
    own = psutil.Process()
    total = sum(own.cpu_times()[:2])
    for child in own.children():
        with contextlib.suppress(psutil.Error):
            total += sum(child.cpu_times()[:2])
    return float(total)


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
