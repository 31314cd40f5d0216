"""Replace the methods of Lightning's loops that a change of the world must not break.

| method | replaced by |
| --- | --- |
| `automatic_optimization.run` | `TrainingSteps.run_automatic`, timed |
| `automatic_optimization._make_closure` | `TrainingSteps.closure` |
| `manual_optimization.run` | `TrainingSteps.run_manual`, timed |
| `val_loop.run` | `Validation.run` |
| `val_loop.reset`, `val_loop._evaluation_step` | `Validation.begin_batches`, `Validation.step` |
| `fit_loop.setup_data` | `LiveTraining.set_up_data` |
| `fit_loop.on_advance_start` | `LiveTraining.begin_epoch` |
| `fit_loop.reset` | Lightning's own, after a checkpoint from an epoch's end no longer counts as one from inside an epoch |
| `epoch_loop.reset` | Lightning's own, and its reset of an ended epoch also where its number of batches is not known |
| `epoch_loop.advance` | `TableRounds.again_if_rolled_back` with tables, then `agree_on_stop` |
| `epoch_loop.on_advance_end` | `TableRounds.end_batch` with tables, then `agree_on_stop` |
| `fit_loop.on_advance_end` | `TableRounds.end_epoch` with tables, then `agree_on_stop` |
| `epoch_loop._should_check_val_fx` | rank 0's answer, if validations are due by time |
| `epoch_loop._broadcast_sigterm_tensor` | nothing |
| `trainer.save_checkpoint` | `LiveTraining.run_saving` |

The replacements are attributes of the loops' instances, which every `fit` sets anew. Without a live job only the first two
methods are replaced, to time them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from lightning_dlrover.live.lightning_names import (
    Method,
    replace,
    replace_closures,
    replace_evaluation_step,
    replace_setup_of_data,
    replace_validation_check,
    restart_nowhere,
    restore_sigterm,
    stop_sending_sigterm,
    validates_by_clock,
)
from lightning_dlrover.live.validation import exchange_metrics_through
from lightning_dlrover.observe.pulse import OwnClock
from lightning_dlrover.observe.step_times import StepTimes

if TYPE_CHECKING:
    from lightning_dlrover.live.training import LiveTraining

__all__ = ["wrap_evaluations", "wrap_loops", "wrap_restarts"]


def wrap_evaluations(trainer: Any, live: LiveTraining | None) -> None:
    """Replace what every use of a Trainer runs: the exchange of logged values, and the end of each validation dataloader."""
    if live is None:
        return
    live.metrics.attach()
    for loop in (trainer.validate_loop, trainer.test_loop, trainer.fit_loop.epoch_loop.val_loop):
        live.validation.end_each_dataloader(loop)


def wrap_loops(
    trainer: Any,
    live: LiveTraining | None,
    times: StepTimes,
    clock: OwnClock,
    has_tables: bool,
    of_rank_zero: Callable[[bool], bool],
) -> None:
    """Replace the methods before a Trainer's loops run.

    Args:
        of_rank_zero: returns rank 0's argument on all workers.
    """
    epoch_loop, fit_loop = trainer.fit_loop.epoch_loop, trainer.fit_loop
    automatic, manual = epoch_loop.automatic_optimization, epoch_loop.manual_optimization
    if live is None:
        for optimization in (automatic, manual):
            replace(optimization, "run", lambda run: _timed(run, times, clock, None))
        return
    live.fit_begins()
    replace(automatic, "run", lambda run: _timed(partial(live.steps.run_automatic, run), times, clock, live))
    replace_closures(trainer, lambda make: partial(live.steps.closure, make))
    replace(manual, "run", lambda run: _timed(partial(live.steps.run_manual, run), times, clock, live))
    _wrap_validation(epoch_loop.val_loop, live)
    replace_setup_of_data(fit_loop, lambda set_up: partial(live.set_up_data, set_up))
    wrap_restarts(fit_loop)
    replace(fit_loop, "on_advance_start", lambda begin: partial(live.begin_epoch, begin))
    _wrap_batches(epoch_loop, fit_loop, live, has_tables)
    if validates_by_clock(trainer):
        # Each worker reads its own clock, and workers that validate would wait for those that do not. Rank 0 decides.
        replace_validation_check(epoch_loop, lambda is_due: lambda fetcher: of_rank_zero(is_due(fetcher)))
    replace(trainer, "save_checkpoint", lambda save: partial(live.run_saving, save))
    stop_sending_sigterm(epoch_loop)
    restore_sigterm(trainer)
    live.world.listen_for_sigterm()
    live.position.is_in_loops = True


def wrap_restarts(fit_loop: Any) -> None:
    """Let a fit that resumes a checkpoint from an epoch's end begin with the first batch of the next one."""
    epoch_loop = fit_loop.epoch_loop
    replace(fit_loop, "reset", lambda reset: partial(_begin_after_ended_epoch, fit_loop, reset))
    replace(epoch_loop, "reset", lambda reset: partial(_reset_ended_epoch, epoch_loop, reset))


