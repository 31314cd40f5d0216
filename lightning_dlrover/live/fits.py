"""Begin and end the `fit` calls of a script together with the other workers."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import torch.distributed as dist

from lightning_dlrover.live.position import FitPosition
from lightning_dlrover.live.resilient import ResilientCollectives
from lightning_dlrover.rdzv.group.purpose import Purpose, shown
from lightning_dlrover.rdzv.group.world import World
from lightning_dlrover.rdzv.live.member import RoundEndedError, WorldError
from lightning_dlrover.rdzv.live.rounds import View

if TYPE_CHECKING:
    import lightning as L

    from lightning_dlrover.strategy import DLRoverStrategy

__all__ = ["Fits"]


class Fits:
    """The `fit` calls of one worker's script. All workers run the same script, so their numbers are alike."""

    def __init__(
        self,
        trainer: L.Trainer,
        strategy: DLRoverStrategy,
        world: World,
        position: FitPosition,
        collectives: ResilientCollectives,
    ) -> None:
        self._trainer = trainer
        self._strategy = strategy
        self._world = world
        self._position = position
        self._collectives = collectives

    def begin_later(self) -> None:
        """Continue with the remaining workers before another `fit` of the script sets up.

        A worker may have been lost since the last step. If that happened while all workers met at the end of `fit`, some have
        continued and others have not. They meet here, and those that are behind receive the results that they lack.
        Raises:
            WorldError: no round could be formed.
        """
        position = self._position
        if self._world.num_fits == 0 or position.is_standby:
            return  # this is the first `fit`
        number = self._world.num_fits + 1
        self._world.begin_fit(number)  # no later: a worker lost from here on must not count as finished
        if position.size == 1 or self._strategy.elastic_tables is not None:
            return
        position.has_entered = position.is_between_fits = True
        try:
            self._collectives.exchange(f"the start of fit number {number}", _meet)
        finally:
            position.has_entered = position.is_between_fits = False

    def finish(self) -> None:
        """Mark the end of the training loop. All updates are done, so the job does not change from here on.

        Every worker publishes this before it continues, so that the first one to exit does not count as lost.
        """
        position, trainer = self._position, self._trainer
        if not position.has_entered:
            if position.fit > 1 and position.formation is not None:
                self._world.finish(trainer.global_step, position.fit)  # there was nothing to train
            return
        position.is_finishing = True
        if position.size > 1:
            # A finished job has no more rounds, so no worker may still need one to get its last update.
            try:
                if self._strategy.elastic_tables is None:
                    self._collectives.exchange("the end of training", self._end_together)
                elif self._collectives.attempt(self._end_together) is None:
                    self._await_finish()
            except WorldError:
                if not self._world.has_finished_fit(position.fit):
                    raise
        position.has_entered = position.is_finishing = False
        self._world.finish(trainer.global_step, position.fit)

    def _end_together(self) -> None:
        frame = sys._getframe()
        with self._world.compared(lambda: Purpose("the end of fit", place=shown(frame))):
            dist.barrier()

    def _await_finish(self) -> None:
        """Find out why workers were missing at the end: one has already ended and published that all is done, or one is lost.

        Raises:
            WorldError: it is lost, together with its tables. The loops have ended, so there is nothing to go back to.
        """
        assert self._position.formation is not None
        number, fit = self._position.formation.round.number, self._position.fit

        def look(view: View) -> str | None:
            if self._world.has_finished_fit(fit):
                return "finished"
            if view.job is not None and view.job.is_over:
                return view.job.phase
            newest = view.round
            return "lost" if newest is not None and newest.number > number and not newest.planned else None

        what = "the others to confirm that the job has finished"
        if self._world.membership.wait_for(look, self._world.config.wait_timeout_s, what) != "finished":
            raise WorldError(
                "a worker was lost after the last step, with its part of the tables: all workers have to start again, "
                "from the newest snapshot or checkpoint"
            )


def _meet() -> None:
    if not dist.is_initialized():
        raise RoundEndedError("the round has ended")  # this worker left it at the end of the former `fit`
    dist.barrier()
