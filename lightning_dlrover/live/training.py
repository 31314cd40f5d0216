"""Carry a Lightning training loop from one round of the job to the next.

`LiveTraining` chooses this worker's action at the few places where the world may change: admit a joiner, switch, recover
from a loss, or leave. `strategy.py` calls it from Lightning's hooks. The process groups themselves are formed by
`rdzv/group/world.py`.

Every worker's place in the program is a `Position`. Training steps and the strategy's collectives keep all workers within one
optimizer update and a few small collectives of each other. After a loss the survivors compare their positions:
  - A worker that lacks the last update takes weights and optimizer state from one that has it; see `update.py`.
  - A worker inside a step that has not lost an update repeats the step, with its new share of the same batch; see `steps.py`.
  - A worker that lacks the result of a collective outside of a step takes it from one that has it; see `resilient.py`.
  - A worker in a validation run continues it, with a part of the lost worker's samples; see `validation.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lightning_dlrover.live import lightning_names, loggers
from lightning_dlrover.live import reserve as memory
from lightning_dlrover.live.data_fingerprint import DataFingerprint, refuse_different_data
from lightning_dlrover.live.data_of_fit import DataOfFit
from lightning_dlrover.live.epoch_metrics import EpochMetrics
from lightning_dlrover.live.fits import Fits
from lightning_dlrover.live.job_checkpoints import JobCheckpoints
from lightning_dlrover.live.job_state import JobState
from lightning_dlrover.live.job_windows import JobWindows
from lightning_dlrover.live.kept_values import KeptValues
from lightning_dlrover.live.lanes_ahead import LanePrefetcher
from lightning_dlrover.live.leaving import Leaving
from lightning_dlrover.live.loader import ElasticLoader
from lightning_dlrover.live.position import FitPosition, Position
from lightning_dlrover.live.progress import FitProgress
from lightning_dlrover.live.resilient import ResilientCollectives
from lightning_dlrover.live.searches import Searches
from lightning_dlrover.live.settings import SettingsInForce
from lightning_dlrover.live.skipped_rows import SkippedReports
from lightning_dlrover.live.steps import TrainingSteps
from lightning_dlrover.live.successors import RestartHandoff
from lightning_dlrover.live.table_rounds import RolledBack, TableRounds
from lightning_dlrover.live.train_loaders import TrainLoaders
from lightning_dlrover.live.trainer_of_fit import TrainerOfFit
from lightning_dlrover.live.update import Update
from lightning_dlrover.live.validation import Validation
from lightning_dlrover.live.votes import Votes
from lightning_dlrover.observe.pulse import OwnTime, Pulse
from lightning_dlrover.observe.resources import available_cores
from lightning_dlrover.packages import ProgressBar
from lightning_dlrover.rdzv.group import transfer
from lightning_dlrover.rdzv.group.loop import Pace, handover, model_fingerprint
from lightning_dlrover.rdzv.group.world import World
from lightning_dlrover.rdzv.live.member import Formation, LeftOutError, WorldError

if TYPE_CHECKING:
    import lightning as L

    from lightning_dlrover.live.live_strategy import LiveStrategy

__all__ = ["LiveTraining"]

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
        self.collectives = round_ = ResilientCollectives(world, position, port, self)
        self.loaders = batches = TrainLoaders(trainer, position, strategy.has_global_batch_size)
        self.windows = JobWindows(world, position)
        self.searches = Searches(world, round_, position)
        self.validation = Validation(round_, batches, port, position)
        self.kept = KeptValues(world, round_, port, position)
        self.metrics = EpochMetrics(round_, batches, port, self.validation, self.kept)
        self.steps = TrainingSteps(world, round_, batches, port, position, self.metrics, self.kept)
        self.votes = Votes(world, round_, batches, port, position, self.pulse, self.kept)
        self.fits = Fits(world, round_, port, position)
        self.leaving = Leaving(world, port, position)
        self.skipped = SkippedReports(world, batches, position)
        self._data = DataOfFit(world, round_, batches, port, position)
        self._lanes = LanePrefetcher(world, round_, batches)
        self._state = JobState(world, round_, batches, port, position, self.validation, self.votes)
        self.checkpoints = JobCheckpoints(world, round_, batches, port, position, self._state)
        self._successors = RestartHandoff(world, round_, port, position, self._state, self.checkpoints)
        self.tables = TableRounds(world, round_, batches, port, position, self.steps, self._state, self.checkpoints)
        self._pace = Pace(world, check_interval_s, self.votes.wishes)
        self._settings = SettingsInForce(available_cores())
        self.progress = FitProgress(world, round_, batches, port, position, self._pace, self.pulse)
        self._was_at_boundary = strategy.clock.read()
        self._is_switching = False  # set at a boundary while the world may change
        self._begins_epoch = False  # set while Lightning's loop begins one
        world.place = position

    @property
    def formation(self) -> Formation | None:
        """This worker's round; None on a worker that is not admitted yet."""
        return self.position.formation

    def fit_begins(self) -> None:
        """Reset the state of one `fit`, before Lightning's loops run."""
        self.world.num_fits += 1
        self.position.fit = self.world.num_fits
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
        lightning_names.set_up_validation(self._trainer.lightning)  # a loader that cannot be split is refused now
        if self.loaders.are_made and self.loaders.grow:
            self.loaders.begin_windows(self._next_windows())
            self.loaders.recount()
            if self._begins_epoch and self.loaders.has_ended:
                raise StopIteration
            if self.position.has_entered:
                self._data.put_on_record(begins_epoch=True)

    def begin_epoch(self, begin: Callable[[], None]) -> None:
        self._begins_epoch = True
        try:
            begin()
        finally:
            self._begins_epoch = False

    def _next_windows(self) -> list[dict[str, list[int]] | None]:
        """Wait for the rows of the epoch that begins. If a worker is lost meanwhile, meet the others first, and wait again."""
        if self.tables.elastic is not None or not self.position.has_entered:
            return self.loaders.next_windows()
        self.position.is_repeatable = True
        try:
            # A worker that has lost the others meanwhile may get this result from one of them.
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
        if not self.position.has_entered:
            self._enter(loader)
            self._finish_resumed_batch()
        elif loader.cursor < loader.num_epoch_batches:
            self._follow_rounds()
            self._lanes.look()
        self._strategy.replica.wrap_what_was_unfrozen()
        self.position.at_boundary = False
        self._was_at_boundary = self._strategy.clock.read()
        if loader.cursor < loader.num_epoch_batches:
            self.collectives.begin_batch(self.loaders.batch_number + 1)

    def _follow_plan(self) -> None:
        """Apply the plan's settings for each worker. Other workers may do so a few steps earlier or later."""
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
            # A worker was lost meanwhile, and the survivors have met in another round. They vote again there.
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
            memory.reserve(self._trainer.module, NUM_COPIES, self._strategy.table_names)
        if self.formation is not None:
            position.has_entered = True
            # Not 0 when a checkpoint from inside an epoch was resumed.
            self.loaders.begin_at(self._trainer.num_handed_out)
            position.updates = self._trainer.global_step
            self.world.announce(fingerprint, loader.global_batch_size, data.encode())
            position.batch = self.loaders.batch_number
            self.checkpoints.go_on_drawing()
            while self.collectives.attempt(self._begin_together, data) is None:
                self.collectives.recover()
            while self.collectives.attempt(self._data.compare_next_batches) is None:
                self.collectives.recover()
            self._data.put_on_record()
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
        if lightning_names.is_batch_unfinished(self._trainer.lightning):
            self.position.at_boundary = False
            lightning_names.finish_batch(self._trainer.lightning)
            self.position.at_boundary = True
            if self._trainer.epoch_loop.done:
                raise StopIteration

    def _begin_together(self, data: DataFingerprint) -> None:
        """First round: compare the members' data, join their loggers' runs, and resume an earlier life of the job."""
        assert self.formation is not None
        formation = self.formation
        self._state.find_names()
        if formation.rank == 0 and self.world.config.max_workers > 1:
            loggers.begin(self._trainer.lightning.loggers)
        if formation.size > 1:
            runs = transfer.all_gather(loggers.capture_runs(self._trainer.lightning.loggers) if formation.rank == 0 else [])[0]
            if formation.rank != 0:
                loggers.adopt_runs(self._trainer.lightning.loggers, runs)
        has_finished = self.world.has_finished
        if formation.rank == 0 and not has_finished and self.tables.elastic is None:
            self.checkpoints.take_users_choice()
        if formation.size > 1:
            mine = data.encode(), self.loaders.orders_now, has_finished
            said = transfer.all_gather(mine)
            refuse_different_data([other for other, _, _ in said], f"run {self.world.config.run_id!r}")
            self.loaders.take_orders(said[0][1])
            has_finished = any(each for _, _, each in said)  # workers learn of it at different times
        if has_finished:
            return  # this is a later `fit`, and the checkpoints belong to an earlier one
        if self.tables.elastic is not None:
            self.tables.resume(formation)
        elif not self._successors.resume():
            self.checkpoints.resume_together()

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
        self.position.formation = formation
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
        if not standing and not has_resumed and me == formation.round.members[0]:
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
            strategy.replica.wrap_anew(in_validation=is_validating)
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
        loggers.take_over(self._trainer.lightning.loggers)
        for bar in [c for c in self._trainer.callbacks if isinstance(c, ProgressBar)]:
            if getattr(bar, "is_disabled", False):
                bar.enable()
                bar.on_train_start(self._trainer.lightning, self._trainer.module)
                bar.on_train_epoch_start(self._trainer.lightning, self._trainer.module)
