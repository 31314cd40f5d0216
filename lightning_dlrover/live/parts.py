"""Compute a share of a batch in parts if it does not fit into this worker's memory, with the gradients of the whole share.

The global batch is constant, so a loss makes the survivors' shares larger. `Parts` computes what Lightning's closure does, the
forward and backward pass of one batch. The gradients of the parts add up, each weighted by its samples, and DDP reduces them
with the last part. So the worker begins as many collectives as one that computes its share at once, and the others wait there.

Where memory runs out before this worker has begun a collective in the pass, it starts the batch over by itself. Otherwise its
message may have left already, and all workers repeat the step, as after a loss.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NoReturn, Protocol, TypeVar

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_dlrover.checks.script import UnsupportedScriptError, explain_memory
from lightning_dlrover.live.batch_parts import UnsplittableBatchError, num_rows, part_of, part_sizes, whole_output, whole_value
from lightning_dlrover.live.ports import Batches, Job, Round, TrainerPort
from lightning_dlrover.live.position import FitPosition
from lightning_dlrover.live.unused_parameters import IncompleteBackwardError

__all__ = ["Parts"]

log = logging.getLogger(__name__)

T = TypeVar("T")

LONE_PART = (
    "this worker computes its share in parts, so it would take part more often than the others. A loss over the whole batch "
    "needs DLRoverStrategy(max_share='whole') and workers with enough memory for their shares (--workers MIN:MAX)"
)


class LoggingStep(Protocol):
    """A training step that logs values."""

    def log_for(self, kwargs: Any) -> None:
        """Make Lightning weight the next logged values by the size of the batch in these arguments of the step."""


class Parts:
    """One worker's parts of its shares.

    Args:
        step: the step whose share is computed.
    """

    def __init__(
        self, job: Job, round_: Round, batches: Batches, trainer: TrainerPort, position: FitPosition, step: LoggingStep
    ) -> None:
        max_share = trainer.strategy.max_share
        self.room = None if max_share in (None, "whole") else int(max_share)  # samples of one pass; None: no limit is known
        self.weight = 1.0  # of the current part's mean loss in that of the share
        self.is_first = True
        self._job = job
        self._round = round_
        self._batches = batches
        self._trainer = trainer
        self._position = position
        self._step = step
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
                    self._step.log_for(arguments)
                result = self._compute_part(make(arguments))
                losses += [] if result.loss is None else [(result.loss, size)]
                extras.append(apply_to_collection(result.extra, Tensor, Tensor.detach))
        if len(sizes) == 1:
            return result
        self._step.log_for(kwargs)
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
        self._num_begun = self._round.num_begun
        with nullcontext() if self._is_last else self._round.alone(LONE_PART):
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
        raise explain_memory(error, self._size, self._round.size, reason) from error

    def _make_smaller(self, cause: str) -> None:
        """Halve the parts, and free what the failed one has computed.

        Raises:
            IncompleteBackwardError: other workers may have received something of the failed pass.
        """
        worker, size, replica = self._job.worker_id, self._size, self._replica
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
        if is_reducing or self._num_begun != self._round.num_begun or replica.static_graph:
            raise IncompleteBackwardError(f"memory ran out in a share of {size} samples, and other workers await its gradients")
        replica.require_forward_param_sync = False  # the failed pass has received rank 0's buffers

    @property
    def _replica(self) -> DistributedDataParallel | None:
        model = self._trainer.strategy.model
        return model if isinstance(model, DistributedDataParallel) else None
