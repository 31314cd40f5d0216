"""Live training: a Trainer's loops carried from one round of workers to the next."""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from lightning_dlrover.checks import UnsupportedScriptError, different_callbacks, monitoring
from lightning_dlrover.lightning_compat import (
    CSVLogger,
    ProgressBar,
    TensorBoardLogger,
    TrainerFn,
    fabric_submodule,
    package_of,
)
from lightning_dlrover.live import lightning_adapter, replica, state
from lightning_dlrover.live.agreement import Votes
from lightning_dlrover.live.data_agreement import DataFingerprint, refuse_different_data
from lightning_dlrover.live.fit_parts import (
    DataOfFit,
    FitProgress,
    Fits,
    JobWindows,
    LanePrefetcher,
    PreparedData,
    Searches,
    SkippedReports,
)
from lightning_dlrover.live.handover import JobCheckpoints, JobState, RestartHandoff, RolledBack, TableRounds
from lightning_dlrover.live.hooks import ScriptHooks
from lightning_dlrover.live.lightning_adapter import ends_after_search, surround_requests_of_data
from lightning_dlrover.live.loader import ElasticLoader
from lightning_dlrover.live.metrics import EpochMetrics, KeptValues
from lightning_dlrover.live.order import FitPosition, Position, can_meet
from lightning_dlrover.live.recovery import ResilientCollectives, Update
from lightning_dlrover.live.replica import TrainerOfFit
from lightning_dlrover.live.state import is_lightnings
from lightning_dlrover.live.steps import TrainingSteps
from lightning_dlrover.live.train_loaders import SettingsInForce, TrainLoaders
from lightning_dlrover.live.validation import Validation
from lightning_dlrover.output import drop_what_cannot_be_written
from lightning_dlrover.rdzv.group.config import WorldConfig
from lightning_dlrover.rdzv.group.loop import Pace, handover, model_fingerprint
from lightning_dlrover.rdzv.group.world import World
from lightning_dlrover.rdzv.membership.member import Formation, LeftOutError, MembershipError, WorldError
from lightning_dlrover.rdzv.membership.membership import JobClosedError
from lightning_dlrover.rdzv.transport import transfer, waits
from lightning_dlrover.tables.snapshot_store import SnapshotStore
from lightning_dlrover.tuning.health import OwnTime, Pulse
from lightning_dlrover.tuning.resources import OwnCores

if TYPE_CHECKING:
    import lightning as L

    from lightning_dlrover.live.checkpoints import TablesOfTrainer
    from lightning_dlrover.live.replica import LiveStrategy

log = logging.getLogger(__name__)

# End a worker that the job no longer needs, without side effects on the job.


@dataclass(eq=False)
class Leaving:
    """This worker's way out of the job."""

    _world: World
    _trainer: TrainerOfFit
    _position: FitPosition
    _hooks: ScriptHooks
    _undo: Callable[[], None] | None = None  # set while Lightning handles this worker's leave
    has_left: bool = False

    def leave(self, left_out: LeftOutError) -> NoReturn:
        """End this process; the others continue without it. None of the user's code after `fit` runs."""
        if self._position.is_finishing and left_out.round.number == 0:
            raise left_out  # others have reached the end, so this worker's script continues, too
        self._hooks.deliver()  # the notice may have come after the last boundary
        for logger in self._trainer.lightning.loggers:
            logger.save()
        self._undo = leave_quietly(self._trainer.lightning)
        self._position.has_entered = False
        self.has_left = True
        log.info("worker %s leaves: %s", self._world.worker_id, left_out)
        raise SystemExit(left_out.exit_code)

    def end(self) -> None:
        """Undo `leave_quietly`, if this worker leaves, once Lightning has handled it."""
        if self._undo is not None:
            self._undo()
            self._undo = None


def leave_quietly(trainer: Any) -> Callable[[], None]:
    """Keep Lightning from treating this worker's leave, an exception, as the failure of the job.

    The user's `on_exception` hooks do not run. So no alert is sent, no checkpoint is saved, and trackers' runs do not fail.

    Returns:
        A function that undoes this, once Lightning has handled the exception.
    """
    callbacks, loggers, datamodule = trainer.callbacks, trainer.loggers, trainer.datamodule
    own = __name__.partition(".")[0]
    trainer.callbacks = [c for c in callbacks if isinstance(c, ProgressBar) or type(c).__module__.startswith(own)]
    trainer.loggers = [each for each in loggers if isinstance(each, (CSVLogger, TensorBoardLogger))]  # local files only
    if datamodule is not None:
        datamodule.on_exception = lambda exception: None

    def undo() -> None:
        trainer.callbacks, trainer.loggers = callbacks, loggers
        if datamodule is not None:
            del datamodule.on_exception

    return undo


