"""One step of a live job: a batch in one or several parts, its collectives, and its optimizer's update."""

from __future__ import annotations

import copy
import gc
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from typing import Any, NoReturn, TypeVar

import numpy as np
import torch
import torchmetrics
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_dlrover.checks import BackwardCheck, UnsupportedScriptError, explain_memory
from lightning_dlrover.live.metrics import EpochMetrics, KeptValues
from lightning_dlrover.live.order import FitPosition
from lightning_dlrover.live.recovery import (
    Before,
    Counts,
    Frozen,
    ManualWindow,
    ResilientCollectives,
    Update,
    apply,
    call_restart_hooks,
    capture,
)
from lightning_dlrover.live.replica import IncompleteBackwardError, TrainerOfFit
from lightning_dlrover.live.train_loaders import TrainLoaders
from lightning_dlrover.rdzv.group.world import World
from lightning_dlrover.rdzv.membership.member import WorldError
from lightning_dlrover.rdzv.transport.transfer import BufferCopies

# Cut a batch into parts along its samples, and put the results of its parts together. Pure.

_CONSTANTS = (str, bytes, bool, int, float, complex, Enum, type(None))


class UnsplittableBatchError(TypeError):
    """A batch has a value that cannot be divided among its samples."""


def part_sizes(num_samples: int, max_samples: int) -> list[int]:
    """Return the sizes of the fewest parts of at most `max_samples`. They differ by one at the most; larger ones come first."""
    num_parts = -(-num_samples // max_samples)
    size, rest = divmod(num_samples, num_parts)
    return [size + (i < rest) for i in range(num_parts)]


def num_rows(batch: Any, expected: int) -> int:
    """Return the number of samples in a batch.

    Args:
        expected: their number if no row of a stream was skipped.
    """
    if _has_rows(batch, expected):
        return expected
    return next((len(leaf) for leaf in _leaves(batch) if leaf.ndim), expected)


def part_of(batch: Any, num_samples: int, rows: slice, path: str = "batch") -> Any:
    """Return some samples of a batch: views of its tensors, in the batch's own structure.

    Tensors and NumPy arrays hold one sample per index of their first dimension, except for those without dimensions. A list or
    tuple is a structure of such fields, or holds one sample per item if it has as many items as samples, all of one type.

    Args:
        num_samples: samples in the batch.
        path: name of the batch in an error.

    Raises:
        UnsplittableBatchError: a value is of another type, or has another first dimension.
    """
    if isinstance(batch, Tensor | np.ndarray):
        if batch.ndim == 0:
            return batch
        if len(batch) == num_samples:
            return batch[rows]
        raise _refusal(path, f"has the shape {list(batch.shape)}", num_samples)
    if isinstance(batch, _CONSTANTS):
        return batch
    if isinstance(batch, Mapping):
        parts = {key: part_of(value, num_samples, rows, f"{path}[{key!r}]") for key, value in batch.items()}
        return parts if type(batch) is dict else type(batch)(parts)  # type: ignore[call-arg]
    if is_dataclass(batch) and not isinstance(batch, type):
        part = copy.copy(batch)
        for field in fields(batch):
            value = part_of(getattr(batch, field.name), num_samples, rows, f"{path}.{field.name}")
            object.__setattr__(part, field.name, value)
        return part
    if isinstance(batch, list | tuple):
        if _holds_samples(batch, num_samples):
            return batch[rows]
        items = [part_of(value, num_samples, rows, f"{path}[{i}]") for i, value in enumerate(batch)]
        return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)
    raise _refusal(path, f"is of type {type(batch).__name__}", num_samples)


