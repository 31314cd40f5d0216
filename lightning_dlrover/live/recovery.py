"""Repeat what a lost worker has interrupted: an optimizer's update, the batch, a collective."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
import torch.distributed as dist
import torchmetrics

from lightning_dlrover.live.order import FitPosition, Position
from lightning_dlrover.live.replica import IncompleteBackwardError, TrainerOfFit
from lightning_dlrover.rdzv.desync import CollectiveCall, MismatchError, place_of
from lightning_dlrover.rdzv.group.world import World
from lightning_dlrover.rdzv.membership.member import Formation, MembershipError, WorldError
from lightning_dlrover.rdzv.transport import transfer
from lightning_dlrover.rdzv.transport.transfer import is_expanded

if TYPE_CHECKING:
    import lightning as L

    from lightning_dlrover.rdzv.transport.transfer import BufferCopies

# One optimizer update as data: a worker copies it to undo a step, and sends it to a survivor that missed it.

_SET_BY_SCHEDULERS = {"lr", "initial_lr", "max_lr", "min_lr", "swa_lr", "betas", "momentum", "base_momentum", "max_momentum"}


@dataclass
class Update:
    """Everything that one optimizer update changed."""

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


@dataclass(eq=False)
class ManualWindow:
    """Gradients that batches of manual optimization add up before an optimizer step."""

    _trainer: L.Trainer
    _before: list[torch.Tensor | None] | None = None  # gradients before the current batch; None: not remembered
    is_open: bool = False  # the last batches ended without an optimizer step

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


# Undo logged values and buffers before a computation is repeated, so that it counts once in every mean and metric.
#
# `Before` records a worker's logged values, its module's buffers and the state of its torchmetrics objects. It is cheap
# enough for every step: Lightning replaces the tensors that it accumulates in, and only buffers and torchmetrics' are
# changed in place.

_FIELDS = ("value", "cumulated_batch_size", "has_reset", "_forward_cache", "_computed", "_update_count")


class Before:
    """A record of Lightning's logged values, torchmetrics objects and buffers at the time of its creation.

    Args:
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
        """Restore the recorded values, as often as it is called."""
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
    """The trainable flags of all parameters, which Lightning's `toggle_optimizer` changes for a part of a step."""

    def __init__(self, module: L.LightningModule) -> None:
        self._module = module
        self._flags = [(parameter, parameter.requires_grad) for parameter in module.parameters()]
        self._toggled = dict(module._param_requires_grad_state)  # flags that `toggle_optimizer` restores later

    def restore(self) -> None:
        for parameter, flag in self._flags:
            parameter.requires_grad_(flag)
        self._module._param_requires_grad_state = dict(self._toggled)


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
        self._states = {name: self._copy(getattr(metric, name)) for name in metric._defaults}

    def restore(self) -> None:
        vars(self._metric).update(self._fields)
        for name, state in self._states.items():
            setattr(self._metric, name, self._copy(state))

    @staticmethod
    def _copy(state: torch.Tensor | list[Any]) -> torch.Tensor | list[Any]:
        return state.detach().clone() if isinstance(state, torch.Tensor) else list(state)  # both may be changed in place


# Run collectives so that they survive the loss of a worker.
#
# Inside a training step a collective that fails is repeated with the step. Outside of steps it is repeated alone, or
# its result is taken from a survivor. Collectives are counted for that: a number stands for the same collective on all
# workers.

log = logging.getLogger(__name__)

T = TypeVar("T")


class Survivors(Protocol):
    """The workers that are left after a loss, as `LiveTraining` meets them."""

    def meet_survivors(self) -> bool:
        """Form the next round with them. Return whether the current step's update was taken over from one of them."""


