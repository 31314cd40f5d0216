"""Estimate the peak memory of a training process before its first step.

`estimate_peak` is the entry point. It traces training steps on fake tensors, and replays their allocations, in a forked
process.
"""

from __future__ import annotations

import ctypes
import functools
import inspect
import json
import logging
import os
import resource
import select
import signal
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_dlrover.colocate.admission_client import AdmissionReport
from lightning_dlrover.private_names import MissingNamesError
from lightning_dlrover.tuning.memory import Allocator, CudaCache, Event, Footprint, MemoryMargin
from lightning_dlrover.tuning.profiler import CUDA_CONTEXT_BYTES
from lightning_dlrover.tuning.resources import available_bytes, forget_peak, status_bytes

Step = Callable[[Any], Any]
"""Takes a batch and returns the loss, a dict with ``loss``, or None if it runs backward and the optimizers itself."""


def run_backward(result: Any) -> None:
    """Run backward from the result of a step; None: the step has run it.

    Raises:
        TypeError: the result holds no loss.
    """
    if result is None:
        return
    loss = result.get("loss") if isinstance(result, Mapping) else result
    if not isinstance(loss, Tensor):
        raise TypeError(f"the training step returned {type(loss).__name__}, not a loss: return a tensor, or a dict with 'loss'")
    loss.backward()  # type: ignore[no-untyped-call]


