"""A training step as the estimate runs it, and its loss."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Step", "run_backward", "step_of"]

Step = Callable[[Any], Any]
"""Takes a batch and returns the loss, a dict with ``loss``, or None if it runs backward and the optimizers itself."""


def run_backward(result: Any) -> None:
    """Run backward from the result of a step; None: the step has run it.

    Raises:
        TypeError: the result holds no loss.
    """
    if result is None:
        return
    loss = result.get("loss") if isinstance(result, Mapping) else result
    if not isinstance(loss, Tensor):
        raise TypeError(f"the training step returned {type(loss).__name__}, not a loss: return a tensor, or a dict with 'loss'")
    loss.backward()  # type: ignore[no-untyped-call]


def step_of(module: nn.Module, optimizers: Sequence[torch.optim.Optimizer], batch_idx: int = 0) -> Step:
    """Return a step that runs a LightningModule's ``training_step``, without its trainer, its logger and its strategy.

    The step replaces methods of the module when it runs, so it is for a process that is thrown away, as `estimate_peak`'s is.
    """

    def step(batch: Any) -> Any:
        own: dict[str, Callable[..., Any]] = {
            "log": _ignore,
            "log_dict": _ignore,
            "manual_backward": lambda loss, *args, **kwargs: loss.backward(*args, **kwargs),
            "optimizers": lambda *_, **__: optimizers[0] if len(optimizers) == 1 else [*optimizers],
            "lr_schedulers": _ignore,
            "toggle_optimizer": _ignore,
            "untoggle_optimizer": _ignore,
        }
        for name, method in own.items():
            if hasattr(module, name):
                object.__setattr__(module, name, method)
        training_step: Callable[..., Any] = module.training_step  # type: ignore[assignment]
        parameters = inspect.signature(training_step).parameters
        result = training_step(batch, batch_idx) if len(parameters) > 1 else training_step(batch)
        return result if getattr(module, "automatic_optimization", True) else None

    return step


def _ignore(*_: Any, **__: Any) -> None:
    """Stand in for a method that needs the trainer."""
