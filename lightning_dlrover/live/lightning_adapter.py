"""All use of Lightning's and DDP's private names by a live job, each behind a function of its own."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_dlrover.lightning_compat import package_of, result_module, submodule
from lightning_dlrover.live.private_api import CANDIDATES

if TYPE_CHECKING:
    import lightning as L
    from lightning.pytorch.strategies import DDPStrategy

# Use the private names of Lightning's Trainer, its loops, callbacks and loggers that a live fit depends on.
#
# `private_api.py` lists all private names of Lightning. Those of its strategies are used further below.

if TYPE_CHECKING:
    import lightning as L
    from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop

    EvaluationLoop = _EvaluationLoop
    from lightning.pytorch.loops.fetchers import _DataFetcher

    DataFetcher = _DataFetcher
    from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop

    EpochLoop = _TrainingEpochLoop
    from lightning.pytorch.utilities.combined_loader import CombinedLoader
else:
    DataFetcher = EpochLoop = EvaluationLoop = object


Method = Callable[..., Any]


# --- loops and loaders ------------------------------------------------------------------------------------------------------


def combined_loader(loop: Any) -> CombinedLoader | None:
    """Return the dataloaders of a fit or an evaluation; None before they are set up."""
    combined: CombinedLoader | None = loop._combined_loader
    return combined


def loaders_of_fit(trainer: L.Trainer) -> list[object]:
    """Return the loaders that a `fit` uses now, for training and validation."""
    loops = (trainer.fit_loop, trainer.fit_loop.epoch_loop.val_loop)
    return [loader for loop in loops if (combined := combined_loader(loop)) is not None for loader in combined.flattened]


def recount_batches(trainer: L.Trainer) -> None:
    """Count an epoch's batches anew, after a training loader has got another length, as `FitLoop.setup_data` does."""
    fit_loop = trainer.fit_loop
    combined = fit_loop._combined_loader
    assert combined is not None
    assert combined.limits is not None
    limit = trainer.limit_train_batches
    # Changed in place: the iterator has the same list.
    combined.limits[:] = [
        min(len(loader), limit) if isinstance(limit, int) else int(len(loader) * limit) for loader in combined.flattened
    ]
    fit_loop.max_batches = len(combined)
    if fit_loop._data_fetcher is not None:
        fit_loop._data_fetcher.length = fit_loop.max_batches
    if isinstance(trainer.val_check_interval, float) and not validates_by_clock(trainer):
        trainer.val_check_batch = max(1, int(fit_loop.max_batches * trainer.val_check_interval))


def set_up_validation(trainer: L.Trainer) -> None:
    """Make the validation loaders, as Lightning does when they are first needed, which may be epochs later."""
    val_loop = trainer.fit_loop.epoch_loop.val_loop
    if trainer.val_dataloaders is not None or not trainer.enable_validation:
        return
    reloaded = val_loop._last_val_dl_reload_epoch
    trainer.validating = True
    try:
        val_loop.setup_data()
    finally:
        trainer.training = True
        val_loop._last_val_dl_reload_epoch = reloaded  # they are made again when Lightning would make them


def replace_preparation(trainer: Any, prepare: Callable[[Any], None]) -> None:
    """Replace what runs `prepare_data` of datamodule and module, before they are set up."""
    trainer._data_connector.prepare_data = partial(prepare, trainer)


def preparations(trainer: Any) -> list[tuple[Any, Callable[[], None]]]:
    """Return datamodule and module as far as they have a `prepare_data`, and what runs it as Lightning does."""
    package = package_of(trainer)
    call = submodule(package, "trainer.call")
    is_overridden = submodule(package, "utilities.model_helpers").is_overridden
    parts = (
        (trainer.datamodule, call._call_lightning_datamodule_hook),
        (trainer.lightning_module, call._call_lightning_module_hook),
    )
    return [
        (part, partial(run, trainer, "prepare_data"))
        for part, run in parts
        if part is not None and is_overridden("prepare_data", part)
    ]


def wait_for_preparation(trainer: Any) -> AbstractContextManager[Any]:
    """Return a context at whose end all workers of the round have come to it, however long one of them takes."""
    made: AbstractContextManager[Any] = submodule(package_of(trainer), "trainer.connectors.data_connector")._InfiniteBarrier()
    return made


