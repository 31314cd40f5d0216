"""Pack the job's state for other workers, and take theirs over.

A joiner gets the state from a worker of the former round, see `state.py` for its contents. A state that cannot be packed or
sent turns the joiner away and ends no training worker.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

from lightning_dlrover.live.epoch_metrics import Partial, add_partial, partial_values, reset_metrics
from lightning_dlrover.live.ports import Batches, Job, Round, TrainerPort
from lightning_dlrover.live.position import FitPosition
from lightning_dlrover.live.sequence_order import UNKNOWN
from lightning_dlrover.live.state import STATE_CLASSES, StateError, TrainerState, dump, parts_with_hparams, restore
from lightning_dlrover.live.validation import Validation
from lightning_dlrover.live.votes import Votes
from lightning_dlrover.rdzv.group import transfer
from lightning_dlrover.rdzv.group.meeting import LoneCollectiveError
from lightning_dlrover.rdzv.live.member import Formation, LeftOutError, RoundEndedError

__all__ = ["JobState"]

log = logging.getLogger(__name__)

WAS_LOST = (
    "only this worker captures the state for a joiner now, because a worker was lost while the joiner was admitted. "
    "The next joiner is admitted, unless that happens again"
)
HAS_TABLES = (
    "with sharded tables only one worker captures the state for a joiner, so its hooks can run no collective. Run it in "
    "another hook, such as on_train_batch_end, and keep the result"
)
"""Reasons why a collective in `on_save_checkpoint`, or in a `state_dict`, is refused."""


class JobState:
    """The job's state as this worker has it, without sharded tables."""

    def __init__(
        self,
        job: Job,
        round_: Round,
        batches: Batches,
        trainer: TrainerPort,
        position: FitPosition,
        validation: Validation,
        votes: Votes,
    ) -> None:
        self._job = job
        self._round = round_
        self._batches = batches
        self._trainer = trainer
        self._position = position
        self._validation = validation
        self._votes = votes
        self._outgoing: transfer.Packed | None = None  # state for the joiners of the round that is being formed
        self.names: frozenset[str] = frozenset()  # classes that this script keeps in checkpoints

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
        batches_per_epoch = len(loaders.first) if loaders.first.sequence is None else UNKNOWN
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
        return partial_values(self._results, self._trainer.module, with_large)

    def add_partials(self, parts: Sequence[Partial]) -> None:
        """Count other workers' values as this worker's own."""
        for part in parts:
            add_partial(self._results, self._trainer.module, part)

    def mark_epoch_as_begun(self) -> None:
        """Keep Lightning from dropping received values.

        It drops those logged before an epoch's first batch, and mistakes a new process's first batch for that one.
        """
        connector = self._trainer.lightning._logger_connector
        connector._first_loop_iter = False if self._batches.first.cursor else None

    @property
    def _results(self) -> Any:
        return self._trainer.results

    # --- joiners --------------------------------------------------------------------------------------------------------------

    def find_names(self) -> None:
        """Find the classes and functions in this script's checkpoints. Detect early whether any worker can join at all."""
        self.names = self._names_in_own_state()

    def _names_in_own_state(self) -> frozenset[str]:
        formation, has_tables = self._round.formation, self._trainer.elastic_tables is not None
        if self._job.config.max_workers == 1:
            return frozenset()
        try:
            with self._round.alone(HAS_TABLES) if has_tables else nullcontext():
                message = self.message(), [dict(part.hparams) for part in parts_with_hparams(self._trainer.lightning)]
        except Exception as error:  # a user's hook may need values that only training provides
            if self._round.is_failure(error):
                raise
            if isinstance(error, LoneCollectiveError):
                self._job.standing.close_to_joiners(str(error))
            log.debug("no state to look at before training: %s", error)
            return frozenset()
        found: set[str] = set()
        for i, part in enumerate(message):
            try:
                found |= transfer.needed_names(part, STATE_CLASSES)
            except transfer.TransferError as error:
                if i == 0 and formation is not None and not has_tables:
                    log.warning("run %s: no worker can join: %s", self._job.config.run_id, error)
                    self._job.standing.close_to_joiners(str(error))
                    return frozenset(found)
        if formation is not None and formation.rank == 0:
            self._job.standing.close_to_joiners("")
        return frozenset(found)

    def pack_for_joiners(self) -> None:
        """Pack the state before a round is formed that has joiners. All members of the former round call it together."""
        self._outgoing = self._packed()

    def drop_packed(self) -> None:
        self._outgoing = None

    def give(self, formation: Formation, joining: Sequence[tuple[str, str]]) -> None:
        """Send the state to joiners, each from the worker it is paired with."""
        me = self._job.worker_id
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
            RoundEndedError: a worker was lost meanwhile, and the survivors have met in another round.
        """
        formation = self._round.formation
        assert formation is not None
        # By all workers, though one would do: a user's `on_save_checkpoint` may hold a collective.
        packed = self._packed(is_sent=formation.rank == source) if formation.size > 1 else None
        if self._round.formation is not formation:
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
            with self._round.alone(HAS_TABLES if has_tables else WAS_LOST) if is_alone else nullcontext():
                return transfer.pack(self.message())
        except Exception as error:
            if isinstance(error, LeftOutError) or self._round.is_failure(error):
                raise
            self._position.collective = num_before if is_alone else self._position.collective
            if isinstance(error, LoneCollectiveError) and not has_tables:
                log.warning("run %s: a joiner is turned away: %s", self._job.config.run_id, error)
            elif is_sent:
                log.warning("run %s: no worker can join: %s", self._job.config.run_id, error, exc_info=error)
                self._job.standing.close_to_joiners(f"{type(error).__name__}: {error}")
            return transfer.pack({"refused": f"{type(error).__name__}: {error}"})

    def _received(self, from_rank: int) -> TrainerState:
        """Return the state that another worker's `_packed` has made."""
        message = transfer.receive(from_rank, STATE_CLASSES, self.names)
        if "refused" in message:
            raise StateError(
                f"the others cannot hand over the job's state: {message['refused']}. The job goes on without this worker"
            )
        return TrainerState(**message)
