"""The state of a Trainer that a job hands to its workers: module, optimizers, loops, callbacks and loggers."""

from __future__ import annotations

import hashlib
import logging
import math
import os
import random
import time
import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn.utils import prune

from lightning_dlrover.checks import different_callbacks, monitoring
from lightning_dlrover.data.lane_plan import Layout
from lightning_dlrover.lightning_compat import PACKAGES, CSVLogger, package_of, submodule
from lightning_dlrover.live import lightning_adapter
from lightning_dlrover.live.data_agreement import are_same_row, described_row
from lightning_dlrover.live.lightning_adapter import description, new_entry
from lightning_dlrover.live.loader import LoaderState
from lightning_dlrover.live.private_api import CALLBACK_CLOCKS, CALLBACK_FIELDS, LOGGER_NAMES, RESTARTS
from lightning_dlrover.rdzv.transport import transfer

if TYPE_CHECKING:
    import lightning as L

    from lightning_dlrover.live.loader import ElasticLoader
    from lightning_dlrover.live.replica import LiveStrategy

log = logging.getLogger(__name__)

# Let the Trainer's loggers continue one run when rank 0 moves from worker to worker.
#
# Only rank 0 logs. A logger names its run at its first use: a version of a folder, or an id that a server assigns. All
# workers receive rank 0's names, so that the next rank 0 continues the same run instead of starting another.

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


def recorded_runs(loggers: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the names of the loggers' runs for the job's record, from which a later life of the job continues them."""
    return [{"kind": run["kind"], **run["names"]} for run in capture_runs(loggers)]


class FormerRuns:
    """Lets one Trainer's loggers continue the runs of an earlier life of the job, all of whose workers were lost.

    A logger whose run the script has named or begun keeps it, and so does one whose kind is not the recorded one. Make this
    object before Lightning uses a logger, or names a checkpoint's folder by it.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._are_free = [
            getattr(each, _naming(each), "") is None and getattr(each, "_experiment", None) is None for each in trainer.loggers
        ]
        self._unplaced = [c for c in trainer.callbacks if is_lightnings(c, "ModelCheckpoint") and c.dirpath is None]

    def resume(self, runs: Sequence[Mapping[str, Any]]) -> None:
        """On rank 0: continue these runs.

        Args:
            runs: see `recorded_runs`; untrusted.
        """
        loggers = self._trainer.loggers
        if [_kind(logger) for logger in loggers] != [run.get("kind") for run in runs]:
            return  # the script has other loggers now
        for logger, is_free, run in zip(loggers, self._are_free, runs, strict=True):
            names = {name: run[name] for name in LOGGER_NAMES.get(_kind(logger), ("_version",)) if name in run}
            if is_free and names and all(map(_is_name, names.values())):
                _resume(logger, names)
        take_over(loggers)
        for callback in self._unplaced:
            if callback.dirpath is not None:  # named by a version that a logger has chosen while it waited to join
                callback.dirpath = None
                with self._trainer.strategy.collectives.alone():
                    callback.setup(self._trainer, self._trainer.lightning_module, "fit")


def _resume(logger: Any, names: dict[str, Any]) -> None:
    before = {name: getattr(logger, name) for name in names}
    adopt_runs([logger], [{"kind": _kind(logger), "names": names}])
    if _kind(logger) == "MLFlowLogger" and (problem := _unknown_to_mlflow(logger)):
        log.warning("MLflow does not have the job's run %s, so another one begins: %s", names.get("_run_id"), problem)
        for name, value in before.items():
            setattr(logger, name, value)


def _naming(logger: object) -> str:
    """Return the attribute that is None until the logger's run has a name."""
    return LOGGER_NAMES.get(_kind(logger), ("_version",))[0]


def _is_name(value: object) -> bool:
    """Return whether a value from the job's record may name a run: the name of a folder, an id or a number."""
    return isinstance(value, int) or (isinstance(value, str) and bool(value) and os.sep not in value and value != os.pardir)


def _unknown_to_mlflow(logger: Any) -> str:
    """Return why the server does not have the logger's run; "" if it has."""
    try:
        logger._mlflow_client.get_run(logger._run_id)
    except Exception as error:  # of MLflow, which may be another server now
        return f"{type(error).__name__}: {error}"
    return ""


