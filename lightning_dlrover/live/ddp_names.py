"""Use the private names of Lightning's `DDPStrategy`, which wraps a model in `DistributedDataParallel`.

Beside these, `DLRoverStrategy` overrides `_configure_launcher` and `_setup_model`, wraps `_forward_redirection`, and reads
`_ddp_kwargs` and `_process_group_backend`. `listed_names.py` lists all private names of Lightning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_dlrover.packages import package_of, submodule

if TYPE_CHECKING:
    import lightning as L
    from lightning.pytorch.strategies import DDPStrategy

__all__ = [
    "ForwardRedirection",
    "apply_layer_sync",
    "ddp_arguments",
    "in_ddp_on_this_stream",
    "register_comm_hook",
    "without_model",
]


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
