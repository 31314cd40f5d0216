"""Properties of rank 0's loggers that workers receive."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytorch_lightning
from lightning.pytorch.loggers import CSVLogger, Logger

from lightning_dlrover.live import state
from lightning_dlrover.live.state import _adopt_csv_log, _leave_comet


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
    runs = state.capture_runs([first])
    (tmp_path / "lightning_logs" / "version_0").mkdir(parents=True)
    state.adopt_runs([other], runs)
    assert other.version == first.version == 0


def test_logger_of_the_users_own_gets_its_state() -> None:
    first, other = Own(), Own()
    first.run = "a"
    state.adopt_runs([other], state.capture_runs([first]))
    assert other.run == "a"


def test_experiment_that_comet_starts_too_early_is_ended() -> None:
    ended: list[bool] = []
    logger = SimpleNamespace(_experiment=SimpleNamespace(end=lambda: ended.append(True)))
    _leave_comet(logger)
    assert ended == [True]
    assert logger._experiment is None


def test_a_csv_log_taken_over_from_another_worker_keeps_its_rows(tmp_path: Path) -> None:
    former = CSVLogger(tmp_path, name="log", version=0)
    for step in range(3):
        former.log_metrics({"loss": float(step)}, step)
    former.save()
    successor = CSVLogger(tmp_path, name="log", version=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # must not warn, for example that earlier rows will be deleted
        _adopt_csv_log(successor)
    successor.log_metrics({"loss": 3.0}, 3)
    successor.save()
    rows = (Path(successor.log_dir) / "metrics.csv").read_text().splitlines()
    assert rows[0].split(",") == ["loss", "step"]
    assert len(rows) == 5


def test_a_new_column_after_taking_over_a_csv_log_costs_no_rows(tmp_path: Path) -> None:
    former = CSVLogger(tmp_path, name="log", version=0)
    former.log_metrics({"loss": 1.0}, 0)
    former.save()
    successor = CSVLogger(tmp_path, name="log", version=0)
    _adopt_csv_log(successor)
    successor.log_metrics({"loss": 2.0, "val": 0.5}, 1)
    successor.save()
    rows = (Path(successor.log_dir) / "metrics.csv").read_text().splitlines()
    assert len(rows) == 3
    assert "val" in rows[0]


def test_there_is_nothing_to_take_over_where_no_log_was_written(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, name="log", version=0)
    _adopt_csv_log(logger)
    logger.log_metrics({"loss": 1.0}, 0)
    logger.save()
    assert len((Path(logger.log_dir) / "metrics.csv").read_text().splitlines()) == 2
