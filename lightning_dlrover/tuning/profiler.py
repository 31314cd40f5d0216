"""Measure a worker's steps while it trains: times of their parts, memory, and a description of the work."""

from __future__ import annotations

import itertools
import os
import sys
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any, Literal, Protocol, get_args

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_flop

from lightning_dlrover import spares, variables
from lightning_dlrover.tuning.nvml import BusyTime
from lightning_dlrover.tuning.resources import (
    CpuUse,
    MemoryWatch,
    available_cores,
    cpu_use,
    memory_limit_bytes,
    own_memory_limit_bytes,
)
from lightning_dlrover.tuning.samples import STEP_PARTS, StepProfile

# Properties of a model that do not depend on its hardware: work per sample, bytes sent, and bytes held. Each process observes
# one forward pass: `with watch: training_step(...)`.

# Ratio of both passes' FLOPs to the forward pass's. Backward computes two products for each one (Kaplan et al., 2020, 2.1).
FORWARD_AND_BACKWARD = 3


@dataclass(frozen=True)
class Descriptors:
    """One sample's share of the work of a forward and backward pass, outside and inside of tables; 0 where unknown."""

    dense_flops: int = 0
    lookups_per_sample: float = 0.0


class ForwardWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the FLOPs and the looked-up rows of the computation inside its block.

    Operations without a formula in torch do not count, and errors of a formula never reach the observed code. Code compiled by
    `torch.compile` runs unobserved, so nothing is known where Dynamo is in use.

    Args:
        module: the model; its sharded tables are observed, too.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0
        self.lookups = 0
        self._module = module
        self._hooks = ExitStack()

    def descriptors(self, num_samples: int) -> Descriptors:
        """Return the descriptors of one of the samples in the observed pass."""
        if uses_dynamo(self._module):
            return Descriptors()
        return Descriptors(FORWARD_AND_BACKWARD * self.flops // num_samples, self.lookups / num_samples)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return whether Dynamo compiles within the block. Otherwise it skips each frame it meets there permanently."""
        return True

    def __enter__(self) -> ForwardWatch:
        self.flops = self.lookups = 0  # a failed step is repeated
        for part in self._module.modules():
            if tables := _sharded_tables(part):
                handle = part.register_forward_pre_hook(lambda _, inputs, tables=tables: self._look_up(tables, inputs))
                self._hooks.callback(handle.remove)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._hooks.close()
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        # With manual optimization the block includes the backward pass, which has a graph task.
        if torch._C._current_graph_task_id() == -1:
            with suppress(Exception):  # a formula may not fit these arguments; the user's step must continue
                self._count(func, args, kwargs, result)
        return result

    def _count(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        packet = getattr(func, "_overloadpacket", func)
        name = getattr(packet, "__name__", "")
        if (formula := flop_registry.get(packet)) is not None:
            self.flops += formula(*args, **kwargs, out_val=result)
        elif name.startswith("_scaled_dot_product") and "backward" not in name:  # CPU kernels, absent from torch's registry
            self.flops += sdpa_flop(*args[:3])
        elif name == "embedding" or name.startswith("_embedding_bag"):
            self.lookups += args[1].numel()

    def _look_up(self, tables: list[Any], inputs: tuple[Any, ...]) -> None:
        with suppress(Exception):  # torchrec itself reports wrong features
            for features in inputs:
                rows = dict(zip(features.keys(), features.length_per_key(), strict=True))
                self.lookups += sum(rows.get(name, 0) for table in tables for name in table.feature_names)


def uses_dynamo(module: nn.Module) -> bool:
    """Return whether parts of `module` are compiled, or Dynamo has met any code of this process."""
    if any(getattr(part, "_compiled_call_impl", None) is not None or hasattr(part, "_orig_mod") for part in module.modules()):
        return True
    convert_frame = sys.modules.get("torch._dynamo.convert_frame")
    return convert_frame is not None and bool(convert_frame.input_codes.seen)


def embedding_bytes(module: nn.Module) -> int:
    """Return the bytes of all tables in `module`, including those on other workers."""
    total = 0
    for part in module.modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag):
            total += part.weight.nbytes
        total += sum(t.num_embeddings * t.embedding_dim * _item_bytes(t) for t in _sharded_tables(part))
    return total


def dense_gradient_bytes(module: nn.Module, sharded: Collection[str]) -> int:
    """Return the bytes of the gradients that data-parallel workers reduce in every step.

    Args:
        sharded: names of parameters that differ between workers. Tables with sparse gradients do not count either, because
            only their looked-up rows are sent.
    """
    sparse = {id(p) for m in module.modules() if getattr(m, "sparse", False) for p in m.parameters(recurse=False)}
    return sum(p.nbytes for n, p in module.named_parameters() if p.requires_grad and n not in sharded and id(p) not in sparse)


def _sharded_tables(part: nn.Module) -> list[Any]:
    """Return torchrec's table configurations if `part` is one of its sharded collections; torchrec need not be installed."""
    if not type(part).__name__.startswith("Sharded"):
        return []
    return list(getattr(part, "_embedding_bag_configs", None) or getattr(part, "_embedding_configs", None) or ())


def _item_bytes(table: Any) -> int:
    kinds = {"FP16": 2, "BF16": 2, "INT8": 1, "UINT8": 1}
    return kinds.get(getattr(getattr(table, "data_type", None), "name", ""), torch.float32.itemsize)


# Memory of this process on its GPU. Only this section reads and resets torch's peaks, of which there is one set.

CUDA_CONTEXT_BYTES = 500 << 20  # context and loaded kernels: 300 to 500 MB (PyTorch forum; RMixer's code charges 310 MB)

_most_reserved: defaultdict[int, int] = defaultdict(int)  # before the last reset, by index of the device
_readers: weakref.WeakSet[GpuPeak] = weakref.WeakSet()


def gpu_limit_bytes(device: torch.device) -> int:
    """Return the bytes of a GPU that tensors of one process can fill; 0 for a CPU."""
    if device.type != "cuda":
        return 0
    return torch.cuda.get_device_properties(device).total_memory - CUDA_CONTEXT_BYTES


def gpu_bytes(device: torch.device) -> tuple[int, int]:
    """Return the bytes of a GPU that this process has now, and their peak.

    Both are 0 for a CPU, and before this process uses CUDA.
    """
    if not _is_in_use(device):
        return 0, 0
    reserved, most = torch.cuda.memory_reserved(device), torch.cuda.max_memory_reserved(device)
    return CUDA_CONTEXT_BYTES + reserved, CUDA_CONTEXT_BYTES + max(most, _most_reserved[_index(device)])


class GpuPeak:
    """Peak bytes of tensors on a GPU, read repeatedly. Several readers do not disturb each other."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._most = 0
        _readers.add(self)
        self.take()

    def take(self) -> int:
        """Return the peak since the last call; 0 for a CPU, and before this process uses CUDA."""
        device = self._device
        if _is_in_use(device):
            index = _index(device)
            _most_reserved[index] = max(_most_reserved[index], torch.cuda.max_memory_reserved(device))
            peak = torch.cuda.max_memory_allocated(device)
            torch.cuda.reset_peak_memory_stats(device)
            for reader in _readers:
                if _is_in_use(reader._device) and _index(reader._device) == index:
                    reader._most = max(reader._most, peak)
        most, self._most = self._most, 0
        return most


def _is_in_use(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


# Time of a step, by its parts, on the timeline of the device that computes it.
#
# A step is a row of marks: moments at which one part ends and another begins. On a CPU a mark is a moment of the host's
# clock. On a GPU it is a CUDA event on the stream that computes, because the host runs ahead of it. The host never waits
# for an event: a step is read once the device has reached all of its marks, usually when the next step begins.
#
# On a GPU, `communication` is the time in which the stream waits for other workers: from the last gradient until DDP's
# reductions have ended, and waits of the script's collectives. Reductions that the backward pass hides are part of `backward`.
# NCCL runs a collective without `async_op` on the computing stream itself, so it counts as the pass that contains it. Idle time
# of the device, because the host is late, belongs to the part that it waits for.

Part = Literal["between", "forward", "backward", "communication", "optimizer"]
"""`between`: from one step's end to the next one's begin. `optimizer`: everything else in a step."""


class Mark(Protocol):
    """A moment on a device's timeline."""

    def is_reached(self) -> bool:
        """Return at once whether the device has reached the mark."""

    def seconds_since(self, earlier: Any) -> float:
        """Return the seconds between two marks of one device, both reached."""


class HostMark:
    """The moment of its creation."""

    def __init__(self) -> None:
        self._at = time.perf_counter()

    def is_reached(self) -> bool:
        return True

    def seconds_since(self, earlier: HostMark) -> float:
        return self._at - earlier._at


class CudaMark:
    """The moment at which a device's current stream has finished all work queued so far."""

    def __init__(self, device: torch.device) -> None:
        self._event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._event.record(torch.cuda.current_stream(device))

    def is_reached(self) -> bool:
        return bool(self._event.query())

    def seconds_since(self, earlier: CudaMark) -> float:
        return float(earlier._event.elapsed_time(self._event)) / 1e3


def marks_of(device: torch.device) -> Callable[[], Mark]:
    """Return a function that creates marks on the timeline of a device."""
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
            sums: dict[Part, float] = dict.fromkeys(get_args(Part), 0.0)
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
        """Stop recording, and drop the steps that were not read."""
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


# Measure the time and the resources of training steps. The training thread only adds a few numbers per step. Processes and
# devices are examined when a window is closed.

MAX_SETTLING_STEPS = 20  # maximum number of steps at the start of a window that use batches prepared before it


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

    Attributes:
        newest_step_s: seconds of the last step, whether or not it counts; None for the first one.
    """

    def __init__(self, worker_id: str, device: torch.device, times: StepTimes) -> None:
        self._worker_id = worker_id
        self._device = device
        self._times = times
        times.start(marks_of(device))
        self._window: _Window | None = None
        self._last_end: float | None = None
        self.newest_step_s: float | None = None
        self._paused_s = 0.0
        self._paused_at: float | None = None
        self._memory = MemoryWatch()
        self._gpu_peak, self._busy_time = GpuPeak(device), BusyTime(device)
        self._num_local_workers = max(1, variables.local_world_size(os.environ))

    def close(self) -> None:
        self._memory.close()
        self._times.stop()

    def pause(self) -> None:
        """Stop the clock during validation, a checkpoint or anything else outside of steps."""
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
            self.newest_step_s = max(0.0, now - self._last_end - self._paused_s)
        if window is None or window.place != place or window.to_settle:
            self._gpu_peak.take()  # a step before the window has no part in its peak
        if window is None or window.place != place:
            self._busy_time.take()
            self._window = _Window(place, step, now, cpu_use(self._memory.children), place.settling_steps - 1)
        elif window.to_settle:
            window.to_settle -= 1
            window.first_step, window.started = step, now
        elif self.newest_step_s is not None:
            window.steps.append(_Step(self.newest_step_s, parts))
        self._last_end, self._paused_s = now, 0.0

    @property
    def num_steps(self) -> int:
        return len(self._window.steps) if self._window else 0

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
        of_node, of_all = spares.memory_bytes(os.environ)
        # Limits change where a node gets another size in place.
        limit_bytes = memory_limit_bytes(os.environ)
        shared_bytes, own_bytes = limit_bytes - of_all, own_memory_limit_bytes(os.environ) or limit_bytes
        own_bytes -= of_node // self._num_local_workers
        figures: dict[str, Any] = {**vars(place), **vars(model.descriptors), **_mean_parts(kept, step_time_s)}
        del figures["workers_here"]
        return StepProfile(
            **figures,
            worker_id=self._worker_id,
            first_step=window.first_step,
            num_steps=num_steps,
            cores=available_cores(),
            device="cpu" if self._device.type == "cpu" else torch.cuda.get_device_name(self._device),
            step_time_s=step_time_s,
            samples_per_s=place.global_batch / step_time_s if step_time_s else 0.0,
            memory_bytes=memory.resident_bytes,
            peak_memory_bytes=memory.peak_bytes,
            memory_limit_bytes=max(1, min(shared_bytes // max(1, place.workers_here), own_bytes)),
            spare_bytes=of_node,
            cpu_percent=100 * max(0.0, use.cpu_s - window.use.cpu_s) / elapsed,
            dense_bytes=model.dense_bytes,
            embedding_bytes=model.embedding_bytes,
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