def take_over(loggers: Sequence[Any]) -> None:
    """On the new rank 0: open loggers that would drop their rows if they were opened as usual."""
    for logger in loggers:
        if isinstance(logger, CSVLogger) and logger._experiment is None:
            _adopt_csv_log(logger)


def _kind(logger: object) -> str:
    """Return the name of Lightning's class that the logger belongs to, or ""."""
    return next((name for name in LOGGER_NAMES if is_lightnings(logger, name)), "")


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
    return run | {"kind": kind, "names": {name: value for name, value in values.items() if isinstance(value, str | int)}}


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


# The state of a running Trainer as data: everything that a worker needs to continue where the others are.
#
# Lightning's checkpoint is a part of it. A checkpoint is made to start a Trainer again, so it lacks everything that a start
# sets itself: monitored metrics, flags and clocks of the loops, the accumulation factor, private fields of Lightning's
# callbacks, frozen parameters, and parameter groups that were changed while training. `TrainerState` holds both.
#
# Values that the hooks of an epoch's start have set in the user's objects cannot be found as data. A worker that joins
# inside an epoch therefore repeats `on_train_epoch_start`, with the job's epoch, metrics and callback states in place. It
# receives the state afterwards, so anything that a hook has changed and that is part of the state ends as on the other
# workers.
#
# `live/training.py` decides which worker gets the state, and when.

SEED_OF_SCRIPT = "PL_GLOBAL_SEED"
"""Variable in which `seed_everything` keeps its seed."""

_PLAIN = (bool, int, float, str)
_COLLECTIONS = (torch.Tensor, np.ndarray, list, tuple, dict, set, deque)
"""Attributes of modules that may hold what training has found: centres, queues, lists of losses."""


class StateError(Exception):
    """This worker cannot receive the state of the others.

    Not a RuntimeError: these may be collectives that failed with their round, and are repeated.
    """


@dataclass
class LoggedValue:
    """One name that the training step has logged. The workers' lists must be equal when the epoch's values are reduced."""

    key: str
    meta: dict[str, Any]  # Lightning's metadata, without its link to the strategy
    has_reset: bool
    is_synced: bool
    rank_zero_only: bool
    is_tensor: bool = True  # False: an object of torchmetrics, held by the module as `meta["metric_attribute"]`


@dataclass
class RunningState:
    """State of a running Trainer that its checkpoint lacks."""

    should_stop: bool
    accumulate_grad_batches: int
    limits: tuple[int | None, int]  # epochs and steps
    train_reload_epoch: float  # epoch of the training loader's last renewal; -inf: never
    val_reload_epoch: float
    val_age_s: float | None  # seconds since the last validation; None: validation does not follow the clock
    first_loop_iter: bool | None
    metrics: dict[str, dict[str, Any]]  # callback, logged and progress-bar metrics by name
    logged: list[LoggedValue]
    requires_grad: dict[str, bool]  # trainable flag by parameter name
    groups: list[list[list[str]] | None]  # parameter names by optimizer and group; None: not the module's parameters
    schedulers: list[str]  # class name of each
    pruned: dict[str, torch.Tensor]  # mask by parameter name
    callback_fields: dict[str, dict[str, Any]]
    callback_ages_s: dict[str, dict[str, float | None]]
    checkpoint_folders: dict[str, Any]
    monitoring: list[str]  # callbacks that all workers must have, see `checks.monitoring`
    attributes: dict[str, Any]  # public plain attributes of the module and its parts, compared but not restored


@dataclass
class TrainerState:
    """Everything that a joiner needs; its fields travel as plain data and `STATE_CLASSES`."""

    checkpoint: dict[str, Any]
    running: RunningState
    loaders: list[LoaderState]
    torch_seed: int
    python_random: object
    numpy_random: object
    loggers: list[dict[str, Any]]
    counters: dict[str, int] = field(default_factory=dict)  # updates, validations and requests: `handover.py`


STATE_CLASSES: tuple[type, ...] = (Layout, LoaderState, LoggedValue, RunningState)


# --- capture ------------------------------------------------------------------------------------------------------------------


