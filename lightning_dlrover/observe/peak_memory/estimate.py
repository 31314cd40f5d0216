"""Estimate the peak memory of a training process before its first step.

On the CPU, the estimate is the peak resident memory: what is resident now, and what a step adds. On CUDA, it is what the
process takes from the device. Validation, checkpoints and what a loader keeps in memory later are left out.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_dlrover.observe.gpu_memory import CUDA_CONTEXT_BYTES
from lightning_dlrover.observe.peak_memory.child import ChildError, run_in_child
from lightning_dlrover.observe.peak_memory.heap import own_heap
from lightning_dlrover.observe.peak_memory.measured import measure_steps
from lightning_dlrover.observe.peak_memory.resident import resident
from lightning_dlrover.observe.peak_memory.step import Step
from lightning_dlrover.observe.peak_memory.trace import Trace
from lightning_dlrover.observe.resources import available_bytes
from lightning_dlrover.perf.allocators import CudaCache, Event, Footprint
from lightning_dlrover.perf.memory_margin import MemoryMargin

__all__ = ["LoaderShape", "MemoryEstimate", "MemoryParts", "Unknown", "estimate_peak"]

log = logging.getLogger(__name__)

MIB = 1 << 20
Source = Literal["shapes", "measured"]
"""Shape propagation, or real steps on a part of the batch in a copy of the process."""

DEADLINE_S = 20.0
CPU_FIRST_STEP_BYTES = 16 * MIB  # code of libraries that the first step reads from disk, stacks of OpenMP's threads
CUBLAS_WORKSPACE_BYTES = 32 * MIB  # cublasGetSmWorkspaceSize on Hopper; 4 to 8 MiB before it (ATen/cuda/CublasHandlePool.cpp)
LOADER_WORKER_BYTES = 30 * MIB  # pages that a forked loader worker writes: reference counts, its own heap
PINNED_SHARE = 0.15  # share of a step's live bytes: holes that small objects keep open; chosen on six models
SPAWNED_WORKER_BYTES = 260 * MIB  # a spawned one imports torch again


@dataclass(frozen=True)
class MemoryParts:
    """Causes of the peak, in bytes, all live at the same moment."""

    parameters: int = 0
    buffers: int = 0
    gradients: int = 0
    embedding_gradients: int = 0  # dense or sparse gradients of torch's embeddings
    optimizer_state: int = 0
    activations: int = 0
    workspace: int = 0  # temporary tensors of backward and of the optimizer
    batch: int = 0
    allocator_rounding: int = 0  # holes and rounding of the allocator
    framework_context: int = 0  # interpreter, libraries, data in memory; on CUDA the context
    loader_workers: int = 0  # pages that they do not share with the process, and their batches


@dataclass(frozen=True)
class MemoryEstimate:
    """Peak memory of a process and of its loader workers."""

    parts: MemoryParts
    total_bytes: int  # sum of the parts
    margin_bytes: int  # add it for admission
    source: Source
    took_s: float = 0.0


@dataclass(frozen=True)
class Unknown:
    """There is no estimate; the job has to be probed."""

    reason: str


@dataclass(frozen=True)
class LoaderShape:
    """Loader workers of a job, and the batches that it prepares ahead."""

    num_workers: int = 0
    prefetch_factor: int = 2
    is_forked: bool = True
    num_ready: int = 1  # batches that the training loop fetches ahead of the one in use


def estimate_peak(
    module: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    batch: Any,
    step: Step,
    *,
    device: str = "cpu",
    loader: LoaderShape | None = None,
    margin: MemoryMargin | None = None,
    deadline_s: float = DEADLINE_S,
    probe_bytes: int | None = None,
) -> MemoryEstimate | Unknown:
    """Estimate the peak memory of training steps, without a step of this process. Never raises.

    The steps run in a forked copy: on fake tensors, or, where the module has operations without shape rules, on a small part of
    the batch. Neither state nor random numbers of this process change.

        step = step_of(module, optimizers)  # or any function of a batch that returns the loss
        found = estimate_peak(module, optimizers, next(iter(loader)), step)
        if isinstance(found, MemoryEstimate):
            ask_for(found.total_bytes + found.margin_bytes)

    Args:
        batch: as `step` takes it; its tensors may be on the meta device.
        device: ``cpu``, or ``cuda`` for what one GPU needs.
        margin: from the errors of earlier estimates; default: 35 % of the estimate.
        deadline_s: seconds for each copy.
        probe_bytes: most that a real step in a copy may allocate; default: half of the available memory.
    """
    start = time.perf_counter()
    job = _Job(module, [*optimizers], batch, step, torch.device(device).type == "cuda", loader or LoaderShape(), deadline_s)
    try:
        parts, source = _estimate(job, probe_bytes)
    except ChildError as error:
        return Unknown(str(error))
    except Exception as error:  # an estimate must not end a job
        log.debug("peak memory cannot be estimated", exc_info=True)
        return Unknown(f"{type(error).__name__}: {error}")
    total = sum(asdict(parts).values())
    took_s = time.perf_counter() - start
    return MemoryEstimate(parts, total, (margin or MemoryMargin.of()).bytes_for(total), source, took_s)


@dataclass(frozen=True)
class _Job:
    module: nn.Module
    optimizers: list[torch.optim.Optimizer]
    batch: Any
    step: Step
    is_cuda: bool
    loader: LoaderShape
    deadline_s: float


def _estimate(job: _Job, probe_bytes: int | None) -> tuple[MemoryParts, Source]:
    """Return the parts and their source."""
    standing = _standing_parts(job)
    try:
        added = _parts_by_shape(job)
    except ChildError as error:
        if job.is_cuda:
            raise
        log.info("no estimate from shapes (%s); measuring steps on a part of the batch in a copy of this process", error)
        if probe_bytes is None:
            probe_bytes = available_bytes() // 2
        added = {"activations": measure_steps(job.optimizers, job.batch, job.step, job.deadline_s, probe_bytes)}
        return _with_process(replace(standing, **added), job), "measured"
    added["optimizer_state"] += standing.optimizer_state
    return _with_process(replace(standing, **added), job), "shapes"


def _parts_by_shape(job: _Job) -> dict[str, int]:
    """Return the parts that steps add.

    A second copy serves the allocations. Shape propagation leaves more small objects in the heap of the first one than training
    does, and they would keep holes open.
    Raises:
        ChildError: the module has an operation without a shape rule, or a copy failed.
    """
    found = run_in_child(lambda: _trace(job), job.deadline_s)
    trace = Trace(
        [(handle, size) for handle, size in found["events"]], {int(key): kind for key, kind in found["kinds"].items()}
    )
    # On the CPU, tensors that exist already have their memory, and steps do not free it.
    standing = [size for each in _unique(_tensors(job)) if (size := _num_bytes(each))] if job.is_cuda else []
    held, live, peak_at = run_in_child(lambda: _serve(trace.events, standing, job.is_cuda), job.deadline_s)
    pinned = 0 if job.is_cuda else round(PINNED_SHARE * live)
    return {**trace.live_bytes(peak_at - len(standing)), "allocator_rounding": max(0, held - live) + pinned}


def _trace(job: _Job) -> dict[str, Any]:
    """Return the allocations of steps. It changes the module, so it runs in a copy of the process."""
    from lightning_dlrover.observe.peak_memory.fake_steps import trace_steps
    from lightning_dlrover.observe.peak_memory.torch_names import check

    check()
    return asdict(trace_steps(job.module, job.optimizers, job.batch, job.step))


def _serve(events: Sequence[Event], standing: Sequence[int], is_cuda: bool) -> tuple[int, int, int]:
    """Return peaks of the held and of the live bytes, and the number of events until the latter."""
    found = Footprint(CudaCache() if is_cuda else own_heap())
    for index, num_bytes in enumerate(standing):
        found.add((-1 - index, num_bytes))
    for event in events:
        found.add(event)
    return found.peak_held_bytes, found.peak_live_bytes, found.peak_at


def _standing_parts(job: _Job) -> MemoryParts:
    """Return the memory of tensors that exist before the first step."""
    return MemoryParts(
        parameters=_sum_bytes(job.module.parameters()),
        buffers=_sum_bytes(job.module.buffers()),
        optimizer_state=_sum_bytes(_state_tensors(job.optimizers)),
        batch=_sum_bytes(tensors_in(job.batch)),
    )


def _with_process(parts: MemoryParts, job: _Job) -> MemoryParts:
    """Add the process itself, the batches that its loader prepares, and loader workers."""
    batch_bytes, loader = parts.batch, job.loader
    ready = parts.batch * (1 + loader.num_ready)
    if job.is_cuda:
        return replace(
            parts, batch=ready, framework_context=CUDA_CONTEXT_BYTES, workspace=parts.workspace + CUBLAS_WORKSPACE_BYTES
        )
    held = _sum_bytes(each for each in _tensors(job) if each.device.type == "cpu")
    context = max(0, resident().now_bytes - held) + CPU_FIRST_STEP_BYTES
    workers = loader.num_workers * (
        (LOADER_WORKER_BYTES if loader.is_forked else SPAWNED_WORKER_BYTES) + loader.prefetch_factor * batch_bytes
    )
    return replace(parts, batch=ready, framework_context=context, loader_workers=workers)


def _tensors(job: _Job) -> list[Tensor]:
    return [*job.module.parameters(), *job.module.buffers(), *_state_tensors(job.optimizers), *tensors_in(job.batch)]


def _state_tensors(optimizers: Iterable[torch.optim.Optimizer]) -> list[Tensor]:
    return [each for optimizer in optimizers for state in optimizer.state.values() for each in tensors_in(state)]


def tensors_in(data: Any) -> list[Tensor]:
    """Return the tensors of nested containers, and those that an object has as attributes, such as a jagged tensor's."""
    if isinstance(data, Tensor):
        return [data]
    if isinstance(data, dict):
        return [found for each in data.values() for found in tensors_in(each)]
    if isinstance(data, list | tuple | set):
        return [found for each in data for found in tensors_in(each)]
    return [each for each in getattr(data, "__dict__", {}).values() if isinstance(each, Tensor)]


def _sum_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(_num_bytes(each) for each in _unique(tensors))


def _unique(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return one tensor of each storage; tensors on the meta device have none, and all count."""
    found: dict[object, Tensor] = {}
    for each in tensors:
        key = id(each) if each.device.type == "meta" or each.layout != torch.strided else each.untyped_storage().data_ptr()
        found.setdefault(key, each)
    return [*found.values()]


def _num_bytes(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes() if tensor.layout == torch.strided else 0
