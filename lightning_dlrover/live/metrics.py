"""Metrics of an epoch whose workers change: what each worker has gathered is kept and merged."""

from __future__ import annotations

import hashlib
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection
from torchmetrics.utilities.data import dim_zero_cat, dim_zero_max, dim_zero_mean, dim_zero_min, dim_zero_sum

from lightning_dlrover.lightning_compat import PACKAGES, Checkpoint, EarlyStopping
from lightning_dlrover.live.lightning_adapter import description, new_entry
from lightning_dlrover.live.order import FitPosition, Position
from lightning_dlrover.live.private_api import CANDIDATES
from lightning_dlrover.live.recovery import ResilientCollectives
from lightning_dlrover.live.replica import TrainerOfFit
from lightning_dlrover.live.train_loaders import TrainLoaders
from lightning_dlrover.rdzv.group.world import World
from lightning_dlrover.rdzv.job.events import ValuesLost
from lightning_dlrover.rdzv.membership.member import Formation
from lightning_dlrover.rdzv.transport import transfer

# Keep logged values independent of the number of workers: merge them when an epoch ends and when a worker leaves.
#
# Lightning leaves a value that was logged without `sync_dist=True` as each worker has it. Callbacks and schedulers that
# follow it would then decide by one worker's share of the samples, and differently on each worker. `EpochMetrics` exchanges
# the logged values of all workers at fixed points, before anything reads them, so all workers hold the same values. The
# exchange carries names and values together, so a name that some workers have not logged cannot mismatch.

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
    """Go back to the values that this worker had accumulated. Values missing in `own` are reset."""
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
    """Reset all torchmetrics objects, as on a joiner. Other workers count the samples in the state that it received."""
    for _, metric in _metrics_of(module):
        if metric._defaults and metric._update_count:
            metric.reset()


def _metric_parts(module: nn.Module) -> list[tuple[str, Metric | MetricCollection]]:
    """Return all torchmetrics objects and collections of them in a module, by path."""
    parts = module.named_modules()
    return [(path, p) for path, p in parts if isinstance(p, Metric | MetricCollection) and type(p).__name__ != "_ResultMetric"]


def _with_own_states(parts: Sequence[tuple[str, Metric | MetricCollection]]) -> Iterator[tuple[str, Metric]]:
    """Return the objects alone, each with a state of its own."""
    for _, part in parts:
        if isinstance(part, MetricCollection):
            list(part.values())  # members of one compute group share the state of the first; each gets its own copy
    yield from ((path, part) for path, part in parts if isinstance(part, Metric))


def _metrics_of(module: nn.Module) -> Iterator[tuple[str, Metric]]:
    return _with_own_states(_metric_parts(module))


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


