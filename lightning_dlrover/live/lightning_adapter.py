"""What a live fit does with several private names of Lightning and DDP at once, or at several places.

`private_api.py` lists all private names in use, which other files of `live/` read directly where one is enough.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_dlrover.lightning_compat import package_of, submodule

if TYPE_CHECKING:
    import lightning as L
    from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop
    from lightning.pytorch.loops.fetchers import _DataFetcher
    from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
    from lightning.pytorch.strategies import DDPStrategy
    from lightning.pytorch.utilities.combined_loader import CombinedLoader

    DataFetcher = _DataFetcher
    EpochLoop = _TrainingEpochLoop
    EvaluationLoop = _EvaluationLoop
else:
    DataFetcher = EpochLoop = EvaluationLoop = object

Method = Callable[..., Any]


def combined_loader(loop: Any) -> CombinedLoader | None:
    """Return the dataloaders of a fit or an evaluation; None before they are set up."""
    combined: CombinedLoader | None = loop._combined_loader
    return combined


def recount_batches(trainer: L.Trainer) -> None:
    """Recount an epoch's batches after the length of a training loader has changed, as `FitLoop.setup_data` does."""
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


def preparations(trainer: Any) -> list[tuple[Any, Callable[[], None]]]:
    """Return datamodule and module, as far as they have a `prepare_data`, each with a function that runs it."""
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


def surround_requests_of_data(trainer: Any, around: Method) -> None:
    """Replace what asks the user's hooks for loaders, except for predictions; see `surround`."""
    fit_loop = trainer.fit_loop
    for loop in (fit_loop, fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop):
        surround(loop._data_source, "dataloader", around)


def validates_by_clock(trainer: L.Trainer) -> bool:
    return getattr(trainer, "_val_check_time_interval", None) is not None


def adopt_search(finder: Any, trainer: Any, module: torch.nn.Module, results: dict[str, Any]) -> None:
    """Do the same as a `LearningRateFinder` after its search, with the results of another worker's."""
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


# --- DDPStrategy -------------------------------------------------------------------------------------------------------------

# In addition, `DLRoverStrategy` overrides `_configure_launcher` and `_setup_model`, wraps `_forward_redirection`, and reads
# `_ddp_kwargs` and `_process_group_backend`.

_DETOUR = "dlrover_detour"
"""Attribute of the module under which Lightning's detour finds the method to run."""


@dataclass(frozen=True)
class ForwardRedirection:
    """Lightning's detour through DDP's forward. It also ends when DDP raises before it reaches the module."""

    _detour: Any
    _inside: Callable[[], AbstractContextManager[None]]  # surrounds the module's method, after DDP's collectives of the pass
    _loss_of: Callable[[Any], Any]  # what DDP receives in place of the output of the training step

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


def apply_layer_sync(strategy: DDPStrategy, module: L.LightningModule) -> None:
    """Synchronize normalization layers in place, as with `sync_batchnorm=True`."""
    if strategy._layer_sync is not None:
        strategy._layer_sync.apply(module)  # the module itself is not a normalization layer, so it stays


@contextmanager
def without_model(strategy: DDPStrategy) -> Iterator[None]:
    """Hide the model, so that `teardown` does not move it to the CPU."""
    module, model, strategy._lightning_module = strategy._lightning_module, strategy.model, None
    try:
        yield
    finally:
        strategy._lightning_module, strategy.model = module, model


# --- entries of `self.log` ---------------------------------------------------------------------------------------------------

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


def new_entry(trainer: Any, meta: Mapping[str, Any], is_tensor: bool, is_synced: bool, rank_zero_only: bool) -> Any:
    """Return a `_ResultMetric` without a value, made from another worker's `description`.

    Args:
        trainer: the Trainer, or one of its loops.

    Raises:
        AttributeError: the value is a torchmetrics object that this worker's module does not have.
    """
    trainer = getattr(trainer, "trainer", trainer)
    result = submodule(package_of(trainer), "trainer.connectors.logger_connector.result")
    metadata = result._Metadata(**meta)
    metadata.sync = result._Sync(fn=trainer.strategy.reduce, _should=is_synced, rank_zero_only=rank_zero_only)
    metric = result._ResultMetric(metadata, is_tensor=is_tensor).to(trainer.strategy.root_device)
    if not is_tensor:
        metric.value = _part_at(trainer.lightning_module, str(metric.meta.metric_attribute))
    return metric


def _part_at(module: torch.nn.Module, path: str) -> Any:
    found: Any = module
    for part in path.split("."):
        found = found[int(part)] if part.isdigit() and not hasattr(found, part) else getattr(found, part)
    return found
