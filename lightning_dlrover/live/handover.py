"""Hand a job's state and tables over: to workers that join, to those that replace a group, and to checkpoints."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from lightning_dlrover.codec import RecordError
from lightning_dlrover.lightning_compat import ModelCheckpoint
from lightning_dlrover.live.agreement import Votes
from lightning_dlrover.live.checkpoints import absolute, exists, load_own_checkpoint, replace_folder, unreadable
from lightning_dlrover.live.metrics import Partial, add_partial, partial_values, reset_metrics, restore_partial
from lightning_dlrover.live.order import UNKNOWN, FitPosition, Position
from lightning_dlrover.live.recovery import ResilientCollectives
from lightning_dlrover.live.replica import TrainerOfFit
from lightning_dlrover.live.state import (
    STATE_CLASSES,
    StateError,
    TrainerState,
    dump,
    parts_with_hparams,
    restore,
    restore_random,
    resume,
)
from lightning_dlrover.live.steps import TrainingSteps
from lightning_dlrover.live.train_loaders import TrainLoaders
from lightning_dlrover.live.validation import Validation
from lightning_dlrover.rdzv.desync import LoneCollectiveError
from lightning_dlrover.rdzv.etcd.types import EtcdError
from lightning_dlrover.rdzv.group.world import World
from lightning_dlrover.rdzv.job.events import FitResumed, StateRolledBack
from lightning_dlrover.rdzv.job.records import CheckpointRecord
from lightning_dlrover.rdzv.membership.member import Formation, LeftOutError, RoundEndedError, WorldError
from lightning_dlrover.rdzv.transport import transfer
from lightning_dlrover.tables.snapshot_store import SnapshotError

if TYPE_CHECKING:
    from lightning_dlrover.live.checkpoints import TablesOfTrainer
    from lightning_dlrover.tables.elastic import ElasticTables

log = logging.getLogger(__name__)


class CheckpointFiles(Protocol):
    """Storage of checkpoints, as the Trainer's `checkpoint_io` or the strategy offers it."""

    def remove_checkpoint(self, path: Any) -> None: ...


@dataclass(eq=False)
class SetAside:
    """Rank 0's checkpoints that wait for etcd. `settle` may run in another thread than the rest.

    Workers that are cut off from etcd train on. If that lasts, others may have started the job again from its newest
    checkpoint. What a cut-off worker saves under a name that is in use is set aside, and what it would remove stays. Both are
    made good once etcd has taken a record of this worker, which it does only for members of the job.

        wanted -> set aside -> written -> in its place     place, written, settle
        unwanted -> kept -> removed                        may_remove, settle
    """

    _world: World
    _files: CheckpointFiles
    _wanted: dict[str, str] = field(default_factory=dict)  # path that each checkpoint should have, by that where it is
    _written: set[str] = field(default_factory=set)  # checkpoints set aside that are complete
    _kept: set[str] = field(default_factory=set)  # checkpoints that were to be removed
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def _run_id(self) -> str:
        return self._world.config.run_id

    def place(self, path: Any, round_number: int) -> Any:
        """Return where a checkpoint may be written: elsewhere if what is there may be of another life of the job."""
        with self._lock:
            self._kept.discard(absolute(path))
            if self._world.membership.is_still_in_force():
                for aside in [each for each in self._written if self._wanted[each] == absolute(path)]:
                    self._written.discard(aside)  # it is older than what comes now
                    self._carry_out("remove", aside, partial(self._files.remove_checkpoint, aside))
                return path
            if not exists(path):
                return path
        folder, slash, name = str(path).rpartition("/")
        # The name comes last: Lightning takes the newest file that begins with "last" for the newest checkpoint.
        aside = f"{folder}{slash}cut-off-{round_number}-{name}"
        self._wanted[absolute(aside)] = absolute(path)
        log.warning("%s: checkpoint %s is not replaced before it answers; until then it is %s", self._doubt, path, aside)
        return aside

    def may_remove(self, path: Any) -> bool:
        """Return whether a checkpoint may be removed now; else `settle` removes it."""
        if self._world.membership.is_still_in_force():
            return True
        self._kept.add(absolute(path))
        log.warning("%s: checkpoint %s is not removed before it answers", self._doubt, path)
        return False

    def written(self, path: str) -> str:
        """Note that a checkpoint is complete; return the path at which it will be once etcd answers."""
        wanted = self._wanted.get(path)
        if wanted is None or "://" in path:  # a file in an object store would have to be copied
            return path
        self._written.add(path)
        return wanted

    def settle(self) -> None:
        """Put checkpoints in their places and remove others, because this worker is a member of the job."""
        with self._lock:
            while self._written:
                aside = self._written.pop()
                self._carry_out(f"move {aside} to", self._wanted[aside], partial(self._move, aside))
            while self._kept:
                kept = self._kept.pop()
                self._carry_out("remove", kept, partial(self._files.remove_checkpoint, kept))

    def _move(self, aside: str) -> None:
        if os.path.isdir(aside):
            replace_folder(Path(self._wanted[aside]), Path(aside))
        else:
            os.replace(aside, self._wanted[aside])
        log.info("run %s: etcd answers again: %s is in its place", self._run_id, self._wanted[aside])

    def _carry_out(self, what: str, path: str, change: Callable[[], None]) -> None:
        try:
            change()
        except OSError as error:  # the user, or another process, may have moved them
            log.warning("run %s: could not %s %s: %s", self._run_id, what, path, error)

    @property
    def _doubt(self) -> str:
        silent_s = self._world.membership.own.lease.silent_s
        return f"run {self._run_id}: etcd has not answered for {silent_s:.0f} s, so other workers may have taken the job over"


