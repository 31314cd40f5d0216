"""Keep logged values independent of the number of workers: merge them when an epoch ends and when a worker leaves.

Lightning leaves a value that was logged without `sync_dist=True` as each worker has it. Callbacks and schedulers that follow it
would then decide by one worker's share of the samples, and differently on each worker. `EpochMetrics` exchanges the logged
values of all workers at fixed points, before anything reads them, so all workers hold the same values. The exchange carries
names and values together, so a name that some workers have not logged cannot mismatch.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from functools import wraps
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection
from torchmetrics.utilities.data import dim_zero_cat, dim_zero_max, dim_zero_mean, dim_zero_min, dim_zero_sum

from lightning_dlrover.live import lightning_names
from lightning_dlrover.live.listed_names import CANDIDATES
from lightning_dlrover.live.logged_values import description, new_entry
from lightning_dlrover.live.ports import Batches, Round, TrainerPort
from lightning_dlrover.packages import PACKAGES, Checkpoint, EarlyStopping
from lightning_dlrover.rdzv.group import transfer

__all__ = [
    "EpochMetrics",
    "Partial",
    "add_partial",
    "adopt",
    "entry_of",
    "ignore_advice_to_reduce",
    "metric_parts",
    "partial_values",
    "reset_metrics",
    "restore_partial",
    "set_computed",
    "value_of",
    "with_own_states",
]

log = logging.getLogger(__name__)

Partial = dict[str, Any]
"""One worker's part of an epoch's values, as plain data: `logged` by key, `states` of torchmetrics objects by module path.

`left_out` has the paths of objects whose states are too large. `described` may have the entries of `logged`, see `adopt`.
"""

LARGE_BYTES = 1 << 20
"""Bytes above which only workers that are about to leave send a metric's state, such as all predictions so far."""


STEP_HOOKS = (
    *("on_train_batch_start", "on_before_backward", "on_after_backward", "on_before_optimizer_step"),
    *("on_before_zero_grad", "on_train_batch_end"),
)
"""Hooks in which a callback can read a step's logged values before the epoch ends."""


# --- one worker's part --------------------------------------------------------------------------------------------------------


def partial_values(results: Mapping[str, Any], module: nn.Module, with_large: bool = True) -> Partial:
    """Return the values that this worker has accumulated since the epoch began."""
    logged = {
        key: (metric.value, metric.cumulated_batch_size if metric.meta.is_mean_reduction else 0)
        for key, metric in results.items()
        if metric.is_tensor and metric.meta.on_epoch and not metric.has_reset
    }
    states, left_out = {}, []
    for path, metric in _metrics_of(module):
        if not metric._defaults or not metric._update_count:
            continue
        values = {name: getattr(metric, name) for name in metric._defaults}
        if with_large or _num_bytes(values) <= LARGE_BYTES:
            states[path] = (metric._update_count, values)
        else:
            left_out.append(path)
    return {"logged": logged, "states": states, "left_out": left_out}


def add_partial(results: Mapping[str, Any], module: nn.Module, other: Partial) -> None:
    """Add another worker's part to this worker's own."""
    for key, (value, weight) in other["logged"].items():
        metric = results.get(key)
        if metric is None or not metric.is_tensor:
            continue
        if metric.meta.is_mean_reduction:
            metric.cumulated_batch_size = metric.cumulated_batch_size + weight
        metric.value = _combined(metric.meta, [metric.value, value.to(metric.value.device)])
        metric.has_reset = False
        metric._computed = None
    metrics = dict(_metrics_of(module))
    for path, (count, states) in other["states"].items():
        if (metric := metrics.get(path)) is None:
            continue
        try:
            merged = {name: _merged(metric, name, states[name], count) for name in metric._defaults}
        except (TypeError, KeyError, RuntimeError) as error:
            log.warning(
                "metric %s (%s) of a worker that left is lost for this epoch, its state cannot be merged: %s",
                *(path, type(metric).__name__, error),
            )
            continue
        for name, value in merged.items():
            setattr(metric, name, value)
        metric._update_count += count
        metric._computed = None