def dump(trainer: L.Trainer, loaders: Sequence[ElasticLoader]) -> TrainerState:
    """Return the state between two batches, without hyperparameters. These may be of any class, and a joiner has its own.

    Runs the hooks of saving: `state_dict` of callbacks and datamodule, `on_save_checkpoint` of callbacks and module.
    """
    checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
    for part in parts_with_hparams(trainer):
        for key in (part.CHECKPOINT_HYPER_PARAMS_KEY, part.CHECKPOINT_HYPER_PARAMS_NAME, part.CHECKPOINT_HYPER_PARAMS_TYPE):
            checkpoint.pop(key, None)
    running = running_state(trainer)
    if running.pruned:
        # ModelPruning replaces the state by one without masks, which cannot continue the same training.
        checkpoint["state_dict"] = trainer.strategy.lightning_module_state_dict()
    return TrainerState(
        checkpoint=checkpoint,
        running=running,
        loaders=[loader.state() for loader in loaders],
        torch_seed=torch.initial_seed(),
        python_random=random.getstate(),
        numpy_random=np.random.get_state(),
        loggers=capture_runs(trainer.loggers),
    )


def running_state(trainer: L.Trainer) -> RunningState:
    """Return the state that `dump_checkpoint` leaves out."""
    fit_loop, module, connector = trainer.fit_loop, trainer.lightning_module, trainer._logger_connector
    now = time.monotonic()
    validated_at = getattr(trainer, "_last_val_time", None) if lightning_adapter.validates_by_clock(trainer) else None
    return RunningState(
        should_stop=trainer.should_stop,
        accumulate_grad_batches=trainer.accumulate_grad_batches,
        limits=(fit_loop.max_epochs, fit_loop.epoch_loop.max_steps),
        train_reload_epoch=fit_loop._last_train_dl_reload_epoch,
        val_reload_epoch=fit_loop.epoch_loop.val_loop._last_val_dl_reload_epoch,
        val_age_s=None if validated_at is None else now - validated_at,
        first_loop_iter=connector._first_loop_iter,
        metrics={
            "callback": dict(connector._callback_metrics),
            "logged": dict(connector._logged_metrics),
            "progress_bar": dict(connector._progress_bar_metrics),
        },
        logged=[
            LoggedValue(key=key, has_reset=metric.has_reset, **description(metric))
            for key, metric in fit_loop.epoch_loop._results.items()
            if metric.meta.sync.group is None and (metric.is_tensor or metric.meta.metric_attribute)
        ],
        requires_grad={name: parameter.requires_grad for name, parameter in module.named_parameters()},
        groups=_group_names(trainer),
        schedulers=[type(config.scheduler).__name__ for config in trainer.lr_scheduler_configs],
        pruned={name.removesuffix("_mask"): mask for name, mask in module.named_buffers() if _is_mask(module, name)},
        callback_fields={
            key: {name: getattr(callback, name) for name in names}
            for key, callback, names in _fields_of_callbacks(trainer, CALLBACK_FIELDS)
        },
        callback_ages_s={
            key: {name: None if (at := getattr(callback, name)) is None else now - at for name in names}
            for key, callback, names in _fields_of_callbacks(trainer, CALLBACK_CLOCKS)
        },
        checkpoint_folders={c.state_key: c.dirpath for c in _callbacks(trainer) if is_lightnings(c, "ModelCheckpoint")},
        monitoring=monitoring(_callbacks(trainer)),
        attributes=_plain_attributes(module),
    )


def _group_names(trainer: L.Trainer) -> list[list[list[str]] | None]:
    names = {id(parameter): name for name, parameter in trainer.lightning_module.named_parameters()}
    by_optimizer = [
        [[names.get(id(parameter), "") for parameter in group["params"]] for group in optimizer.param_groups]
        for optimizer in trainer.optimizers
    ]
    return [groups if all(map(all, groups)) else None for groups in by_optimizer]


def _is_mask(module: torch.nn.Module, name: str) -> bool:
    path, _, last = name.rpartition(".")
    owner = module.get_submodule(path)
    return last.endswith("_mask") and f"{last.removesuffix('_mask')}_orig" in owner._parameters


def _plain_attributes(module: torch.nn.Module) -> dict[str, Any]:
    """Return attributes that the user's code keeps in the module and its parts, by dotted name.

    Numbers, flags and texts are returned as they are, tensors, arrays and collections as descriptions that can be compared.
    """
    return {
        f"{path}.{name}".lstrip("."): value if isinstance(value, _PLAIN) else [type(value).__name__, described_row(value)]
        for path, part in module.named_modules()
        if not type(part).__module__.startswith(("torch.", "torchmetrics.", "torchrec."))
        for name, value in vars(part).items()
        if isinstance(value, _PLAIN + _COLLECTIONS) and not name.startswith("_") and name != "training"
    }