# Pack the job's state for other workers, and take theirs over.
#
# A joiner gets the state from a worker of the former round, see `state.py` for its contents. A state that cannot be packed
# or sent turns the joiner away and ends no training worker.

WAS_LOST = (
    "only this worker captures the state for a joiner now, because a worker was lost while the joiner was admitted. "
    "The next joiner is admitted, unless that happens again"
)
HAS_TABLES = (
    "with sharded tables only one worker captures the state for a joiner, so its hooks can run no collective. Run it in "
    "another hook, such as on_train_batch_end, and keep the result"
)
"""Reasons why a collective in `on_save_checkpoint`, or in a `state_dict`, is refused."""


@dataclass(eq=False)
class JobState:
    """The job's state as this worker has it, without sharded tables."""

    _world: World
    _batches: TrainLoaders
    _trainer: TrainerOfFit
    _position: FitPosition
    _validation: Validation
    _votes: Votes
    _outgoing: transfer.Packed | None = None  # state for the joiners of the round that is being formed
    names: frozenset[str] = frozenset()  # classes that this script keeps in checkpoints

    def message(self) -> dict[str, Any]:
        """Return the state as plain data and `STATE_CLASSES`."""
        dumped = dump(self._trainer.lightning, self._batches.all)
        dumped.counters = {
            "updates": self._position.updates,
            "validations": self._validation.number,
            "saved_request": self._votes.saved_request,
        }
        return vars(dumped)

    def restore(self, received: TrainerState, *, enters_epoch: bool = False, joins: bool = False) -> None:
        """Bring this worker to a state that a `message` has brought."""
        trainer, loaders, position = self._trainer.lightning, self._batches, self._position
        batches_per_epoch = len(loaders.first) if loaders.first.iterable is None else UNKNOWN
        place = received.loaders[0].epoch * batches_per_epoch + received.loaders[0].cursor, position.rank
        restore(trainer, self._trainer.strategy, loaders.all, received, place, enters_epoch=enters_epoch, joins=joins)
        reset_metrics(trainer.lightning_module)
        loaders.recount()
        loaders.take_order_seeds([loader_state.seed for loader_state in received.loaders])
        loaders.lead_fetcher()
        position.updates = received.counters["updates"]
        self._votes.saved_request = received.counters["saved_request"]
        self._validation.number = received.counters["validations"]
        position.batch = loaders.batch_number
        loaders.prepare_next()

    # --- logged values ------------------------------------------------------------------------------------------------------

    def partial_values(self, with_large: bool = True) -> Partial:
        """Return the values that this worker has logged so far in this epoch."""
        return partial_values(self._trainer.results, self._trainer.module, with_large)

    def add_partials(self, parts: Sequence[Partial]) -> None:
        """Count other workers' values as this worker's own."""
        for part in parts:
            add_partial(self._trainer.results, self._trainer.module, part)

    def mark_epoch_as_begun(self) -> None:
        """Keep Lightning from dropping received values.

        It drops those logged before an epoch's first batch, and mistakes a new process's first batch for that one.
        """
        connector = self._trainer.lightning._logger_connector
        connector._first_loop_iter = False if self._batches.first.cursor else None

    # --- joiners --------------------------------------------------------------------------------------------------------------

    def find_names(self) -> None:
        """Find the classes and functions in this script's checkpoints. Detect early whether any worker can join at all."""
        self.names = self._names_in_own_state()

    def _names_in_own_state(self) -> frozenset[str]:
        formation, has_tables = self._position.formation, self._trainer.elastic_tables is not None
        if self._world.config.max_workers == 1:
            return frozenset()
        try:
            with self._world.alone(HAS_TABLES) if has_tables else nullcontext():
                message = self.message(), [dict(part.hparams) for part in parts_with_hparams(self._trainer.lightning)]
        except Exception as error:  # a user's hook may need values that only training provides
            if self._world.is_failure(error):
                raise
            if isinstance(error, LoneCollectiveError):
                self._world.standing.close_to_joiners(str(error))
            log.debug("no state to look at before training: %s", error)
            return frozenset()
        found: set[str] = set()
        for i, part in enumerate(message):
            try:
                found |= transfer.needed_names(part, STATE_CLASSES)
            except transfer.TransferError as error:
                if i == 0 and formation is not None and not has_tables:
                    log.warning("run %s: no worker can join: %s", self._world.config.run_id, error)
                    self._world.standing.close_to_joiners(str(error))
                    return frozenset(found)
        if formation is not None and formation.rank == 0:
            self._world.standing.close_to_joiners("")
        return frozenset(found)

    def pack_for_joiners(self) -> None:
        """Pack the state before a round is formed that has joiners. All members of the former round call it together."""
        self._outgoing = self._packed()

    def drop_packed(self) -> None:
        self._outgoing = None

    def give(self, formation: Formation, joining: Sequence[tuple[str, str]]) -> None:
        """Send the state to joiners, each from the worker it is paired with."""
        me = self._world.worker_id
        state = self._outgoing
        # If all are new, all pack it, though one would do: a user's `on_save_checkpoint` may hold a collective.
        are_all_new = not any(formation.hellos.values())
        is_sender = any(me == sender for sender, _ in joining)
        if state is None and joining and (are_all_new or is_sender):
            state = self._packed(is_sent=is_sender, is_alone=not are_all_new)
        for sender, worker in joining:
            if me == sender:
                transfer.send(state, formation.rank_of(worker))
            elif me == worker:
                self.restore(self._received(formation.rank_of(sender)), enters_epoch=True, joins=True)

    def spread(self, source: int) -> None:
        """Bring the state of one member of the first round to all others.

        Raises:
            RoundEndedError: a worker was lost, and the survivors have met in another round.
        """
        formation = self._position.formation
        assert formation is not None
        # By all workers, though one would do: a user's `on_save_checkpoint` may hold a collective.
        packed = self._packed(is_sent=formation.rank == source) if formation.size > 1 else None
        if self._position.formation is not formation:
            raise RoundEndedError("a worker was lost while the newest checkpoint was being handed on")
        for rank in (rank for rank in range(formation.size) if rank != source):
            if formation.rank == source:
                transfer.send(packed, rank)
            elif formation.rank == rank:
                self.restore(self._received(source), enters_epoch=True)

    def _packed(self, is_sent: bool = True, is_alone: bool = False) -> transfer.Packed:
        """Return the state for a joiner, or the reason why there is none: a state that cannot be sent ends no training worker.

        Args:
            is_sent: whether a worker needs it. Otherwise this worker's state may still lack values that a user's hook needs.
            is_alone: whether other members of the round do not run the hooks now.
        """
        has_tables = self._trainer.elastic_tables is not None
        num_before = self._position.collective
        try:
            with self._world.alone(HAS_TABLES if has_tables else WAS_LOST) if is_alone else nullcontext():
                return transfer.pack(self.message())
        except Exception as error:
            if isinstance(error, LeftOutError) or self._world.is_failure(error):
                raise
            self._position.collective = num_before if is_alone else self._position.collective
            if isinstance(error, LoneCollectiveError) and not has_tables:
                log.warning("run %s: a joiner is turned away: %s", self._world.config.run_id, error)
            elif is_sent:
                log.warning("run %s: no worker can join: %s", self._world.config.run_id, error, exc_info=error)
                self._world.standing.close_to_joiners(f"{type(error).__name__}: {error}")
            return transfer.pack({"refused": f"{type(error).__name__}: {error}"})

    def _received(self, from_rank: int) -> TrainerState:
        """Return the state that another worker's `_packed` has made."""
        message = transfer.receive(from_rank, STATE_CLASSES, self.names)
        if "refused" in message:
            raise StateError(
                f"the others cannot hand over the job's state: {message['refused']}. The job continues without this worker"
            )
        return TrainerState(**message)


