"""Hand the job's state through a host's memory to the agent's next group of workers, see `rdzv/group/left_state.py`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from lightning_dlrover.live.epoch_metrics import Partial
from lightning_dlrover.live.job_checkpoints import JobCheckpoints
from lightning_dlrover.live.job_state import JobState
from lightning_dlrover.live.ports import Job, Round, TrainerPort
from lightning_dlrover.live.position import FitPosition
from lightning_dlrover.live.state import STATE_CLASSES, TrainerState
from lightning_dlrover.rdzv.group import left_state, transfer
from lightning_dlrover.rdzv.job.events import FitResumed
from lightning_dlrover.rdzv.live.member import LeftOutError

__all__ = ["RestartHandoff"]

log = logging.getLogger(__name__)


class RestartHandoff:
    """Keeps the state for later workers of this host, or continues from that of earlier ones. Not for models with tables."""

    def __init__(
        self, job: Job, round_: Round, trainer: TrainerPort, position: FitPosition, state: JobState, checkpoints: JobCheckpoints
    ) -> None:
        self._job = job
        self._round = round_
        self._trainer = trainer
        self._position = position
        self._state = state
        self._checkpoints = checkpoints

    def keep(self, values: Sequence[Partial]) -> None:
        """Keep the state in host memory if no worker stays, where the agent is about to start another group of workers.

        Args:
            values: all workers' logged values.
        """
        if self._position.fit > 1 or not any(self._round.gathered(self._job.left_state is not None)):
            return
        step = self._trainer.global_step
        try:
            packed = transfer.pack({"state": self._state.message(), "values": values})
            self._job.keep_for_successors(step, packed)
        except Exception as error:
            if isinstance(error, LeftOutError) or self._round.is_failure(error):
                raise
            log.error("run %s: the next group of workers cannot go on from step %d: %s", self._job.config.run_id, step, error)

    def resume(self) -> bool:
        """Continue from the state that a former group of workers left in its host's memory, unless a checkpoint is newer.

        All members call it in a round in which no worker has the state. Returns whether they continued from it.
        """
        left, record = self._job.left_state, self._checkpoints.unread()
        mine = left.step() if left is not None else None, record.global_step if record is not None else 0
        said = self._round.gathered((mine, self._job.has_finished))
        if any(has_finished for _, has_finished in said):  # workers learn of it at different times
            return False
        found = [each for each, _ in said]
        step, source = left_state.newest([step for step, _ in found])
        if step < max([self._trainer.global_step, *(saved for _, saved in found)]):
            return False
        rank, members, is_failure = self._round.rank, range(self._round.size), self._round.is_failure
        gathered, names = self._round.gathered, self._state.names
        if not left_state.resume(left, source, rank, members, self._load, gathered, is_failure, STATE_CLASSES, names):
            return False
        if rank == 0:
            text = f"went on from the state of step {step} in a host's memory"
            self._job.event(FitResumed(step), text)
        self._state.mark_epoch_as_begun()
        return True

    def _load(self, message: Any) -> None:
        self._state.restore(TrainerState(**message["state"]), enters_epoch=True)
        if self._round.rank == 0:
            self._state.add_partials(message["values"])