# --- restore ------------------------------------------------------------------------------------------------------------------


def restore(
    trainer: L.Trainer,
    strategy: LiveStrategy,
    loaders: Sequence[ElasticLoader],
    state: TrainerState,
    place: tuple[int, int],
    *,
    enters_epoch: bool = False,
    joins: bool = False,
) -> None:
    """Bring this worker to another one's state, between two batches.

    Args:
        place: batch and global rank, the inputs of this worker's torch seed. No two workers may draw the same dropout masks.
        enters_epoch: whether the state's epoch is new to this worker, which then runs the hooks of the epoch's start first.
        joins: whether others train with this state now. A state of an earlier life of the job may have had other limits.

    Raises:
        StateError: this script's Trainer cannot be turned into that of the others.
    """
    if joins and (
        problem := different_callbacks(monitoring(_callbacks(trainer)), state.running.monitoring, "this worker", "the others")
    ):
        raise StateError(f"{problem}. The job continues without this worker")
    sizes = [loader.global_batch_size for loader in loaders if loader.iterable is None]
    for loader, loader_state in zip(loaders, state.loaders, strict=True):
        loader.load_state(loader_state)
    has_other_length = sizes != [loader.global_batch_size for loader in loaders if loader.iterable is None]
    if has_other_length or any(loader.order.grows for loader in loaders):
        lightning_adapter.recount_batches(trainer)  # hooks look at the number of batches
    for part in parts_with_hparams(trainer):
        if part.hparams:
            state.checkpoint[part.CHECKPOINT_HYPER_PARAMS_KEY] = dict(part.hparams)
    for callback in _callbacks(trainer):
        if is_lightnings(callback, "ModelCheckpoint") and callback.state_key in state.running.checkpoint_folders:
            # While alone, it chose another folder. Because of it, it would refuse the others' best scores.
            callback.dirpath = state.running.checkpoint_folders[callback.state_key]
    if enters_epoch and strategy.reruns_epoch_hooks:
        _restore_loops(trainer, state.checkpoint)
        _set_metrics(trainer, state.running)
        trainer.accumulate_grad_batches = state.running.accumulate_grad_batches
        run_epoch_start_hooks(trainer)
    _prune(trainer.lightning_module, state.running.pruned)
    if strategy.elastic_tables is None:
        _set_groups(trainer, state.running.groups, state.checkpoint["optimizer_states"])
    schedulers = [type(config.scheduler).__name__ for config in trainer.lr_scheduler_configs]
    if schedulers != state.running.schedulers:
        raise StateError(
            f"the others' learning-rate schedulers are {state.running.schedulers}, this worker's are {schedulers}: they were "
            "changed while training by a hook other than on_train_epoch_start; change them there, or in configure_optimizers"
        )
    _restore_checkpoint(trainer, state.checkpoint)
    adopt_running_state(trainer, state.running)
    if joins:
        trainer.fit_loop.max_epochs, trainer.fit_loop.epoch_loop.max_steps = state.running.limits
    random.setstate(state.python_random)  # type: ignore[arg-type]
    np.random.set_state(state.numpy_random)  # type: ignore[arg-type]
    seed_for(state.torch_seed, place)
    adopt_runs(trainer.loggers, state.loggers)
    if enters_epoch:
        _warn_of_attributes(trainer.lightning_module, state.running.attributes)


def seed_for(torch_seed: int, place: tuple[int, int]) -> None:
    """Seed torch's generators, of all devices, from the job's seed for one batch and global rank."""
    digest = hashlib.sha256(f"{torch_seed}/{place[0]}/{place[1]}".encode()).digest()
    torch.manual_seed(int.from_bytes(digest[:7], "big"))


