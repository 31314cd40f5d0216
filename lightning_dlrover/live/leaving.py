"""End a worker that the job no longer needs, without side effects on the job that goes on."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NoReturn

from lightning_dlrover.live.ports import Job, TrainerPort
from lightning_dlrover.live.position import FitPosition
from lightning_dlrover.packages import CSVLogger, ProgressBar, TensorBoardLogger
from lightning_dlrover.rdzv.live.member import LeftOutError

__all__ = ["Leaving", "leave_quietly"]

log = logging.getLogger(__name__)


class Leaving:
    """This worker's way out of the job."""

    def __init__(self, job: Job, trainer: TrainerPort, position: FitPosition) -> None:
        self._job = job
        self._trainer = trainer
        self._position = position
        self._undo: Callable[[], None] | None = None  # set while Lightning handles this worker's leave
        self.has_left = False

    def leave(self, left_out: LeftOutError) -> NoReturn:
        """End this process; the others continue without it. None of the user's code after `fit` runs."""
        if self._position.is_finishing and left_out.round.number == 0:
            raise left_out  # others have reached the end, so this worker's script continues, too
        for logger in self._trainer.lightning.loggers:
            logger.save()
        self._undo = leave_quietly(self._trainer.lightning)
        self._position.has_entered = False
        self.has_left = True
        log.info("worker %s leaves: %s", self._job.worker_id, left_out)
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
        A function that undoes it, once Lightning has handled the exception.
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
