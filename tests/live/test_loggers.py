"""Properties of rank 0's loggers that workers receive."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytorch_lightning
from lightning.pytorch.loggers import CSVLogger, Logger

from lightning_dlrover.live import loggers
from lightning_dlrover.live.loggers import _leave_comet


class Own(Logger):
    """A user's logger."""

    def __init__(self) -> None:
        self.run = ""

    name = version = "own"

    def log_metrics(self, metrics: Any, step: Any = None) -> None: ...

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {"run": self.run}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.run = state["run"]


def test_next_version_is_rank_0s(tmp_path: Path) -> None:
    first, other = CSVLogger(tmp_path), pytorch_lightning.loggers.CSVLogger(tmp_path)
    runs = loggers.capture([first])
    (tmp_path / "lightning_logs" / "version_0").mkdir(parents=True)
    loggers.adopt([other], runs)
    assert other.version == first.version == 0


def test_logger_of_the_users_own_gets_its_state() -> None:
    first, other = Own(), Own()
    first.run = "a"
    loggers.adopt([other], loggers.capture([first]))
    assert other.run == "a"


def test_experiment_that_comet_starts_too_early_is_ended() -> None:
    ended: list[bool] = []
    logger = SimpleNamespace(_experiment=SimpleNamespace(end=lambda: ended.append(True)))
    _leave_comet(logger)
    assert ended == [True]
    assert logger._experiment is None
