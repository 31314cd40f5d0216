"""Carry a validation run over the loss of a worker without repeating any part of it.

A run passes through three stages, and a loss has another effect in each of them:
  - Before the batches (loading, `on_validation_start`, `on_validation_epoch_start`) nothing is computed yet. A collective that
    fails is repeated, as anywhere outside of steps.
  - In the batches of one dataloader, each worker records the samples that it has computed. After a loss the survivors compare
    these records and deal out the samples that none of them has: the lost worker's, and those that no worker had begun. All
    survivors stay in the loop, so hooks run once, and module modes and swapped weights stay as they are. A dataloader ends with
    a commit: workers exchange their logged values, and each computes the same epoch values from them. Either a survivor has the
    result of that exchange, which then counts for all, or none has. In that case the lost worker's samples are dealt out.
  - After the commit (`on_validation_epoch_end`, `on_validation_end`, saving) results no longer depend on the set of workers.
    Collectives are repeated, or their results shared, one by one. The lost worker's samples are missing there only from values
    that a script accumulates over batches itself, in a list for example.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torchmetrics
from torchmetrics.utilities.data import dim_zero_cat
from torchmetrics.utilities.distributed import gather_all_tensors

from lightning_dlrover.data.lane_plan import share
from lightning_dlrover.lightning_compat import package_of, submodule
from lightning_dlrover.live import lightning_adapter
from lightning_dlrover.live.lightning_adapter import DataFetcher, EvaluationLoop
from lightning_dlrover.live.loader import ElasticLoader
from lightning_dlrover.live.metrics import adopt, entry_of, is_own, set_computed, value_of
from lightning_dlrover.live.order import FitPosition
from lightning_dlrover.live.recovery import Before, ResilientCollectives
from lightning_dlrover.live.replica import TrainerOfFit, send_buffers, take_buffers
from lightning_dlrover.live.train_loaders import TrainLoaders
from lightning_dlrover.rdzv.transport import transfer
from lightning_dlrover.rdzv.transport.transfer import BufferCopies

log = logging.getLogger(__name__)

Positions = npt.NDArray[np.int64]


def deal(missing: Positions, started: Sequence[int], rank: int, samples_per_batch: int, in_step: bool) -> list[Positions]:
    """Return one worker's batches of the samples that are still to be computed.

    Args:
        missing: positions in the dataloader's order.
        started: number of batches that each worker has begun, by rank.
        rank: worker that the batches are for.
        samples_per_batch: over all workers. A batch may become larger, so that every worker has a sample in it.
        in_step: whether the validation step has collectives, so that all workers must end with the same number of batches. If
            too few samples are left for that, the last ones are repeated, as PyTorch's DistributedSampler does.
    """
    size, batches = len(started), list[Positions]()

    def split(chunk: Positions, members: Sequence[int]) -> None:
        if rank in members:
            start, stop = share(len(chunk), members.index(rank), len(members))
            if start < stop:
                batches.append(chunk[start:stop])

    most = max(started)
    late = [[r for r in range(size) if started[r] + i < most] for i in range(most - min(started))] if in_step else []
    for i, members in enumerate(late):
        reserved = sum(len(later) for later in late[i + 1 :])
        wanted = min(len(missing) - reserved, max(1, samples_per_batch // size) * len(members))
        if len(missing) - wanted - reserved < size and i == len(late) - 1:
            wanted = len(missing)
        chunk, missing = missing[:wanted], missing[wanted:]
        split(chunk, members)
    everyone = range(size)
    while len(missing):
        wanted = max(samples_per_batch, size)
        if len(missing) - wanted < size:
            wanted = len(missing)
        chunk, missing = missing[:wanted], missing[wanted:]
        if in_step and len(chunk) < size:
            log.warning("validation: %d samples were left for %d workers; some are counted twice", len(chunk), size)
            chunk = np.resize(chunk, size)
        split(chunk, everyone)
    return batches


@dataclass
class _Report:
    """One survivor's progress in a validation run; exchanged in the round after a loss."""

    run: int  # number of the current validation run, or else the next one
    part: int  # current dataloader
    num_samples: int = 0  # samples of that dataloader; 0 before it has begun
    samples_per_batch: int = 0
    started: int = 0  # number of batches begun
    in_step: bool = False  # whether its validation steps have collectives
    done: bytes = b""  # one bit per sample