# Carry a Lightning training loop from one round of the job to the next.
#
# `LiveTraining` makes the parts of a live fit and gives each those of the others that it uses: the job's records and its round
# (`World`), collectives that survive a loss (`ResilientCollectives`), the training loaders (`TrainLoaders`), Lightning
# (`TrainerOfFit`), and this worker's place (`FitPosition`).
#
# It chooses this worker's action at the few places where the world may change: admit a joiner, switch, recover
# from a loss, or leave. `strategy.py` calls it from Lightning's hooks. The process groups themselves are formed by
# `rdzv/group/world.py`.
#
# Every worker's place in the program is a `Position`. Training steps and the strategy's collectives keep all workers within
# one optimizer update and a few small collectives of each other. After a loss the survivors compare their positions:
#   - A worker that lacks the last update takes weights and optimizer state from one that has it; see `recovery.py`.
#   - A worker inside a step that has not lost an update repeats the step, with its new share of the same batch; see
#     `steps.py`.
#   - A worker that lacks the result of a collective outside of a step takes it from one that has it; see `recovery.py`.
#   - A worker in a validation run continues it, with a part of the lost worker's samples; see `validation.py`.

NUM_COPIES = 5
"""Copies of the model's memory to reserve: gradients, their buckets, an optimizer's two moments, the weights as they arrive."""


