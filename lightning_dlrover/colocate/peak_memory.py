"""Trace the allocations of training steps on fake tensors: shapes without memory.

It replaces the module's parameters and the optimizers' state in place, so it runs in a process that is thrown away.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dlrover.observe.peak_memory.step import Step, run_backward
from lightning_dlrover.observe.peak_memory.torch_names import (
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    tree_leaves,
    tree_map_only,
)
from lightning_dlrover.observe.peak_memory.trace import Trace
from lightning_dlrover.observe.peak_memory.workspaces import hidden_chunks, saved_bytes

__all__ = ["NUM_STEPS", "embedding_weights", "trace_steps"]

NUM_STEPS = 4  # the second has the optimizer state beside it; the holes of the allocator grow for a few steps

# Copies of a sparse gradient's values that an optimizer makes in one step: coalesced, old and new moments, update.
STEP_COPIES: dict[type, int] = {torch.optim.SparseAdam: 6}
OTHER_STEP_COPIES = 3

aten = torch.ops.aten


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


def trace_steps(module: nn.Module, optimizers: Sequence[torch.optim.Optimizer], batch: Any, step: Step) -> Trace:
    """Run `NUM_STEPS` steps on fake tensors and return their allocations.

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
            for _ in range(NUM_STEPS):
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
    tables = embedding_weights(module)
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


def embedding_weights(module: nn.Module) -> set[int]:
    """Return the ids of the weights of torch's embeddings."""
    return {id(each.weight) for each in module.modules() if isinstance(each, nn.Embedding | nn.EmbeddingBag)}


def _plausible_value(dtype: torch.dtype) -> bool | int | float:
    return True if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1


def _nonzero(tensor: Tensor) -> Tensor:
    return tensor.new_empty((tensor.numel(), tensor.dim()), dtype=torch.int64)


def _masked_select(tensor: Tensor, mask: Tensor) -> Tensor:
    both = torch.broadcast_tensors(tensor, mask)  # type: ignore[no-untyped-call]
    return tensor.new_empty((both[0].numel(),))


def _unique(tensor: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor, Tensor]:
    counts = tensor.new_empty((tensor.numel(),), dtype=torch.int64)
    return tensor.new_empty((tensor.numel(),)), counts.new_empty(tensor.shape), counts


def _index(tensor: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
    places: list[Tensor | None] = []
    for each in indices:
        if each is not None and each.dtype in (torch.bool, torch.uint8):
            places += [each.new_empty((each.numel(),), dtype=torch.int64) for _ in range(each.dim())]
        else:
            places.append(each)
    result: Tensor = aten.index.Tensor(tensor, places)
    return result


# Operations whose result depends on values, with a result that is never smaller than the real one.
_BOUNDS: dict[Any, Callable[..., Any]] = {
    aten.nonzero.default: _nonzero,
    aten.masked_select.default: _masked_select,
    aten._unique2.default: _unique,
    aten.index.Tensor: _index,
}

_SPARSE = (aten._sparse_coo_tensor_with_dims_and_tensors.default, aten._embedding_bag_backward.default)
_FREES_SAVED = (aten.mkldnn_rnn_layer_backward.default,)
