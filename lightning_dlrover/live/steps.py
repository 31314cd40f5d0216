"""Run Lightning's training steps, and repeat one when a worker is lost in it.

A step is repeated with this worker's new share of the same batch, after all that its first attempt has changed was taken back:
logged values, buffers, gradients, and weights where an optimizer moves them more than once in a step. With gradient
accumulation, the earlier batches of the window are computed again first, because the lost worker's share of their gradients is
missing.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torchmetrics

from lightning_dlrover.checks.script import BackwardCheck
from lightning_dlrover.live import lightning_names
from lightning_dlrover.live.epoch_metrics import EpochMetrics
from lightning_dlrover.live.kept_values import KeptValues
from lightning_dlrover.live.parts import Parts
from lightning_dlrover.live.ports import Batches, Job, Round, TrainerPort
from lightning_dlrover.live.position import FitPosition
from lightning_dlrover.live.redo import Before, Counts, Frozen, call_restart_hooks, metrics_of
from lightning_dlrover.live.update import ManualWindow, Update, apply, capture
from lightning_dlrover.rdzv.group.buffers import BufferCopies
from lightning_dlrover.rdzv.live.member import WorldError

if TYPE_CHECKING:
    from lightning_dlrover.live.lightning_names import EpochLoop

__all__ = ["TrainingSteps"]


class TrainingSteps:
    """One worker's training steps, and the records with which it repeats the current one."""

    def __init__(
        self,
        job: Job,
        round_: Round,
        batches: Batches,
        trainer: TrainerPort,
        position: FitPosition,
        metrics: EpochMetrics,
        kept: KeptValues,
    ) -> None:
        self._job = job
        self._round = round_
        self._batches = batches
        self._trainer = trainer
        self._position = position
        self._metrics = metrics
        self._kept = kept
        self.parts = Parts(job, round_, batches, trainer, position, self)
        self.backwards = BackwardCheck()
        self.window = ManualWindow(trainer.lightning)
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
        self._users_metrics = metrics_of(self._trainer.module)
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
        automatic = self._epoch_loop.automatic_optimization
        progress = automatic.optim_progress.optimizer
        counts = self._counts_of(progress)
        closes_window = not lightning_names.is_accumulating(self._trainer.lightning)
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
            if (done := self._round.attempt(compute)) is not None:
                result = done[0]
                break
            skip = self._round.recover()
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
        automatic = self._epoch_loop.automatic_optimization
        counts = self._counts_of(automatic.optim_progress.optimizer)

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
        self.log_for(kwargs)
        return kwargs

    def run_manual(self, run: Callable[..., Any], kwargs: Any) -> Any:
        """Run the user's own optimization of one batch. Undo and repeat it as often as its collectives fail."""
        progress = self._epoch_loop.manual_optimization.optim_step_progress
        counts = self._counts_of(progress)
        self._remember()
        if self._round.size > 1:
            self._frozen = Frozen(self._trainer.module)
            self.window.remember()
        while True:
            self._begin_manual_batch()
            before = counts.take()
            skip = False
            if (done := self._round.attempt(self.parts.run_manual, self._checked, run, kwargs)) is not None:
                result = done[0]
                break
            skip = self._round.recover()
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
            self.log_for(kwargs)
        self._position.in_step = False
        self._position.updates += 1
        self._max_manual_steps = max(self._max_manual_steps, self._manual_steps)
        if not skip:  # else the window is the other worker's, as this worker took over its update
            # If no step was ever seen, the user steps optimizers that Lightning has not wrapped.
            self.window.is_open = self._manual_steps == 0 and progress.total.completed > 0
        self._undo = self._before = self._frozen = None
        self.window.forget()
        self.inherit_values()
        if not skip:  # else all have met meanwhile
            self._send_values()
        self._metrics.agree_on_step()
        return result

    def _checked(self, run: Callable[..., Any], kwargs: Any) -> Any:
        """Run a batch of manual optimization. Check gradients and buffers that it leaves to the next batches."""
        result = run(kwargs)
        manual = self._epoch_loop.manual_optimization
        has_stepped = manual.optim_step_progress.total.completed > 0
        if self._manual_steps == 0 and has_stepped:  # else the user may have stepped optimizers that Lightning has not wrapped
            self._round.check_gradients()
        return result

    def before_optimizer_step(self, optimizer: Any, closure: Any) -> None:
        """Manual optimization: keep the state that a batch's first update will overwrite, if the batch may hold several."""
        if not self._position.in_step or self._trainer.is_automatic:
            return
        if self._job.config.max_workers > 1:
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
        if self._has_loss or self._round.size == 1 or self._trainer.accumulate_grad_batches > 1:
            return
        if self._round.all_reach(f"no-loss/{self._position.fit}/{self._position.batch}"):
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
            if not self._round.is_asynchronous:
                self.values_arrive()

        if self._round.attempt(send) is None:
            self._round.recover()

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
        return self.parts.until_it_fits(lambda again: self._redone_window(inside))

    def _redone_window(self, inside: bool) -> Any:
        """Compute the gradients of the accumulation window's earlier batches again, split for the current world.

        Args:
                inside: whether the last batch handed out is still to be computed.

        Returns:
            The arguments of the training step for that batch; None if not `inside`.
        """
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
                self.log_for(kwargs)
                batch_idx = handed_out - inside - earlier + i
                with self._trainer.strategy.block_backward_sync():
                    lightning_names.closure(self._trainer.lightning, kwargs, optimizer, batch_idx)()
        finally:
            self._batches.computed = None
        self.window_is_stale = False
        if inside:
            self.log_for(steps[-1])
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
        results, has_peers = lightning_names.results_of(self._epoch_loop), self._round.size > 1
        can_repeat = has_peers or not self.parts.refusal
        self._before = Before(self._users_metrics, results, self._buffers if has_peers else None) if can_repeat else None

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
        return self._round.size > 1 and self._trainer.elastic_tables is None

    def log_for(self, kwargs: Any) -> None:
        """Make Lightning weight the next logged values by the size of this batch."""
        results = lightning_names.results_of(self._epoch_loop)
        results.batch, results.batch_size = kwargs["batch"] if "batch" in kwargs else next(iter(kwargs.values())), None

    @property
    def _epoch_loop(self) -> EpochLoop:
        return self._trainer.epoch_loop