def whole_output(outputs: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Return what a training step has returned for a whole share, from what it has returned for each part.

    Tensors with one row per sample are joined, numbers become their mean over samples. Of anything else the last part's stays.

    Args:
        sizes: samples of each part.
    """
    first = outputs[0]
    if all(isinstance(each, Tensor) and each.ndim and len(each) == size for each, size in zip(outputs, sizes, strict=True)):
        return torch.cat(list(outputs))
    if all(isinstance(each, Tensor) and each.is_floating_point() and not each.ndim for each in outputs):
        return whole_value("mean", outputs, sizes)
    if isinstance(first, dict) and all(isinstance(each, dict) and each.keys() == first.keys() for each in outputs):
        return {key: whole_output([each[key] for each in outputs], sizes) for key in first}
    return outputs[-1]


def whole_value(reduction: str, values: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """Return a value of a whole share from those of its parts.

    Args:
        reduction: "mean" over samples, "sum", "max" or "min".
        sizes: samples of each part.
    """
    stacked = torch.stack(list(values))
    if reduction == "mean":
        stacked = stacked if stacked.is_floating_point() else stacked.float()
        weights = torch.tensor(sizes, dtype=stacked.dtype, device=stacked.device) / sum(sizes)
        mean: Tensor = torch.tensordot(weights, stacked, 1)
        return mean
    if reduction == "sum":
        return stacked.sum(0)
    return stacked.amax(0) if reduction == "max" else stacked.amin(0)


def _has_rows(value: Any, number: int) -> bool:
    """Return whether a value, or a field of it, has one row per sample."""
    if isinstance(value, Tensor | np.ndarray):
        return value.ndim > 0 and len(value) == number
    if isinstance(value, list | tuple) and len(value) == number:
        return True
    return any(_has_rows(field, number) for field in _fields(value))


def _holds_samples(items: Sequence[Any], number: int) -> bool:
    """Return whether a list or tuple has one item per sample. One of equally many fields has rows in all of them."""
    is_alike = len({type(item) for item in items}) == 1
    return len(items) == number and is_alike and not all(_has_rows(item, number) for item in items)


def _fields(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, list | tuple):
        return value
    return vars(value).values() if is_dataclass(value) and not isinstance(value, type) else ()


def _leaves(value: Any) -> Iterable[Any]:
    if isinstance(value, Tensor | np.ndarray):
        yield value
    for field in _fields(value):
        yield from _leaves(field)


def _refusal(path: str, what: str, num_samples: int) -> UnsplittableBatchError:
    return UnsplittableBatchError(
        f"this worker computes its share of {num_samples} samples in parts, but {path} {what}, so its samples cannot be "
        "separated: let the collate_fn return tensors with the samples in the first dimension, also in lists, dictionaries or "
        "dataclasses, or define split_batch(batch, sizes) in the LightningModule, which returns a list of batches"
    )


# Compute a share of a batch in parts if it does not fit into this worker's memory, with the gradients of the whole share.
#
# The global batch is constant, so a loss makes the survivors' shares larger. `Parts` computes what Lightning's closure
# does, the forward and backward pass of one batch. The gradients of the parts add up, each weighted by its samples, and DDP
# reduces them with the last part. So the worker begins as many collectives as one that computes its share at once, and the
# others wait there.
#
# Where memory runs out before this worker has begun a collective in the pass, it starts the batch over alone. Otherwise
# its message may have left already, and all workers repeat the step, as after a loss.

log = logging.getLogger(__name__)

T = TypeVar("T")

LONE_PART = (
    "this worker computes its share in parts, so it would take part more often than the others. A loss over the whole batch "
    "needs DLRoverStrategy(max_share='whole') and workers with enough memory for their shares (--workers MIN:MAX)"
)


class Parts:
    """One worker's parts of its shares."""

    def __init__(self, world: World, batches: TrainLoaders, trainer: TrainerOfFit, position: FitPosition) -> None:
        max_share = trainer.strategy.max_share
        self.room = None if max_share in (None, "whole") else int(max_share)  # samples of one pass; None: no limit is known
        self.weight = 1.0  # of the current part's mean loss in that of the share
        self.is_first = True
        self._world = world
        self._batches = batches
        self._trainer = trainer
        self._position = position
        self._is_whole = max_share == "whole"
        self._is_caught = False  # set inside of `until_it_fits`
        self._size = 0  # samples of the part under computation; 0: none is
        self._is_last = True
        self._is_synced = False  # whether the part's backward pass reduces gradients
        self._is_in_backward = False
        self._num_begun: int | None = None  # collectives that were begun when the user's step was reached; None: it was not

    @property
    def refusal(self) -> str:
        """Return why shares cannot be computed in parts; empty if they can."""
        if self._is_whole:
            return "DLRoverStrategy(max_share='whole') rules out parts"
        if not self._trainer.is_automatic:
            return "manual optimization cannot be computed in parts"
        if self._trainer.strategy.tables is not None:
            return "a model with sharded tables cannot be computed in parts, as all workers exchange rows in each pass"
        if len(self._batches.all) > 1:
            return "batches of several training loaders cannot be computed in parts"
        return ""

    def check(self) -> None:
        """Check at the start of training whether a limit for shares can be kept.

        Raises:
            UnsupportedScriptError: it cannot.
        """
        if self.room is not None and (reason := self.refusal):
            raise UnsupportedScriptError(
                f"max_share={self.room} of DLRoverStrategy limits the samples of one pass, but {reason}: leave max_share out, "
                "and let so many workers train at least (--workers MIN:MAX) that a share fits"
            )

    def num_at_once(self, num_samples: int) -> int:
        """Return the number of samples in the first pass over a share."""
        return part_sizes(num_samples, self.room or num_samples)[0]

    # --- one batch ------------------------------------------------------------------------------------------------------------

    def until_it_fits(self, compute: Callable[[bool], T]) -> T:
        """Return the result of a computation of batches. Start over with smaller parts as often as memory runs out.

        Args:
            compute: called with whether it starts over.

        Raises:
            OutOfMemoryError: one sample does not fit, or shares cannot be computed in parts.
            IncompleteBackwardError: all workers have to repeat the step.
        """
        if self._is_caught:
            return compute(False)  # one of several batches, which start over together
        position, again = self._position, False
        self._is_caught = True
        try:
            while True:
                try:
                    return compute(again)
                except torch.OutOfMemoryError as error:
                    if not self._size:
                        raise  # outside of training steps
                    if (reason := self.refusal) or self._size == 1:
                        self._explain(error, reason or "one sample does not fit")
                    cause = str(error).splitlines()[0]
                # Outside of the `except` block, as the traceback holds all that the attempt has computed.
                self._make_smaller(cause)
                position.is_in_parts = again = True
        finally:
            self._is_caught = position.is_in_parts = False
            self._size, self.weight, self.is_first, self._is_last = 0, 1.0, True, True

    def run_manual(self, run: Callable[..., T], *args: Any) -> T:
        """Run the user's own optimization of a batch.

        Raises:
            OutOfMemoryError: it does not fit.
        """
        try:
            return run(*args)
        except torch.OutOfMemoryError as error:
            self._size = self._batches.num_own_samples
            self._explain(error, self.refusal)

    def compute(self, make: Callable[[Any], Any], kwargs: Any) -> Any:
        """Return the result of Lightning's closure for a share.

        Args:
            make: makes the closure for the arguments of a training step.

        Raises:
            UnsplittableBatchError: parts are needed, and the batch cannot be cut.
        """
        name = next(iter(kwargs))  # Lightning's arguments of a training step begin with the batch
        batch = kwargs[name]
        expected = max(1, self._batches.num_own_samples)
        num_samples = num_rows(batch, expected) if self.room is not None else expected
        sizes = part_sizes(num_samples, self.room or num_samples)
        parts = self._cut(batch, num_samples, sizes) if len(sizes) > 1 else [batch]
        self._position.is_in_parts = len(sizes) > 1
        result: Any = None
        losses: list[tuple[Tensor, int]] = []
        extras = []
        with self._logging_one_share() if len(sizes) > 1 else nullcontext():
            for number, (part, size) in enumerate(zip(parts, sizes, strict=True)):
                self._size, self.weight = size, size / num_samples
                self.is_first, self._is_last = number == 0, number == len(sizes) - 1
                arguments = type(kwargs)({**kwargs, name: part})
                if len(sizes) > 1:
                    self._trainer.log_for(arguments)
                result = self._compute_part(make(arguments))
                losses += [] if result.loss is None else [(result.loss, size)]
                extras.append(apply_to_collection(result.extra, Tensor, Tensor.detach))
        if len(sizes) == 1:
            return result
        self._trainer.log_for(kwargs)
        loss = whole_value("mean", *zip(*losses, strict=True)) if losses else None
        return type(result)(loss, extra=whole_output(extras, sizes))

    def _cut(self, batch: Any, num_samples: int, sizes: list[int]) -> list[Any]:
        users_own = getattr(self._trainer.module, "split_batch", None)
        if users_own is not None:
            parts = list(users_own(batch, sizes))
            if len(parts) != len(sizes):
                raise UnsplittableBatchError(f"split_batch returned {len(parts)} batches for the sizes {sizes}")
            return parts
        stops = [sum(sizes[: i + 1]) for i in range(len(sizes))]
        return [part_of(batch, num_samples, slice(stop - size, stop)) for size, stop in zip(sizes, stops, strict=True)]

    def _compute_part(self, closure: Any) -> Any:
        if not self.is_first:
            closure._zero_grad_fn = None  # else Lightning would drop the gradients of the parts before
        self._position.parts += 1
        self._num_begun, self._is_in_backward = None, False
        with nullcontext() if self._is_last else self._trainer.strategy.block_backward_sync():
            model = self._replica
            self._is_synced = model is not None and model.require_backward_grad_sync
            closure()
        self._size = 0
        return closure.consume_result()

    # --- what a part may do ---------------------------------------------------------------------------------------------------

    @contextmanager
    def users_step(self) -> Iterator[None]:
        """Surround the user's training step, after the collectives with which DDP begins a forward pass."""
        self._num_begun = self._world.num_begun
        with nullcontext() if self._is_last else self._world.alone(LONE_PART):
            yield

    def backward_begins(self) -> None:
        self._is_in_backward = True

    @property
    def is_synced(self) -> bool:
        """Whether a backward pass of an automatic step that begins now reduces gradients."""
        model = self._replica
        return self._is_last and model is not None and model.require_backward_grad_sync

    @contextmanager
    def _logging_one_share(self) -> Iterator[None]:
        """Make each value that a step logs that of the whole share, and reduce it once."""
        results: Any = self._trainer.results
        update = results.update_metrics
        seen: dict[str, dict[int, tuple[Tensor, int]]] = {}  # a step's values by key and part, with the part's samples

        def update_metrics(key: str, value: Any, batch_size: int) -> None:
            metric = results[key]
            is_synced, metric.meta.sync.should = metric.meta.sync.should, False
            try:
                update(key, value, batch_size)
            finally:
                metric.meta.sync.should = is_synced
            if not metric.meta.on_step or not isinstance(metric._forward_cache, Tensor):
                return
            of_parts = seen.setdefault(key, {})
            of_parts[self._position.parts] = metric._forward_cache, self._size
            whole = whole_value(metric.meta.reduce_fx.__name__, *zip(*of_parts.values(), strict=True))
            accumulated = {name: vars(metric)[name] for name in ("value", "cumulated_batch_size") if name in vars(metric)}
            if is_synced and self._is_last and metric.is_tensor:
                update(key, whole, batch_size)  # all workers reduce it
            else:
                metric._forward_cache = whole
            if metric.is_tensor:
                vars(metric).update(accumulated if metric.meta.on_epoch else {"value": metric._forward_cache})

        results.update_metrics = update_metrics
        try:
            yield
        finally:
            del results.update_metrics

    # --- after memory ran out -------------------------------------------------------------------------------------------------

    def _explain(self, error: torch.OutOfMemoryError, reason: str) -> NoReturn:
        raise explain_memory(error, self._size, self._position.size, reason) from error

    def _make_smaller(self, cause: str) -> None:
        """Halve the parts, and free what the failed one has computed.

        Raises:
            IncompleteBackwardError: other workers may have received something of the failed pass.
        """
        worker, size, replica = self._world.worker_id, self._size, self._replica
        self.room, self._size = -(-size // 2), 0
        self._trainer.optimizers[0].zero_grad()
        gc.collect()
        if self._trainer.device.type == "cuda":
            torch.cuda.empty_cache()
        log.warning(
            "worker %s: %d samples do not fit into its memory, so it computes its shares in parts of at most %d (%s)",
            *(worker, size, self.room, cause),
        )
        if replica is None:
            return
        is_reducing = self._is_synced and self._is_in_backward
        if is_reducing or self._num_begun != self._world.num_begun or replica.static_graph:
            raise IncompleteBackwardError(f"memory ran out in a share of {size} samples, and other workers await its gradients")
        replica.require_forward_param_sync = False  # the failed pass has received rank 0's buffers

    @property
    def _replica(self) -> DistributedDataParallel | None:
        model = self._trainer.strategy.model
        return model if isinstance(model, DistributedDataParallel) else None


# Run Lightning's training steps, and repeat one when a worker is lost in it.
#
# A step is repeated with this worker's new share of the same batch, after all that its first attempt has changed was taken
# back: logged values, buffers, gradients, and weights where an optimizer moves them more than once in a step. With gradient
# accumulation, the earlier batches of the window are computed again first, because the lost worker's share of their
# gradients is missing.


@dataclass(eq=False)
class TrainingSteps:
    """One worker's training steps, and the records with which it repeats the current one."""

    _world: World
    _collectives: ResilientCollectives
    _batches: TrainLoaders
    _trainer: TrainerOfFit
    _position: FitPosition
    _metrics: EpochMetrics
    _kept: KeptValues

    def __post_init__(self) -> None:
        self.parts = Parts(self._world, self._batches, self._trainer, self._position)
        self.backwards = BackwardCheck()
        self.window = ManualWindow(self._trainer.lightning)
        self.window_is_stale = False  # a lost worker took its share of the open accumulation window's gradients
        self._users_metrics: list[torchmetrics.Metric] = []  # torchmetrics objects of the user's module
        self._buffers: BufferCopies | None = None  # None with sharded tables: a loss brings back a snapshot
        self._before: Before | None = None  # record from before the open accumulation window
        self._undo: Update | None = None
        self._counts: Counts | None = None
        self._frozen: Frozen | None = None  # set while a manual step may freeze parameters, as `toggle_optimizer` does
        self._manual_steps = 0
        self._max_manual_steps = 0  # most optimizer steps in one batch; 0: not known, so there may be several
        self._num_backwards = 0  # backward passes in the current step
        self._has_loss = False  # whether the current step has returned a loss
        self._max_backwards = 0  # most backward passes in one step; 0: not known

    def begin_fit(self) -> None:
        self.window.is_open = self.window_is_stale = False

    def enter_loops(self) -> None:
        """Look at the user's module, which is complete now.

        Raises:
            UnsupportedScriptError: `max_share` cannot be kept.
        """
        self.parts.check()
        self._users_metrics = [part for part in self._trainer.module.modules() if isinstance(part, torchmetrics.Metric)]
        self._buffers = BufferCopies(self._trainer.module) if self._trainer.elastic_tables is None else None

    @property
    def is_in_window(self) -> bool:
        """Whether gradients of earlier batches wait for an optimizer step."""
        if not self._trainer.is_automatic:
            return self.window.is_open
        return self._trainer.num_handed_out % self._trainer.accumulate_grad_batches != 0

    # --- steps ------------------------------------------------------------------------------------------------------------

    def run_automatic(self, run: Callable[..., Any], optimizer: Any, batch_idx: int, kwargs: Any) -> Any:
        """Run Lightning's automatic optimization of one batch, and repeat it as often as its collectives fail."""
        progress = self._trainer.epoch_loop.automatic_optimization.optim_progress.optimizer
        counts = self._counts_of(progress)
        closes_window = not self._trainer.lightning.fit_loop._should_accumulate()
        again = False

        def compute() -> Any:
            # A worker may also be lost while earlier batches are computed again.
            own = self._redo_window(inside=True) if again else kwargs
            self._num_backwards, self._has_loss = 0, False  # those of earlier batches do not belong to this step
            return run(optimizer, batch_idx, own)

        if (self._trainer.num_handed_out - 1) % self._trainer.accumulate_grad_batches == 0:
            self._remember()
        undo = self._copy_if_weights_move_inside(optimizer) if closes_window else None
        while True:
            self._position.in_step = True
            before = counts.take()
            if (done := self._collectives.attempt(compute)) is not None:
                result = done[0]
                break
            skip = self._collectives.recover()
            counts.restore(before)
            if skip:
                progress.step.increment_ready()
                progress.step.increment_completed()
                result = {}
                break
            if undo is not None:
                apply(self._trainer.lightning, copy.deepcopy(undo))
            call_restart_hooks(self._trainer.lightning, batch_idx)
            again = True
        self._position.in_step = False
        if closes_window:
            self._max_backwards = max(self._max_backwards, self._num_backwards)
            self._position.updates += 1
            self._kept.counts()
            self._before = None
            self.inherit_values()
        self._metrics.agree_on_step()
        return result

    def closure(self, make: Callable[..., Any], kwargs: Any, optimizer: Any, batch_idx: int) -> Any:
        """Return Lightning's closure for one batch. Where the batch does not fit into memory, it computes the batch in parts.

        Args:
            make: makes Lightning's own closure.
        """
        made = make(kwargs, optimizer, batch_idx)
        counts = self._counts_of(self._trainer.epoch_loop.automatic_optimization.optim_progress.optimizer)

        def evaluate() -> Any:
            before, num_backwards = counts.take(), self._num_backwards

            def compute(again: bool) -> Any:
                own = kwargs
                if again:
                    call_restart_hooks(self._trainer.lightning, batch_idx)
                    own = self._taken_back()
                    counts.restore(before)
                    self._num_backwards = num_backwards
                return self.parts.compute(lambda part: make(part, optimizer, batch_idx), own)

            return self.parts.until_it_fits(compute)

        made.closure = evaluate
        return made

    def _taken_back(self) -> Any:
        """Take back what the batch under computation has changed. Return the arguments of its step."""
        if (self._trainer.num_handed_out - 1) % self._trainer.accumulate_grad_batches:
            return self._redo_window(inside=True)  # its gradients are added to those of earlier batches
        self._take_back()
        kwargs = self._batches.refetched(1)[0]  # the step may have changed the batch in place
        self._trainer.log_for(kwargs)
        return kwargs

    def run_manual(self, run: Callable[..., Any], kwargs: Any) -> Any:
        """Run the user's own optimization of one batch. Undo and repeat it as often as its collectives fail."""
        progress = self._trainer.epoch_loop.manual_optimization.optim_step_progress
        counts = self._counts_of(progress)
        self._remember()
        if self._position.size > 1:
            self._frozen = Frozen(self._trainer.module)
            self.window.remember()
        while True:
            self._begin_manual_batch()
            before = counts.take()
            skip = False
            if (done := self._collectives.attempt(self.parts.run_manual, self._checked, run, kwargs)) is not None:
                result = done[0]
                break
            skip = self._collectives.recover()
            if skip:
                result = {}
                break
            if self._manual_steps:
                if self._undo is None:
                    raise WorldError(
                        "a worker was lost after this batch's only optimizer step but before the end of training_step; "
                        "the step cannot be taken back: this worker has to start again"
                    )
                apply(self._trainer.lightning, self._undo)
            counts.restore(before)
            self.window.restore()
            call_restart_hooks(self._trainer.lightning, self._trainer.num_handed_out - 1)
            self._take_back()
            kwargs = self._batches.refetched(1)[0]
            self._trainer.log_for(kwargs)
        self._position.in_step = False
        self._position.updates += 1
        self._max_manual_steps = max(self._max_manual_steps, self._manual_steps)
        if not skip:  # else the window is the other worker's, as this worker took over its update
            # If no step was ever seen, the user steps optimizers that Lightning has not wrapped.
            self.window.is_open = self._manual_steps == 0 and progress.total.completed > 0
        self._undo = self._before = self._frozen = None
        self.window.forget()
        self.inherit_values()
        if not skip:  # else all have met
            self._send_values()
        self._metrics.agree_on_step()
        return result

    def _checked(self, run: Callable[..., Any], kwargs: Any) -> Any:
        """Run a batch of manual optimization. Check gradients and buffers that it leaves to the next batches."""
        result = run(kwargs)
        has_stepped = self._trainer.epoch_loop.manual_optimization.optim_step_progress.total.completed > 0
        if self._manual_steps == 0 and has_stepped:  # else the user may have stepped optimizers that Lightning has not wrapped
            self._collectives.check_gradients()
        return result

    def before_optimizer_step(self, optimizer: Any, closure: Any) -> None:
        """Manual optimization: keep the state that a batch's first update will overwrite, if the batch may hold several."""
        if not self._position.in_step or self._trainer.is_automatic:
            return
        if self._world.config.max_workers > 1:
            self.backwards.optimizer_step(optimizer, closure)
        if self._manual_steps == 0 and self._max_manual_steps != 1 and self._can_undo:
            self._undo = copy.deepcopy(capture(self._trainer.lightning))
        self._manual_steps += 1

    def loss_of(self, output: Any) -> Any:
        """Return a training step's output, or a loss without a gradient if it is None: other workers wait for this share's."""
        module = self._trainer.module
        if output is not None or not module.automatic_optimization or self._trainer.strategy.tables is not None:
            self._has_loss = True
            return output
        return sum((parameter.flatten()[:1] * 0).sum() for parameter in module.parameters() if parameter.requires_grad)

    def drop_update_without_loss(self) -> None:
        """Drop the gradients if no worker's training step has returned a loss: momentum alone would move the weights.

        Manual optimization is the user's: its steps come before the end of the training step.
        """
        if not self._trainer.is_automatic:
            return
        if self._has_loss or self._position.size == 1 or self._trainer.accumulate_grad_batches > 1:
            return
        if self._world.all_reach(f"no-loss/{self._position.fit}/{self._position.batch}"):
            self._trainer.optimizers[0].zero_grad()

    def backward_begins(self) -> None:
        self._num_backwards += self.parts.is_first
        self.parts.backward_begins()
        if self.parts.is_synced and self._trainer.is_automatic:
            self._kept.begin(self._position.updates + 1)

    def values_arrive(self) -> None:
        """Wait for the values that the others have sent, before the weights change."""
        self._kept.finish()
        if not self._trainer.is_automatic:
            self._kept.counts()  # they are those of the batches before

    def _send_values(self) -> None:
        """Manual optimization: send this worker's values after a batch. With NCCL they arrive during the next one."""

        def send() -> None:
            self._kept.begin(self._position.updates)
            if not self._world.is_asynchronous:
                self.values_arrive()

        if self._collectives.attempt(send) is None:
            self._collectives.recover()

    # --- after a loss -------------------------------------------------------------------------------------------------------

    def broken(self) -> None:
        """Note that a worker was lost, before the survivors meet."""
        self.window_is_stale = True
        if self._position.in_step and self._frozen is not None:
            self._frozen.restore()  # before the next wrap: DDP reduces the parameters that are trainable then
        if self._before is not None and not self._position.validation:
            self._before.restore_buffers()  # before a survivor that missed the last update receives this worker's

    def redo_window(self) -> None:
        """Between two batches: compute the open window's gradients again if a lost worker took its share of them."""
        if not self.window_is_stale:
            return
        self._position.is_redoing = True
        try:
            self._redo_window()
        finally:
            self._position.is_redoing = False

    def forget(self) -> None:
        """Drop the step in progress, because all workers go back to a snapshot."""
        self._position.in_step = self.window_is_stale = False
        self._batches.computed = self._undo = None

    def _redo_window(self, inside: bool = False) -> Any:
        """Compute the gradients of the accumulation window's earlier batches again, split for the current world.

        Args:
            inside: whether the last batch handed out is still to be computed.

        Returns:
            The arguments of the training step for that batch; None if not `inside`.
        """
        return self.parts.until_it_fits(lambda again: self._redone_window(inside))

    def _redone_window(self, inside: bool) -> Any:
        handed_out = self._trainer.num_handed_out
        earlier = (handed_out - inside) % self._trainer.accumulate_grad_batches
        is_automatic = self._trainer.is_automatic
        # In manual optimization, gradients of earlier batches are already means over all workers of that time.
        if not inside and (earlier == 0 or not is_automatic):
            self.window_is_stale = False
            return None
        self._take_back()
        optimizer = self._trainer.optimizers[0]
        optimizer.zero_grad()
        steps = self._batches.refetched(earlier + inside)
        try:
            for i, kwargs in enumerate(steps[:earlier]):
                self._batches.computed = self._batches.first.cursor - inside - earlier + i
                self._trainer.log_for(kwargs)
                batch_idx = handed_out - inside - earlier + i
                with self._trainer.strategy.block_backward_sync():
                    self._trainer.epoch_loop.automatic_optimization._make_closure(kwargs, optimizer, batch_idx)()
        finally:
            self._batches.computed = None
        self.window_is_stale = False
        if inside:
            self._trainer.log_for(steps[-1])
        return steps[-1] if inside else None

    def inherit_values(self) -> None:
        """Count a lost worker's values as this worker's own, unless the step in progress is about to be taken back."""
        if self._before is None:
            self._kept.merge()

    def _take_back(self) -> None:
        """Go back to the logged values, metrics and buffers from before the accumulation window."""
        if self._before is None:
            return
        self._before.restore()
        if self._kept.merge():
            self._remember()

    def _remember(self) -> None:
        """Record logged values and buffers before an accumulation window, in case its batches are computed again."""
        has_peers, self._before = self._position.size > 1, None
        if has_peers or not self.parts.refusal:
            self._before = Before(self._users_metrics, self._trainer.results, self._buffers if has_peers else None)

    def _counts_of(self, progress: Any) -> Counts:
        if self._counts is None or self._counts.progress is not progress:
            self._counts = Counts(progress)
        return self._counts

    def _begin_manual_batch(self) -> None:
        self._position.in_step = True
        self._manual_steps, self._undo = 0, None
        self.backwards.batch_begins()

    def _copy_if_weights_move_inside(self, optimizer: Any) -> Update | None:
        """Copy the state that `optimizer.step` overwrites between evaluations of its closure; None if it has only one."""
        raw = getattr(optimizer, "optimizer", optimizer)  # unwraps Lightning's optimizer
        of_torch = type(raw).__module__.startswith("torch.optim")
        moves = isinstance(raw, torch.optim.LBFGS) or self._max_backwards > 1 or (self._max_backwards == 0 and not of_torch)
        return copy.deepcopy(capture(self._trainer.lightning)) if moves and self._can_undo else None

    @property
    def _can_undo(self) -> bool:
        # With sharded tables, recovery from a loss goes back to a snapshot.
        return self._position.size > 1 and self._trainer.elastic_tables is None