def restore_partial(results: Mapping[str, Any], module: nn.Module, own: Partial) -> None:
    """Go back to the values that this worker had accumulated. Any value missing in `own` starts anew."""
    for key, metric in results.items():
        if not metric.is_tensor:
            continue
        if key not in own["logged"]:
            metric.reset()
            continue
        value, weight = own["logged"][key]
        device = metric.value.device  # stored values come back on the CPU
        metric.value = value.to(device)
        metric.has_reset = False
        metric._computed = None
        if metric.meta.is_mean_reduction:
            metric.cumulated_batch_size = weight.to(device) if isinstance(weight, Tensor) else weight
    reset_metrics(module)
    add_partial({}, module, {"logged": {}, "states": own["states"]})


def reset_metrics(module: nn.Module) -> None:
    """Start all torchmetrics objects anew, as on a joiner. Other workers count the samples in the state that it received."""
    for _, metric in _metrics_of(module):
        if metric._defaults and metric._update_count:
            metric.reset()


def metric_parts(module: nn.Module) -> list[tuple[str, Metric | MetricCollection]]:
    """Return all torchmetrics objects and collections of them in a module, by path."""
    parts = module.named_modules()
    return [(path, p) for path, p in parts if isinstance(p, Metric | MetricCollection) and type(p).__name__ != "_ResultMetric"]


def with_own_states(parts: Sequence[tuple[str, Metric | MetricCollection]]) -> Iterator[tuple[str, Metric]]:
    """Return the objects alone, each with a state of its own."""
    for _, part in parts:
        if isinstance(part, MetricCollection):
            list(part.values())  # members of one compute group share the state of the first; each gets its own copy
    yield from ((path, part) for path, part in parts if isinstance(part, Metric))


def _metrics_of(module: nn.Module) -> Iterator[tuple[str, Metric]]:
    return with_own_states(metric_parts(module))


def _num_bytes(states: Mapping[str, Any]) -> int:
    parts = [part for state in states.values() for part in (state if isinstance(state, list) else [state])]
    return sum(part.nbytes for part in parts if isinstance(part, Tensor))


def _merged(metric: Metric, name: str, theirs: Any, their_count: int) -> Any:
    mine, reduction = getattr(metric, name), metric._reductions[name]
    device = metric.device
    theirs = [part.to(device) for part in theirs] if isinstance(theirs, list) else theirs.to(device)
    if not metric._update_count:
        return theirs
    if isinstance(mine, list) != isinstance(theirs, list):
        mine, theirs = ([part] if isinstance(part, Tensor) else part for part in (mine, theirs))
    if isinstance(mine, list):
        if reduction not in (dim_zero_cat, None):
            raise TypeError(f"{name} is a list with the reduction {reduction}")
        return [*mine, *theirs]
    if reduction is dim_zero_sum:
        return mine + theirs
    if reduction is dim_zero_max:
        return torch.maximum(mine, theirs)
    if reduction is dim_zero_min:
        return torch.minimum(mine, theirs)
    if reduction is dim_zero_mean:
        return (mine * metric._update_count + theirs * their_count) / (metric._update_count + their_count)
    if reduction is dim_zero_cat:
        return torch.cat([part.reshape(-1) if part.dim() == 0 else part for part in (mine, theirs)])
    if not callable(reduction):
        raise TypeError(f"{name} has no reduction")
    return reduction(torch.stack([mine, theirs]))


def _combined(meta: Any, values: Sequence[Tensor]) -> Tensor:
    """Return the sum of several workers' values, or their maximum or minimum. Means are sums until they are divided."""
    stacked = torch.stack([value.double() for value in values])
    if meta.is_max_reduction:
        return stacked.amax(0).to(values[0].dtype)
    if meta.is_min_reduction:
        return stacked.amin(0).to(values[0].dtype)
    return stacked.sum(0).to(values[0].dtype)


# --- all workers together -----------------------------------------------------------------------------------------------------


def ignore_advice_to_reduce() -> None:
    """Drop Lightning's advice to set `sync_dist=True`: the values of an epoch are reduced without it."""
    warnings.filterwarnings("ignore", r"It is recommended to use `self\.log\(.*, sync_dist=True\)`")


