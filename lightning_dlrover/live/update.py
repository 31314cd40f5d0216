"""One optimizer update as data: a worker copies it to undo a step, and sends it to a survivor that missed it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from lightning_dlrover.rdzv.group.buffers import is_expanded

if TYPE_CHECKING:
    import lightning as L

__all__ = ["ManualWindow", "Update", "apply", "capture"]

_SET_BY_SCHEDULERS = {"lr", "initial_lr", "max_lr", "min_lr", "swa_lr", "betas", "momentum", "base_momentum", "max_momentum"}


@dataclass
class Update:
    """Everything that one optimizer update changed; sent to a survivor that missed it."""

    model: dict[str, torch.Tensor]  # buffers that no checkpoint holds included
    optimizers: list[dict[str, Any]]
    groups: list[list[dict[str, Any]]]  # each optimizer's own values in its parameter groups, without hyperparameters
    scaler: dict[str, Any]  # mixed precision's loss scaler
    manual_steps: dict[str, Any]
    # Manual optimization: gradients added up by the batches since the last optimizer step, and whether there are any.
    gradients: list[torch.Tensor | None] | None = None  # one per parameter; None: not part of this update
    window_is_open: bool = False


def capture(trainer: L.Trainer) -> Update:
    """Return the current state of all that an update changes. Its tensors are those in use."""
    module = trainer.lightning_module
    return Update(
        model=_model_tensors(module),
        optimizers=[optimizer.state_dict()["state"] for optimizer in trainer.optimizers],
        groups=[[_kept_in(group) for group in optimizer.param_groups] for optimizer in trainer.optimizers],
        scaler=trainer.precision_plugin.state_dict(),
        manual_steps=_manual_optimization(trainer).optim_step_progress.state_dict(),
    )


def apply(trainer: L.Trainer, update: Update) -> None:
    """Bring weights, optimizers and scaler to the state after another worker's update, or before a failed one."""
    with torch.no_grad():
        for name, value in _model_tensors(trainer.lightning_module).items():
            sent = update.model.get(name)
            # Another shape: a cache has grown on one worker alone.
            if sent is not None and sent.shape == value.shape and not is_expanded(value):
                value.copy_(sent)
    for optimizer, state, kept in zip(trainer.optimizers, update.optimizers, update.groups, strict=True):
        # The rates are left out: this worker's schedulers have not seen the update yet and will set them.
        groups = [{**own, **new} for own, new in zip(optimizer.state_dict()["param_groups"], kept, strict=True)]
        optimizer.load_state_dict({"state": state, "param_groups": groups})
    if update.scaler:
        trainer.precision_plugin.load_state_dict(update.scaler)
    _manual_optimization(trainer).optim_step_progress.load_state_dict(update.manual_steps)


class ManualWindow:
    """Gradients that batches of manual optimization add up before an optimizer step."""

    def __init__(self, trainer: L.Trainer) -> None:
        self._trainer = trainer
        self._before: list[torch.Tensor | None] | None = None  # gradients before the current batch; None: not remembered
        self.is_open = False  # the last batches ended without an optimizer step

    def remember(self) -> None:
        """Record the gradients before a batch, in case it is computed again."""
        self._before = self._gradients()

    def forget(self) -> None:
        self._before = None

    def restore(self) -> None:
        """Restore the recorded gradients."""
        self._set(self._before or ())

    def newest_update(self) -> Update:
        """Return the state for a worker that lacks this one's last update. This worker may be in the step after it."""
        update = capture(self._trainer)
        if self._trainer.lightning_module.automatic_optimization:
            return replace(update, window_is_open=self.is_open)
        gradients = self._before if self._before is not None else self._gradients()
        return replace(update, gradients=gradients, window_is_open=self.is_open)

    def take_over(self, update: Update) -> None:
        """Make another worker's `newest_update` this worker's own."""
        apply(self._trainer, update)
        if update.gradients is not None:
            self._set(update.gradients)
            self.is_open = update.window_is_open

    def _gradients(self) -> list[torch.Tensor | None]:
        """Return the gradients that a manual step adds to; none where the step before has used them."""
        parameters = list(self._trainer.lightning_module.parameters())
        if not self.is_open:
            return [None] * len(parameters)
        return [None if p.grad is None else p.grad.detach().clone() for p in parameters]

    def _set(self, gradients: Sequence[torch.Tensor | None]) -> None:
        for parameter, gradient in zip(self._trainer.lightning_module.parameters(), gradients, strict=False):
            parameter.grad = None if gradient is None else gradient.to(parameter.device, copy=True)


def _manual_optimization(trainer: L.Trainer) -> Any:
    return trainer.fit_loop.epoch_loop.manual_optimization


def _model_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    state = {name: value for name, value in module.state_dict().items() if isinstance(value, torch.Tensor)}
    return {name: buffer.detach() for name, buffer in module.named_buffers()} | state


def _kept_in(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's own values in a parameter group, as of schedule-free optimizers, Prodigy and D-Adaptation."""
    data = (bool, int, float, str, torch.Tensor, type(None))
    return {k: v for k, v in group.items() if k != "params" and k not in _SET_BY_SCHEDULERS and isinstance(v, data)}
