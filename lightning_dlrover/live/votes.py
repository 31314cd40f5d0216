"""Agree with the other workers between steps: on stopping, on saving, that learning rates, rows and weights are alike.

Each vote on the round carries numbers. A worker receives the minimum of each over all workers one vote later.
"""

from __future__ import annotations

import logging

from lightning_dlrover.checks.script import different_rates, rates, rates_digest
from lightning_dlrover.live.drift import DriftCheck
from lightning_dlrover.live.kept_values import KeptValues
from lightning_dlrover.live.ports import Batches, Job, Round, TrainerPort
from lightning_dlrover.live.position import FitPosition, Position
from lightning_dlrover.live.sequences import digest, refuse_different_rows
from lightning_dlrover.observe.pulse import NUM_SAID, Pulse
from lightning_dlrover.rdzv.group import transfer

__all__ = ["Votes"]

log = logging.getLogger(__name__)


class Votes:
    """One worker's numbers in the votes, and the actions that follow from the results."""

    def __init__(
        self,
        job: Job,
        round_: Round,
        batches: Batches,
        trainer: TrainerPort,
        position: FitPosition,
        pulse: Pulse,
        kept: KeptValues,
    ) -> None:
        self._job = job
        self._round = round_
        self._batches = batches
        self._trainer = trainer
        self._position = position
        self._kept = kept
        self._pulse = pulse
        self._drift = DriftCheck(job, round_, batches, trainer, position)
        self._wants_stop = False  # `should_stop` was set on this worker and not on all
        self._fit_of_vote = 0  # `fit` of the script at the newest vote's beginning
        self.saved_request = 0  # newest request for a checkpoint that was carried out

    def begin_fit(self) -> None:
        self._drift.begin_fit()
        self._wants_stop = False
        self._position.stopped_at = ""

    def wishes(self) -> list[int]:
        """Return this worker's numbers for a vote that begins."""
        position, formation = self._position, self._round.formation
        assert formation is not None
        self._fit_of_vote = position.fit
        said = self._pulse.say(formation.round.number, position.rank, position.size)
        tables = self._trainer.elastic_tables
        alike = rates_digest(self._trainer.optimizers) ^ digest(self._batches.all) ^ self._drift.ballot()
        request = self._job.records.checkpoint_request()
        mine = [-int(self._kept.has_values), -int(self._wants_stop), alike, -alike, request]
        return [*(tables.wishes() if tables is not None else []), *mine, *said]

    def count(self, step_time_s: float) -> bool:
        """Carry out the result of a vote, if there is one. Return whether a checkpoint was requested.

        Raises:
            UnsupportedScriptError: the workers' learning rates differ, or their weights.
            MembershipError: they have read different rows of an `IterableDataset`.
        """
        wishes, num_said = self._round.wishes, NUM_SAID * self._round.size
        if not wishes:
            return False
        # The first vote may have begun in an earlier fit, with a model that had tables.
        self._round.wishes = wishes[: -num_said - 5] if self._trainer.elastic_tables is not None else []
        if wishes[-num_said - 3] != -wishes[-num_said - 2]:
            self._refuse_different_rates()
            refuse_different_rows(self._batches.all)
            self._drift.examine()
        if wishes[-num_said - 4] and self._fit_of_vote == self._position.fit:  # else the vote began in an earlier fit
            self._wants_stop, self._trainer.lightning.should_stop = False, True
        self._kept.are_needed = bool(wishes[-num_said - 5])
        self._pulse.hear(wishes[-num_said:], step_time_s)
        request = wishes[-num_said - 1]
        is_new = request > self.saved_request
        self.saved_request = max(self.saved_request, request)
        return is_new

    def _refuse_different_rates(self) -> None:
        error = different_rates(transfer.all_gather(rates(self._trainer.optimizers)), self._round.rank)
        if error is not None:
            raise error

    def agree_on_stop(self, phase: str) -> None:
        """Let `trainer.should_stop` end the loops on all workers at one place.

        If all workers have set it, as Lightning's own callbacks do, they stop here. Otherwise the workers without it are a step
        ahead by the time this is noticed, so all stop after the next vote.
        """
        trainer, position = self._trainer.lightning, self._position
        is_alone = not position.has_entered or position.size == 1
        if not trainer.should_stop or is_alone or not trainer.fit_loop._can_stop_early:
            return
        place = f"stop/{position.fit}/{phase}/{position.batch}"
        while (reached := self._round.attempt(self._round.all_reach, place)) is None:
            self._round.recover()
            if self._have_stopped(place):
                reached = (True,)
                break
        if reached[0]:
            position.stopped_at = place
            return
        if not self._wants_stop:
            log.warning("worker %s: trainer.should_stop was not set on all workers; all will stop soon", self._job.worker_id)
        trainer.should_stop, self._wants_stop = False, True

    def _have_stopped(self, place: str) -> bool:
        """Return whether members of the new round found all workers at `place` before the former round broke, and went on."""
        formation = self._round.formation
        assert formation is not None
        positions = (Position.decode(hello) for hello in formation.hellos.values())
        return any(position is not None and position.stopped_at == place for position in positions)