def surround_requests_of_data(trainer: Any, around: Method) -> None:
    """Replace what asks the user's hooks for loaders, except for predictions; see `surround`."""
    fit_loop = trainer.fit_loop
    for loop in (fit_loop, fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop):
        surround(loop._data_source, "dataloader", around)


def fetcher_of(loop: Any) -> Any:
    """Return the data fetcher of a fit or an evaluation."""
    return loop._data_fetcher


def fetch_nothing_ahead(loop: Any) -> None:
    """Keep a fit's fetcher from fetching a batch ahead, as it does where loaders have no length.

    Call it while the fetcher asks its loaders for iterators.
    """
    if (fetcher := loop._data_fetcher) is not None:
        fetcher.prefetch_batches = 0


def end_with_next_fetch(loop: Any) -> None:
    """Let a fit's fetcher take the batch that it is about to receive for the epoch's last one."""
    fetcher = loop._data_fetcher
    fetcher.length = fetcher.fetched + 1


def fetcher_class(package: str) -> type:
    """Return the base class of the package's data fetchers."""
    base: type = submodule(package, "loops.fetchers")._DataFetcher
    return base


def hands_out_iterator(loop: Any) -> bool:
    """Whether the user's step takes the dataloader's iterator instead of a batch."""
    return type(loop._data_fetcher).__name__ == "_DataLoaderIterDataFetcher"


@contextmanager
def profiled(fetcher: DataFetcher) -> Iterator[None]:
    """Run a fetch inside the Trainer's profiler."""
    fetcher._start_profiler()
    try:
        yield
    finally:
        fetcher._stop_profiler()


def is_accumulating(trainer: L.Trainer) -> bool:
    """Whether the current batch is not the last one of its accumulation window."""
    return bool(trainer.fit_loop._should_accumulate())


def is_batch_unfinished(trainer: L.Trainer) -> bool:
    """Whether a resumed checkpoint was saved in the hooks of a batch's end, before the validation that may be due."""
    progress = trainer.fit_loop.epoch_loop.batch_progress
    current: Any = progress.current
    return bool(current.ready == current.processed == current.completed + 1)


def finish_batch(trainer: L.Trainer) -> None:
    """Do what follows the hooks of a batch's end: validation if it is due, schedulers, counters."""
    epoch_loop = trainer.fit_loop.epoch_loop
    epoch_loop.batch_progress.increment_completed()
    epoch_loop.on_advance_end(fetcher_of(trainer.fit_loop))


def closure(trainer: L.Trainer, kwargs: Any, optimizer: Any, batch_idx: int) -> Callable[[], Any]:
    """Return the forward and backward pass of automatic optimization for one batch."""
    automatic = trainer.fit_loop.epoch_loop.automatic_optimization
    made: Callable[[], Any] = automatic._make_closure(kwargs, optimizer, batch_idx)
    return made


# --- validation -------------------------------------------------------------------------------------------------------------


def validates_by_clock(trainer: L.Trainer) -> bool:
    return getattr(trainer, "_val_check_time_interval", None) is not None


def validation_time(trainer: L.Trainer) -> float | None:
    """Return the clock's reading at the last validation; None if validation does not follow the clock."""
    return getattr(trainer, "_last_val_time", None) if validates_by_clock(trainer) else None


def set_validation_time(trainer: L.Trainer, at: float) -> None:
    trainer._last_val_time = at  # type: ignore[attr-defined]


def reload_epochs(trainer: L.Trainer) -> tuple[float, float]:
    """Return the epochs in which the training and validation loaders were last made anew; -inf: never."""
    fit_loop = trainer.fit_loop
    return fit_loop._last_train_dl_reload_epoch, fit_loop.epoch_loop.val_loop._last_val_dl_reload_epoch


def set_reload_epochs(trainer: L.Trainer, train: float, val: float) -> None:
    trainer.fit_loop._last_train_dl_reload_epoch = train
    val_loop = trainer.fit_loop.epoch_loop.val_loop
    val_loop._last_val_dl_reload_epoch = val


# --- logged values ----------------------------------------------------------------------------------------------------------


def results_of(holder: Any) -> Any:
    """Return the logged values of one loop, or of a Trainer's active loop; None if no loop is active."""
    return holder._results