def _begin_after_ended_epoch(fit_loop: Any, reset: Callable[[], None]) -> None:
    """Let a checkpoint from an epoch's end begin the next epoch also with `max_steps`.

    With `max_steps` Lightning restarts inside an epoch, which would count the batches of the ended one as done.
    """
    epochs = fit_loop.epoch_progress.current
    if fit_loop.epoch_loop.batch_progress.is_last_batch and epochs.ready == epochs.started == epochs.processed:
        restart_nowhere(fit_loop)
    reset()


def _reset_ended_epoch(epoch_loop: Any, reset: Callable[[], None]) -> None:
    """Reset an epoch's counters also if a checkpoint is from an epoch's last batch and the next epoch has another length.

    Lightning compares them with the next epoch's number of batches, and would take it for one that has begun, or ended.
    """
    progress = epoch_loop.batch_progress
    is_from_end = getattr(epoch_loop, "restarted_on_train_batch_end", False) and progress.is_last_batch
    reset()
    if is_from_end and progress.current.ready:
        progress.reset_on_run()
        epoch_loop.scheduler_progress.reset_on_run()
        epoch_loop.automatic_optimization.optim_progress.reset_on_run()
        val_progress = epoch_loop.val_loop.batch_progress
        val_progress.total.reset()


def _wrap_validation(val_loop: Any, live: LiveTraining) -> None:
    validation = live.validation
    replace(val_loop, "run", lambda run: partial(validation.run, run))
    replace(val_loop, "reset", lambda reset: partial(validation.begin_batches, val_loop, reset))
    replace_evaluation_step(val_loop, lambda evaluate: partial(validation.step, val_loop, evaluate))
    exchange_metrics_through(live.collectives)


def _wrap_batches(epoch_loop: Any, fit_loop: Any, live: LiveTraining, has_tables: bool) -> None:
    """Continue after a rollback of tables, and agree on `should_stop`, at the three places where the loops may end."""

    def replace_at(loop: Any, name: str, place: str, continue_after_rollback: Callable[..., None]) -> None:
        replace(
            loop,
            name,
            lambda run: _then_agree(partial(continue_after_rollback, run) if has_tables else run, live, place),
        )

    replace_at(epoch_loop, "advance", "batch", live.tables.again_if_rolled_back)
    replace_at(epoch_loop, "on_advance_end", "validation", live.tables.end_batch)
    replace_at(fit_loop, "on_advance_end", "epoch", live.tables.end_epoch)


def _then_agree(run: Method, live: LiveTraining, place: str) -> Method:
    def run_then_agree(*args: Any) -> None:
        run(*args)
        live.votes.agree_on_stop(place)

    return run_then_agree


def _timed(run: Method, times: StepTimes, clock: OwnClock, live: LiveTraining | None) -> Method:
    def run_timed(*args: Any) -> Any:
        own = clock.read()
        try:
            with times.measure("optimizer"):
                return run(*args)
        finally:
            if live is not None:
                live.batch_done(own)

    return run_timed