@dataclass(eq=False)
class ResilientCollectives:
    """Collectives of this worker's round, and the results that other workers may lack after a loss."""

    _world: World
    _position: FitPosition
    _trainer: TrainerOfFit
    _survivors: Survivors
    # By batch, and the number of the collective since that was handed out.
    _results: dict[tuple[int, int], Any] = field(default_factory=dict)
    _missed: dict[tuple[int, int], Any] = field(default_factory=dict)  # brought by another worker

    def recover(self) -> bool:
        """Form the next round with the survivors. Return whether this step's update was taken over from another worker."""
        return self._survivors.meet_survivors()

    # --- outside of steps ------------------------------------------------------------------------------------------------

    def run(self, run: Callable[[], T], is_joint: bool = True) -> T:
        """Run a collective of the strategy. If it fails, repeat it with the survivors or take its result from one of them.

        Args:
            is_joint: whether it ends nowhere before all workers have entered it. Then all have the results of earlier ones.
        """
        position = self._position
        if not position.has_entered or position.is_computing:
            return run()
        position.collective += 1
        key = (position.batch, position.collective)
        while True:
            if key in self._missed:
                result: T = self._missed.pop(key)
                break
            if (done := self.attempt(self._checked, run)) is not None:
                result = done[0]
                break
            self.recover()
        if is_joint:
            self._results = {}
        self._results[key] = result
        return result

    def exchange(self, what: str, run: Callable[[], T]) -> T:
        """Run a collective of our own under a name, which the error shows if other workers run another one."""
        return self.run(lambda: self.named(what, run))

    def named(self, what: str, run: Callable[[], T]) -> T:
        """Run collectives under one name, which all workers must share."""
        frame = sys._getframe(1)
        with self._world.compared(lambda: CollectiveCall(what, place=place_of(frame), any_place=True)):
            return run()

    def once(self, run: Callable[[], T]) -> tuple[T] | None:
        """Run a collective that must not be repeated before a loss is handled.

        Returns:
            Its result, or that of another survivor; None if no worker has it, after the survivors have met again.
        """
        position = self._position
        position.collective += 1
        key = (position.batch, position.collective)
        result = self.attempt(self._checked, run)
        if result is None:
            self.recover()
            if key not in self._missed:
                position.collective -= 1  # the other workers count the next attempt as the same collective
                return None
            result = (self._missed.pop(key),)
        self._results = {key: result[0]}
        return result

    def gathered(self, mine: Any) -> list[Any]:
        """Return all workers' values by rank. A failure is the caller's to handle."""
        return transfer.all_gather(mine) if self._position.size > 1 else [mine]

    def gathered_from(self, ranks: Sequence[int], mine: Any) -> dict[int, Any]:
        """Return the values of some workers by rank; all name the same ones. A failure is the caller's to handle."""
        return transfer.gather_from(ranks, mine) if self._position.size > 1 else dict.fromkeys(ranks, mine)

    def largest(self, mine: Sequence[int]) -> list[int]:
        """Return, for each place, the largest number of all workers. A failure is the caller's to handle."""
        return transfer.largest(mine) if self._position.size > 1 else [*mine]

    def attempt(self, run: Callable[..., T], *args: Any) -> tuple[T] | None:
        """Return the result of a function with collectives; None if one failed, after which the caller has to `recover`."""
        # The caller recovers outside of the `except` block, because a live traceback would keep the old group alive.
        try:
            return (run(*args),)
        except Exception as error:
            if not self._is_failure(error):
                raise
            log.info("worker %s: a collective failed: %s", self._world.worker_id, str(error).splitlines()[0][:200])
        return None

    def renew_if_broken(self) -> None:
        """Form the next round if this one has ended. Call it where no unfinished work would have to be repeated."""
        if self._world.broken:
            self.recover()

    def _is_failure(self, error: BaseException) -> bool:
        if not self._position.has_entered and self._position.formation is None:
            return False
        if isinstance(error, IncompleteBackwardError):
            return True
        if not self._position.has_entered:
            return self._world.is_failure(error)
        if self._position.speeds and self._position.is_computing and self._may_need_equal_shares(error):
            return True
        return self._world.is_recoverable(error, self._position.is_computing)

    def _may_need_equal_shares(self, error: BaseException) -> bool:
        """Return whether a step that has failed is to be repeated with equal shares, which this worker demands from then on.

        A script may be right with equal shares only: it has a state per sample, gathers samples now and then, or a larger share
        does not fit into memory. If that is not the cause, the step fails again, and the error is the script's.
        """
        try:
            is_loss = self._world.is_failure(error)
        except MismatchError as mismatch:  # of which this error follows
            error, is_loss = mismatch, False
        if is_loss or (isinstance(error, WorldError | MembershipError) and not isinstance(error, MismatchError)):
            return False
        self._position.needs_equal_shares = True
        log.warning(
            "worker %s: a step has failed, which is repeated with equal shares in place of shares by speed: %s: %s",
            *(self._world.worker_id, type(error).__name__, str(error)[:500]),
        )
        return True

    # --- results of an ended round ----------------------------------------------------------------------------------------

    def check_gradients(self) -> None:
        """Raise if gradients may come from an aborted reduction: these must not reach the weights."""
        if self._position.size > 1 and self._position.has_entered:
            self.wait_for_results()
            if self._world.broken:
                raise self._world.broken_error()

    def wait_for_results(self) -> None:
        """Wait until the results of all collectives are there, if their backend does not wait for them itself."""
        if self._world.is_asynchronous:
            self._world.wait_for_device(self._trainer.device)

    def check_group(self) -> None:
        """Raise if an abort has removed the group: Lightning's collectives would silently do nothing."""
        if self._position.size > 1 and not dist.is_initialized():
            raise self._world.broken_error()

    def _checked(self, run: Callable[[], T]) -> T:
        """Return the result of a collective outside of steps, unless an abort has ended it early."""
        result = run()
        if self._world.is_asynchronous and self._position.size > 1:
            self._world.wait_for_device(self._trainer.device)
            if self._world.broken:
                raise self._world.broken_error()
        return result

    # --- results that others lack -------------------------------------------------------------------------------------------

    @property
    def has_missed_result(self) -> bool:
        """Whether another worker has brought the result of this worker's current collective."""
        return (self._position.batch, self._position.collective) in self._missed

    def begin_batch(self, batch: int) -> None:
        """Restart the count of collectives. The next batch is about to be handed out."""
        self._position.batch = batch
        self._position.collective = 0
        self._results = {key: value for key, value in self._results.items() if key[0] >= batch - 1}

    def forget(self) -> None:
        """Drop all results, because all workers go back to a snapshot."""
        self._position.collective = 0
        self._results, self._missed = {}, {}

    def share_results(self, formation: Formation, standing: Mapping[str, Position]) -> None:
        """Send results of collectives outside of steps to the workers that lack them."""
        places = {w: (p.batch, p.collective) for w, p in standing.items()}
        furthest = max(places.values())
        if all(place == furthest for place in places.values()):
            return
        source = next(w for w in formation.round.members if places.get(w) == furthest)
        if self._world.worker_id == source:
            for worker in formation.round.members:
                if worker != source:
                    transfer.send(self._results, formation.rank_of(worker))
        else:
            results = transfer.receive(formation.rank_of(source))
            self._missed.update({key: value for key, value in results.items() if key not in self._results})