def new_result(trainer: Any, meta: Mapping[str, Any], is_tensor: bool, is_synced: bool, rank_zero_only: bool) -> Any:
    """Return an entry without a value, as `self.log` makes it."""
    result = result_module(trainer)
    metadata = result._Metadata(**meta)
    metadata.sync = result._Sync(fn=trainer.strategy.reduce, _should=is_synced, rank_zero_only=rank_zero_only)
    return result._ResultMetric(metadata, is_tensor=is_tensor)


def metrics(trainer: L.Trainer) -> dict[str, dict[str, Any]]:
    """Return callback, logged and progress-bar metrics by name."""
    connector = trainer._logger_connector
    return {
        "callback": dict(connector._callback_metrics),
        "logged": dict(connector._logged_metrics),
        "progress_bar": dict(connector._progress_bar_metrics),
    }


def set_metrics(trainer: L.Trainer, by_kind: Mapping[str, dict[str, Any]]) -> None:
    connector = trainer._logger_connector
    connector._callback_metrics = by_kind["callback"]
    connector._logged_metrics = by_kind["logged"]
    connector._progress_bar_metrics = by_kind["progress_bar"]


# --- checkpoints ------------------------------------------------------------------------------------------------------------


def dump_checkpoint(trainer: L.Trainer) -> dict[str, Any]:
    """Return a whole checkpoint, after the hooks of saving have run."""
    return trainer._checkpoint_connector.dump_checkpoint(weights_only=False)


def restore_checkpoint(trainer: L.Trainer, checkpoint: dict[str, Any]) -> None:
    """Restore datamodule, model, callbacks and training state from a checkpoint in memory."""
    connector = trainer._checkpoint_connector
    connector._loaded_checkpoint = checkpoint
    connector.restore_datamodule()
    connector.restore_model()
    connector.restore_callbacks()
    connector.restore_training_state()
    connector._loaded_checkpoint = {}


def restore_loops(trainer: L.Trainer, checkpoint: dict[str, Any]) -> None:
    """Restore epoch and step from a checkpoint in memory."""
    connector = trainer._checkpoint_connector
    connector._loaded_checkpoint = checkpoint
    connector.restore_loops()
    connector._loaded_checkpoint = {}


def load_callback_states(trainer: L.Trainer, checkpoint: dict[str, Any]) -> None:
    submodule(package_of(trainer), "trainer.call")._call_callbacks_load_state_dict(trainer, checkpoint)


def clear_restart_flags(*restarted: Any) -> None:
    """Keep loops, and callbacks with the same flag, from starting again, as after the load of a checkpoint."""
    for each in restarted:
        for flag in ("_restarting", "_loaded_from_state_dict", "_resuming_from_checkpoint"):
            if hasattr(each, flag):
                setattr(each, flag, False)


def restart_nowhere(fit_loop: Any) -> None:
    """Let a fit begin its next epoch after the load of a checkpoint, as Lightning does without `max_steps`."""
    fit_loop._restarting = False  # its property would stay True
    fit_loop.epoch_loop.restarting = False


# --- hooks, callbacks and loggers ---------------------------------------------------------------------------------------------


def call_hooks(trainer: L.Trainer, name: str) -> None:
    """Run one hook of all callbacks and of the module, as the Trainer does."""
    call = submodule(package_of(trainer), "trainer.call")
    call._call_callback_hooks(trainer, name)
    call._call_lightning_module_hook(trainer, name)


def steps_between_saves(callback: Any) -> int | None:
    """Return how many steps a `ModelCheckpoint` makes between two saves; None for other callbacks."""
    every: int | None = getattr(callback, "_every_n_train_steps", None)
    return every


def saves_by_clock(callback: Any) -> bool:
    """Whether a callback is a `ModelCheckpoint` with `train_time_interval`."""
    return getattr(callback, "_train_time_interval", None) is not None and hasattr(callback, CANDIDATES)


def restart_timer(timer: Any, now: float) -> None:
    """Let a `Timer` count its training time from now on."""
    timer._start_time.update({stage: now for stage, began in timer._start_time.items() if stage == "train" and began})


# --- searches for a learning rate ---------------------------------------------------------------------------------------------


def search_results(found: Any) -> dict[str, Any]:
    """Return the results of `lr_find` as plain data."""
    return {**found.results, "total_batch_idx": found._total_batch_idx}


