"""Let the Trainer's loggers continue one run when rank 0 moves from worker to worker.

Only rank 0 logs. A logger names its run at its first use: a version of a folder, or an id that a server assigns. All workers
receive rank 0's names, so that the next rank 0 continues the same run instead of starting another.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning_dlrover.live.listed_names import LOGGER_NAMES
from lightning_dlrover.packages import PACKAGES, CSVLogger
from lightning_dlrover.rdzv.group import transfer

__all__ = ["adopt_runs", "begin", "capture_runs", "take_over"]

log = logging.getLogger(__name__)

_NAMED_BY_SERVERS = ("WandbLogger", "MLFlowLogger", "CometLogger", "LitLogger")


def begin(loggers: Sequence[Any]) -> None:
    """On rank 0: start the runs that get their names only at the start, so that `capture_runs` can return these."""
    for logger in loggers:
        if _kind(logger) in _NAMED_BY_SERVERS:
            _ = logger.experiment


def capture_runs(loggers: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the names of the loggers' runs as plain data, and the state of loggers with a `state_dict`."""
    return [_captured(logger) for logger in loggers]


def adopt_runs(loggers: Sequence[Any], runs: Sequence[dict[str, Any]]) -> None:
    """On a worker that does not log: continue these runs, should it ever become rank 0."""
    if [_kind(logger) for logger in loggers] != [run["kind"] for run in runs]:
        return  # the script logs on one worker only
    for logger, run in zip(loggers, runs, strict=True):
        if "state" in run:
            logger.load_state_dict(run["state"])
        names = run["names"]
        if _kind(logger) == "CometLogger" and names.get("_experiment_key") != getattr(logger, "_experiment_key", None):
            _leave_comet(logger)
        for name, value in names.items():
            setattr(logger, name, value)
        if _kind(logger) == "WandbLogger" and names.get("_id"):
            arguments: dict[str, Any] = logger._wandb_init
            arguments.update(id=names["_id"])
            arguments.setdefault("resume", "allow")


def take_over(loggers: Sequence[Any]) -> None:
    """On the new rank 0: open loggers that would start anew if they were opened as usual."""
    for logger in loggers:
        if isinstance(logger, CSVLogger) and logger._experiment is None:
            _adopt_csv_log(logger)


def _kind(logger: object) -> str:
    """Return the name of Lightning's class that the logger belongs to, or ""."""
    for cls in type(logger).__mro__:
        if cls.__name__ in LOGGER_NAMES and cls.__module__.startswith(PACKAGES):
            return cls.__name__
    return ""


def _captured(logger: Any) -> dict[str, Any]:
    run: dict[str, Any] = {}
    if callable(getattr(logger, "state_dict", None)) and callable(getattr(logger, "load_state_dict", None)):
        state = logger.state_dict()
        try:
            transfer.loads(transfer.dumps(state))
            run["state"] = state
        except transfer.TransferError as error:
            log.warning("the state of %s stays on this worker: %s", type(logger).__name__, error)
    kind = _kind(logger)
    names = LOGGER_NAMES.get(kind, ("_version",))
    values = {name: getattr(logger, name) for name in names if hasattr(logger, name)}
    for name in {"_version", "_id"} & values.keys():
        values[name] = logger.version  # some loggers choose it at the first access
    run["kind"] = kind
    run["names"] = {name: value for name, value in values.items() if isinstance(value, str | int)}
    return run


def _leave_comet(logger: Any) -> None:
    """End the experiment that Comet's logger started in its constructor, where every worker is rank 0 of its own agent."""
    experiment, logger._experiment = logger._experiment, None
    if experiment is not None:
        with suppress(Exception):  # its remains at the server are empty
            experiment.end()


def _adopt_csv_log(logger: CSVLogger) -> None:
    """Open another worker's metrics.csv for appending; opening it the usual way would delete its rows."""
    file = Path(logger.log_dir) / "metrics.csv"
    if not file.exists():
        return
    content = file.read_bytes()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*Previous log files in this directory will be deleted")
        writer = logger.experiment
    file.write_bytes(content)
    header = content.decode().splitlines()[:1]
    writer.metrics_keys = header[0].split(",") if header else []