# Save the job's checkpoints, and continue from the newest one when no living worker has the state.
#
# etcd has a record of the newest checkpoint. It counts only if it is ahead of the worker that reads the record.

STALE_S = 300.0
"""Age from which a snapshot of sharded tables is given up for a newer checkpoint, although all workers must start again."""


@dataclass(eq=False)
class JobCheckpoints:
    """The job's checkpoints from one worker's point of view."""

    _world: World
    _collectives: ResilientCollectives
    _batches: TrainLoaders
    _trainer: TrainerOfFit
    _position: FitPosition
    _state: JobState
    saved_random: Mapping[str, Any] | None = None  # random generators of a checkpoint that was loaded
    _taken: str = ""  # the user's `ckpt_path` that this worker has recorded

    def __post_init__(self) -> None:
        self._aside = SetAside(self._world, self)

    # --- saving -----------------------------------------------------------------------------------------------------------

    def save(self) -> None:
        """Save a checkpoint where the user keeps them, else in the Trainer's folder. All workers call it between two steps."""
        trainer = self._trainer.lightning
        kept = (str(c.dirpath) for c in self._trainer.callbacks if isinstance(c, ModelCheckpoint) and c.dirpath)
        folder = next(kept, str(trainer.default_root_dir)).rstrip("/")  # may be a URL
        self._position.at_boundary = False  # a loss while it saves must not count as one at a boundary
        try:
            trainer.save_checkpoint(f"{folder}/dlrover-{self._world.config.run_id}.ckpt")
        finally:
            self._position.at_boundary = True

    def save_if_rank_zero_was_lost(self) -> None:
        """Write the last checkpoint of a job that stops if rank 0 was lost before it had recorded one.

        No further round is formed, so the workers take turns in rank order: each waits until those before it have ended.
        """
        former, membership = self._position.formation, self._world.membership
        if former is None or self._trainer.elastic_tables is not None or not self._trainer.lightning.checkpoint_callbacks:
            return
        before = former.round.members[: former.rank]
        with suppress(TimeoutError, EtcdError):  # then both may write the file, which appears only when it is complete
            membership.wait_until_gone(before, self._world.config.wait_timeout_s, "to save the job's last checkpoint")
        with suppress(EtcdError, RecordError):
            record = self._world.records.newest_checkpoint()
            if record is not None and record.global_step >= self._trainer.global_step:
                return
        self._position.formation = Formation(replace(former.round, members=[self._world.worker_id]), {}, rank=0)
        self._trainer.strategy.enter_round(0, 1)
        self.save()

    def remove_checkpoint(self, path: Any) -> None:
        """Remove a file or folder at once, as the Trainer's checkpoint plugin does."""
        self._trainer.strategy.checkpoint_io.remove_checkpoint(path)

    def round_number(self) -> int:
        return self._position.round_number

    def place(self, path: Any) -> Any:
        """Rank 0: return where a checkpoint may be written, see `SetAside.place`."""
        return self._aside.place(path, self._position.round_number) if self._position.has_entered else path

    def may_remove(self, path: Any) -> bool:
        """Rank 0: return whether a checkpoint may be removed, see `SetAside.may_remove`."""
        return not self._position.has_entered or self._aside.may_remove(path)

    def saved(self, path: str, global_step: int) -> None:
        """Rank 0: record a checkpoint, in case no living worker is left."""
        if self._position.rank != 0 or not self._position.has_entered:
            return
        try:
            record = CheckpointRecord(path=self._aside.written(path), global_step=global_step)
            self._world.records.put_checkpoint(record, self._aside.settle)
        except EtcdError as error:
            log.warning("run %s: checkpoint %s could not be recorded: %s", self._world.config.run_id, path, error)

    # --- resuming ---------------------------------------------------------------------------------------------------------

    def unread(self) -> CheckpointRecord | None:
        """The job's newest checkpoint, if it is ahead of this worker."""
        record = self._world.records.newest_checkpoint()
        if record is None or record.global_step <= self._trainer.global_step:
            return None
        if not os.path.isabs(record.path) and "://" not in record.path:  # this job writes no such path
            log.error("run %s: ignored a record of a checkpoint at %r", self._world.config.run_id, record.path)
            return None
        return record

    def take_users_choice(self) -> bool:
        """Let the user's `ckpt_path` replace the job's newest checkpoint, if it is a new choice. Return whether it is.

        Rank 0 of a round without the job's state calls it. A script that begins with the same `ckpt_path` at each start
        continues from the job's newest checkpoint.
        """
        chosen = str(self._trainer.lightning.ckpt_path or "")
        if not chosen or os.path.basename(chosen).startswith("last"):  # "last" means the newest, another file at each start
            return False
        job = self._world.view.job
        if job is None or chosen == job.started_from:
            return bool(chosen) and chosen == self._taken  # the round in which it was taken may have broken
        self._taken = chosen
        self._world.records.update_job(lambda job: replace(job, started_from=chosen))
        record = self.unread()
        if record is not None:
            log.warning(
                "run %s: going back from the job's newest checkpoint %s (step %d) to ckpt_path=%s (step %d)",
                *(self._world.config.run_id, record.path, record.global_step, chosen, self._trainer.global_step),
            )
            self._world.records.put_checkpoint(CheckpointRecord(path=absolute(chosen), global_step=self._trainer.global_step))
        return True

    def restore_random(self) -> None:
        """Let random generators continue from a checkpoint that was loaded, if there is one."""
        saved, self.saved_random = self.saved_random, None
        if saved is not None:
            restore_random(saved, self._trainer.device, (self._batches.batch_number, self._position.rank))

    def resume_together(self) -> None:
        """First round: continue from the job's newest checkpoint if an earlier life of the job has left one.

        Raises:
            WorldError: there is one, but no worker can read it.
        """
        record = self.unread()
        newest = self._collectives.gathered((record.global_step, record.path) if record is not None else None)[0]
        if newest is None:
            return
        record = CheckpointRecord(path=newest[1], global_step=newest[0])
        problems = self._collectives.gathered(unreadable(record.path))
        if all(problems):
            raise WorldError(self._cannot_read(record.path, problems[0]))
        source = problems.index("")
        if self._position.rank == source:
            self._load(record)
        self._state.spread(source)

    def resume_alone(self) -> None:
        """Load the newest checkpoint on the first of the joiners, once all workers with the state are gone.

        Raises:
            WorldError: it cannot be read here. The next worker tries.
        """
        record = self.unread()
        if record is not None:
            if problem := unreadable(record.path):
                raise WorldError(self._cannot_read(record.path, problem))
            self._load(record)

    def resume_with_tables(self, step: int, has_choice: bool) -> None:
        """Continue from the job's or the user's checkpoint if it is newer. Each worker reads its own part of the tables.

        Args:
            has_choice: whether the user's was chosen for this start, so that the job's does not count.
        """
        record = None
        if self._position.rank == 0 and not has_choice:
            record = self._world.records.newest_checkpoint()
        found = [(record.global_step, record.path)] if record is not None and os.path.isdir(record.path) else []
        if self._trainer.strategy.unread_checkpoint is not None:
            found.append(self._trainer.strategy.unread_checkpoint)
        newest, path = self._collectives.gathered(max(found, default=(0, "")))[0]
        if newest > step:
            self._load(CheckpointRecord(path=path, global_step=newest))

    def raise_if_much_newer(self, age_s: float) -> None:
        """Prefer the newest checkpoint to the snapshot that all workers have just returned to, if that is old.

        A new start costs about as much as `STALE_S` of training, so a younger snapshot is used in any case.

        Args:
            age_s: age of the snapshot; rank 0's counts.

        Raises:
            WorldError: the checkpoint is newer. It needs new processes, because a worker inside the loops cannot load it.
        """
        record = None
        if self._position.rank == 0 and age_s > STALE_S:
            with suppress(EtcdError, RecordError):
                record = self.unread()
        found = (record.global_step, record.path) if record is not None and os.path.isdir(record.path) else None
        newest = self._collectives.gathered(found)[0]
        if newest is not None:
            raise WorldError(
                f"run {self._world.config.run_id!r}: the newest snapshot, of step {self._trainer.global_step}, is more "
                f"than {STALE_S:.0f} s old, and the checkpoint {newest[1]} of step {newest[0]} is newer: all workers must "
                "start again, to continue from there"
            )

    def _load(self, record: CheckpointRecord) -> None:
        try:
            checkpoint = load_own_checkpoint(self._trainer.strategy.load_checkpoint, record.path, self._state.names)
        except Exception as error:  # a foreign or broken file may raise anything
            if self._world.is_failure(error):
                raise
            raise WorldError(self._cannot_read(record.path, str(error))) from error
        log.warning("run %s: no living worker has the state; continuing from %s", self._world.config.run_id, record.path)
        resume(self._trainer.lightning, checkpoint, self._trainer.strategy.reruns_epoch_hooks)
        for loader in self._batches.all:
            loader.set_epoch(self._trainer.current_epoch)
        self._batches.recount()
        self._batches.begin_at(self._trainer.num_handed_out)
        self._batches.lead_fetcher()
        self._position.updates = self._trainer.global_step
        self._position.batch = self._batches.batch_number
        self.restore_random()
        self._world.event(FitResumed(record.global_step), f"continued from {record.path} at step {record.global_step}")

    def _cannot_read(self, path: str, problem: str) -> str:
        return (
            f"run {self._world.config.run_id!r}: the newest checkpoint {path} cannot be read here: {problem}. Training "
            "from the beginning would overwrite the job's results: let checkpoints be written where all hosts can read them "
            "(ModelCheckpoint(dirpath=...), a shared folder or a URL), or start a new job under another name"
        )


