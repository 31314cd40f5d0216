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

Each replacement gets Lightning's own method as its argument, see `surround`. The replacements are attributes of the loops'
instances, which every `fit` sets anew. Without a live job only the first two
methods are replaced, to time them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from lightning_dlrover.live.lightning_names import (
    Method,
    restart_nowhere,
    restore_sigterm,
    surround,
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
    timed = partial(_run_timed, times, clock, live)
    if live is None:
        for optimization in (automatic, manual):
            surround(optimization, "run", timed)
        return
    live.fit_begins()
    surround(automatic, "run", partial(timed, live.steps.run_automatic))
    surround(automatic, "_make_closure", live.steps.closure)
    surround(manual, "run", partial(timed, live.steps.run_manual))
    _wrap_validation(epoch_loop.val_loop, live)
    surround(fit_loop, "setup_data", live.set_up_data)
    wrap_restarts(fit_loop)
    surround(fit_loop, "on_advance_start", live.begin_epoch)
    _wrap_batches(epoch_loop, fit_loop, live, has_tables)
    if validates_by_clock(trainer):
        surround(epoch_loop, "_should_check_val_fx", partial(_decided_by_rank_zero, of_rank_zero))
    surround(trainer, "save_checkpoint", live.run_saving)
    epoch_loop._broadcast_sigterm_tensor = _send_no_sigterm
    restore_sigterm(trainer)
    live.world.listen_for_sigterm()
    live.position.is_in_loops = True


def wrap_restarts(fit_loop: Any) -> None:
    """Let a fit that resumes a checkpoint from an epoch's end begin with the first batch of the next one."""
    epoch_loop = fit_loop.epoch_loop
    surround(fit_loop, "reset", partial(_begin_after_ended_epoch, fit_loop))
    surround(epoch_loop, "reset", partial(_reset_ended_epoch, epoch_loop))


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
    surround(val_loop, "run", validation.run)
    surround(val_loop, "reset", partial(validation.begin_batches, val_loop))
    surround(val_loop, "_evaluation_step", partial(validation.step, val_loop))
    exchange_metrics_through(live.collectives)


def _wrap_batches(epoch_loop: Any, fit_loop: Any, live: LiveTraining, has_tables: bool) -> None:
    """Continue after a rollback of tables, and agree on `should_stop`, at the three places where the loops may end."""
    tables = live.tables
    for loop, name, place, continue_after_rollback in (
        (epoch_loop, "advance", "batch", tables.again_if_rolled_back),
        (epoch_loop, "on_advance_end", "validation", tables.end_batch),
        (fit_loop, "on_advance_end", "epoch", tables.end_epoch),
    ):
        agreeing = partial(_run_then_agree, live, place)
        surround(loop, name, partial(agreeing, continue_after_rollback) if has_tables else agreeing)


def _run_then_agree(live: LiveTraining, place: str, run: Method, *args: Any) -> None:
    run(*args)
    live.votes.agree_on_stop(place)


def _decided_by_rank_zero(of_rank_zero: Callable[[bool], bool], is_due: Method, fetcher: Any) -> bool:
    """Return rank 0's answer: each worker reads its own clock, and one that validates would wait for one that does not."""
    return of_rank_zero(is_due(fetcher))


def _send_no_sigterm() -> None:
    """Do nothing. Lightning broadcasts after each batch whether rank 0 has received SIGTERM. It hangs if another rank has."""


def _run_timed(times: StepTimes, clock: OwnClock, live: LiveTraining | None, run: Method, *args: Any) -> Any:
    own = clock.read()
    try:
        with times.measure("optimizer"):
            return run(*args)
    finally:
        if live is not None:
            live.batch_done(own)