@dataclass(eq=False)
class Validation:
    """One worker's part in the validation runs of a live job."""

    _collectives: ResilientCollectives
    _batches: TrainLoaders
    _trainer: TrainerOfFit
    _position: FitPosition
    number: int = 0  # number of the newest run
    _is_under_way: bool = False
    _fetcher: _Fetcher | None = None
    _plans: dict[tuple[int, int], list[Positions]] = field(default_factory=dict)  # dealt out before this worker has come there

    def run(self, run: Callable[[], Any]) -> Any:
        """Run one of Lightning's validations."""
        if not self._position.has_entered:
            return run()
        self.number += 1
        self._position.validation = self.number
        self._is_under_way = True
        try:
            return run()
        finally:
            self._is_under_way = False
            self._position.validation = 0
            if self._fetcher is not None:
                self._fetcher.release_metrics()
            self._fetcher = None
            self._plans = {place: plan for place, plan in self._plans.items() if place[0] > self.number}

    def begin_batches(self, loop: EvaluationLoop, reset: Callable[[], None]) -> None:
        """Run Lightning's preparation of a run's batches, then replace its fetcher by ours."""
        reset()
        self._batches.close_unused()
        if self._position.size > 1:
            module = self._trainer.module
            assert module is not None
            own = BufferCopies(module) if self._trainer.elastic_tables is None else None

            def send() -> dict[str, torch.Tensor]:
                if own is not None:
                    own.restore()  # an aborted attempt may have left anything in them, and this worker may be rank 0 now
                return send_buffers(self._trainer.strategy.model)

            if own is not None:
                own.keep()
            sent = self._collectives.exchange("the broadcast of buffers before a validation", send)
            take_buffers(module, sent)  # they may come from another worker's result
        combined = loop._combined_loader
        # The user's step may take the dataloader's iterator instead of a batch.
        if not self._is_under_way or combined is None or type(loop._data_fetcher).__name__ == "_DataLoaderIterDataFetcher":
            return
        if not loop._is_sequential or not all(isinstance(loader, ElasticLoader) for loader in combined.flattened):
            return  # every worker computes its own loaders' batches, so there is nothing to deal out
        self._fetcher = _fetcher_of(package_of(loop))(self._position, self._collectives, loop, self)
        loop._data_fetcher = self._fetcher

    def end_each_dataloader(self, loop: Any) -> None:
        """Make Lightning end each of several dataloaders once on every worker.

        Lightning ends one when a batch of another one arrives. A worker without a sample of that dataloader would skip its end,
        including the exchange of values for which the others wait.

        Args:
            loop: of a validation or a test, in `fit` or outside of it.
        """
        store = lightning_adapter.own_method(loop, "_store_dataloader_outputs")
        end_run = lightning_adapter.own_method(loop, "on_run_end")

        def end_up_to(number: int) -> None:
            results, position = loop._results, self._position
            newest = results.dataloader_idx
            for each in range(len(loop._logged_outputs), number + 1):
                results.dataloader_idx = each
                position.is_between_dataloaders = self._fetcher is not None and each < loop.num_dataloaders - 1
                store()
            results.dataloader_idx, position.is_between_dataloaders = newest, False

        def store_all() -> None:
            if not loop._is_sequential or loop.num_dataloaders == 1:
                store()
            else:
                end_up_to(loop._results.dataloader_idx or 0)

        def end_all() -> Any:
            if loop._is_sequential and loop.num_dataloaders > 1:
                end_up_to(loop.num_dataloaders - 1)
            return end_run()

        loop._store_dataloader_outputs = store_all
        loop.on_run_end = end_all

    def step(self, loop: EvaluationLoop, evaluate: Callable[..., None], *args: Any) -> None:
        """Run Lightning's work on one validation batch. If its own collectives fail, its samples are dealt out again."""
        fetcher = self._fetcher
        if fetcher is None or self._position.size == 1:
            evaluate(*args)
            return
        before = Before(fetcher.metrics.values(), loop._results)
        progress = loop.batch_progress.state_dict()
        with fetcher.step():
            done = self._collectives.attempt(evaluate, *args)
        if done is None:
            fetcher.take_back()
            before.restore()
            loop.batch_progress.load_state_dict(progress)
            self._collectives.recover()

    def take_plan(self, part: int) -> list[Positions] | None:
        return self._plans.pop((self.number, part), None)

    # --- after a loss ------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Compare the survivors' progress, and deal out the rest of their current dataloader."""
        self._deal_out(self._collectives.gathered(self._report()), self._position.rank)

    def _report(self) -> dict[str, Any]:
        """Return this worker's progress."""
        if not self._is_under_way:
            return vars(_Report(self.number + 1, 0))
        if self._fetcher is None:
            return vars(_Report(self.number, 0))
        return vars(self._fetcher.report(self.number, self._collectives.has_missed_result))

    def _deal_out(self, all_reports: Sequence[dict[str, Any]], rank: int) -> None:
        """Deal out the rest of the survivors' current dataloader.

        Args:
            all_reports: reports of all survivors, by rank.
        """
        reports = [_Report(**report) for report in all_reports]
        place = max((report.run, report.part) for report in reports)
        there = [report if (report.run, report.part) == place else _Report(*place) for report in reports]
        begun = [report for report in there if report.num_samples]
        if not begun:
            if self._is_under_way and place[1] > 0:
                log.info("a worker was lost after its part of the validation was counted")
            return
        length = begun[0].num_samples
        done = np.zeros(length, dtype=bool)
        for report in begun:
            done |= np.unpackbits(np.frombuffer(report.done, dtype=np.uint8), count=length).astype(bool)
        in_step = any(report.in_step for report in begun)
        started = [report.started for report in there]
        batches = deal(np.flatnonzero(~done), started, rank, begun[0].samples_per_batch, in_step)
        fetcher = self._fetcher
        if fetcher is not None and (self.number, fetcher.part) == place:
            fetcher.go_on_with(batches)
        else:
            self._plans[place] = batches