def adopt_search(finder: Any, trainer: Any, module: torch.nn.Module, results: dict[str, Any]) -> None:
    """Do the same as a `LearningRateFinder` after its search, with another worker's `search_results`."""
    package = package_of(trainer)
    lr_finder = submodule(package, "tuner.lr_finder")
    found = lr_finder._LRFinder(finder._mode, finder._min_lr, finder._max_lr, finder._num_training_steps)
    found.results = dict(results)
    found._total_batch_idx = found.results.pop("total_batch_idx")
    finder.optimal_lr = found
    if finder._update_attr and (lr := found.suggestion()) is not None:
        name = lr_finder._determine_lr_attr_name(module, finder._attr_name)
        submodule(package, "utilities.parsing").lightning_setattr(module, name, lr)
        for optimizer in trainer.optimizers or []:
            for group in optimizer.param_groups:
                group["lr"] = lr


def ends_after_search(callback: Any) -> bool:
    """Whether a callback ends the fit once it has searched, as that of `Tuner.lr_find` does."""
    return bool(getattr(callback, "_early_exit", False))


def exit_after_search(trainer: Any) -> Exception:
    """Return the exception that ends such a fit."""
    exit_: Exception = submodule(package_of(trainer), "utilities.exceptions")._TunerExitException()
    return exit_


# --- replaced methods of loops -----------------------------------------------------------------------------------------------


def own_method(owner: Any, name: str) -> Method:
    """Return Lightning's own method of this object. An earlier replacement is dropped."""
    vars(owner).pop(name, None)
    method: Method = getattr(owner, name)
    return method


def surround(owner: Any, name: str, around: Method) -> None:
    """Replace a method of this object by `around`, which gets Lightning's own one before the arguments of each call.

    An earlier replacement is dropped.
    """
    setattr(owner, name, partial(around, own_method(owner, name)))


def restore_sigterm(trainer: Any) -> None:
    """Take Lightning's handler out of those of SIGTERM: its broadcast hangs when another rank is in a collective."""
    handlers = getattr(signal.getsignal(signal.SIGTERM), "signal_handlers", [])
    connector = trainer._signal_connector
    if any(getattr(handler, "__self__", None) is connector for handler in handlers):
        others = [handler for handler in handlers if getattr(handler, "__self__", None) is not connector]
        signal.signal(signal.SIGTERM, others[0] if others else signal.SIG_DFL)


# --- the Trainer -------------------------------------------------------------------------------------------------------------


def is_search(trainer: Any) -> bool:
    """Return whether this `fit` is that of `Tuner.lr_find`."""
    return any(map(ends_after_search, trainer.callbacks))


def takes_iterator(module: L.LightningModule) -> bool:
    """Return whether `training_step` fetches its batches itself."""
    takes = submodule(package_of(module), "utilities.signature_utils").is_param_in_hook_signature
    return bool(takes(module.training_step, "dataloader_iter", explicit=True))


def logged_name(frame: FrameType | None) -> str:
    """Return the name of the logged value if Lightning reduces one on behalf of `self.log`.

    Args:
        frame: the caller of `strategy.reduce`.
    """
    for _ in range(3):
        if frame is None:
            return ""
        if frame.f_globals.get("__name__", "").endswith(".logger_connector.result"):
            return str(getattr(getattr(frame.f_locals.get("self"), "meta", None), "name", ""))
        frame = frame.f_back
    return ""


# --- plugins of checkpoints --------------------------------------------------------------------------------------------------


# Use the private names of Lightning's `DDPStrategy`, which wraps a model in `DistributedDataParallel`.
#
# Beside these, `DLRoverStrategy` overrides `_configure_launcher` and `_setup_model`, wraps `_forward_redirection`, and
# reads `_ddp_kwargs` and `_process_group_backend`. `private_api.py` lists all private names of Lightning.

_DETOUR = "dlrover_detour"
"""Attribute of the module under which Lightning's detour finds the method to run."""