# Hand the job's state through a host's memory to the agent's next group of workers, see `rdzv/transport/transfer.py`.


@dataclass(eq=False)
class RestartHandoff:
    """Keeps the state for later workers of this host, or continues from that of earlier ones. Not for models with tables."""

    _world: World
    _collectives: ResilientCollectives
    _trainer: TrainerOfFit
    _position: FitPosition
    _state: JobState
    _checkpoints: JobCheckpoints

    def keep(self, values: Sequence[Partial]) -> None:
        """Keep the state in host memory if no worker stays, where the agent is about to start another group of workers.

        Args:
            values: all workers' logged values.
        """
        if self._position.fit > 1 or not any(self._collectives.gathered(self._world.left_state is not None)):
            return
        step = self._trainer.global_step
        try:
            self._world.keep_for_successors(step, transfer.pack({"state": self._state.message(), "values": values}))
        except Exception as error:
            if isinstance(error, LeftOutError) or self._world.is_failure(error):
                raise
            run_id = self._world.config.run_id
            log.error("run %s: the next group of workers cannot continue from step %d: %s", run_id, step, error)

    def resume(self) -> bool:
        """Continue from the state that a former group of workers left in its host's memory, unless a checkpoint is newer.

        All members call it in a round in which no worker has the state. Returns whether they continued from it.
        """
        left, record = self._world.left_state, self._checkpoints.unread()
        mine = left.step() if left is not None else None, record.global_step if record is not None else 0
        said = self._collectives.gathered((mine, self._world.has_finished))
        if any(has_finished for _, has_finished in said):  # workers learn of it at different times
            return False
        found = [each for each, _ in said]
        step, source = transfer.newest([step for step, _ in found])
        if step < max([self._trainer.global_step, *(saved for _, saved in found)]):
            return False
        rank, members, is_failure = self._position.rank, range(self._position.size), self._world.is_failure
        gathered, names = self._collectives.gathered, self._state.names
        if not transfer.resume(left, source, rank, members, self._load, gathered, is_failure, STATE_CLASSES, names):
            return False
        if rank == 0:
            self._world.event(FitResumed(step), f"continued from the state of step {step} in a host's memory")
        self._state.mark_epoch_as_begun()
        return True

    def _load(self, message: Any) -> None:
        self._state.restore(TrainerState(**message["state"]), enters_epoch=True)
        if self._position.rank == 0:
            self._state.add_partials(message["values"])