@cache
def _fetcher_of(package: str) -> type[_Fetcher]:
    """Return `_Fetcher` as a data fetcher of the Trainer's own package."""
    return type("_Fetcher", (_Fetcher, submodule(package, "loops.fetchers")._DataFetcher), {})


class _Fetcher(DataFetcher):
    """Hands out this worker's batches of the validation dataloaders, one dataloader after the other."""

    def __init__(
        self, position: FitPosition, collectives: ResilientCollectives, loop: EvaluationLoop, validation: Validation
    ) -> None:
        super().__init__()
        combined = loop._combined_loader
        assert combined is not None
        self.setup(combined)
        assert loop._data_fetcher is not None
        self.fetched = loop._data_fetcher.fetched
        self.part = 0  # index of the dataloader
        self._position = position
        self._collectives = collectives
        self._loop = loop
        self._validation = validation
        self._loaders: list[ElasticLoader] = combined.flattened
        self._limits = loop.max_batches
        self._batches: list[Positions] = []
        self._current: Positions | None = None  # positions of the batch handed out last
        self._started = 0
        self._in_step = False
        self._step_began_at: int | None = None  # number of collectives before the step
        self._is_committing = False
        self._done: npt.NDArray[np.bool_] = np.zeros(0, dtype=bool)
        self._update_counts: dict[str, int] = {}
        modules = loop.trainer.lightning_module.named_modules()
        self.metrics = {name: module for name, module in modules if isinstance(module, torchmetrics.Metric)}
        self._begin_part()

    def __iter__(self) -> _Fetcher:
        return self

    def __next__(self) -> Any:
        self._start_profiler()
        try:
            while self.part < len(self._loaders):
                self._collectives.renew_if_broken()
                loader = self._loaders[self.part]
                if loader.cursor < len(self._batches):
                    return self._fetch(loader)
                self._commit()
            self.done = True
        finally:
            self._stop_profiler()
        raise StopIteration

    def _begin_part(self) -> None:
        self._started, self._in_step, self._current, self._batches = 0, False, None, []
        self._done = np.zeros(0, dtype=bool)
        # Even a dataloader without samples to compute has its place in the order of collectives.
        if self.part == len(self._loaders):
            return
        loader = self._loaders[self.part]
        iter(loader)
        limit = self._limits[self.part]
        self._done = np.zeros(loader.split.num_dealt(limit), dtype=bool)
        self._update_counts = {name: metric._update_count for name, metric in self._to_exchange.items()}
        batches = self._validation.take_plan(self.part)
        if batches is None:
            positions = np.arange(len(self._done))
            batches = deal(positions, [0] * self._position.size, self._position.rank, loader.global_batch_size, in_step=False)
        self.go_on_with(batches)

    def _fetch(self, loader: ElasticLoader) -> Any:
        number = loader.cursor
        batch = next(loader)
        self._current = self._batches[number]
        self._done[self._current] = True
        self._started += 1
        self.fetched += 1
        self.done = self.part == len(self._loaders) - 1 and loader.cursor == len(self._batches)
        return batch, self._started - 1, self.part

    @contextmanager
    def step(self) -> Iterator[None]:
        """Detect whether a validation step has collectives."""
        self._step_began_at = self._position.collective
        try:
            yield
        finally:
            self._in_step = self._has_collectives
            self._step_began_at = None

    @property
    def _has_collectives(self) -> bool:
        began_at = self._step_began_at
        return self._in_step or (began_at is not None and self._position.collective > began_at)

    def take_back(self) -> None:
        """Count the batch handed out last as not computed."""
        assert self._current is not None
        self._done[self._current] = False
        self._started -= 1
        self._in_step = True
        self._step_began_at = None

    def go_on_with(self, batches: list[Positions]) -> None:
        """Compute these batches next, instead of those planned."""
        self._batches = batches
        self._loaders[self.part].deal(batches)
        self.done = False

    def report(self, run: int, has_missed: bool) -> _Report:
        if self._is_committing and has_missed:
            return _Report(run, self.part + 1)
        if self.part == len(self._loaders):
            return _Report(run, self.part)
        return _Report(
            run,
            self.part,
            num_samples=len(self._done),
            samples_per_batch=self._loaders[self.part].global_batch_size,
            started=self._started,
            in_step=self._has_collectives,
            done=np.packbits(self._done).tobytes(),
        )

    # --- the commit ----------------------------------------------------------------------------------------------------

    def _commit(self) -> None:
        """End a dataloader together with the others. If a worker is lost then, there may be more batches to compute."""
        if self._position.size > 1:
            self._is_committing = True
            try:
                outcome = self._collectives.once(
                    lambda: self._collectives.named("the exchange of validated samples", self._exchange_ballots)
                )
            finally:
                self._is_committing = False
            if outcome is None:
                return
            self._take_values([parts["logged"] for parts in outcome[0]])
            self._hold_metrics([parts["metrics"] for parts in outcome[0]])
        self.part += 1
        self._begin_part()

    def _exchange_ballots(self) -> list[dict[str, Any]]:
        """Return all workers' logged values for the current dataloader, by rank."""
        logged = {
            key: entry_of(metric)
            for key, metric in self._loop._results.items()
            if not metric.has_reset and metric.is_tensor and self._is_ours(metric)
        }
        metrics = {
            name: {attr: _state_parts(metric, attr) for attr in metric._reductions}
            for name, metric in self._to_exchange.items()
            if metric._update_count != self._update_counts.get(name, 0)
        }
        return transfer.all_gather({"logged": logged, "metrics": metrics})

    def _is_ours(self, metric: Any) -> bool:
        number = self.part if self._loop.num_dataloaders > 1 else None
        return metric.meta.on_epoch and is_own(metric) and metric.meta.dataloader_idx == number

    def _take_values(self, by_rank: Sequence[dict[str, dict[str, Any]]]) -> None:
        """Compute the epoch's values from those of all workers. Lightning then has no reason to reduce them."""
        results: Any = self._loop._results
        for key in dict.fromkeys(key for logged in by_rank for key in logged):
            found = [logged[key] for logged in by_rank if key in logged]
            if key not in results:  # this worker had no sample
                adopt(self._loop, results, key, found[0])
            results[key].has_reset = False
            set_computed(results[key], value_of(results[key].meta, found))

    @property
    def _to_exchange(self) -> dict[str, torchmetrics.Metric]:
        """Metrics with states to reduce, and without an exchange function of their own."""
        return {name: each for name, each in self.metrics.items() if each._reductions and not callable(each.dist_sync_fn)}

    def _hold_metrics(self, by_rank: Sequence[dict[str, dict[str, list[torch.Tensor]]]]) -> None:
        """Compute torchmetrics objects from the states that all workers have committed."""
        metrics = self._to_exchange
        for name in dict.fromkeys(name for states in by_rank for name in states):
            if (metric := metrics.get(name)) is not None:
                metric.dist_sync_fn = _Committed(metric, [states[name] for states in by_rank if name in states])

    def release_metrics(self) -> None:
        for metric in self.metrics.values():
            if isinstance(metric.dist_sync_fn, _Committed):
                metric.dist_sync_fn = None


