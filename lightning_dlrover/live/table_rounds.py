"""Carry the sharded tables of a Trainer's model from round to round, or take it back to a snapshot.

Tables are incomplete after any step that a loss has interrupted, as the lost worker's shards are gone and others may be half
updated. All workers then go back to the newest complete snapshot. The loops learn of it by an exception, and do the batch after
the snapshot next.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from lightning_dlrover.live import lightning_names
from lightning_dlrover.live.epoch_metrics import restore_partial
from lightning_dlrover.live.job_checkpoints import JobCheckpoints
from lightning_dlrover.live.job_state import JobState
from lightning_dlrover.live.ports import Batches, Job, Round, TrainerPort
from lightning_dlrover.live.position import FitPosition, Position
from lightning_dlrover.live.state import STATE_CLASSES, TrainerState
from lightning_dlrover.live.steps import TrainingSteps
from lightning_dlrover.rdzv.group import transfer
from lightning_dlrover.rdzv.job.events import StateRolledBack
from lightning_dlrover.rdzv.live.member import Formation, WorldError
from lightning_dlrover.tables.snapshot import SnapshotError

if TYPE_CHECKING:
    from lightning_dlrover.live.tables_of_trainer import TablesOfTrainer
    from lightning_dlrover.tables.elastic import ElasticTables

__all__ = ["RolledBack", "TableRounds"]


class RolledBack(Exception):
    """Abandons the work in progress: all workers are back at the newest snapshot, and the batch after it comes next."""


class TableRounds:
    """The tables of a Trainer's model, if it has any, and the snapshots of everything else."""

    def __init__(
        self,
        job: Job,
        round_: Round,
        batches: Batches,
        trainer: TrainerPort,
        position: FitPosition,
        steps: TrainingSteps,
        state: JobState,
        checkpoints: JobCheckpoints,
    ) -> None:
        self._job = job
        self._round = round_
        self._batches = batches
        self._trainer = trainer
        self._position = position
        self._steps = steps
        self._state = state
        self._checkpoints = checkpoints
        self._was_rolled_back = False
        self._snapshots_are_readable = False  # False until one was read back

    @property
    def elastic(self) -> ElasticTables | None:
        return self._trainer.elastic_tables

    @property
    def _tables(self) -> TablesOfTrainer:
        assert self._trainer.strategy.tables is not None
        return self._trainer.strategy.tables

    @property
    def whole_in(self) -> int:
        """Last round with all tables in its members' memory; 0: no tables, or incomplete ones."""
        return self.elastic.whole_in if self.elastic is not None else 0

    # --- rounds -----------------------------------------------------------------------------------------------------------

    def resume(self, formation: Formation) -> None:
        """First round: continue from a snapshot or checkpoint of an earlier life of the job."""
        if not (has_choice := self._take_users_choice(formation)):
            self._roll_back(formation, self._batches.batch_number)  # the user's own checkpoint may be newer
        self._was_rolled_back = False
        self._checkpoints.resume_with_tables(self._trainer.global_step, has_choice)

    def _take_users_choice(self, formation: Formation) -> bool:
        """Let no former snapshot count if the user has chosen another `ckpt_path` than before. Return whether that is so."""
        assert self.elastic is not None
        if not self._checkpoints.have_new_choice():
            return False
        self.elastic.ignore_former_snapshots(formation)
        return True

    def broken(self) -> None:
        """Note that a worker was lost. Inside a step, the tables are incomplete from here on."""
        if self.elastic is not None and not self._position.at_boundary:
            self.elastic.broken()

    def settle(self, formation: Formation, standing: Mapping[str, Position], joining: Sequence[tuple[str, str]]) -> None:
        """Bring all workers of a new round to a common state: the current one if it is complete, else that of a snapshot."""
        assert self.elastic is not None
        stand = [w for w in formation.round.members if w in standing]
        places = {(p.batch, p.updates, p.tables, p.at_boundary) for p in standing.values()}
        # After a loss no worker can hand over the lost workers' shards.
        if formation.round.planned and len(places) == 1 and all(p.at_boundary and p.tables for p in standing.values()):
            try:
                self._tables.reshard(formation, stand, self._trainer.strategy.optimizers)
            except BaseException:
                self.elastic.broken()
                raise
            self._trainer.strategy.model = self._tables.model
            self._state.give(formation, joining)
            return
        has_choice = not standing and self._take_users_choice(formation)
        age_s = self.elastic.snapshot_age_s
        is_back = not has_choice and self._roll_back(formation, 0 if standing else self._batches.batch_number)
        if is_back and standing:
            self._checkpoints.raise_if_much_newer(age_s)
        # These processes cannot recover: a worker inside the loops cannot return to their beginning.
        if not is_back and standing:
            raise WorldError(
                "workers and their tables were lost, and no snapshot is complete: all workers must start again, "
                "from the newest checkpoint if there is one"
            )
        if not is_back:
            self._tables.start(formation, self._trainer.strategy.optimizers)
            self._trainer.strategy.model = self._tables.model
        if not standing:
            # A joiner's loops have the position of the user's checkpoint, though nothing else of it was loaded.
            self._checkpoints.resume_with_tables(self._trainer.global_step if is_back else 0, has_choice)

    def raise_if_rolled_back(self) -> None:
        """Raise `RolledBack` once after all workers went back to a snapshot."""
        if self._was_rolled_back:
            self._was_rolled_back = False
            raise RolledBack

    def _roll_back(self, formation: Formation, batch: int) -> bool:
        """Go back to the newest complete snapshot. Return False if there is none at or after that batch."""
        restored = self._tables.roll_back(formation, batch, self._trainer.strategy.optimizers)
        if restored is None:
            return False
        self._trainer.strategy.model = self._tables.model
        trainer, state = self._trainer.lightning, self._state
        undone = max(0, self._position.batch - restored.batch)
        snapshot = transfer.loads(restored.state, STATE_CLASSES, state.names)
        for optimizer in trainer.optimizers:
            optimizer.zero_grad()
        state.restore(TrainerState(**snapshot["state"]), enters_epoch=not formation.hellos.get(self._job.worker_id))
        own = snapshot["values"] if restored.is_own else {"logged": {}, "states": {}}
        restore_partial(lightning_names.results_of(trainer.fit_loop.epoch_loop), trainer.lightning_module, own)
        state.add_partials([transfer.loads(other, STATE_CLASSES, state.names)["values"] for other in restored.of_lost])
        state.mark_epoch_as_begun()
        self._steps.forget()
        self._round.forget()
        self._position.validation = 0
        self._was_rolled_back = True
        if trainer.validating or trainer.sanity_checking:
            val_loop = self._trainer.epoch_loop.val_loop
            val_loop._module_mode.restore(trainer.lightning_module)
        trainer.training = True
        torch.set_grad_enabled(True)
        if formation.rank == 0:
            number = formation.round.number
            rolled_back = StateRolledBack(number, restored.batch, undone)
            self._job.event(rolled_back, f"round {number}: back at batch {restored.batch}, {undone} to do again")
        return True

    # --- snapshots --------------------------------------------------------------------------------------------------------

    def voted(self) -> None:
        """Take a snapshot if the workers have voted for one."""
        if self.elastic is not None:
            self.elastic.voted(self._batches.batch_number, self._packed_snapshot)

    def _packed_snapshot(self) -> bytes:
        """Return everything except the tables in the form that `_roll_back` reads.

        Raises:
            SnapshotError: it could not be read. It is detected here, rather than after a loss when nothing else is left.
        """
        try:
            packed = transfer.dumps({"state": self._state.message(), "values": self._state.partial_values()})
        except transfer.TransferError as error:
            raise SnapshotError(str(error)) from error
        if not self._snapshots_are_readable:
            try:
                transfer.loads(packed, STATE_CLASSES, self._state.names)
            except transfer.TransferError as error:
                raise SnapshotError(f"it could not be read again: {error}") from error
            self._snapshots_are_readable = True
        return packed

    # --- the loops --------------------------------------------------------------------------------------------------------

    def again_if_rolled_back(self, advance: Callable[..., None], fetcher: Any) -> None:
        """Run Lightning's work on one batch. After a rollback, run it on the batch after the snapshot."""
        while True:
            try:
                advance(fetcher)
                return
            except RolledBack:
                continue

    def end_batch(self, end: Callable[..., None], fetcher: Any) -> None:
        """Run Lightning's work between two batches, such as validation. A rollback ends it."""
        with suppress(RolledBack):
            end(fetcher)

    def end_epoch(self, end: Callable[[], None]) -> None:
        """Run Lightning's work at the end of an epoch. After a rollback into the epoch, train on its rest first."""
        fit_loop = self._trainer.lightning.fit_loop
        epoch_loop, fetcher = fit_loop.epoch_loop, lightning_names.fetcher_of(fit_loop)
        while True:
            try:
                end()
                return
            except RolledBack:
                while not epoch_loop.done:
                    try:
                        epoch_loop.advance(fetcher)
                        epoch_loop.on_advance_end(fetcher)
                    except StopIteration:
                        break
                    finally:
                        epoch_loop.on_iteration_done()