class ForwardRedirection:
    """Lightning's detour through DDP's forward. It also ends when DDP raises before it reaches the module.

    Args:
        inside: surrounds the module's own method, which begins once DDP's collectives of the forward pass are done.
        loss_of: returns what DDP receives in place of the output of the training step.
    """

    def __init__(self, detour: Any, inside: Callable[[], AbstractContextManager[None]], loss_of: Callable[[Any], Any]) -> None:
        self._detour = detour
        self._inside = inside
        self._loss_of = loss_of

    def __call__(
        self, wrapper_module: nn.Module, original_module: L.LightningModule, method_name: str, *args: Any, **kwargs: Any
    ) -> Any:
        forward, method = original_module.forward, getattr(original_module, method_name)

        def run(*args: Any, **kwargs: Any) -> Any:
            with self._inside():
                output = method(*args, **kwargs)
            return self._loss_of(output) if method_name == "training_step" else output

        vars(original_module)[_DETOUR] = run
        try:
            return self._detour(wrapper_module, original_module, _DETOUR, *args, **kwargs)
        except BaseException:
            original_module.forward = forward  # type: ignore[method-assign]
            raise
        finally:
            del vars(original_module)[_DETOUR]


@contextmanager
def ddp_arguments(strategy: DDPStrategy, **changed: Any) -> Iterator[None]:
    """Change arguments with which the strategy makes a `DistributedDataParallel`."""
    kwargs = strategy._ddp_kwargs
    strategy._ddp_kwargs = {**kwargs, **changed}
    try:
        yield
    finally:
        strategy._ddp_kwargs = kwargs


def in_ddp_on_this_stream(strategy: DDPStrategy, module: nn.Module) -> DistributedDataParallel:
    """Return the module in a `DistributedDataParallel`, made on the current CUDA stream.

    DDP keeps the nodes that accumulate gradients, and each runs on the stream of its creation. Lightning makes DDP on a side
    stream, for scripts that capture whole steps. Each gradient then waits for another stream, and autograd warns of it.
    """
    return DistributedDataParallel(module, device_ids=strategy.determine_ddp_device_ids(), **strategy._ddp_kwargs)


def register_comm_hook(strategy: DDPStrategy, model: nn.Module) -> None:
    """Register the user's communication hook with DDP, as Lightning does for models without tables."""
    register = submodule(package_of(strategy), "overrides.distributed")._register_ddp_comm_hook
    register(model, strategy._ddp_comm_state, strategy._ddp_comm_hook, strategy._ddp_comm_wrapper)


def apply_layer_sync(strategy: DDPStrategy, module: L.LightningModule) -> None:
    """Synchronize normalization layers in place, as with `sync_batchnorm=True`."""
    if strategy._layer_sync is not None:
        strategy._layer_sync.apply(module)  # the module itself is no normalization layer, so it stays


@contextmanager
def without_model(strategy: DDPStrategy) -> Iterator[None]:
    """Hide the model, so that `teardown` does not move it to the CPU."""
    module, model, strategy._lightning_module = strategy._lightning_module, strategy.model, None
    try:
        yield
    finally:
        strategy._lightning_module, strategy.model = module, model


# Describe an entry of `self.log` as plain data, and make the same entry on a worker that has not logged it.
#
# Lightning keeps one `_ResultMetric` for each name. A worker may lack one that others have: a joiner, or a worker with a
# share of the samples that led to no call of `self.log`. `description` travels between workers; `new_entry` turns it into
# an empty entry.


def description(metric: Any) -> dict[str, Any]:
    """Return everything about a `_ResultMetric` except its value, as plain data."""
    sync = metric.meta.sync
    return {
        "meta": {**vars(metric.meta), "reduce_fx": metric.meta.reduce_fx.__name__, "_sync": None},
        "is_tensor": metric.is_tensor,
        "is_synced": sync.should,
        "rank_zero_only": sync.rank_zero_only,
    }


def new_entry(
    trainer: Any, meta: Mapping[str, Any], is_tensor: bool, is_synced: bool, rank_zero_only: bool, device: torch.device
) -> Any:
    """Return a `_ResultMetric` without a value, made from another worker's `description`.

    Args:
            trainer: the Trainer, or one of its loops.

    Raises:
        AttributeError: the value is a torchmetrics object that this worker's module does not have.
    """
    trainer = getattr(trainer, "trainer", trainer)
    metric = new_result(trainer, meta, is_tensor, is_synced, rank_zero_only).to(device)
    if not is_tensor:
        metric.value = _part_at(trainer.lightning_module, str(metric.meta.metric_attribute))
    return metric


def _part_at(module: torch.nn.Module, path: str) -> Any:
    found: Any = module
    for part in path.split("."):
        found = found[int(part)] if part.isdigit() and not hasattr(found, part) else getattr(found, part)
    return found