def random_state(device: torch.device) -> dict[str, Any]:
    """Return the state of all random generators for a checkpoint, as plain data, and the seed that they began with."""
    name, keys, *rest = np.random.get_state()
    on_device = {"device": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {}
    return {
        "seed": os.environ.get(SEED_OF_SCRIPT, ""),
        "python": random.getstate(),
        "numpy": [str(name), np.asarray(keys).tolist(), *rest],
        "torch": torch.get_rng_state(),
        **on_device,
    }


def restore_random(saved: Mapping[str, Any], device: torch.device, place: tuple[int, int]) -> None:
    """Let random generators continue from a checkpoint, unless the script begins with another seed now.

    Args:
        saved: `random_state` of rank 0 when the checkpoint was saved.
        place: batch and global rank. Only rank 0 continues; no two workers may draw the same dropout masks.
    """
    if saved["seed"] != os.environ.get(SEED_OF_SCRIPT, ""):
        return
    random.setstate(saved["python"])
    name, keys, *rest = saved["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(saved["torch"].cpu())
    if place[1] != 0:
        seed_for(torch.initial_seed(), place)
    elif device.type == "cuda" and "device" in saved:
        torch.cuda.set_rng_state(saved["device"].cpu(), device)


def resume(trainer: L.Trainer, checkpoint: dict[str, Any], reruns_hooks: bool = True) -> None:
    """Continue from a checkpoint, in a Trainer that has just begun its first epoch and not yet fetched a batch.

    After a checkpoint from an epoch's end, training continues at the start of the next epoch.
    """
    begins_epoch = _restore_loops(trainer, checkpoint)
    if reruns_hooks and not begins_epoch:
        run_epoch_start_hooks(trainer)
    if saved := checkpoint.get("dlrover", {}).get("parameters"):
        _set_trained_parameters(trainer, checkpoint, saved)
    _restore_checkpoint(trainer, checkpoint)
    _begin_next_epoch_if_ended(trainer)
    if reruns_hooks and begins_epoch:  # what they change is not in the checkpoint
        run_epoch_start_hooks(trainer)


def trained_parameters(trainer: L.Trainer) -> dict[str, Any]:
    """Return names of the parameters in each group and of those that are trained, for a checkpoint."""
    trained = [name for name, parameter in trainer.lightning_module.named_parameters() if parameter.requires_grad]
    return {"groups": _group_names(trainer), "trained": trained}


def _restore_checkpoint(trainer: L.Trainer, checkpoint: dict[str, Any]) -> None:
    """Restore datamodule, model, callbacks and training state from a checkpoint in memory."""
    connector = trainer._checkpoint_connector
    connector._loaded_checkpoint = checkpoint
    connector.restore_datamodule()
    connector.restore_model()
    connector.restore_callbacks()
    connector.restore_training_state()
    connector._loaded_checkpoint = {}
    _continue_loops(trainer)


def run_epoch_start_hooks(trainer: L.Trainer) -> None:
    """Run `on_train_epoch_start` of all callbacks and the module for the loops' current epoch.

    The other workers do not run it, so the strategy's collectives return here as on a single device.
    """
    strategy: Any = trainer.strategy
    call = submodule(package_of(trainer), "trainer.call")
    with strategy.collectives.alone():
        call._call_callback_hooks(trainer, "on_train_epoch_start")
        call._call_lightning_module_hook(trainer, "on_train_epoch_start")


def _restore_loops(trainer: L.Trainer, checkpoint: dict[str, Any]) -> bool:
    """Restore epoch, step and callbacks alone, which hooks look at. Weights and optimizers follow.

    Returns:
        Whether the next epoch begins.
    """
    part = {"loops": checkpoint["loops"], "callbacks": checkpoint.get("callbacks", {})}
    connector = trainer._checkpoint_connector
    connector._loaded_checkpoint = part
    connector.restore_loops()
    connector._loaded_checkpoint = {}
    submodule(package_of(trainer), "trainer.call")._call_callbacks_load_state_dict(trainer, part)
    _continue_loops(trainer)
    return _begin_next_epoch_if_ended(trainer)


def _begin_next_epoch_if_ended(trainer: L.Trainer) -> bool:
    fit_loop = trainer.fit_loop
    epochs: Any = fit_loop.epoch_progress.current
    epoch_loop = fit_loop.epoch_loop
    steps, max_steps = epoch_loop.global_step, epoch_loop.max_steps
    is_last = fit_loop.max_epochs not in (None, -1) and epochs.processed >= fit_loop.max_epochs
    if epochs.processed < epochs.ready or is_last or (max_steps != -1 and steps >= max_steps):
        return False
    epochs.completed = epochs.processed
    epochs.ready += 1
    epochs.started += 1
    epoch_loop.batch_progress.reset_on_run()
    epoch_loop.scheduler_progress.reset_on_run()
    epoch_loop.automatic_optimization.optim_progress.reset_on_run()
    epoch_loop.val_loop.batch_progress.reset_on_run()
    return True


def _continue_loops(trainer: L.Trainer) -> None:
    """Let the loops continue where the others are. Lightning's own restart would repeat hooks and validation."""
    fit_loop = trainer.fit_loop
    epoch_loop = fit_loop.epoch_loop
    loops = fit_loop, epoch_loop, epoch_loop.val_loop, epoch_loop.automatic_optimization, epoch_loop.manual_optimization
    # The parameter groups of these callbacks exist already.
    finetuning = (callback for callback in _callbacks(trainer) if is_lightnings(callback, "BaseFinetuning"))
    for each in (*loops, *finetuning):
        for flag in RESTARTS:
            if hasattr(each, flag):
                setattr(each, flag, False)


def adopt_running_state(trainer: L.Trainer, running: RunningState) -> None:
    """Set the values that another worker's `running_state` returned."""
    now = time.monotonic()
    trainer.should_stop = running.should_stop
    trainer.accumulate_grad_batches = running.accumulate_grad_batches
    trainer.fit_loop._last_train_dl_reload_epoch = running.train_reload_epoch
    trainer.fit_loop.epoch_loop.val_loop._last_val_dl_reload_epoch = running.val_reload_epoch
    if running.val_age_s is not None and lightning_adapter.validates_by_clock(trainer):
        trainer._last_val_time = now - running.val_age_s  # type: ignore[attr-defined]
    trainer._logger_connector._first_loop_iter = running.first_loop_iter
    _set_metrics(trainer, running)
    trainer.fit_loop.epoch_loop._results.clear()  # drops values from hooks that this worker ran while it was alone
    for logged in running.logged:
        _adopt_logged_value(trainer, logged)
    parameters = dict(trainer.lightning_module.named_parameters())
    for name, requires_grad in running.requires_grad.items():
        if name in parameters and parameters[name].requires_grad != requires_grad:
            parameters[name].requires_grad_(requires_grad)
    for key, callback, names in _fields_of_callbacks(trainer, CALLBACK_FIELDS):
        for name in names:
            if name in running.callback_fields.get(key, {}):
                setattr(callback, name, running.callback_fields[key][name])
    for key, callback, names in _fields_of_callbacks(trainer, CALLBACK_CLOCKS):
        for name in names:
            age_s = running.callback_ages_s.get(key, {}).get(name)
            setattr(callback, name, None if age_s is None else now - age_s)
    for timer in (callback for callback in _callbacks(trainer) if is_lightnings(callback, "Timer")):
        # Its state holds the time until now, so the time that this worker has waited alone does not count.
        timer._start_time.update({stage: now for stage, began in timer._start_time.items() if stage == "train" and began})


def _set_metrics(trainer: L.Trainer, running: RunningState) -> None:
    connector, device = trainer._logger_connector, trainer.strategy.root_device

    def here(kind: str) -> dict[str, Any]:
        return {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in running.metrics[kind].items()}

    connector._callback_metrics, connector._logged_metrics = here("callback"), here("logged")
    connector._progress_bar_metrics = here("progress_bar")


def _adopt_logged_value(trainer: L.Trainer, logged: LoggedValue) -> None:
    """Make an entry, still without a value, for a name that the others have logged before this worker came."""
    try:
        metric = new_entry(trainer, logged.meta, logged.is_tensor, logged.is_synced, logged.rank_zero_only)
    except AttributeError as error:
        raise StateError(
            f"the others log the metric {logged.key!r} from the module's attribute {logged.meta['metric_attribute']!r}, "
            "which this worker's module does not have; create metrics in __init__ or setup"
        ) from error
    metric.has_reset = logged.has_reset
    trainer.fit_loop.epoch_loop._results[logged.key] = metric


def _prune(module: torch.nn.Module, pruned: Mapping[str, torch.Tensor]) -> None:
    """Give masks to the parameters that the others have pruned. Values follow with the state dict."""
    for name, mask in pruned.items():
        path, _, parameter = name.rpartition(".")
        owner = module.get_submodule(path)
        if f"{parameter}_orig" not in owner._parameters:
            prune.custom_from_mask(owner, parameter, mask.to(next(module.parameters()).device))  # type: ignore[no-untyped-call]


def _set_trained_parameters(trainer: L.Trainer, checkpoint: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Form the parameter groups that a checkpoint's optimizers had, and train the same parameters.

    Args:
        saved: `trained_parameters` when the checkpoint was saved.
    """
    _set_groups(trainer, saved["groups"], checkpoint["optimizer_states"])
    trained = {*saved["trained"]}
    for name, parameter in trainer.lightning_module.named_parameters():
        parameter.requires_grad_(name in trained)


def _set_groups(trainer: L.Trainer, theirs: Sequence[list[list[str]] | None], states: Sequence[Mapping[str, Any]]) -> None:
    """Form the others' parameter groups, which fine-tuning changes while training.

    Args:
        theirs: see `RunningState.groups`.
        states: the others' state of each optimizer.
    """
    parameters = dict(trainer.lightning_module.named_parameters())
    mine = _group_names(trainer)
    for i, (optimizer, groups) in enumerate(zip(trainer.optimizers, theirs, strict=True)):
        if groups is None or groups == mine[i]:
            continue
        if missing := [name for group in groups for name in group if name not in parameters]:
            raise StateError(
                f"optimizer {i} of the other workers trains {missing[:3]}, which this worker's module does not have: "
                "parameters that are created while training cannot be handed over"
            )
        saved = states[i]["param_groups"]
        optimizer.param_groups[:] = [
            {**{key: value for key, value in options.items() if key != "params"}, "params": [parameters[n] for n in names]}
            for options, names in zip(saved, groups, strict=True)
        ]


def _warn_of_attributes(module: torch.nn.Module, theirs: Mapping[str, Any]) -> None:
    mine = _plain_attributes(module)
    changed = [_difference(k, theirs[k], mine[k]) for k in theirs if k in mine and not _equal(theirs[k], mine[k])]
    if changed:
        log.warning(
            "the model's attributes %s differ from the other workers'. Training has changed them and no checkpoint holds them. "
            "If they matter, register them as buffers, or keep them in on_save_checkpoint and on_load_checkpoint",
            ", ".join(changed[:8]) + (f" and {len(changed) - 8} more" if len(changed) > 8 else ""),
        )


def _difference(name: str, theirs: Any, mine: Any) -> str:
    if isinstance(theirs, list) and isinstance(mine, list):
        return f"{name} (a {theirs[0]})"
    there, here = (f"a {each[0]}" if isinstance(each, list) else repr(each) for each in (theirs, mine))
    return f"{name} ({there} there, {here} here)"


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, list) and isinstance(other, list):
        (kind, content), (other_kind, other_content) = one, other
        unknown = content is None or other_content is None
        return kind == other_kind and (unknown or are_same_row(content, other_content))
    return bool(one == other) or (isinstance(one, float) and isinstance(other, float) and math.isnan(one) and math.isnan(other))


# --- access to the Trainer's parts --------------------------------------------------------------------------------------------


def parts_with_hparams(trainer: L.Trainer) -> list[Any]:
    """Return module and datamodule. Both may have hyperparameters, of any class."""
    return [part for part in (trainer.lightning_module, getattr(trainer, "datamodule", None)) if part is not None]


def is_lightnings(thing: object, name: str) -> bool:
    """Return whether a callback or logger is of Lightning's class of that name, from either of its two packages."""
    return any(kind.__name__ == name and kind.__module__.startswith(PACKAGES) for kind in type(thing).__mro__)


def _callbacks(trainer: L.Trainer) -> list[Any]:
    return trainer.callbacks  # type: ignore[attr-defined, no-any-return]  # Lightning does not declare them


def _fields_of_callbacks(trainer: L.Trainer, table: Mapping[str, tuple[str, ...]]) -> list[tuple[str, Any, tuple[str, ...]]]:
    """Return key, callback and field names. Scripts make the same callbacks in the same order."""
    return [
        (f"{i}/{kind}", callback, names)
        for i, callback in enumerate(_callbacks(trainer))
        for kind, names in table.items()
        if is_lightnings(callback, kind)
    ]