class LiveTraining:
    """One worker's part in a live job, from `Trainer.fit`'s entrance to its end.

    Args:
        formation: the first round, or None on a worker that joins later.
        check_interval_s: approximate seconds between two votes on whether to switch.
    """

    def __init__(
        self, strategy: LiveStrategy, trainer: L.Trainer, world: World, formation: Formation | None, check_interval_s: float
    ) -> None:
        self.world = world
        self._strategy = strategy
        self.position = position = FitPosition(formation, is_standby=formation is None)
        self.pulse = Pulse()
        self._trainer = port = TrainerOfFit(trainer, strategy)
        self.collectives = collectives = ResilientCollectives(world, position, port, self)
        self.loaders = batches = TrainLoaders(trainer, position, strategy.has_global_batch_size)
        self.windows = JobWindows(world, position)
        self.searches = Searches(world, position)
        self.validation = Validation(collectives, batches, port, position)
        self.kept = KeptValues(world, port, position)
        self.metrics = EpochMetrics(collectives, batches, port, position, self.kept)
        self.steps = TrainingSteps(world, collectives, batches, port, position, self.metrics, self.kept)
        self.votes = Votes(world, collectives, batches, port, position, self.pulse, self.kept)
        self.fits = Fits(world, collectives, port, position)
        self.hooks = ScriptHooks(world, port, position)
        self.leaving = Leaving(world, port, position, self.hooks)
        self.skipped = SkippedReports(world, batches, position)
        self._data = DataOfFit(world, batches, port, position)
        self._lanes = LanePrefetcher(world, batches, position)
        self._state = JobState(world, batches, port, position, self.validation, self.votes)
        self.checkpoints = JobCheckpoints(world, collectives, batches, port, position, self._state)
        self._successors = RestartHandoff(world, collectives, port, position, self._state, self.checkpoints)
        self.tables = TableRounds(world, collectives, batches, port, position, self.steps, self._state, self.checkpoints)
        self._pace = Pace(world, check_interval_s, self.votes.wishes)
        self._cores = OwnCores(os.environ)
        self._settings = SettingsInForce(self._cores.number, self._cores.threads_per_core)
        self.progress = FitProgress(world, batches, port, position, self._pace, self.pulse)
        self._was_at_boundary = strategy.clock.read()
        self._former_runs = state.FormerRuns(trainer)
        self._is_switching = False  # set at a boundary while the world may change
        self._begins_epoch = False  # set while Lightning's loop begins one
        world.place = position

    @property
    def formation(self) -> Formation | None:
        """This worker's round; None before it is admitted."""
        return self.position.formation

    def fit_begins(self) -> None:
        """Reset the state of one `fit`, before Lightning's loops run."""
        self.world.num_fits += 1
        self.position.fit = self.world.num_fits
        self.position.speeds = ()  # another model, or other loaders, may need equal shares
        self.steps.begin_fit()
        self.kept.begin_fit()
        self.votes.begin_fit()

    def set_up_data(self, set_up: Callable[[], None]) -> None:
        """Make the training loaders, or take the rows of the epoch that begins.

        Raises:
            StopIteration: a stream has no more rows, which ends the loop over epochs. Before it, no batches do.
        """
        self.loaders.before_set_up()
        set_up()
        self.loaders.after_set_up()
        lightning_adapter.set_up_validation(self._trainer.lightning)  # a loader that cannot be split is refused now
        if self.loaders.are_made and self.loaders.grow:
            self.loaders.begin_windows(self._next_windows())
            self.loaders.recount()
            if self._begins_epoch and self.loaders.has_ended:
                raise StopIteration
            if self.position.has_entered:
                self._data.record(begins_epoch=True)

    def begin_epoch(self, begin: Callable[[], None]) -> None:
        self._begins_epoch = True
        try:
            begin()
        finally:
            self._begins_epoch = False

    def _next_windows(self) -> list[dict[str, list[int]] | None]:
        """Wait for the rows of the epoch that begins. If a worker is lost, meet the others first, and wait again."""
        if self.tables.elastic is not None or not self.position.has_entered:
            return self.loaders.next_windows()
        self.position.is_repeatable = True
        try:
            # A worker that has lost the others while it waited may get this result from one of them.
            return self.collectives.run(self.loaders.next_windows, is_joint=False)
        finally:
            self.position.is_repeatable = False

    def batch_done(self, started: OwnTime) -> None:
        """Record the time of this worker's share of a batch.

        Args:
            started: clock reading when the share began.
        """
        if self.position.has_entered:
            self.pulse.step_ended(self._strategy.clock.read().since(started), data=started.since(self._was_at_boundary))

    def run_saving(self, save: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Run Lightning's saving of a checkpoint, and mark the time as one without visible progress."""
        self.position.is_saving = True
        try:
            save(*args, **kwargs)
        finally:
            self.position.is_saving = False

    # --- the switch point ----------------------------------------------------------------------------------------------

    def boundary(self, loader: ElasticLoader) -> None:
        """Run the switch point between two batches: the only place where survivors, joiners and leavers have the same state."""
        if loader is not self.loaders.first or self.searches.is_running:
            return
        self.loaders.keep_step()
        self._pace.step_ended()
        self.position.at_boundary = True
        self.skipped.publish()
        self._follow_plan()
        self.hooks.deliver()  # before a switch, in which this worker may leave
        if not self.position.has_entered:
            self._enter(loader)
            self._finish_resumed_batch()
        elif loader.cursor < loader.num_epoch_batches:
            self._follow_rounds()
            self._lanes.look()
        self._strategy.replica.wrap_what_was_unfrozen()
        self.hooks.deliver()
        self.position.at_boundary = False
        self._was_at_boundary = self._strategy.clock.read()
        if loader.cursor < loader.num_epoch_batches:
            self.collectives.begin_batch(self.loaders.batch_number + 1)

    def _follow_plan(self) -> None:
        """Apply the plan's settings for each worker. Other workers may do so a few steps earlier or later."""
        if self._cores.is_due:
            plan, nodes = self.world.view.plan, self.world.membership.shared.nodes
            # Of a node that is about to shrink in place, the workers use less first.
            planned = plan.node_cpus if plan is not None and nodes is not None and nodes.in_place else None
            if (cores := self._cores.look(planned)) is not None:
                self._settings.set_cores(cores)
        done = self._settings.follow(self.world.view.plan, self.loaders.all, self.loaders.may_add_workers)
        if done is not None and self.position.rank == 0 and not self.position.is_standby:
            self.world.event(*done)

    def _follow_rounds(self) -> None:
        self._is_switching = True
        try:
            while self.collectives.attempt(self._bring_up_to_date) is None:
                with suppress(RolledBack):  # then this is another boundary; the loops see no difference
                    self.collectives.recover()
        except LeftOutError as left_out:
            if left_out.round.kind == "stop" and left_out.round.number > 0 and not self.steps.is_in_window:
                self.checkpoints.save_if_rank_zero_was_lost()
            self.leaving.leave(left_out)
        finally:
            self._is_switching = False
            self._state.drop_packed()

    def _bring_up_to_date(self) -> None:
        """Redo the work of a lost worker, then check whether the world is to change."""
        self.steps.redo_window()
        self._maybe_switch()

    def _maybe_switch(self) -> None:
        if self.steps.is_in_window and not self.world.broken:
            return  # gradients of earlier micro-batches belong to the current split
        number = self._pace.round_to_switch_to(self.loaders.batch_number)
        if self.votes.count(self._pace.step_time_s):
            self.checkpoints.save()
        if number is not None:
            self._switch(number)
        elif self.world.wishes:
            self.tables.voted()

    def _switch(self, number: int) -> None:
        position, former = self.position, self.formation
        assert former is not None
        round_ = self.world.view.round
        assert round_ is not None  # the workers have voted for it
        is_leaving = self.world.worker_id not in round_.members
        # Some workers may already see a newer round than the one voted for. All decide by the union of the rounds they see.
        flags = [
            (round_.number, round_.kind) == (number, "stop"),
            not {*round_.members} <= {*former.round.members},
            not self.kept.is_current,
            *(worker not in round_.members for worker in former.round.members),
        ]
        stops, is_joined, is_any_behind, *leaves = self.collectives.largest([int(flag) for flag in flags])
        # All workers hold the values of those that stay as of the newest update, lest one of them is lost or leaves, too.
        senders = [rank for rank, is_leaver in enumerate(leaves) if is_leaver or is_any_behind]
        values = self._state.partial_values(with_large=is_leaving) if former.rank in senders else None
        found = self.collectives.gathered_from(senders, values)
        parts = {former.round.members[rank]: part for rank, part in found.items()}
        if self.tables.elastic is None:
            self.kept.exchanged(former, parts)
        if stops:  # the state in memory would be lost
            if self.tables.elastic is None:
                self._successors.keep([*parts.values()])
            if self._trainer.lightning.checkpoint_callbacks:
                self.checkpoints.save()
        self._pace.held_up()
        # By all workers, while the former group exists: a user's `on_save_checkpoint` may hold a collective.
        if is_joined and self.tables.elastic is None:
            self._state.pack_for_joiners()
        else:
            self._state.drop_packed()
        if self.formation is not former:
            # A worker was lost, and the survivors have met in another round. They vote again there.
            self._state.drop_packed()
            return
        position.collective += 1  # a worker that reaches this line has the results of all collectives above
        published = self._published
        try:
            formation = self.world.switch(number, published.encode())
        except LeftOutError as left_out:
            if self.tables.elastic is not None:
                self.tables.elastic.hand_over(left_out.round)
            self.leaving.leave(left_out)
        if formation.rank == 0 and self.tables.elastic is not None:
            self._state.add_partials([part for w, part in parts.items() if w not in formation.round.members])
        self._settle(formation, published)

    # --- entering -----------------------------------------------------------------------------------------------------------

    def _enter(self, loader: ElasticLoader) -> None:
        """Enter the training loop with the members of the first round, or wait to be admitted."""
        position = self.position
        fingerprint = self._strategy.fingerprint or model_fingerprint(self._trainer.module)
        data = self._data.fingerprint()
        self.steps.enter_loops()
        loader.workers.warm_up()  # before memory is reserved: forked processes share pages, which are copied on the next write
        if self.world.config.max_workers > 1:
            replica.reserve(self._trainer.module, NUM_COPIES, self._strategy.table_names)
        if self.formation is not None:
            position.has_entered = True
            # Not 0 when a checkpoint from inside an epoch was resumed.
            self.loaders.begin_at(self._trainer.num_handed_out)
            position.updates = self._trainer.global_step
            self.world.announce(fingerprint, loader.global_batch_size, data.encode())
            position.batch = self.loaders.batch_number
            self.checkpoints.restore_random()
            while self.collectives.attempt(self._begin_together, data) is None:
                self.collectives.recover()
            while self.collectives.attempt(self._data.compare_next_batches) is None:
                self.collectives.recover()
            self._data.record()
        else:
            if self.tables.elastic is not None:
                self.tables.elastic.make_ready()
            self._state.find_names()
            self._admit(fingerprint, data)
        self._pace.went_on(self.loaders.batch_number + 1)

    def _finish_resumed_batch(self) -> None:
        """Finish the batch at whose end a checkpoint was saved, before the validation that was due.

        Raises:
            StopIteration: the epoch ends with it.
        """
        epoch_loop, fetcher = self._trainer.epoch_loop, self._trainer.lightning.fit_loop._data_fetcher
        progress: Any = epoch_loop.batch_progress.current
        if progress.ready == progress.processed == progress.completed + 1 and fetcher is not None:
            self.position.at_boundary = False
            epoch_loop.batch_progress.increment_completed()
            epoch_loop.on_advance_end(fetcher)
            self.position.at_boundary = True
            if epoch_loop.done:
                raise StopIteration

    def _begin_together(self, data: DataFingerprint) -> None:
        """First round: compare the members' data, join their loggers' runs, and resume an earlier life of the job."""
        assert self.formation is not None
        formation = self.formation
        self._state.find_names()
        if formation.rank == 0:
            state.begin(self._trainer.lightning.loggers)
            self._record_runs()
        if formation.size > 1:
            runs = transfer.all_gather(state.capture_runs(self._trainer.lightning.loggers) if formation.rank == 0 else [])[0]
            if formation.rank != 0:
                state.adopt_runs(self._trainer.lightning.loggers, runs)
        has_finished = self.world.has_finished
        if formation.rank == 0 and not has_finished and self.tables.elastic is None:
            self.checkpoints.take_users_choice()
        if formation.size > 1:
            mine = data.encode(), self.loaders.orders_now, has_finished
            said = transfer.all_gather(mine)
            refuse_different_data([other for other, _, _ in said], f"run {self.world.config.run_id!r}")
            self.loaders.take_orders(said[0][1])
            has_finished = any(each for _, _, each in said)  # workers learn it at different times
        if has_finished:
            return  # this is a later `fit`, and the checkpoints belong to an earlier one
        if self.tables.elastic is not None:
            self.tables.resume(formation)
        elif not self._successors.resume():
            self.checkpoints.resume_together()

    def _record_runs(self) -> None:
        """Let a later life of the job continue the loggers' runs. Those of a later fit are not the job's."""
        runs = state.recorded_runs(self._trainer.lightning.loggers)
        job = self.world.view.job
        if self.position.fit == 1 and not self.world.has_finished and job is not None and job.runs != runs:
            self.world.records.record(f"run {self.world.config.run_id}: the loggers' runs", lambda job: replace(job, runs=runs))

    def continue_runs(self) -> None:
        """On rank 0: continue the loggers' runs of an earlier life of the job, if there is one."""
        job = self.world.view.job
        if job is not None and job.runs:
            self._former_runs.resume(job.runs)

    def _admit(self, fingerprint: str, data: DataFingerprint) -> None:
        """Wait until the job needs this worker, then take its state over."""
        self._data.refuse_data_of_another_job(data)
        try:
            with self._lanes.while_waiting():
                formation = self.world.admit(b"", fingerprint)
        except LeftOutError as left_out:
            self.leaving.leave(left_out)
        self._data.refuse_data_of_another_job(data)  # again, as the job may have begun only now
        try:
            while self.collectives.attempt(self._settle, formation, None) is None:
                formation = self._form_after_loss(b"")
        except Exception:
            self.world.resign()  # so that the others need not wait until this process ends
            raise
        self.position.has_entered = True
        self.position.is_standby = False
        self.hooks.admitted(formation)

    # --- recovering ---------------------------------------------------------------------------------------------------------

    def meet_survivors(self) -> bool:
        """Form the next round with the survivors. Return whether this step's update was taken over from another worker.

        Raises:
            RolledBack: the model has sharded tables, which are incomplete after any unfinished step.
        """
        self.steps.broken()
        self.tables.broken()
        published = self._published
        self._pace.held_up()
        while True:
            formation = self._form_after_loss(published.encode())
            if (settled := self.collectives.attempt(self._settle, formation, published)) is not None:
                self.tables.raise_if_rolled_back()
                return settled[0]
            published = replace(published, tables=self.tables.whole_in, values=self.kept.version)

    def _form_after_loss(self, hello: bytes) -> Formation:
        try:
            return self.world.recover(hello)
        except LeftOutError as left_out:
            if self._is_switching:
                raise  # the job's last checkpoint may still be missing
            self.leaving.leave(left_out)

    @property
    def _published(self) -> Position:
        unused = self._strategy.replica.unused
        return self.position.published(self.steps.is_in_window, self.tables.whole_in, unused.found, self.kept.version)

    def _settle(self, formation: Formation, own: Position | None) -> bool:
        """Bring all workers of a new round to a common state. Return whether this worker took over a missed update."""
        positions = {w: Position.decode(hello) for w, hello in formation.hellos.items()}
        standing = {w: p for w, p in positions.items() if p is not None}
        plan = handover(formation.round.members, {w: p.updates if p is not None else None for w, p in positions.items()})
        self.position.formation, self.position.speeds = formation, ()
        self.hooks.entered(formation)
        strategy, is_between_fits, me = self._strategy, self.position.is_between_fits, self.world.worker_id
        strategy.enter_round(formation.rank, formation.size)
        if standing:
            strategy.replica.unused.agree(any(p.has_unused for p in standing.values()), formation.rank == 0)
        if not is_between_fits:
            for loader in self.loaders.all:
                loader.reshard(formation.rank, formation.size)
            if formation.round.planned and me in standing:  # else a step may have to be repeated first
                self.loaders.prepare_next()
        if self.tables.elastic is not None:
            self.tables.settle(formation, standing, plan.joining)
            self._data.compare_with_joiners(standing, plan.joining)
            if formation.rank == 0:
                self._take_over_rank_zero()
            self._pace.went_on(self.loaders.batch_number + 1)
            return False
        if not standing and me == formation.round.members[0]:
            self.checkpoints.take_users_choice()
        has_resumed = not standing and self._successors.resume()
        if not standing and me == formation.round.members[0]:
            self.continue_runs()  # before a checkpoint, whose callbacks may ask for the run's folder
            if not has_resumed:
                self.checkpoints.resume_alone()
        for source, worker in plan.behind:
            self._hand_over_update(formation, source, worker, standing)
        if len(standing) > 1:
            self.collectives.share_results(formation, standing)
        self.kept.settle(formation, standing)
        self.steps.inherit_values()
        is_validating = any(p.validation for p in standing.values())
        if is_validating:
            self.validation.settle()
        if not has_resumed:  # else all have it
            self._state.give(formation, plan.joining)
        self._data.compare_with_joiners(standing, plan.joining)
        if not is_between_fits:  # else the Trainer is about to do both
            strategy.replica.wrap_again(in_validation=is_validating)
            if formation.rank == 0:
                self._take_over_rank_zero()
        last = max((p.batch for p in standing.values()), default=0)
        self._pace.went_on(last + 1)
        return any(me == worker for _, worker in plan.behind)

    def _hand_over_update(self, formation: Formation, source: str, worker: str, standing: Mapping[str, Position]) -> None:
        """Send the last update from one survivor to another that lacks it."""
        me = self.world.worker_id
        if me == source:
            transfer.send(vars(self.steps.window.newest_update()), formation.rank_of(worker))
        elif me == worker:
            missed = standing[source].updates - standing[me].updates
            if missed != 1 or not standing[me].in_step:
                raise WorldError(f"this worker missed {missed} updates and has to start again")
            self.steps.window.take_over(Update(**transfer.receive(formation.rank_of(source))))

    def _take_over_rank_zero(self) -> None:
        """Start rank 0's loggers and progress bars on this worker, as they run on rank 0 only."""
        state.take_over(self._trainer.lightning.loggers)
        for bar in [c for c in self._trainer.callbacks if isinstance(c, ProgressBar)]:
            if getattr(bar, "is_disabled", False):
                bar.enable()
                bar.on_train_start(self._trainer.lightning, self._trainer.module)
                bar.on_train_epoch_start(self._trainer.lightning, self._trainer.module)


# Enter the job of this process, hand it from one Trainer of the script to the next, and leave it.


class JobSession:
    """A strategy's place in the job. The newest one of the process holds the world."""

    newest: ClassVar[JobSession | None] = None
    _closes_at_exit: ClassVar[bool] = False

    def __init__(self, config: WorldConfig, strategy: LiveStrategy, check_interval_s: float) -> None:
        self.config = config
        self.world: World | None = None
        self.live: LiveTraining | None = None  # None until a Trainer has entered the job
        # Workers that the job started with, or the fewest that it may have if a pool chose their number; 0: not known yet.
        self.start_workers = 0
        self.lane_workers = 0  # workers for which the rows of streams are laid out; 0: not known yet
        self.tables: TablesOfTrainer | None = None  # of the Trainer's model
        self._stores: list[SnapshotStore] = []  # stores of all models with tables that this script has trained
        self._prepared = PreparedData(f"{config.etcd.endpoints}/{config.prefix}/{config.run_id}")
        self._strategy = strategy
        self._check_interval_s = check_interval_s
        self._common_error: Exception | None = None  # has ended the `fit` on all workers; the script may catch it
        self._undo_quiet: Callable[[], None] | None = None  # set while Lightning handles a leave before this Trainer's loops

    # --- entering ----------------------------------------------------------------------------------------------------------

    def enter(self, trainer: Any, backend: str) -> None:
        """Take a place for a Trainer that begins to work: in the job, or in the next `fit` of the script.

        Args:
            backend: torch's name for the backend of the job's process groups.
        """
        former = JobSession.newest
        if former is not None:
            former.continue_after_error()
        is_about_to_fit = trainer.state.fn == TrainerFn.FITTING and not any(map(ends_after_search, trainer.callbacks))
        if former is not None and former.live is not None and former.world is not None and is_about_to_fit:
            try:
                former.live.fits.begin_later()
            except SystemExit:
                if former is not self:  # else the former Trainer is quiet already
                    self._undo_quiet = leave_quietly(trainer)
                raise
        if self.live is None or former not in (self, None):
            if self.config.node:  # `dlrover run` has chosen where the output goes
                drop_what_cannot_be_written()
            fabric_submodule(package_of(trainer), "utilities.seed").reset_seed()
            if former is not None and former.world is not None:
                self._continue_from(former, trainer)
            else:
                self._start(trainer, backend)
        if self.live is not None:
            self.live.searches.attend(trainer.callbacks)
            trainer._data_connector.prepare_data = partial(self._prepared.prepare, trainer)
            surround_requests_of_data(trainer, self._ask_as_at_start)

    def _start(self, trainer: Any, backend: str) -> None:
        """Start the world for the script's first Trainer."""
        try:
            self.world = World(self.config, backend, self._strategy.root_device, can_meet)
            formation = self.world.start()
        except JobClosedError as error:
            # A worker started again, or late, for a job that has ended. Nothing is wrong with it.
            log.warning("%s", error)
            self.close()
            raise SystemExit(0) from error
        except LeftOutError as left_out:
            log.info("this worker leaves: %s", left_out)
            self.close()
            self._undo_quiet = leave_quietly(trainer)
            raise SystemExit(left_out.exit_code) from left_out
        except BaseException:
            self.close()
            raise
        self.live = self._take_over_world(self.world, trainer, formation)
        if formation is not None and formation.round.number > 1:
            for callback in trainer.callbacks:
                if is_lightnings(callback, "SaveConfigCallback"):
                    callback.overwrite = True  # an earlier life of the job has left LightningCLI's file
        if formation is not None and formation.rank == 0:
            self._compare_with_arguments(trainer, formation)
            self.live.continue_runs()
        if formation is not None and formation.size > 1:
            _compare_callbacks(self.live, trainer)

    def _continue_from(self, former: JobSession, trainer: Any) -> None:
        """Take over the world from an earlier Trainer in the same script."""
        assert former.live is not None
        self.world, former.world = former.world, None
        assert self.world is not None
        self.start_workers, self.lane_workers = former.start_workers, former.lane_workers
        self._stores, self._prepared = former._stores, former._prepared
        self.live = self._take_over_world(self.world, trainer, former.live.formation)
        self.live.searches.num_begun = former.live.searches.num_begun
        self.live.hooks.continue_from(former.live.hooks)

    def _take_over_world(self, world: World, trainer: Any, formation: Formation | None) -> LiveTraining:
        JobSession.newest = self
        # Registered once: a handler for each strategy would keep every Trainer and model of the script alive.
        if not JobSession._closes_at_exit:
            JobSession._closes_at_exit = True
            atexit.register(_close_newest)
            _report_uncaught_errors()
        live = LiveTraining(self._strategy, trainer, world, formation, self._check_interval_s)
        waits.time_with(self._strategy.clock.stopped)
        self._strategy.enter_round(*self._place_in(formation))
        return live

    def _place_in(self, formation: Formation | None) -> tuple[int, int]:
        """Return rank and number of workers; a joiner is alone until it is admitted, and never the worker that logs."""
        return (formation.rank, formation.size) if formation is not None else (self.config.max_workers, 1)

    def _ask_as_at_start(self, ask: Callable[[], Any]) -> Any:
        """Ask the user's hooks for loaders, and show them the number of workers of which global batches are made.

        A hook that divides its batch by `trainer.world_size` gives the same global batch then, whoever joins or leaves.
        """
        assert self.live is not None
        self.agree_on_start()
        self._strategy.show_place(min(self._strategy.global_rank, self.start_workers - 1), self.start_workers)
        try:
            return ask()
        finally:
            self._strategy.show_place(*self._place_in(self.live.formation))  # a collective may have ended a round

    def _batches_at_start(self, formation: Formation) -> int:
        """Return how many of the DataLoader's batches a step takes. A pool's free room decides nothing about the training."""
        return self.config.min_workers if self.config.pool else formation.size

    def _compare_with_arguments(self, trainer: Any, formation: Formation) -> None:
        """Warn if the script was written for another number of workers than the job's: a step then has another batch size."""
        strategy = self._strategy
        devices = trainer._accelerator_connector._devices_flag
        by_default = devices in (-1, "-1", type(strategy.accelerator).auto_device_count())  # here "auto" is a number
        per_node = self.config.workers_per_node * self.config.node_workers if by_default else strategy.num_processes
        if (wanted := per_node * strategy.num_nodes) in (1, num_batches := self._batches_at_start(formation)):
            return
        log.warning(
            "Trainer(devices=%r, num_nodes=%d) is meant for %d workers, but has no effect in a live job: it starts with %d "
            "and may have %d to %d, as set by `dlrover run --workers MIN:MAX`, or torchrun's --nnodes and --nproc-per-node. "
            "A step takes the DataLoader's batch size times %d; DLRoverStrategy(global_batch_size=...) sets it for any number",
            *(devices, strategy.num_nodes, wanted, formation.size),
            *(self.config.min_workers, self.config.max_workers, num_batches),
        )

    def agree_on_start(self) -> None:
        """Set the numbers of workers of the job's first start, on which global batches depend, and rows of streams."""
        assert self.live is not None
        world, formation = self.live.world, self.live.formation
        if formation is not None and formation.rank == 0:
            # A resumed checkpoint has its own number.
            number = self.start_workers or self._batches_at_start(formation)
            lanes = self.lane_workers or self.config.max_workers
            world.records.record(
                f"run {self.config.run_id}: the number of workers at the start",
                lambda job: job if job.start_workers else replace(job, start_workers=number, lane_workers=lanes),
            )
        if self.start_workers == 0 or self.lane_workers == 0:
            job = world.membership.wait_for(
                lambda view: view.job if view.job and view.job.start_workers else None,
                world.config.wait_timeout_s,
                "rank 0 to send the number of workers at the start",
            )
            self.start_workers, self.lane_workers = self.start_workers or job.start_workers, job.lane_workers or 1

    def build(self, tables: TablesOfTrainer, trainer: Any) -> None:
        """Build a Trainer's new tables in the job, and keep track of their snapshots."""
        assert self.world is not None
        assert self.live is not None
        elastic = tables.build_in_job(self.world, self.live.formation)
        if elastic.store is not None:
            self._stores.append(elastic.store)
        if self.live.formation is None:
            # A joiner gets its shards when it is admitted. Until then it cannot compute with them.
            trainer.num_sanity_val_steps = 0

    # --- leaving -----------------------------------------------------------------------------------------------------------

    def trainer_ends(self, trainer: Any | None) -> None:
        """End a Trainer's work. The job continues in the script's next Trainer, unless this worker leaves.

        Args:
            trainer: None if the Trainer has ended before it had a model.
        """
        if self._undo_quiet is not None:
            self._undo_quiet()
            self._undo_quiet = None
        live = self.live
        if live is None or trainer is None:
            return
        live.leaving.end()
        live.skipped.publish(is_last=True)
        live.loaders.close()
        live.position.is_in_loops = False
        if trainer.state.fn == TrainerFn.FITTING and not trainer.interrupted and not live.position.is_standby:
            live.fits.finish()
        if (trainer.interrupted and self._common_error is None) or live.leaving.has_left:
            self.close()

    def report_error(self, error: BaseException) -> None:
        """Report why a Trainer ends, unless the script may catch the error in all workers."""
        assert self.live is not None
        is_fitting = self.live.position.has_entered and isinstance(error, Exception)
        if is_fitting and not isinstance(error, WorldError | MembershipError) and self.live.fits.fail_together():
            self._common_error = error  # type: ignore[assignment]
        else:
            self.live.world.report_error(error)

    def not_caught(self, error: BaseException) -> None:
        """Report an error that ends this process, after one that has ended a `fit` on all workers."""
        if self._common_error is not None and self.world is not None:
            self._common_error = None
            self.world.report_error(error)

    def continue_after_error(self) -> None:
        """Record the end of a `fit` whose error the script has caught, if there is one."""
        if self._common_error is not None and self.live is not None:
            self._common_error = None
            self.live.fits.end_early()

    def close(self) -> None:
        if self.live is not None and self.live.position.fit > 1:  # else the job is not done, and another process may continue
            self.continue_after_error()
        if self.tables is not None:
            self.tables.close(self._is_over)
        for store in self._stores:  # includes models that an earlier Trainer has trained
            store.close()
        if self._stores and self._is_over():  # once: a request takes seconds while etcd is down
            for store in self._stores:
                store.clear()
        if self.world is not None:
            with suppress(Exception):
                self.world.leave()
        self.world = None

    def _is_over(self) -> bool:
        """Whether no worker will ever continue the job, so that nothing of it need be kept for one."""
        standing = self.world.standing if self.world is not None else None
        return standing is not None and (standing.ask_whether_finished() or standing.ask_whether_cancelled())


def _compare_callbacks(live: LiveTraining, trainer: Any) -> None:
    """Compare callbacks before Lightning's first collectives.

    Collectives of a callback that some workers lack would meet other collectives.

    Raises:
        UnsupportedScriptError: the workers have different callbacks.
    """
    mine = monitoring(trainer.callbacks)
    by_rank = live.collectives.named("the comparison of callbacks", lambda: transfer.all_gather(mine))
    for rank, theirs in enumerate(by_rank):  # all workers compare with rank 0, so that all of them end
        if problem := different_callbacks(by_rank[0], theirs, "rank 0", f"rank {rank}"):
            raise UnsupportedScriptError(problem)


def _report_uncaught_errors() -> None:
    former = sys.excepthook

    def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if JobSession.newest is not None:
            JobSession.newest.not_caught(error)
        former(kind, error, trace)

    sys.excepthook = report


def _close_newest() -> None:
    if JobSession.newest is not None:
        JobSession.newest.close()