def step_of(module: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> Step:
    """Return a step that runs a LightningModule's ``training_step``, without its trainer, its logger and its strategy.

    The step replaces methods of the module when it runs, so it is for a process that is thrown away, as `estimate_peak`'s is.
    """

    def step(batch: Any) -> Any:
        own: dict[str, Callable[..., Any]] = {
            "log": _ignore,
            "log_dict": _ignore,
            "manual_backward": lambda loss, *args, **kwargs: loss.backward(*args, **kwargs),
            "optimizers": lambda *_, **__: optimizers[0] if len(optimizers) == 1 else [*optimizers],
            "lr_schedulers": _ignore,
            "toggle_optimizer": _ignore,
            "untoggle_optimizer": _ignore,
        }
        for name, method in own.items():
            if hasattr(module, name):
                object.__setattr__(module, name, method)
        training_step: Callable[..., Any] = module.training_step  # type: ignore[assignment]
        parameters = inspect.signature(training_step).parameters
        result = training_step(batch, 0) if len(parameters) > 1 else training_step(batch)
        return result if getattr(module, "automatic_optimization", True) else None

    return step


def _ignore(*_: Any, **__: Any) -> None:
    """Stand in for a method that needs the trainer."""


@dataclass(frozen=True)
class Resident:
    """Bytes of this process in physical memory, from `/proc/self/status` (proc(5))."""

    now_bytes: int
    peak_bytes: int  # since the start, or the last `forget_peak`
    anonymous_bytes: int  # heap, stacks and private pages, without those of files
    data_bytes: int  # address space that RLIMIT_DATA counts

    @property
    def peak_anonymous_bytes(self) -> int:
        """Peak without the pages of files, which are as many as now: libraries stay in memory once they are read."""
        return self.peak_bytes - (self.now_bytes - self.anonymous_bytes)


def resident() -> Resident:
    """Return the figures of this process."""
    found = status_bytes("VmRSS", "VmHWM", "RssAnon", "VmData")
    return Resident(found["VmRSS"], found["VmHWM"], found["RssAnon"], found["VmData"])


class ChildError(Exception):
    """The copy did not return a result; the message gives the cause."""


# The copy has this thread only. Other threads' locks may stay locked in it, which its deadline covers.
def run_in_child(function: Callable[[], Any], deadline_s: float, extra_bytes: int | None = None) -> Any:
    """Return the result of `function`, which has to be JSON, from a forked copy of this process: it cannot affect training.

    Args:
        deadline_s: seconds until the copy is killed.
        extra_bytes: private memory that the copy may allocate beyond this process's.
    Raises:
        ChildError: the copy failed, was killed, or passed its deadline or limit.
    """
    reading, writing = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 and later warn of it: see the module's docstring
        try:
            process_id = os.fork()
        except OSError as error:
            os.close(reading)
            os.close(writing)
            raise ChildError(f"this process cannot be copied: {error}") from error
    if process_id == 0:
        _work(function, writing, deadline_s, extra_bytes)
    os.close(writing)
    try:
        answer = _read(reading, deadline_s)
    finally:
        os.close(reading)
        with suppress(ProcessLookupError):
            os.kill(process_id, signal.SIGKILL)
        with suppress(ChildProcessError):  # a handler of SIGCHLD has reaped it
            os.waitpid(process_id, 0)
    if not answer:
        raise ChildError(f"the copy ended, or was killed after {deadline_s:g} s, without an answer")
    result = json.loads(answer)
    if "error" in result:
        raise ChildError(result["error"])
    return result["result"]


def _work(function: Callable[[], Any], writing: int, deadline_s: float, extra_bytes: int | None) -> None:
    """Run the function, write its result, and end, whatever happens."""
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
            signal.signal(number, signal.SIG_DFL)
        signal.alarm(int(deadline_s) + 1)  # ends the copy should its parent die
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # else the first backward pass would take memory of each GPU
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 1)
            os.dup2(nowhere.fileno(), 2)
        if extra_bytes is not None:
            limit = resident().data_bytes + extra_bytes
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        answer = {"result": function()}
    except BaseException as error:
        answer = {"error": f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"}
    with suppress(BaseException):
        data = json.dumps(answer).encode()
        while data:
            data = data[os.write(writing, data) :]
    os._exit(0)


def _read(reading: int, deadline_s: float) -> bytes:
    end, answer = time.monotonic() + deadline_s, b""
    while (left := end - time.monotonic()) > 0:
        if select.select([reading], [], [], left)[0]:
            part = os.read(reading, 1 << 16)
            if not part:
                return answer
            answer += part
    return b""


NUM_STEPS = 2  # the second has the optimizer's state
PARTS = (8, 4)  # the batch's fractions, 1/8 and 1/4
MIN_SAMPLES = 64  # a smaller batch is measured whole


def measure_steps(
    optimizers: Sequence[torch.optim.Optimizer], batch: Any, step: Step, deadline_s: float, extra_bytes: int
) -> int:
    """Return the bytes that steps add to this process, extrapolated from real steps on two sizes of the batch.

    A batch without a common first dimension is measured whole. Anonymous memory counts, as a copy of a process starts with
    few of the pages of files that its parent has mapped.
    Raises:
        ChildError: a step failed, or needed more than `deadline_s` or `extra_bytes`.
    """

    def peak_bytes(part: Any) -> int:
        return int(run_in_child(lambda: _run(optimizers, part, step), deadline_s, extra_bytes))

    if (num_samples := _num_samples(batch)) < MIN_SAMPLES:
        return peak_bytes(batch)
    few, more = (num_samples // part for part in PARTS)
    small, large = (peak_bytes(_first(batch, size)) for size in (few, more))
    return max(large, round(small + (large - small) * (num_samples - few) / (more - few)))


def _run(optimizers: Sequence[torch.optim.Optimizer], batch: Any, step: Step) -> int:
    # OpenMP's threads do not exist in a copied process, and its first parallel region would wait for them forever.
    torch.set_num_threads(1)
    start = resident().anonymous_bytes
    forget_peak()
    for _ in range(NUM_STEPS):
        result = step(batch)
        run_backward(result)
        del result
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return max(0, resident().peak_anonymous_bytes - start)


def _num_samples(batch: Any) -> int:
    """Return the size of the first dimension that all tensors have in common, 0 without one."""
    leaves: list[Any] = []
    _map(batch, leaves.append)
    tensors = [each for each in leaves if isinstance(each, Tensor)]
    sizes = {len(each) if each.dim() else 0 for each in tensors}
    return sizes.pop() if len(sizes) == 1 and len(tensors) == len(leaves) else 0


def _first(batch: Any, size: int) -> Any:
    return _map(batch, lambda leaf: leaf[:size].clone())


def _map(batch: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(batch, dict):
        return {key: _map(value, change) for key, value in batch.items()}
    if isinstance(batch, list | tuple) and not hasattr(batch, "_fields"):
        return type(batch)(_map(each, change) for each in batch)
    return change(batch)


ALIGNMENT_BYTES = 64  # c10/core/alignment.h
OTHER_SHARE = 0.25  # share of the live bytes: holes and rounding of an allocator without figures


class _Figures(ctypes.Structure):
    """struct mallinfo2 (mallinfo(3), glibc 2.33)."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    ]


# A heap with the holes and thresholds of this process cannot be simulated from outside. An untouched page needs no memory.
class OwnHeap:
    """glibc's malloc in this process, as it would serve a step: real requests, whose pages stay untouched.

    The held bytes are the live ones and the growth of the free memory in the heap. Other requests of the process do not count,
    but they fill holes, as they do in training.
    """

    def __init__(self) -> None:
        self._live: dict[int, tuple[int, int]] = {}  # handle: address, bytes
        self._live_bytes = 0
        self._free_at_start = _free_bytes()

    @property
    def held_bytes(self) -> int:
        return max(0, self._live_bytes + _free_bytes() - self._free_at_start)

    def allocate(self, handle: int, num_bytes: int) -> None:
        address = ctypes.c_void_p()
        if _library().posix_memalign(ctypes.byref(address), ALIGNMENT_BYTES, num_bytes) or address.value is None:
            raise MemoryError(f"the system refuses {num_bytes} bytes of address space for a tensor of the step")
        self._live[handle] = address.value, num_bytes
        self._live_bytes += num_bytes

    def free(self, handle: int) -> None:
        address, num_bytes = self._live.pop(handle)
        self._live_bytes -= num_bytes
        _library().free(ctypes.c_void_p(address))


class OtherHeap:
    """An allocator without figures, such as a preloaded jemalloc: a share of the live bytes is lost."""

    def __init__(self) -> None:
        self._sizes: dict[int, int] = {}
        self._live_bytes = 0

    @property
    def held_bytes(self) -> int:
        return round((1 + OTHER_SHARE) * self._live_bytes)

    def allocate(self, handle: int, num_bytes: int) -> None:
        self._sizes[handle] = num_bytes
        self._live_bytes += num_bytes

    def free(self, handle: int) -> None:
        self._live_bytes -= self._sizes.pop(handle)


def own_heap() -> Allocator:
    """Return the allocator of this process, or a bound if it gives no figures."""
    library = _library()
    if not hasattr(library, "mallinfo2"):
        return OtherHeap()
    heap, before = OwnHeap(), library.mallinfo2()
    heap.allocate(0, 64 << 20)
    after = library.mallinfo2()
    heap.free(0)
    grew = after.arena + after.hblkhd - before.arena - before.hblkhd
    return OwnHeap() if grew >= 32 << 20 or after.uordblks - before.uordblks >= 32 << 20 else OtherHeap()


def _free_bytes() -> int:
    return int(_library().mallinfo2().fordblks)


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(None)
    if hasattr(library, "mallinfo2"):
        library.mallinfo2.restype = _Figures
    library.free.restype = None
    return library


KINDS = ("activations", "workspace", "gradients", "optimizer_state", "embedding_gradients")


@dataclass
class Trace:
    """Allocations of a few steps, in order, and their causes."""

    events: list[Event] = field(default_factory=list)
    kinds: dict[int, str] = field(default_factory=dict)  # handle: one of `KINDS`

    def live_bytes(self, num_events: int) -> dict[str, int]:
        """Return the live bytes of each kind after a number of events."""
        live: dict[int, int] = {}
        for handle, num_bytes in self.events[:num_events]:
            if num_bytes:
                live[handle] = num_bytes
            else:
                del live[handle]
        return {kind: sum(size for handle, size in live.items() if self.kinds[handle] == kind) for kind in KINDS}


# Memory that operations of torch on the CPU take inside, which shape propagation does not see: the growth of the process over
# one operation, without its results, measured on torch 2.13 with oneDNN.

aten = torch.ops.aten

# An LSTM layer's gates and cell states, which oneDNN keeps for backward, in units of the layer's output. Backward uses about
# twice as much in addition: gradients of gates and states.
LSTM_SAVED, LSTM_BACKWARD = 5, 10


def hidden_chunks(func: Any, args: Sequence[Any], result: Any) -> list[list[int]]:
    """Return bytes of allocations inside an operation, in groups; each group is freed before the next one."""
    if func is aten.convolution.default:
        return [[max(_num_bytes(args[0]), _num_bytes(result))]]
    if func is aten.convolution_backward.default:
        after, before, weight, stride = _num_bytes(args[0]), _num_bytes(args[1]), args[2], args[4]
        # oneDNN copies both operands to its blocked layout, once for each gradient, and its result back.
        is_copied_back = any(step > 1 for step in stride) or weight.shape[2:].numel() == 1
        return [[after, before, *([before] if is_copied_back else [])], [before, after]]
    if func is aten.mkldnn_rnn_layer_backward.default:
        return [[LSTM_BACKWARD * _num_bytes(args[7])]]
    return []


def saved_bytes(func: Any, result: Any) -> int:
    """Return the bytes that an operation keeps for its backward pass, in addition to its results."""
    return LSTM_SAVED * _num_bytes(result[0]) if func is aten.mkldnn_rnn_layer.default else 0


def _num_bytes(tensor: Any) -> int:
    return tensor.nbytes if isinstance(tensor, Tensor) else 0


# The private names of torch that shape propagation depends on.
try:
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves, tree_map_only
except ImportError as error:
    raise MissingNamesError("torch", [str(error)]) from error


NUM_FAKE_STEPS = 4  # the second also has the optimizer state; the holes of the allocator grow for a few steps

# Copies of a sparse gradient's values that an optimizer makes in one step: coalesced, old and new moments, update.
STEP_COPIES: dict[type, int] = {torch.optim.SparseAdam: 6}
OTHER_STEP_COPIES = 3


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records each new storage and its end, and answers questions about values, which fake tensors lack."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace = Trace()
        self.phase = "activations"
        self._handles: dict[int, int] = {}  # id of a live storage: handle
        self._ends: dict[int, Any] = {}  # weak references, which call back only while they live
        self._sparse: list[tuple[int, Any]] = []  # bytes of sparse gradients, and the storages that hold them
        self._synthetic: list[int] = []  # handles to free at the end of the step
        self._saved: list[int] = []  # handles that a backward pass frees, the newest first
        self._next = 0

    def ignore(self, tensors: Iterable[Tensor]) -> None:
        """Leave out storages that exist before the step."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._handles[id(storage)] = -1
            self._ends[id(storage)] = weakref.ref(storage, functools.partial(self._forget, id(storage)))

    def name(self, tensor: Tensor, kind: str) -> None:
        """Assign the storage of a tensor to a kind."""
        handle = self._handles.get(id(tensor.untyped_storage()), -1)
        if handle >= 0:
            self.trace.kinds[handle] = kind

    def sparse_step(self, num_copies: int) -> None:
        """Record the copies that an optimizer makes of the largest sparse gradient."""
        self.transient([max((num_bytes for num_bytes, _ in self._sparse), default=0)] * num_copies)

    def end_step(self) -> None:
        """Free the sparse gradients."""
        self._sparse.clear()
        for handle in (*self._synthetic, *self._saved):
            self._record(handle, 0)
        self._synthetic.clear()
        self._saved.clear()

    def transient(self, chunks: Sequence[int]) -> None:
        """Record memory that is needed for a moment only."""
        for handle in [self._add(num_bytes, "workspace") for num_bytes in chunks if num_bytes]:
            self._record(handle, 0)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is aten._local_scalar_dense.default:
            return _plausible_value(args[0].dtype)
        result = _BOUNDS.get(func, func)(*args, **(kwargs or {}))
        if func in _SPARSE:
            self._see_sparse(func, args)
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.layout == torch.strided:
                self._see(leaf)
        for chunks in hidden_chunks(func, args, result):
            self.transient(chunks)
        if num_bytes := saved_bytes(func, result):
            self._saved.append(self._add(num_bytes, "activations"))
        if func in _FREES_SAVED and self._saved:
            self._record(self._saved.pop(), 0)  # backward runs the layers in the opposite order
        return result

    def _see_sparse(self, func: Any, args: tuple[Any, ...]) -> None:
        if func is aten._embedding_bag_backward.default:  # fake tensors lose the size of its result
            gradient, indices = args[0], args[1]
            values = indices.numel() * gradient.shape[-1] * gradient.element_size()
            self._synthetic.append(self._add(values + indices.nbytes, "embedding_gradients"))
            self._sparse.append((values, None))
        else:
            values = args[4]
            self.name(values, "embedding_gradients")
            self._sparse.append((values.nbytes, (args[3].untyped_storage(), values.untyped_storage())))

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, num_bytes = id(storage), storage.nbytes()
        if key not in self._handles and num_bytes:
            self._handles[key] = self._add(num_bytes, self.phase)
            self._ends[key] = weakref.ref(storage, functools.partial(self._forget, key))

    def _add(self, num_bytes: int, kind: str) -> int:
        self._next += 1
        self.trace.kinds[self._next] = kind
        self._record(self._next, num_bytes)
        return self._next

    def _record(self, handle: int, num_bytes: int) -> None:
        self.trace.events.append((handle, num_bytes))

    def _forget(self, key: int, _: object) -> None:
        handle = self._handles.pop(key, -1)
        self._ends.pop(key, None)
        if handle >= 0:
            self._record(handle, 0)


# It replaces the module's parameters and the optimizers' state in place, so it runs in a process that is thrown away.
def trace_steps(module: nn.Module, optimizers: Sequence[torch.optim.Optimizer], batch: Any, step: Step) -> Trace:
    """Run `NUM_FAKE_STEPS` steps on fake tensors, which have shapes but no memory, and return their allocations.

    Raises:
        Exception: any that the module raises on fake tensors, such as for an operation without a shape rule.
    """
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = _Fakes(mode)
        fakes.replace(module)
        for optimizer in optimizers:
            fakes.replace_in(optimizer)
        fake_batch = tree_map_only(Tensor, fakes.of, batch)
        recorder = _Recorder()
        recorder.ignore(fakes.all())
        with recorder:
            for _ in range(NUM_FAKE_STEPS):
                recorder.phase = "activations"
                loss = step(fake_batch)
                recorder.phase = "workspace"
                run_backward(loss)
                del loss
                _end_step(module, optimizers, recorder)
        return recorder.trace


class _Fakes:
    """Fake tensors on the CPU in place of real ones, one for each."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._known: dict[int, tuple[Tensor, Tensor]] = {}  # id of the real tensor: itself and its fake

    def of(self, real: Tensor) -> Tensor:
        if isinstance(real, FakeTensor):
            return real
        if id(real) not in self._known:
            if real.layout != torch.strided:
                raise NotImplementedError(f"a tensor of layout {real.layout} has no fake")
            fake: Tensor = torch.empty_strided(real.size(), real.stride(), dtype=real.dtype, device="cpu")
            if isinstance(real, nn.Parameter):
                fake = nn.Parameter(fake, requires_grad=real.requires_grad)
            else:
                fake.requires_grad_(real.requires_grad)
            self._known[id(real)] = (real, fake)
        return self._known[id(real)][1]

    def all(self) -> list[Tensor]:
        return [fake for _, fake in self._known.values()]

    def replace(self, module: nn.Module) -> None:
        for each in module.modules():
            # Through setattr, as recurrent modules keep a second list of their weights.
            for name, parameter in [*each.named_parameters(recurse=False, remove_duplicate=False)]:
                setattr(each, name, self.of(parameter))
            for name, buffer in [*each.named_buffers(recurse=False, remove_duplicate=False)]:
                setattr(each, name, self.of(buffer))

    def replace_in(self, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            group["params"] = [self.of(each) for each in group["params"]]
        state = {self.of(key): tree_map_only(Tensor, self.of, value) for key, value in optimizer.state.items()}
        optimizer.state.clear()
        optimizer.state.update(state)


def _end_step(module: nn.Module, optimizers: Sequence[torch.optim.Optimizer], recorder: _Recorder) -> None:
    """Name the gradients, run the optimizers, and free the gradients."""
    recorder.phase = "workspace"
    tables = {id(each.weight) for each in module.modules() if isinstance(each, nn.Embedding | nn.EmbeddingBag)}
    for parameter in module.parameters():
        if parameter.grad is not None and parameter.grad.layout == torch.strided:
            recorder.name(parameter.grad, "embedding_gradients" if id(parameter) in tables else "gradients")
    for optimizer in optimizers:
        recorder.sparse_step(STEP_COPIES.get(type(optimizer), OTHER_STEP_COPIES))
        optimizer.step()
        for each in tree_leaves([*optimizer.state.values()]):
            if isinstance(each, Tensor):
                recorder.name(each, "optimizer_state")
    for optimizer in optimizers:
        optimizer.zero_grad()
    recorder.end_step()


def _plausible_value(dtype: torch.dtype) -> bool | int | float:
    return True if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1


def _nonzero(tensor: Tensor) -> Tensor:
    return tensor.new_empty((tensor.numel(), tensor.dim()), dtype=torch.int64)


def _masked_select(tensor: Tensor, mask: Tensor) -> Tensor:
    both = torch.broadcast_tensors(tensor, mask)  # type: ignore[no-untyped-call]
    return tensor.new_empty((both[0].numel(),))


def _unique2(tensor: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor, Tensor]:
    counts = tensor.new_empty((tensor.numel(),), dtype=torch.int64)
    return tensor.new_empty((tensor.numel(),)), counts.new_empty(tensor.shape), counts


def _index(tensor: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
    positions: list[Tensor | None] = []
    for each in indices:
        if each is not None and each.dtype in (torch.bool, torch.uint8):
            positions += [each.new_empty((each.numel(),), dtype=torch.int64) for _ in range(each.dim())]
        else:
            positions.append(each)
    result: Tensor = aten.index.Tensor(tensor, positions)
    return result


# Replacements for operations with a result size that depends on values: never smaller than the real result.
_BOUNDS: dict[Any, Callable[..., Any]] = {
    aten.nonzero.default: _nonzero,
    aten.masked_select.default: _masked_select,
    aten._unique2.default: _unique2,
    aten.index.Tensor: _index,
}

_SPARSE = (aten._sparse_coo_tensor_with_dims_and_tensors.default, aten._embedding_bag_backward.default)
_FREES_SAVED = (aten.mkldnn_rnn_layer_backward.default,)


log = logging.getLogger(__name__)

MIB = 1 << 20
Source = Literal["shapes", "measured"]
"""Shape propagation, or real steps on a part of the batch in a copy of the process."""

DEADLINE_S = 20.0
CPU_FIRST_STEP_BYTES = 16 * MIB  # code of libraries that the first step reads from disk, stacks of OpenMP's threads
CUBLAS_WORKSPACE_BYTES = 32 * MIB  # cublasGetSmWorkspaceSize on Hopper; 4 to 8 MiB before it (ATen/cuda/CublasHandlePool.cpp)
LOADER_WORKER_BYTES = 30 * MIB  # pages that a forked loader worker writes: reference counts, its own heap
PINNED_SHARE = 0.15  # share of a step's live bytes: holes that small objects keep open; chosen on six models
NUM_READY = 1  # batches that the training loop fetches ahead of the one in use


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
    """No estimate is possible; the job has to be probed."""

    reason: str


@dataclass(frozen=True)
class LoaderShape:
    """Loader workers of a job, and the batches that it prepares ahead."""

    num_workers: int = 0
    prefetch_factor: int = 2


# On the CPU, the estimate is the peak resident memory: the present amount, and the growth of a step. On CUDA, it is the
# process's use of the device. Validation, checkpoints and a loader's later memory are not included.
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
        device: ``cpu``, or ``cuda`` for the need of one GPU.
        margin: from the errors of earlier estimates; default: 35 % of the estimate.
        deadline_s: seconds for each copy. A real step in a copy may allocate half of the available memory.
    """
    start = time.perf_counter()
    job = _Job(module, [*optimizers], batch, step, torch.device(device).type == "cuda", loader or LoaderShape(), deadline_s)
    try:
        parts, source = _estimate(job)
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


def _estimate(job: _Job) -> tuple[MemoryParts, Source]:
    """Return the parts and their source."""
    source: Source = "shapes"
    standing = MemoryParts(  # tensors that exist before the first step
        parameters=_sum_bytes(job.module.parameters()),
        buffers=_sum_bytes(job.module.buffers()),
        optimizer_state=_sum_bytes(_state_tensors(job.optimizers)),
        batch=_sum_bytes(tensors_in(job.batch)),
    )
    try:
        added = _parts_by_shape(job)
        added["optimizer_state"] += standing.optimizer_state
    except ChildError as error:
        if job.is_cuda:
            raise
        log.info("no estimate from shapes (%s); measuring steps on a part of the batch in a copy of this process", error)
        measured = measure_steps(job.optimizers, job.batch, job.step, job.deadline_s, available_bytes() // 2)
        added = {"activations": measured}
        source = "measured"
    return _with_process(replace(standing, **added), job), source


def _parts_by_shape(job: _Job) -> dict[str, int]:
    """Return the parts that steps add.

    A second copy serves the allocations. Shape propagation leaves more small objects in the heap of the first one than training
    does, and they would keep holes open.
    Raises:
        ChildError: the module has an operation without a shape rule, or a copy failed.
    """
    found = run_in_child(lambda: asdict(trace_steps(job.module, job.optimizers, job.batch, job.step)), job.deadline_s)
    trace = Trace(
        [(handle, size) for handle, size in found["events"]], {int(key): kind for key, kind in found["kinds"].items()}
    )
    # On the CPU, tensors that exist already have their memory, and steps do not free it.
    standing = [size for each in _one_of_each_storage(_tensors(job)) if job.is_cuda and (size := _bytes_of_storage(each))]
    held, live, peak_at = run_in_child(lambda: _serve(trace.events, standing, job.is_cuda), job.deadline_s)
    pinned = 0 if job.is_cuda else round(PINNED_SHARE * live)
    return {**trace.live_bytes(peak_at - len(standing)), "allocator_rounding": max(0, held - live) + pinned}


def _serve(events: Sequence[Event], standing: Sequence[int], is_cuda: bool) -> tuple[int, int, int]:
    """Return peaks of the held and of the live bytes, and the number of events until the latter."""
    found = Footprint(CudaCache() if is_cuda else own_heap())
    for index, num_bytes in enumerate(standing):
        found.add((-1 - index, num_bytes))
    for event in events:
        found.add(event)
    return found.peak_held_bytes, found.peak_live_bytes, found.peak_at


def _with_process(parts: MemoryParts, job: _Job) -> MemoryParts:
    """Add the process itself, the batches that its loader prepares, and loader workers."""
    ready = parts.batch * (1 + NUM_READY)
    if job.is_cuda:
        return replace(
            parts, batch=ready, framework_context=CUDA_CONTEXT_BYTES, workspace=parts.workspace + CUBLAS_WORKSPACE_BYTES
        )
    held = _sum_bytes(each for each in _tensors(job) if each.device.type == "cpu")
    context = max(0, resident().now_bytes - held) + CPU_FIRST_STEP_BYTES
    workers = job.loader.num_workers * (LOADER_WORKER_BYTES + job.loader.prefetch_factor * parts.batch)
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
    return sum(_bytes_of_storage(each) for each in _one_of_each_storage(tensors))


def _one_of_each_storage(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return one tensor of each storage; tensors on the meta device have none, and all count."""
    found: dict[object, Tensor] = {}
    for each in tensors:
        key = id(each) if each.device.type == "meta" or each.layout != torch.strided else each.untyped_storage().data_ptr()
        found.setdefault(key, each)
    return [*found.values()]


def _bytes_of_storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes() if tensor.layout == torch.strided else 0


def report_of(estimate: MemoryEstimate | Unknown, num_processes: int = 1, on_gpu: bool = False) -> AdmissionReport:
    """Return an estimate as a job reports it to a dispatcher; one without an estimate has zero bytes and the reason.

    Args:
        on_gpu: the estimate is that of the GPU's memory.
    """
    report = AdmissionReport(os.getpid(), time.monotonic(), num_processes)
    if isinstance(estimate, Unknown):
        return replace(report, estimate_note=estimate.reason[:400])
    report = replace(report, estimate_note=estimate.source)
    if on_gpu:
        return replace(report, gpu_estimate_bytes=estimate.total_bytes, gpu_estimate_margin_bytes=estimate.margin_bytes)
    parts = estimate.parts
    # Forward and backward read each parameter and activation twice or write it, and the optimizer reads and writes its part.
    step_bytes = 3 * parts.parameters + 2 * (parts.activations + parts.optimizer_state + parts.gradients)
    return replace(
        report, estimate_bytes=estimate.total_bytes, estimate_margin_bytes=estimate.margin_bytes, step_bytes=step_bytes
    )
