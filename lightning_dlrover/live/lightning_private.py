"""The private names of Lightning that the strategy depends on, each in one function.

| of | names |
| --- | --- |
| the epoch's loop | `_should_check_val_fx`, `_broadcast_sigterm_tensor` |
| the validation's loop | `_evaluation_step` |
| the Trainer | `_val_check_time_interval`, `_accelerator_connector` |
| `_accelerator_connector` | `_devices_flag`, `use_distributed_sampler` |
| `LearningRateFinder` | `_early_exit` |
| `DDPStrategy` | `_ddp_kwargs`, `_ddp_comm_hook`, `_ddp_comm_state`, `_ddp_comm_wrapper`, `_pl_static_graph_delay_done` |
| `Strategy` | `_layer_sync`, `_lightning_module`, `_setup_model` |
| `AsyncCheckpointIO` | `_executor` |
| modules | `overrides.distributed._register_ddp_comm_hook`, `utilities.signature_utils`, `...logger_connector.result` |

Beside these, `DLRoverStrategy` overrides `_configure_launcher` and `_setup_model`, wraps `_forward_redirection`, and reads
`_ddp_kwargs` and `_process_group_backend`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

from torch import nn

from lightning_dlrover.packages import package_of, submodule

if TYPE_CHECKING:
    import lightning as L
    from lightning.pytorch.strategies import DDPStrategy

__all__ = [
    "ForwardRedirection",
    "Method",
    "apply_layer_sync",
    "ddp_arguments",
    "devices_argument",
    "expect_static_graph_call",
    "has_comm_hook",
    "in_ddp",
    "is_search",
    "logged_name",
    "register_comm_hook",
    "replace",
    "replace_evaluation_step",
    "replace_validation_check",
    "replaces_samplers",
    "set_replaces_samplers",
    "stop_sending_sigterm",
    "takes_iterator",
    "validates_by_the_clock",
    "without_model",
    "writing_thread",
]

Method = Callable[..., Any]


# --- loops -------------------------------------------------------------------------------------------------------------------


def replace(owner: Any, name: str, make: Callable[[Method], Method]) -> None:
    """Replace a method of this object by `make(Lightning's own)`. An earlier replacement is dropped."""
    vars(owner).pop(name, None)
    setattr(owner, name, make(getattr(owner, name)))


def replace_evaluation_step(val_loop: Any, make: Callable[[Method], Method]) -> None:
    """Replace the validation of one batch."""
    replace(val_loop, "_evaluation_step", make)


def replace_validation_check(epoch_loop: Any, make: Callable[[Method], Method]) -> None:
    """Replace the check after each batch whether a validation is due."""
    replace(epoch_loop, "_should_check_val_fx", make)


def validates_by_the_clock(trainer: Any) -> bool:
    """Return whether validations are due by time, as with `val_check_interval="00:10:00"`."""
    return getattr(trainer, "_val_check_time_interval", None) is not None


def stop_sending_sigterm(epoch_loop: Any) -> None:
    """Remove the broadcast after each batch of whether rank 0 has received SIGTERM. It hangs when another rank has."""
    epoch_loop._broadcast_sigterm_tensor = lambda: None


# --- the Trainer -------------------------------------------------------------------------------------------------------------


def devices_argument(trainer: Any) -> object:
    """Return `devices` as the Trainer was given it; a number where "auto" stood for one."""
    return trainer._accelerator_connector._devices_flag


def replaces_samplers(trainer: Any) -> bool:
    """Return whether Lightning replaces samplers by distributed ones, as with `use_distributed_sampler=True`."""
    return bool(trainer._accelerator_connector.use_distributed_sampler)


def set_replaces_samplers(trainer: Any, value: bool) -> None:
    trainer._accelerator_connector.use_distributed_sampler = value


def is_search(trainer: Any) -> bool:
    """Return whether this `fit` is that of `Tuner.lr_find`."""
    return any(getattr(callback, "_early_exit", False) for callback in trainer.callbacks)


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


# --- the strategy ------------------------------------------------------------------------------------------------------------


class ForwardRedirection:
    """Lightning's detour through DDP's forward. It also ends when DDP raises before it reaches the module."""

    def __init__(self, detour: Any) -> None:
        self._detour = detour

    def __call__(
        self, wrapper_module: nn.Module, original_module: L.LightningModule, method_name: str, *args: Any, **kwargs: Any
    ) -> Any:
        forward = original_module.forward
        try:
            return self._detour(wrapper_module, original_module, method_name, *args, **kwargs)
        except BaseException:
            original_module.forward = forward  # type: ignore[method-assign]
            raise


@contextmanager
def ddp_arguments(strategy: DDPStrategy, **changed: Any) -> Iterator[None]:
    """Change arguments with which the strategy makes a `DistributedDataParallel`."""
    kwargs = strategy._ddp_kwargs
    strategy._ddp_kwargs = {**kwargs, **changed}
    try:
        yield
    finally:
        strategy._ddp_kwargs = kwargs


def in_ddp(strategy: DDPStrategy, module: nn.Module) -> nn.Module:
    """Return the module in a `DistributedDataParallel` with the strategy's arguments."""
    return strategy._setup_model(module)


def has_comm_hook(strategy: DDPStrategy) -> bool:
    """Return whether the user has given DDP a communication hook."""
    return strategy._ddp_comm_hook is not None


def register_comm_hook(strategy: DDPStrategy, model: nn.Module) -> None:
    """Register the user's communication hook with DDP, as Lightning does for models without tables."""
    register = submodule(package_of(strategy), "overrides.distributed")._register_ddp_comm_hook
    register(model, strategy._ddp_comm_state, strategy._ddp_comm_hook, strategy._ddp_comm_wrapper)


def expect_static_graph_call(strategy: DDPStrategy) -> None:
    """Repeat the call that a static graph needs once for each replica, in manual optimization."""
    strategy._pl_static_graph_delay_done = False


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


# --- checkpoints -------------------------------------------------------------------------------------------------------------


def writing_thread(checkpoint_io: Any) -> Any | None:
    """Return the executor of one thread with which a plugin writes checkpoints; None if it writes them at once."""
    return getattr(checkpoint_io, "_executor", None)