@dataclass(eq=False)
class EpochMetrics:
    """Makes the values that callbacks, schedulers and loggers read the same on all workers of a live job."""

    _collectives: ResilientCollectives
    _batches: TrainLoaders
    _trainer: TrainerOfFit
    _position: FitPosition
    _kept: KeptValues

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
            saves_by_clock = getattr(callback, "_train_time_interval", None) is not None and hasattr(callback, CANDIDATES)
            if saves_by_clock and isinstance(getattr(callback, "monitor", None), str):
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
        if not self._position.is_between_dataloaders:
            self.agree()

    def _after_agreement(self, run: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(run)
        def agreed(*args: Any, **kwargs: Any) -> Any:
            self.agree()
            return run(*args, **kwargs)

        return agreed

    def agree(self) -> None:
        """Compute the epoch's values from all workers' parts. All workers call this at the same point of their loops."""
        results = self._trainer.lightning._results
        if results is None or self._position.size == 1:
            return
        names = self._monitored()

        def exchange() -> list[dict[str, Any]]:  # again after a loss, with what this worker may have inherited
            mine = {
                "logged": {key: entry_of(metric) for key, metric in results.items() if _is_due(metric)},
                "monitored": {n: v for n, v in self._values.items() if n in names and isinstance(v, Tensor) and v.numel() == 1},
                "weight": self._batches.sample_weight,
            }
            return transfer.all_gather(mine)

        parts = self._collectives.exchange("the exchange of logged values", exchange)
        if results is self._trainer.results:
            self._kept.logged_are_computed()
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
        if not names or self._position.size == 1:
            return
        fresh = {}
        for metric in self._trainer.results.values():
            name = metric.meta.name if metric.meta.name in names else metric.meta.forked_name(on_step=True)
            is_local = metric.is_tensor and is_own(metric) and not metric.meta.sync.should
            if name in names and metric.meta.on_step and is_local:
                cache = metric._forward_cache
                if cache is not None and cache is not metric.__dict__.get("_dlrover_step") and not metric.has_reset:
                    fresh[name] = metric
        values = torch.zeros(len(names), 2, dtype=torch.float64)
        for row, name in zip(values, names, strict=True):
            if name in fresh:
                row[0], row[1] = fresh[name]._forward_cache.double().cpu(), self._batches.sample_weight
        parts = self._collectives.exchange("the exchange of monitored values", lambda: transfer.all_gather(values))
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

        values = self._collectives.exchange("the reduction of logged torchmetrics", compute)
        for metric, value in zip(due, values, strict=True):
            set_computed(metric, value.to(self._trainer.device) if isinstance(value, Tensor) else value)


def _may_read_after(callback: Any, step: int) -> bool:
    """Return whether a callback may read its monitored value before the next step; see `_agree_when_read` for clocks."""
    every: int | None = getattr(callback, "_every_n_train_steps", None)
    if isinstance(callback, Checkpoint) and every is not None:
        return bool(every) and step % every == 0
    # The hooks of `Callback` itself and those of Lightning's `EarlyStopping` read nothing in a step.
    hooks = (getattr(type(callback), name, None) for name in STEP_HOOKS)
    return any(hook is not None and not str(getattr(hook, "__module__", "")).startswith(PACKAGES) for hook in hooks)


def is_own(metric: Any) -> bool:
    """Return whether the value is this worker's alone and meant for all: not for a group of the user's, nor for rank 0."""
    sync = metric.meta.sync
    return sync.group is None and not sync.rank_zero_only


def _is_due(metric: Any) -> bool:
    if not metric.meta.on_epoch or metric.has_reset or not is_own(metric):
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
    results[key] = new_entry(trainer, **described)


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


# Keep what each worker has added to an epoch's values on all other workers, so that a loss takes none of it away.
#
# With each update a worker sends its part of the epoch's values, as it is after that update's training step, to all others.
# The message is sent before the gradients and has arrived before the weights change. So any worker that has made an update
# holds the parts of all workers as of that update, no matter which of them are lost next. Manual optimization decides by
# itself when weights change: there the message follows each batch, and arrives during the next one.
#
# After a loss the survivors compare their newest `Table`, by what they publish on entering the round. The first worker in
# rank order inherits the lost workers' parts. Parts are named, and a worker adds each of them once, however often a round
# breaks.
#
# Before a planned change only the workers that leave send their part once more, as it is at that boundary: what they have
# logged since the update would be lost. All workers do so if their tables are not those of the newest update and epoch.
#
# While no worker has such values, nothing is sent: each vote asks for them. The first values of all, of 0.1 s at most, are
# then lost with their worker. A fit, and each round, begins with messages.
#
# A message has a fixed number of bytes and follows the sender's `Layout`, so that it costs one small collective. Workers
# exchange layouts only if these differ. States of torchmetrics objects that grow or are large are left out; see
# `ValuesLost`.

MAX_STATE_BYTES = 64 << 10
"""Maximum bytes of all states of torchmetrics objects in a message."""

FIRST_BYTES = 1024
"""Bytes of a message until a worker needs more."""

HEAD_BYTES = 16
"""Bytes at the start of a message: digest of its layout, and the bytes that it needs."""

Version = tuple[int, ...]
"""Order of tables: updates, whether the epoch's logged values are computed, round, and 1 after the exchange before a change."""

Name = tuple[str, int]
"""Name of a part: its worker, and the updates after which it was taken."""


@dataclass(frozen=True)
class Layout:
    """What the bytes of a worker's message stand for."""

    logged: tuple[tuple[str, str], ...] = ()  # key and type of each logged value
    # Path of each torchmetrics object, with name, shape and type of its states.
    states: tuple[tuple[str, tuple[tuple[str, tuple[int, ...], str], ...]], ...] = ()
    left_out: tuple[str, ...] = ()  # paths of those whose states are not kept
    described: dict[str, Any] = field(default_factory=dict, compare=False)  # `description` of each logged value

    @property
    def digest(self) -> int:
        text = repr((self.logged, self.states, self.left_out))
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")

    @property
    def num_ints(self) -> int:
        return HEAD_BYTES // 8 + len(self.logged) + len(self.states)


def row_bytes(layout: Layout, digest: int, logged: Sequence[Any], metrics: Sequence[Any], device: torch.device) -> Tensor:
    """Return a worker's part of an epoch's values as bytes, without waiting for the device.

    Args:
        logged: Lightning's entries, as in the layout.
        metrics: torchmetrics objects, as in the layout.
    """
    parts = []
    if logged:
        values = [metric.value for metric in logged]
        nothing = torch.zeros((), dtype=torch.int64, device=device)
        weights = [metric.cumulated_batch_size if metric.meta.is_mean_reduction else nothing for metric in logged]
        weights = [each if isinstance(each, Tensor) else torch.full_like(nothing, each) for each in weights]
        parts += [torch.stack([value.double() for value in values]), torch.stack(weights).double()]
    for metric, (_, states) in zip(metrics, layout.states, strict=True):
        parts += [getattr(metric, name) for name, _, _ in states]
    parts = [part.detach().to(device).reshape(-1).contiguous().view(torch.uint8) for part in parts]
    num_bytes = 8 * layout.num_ints + sum(part.numel() for part in parts)
    numbers = [digest, num_bytes, *(int(not each.has_reset) for each in logged), *(each._update_count for each in metrics)]
    head = torch.tensor(numbers, dtype=torch.int64).view(torch.uint8)
    if device.type != "cpu":
        head = head.pin_memory().to(device, non_blocking=True)
    return torch.cat([head, *parts])


def values_in(row: Tensor, layout: Layout) -> Partial:
    """Return the part of an epoch's values that a `row_bytes` holds."""
    row, place = row.cpu(), 0

    def take(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        nonlocal place
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        place += num_bytes
        return row[place - num_bytes : place].clone().view(dtype).reshape(tuple(shape))

    numbers = take([layout.num_ints], torch.int64).tolist()[HEAD_BYTES // 8 :]
    has_value, counts = numbers[: len(layout.logged)], numbers[len(layout.logged) :]
    values, weights = (take([len(layout.logged)], torch.float64) for _ in range(2))
    logged = {
        key: (value.to(getattr(torch, dtype)), int(weight))
        for (key, dtype), value, weight, is_set in zip(layout.logged, values, weights.tolist(), has_value, strict=True)
        if is_set
    }
    states = {}
    for (path, of_metric), count in zip(layout.states, counts, strict=True):
        found = {name: take(shape, getattr(torch, dtype)) for name, shape, dtype in of_metric}
        if count:
            states[path] = (count, found)
    described = {key: layout.described[key] for key in logged if key in layout.described}
    return {"logged": logged, "states": states, "left_out": list(layout.left_out), "described": described}


@dataclass(frozen=True)
class Table:
    """All workers' parts of an epoch's values after an update."""

    version: Version = (0, 0, 0, 0)
    parts: dict[str, list[tuple[Name, Partial]]] = field(default_factory=dict)  # by worker; several once it inherited some

    def inherited(self, members: Sequence[str], heir: str, number: int) -> Table:
        """Return the table of the next round, in which one worker has the parts of those that are gone."""
        gone = [part for worker, parts in self.parts.items() if worker not in members for part in parts]
        parts = {worker: list(self.parts.get(worker, [])) for worker in members}
        parts[heir] += gone
        updates, is_computed, _, _ = self.version
        return Table((updates, is_computed, number, 0), parts)


@dataclass
class _Message:
    """One exchange of parts on its way, or arrived."""

    updates: int  # label of the table that it becomes
    members: list[str]
    rows: Tensor
    work: Any
    layouts: dict[int, Layout]

    def table(self, round_number: int) -> Table:
        parts = {}
        for worker, row in zip(self.members, self.rows.cpu(), strict=True):
            digest = int(row[:8].clone().view(torch.int64))
            parts[worker] = [((worker, self.updates), values_in(row, self.layouts[digest]))]
        return Table((self.updates, 0, round_number, 0), parts)


class KeptValues:
    """One worker's copy of the job's parts of an epoch's values. Models with sharded tables have snapshots instead."""

    def __init__(self, world: World, trainer: TrainerOfFit, position: FitPosition) -> None:
        self._world = world
        self._trainer = trainer
        self._position = position
        self.begin_fit()

    def begin_fit(self) -> None:
        """Forget the values of a former `fit`."""
        self.are_needed = True  # whether any worker has values
        self._table: Table | _Message = Table()  # of the newest update that counts
        self._begun: _Message | None = None
        self._arrived: _Message | None = None  # of the update that is being made
        self._layout, self._digest = Layout(), Layout().digest
        self._agreed: dict[int, Layout] = {}  # those exchanged in this round
        self._capacity = FIRST_BYTES
        self._seen: set[str] = set()  # paths of torchmetrics objects that training updates
        self._has: set[Name] = set()  # parts of lost workers that this worker's values include, or will
        self._pending: list[tuple[Partial, dict[str, int]]] = []  # parts to add, with the update counts at that time
        self._metrics: list[tuple[str, Any]] | None = None  # torchmetrics objects of the module; None: not looked for yet

    @property
    def version(self) -> Version:
        """Version of this worker's newest table, for the hello of a round."""
        return self._settled().version

    @property
    def _is_on(self) -> bool:
        position = self._position
        return position.has_entered and position.size > 1 and self._trainer.elastic_tables is None

    # --- with each update ----------------------------------------------------------------------------------------------------

    def begin(self, updates: int) -> None:
        """Send this worker's part, as it is after `updates` updates. All workers call this at the same place of a step."""
        if self._is_on and self.are_needed:
            self._begun = self._sent(updates)

    def finish(self) -> None:
        """Wait for the other workers' parts. The device has the results of all collectives begun before."""
        if self._begun is None:
            return
        message, self._begun = self._begun, None
        while True:
            message.work.wait()
            heads = message.rows[:, :HEAD_BYTES].contiguous().view(torch.int64).tolist()
            if (largest := max(num_bytes for _, num_bytes in heads)) > self._capacity:
                self._capacity = 2 * largest
                message = self._sent(message.updates)
                continue
            digests = {digest for digest, _ in heads}
            if len(digests) > 1 and not digests <= self._agreed.keys():
                said = transfer.all_gather(vars(self._layout))
                self._agreed |= {layout.digest: layout for layout in (Layout(**each) for each in said)}
            message.layouts = {**self._agreed, self._digest: self._layout}
            self._arrived = message
            return

    def counts(self) -> None:
        """Note that the update of the newest message counts."""
        formation = self._position.formation
        if self._arrived is not None:
            self._table, self._arrived = self._arrived, None
        elif not self.are_needed and formation is not None:
            version = self._position.updates, 0, formation.round.number, 0
            self._table = Table(version, {worker: [] for worker in formation.round.members})

    def _sent(self, updates: int) -> _Message:
        formation = self._position.formation
        assert formation is not None
        row = self._own_row()
        if len(row) > self._capacity:
            row = row[:HEAD_BYTES]
        rows = row.new_empty(formation.size, self._capacity)
        row = torch.cat([row, row.new_zeros(self._capacity - len(row))])
        # Asynchronous, so that it overlaps with the backward pass, and is not compared with the others' collectives.
        work = dist.all_gather(list(rows.unbind(0)), row, async_op=True)
        return _Message(updates, list(formation.round.members), rows, work, {})

    def _own_row(self) -> Tensor:
        logged = [(key, metric) for key, metric in self._trainer.results.items() if metric.is_tensor and metric.meta.on_epoch]
        metrics, states, left_out, room = [], [], [], MAX_STATE_BYTES
        for path, metric in self._with_states():
            if metric._update_count:
                self._seen.add(path)
            elif path not in self._seen:
                continue
            found = {name: getattr(metric, name) for name in metric._defaults}
            num_bytes = sum(each.nbytes if isinstance(each, Tensor) else room + 1 for each in found.values())
            if num_bytes > room:
                left_out += [path] if metric._update_count else []
                continue
            room -= num_bytes
            metrics.append(metric)
            states.append((path, tuple((name, tuple(each.shape), _name_of(each.dtype)) for name, each in found.items())))
        types = tuple((key, _name_of(metric.value.dtype)) for key, metric in logged)
        layout = Layout(types, tuple(states), tuple(left_out))
        if layout != self._layout:
            described = {key: description(metric) for key, metric in logged}
            self._layout, self._digest = replace(layout, described=described), layout.digest
        device = self._trainer.device
        return row_bytes(self._layout, self._digest, [metric for _, metric in logged], metrics, device)

    @property
    def has_values(self) -> bool:
        """Whether this worker has values that others have to keep."""
        if any(metric.is_tensor and metric.meta.on_epoch for metric in self._trainer.results.values()):
            return True
        return any(metric._update_count for _, metric in self._with_states())

    # --- when the epoch ends -------------------------------------------------------------------------------------------------

    def logged_are_computed(self) -> None:
        """Note that the epoch's logged values are computed: a worker that is lost from here on takes nothing of them away."""
        table = self._settled()
        updates, _, *rest = table.version
        self._table = Table((updates, 1, *rest), table.parts)

    # --- when the round changes ----------------------------------------------------------------------------------------------

    @property
    def is_current(self) -> bool:
        """Whether this worker holds all workers' parts of the epoch's values as of the newest update."""
        if self._trainer.elastic_tables is not None:
            return False
        if isinstance(self._table, _Message):
            return self._table.updates == self._position.updates
        return self._table.version[:2] == (self._position.updates, 0)

    def exchanged(self, formation: Formation, parts: Mapping[str, Partial]) -> None:
        """Take the parts that members of a round have sent to all before a planned change: all that leave, or all at all.

        Args:
            parts: by worker. Those of the others are in all workers' tables, which are current.
        """
        updates, members = self._position.updates, formation.round.members
        held = self._settled().parts if len(parts) < len(members) else {}
        named = {w: [((w, updates), parts[w])] if w in parts else held.get(w, []) for w in members}
        self._table = Table((updates, 0, formation.round.number, 1), named)

    def settle(self, formation: Formation, standing: Mapping[str, Position]) -> None:
        """Bring all members of a new round to one table, in which lost workers' parts belong to another worker."""
        self._begun = self._arrived = None
        self._agreed, self.are_needed = {}, True
        members, me = formation.round.members, self._world.worker_id
        if self._trainer.elastic_tables is not None:
            return
        if not standing:
            self._table = Table((self._position.updates, 0, 0, 0), {w: [] for w in members})
            return
        versions = {w: p.values for w, p in standing.items()}
        newest = max(versions.values())
        source = next(w for w in members if versions.get(w) == newest)
        behind = [w for w in members if versions.get(w) != newest]
        table = self._settled()
        if me == source:
            for worker in behind:
                transfer.send((table.version, table.parts), formation.rank_of(worker))
        elif me in behind:
            version, parts = transfer.receive(formation.rank_of(source))
            table = Table(tuple(version), {w: [(tuple(name), part) for name, part in of_w] for w, of_w in parts.items()})
        heir = next(w for w in members if w in standing)
        self._table = table.inherited(members, heir, formation.round.number)
        if me != heir:
            return
        counted = max(p.updates for p in standing.values())
        gone = sorted(w for w in table.parts if w not in members)
        if table.version[0] < counted and gone:
            self._mark(formation, gone, [])
        is_computed = bool(table.version[1])
        own = {path: count for _, part in table.parts.get(me, []) for path, (count, _) in part["states"].items()}
        for name, part in self._table.parts[me]:
            if name[0] == me or name in self._has:
                continue
            self._has.add(name)
            if left_out := part.get("left_out"):
                self._mark(formation, [name[0]], left_out)
            kept = {} if is_computed else part["logged"]
            states = {path: found for path, found in part["states"].items() if not (is_computed and path not in own)}
            self._pending.append(({**part, "logged": kept, "states": states}, own))

    def _settled(self) -> Table:
        if isinstance(self._table, _Message):
            formation = self._position.formation
            self._table = self._table.table(formation.round.number if formation is not None else 0)
        return self._table

    def merge(self) -> bool:
        """Add inherited parts to this worker's own, where no repeated step goes back. Return whether there were any.

        Metrics that were reset since the parts were taken stay as they are.
        """
        pending, self._pending = self._pending, []
        if not pending:
            return False
        results, module, trainer = self._trainer.results, self._trainer.module, self._trainer.lightning
        for part, counts in pending:
            for key in part["logged"]:
                if key not in results and key in part.get("described", {}):
                    adopt(trainer, results, key, part["described"][key])
            now = dict(self._with_states())
            states = {
                path: found
                for path, found in part["states"].items()
                if path in now and now[path]._update_count >= counts.get(path, 0)
            }
            add_partial(results, module, {"logged": part["logged"], "states": states})
        return True

    def _mark(self, formation: Formation, workers: list[str], names: Sequence[str]) -> None:
        epoch, number = self._trainer.current_epoch, formation.round.number
        who = ", ".join(workers)
        what = f"{', '.join(names)} (its state grows or is large)" if names else "all values of its last batch"
        text = f"epoch {epoch}: the values lack what {who}, which was lost, had added to them: {what}"
        log.warning("%s", text)
        self._world.event(ValuesLost(number, epoch, workers, list(names)), text)

    def _with_states(self) -> Iterator[tuple[str, Any]]:
        if self._metrics is None:
            self._metrics = _metric_parts(self._trainer.module)
        return ((path, metric) for path, metric in _with_own_states(self._metrics) if metric._defaults)


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
