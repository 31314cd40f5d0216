"""Hand the job's state through a host's memory to the agent's next group of workers, see `rdzv/group/left_state.py`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lightning_dlrover.live.epoch_metrics import Partial
from lightning_dlrover.live.job_checkpoints import JobCheckpoints
from lightning_dlrover.live.job_state import JobState
from lightning_dlrover.live.position import FitPosition
from lightning_dlrover.live.resilient import ResilientCollectives
from lightning_dlrover.live.state import STATE_CLASSES, TrainerState
from lightning_dlrover.rdzv.group import left_state, transfer
from lightning_dlrover.rdzv.group.world import World
from lightning_dlrover.rdzv.job.events import FitResumed
from lightning_dlrover.rdzv.live.member import LeftOutError

if TYPE_CHECKING:
    import lightning as L

__all__ = ["Successors"]

log = logging.getLogger(__name__)


class Successors:
    """Keeps the state for later workers of this host, or continues from that of earlier ones. Not for models with tables."""

    def __init__(
        self,
        trainer: L.Trainer,
        world: World,
        position: FitPosition,
        collectives: ResilientCollectives,
        state: JobState,
        checkpoints: JobCheckpoints,
    ) -> None:
        self._trainer = trainer
        self._world = world
        self._position = position
        self._collectives = collectives
        self._state = state
        self._checkpoints = checkpoints

    def keep(self, values: Sequence[Partial]) -> None:
        """Keep the state in host memory if no worker stays, where the agent is about to start another group of workers.

        Args:
            values: all workers' logged values.
        """
        if self._position.fit > 1 or not any(self._collectives.gathered(self._world.left_state is not None)):
            return
        step = self._trainer.global_step
        try:
            packed = transfer.pack({"state": self._state.message(), "values": values})
            self._world.keep_for_successors(step, packed)
        except Exception as error:
            if isinstance(error, LeftOutError) or self._world.is_failure(error):
                raise
            log.error("run %s: the next group of workers cannot go on from step %d: %s", self._world.config.run_id, step, error)

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
        step, source = left_state.newest([step for step, _ in found])
        if step < max([self._trainer.global_step, *(saved for _, saved in found)]):
            return False
        rank, members, is_failure = self._position.rank, range(self._position.size), self._world.is_failure
        gathered, names = self._collectives.gathered, self._state.names
        if not left_state.resume(left, source, rank, members, self._load, gathered, is_failure, STATE_CLASSES, names):
            return False
        if rank == 0:
            text = f"went on from the state of step {step} in a host's memory"
            self._world.event(FitResumed(step), text)
        self._state.mark_epoch_as_begun()
        return True

    def _load(self, message: Any) -> None:
        self._state.restore(TrainerState(**message["state"]), enters_epoch=True)
        if self._position.rank == 0:
            self._state.add_partials(message["values"])
