"""Begin and end the `fit` calls of a script together with the other workers."""

from __future__ import annotations

import sys

import torch.distributed as dist

from lightning_dlrover.live.ports import Job, Round, TrainerPort
from lightning_dlrover.live.position import FitPosition
from lightning_dlrover.rdzv.group import transfer
from lightning_dlrover.rdzv.group.purpose import Purpose, shown
from lightning_dlrover.rdzv.live.member import RoundEndedError, WorldError
from lightning_dlrover.rdzv.live.worker_view import WorkerView

__all__ = ["Fits"]

FAIL_TOGETHER_S = 2.0
"""Seconds to wait for the others to fail at the same place. Meanwhile a worker that fails alone holds up the others."""


class Fits:
    """The `fit` calls of one worker's script. All workers run the same script, so their numbers are alike."""

    def __init__(self, job: Job, round_: Round, trainer: TrainerPort, position: FitPosition) -> None:
        self._job = job
        self._round = round_
        self._trainer = trainer
        self._position = position

    def begin_later(self) -> None:
        """Continue with the remaining workers before another `fit` of the script sets up.

        A worker may have been lost since the last step. If that happened while all workers met at the end of `fit`, some have
        continued and others have not. They meet here, and those that are behind receive the results that they lack.
        Raises:
            WorldError: no round could be formed.
        """
        position = self._position
        if self._job.num_fits == 0 or position.is_standby:
            return  # this is the first `fit`
        number = self._job.num_fits + 1
        self._job.standing.begin_fit(number)  # no later: a worker lost from here on must not count as finished
        if position.size == 1 or self._trainer.elastic_tables is not None:
            return
        position.has_entered = position.is_between_fits = True
        try:
            self._round.exchange(f"the start of fit number {number}", _meet)
        finally:
            position.has_entered = position.is_between_fits = False

    def fail_together(self) -> bool:
        """Return whether all workers have left this `fit` by an error at one place, so that a script that catches it goes on.

        The others need not recover from the loss of this worker then, and all of them run the same code next.
        """
        position = self._position
        if not position.has_entered or self._trainer.elastic_tables is not None or self._round.broken:
            return False
        place = f"error/{position.fit}/{position.batch}/{position.collective}/{position.validation}"
        try:
            together = self._round.all_reach(place, FAIL_TOGETHER_S)
        except WorldError:
            return False
        if together:
            position.has_entered = position.in_step = position.is_redoing = False
            position.validation = 0
        return together

    def end_early(self) -> None:
        """Record the end of a `fit` that an error has ended on all workers, once the script has caught it."""
        self._job.finish(self._trainer.global_step, self._position.fit)

    def finish(self) -> None:
        """Mark the end of the training loop. All updates are done, so the job does not change from here on.

        Every worker publishes this before it continues, so that the first one to exit does not count as lost.
        """
        position, trainer = self._position, self._trainer.lightning
        if not position.has_entered:
            if position.fit > 1 and position.formation is not None:
                self._job.finish(trainer.global_step, position.fit)  # there was nothing to train
            return
        position.is_finishing = True
        if position.size > 1:
            # A finished job has no more rounds, so no worker may still need one to get its last update.
            try:
                if self._trainer.elastic_tables is None:
                    self._round.exchange("the end of training", self._end_together)
                elif self._round.attempt(self._end_together) is None:
                    self._await_finish()
            except WorldError:
                if not self._job.standing.has_finished_fit(position.fit):
                    raise
        position.has_entered = position.is_finishing = False
        self._job.finish(trainer.global_step, position.fit)

    def _end_together(self) -> None:
        frame = sys._getframe()
        with self._round.compared(lambda: Purpose("the end of fit", place=shown(frame))):
            self._round.wait_for_results()  # another worker's last collective may need this one's device until here
            transfer.barrier()

    def _await_finish(self) -> None:
        """Find out why workers were missing at the end: one has already ended and published that all is done, or one is lost.

        Raises:
            WorldError: it is lost, together with its tables. The loops have ended, so there is nothing to go back to.
        """
        formation = self._round.formation
        assert formation is not None
        number, fit = formation.round.number, self._position.fit

        def look(view: WorkerView) -> str | None:
            if self._job.standing.has_finished_fit(fit):
                return "finished"
            if view.job is not None and view.job.is_over:
                return view.job.phase
            newest = view.round
            return "lost" if newest is not None and newest.number > number and not newest.planned else None

        what = "the others to confirm that the job has finished"
        if self._job.membership.wait_for(look, self._job.config.wait_timeout_s, what) != "finished":
            raise WorldError(
                "a worker was lost after the last step, with its part of the tables: all workers have to start again, "
                "from the newest snapshot or checkpoint"
            )


def _meet() -> None:
    if not dist.is_initialized():
        raise RoundEndedError("the round has ended")  # this worker left it at the end of the former `fit`
    transfer.barrier()