class _Committed:
    """Replacement for torchmetrics' exchange: returns the states that all workers have committed, until the metric changes."""

    def __init__(self, metric: torchmetrics.Metric, states: Sequence[dict[str, list[torch.Tensor]]]) -> None:
        self._metric = metric
        self._update_count = metric._update_count
        numbers = {attr: max(len(state[attr]) for state in states) for attr in metric._reductions}
        self._answers = [
            [state[attr][i] for state in states if i < len(state[attr])]
            for attr, number in numbers.items()
            for i in range(number)
        ]
        self._next = 0

    def __call__(self, tensor: torch.Tensor, group: Any = None) -> list[torch.Tensor]:
        if self._metric._update_count != self._update_count or not self._answers:
            self._metric.dist_sync_fn = None
            return torchmetrics.metric.gather_all_tensors(tensor, group)  # type: ignore[attr-defined]
        answer = [part.to(tensor.device) for part in self._answers[self._next]]
        self._next = (self._next + 1) % len(self._answers)
        return answer


def _state_parts(metric: torchmetrics.Metric, attr: str) -> list[torch.Tensor]:
    """Return a state in the parts that torchmetrics exchanges."""
    value = getattr(metric, attr)
    if isinstance(value, torch.Tensor):
        return [value]
    return [dim_zero_cat(value)] if metric._reductions[attr] == dim_zero_cat and len(value) > 1 else list(value)


def exchange_metrics_through(collectives: ResilientCollectives) -> None:
    """Make torchmetrics objects exchange their states as collectives of this job, which survive the loss of a worker."""

    def exchange(result: torch.Tensor, group: Any = None) -> list[torch.Tensor]:
        return gather_all_tensors(result, group) if group is not None else collectives.run(lambda: gather_all_tensors(result))

    torchmetrics.metric.gather_all_tensors = exchange  # type: ignore[attr-defined]
