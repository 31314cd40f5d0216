"""Undo logged values and buffers before a computation is repeated, so that it counts once in every mean and metric.

`Before` records a worker's logged values, its module's buffers and the state of its torchmetrics objects. It is cheap enough
for every step: Lightning replaces the tensors that it accumulates in, and only buffers and torchmetrics' are changed in place.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torchmetrics

if TYPE_CHECKING:
    import lightning as L

    from lightning_dlrover.rdzv.group.buffers import BufferCopies

__all__ = ["Before", "Counts", "Frozen", "call_restart_hooks", "metrics_of"]

_FIELDS = ("value", "cumulated_batch_size", "has_reset", "_forward_cache", "_computed", "_update_count")


class Before:
    """A record of the logged values, metrics and buffers at the time of its creation.

    Args:
        metrics: torchmetrics objects of the user's module.
        results: Lightning's logged values.
        buffers: takes the copies of the module's buffers; None where no step is repeated.
    """

    def __init__(self, metrics: Iterable[torchmetrics.Metric], results: Any, buffers: BufferCopies | None = None) -> None:
        self._results = results
        self._buffers = buffers
        if buffers is not None:
            buffers.keep()
        self._logged = {
            key: {name: vars(metric)[name] for name in _FIELDS if name in vars(metric)} for key, metric in results.items()
        }
        self._metrics = [_MetricState(each) for each in metrics]

    def restore(self) -> None:
        """Restore the recorded values. Can be called several times."""
        for key, metric in list(self._results.items()):
            if metric.meta.fx.startswith("on_train_batch_"):
                continue  # these hooks run once, even if the work between them is repeated
            if key in self._logged:
                vars(metric).update(self._logged[key])
            else:
                del self._results[key]
        for state in self._metrics:
            state.restore()
        self.restore_buffers()

    def restore_buffers(self) -> None:
        """Restore the buffers alone."""
        if self._buffers is not None:
            self._buffers.restore()


class Counts:
    """A loop's counts. Lightning's own `state_dict` of them copies deeply, which takes too long for every step.

    Args:
        progress: counts of optimizers or of optimizer steps, as Lightning nests them.
    """

    def __init__(self, progress: Any) -> None:
        self.progress = progress
        self._parts = list(_innermost(progress))

    def take(self) -> list[dict[str, Any]]:
        """Return the values of now."""
        return [dict(vars(part)) for part in self._parts]

    def restore(self, values: Sequence[Mapping[str, Any]]) -> None:
        """Go back to the values that `take` has returned."""
        for part, of_part in zip(self._parts, values, strict=True):
            vars(part).update(of_part)


def _innermost(progress: Any) -> Iterator[Any]:
    parts = list(vars(progress).values())
    if isinstance(parts[0], int):
        yield progress
        return
    for part in parts:
        yield from _innermost(part)


class Frozen:
    """The trainable flags of all parameters. Lightning's `toggle_optimizer` changes them for a part of a step."""

    def __init__(self, module: L.LightningModule) -> None:
        self._module = module
        self._flags = [(parameter, parameter.requires_grad) for parameter in module.parameters()]
        self._toggled = dict(module._param_requires_grad_state)  # flags that `toggle_optimizer` restores later

    def restore(self) -> None:
        for parameter, flag in self._flags:
            parameter.requires_grad_(flag)
        self._module._param_requires_grad_state = dict(self._toggled)


def metrics_of(module: torch.nn.Module) -> list[torchmetrics.Metric]:
    """Return all torchmetrics objects that are parts of a module."""
    return [each for each in module.modules() if isinstance(each, torchmetrics.Metric)]


def call_restart_hooks(trainer: L.Trainer, batch_idx: int) -> None:
    """Call `on_train_batch_restart` of the callbacks and the module that have it, before a training step runs again."""
    module = trainer.lightning_module
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if (hook := getattr(callback, "on_train_batch_restart", None)) is not None:
            hook(trainer, module, batch_idx)
    if callable(hook := getattr(module, "on_train_batch_restart", None)):
        hook(batch_idx)


class _MetricState:
    """The recorded state of one torchmetrics object."""

    def __init__(self, metric: torchmetrics.Metric) -> None:
        self._metric = metric
        self._fields = {name: vars(metric)[name] for name in ("_forward_cache", "_computed", "_update_count")}
        self._tensors: dict[str, torch.Tensor] = {}
        self._lists: dict[str, list[Any]] = {}
        for name in metric._defaults:
            value = getattr(metric, name)
            if isinstance(value, torch.Tensor):
                self._tensors[name] = value.detach().clone()  # copied, as it may be changed in place
            else:
                self._lists[name] = list(value)

    def restore(self) -> None:
        vars(self._metric).update(self._fields)
        for name, tensor in self._tensors.items():
            setattr(self._metric, name, tensor.clone())
        for name, values in self._lists.items():
            setattr(self._metric, name, list(values))