# Carry the sharded tables of a Trainer's model from round to round, or take it back to a snapshot.
#
# Tables are incomplete after any step that a loss has interrupted, as the lost worker's shards are gone and others may be
# half updated. All workers then go back to the newest complete snapshot. The loops learn of it by an exception, and do the
# batch after the snapshot next.


class RolledBack(Exception):
    """Abandons the work in progress: all workers are back at the newest snapshot, and the batch after it comes next."""


@dataclass(eq=False)
class TableRounds:
    """The tables of a Trainer's model, if it has any, and the snapshots of everything else."""

    _world: World
    _collectives: ResilientCollectives
    _batches: TrainLoaders
    _trainer: TrainerOfFit
    _position: FitPosition
    _steps: TrainingSteps
    _state: JobState
    _checkpoints: JobCheckpoints
    _was_rolled_back: bool = False
    _snapshots_are_readable: bool = False  # until one was read back

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
        is_new: bool = self._collectives.gathered(self._position.rank == 0 and self._checkpoints.take_users_choice())[0]
        if is_new:
            self.elastic.ignore_former_snapshots(formation)
        return is_new

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
        state.restore(TrainerState(**snapshot["state"]), enters_epoch=not formation.hellos.get(self._world.worker_id))
        own = snapshot["values"] if restored.is_own else {"logged": {}, "states": {}}
        restore_partial(self._trainer.results, trainer.lightning_module, own)
        state.add_partials([transfer.loads(other, STATE_CLASSES, state.names)["values"] for other in restored.of_lost])
        state.mark_epoch_as_begun()
        self._steps.forget()
        self._collectives.forget()
        self._position.validation = 0
        self._was_rolled_back = True
        if trainer.validating or trainer.sanity_checking:
            self._trainer.epoch_loop.val_loop._module_mode.restore(trainer.lightning_module)
        trainer.training = True
        torch.set_grad_enabled(True)
        if formation.rank == 0:
            event = StateRolledBack(formation.round.number, restored.batch, undone)
            self._world.event(event, f"round {event.round}: back at batch {restored.batch}, {undone} to do again")
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
        epoch_loop, fetcher = fit_loop.epoch_loop, fit_loop._data_fetcher
        assert fetcher is not None
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