class ValidationDataloaders(Protocol):
    """The dataloaders of a validation, of which each ends once on every worker."""

    def is_between_dataloaders(self) -> bool:
        """Whether the dataloader that is ending has exchanged its values already, and is not the last one."""


class PartsKeeper(Protocol):
    """Keeps the workers' parts of a training epoch's values, in case one is lost."""

    def logged_are_computed(self) -> None:
        """Note that the epoch's logged values are computed."""


class EpochMetrics:
    """Makes the values that callbacks, schedulers and loggers read the same on all workers of a live job.

    Args:
        dataloaders: those of the validation that may be running.
        keeper: keeps the workers' parts of these values.
    """

    def __init__(
        self, round_: Round, batches: Batches, trainer: TrainerPort, dataloaders: ValidationDataloaders, keeper: PartsKeeper
    ) -> None:
        self._round = round_
        self._batches = batches
        self._trainer = trainer
        self._dataloaders = dataloaders
        self._keeper = keeper

    def attach(self) -> None:
        """Wrap the points at which Lightning computes an epoch's values."""
        ignore_advice_to_reduce()
        connector: Any = self._trainer.lightning._logger_connector
        for name in ("epoch_end_reached", "on_epoch_end"):
            connector.__dict__.pop(name, None)
        self._end_epoch: Callable[[], None] = connector.epoch_end_reached
        connector.epoch_end_reached = self._epoch_end_reached
        connector.on_epoch_end = self._after_agreement(connector.on_epoch_end)
        monitoring = [c for c in self._trainer.callbacks if isinstance(c, (EarlyStopping, Checkpoint))]
        for callback in monitoring:
            callback.__dict__.pop("on_train_epoch_end", None)
        if monitoring:
            # They run after the module's own hook, which may have logged the values that they monitor.
            first: Any = monitoring[0]
            first.on_train_epoch_end = self._after_agreement(first.on_train_epoch_end)
        for callback in monitoring:
            for name in ("on_train_batch_end", CANDIDATES):
                callback.__dict__.pop(name, None)
            if lightning_names.saves_by_clock(callback) and isinstance(getattr(callback, "monitor", None), str):
                self._agree_when_read(callback)

    def _agree_when_read(self, callback: Any) -> None:
        """Make a `ModelCheckpoint` with `train_time_interval` exchange its monitored value only when it is about to save.

        It reads the value once all workers have agreed on rank 0's clock.
        """
        end_batch, candidates = callback.on_train_batch_end, getattr(callback, CANDIDATES)
        is_in_step = False

        @wraps(end_batch)
        def on_train_batch_end(*args: Any, **kwargs: Any) -> None:
            nonlocal is_in_step
            is_in_step = True
            try:
                end_batch(*args, **kwargs)
            finally:
                is_in_step = False

        @wraps(candidates)
        def monitor_candidates(*args: Any, **kwargs: Any) -> Any:
            if is_in_step:
                self._agree_on_values_of_step({callback.monitor})
            return candidates(*args, **kwargs)

        callback.on_train_batch_end = on_train_batch_end
        setattr(callback, CANDIDATES, monitor_candidates)

    def _epoch_end_reached(self) -> None:
        self._end_epoch()
        # Lightning ends one of several dataloaders when this worker sees a batch of the next one, so a worker without samples
        # does not end it. A validation's dataloader has exchanged its values once all workers had computed their batches.
        if not self._dataloaders.is_between_dataloaders():
            self.agree()

    def _after_agreement(self, run: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(run)
        def agreed(*args: Any, **kwargs: Any) -> Any:
            self.agree()
            return run(*args, **kwargs)

        return agreed

    def agree(self) -> None:
        """Compute the epoch's values from all workers' parts. All workers call this at the same point of their loops."""
        results = lightning_names.results_of(self._trainer.lightning)
        if results is None or self._round.size == 1:
            return
        names = self._monitored()

        def exchange() -> list[dict[str, Any]]:  # again after a loss, with what this worker may have inherited
            mine = {
                "logged": {key: entry_of(metric) for key, metric in results.items() if _is_due(metric)},
                "monitored": {n: v for n, v in self._values.items() if n in names and isinstance(v, Tensor) and v.numel() == 1},
                "weight": self._batches.sample_weight,
            }
            return transfer.all_gather(mine)

        parts = self._round.exchange("the exchange of logged values", exchange)
        if results is self._trainer.results:
            self._keeper.logged_are_computed()
        entries: dict[str, list[dict[str, Any]]] = {}
        for part in parts:
            for key, entry in part["logged"].items():
                entries.setdefault(key, []).append(entry)
        for key, found in entries.items():
            if key not in results or results[key].has_reset:
                adopt(self._trainer.lightning, results, key, found[0])
            if found[0]["is_tensor"]:
                set_computed(results[key], value_of(results[key].meta, found))
        self._compute_together(results, sorted(key for key, found in entries.items() if not found[0]["is_tensor"]))
        for name in sorted({name for part in parts for name in part["monitored"]}):
            values = [(part["monitored"][name], part["weight"]) for part in parts if name in part["monitored"]]
            self._values[name] = _weighted_mean(values).to(self._trainer.device)

    @contextmanager
    def without_empty_share(self) -> Iterator[None]:
        """Exclude a training step's logged values from the epoch's if it computes a stand-in for a share without samples."""
        results, module = self._trainer.results, self._trainer.module
        own = transfer.dumps(partial_values(results, module)) if not self._batches.current_loss_weight else None
        yield
        if own is not None:
            restore_partial(results, module, transfer.loads(own))

    def agree_on_step(self) -> None:
        """Replace each value that a callback or scheduler monitors after every step by its mean over all workers' samples."""
        self._agree_on_values_of_step(self._monitored_in_steps())

    def _agree_on_values_of_step(self, monitored: Set[str]) -> None:
        names = sorted(monitored)
        if not names or self._round.size == 1:
            return
        fresh = {}
        for metric in self._trainer.results.values():
            name = metric.meta.name if metric.meta.name in names else metric.meta.forked_name(on_step=True)
            is_local = metric.is_tensor and _is_own(metric) and not metric.meta.sync.should
            if name in names and metric.meta.on_step and is_local:
                cache = metric._forward_cache
                if cache is not None and cache is not metric.__dict__.get("_dlrover_step") and not metric.has_reset:
                    fresh[name] = metric
        values = torch.zeros(len(names), 2, dtype=torch.float64)
        for row, name in zip(values, names, strict=True):
            if name in fresh:
                row[0], row[1] = fresh[name]._forward_cache.double().cpu(), self._batches.sample_weight
        parts = self._round.exchange("the exchange of monitored values", lambda: transfer.all_gather(values))
        for i, name in enumerate(names):
            found = [(part[i, 0], float(part[i, 1])) for part in parts if part[i, 1] > 0]
            if name in fresh and found:
                metric = fresh[name]
                is_mean = metric.meta.is_mean_reduction
                reduced = _weighted_mean(found) if is_mean else _combined(metric.meta, [value for value, _ in found])
                metric._forward_cache = metric._dlrover_step = reduced.to(metric._forward_cache)
            elif found:
                self._values[name] = _weighted_mean(found).float().to(self._trainer.device)

    @property
    def _values(self) -> dict[str, Any]:
        connector: Any = self._trainer.lightning._logger_connector
        values: dict[str, Any] = connector._callback_metrics
        return values

    def _monitored(self) -> set[str]:
        """Names that callbacks and schedulers follow."""
        names = {getattr(callback, "monitor", None) for callback in self._trainer.callbacks}
        names |= {config.monitor for config in self._trainer.lightning.lr_scheduler_configs if config.reduce_on_plateau}
        return {name for name in names if isinstance(name, str)}

    def _monitored_in_steps(self) -> set[str]:
        """Names that may be read between this step and the next, rather than after a validation or an epoch."""
        trainer = self._trainer.lightning
        following = (c for c in self._trainer.callbacks if getattr(c, "monitor", None) is not None)
        names = {c.monitor for c in following if _may_read_after(c, trainer.global_step)}
        num_batches = trainer.fit_loop.epoch_loop.batch_idx + 1
        for config in trainer.lr_scheduler_configs:
            if config.reduce_on_plateau and config.interval == "step" and num_batches % config.frequency == 0:
                names.add(config.monitor)
        return {name for name in names if isinstance(name, str)}

    def _compute_together(self, results: Any, keys: Sequence[str]) -> None:
        """Compute torchmetrics objects, which reduce their states themselves, in the same order on all workers."""
        due = [results[key] for key in keys]
        if not due:
            return

        def compute() -> list[Any]:
            # An earlier attempt, ended by the loss of a worker, may have gone further here than elsewhere.
            for metric in due:
                metric.value._computed = None
            return [metric.value.compute() for metric in due]

        values = self._round.exchange("the reduction of logged torchmetrics", compute)
        for metric, value in zip(due, values, strict=True):
            set_computed(metric, value.to(self._trainer.device) if isinstance(value, Tensor) else value)


def _may_read_after(callback: Any, step: int) -> bool:
    """Return whether a callback may read its monitored value before the next step; see `_agree_when_read` for clocks."""
    every = lightning_names.steps_between_saves(callback)
    if isinstance(callback, Checkpoint) and every is not None:
        return bool(every) and step % every == 0
    # The hooks of `Callback` itself and those of Lightning's `EarlyStopping` read nothing in a step.
    return any(not _is_lightnings(getattr(type(callback), hook, None)) for hook in STEP_HOOKS)


def _is_lightnings(function: Any) -> bool:
    return function is None or str(getattr(function, "__module__", "")).startswith(tuple(f"{package}." for package in PACKAGES))


def _is_own(metric: Any) -> bool:
    """Return whether the value is this worker's alone and meant for all: not for a group of the user's, nor for rank 0."""
    sync = metric.meta.sync
    return sync.group is None and not sync.rank_zero_only


def _is_due(metric: Any) -> bool:
    if not metric.meta.on_epoch or metric.has_reset or not _is_own(metric):
        return False
    return metric._computed is None or metric._computed is not metric.__dict__.get("_dlrover_agreed")


def entry_of(metric: Any) -> dict[str, Any]:
    """Return one worker's part of a logged value, as plain data. A torchmetrics object reduces its value itself."""
    is_mean = metric.is_tensor and metric.meta.is_mean_reduction
    return {
        **description(metric),
        "value": metric.value if metric.is_tensor else None,
        "weight": metric.cumulated_batch_size if is_mean else 0,
    }


def adopt(trainer: Any, results: Any, key: str, entry: Mapping[str, Any]) -> None:
    """Add an entry for a name that only other workers have logged in this epoch.

    Args:
        trainer: the Trainer, or one of its loops.
        entry: another worker's `entry_of`.
    """
    described = {name: entry[name] for name in ("meta", "is_tensor", "is_synced", "rank_zero_only")}
    strategy = getattr(trainer, "trainer", trainer).strategy
    results[key] = new_entry(trainer, **described, device=strategy.root_device)


def value_of(meta: Any, entries: Sequence[Mapping[str, Any]]) -> Tensor:
    """Return the epoch's value of several workers' parts."""
    values = [entry["value"] for entry in entries]
    if not meta.is_mean_reduction:
        return _combined(meta, values)
    weight = sum(float(entry["weight"]) for entry in entries)
    total = torch.stack([value.double() for value in values]).sum(0)
    return (total / weight).to(values[0].dtype) if weight else torch.full_like(values[0], float("nan"))


def set_computed(metric: Any, value: Any) -> None:
    """Set the epoch's value of a logged metric to the one that all workers have agreed on. It is not exchanged again."""
    metric._computed = metric._dlrover_agreed = value.to(metric.value.device) if metric.is_tensor else value


def _weighted_mean(values: Sequence[tuple[Tensor, float]]) -> Tensor:
    """Return the mean over samples, which is exactly the workers' value if they all have the same."""
    first = values[0][0]
    if all(torch.equal(value, first) for value, _ in values):
        return first
    weights = [weight for _, weight in values]
    if not sum(weights):
        weights = [1.0] * len(values)
    total = torch.stack([value.double() * weight for (value, _), weight in zip(values, weights, strict=True)]).sum(0)
    dtype = first.dtype if first.is_floating_point() else torch.float32
    return (total / sum(weights)).to(dtype)
