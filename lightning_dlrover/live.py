"""Carry a Lightning training loop from one round of the job to the next.

`LiveTraining` decides, at the few places where the world may change, what this worker has to do: admit a joiner, switch, redo a
step after a loss, or take over a result that only others received. `strategy.py` calls it from Lightning's hooks; the process
groups themselves are formed by `rdzv/world.py`.

Every worker's place in the program is a `Position`. Training steps and the strategy's collectives keep all workers within one
optimizer update and a few small collectives of each other, so after a loss the survivors compare positions and
  - whoever lacks the last update takes weights and optimizer state from one that has it,
  - whoever stands inside a step without having lost an update does the step again, with its new share of the same batch,
  - whoever lacks the result of a collective outside of a step takes it from one that has it.
"""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import math
import os
import random
import socket
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint, ProgressBar
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.trainer.connectors.logger_connector.result import _Metadata, _ResultMetric, _Sync

from lightning_dlrover import memory
from lightning_dlrover.pulse import NUM_SAID, OwnTime, Pulse
from lightning_dlrover.rdzv import transfer
from lightning_dlrover.rdzv.client import EtcdError
from lightning_dlrover.rdzv.loop import Pace, handover, model_fingerprint
from lightning_dlrover.rdzv.meeting import Purpose, shown
from lightning_dlrover.rdzv.records import CheckpointRecord
from lightning_dlrover.rdzv.rounds import View
from lightning_dlrover.rdzv.world import Formation, LeftOutError, World, WorldError
from lightning_dlrover.resources import available_cores
from lightning_dlrover.sampler import ElasticLoader, LoaderState, share
from lightning_dlrover.settings import SettingsInForce
from lightning_dlrover.sharding.snapshot import SnapshotError

if TYPE_CHECKING:
    import lightning as L
    from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop

    from lightning_dlrover.sharding.elastic import ElasticTables
    from lightning_dlrover.strategy import DLRoverStrategy

__all__ = ["LiveTraining", "Position", "Progress", "batches_done", "can_meet", "remaining_batches"]

log = logging.getLogger(__name__)

T = TypeVar("T")

NUM_COPIES = 5
"""Of the model's memory, to be reserved: gradients, their buckets, an optimizer's two moments, the weights as they arrive."""


@dataclass(frozen=True)
class Position:
    """Where a worker stands in the training program; said to the others on entering a round."""

    updates: int  # optimizer updates done (gradient accumulation: windows)
    batch: int  # global batches handed out over all epochs
    in_step: bool
    collective: int  # collectives outside of steps since that batch was handed out
    validation: int  # number of the validation run it is in, 0 outside
    at_boundary: bool  # between two batches and between two windows: where joiners can be given the state
    tables: int = 0  # round whose members hold all sharded tables in their memory; 0: there are none, or they are not whole

    def encode(self) -> bytes:
        return json.dumps(self.__dict__).encode()

    @staticmethod
    def decode(hello: bytes) -> Position | None:
        """None for a joiner, who has no position yet."""
        return Position(**json.loads(hello)) if hello else None


Phase = Literal["setup", "step", "between", "validation", "checkpoint", "resize"]


@dataclass(frozen=True)
class Progress:
    """What a worker does, and how far it is: who makes progress has another one soon."""

    phase: Phase
    round_number: int
    steps_in_round: int
    batch: int  # global batches handed out over all epochs
    counts: tuple[int, ...]  # of updates, collectives and validation batches


@dataclass
class _Logged:
    """One name that the training step has logged; the workers' lists must be alike when the epoch's values are reduced."""

    key: str
    meta: dict[str, Any]  # Lightning's, without its link to the strategy
    has_reset: bool
    is_synced: bool
    rank_zero_only: bool


@dataclass
class _State:
    """All that a joiner needs: Lightning's own checkpoint and what Lightning does not keep in it."""

    checkpoint: dict[str, Any]
    loaders: list[LoaderState]
    updates: int
    validations: int
    torch_seed: int
    python_random: object
    numpy_random: object
    logged: list[_Logged]
    logger_versions: list[Any]
    checkpoint_folders: dict[str, Any]
    saved_request: int


@dataclass
class _Update:
    """What one optimizer update changed; sent to a survivor that missed it."""

    model: dict[str, torch.Tensor]
    optimizers: list[dict[str, Any]]
    manual_steps: dict[str, Any]


def can_meet(hellos: Mapping[str, bytes]) -> bool:
    """Whether those entering a round can go on together: joiners can be given the state only between two steps."""
    positions = [Position.decode(hello) for hello in hellos.values()]
    standing = [p for p in positions if p is not None]
    return len(standing) in (0, len(positions)) or all(p.at_boundary and p.batch == standing[0].batch for p in standing)


def remaining_batches(trainer: L.Trainer) -> float | None:
    """Batches that are still to be trained on; None if nobody knows.

    A batch may take several optimizer steps, as in manual optimization of two models, or be one of several of a step.
    """
    done = batches_done(trainer)
    left = []
    if trainer.max_epochs not in (None, -1):
        assert trainer.max_epochs is not None
        left.append(trainer.num_training_batches * max(trainer.max_epochs, 1) - done)
    if trainer.max_steps != -1:
        steps_per_batch = 1 / trainer.accumulate_grad_batches
        if not trainer.lightning_module.automatic_optimization and done and trainer.global_step:
            steps_per_batch = trainer.global_step / done
        left.append((trainer.max_steps - trainer.global_step) / steps_per_batch)
    return max(0.0, float(min(left))) if left and math.isfinite(min(left)) else None


def batches_done(trainer: L.Trainer) -> int:
    """Batches that the job has trained on, over all epochs; the one that is being computed included."""
    return trainer.fit_loop.epoch_loop.total_batch_idx + 1


class _RepeatValidation(Exception):
    """All survivors stand inside one validation run: it starts over with the samples split anew."""


class _RolledBack(Exception):
    """All workers are back where the newest snapshot was taken: what was going on is left, the batch after it comes next."""


class LiveTraining:
    """One worker's part in a live job, from `Trainer.fit`'s entrance to its end.

    Args:
        formation: the first round, or None on a worker that joins later.
        check_interval_s: about how often the workers agree on whether to switch.
    """

    def __init__(
        self,
        strategy: DLRoverStrategy,
        trainer: L.Trainer,
        world: World,
        formation: Formation | None,
        check_interval_s: float,
    ) -> None:
        self.world = world
        self.formation = formation
        self.is_standby = formation is None
        self.left = False
        self.is_saving = False  # a checkpoint
        self._saved_request = 0  # newest request for a checkpoint that was carried out
        self._strategy = strategy
        self._trainer = trainer
        self.pulse = Pulse()
        self._was_at_boundary = strategy.clock.read()
        self._pace = Pace(world, check_interval_s, self._wishes)
        self._settings = SettingsInForce(available_cores())
        self._updates = 0
        self._batch = 0
        self._in_step = False
        self._collective = 0
        self._validation = 0
        self._num_validations = 0
        self._entered = False  # the training loop was reached: from here on losses are survived
        self._results: dict[tuple[int, int], Any] = {}
        self._missed: dict[tuple[int, int], Any] = {}
        self._weighed: int | None = None  # batch whose gradients are computed, if not the last one handed out
        self._window_is_stale = False  # a worker was lost with its share of the open accumulation window's gradients
        self._at_boundary = False
        self._undo: _Update | None = None
        self._was_rolled_back = False
        self._snapshots_are_readable = False  # not known
        world.activity, world.is_in_step = self._activity, lambda: self._in_step
        self._max_manual_steps = 2  # unknown at first: assume that a batch may hold several optimizer steps
        self._manual_steps = 0
        self._wants_stop = False  # `should_stop` was set on this worker and not on all

    # --- the switch point ----------------------------------------------------------------------------------------------

    def boundary(self, loader: ElasticLoader) -> None:
        """Between two batches: the one point at which survivors, joiners and leavers stand alike."""
        if loader is not self._loaders[0]:
            return
        self._pace.step_ended()
        self._at_boundary = True
        self._follow_plan()
        if not self._entered:
            self._enter(loader)
        elif loader.cursor < len(loader):
            if self._window_is_stale:
                self._redo_window()
            while self._attempt(self._maybe_switch) is None:
                with suppress(_RolledBack):  # to another boundary: this one, as far as the loops are concerned
                    self._recover()
                    self._redo_window()
        self._at_boundary = False
        self._was_at_boundary = self._strategy.clock.read()
        if loader.cursor < len(loader):
            self._batch = self._batch_number + 1
            self._collective = 0
            self._results = {key: value for key, value in self._results.items() if key[0] >= self._batch - 1}

    def _follow_plan(self) -> None:
        """Work as the plan says each worker should; it may do so a few steps earlier or later than others."""
        done = self._settings.follow(self.world.membership.view.plan, self._loaders)
        if done is not None and self._rank == 0 and not self.is_standby:
            self.world.event("settings", done.text, done.data)

    @property
    def untunable(self) -> dict[str, str]:
        """Settings of a plan that this worker cannot carry out, and why."""
        refusal = next((loader.refusal for loader in self._loaders if loader.refusal), "")
        return {"loader_workers": refusal} if refusal else {}

    def _enter(self, loader: ElasticLoader) -> None:
        fingerprint = self._strategy.fingerprint or model_fingerprint(self._trainer.lightning_module)
        loader.warm_up()  # before memory is reserved: pages that forked processes share are copied when they are written
        if self.world.config.max_workers > 1:
            memory.reserve(self._trainer.lightning_module, NUM_COPIES, self._strategy.table_names)
        if self.formation is not None:
            self._entered = True
            progress = self._epoch_loop.batch_progress.current.ready
            for each in self._loaders:
                each.cursor = progress  # not 0 when a checkpoint from inside an epoch was resumed
            self._epoch_loop_fetcher().fetched = progress
            self._updates = self._trainer.global_step
            if self.formation.rank == 0:
                self.world.announce(fingerprint, loader.global_batch_size)
            self._batch = self._batch_number
            if not self.world.has_finished:  # else this is a later `fit`, and the checkpoints are of an earlier one
                while self._attempt(self._resume_newest_checkpoint) is None:
                    self._recover()
        else:
            if self._tables is not None:
                self._tables.make_ready()
            self._admit(fingerprint)
        self._pace.went_on(self._batch_number + 1)

    def _admit(self, fingerprint: str) -> None:
        formation = self._admission(fingerprint)
        while self._attempt(self._settle, formation, None) is None:
            formation = self._recover_formation(b"")
        self._entered = True
        self.is_standby = False

    def _admission(self, fingerprint: str) -> Formation:
        try:
            return self.world.admit(b"", fingerprint)
        except LeftOutError as left_out:
            self._leave(left_out)

    def _maybe_switch(self) -> None:
        if self._in_window and not self.world.broken:
            return  # gradients of earlier micro-batches belong to the current split
        number = self._pace.round_to_switch_to(self._batch_number)
        if self.world.wishes:
            wishes, num_said = self.world.wishes, NUM_SAID * self._size
            self.world.wishes = wishes[: -num_said - 2]
            if wishes[-num_said - 2]:
                self._wants_stop, self._trainer.should_stop = False, True
            self.pulse.hear(wishes[-num_said:], self._pace.step_time_s)
            if (request := wishes[-num_said - 1]) > self._saved_request:
                self._saved_request = request
                self._save_checkpoint()
        if number is not None:
            self._switch(number)
        elif self._tables is not None and self.world.wishes:
            self._tables.voted(self._batch_number, self._packed_snapshot)

    def _save_checkpoint(self) -> None:
        """All workers, between two steps. Where the user has checkpoints kept, else in the Trainer's folder."""
        kept = (c.dirpath for c in self._callbacks if isinstance(c, ModelCheckpoint) and c.dirpath)
        folder = Path(next(kept, self._trainer.default_root_dir))
        self._at_boundary = False  # as far as a worker that is lost meanwhile is concerned
        try:
            self._trainer.save_checkpoint(folder / f"dlrover-{self.world.config.run_id}.ckpt")
        finally:
            self._at_boundary = True

    def _switch(self, number: int) -> None:
        assert self.formation is not None
        round_ = self.world.membership.view.round
        if round_ is not None and (round_.number, round_.kind) == (number, "stop") and self._trainer.checkpoint_callbacks:
            self._save_checkpoint()  # nobody goes on with what is in memory
        self._pace.held_up()
        position = self._position
        # Whether anyone leaves may change until the round has formed, so everyone's sums are kept at hand.
        sums: list[dict[str, tuple[Any, Any]]] = [{} for _ in range(self.formation.size)]
        if self.formation.size > 1:
            sums = transfer.all_gather(self._epoch_sums())
        by_worker = dict(zip(self.formation.round.members, sums, strict=True))
        try:
            formation = self.world.switch(number, position.encode())
        except LeftOutError as left_out:
            if self._tables is not None:
                self._tables.hand_over(left_out.round)
            self._leave(left_out)
        if formation.rank == 0:
            self._add_epoch_sums([s for w, s in by_worker.items() if w not in formation.round.members])
        self._settle(formation, position)

    def _epoch_sums(self) -> dict[str, tuple[Any, Any]]:
        """What this worker has logged so far towards means and sums over the epoch."""
        return {
            key: (metric.value, metric.cumulated_batch_size if metric.meta.is_mean_reduction else 0)
            for key, metric in self._epoch_loop._results.items()
            if metric.is_tensor and metric.meta.on_epoch and (metric.meta.is_mean_reduction or metric.meta.is_sum_reduction)
        }

    def _add_epoch_sums(self, leavers: list[dict[str, tuple[Any, Any]]]) -> None:
        for sums in leavers:
            for key, (value, weight) in sums.items():
                if (metric := self._epoch_loop._results.get(key)) is not None and metric.is_tensor:
                    metric.value = metric.value + value.to(metric.value.device)
                    if metric.meta.is_mean_reduction:
                        metric.cumulated_batch_size = metric.cumulated_batch_size + weight

    # --- training steps ------------------------------------------------------------------------------------------------

    def run_automatic(self, run: Callable[..., Any], optimizer: Any, batch_idx: int, kwargs: Any) -> Any:
        """Lightning's automatic optimization of one batch, done again as often as its collectives fail."""
        progress = self._epoch_loop.automatic_optimization.optim_progress.optimizer
        closes_window = not self._trainer.fit_loop._should_accumulate()
        while True:
            self._in_step = True
            before = copy.deepcopy(progress.state_dict())
            if (done := self._attempt(run, optimizer, batch_idx, kwargs)) is not None:
                result = done[0]
                break
            skip = self._recover()
            progress.load_state_dict(before)
            if skip:
                progress.step.increment_ready()
                progress.step.increment_completed()
                result = {}
                break
            kwargs = self._redo_window(inside=True)
        self._in_step = False
        if closes_window:
            self._updates += 1
        return result

    def run_manual(self, run: Callable[..., Any], kwargs: Any) -> Any:
        """The user's own optimization of one batch, taken back and done again as often as its collectives fail."""
        progress = self._epoch_loop.manual_optimization.optim_step_progress
        while True:
            self._begin_manual_batch()
            before = copy.deepcopy(progress.state_dict())
            if (done := self._attempt(run, kwargs)) is not None:
                result = done[0]
                break
            skip = self._recover()
            if skip:
                result = {}
                break
            if self._manual_steps:
                if self._undo is None:
                    raise WorldError(
                        "a worker was lost after this batch's only optimizer step but before the end of training_step; "
                        "the step cannot be taken back: this worker has to start again"
                    )
                self._apply(self._undo)
            progress.load_state_dict(before)
            kwargs = self._fetch_again(1)[0]
        self._in_step = False
        self._updates += 1
        self._max_manual_steps = self._manual_steps if self._updates == 1 else max(self._max_manual_steps, self._manual_steps)
        self._undo = None
        return result

    def batch_done(self, started: OwnTime) -> None:
        """This worker has computed its share of a batch, since then."""
        if self._entered:
            self.pulse.step_ended(self._strategy.clock.read().since(started), data=started.since(self._was_at_boundary))

    def _begin_manual_batch(self) -> None:
        self._in_step = True
        self._manual_steps, self._undo = 0, None

    def loss_weight(self) -> float:
        """Weight of this worker's mean loss in the batch that is being computed; 1 when all shares are equal."""
        if not self._trainer.training or self._size == 1:
            return 1.0
        loader = self._loaders[0]
        return loader.loss_weight(loader.cursor - 1 if self._weighed is None else self._weighed)

    def before_optimizer_step(self) -> None:
        """Manual optimization: keep what a batch's first update will overwrite, if the batch may hold several."""
        if not self._in_step or self._trainer.lightning_module.automatic_optimization:
            return
        # With sharded tables a loss leads back to a snapshot.
        if self._manual_steps == 0 and self._max_manual_steps > 1 and self._size > 1 and self._tables is None:
            self._undo = copy.deepcopy(self._capture())
        self._manual_steps += 1

    def _attempt(self, run: Callable[..., T], *args: Any) -> tuple[T] | None:
        # The caller recovers outside of the `except` block: a living traceback would keep the old group alive.
        try:
            return (run(*args),)
        except Exception as error:
            if not self._is_failure(error):
                raise
            log.info("worker %s: a collective failed: %s", self.world.worker_id, str(error).splitlines()[0][:200])
        return None

    def _redo_window(self, inside: bool = False) -> Any:
        """Compute the gradients of the accumulation window's earlier batches again, split for the current world.

        Args:
            inside: the last batch handed out is still to be done.

        Returns:
            The arguments of the training step for that batch; None if not `inside`.
        """
        self._window_is_stale = False
        handed_out = self._epoch_loop.batch_progress.current.ready
        earlier = (handed_out - inside) % self._trainer.accumulate_grad_batches
        if earlier == 0 and not inside:
            return None
        optimizer = self._trainer.optimizers[0]
        optimizer.zero_grad()
        steps = self._fetch_again(earlier + inside)
        for i, kwargs in enumerate(steps[:earlier]):
            self._weighed = self._loaders[0].cursor - inside - earlier + i
            with self._strategy.block_backward_sync():
                self._epoch_loop.automatic_optimization._make_closure(kwargs, optimizer, handed_out - inside - earlier + i)()
        self._weighed = None
        return steps[-1] if inside else None

    def _fetch_again(self, num_batches: int) -> list[Any]:
        """The last batches handed out, split for the current world, as arguments of the training step."""
        trainer = self._trainer
        combined = trainer.fit_loop._combined_loader
        assert combined is not None
        loaders = self._loaders
        for loader in loaders:
            if loader.cursor < num_batches:
                raise WorldError("a loader that was cycled cannot be rewound: this worker has to start again")
            loader.reshard(self._rank, self._size, rewind=num_batches)
        steps = []
        for i in range(num_batches):
            parts = [loader.refetch() for loader in loaders]
            batch = torch.utils._pytree.tree_unflatten(parts, combined._spec)
            batch = trainer.precision_plugin.convert_input(batch)
            batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0)
            batch = self._strategy.batch_to_device(batch, dataloader_idx=0)
            batch_idx = self._epoch_loop.batch_progress.current.ready - num_batches + i
            steps.append(self._epoch_loop._build_kwargs(OrderedDict(), batch, batch_idx))
        return steps

    # --- outside of steps ------------------------------------------------------------------------------------------------

    def collective(self, run: Callable[[], T]) -> T:
        """A collective of the strategy: done again with the survivors if it fails, or its result taken from one of them."""
        if not self._entered or self._in_step:
            return run()
        self._collective += 1
        key = (self._batch, self._collective)
        while True:
            if key in self._missed:
                result: T = self._missed.pop(key)
                break
            if (done := self._attempt(run)) is not None:
                result = done[0]
                break
            self._recover()
        self._results[key] = result
        return result

    def agree_on_stop(self, phase: str) -> None:
        """Let `trainer.should_stop` end the loops on all workers at one place.

        Where all have set it, as Lightning's own callbacks do, they stop here. Else those who have not are a step ahead by the
        time this is noticed, so all stop after the next vote.
        """
        trainer = self._trainer
        if not trainer.should_stop or not self._entered or self._size == 1 or not trainer.fit_loop._can_stop_early:
            return
        if self.world.all_reach(f"stop/{phase}/{self._batch}"):
            return
        if not self._wants_stop:
            log.warning("worker %s: trainer.should_stop was not set on all workers; all will stop soon", self.world.worker_id)
        trainer.should_stop, self._wants_stop = False, True

    def check_gradients(self) -> None:
        """Raise if gradients may hold what an aborted reduction has left: it must not reach the weights."""
        if self._size == 1 or not self._entered:
            return
        device = self._strategy.root_device
        if device.type == "cuda":
            # The host does not wait for NCCL: the stream does, and goes on after an abort as after a success.
            torch.cuda.current_stream(device).synchronize()
        if self.world.broken:
            raise self.world.broken_error()

    def check_group(self) -> None:
        """Raise if the group is gone after an abort: collectives of Lightning's would do nothing, and nobody would notice."""
        if self._size > 1 and not dist.is_initialized():
            raise self.world.broken_error()

    def run_validation(self, run: Callable[[], T]) -> T:
        """A validation run, started over when a worker is lost while all are in it."""
        if not self._entered:
            return run()
        self._num_validations += 1
        collective = self._collective
        while True:
            self._validation, self._collective = self._num_validations, collective
            for results in (self._results, self._missed):  # of an attempt that is started over
                for key in [key for key in results if key > (self._batch, collective)]:
                    del results[key]
            try:
                result = self._attempt(run)
                if result is None:
                    self._recover()
            except _RepeatValidation:
                self._epoch_loop.val_loop._results.reset()  # they hold the samples of the attempt that failed
                continue
            if result is None:
                raise WorldError(
                    "a collective inside validation failed while other workers are past this validation run: "
                    "this worker has to start again"
                )
            self._validation = 0
            return result[0]

    def run_saving(self, save: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Lightning's saving of a checkpoint, in which no progress is seen."""
        self.is_saving = True
        try:
            save(*args, **kwargs)
        finally:
            self.is_saving = False

    # --- recovering --------------------------------------------------------------------------------------------------------

    def _recover(self) -> bool:
        """Form the next round with the survivors. Returns whether this step's update was taken over from another worker.

        Raises:
            _RolledBack: the model has sharded tables, which no step in flight leaves whole.
        """
        self._window_is_stale = True
        if self._tables is not None and not self._at_boundary:
            self._tables.broken()
        position = self._position
        self._pace.held_up()
        while True:
            formation = self._recover_formation(position.encode())
            if (settled := self._attempt(self._settle, formation, position)) is not None:
                if self._was_rolled_back:
                    self._was_rolled_back = False
                    raise _RolledBack
                return settled[0]
            position = replace(position, tables=self._tables.whole_in if self._tables is not None else 0)

    def _recover_formation(self, hello: bytes) -> Formation:
        try:
            return self.world.recover(hello)
        except LeftOutError as left_out:
            self._leave(left_out)

    def _settle(self, formation: Formation, own: Position | None) -> bool:
        """Bring everyone in a new round to a common state; returns whether this worker took over a missed update."""
        positions = {w: Position.decode(hello) for w, hello in formation.hellos.items()}
        standing = {w: p for w, p in positions.items() if p is not None}
        plan = handover(formation.round.members, {w: p.updates if p is not None else None for w, p in positions.items()})
        self.formation = formation
        strategy = self._strategy
        strategy.enter_round(formation.rank, formation.size)
        for loader in self._loaders:
            loader.reshard(formation.rank, formation.size)
        me = self.world.worker_id
        if self._tables is not None:
            self._settle_tables(formation, standing, plan.joining)
            self._pace.went_on(self._batch_number + 1)
            return False
        if not standing and me == formation.round.members[0]:
            self._load_newest_checkpoint()
        for source, worker in plan.behind:
            if me == source:
                transfer.send(vars(self._capture()), formation.rank_of(worker))
            elif me == worker:
                missed = standing[source].updates - standing[me].updates
                if missed != 1 or not standing[me].in_step:
                    raise WorldError(f"this worker missed {missed} updates and has to start again")
                self._apply(_Update(**transfer.receive(formation.rank_of(source))))
        if len(standing) > 1:
            self._share_results(formation, standing)
        self._give_state(formation, plan.joining)
        strategy.wrap_model()
        if formation.rank == 0:
            self._take_over_rank_zero()
        last = max((p.batch for p in standing.values()), default=0)
        self._pace.went_on(last + 1)
        validations = {p.validation for p in standing.values()}
        if own is not None and own.validation and validations == {own.validation}:
            raise _RepeatValidation
        return any(me == worker for _, worker in plan.behind)

    # --- sharded tables ------------------------------------------------------------------------------------------------------

    @property
    def _tables(self) -> ElasticTables | None:
        return self._strategy.elastic_tables

    def _wishes(self) -> list[int]:
        assert self.formation is not None
        said = self.pulse.say(self.formation.round.number, self._rank, self._size)
        tables = self._tables.wishes() if self._tables is not None else []
        return [*tables, -int(self._wants_stop), self.world.membership.checkpoint_request(), *said]

    def _settle_tables(
        self, formation: Formation, standing: Mapping[str, Position], joining: Sequence[tuple[str, str]]
    ) -> None:
        """Bring everyone in a new round to a common state: the current one if it is whole, else that of a snapshot."""
        assert self._tables is not None
        stand = [w for w in formation.round.members if w in standing]
        places = {(p.batch, p.updates, p.tables, p.at_boundary) for p in standing.values()}
        # After a loss there is nobody to hand over the shards of those who are lost.
        if formation.round.planned and len(places) == 1 and all(p.at_boundary and p.tables for p in standing.values()):
            try:
                self._strategy.reshard_tables(formation, stand)
            except BaseException:
                self._tables.broken()
                raise
            self._give_state(formation, joining)
        else:
            is_back = self._roll_back(formation, 0 if standing else self._batch_number)
            # Not recovered from in these processes: whoever stands inside the loops cannot be put at their beginning.
            if not is_back and standing:
                raise WorldError(
                    "workers were lost with tables of which no snapshot is complete: all workers have to start again, "
                    "from the newest checkpoint if there is one"
                )
            if not is_back:
                self._strategy.start_tables(formation)
            if not standing:
                # A joiner's loops stand where the user's checkpoint does, though nothing else of it was loaded.
                self._resume_tables_from_disk(formation, self._trainer.global_step if is_back else 0)
        if formation.rank == 0:
            self._take_over_rank_zero()

    def _roll_back(self, formation: Formation, batch: int = 0) -> bool:
        """Go back to the newest snapshot of which every part is left; False if there is none from that batch on."""
        restored = self._strategy.roll_tables_back(formation, batch)
        if restored is None:
            return False
        undone = max(0, self._batch - restored.batch)
        snapshot = transfer.loads(restored.state, classes=(LoaderState, _Logged))
        state = self._with_hparams(_State(**snapshot["state"]))
        for optimizer in self._trainer.optimizers:
            optimizer.zero_grad()
        self._restore(state)
        sums = snapshot["sums"] if restored.is_own else {}
        for key, metric in self._epoch_loop._results.items():
            if metric.is_tensor and key in sums:
                metric.value, weight = sums[key]
                if metric.meta.is_mean_reduction:
                    metric.cumulated_batch_size = weight
            elif metric.is_tensor:
                metric.reset()
        for other in restored.of_lost:
            self._add_epoch_sums([transfer.loads(other, classes=(LoaderState, _Logged))["sums"]])
        # Lightning forgets what was logged before an epoch's first batch, and takes a new process's first one for it.
        self._trainer._logger_connector._first_loop_iter = False if self._loaders[0].cursor else None
        self._in_step = self._window_is_stale = False
        self._collective = self._validation = 0
        self._weighed = self._undo = None
        self._results, self._missed = {}, {}
        self._was_rolled_back = True
        trainer = self._trainer
        if trainer.validating or trainer.sanity_checking:
            self._epoch_loop.val_loop._module_mode.restore(trainer.lightning_module)
        trainer.training = True
        torch.set_grad_enabled(True)
        if formation.rank == 0:
            self.world.event(
                "rollback",
                f"round {formation.round.number}: back at batch {restored.batch}, {undone} to do again",
                {"round": formation.round.number, "batch": restored.batch, "batches": undone},
            )
        return True

    def _snapshot(self) -> dict[str, Any]:
        """All but the tables, as plain data."""
        return {"state": self._message(), "sums": self._epoch_sums()}

    def _packed_snapshot(self) -> bytes:
        """What `_roll_back` reads.

        Raises:
            SnapshotError: it could not be read. Found now, and not when a worker is lost and nothing else is left.
        """
        packed = transfer.dumps(self._snapshot())
        if not self._snapshots_are_readable:
            try:
                transfer.loads(packed, classes=(LoaderState, _Logged))
            except transfer.TransferError as error:
                raise SnapshotError(f"it could not be read again: {error}") from error
            self._snapshots_are_readable = True
        return packed

    def again_if_rolled_back(self, advance: Callable[..., None], fetcher: Any) -> None:
        """Lightning's work on one batch; if all were rolled back meanwhile, on the batch after the snapshot."""
        while True:
            try:
                advance(fetcher)
                return
            except _RolledBack:
                continue

    def end_batch(self, end: Callable[..., None], fetcher: Any) -> None:
        """Lightning's work between two batches, such as validation, which a rollback ends."""
        with suppress(_RolledBack):
            end(fetcher)

    def end_epoch(self, end: Callable[[], None]) -> None:
        """Lightning's work at the end of an epoch; if all were rolled back into the epoch, its rest is done first."""
        epoch_loop, fetcher = self._epoch_loop, self._epoch_loop_fetcher()
        while True:
            try:
                end()
                return
            except _RolledBack:
                while not epoch_loop.done:
                    try:
                        epoch_loop.advance(fetcher)
                        epoch_loop.on_advance_end(fetcher)
                    except StopIteration:
                        break
                    finally:
                        epoch_loop.on_iteration_done()

    def _give_state(self, formation: Formation, joining: Sequence[tuple[str, str]]) -> None:
        """Let joiners have the state, each from the worker it is paired with."""
        me = self.world.worker_id
        state = self._message() if any(me == sender for sender, _ in joining) else None
        for sender, worker in joining:
            if me == sender:
                transfer.send(state, formation.rank_of(worker))
            elif me == worker:
                self._restore(self._received(formation.rank_of(sender)))

    def _share_results(self, formation: Formation, standing: dict[str, Position]) -> None:
        """Give results of collectives outside of steps to those who lack them."""
        places = {w: (p.batch, p.collective) for w, p in standing.items()}
        furthest = max(places.values())
        if all(place == furthest for place in places.values()):
            return
        source = next(w for w in formation.round.members if places.get(w) == furthest)
        if self.world.worker_id == source:
            for worker in formation.round.members:
                if worker != source:
                    transfer.send(self._results, formation.rank_of(worker))
        else:
            results = transfer.receive(formation.rank_of(source))
            self._missed.update({key: value for key, value in results.items() if key not in self._results})

    # --- state ---------------------------------------------------------------------------------------------------------------

    def _capture(self) -> _Update:
        module = self._trainer.lightning_module
        return _Update(
            model={name: value for name, value in module.state_dict().items() if isinstance(value, torch.Tensor)},
            optimizers=[optimizer.state_dict()["state"] for optimizer in self._trainer.optimizers],
            manual_steps=self._epoch_loop.manual_optimization.optim_step_progress.state_dict(),
        )

    def _apply(self, update: _Update) -> None:
        with torch.no_grad():
            for name, value in self._trainer.lightning_module.state_dict().items():
                if isinstance(value, torch.Tensor):
                    value.copy_(update.model[name])
        for optimizer, state in zip(self._trainer.optimizers, update.optimizers, strict=True):
            # Only the state: this worker's schedulers have not seen the update yet and will set the rates themselves.
            optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
        self._epoch_loop.manual_optimization.optim_step_progress.load_state_dict(update.manual_steps)

    def _dump(self) -> _State:
        return _State(
            checkpoint=self._trainer._checkpoint_connector.dump_checkpoint(weights_only=False),
            loaders=[loader.state() for loader in self._loaders],
            updates=self._updates,
            validations=self._num_validations,
            torch_seed=torch.initial_seed(),
            python_random=random.getstate(),
            numpy_random=np.random.get_state(),
            logged=self._logged(),
            logger_versions=[logger.version for logger in self._trainer.loggers],
            checkpoint_folders={c.state_key: c.dirpath for c in self._callbacks if isinstance(c, ModelCheckpoint)},
            saved_request=self._saved_request,
        )

    def _message(self) -> dict[str, Any]:
        """What a joiner is sent; it has the hyperparameters, which may be of any class, from its own script."""
        state = self._dump()
        for part in self._parts_with_hparams():
            for key in (
                part.CHECKPOINT_HYPER_PARAMS_KEY,
                part.CHECKPOINT_HYPER_PARAMS_NAME,
                part.CHECKPOINT_HYPER_PARAMS_TYPE,
            ):
                state.checkpoint.pop(key, None)
        return vars(state)

    def _received(self, from_rank: int) -> _State:
        """What `_message` of another worker has said."""
        return self._with_hparams(_State(**transfer.receive(from_rank, classes=(LoaderState, _Logged))))

    def _with_hparams(self, state: _State) -> _State:
        for part in self._parts_with_hparams():
            if part.hparams:
                state.checkpoint[part.CHECKPOINT_HYPER_PARAMS_KEY] = dict(part.hparams)
        return state

    def _parts_with_hparams(self) -> list[Any]:
        return [
            part for part in (self._trainer.lightning_module, getattr(self._trainer, "datamodule", None)) if part is not None
        ]

    def _restore(self, state: _State) -> None:
        trainer = self._trainer
        for loader, loader_state in zip(self._loaders, state.loaders, strict=True):
            loader.load_state(loader_state)
        for callback in self._callbacks:
            if isinstance(callback, ModelCheckpoint) and callback.state_key in state.checkpoint_folders:
                # It chose one by itself while it was alone, and would refuse the others' best scores because of it.
                callback.dirpath = state.checkpoint_folders[callback.state_key]
        self._restore_checkpoint(state.checkpoint)
        fetcher, cursor = self._epoch_loop_fetcher(), self._loaders[0].cursor
        fetcher.fetched, fetcher.done = cursor, cursor >= len(self._loaders[0])  # it may have been at an epoch's end
        self._updates = state.updates
        self._saved_request = state.saved_request
        self._num_validations = state.validations
        self._batch = self._batch_number
        random.setstate(state.python_random)  # type: ignore[arg-type]
        np.random.set_state(state.numpy_random)  # type: ignore[arg-type]
        # Not the sender's own torch state: two workers must not draw the same dropout masks.
        digest = hashlib.sha256(f"{state.torch_seed}/{self._batch}/{self._rank}".encode()).digest()
        torch.manual_seed(int.from_bytes(digest[:7], "big"))
        for logger, version in zip(trainer.loggers, state.logger_versions, strict=True):
            if hasattr(logger, "_version"):
                logger._version = version
        for logged in state.logged:
            self._adopt(logged)

    def _logged(self) -> list[_Logged]:
        return [
            _Logged(
                key=key,
                meta={**vars(metric.meta), "reduce_fx": metric.meta.reduce_fx.__name__, "_sync": None},
                has_reset=metric.has_reset,
                is_synced=metric.meta.sync.should,
                rank_zero_only=metric.meta.sync.rank_zero_only,
            )
            for key, metric in self._epoch_loop._results.items()
            if metric.is_tensor and metric.meta.sync.group is None
        ]

    def _adopt(self, logged: _Logged) -> None:
        """Have an entry, still without a value, for what the others have logged before this worker came."""
        meta = _Metadata(**logged.meta)
        meta.sync = _Sync(fn=self._strategy.reduce, _should=logged.is_synced, rank_zero_only=logged.rank_zero_only)
        metric = _ResultMetric(meta, is_tensor=True).to(self._strategy.root_device)
        metric.has_reset = logged.has_reset
        self._epoch_loop._results[logged.key] = metric

    def _restore_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        connector = self._trainer._checkpoint_connector
        connector._loaded_checkpoint = checkpoint
        connector.restore_datamodule()
        connector.restore_model()
        connector.restore_callbacks()
        connector.restore_training_state()
        connector._loaded_checkpoint = {}
        fit_loop, epoch_loop = self._trainer.fit_loop, self._epoch_loop
        for loop in (
            fit_loop,
            epoch_loop,
            epoch_loop.val_loop,
            epoch_loop.automatic_optimization,
            epoch_loop.manual_optimization,
        ):
            # The loop goes on where the others are; Lightning's own restart would run hooks and validation again.
            loop._restarting = loop._loaded_from_state_dict = loop._resuming_from_checkpoint = False

    def _resume_newest_checkpoint(self) -> None:
        """First round: go on from the job's newest checkpoint if an earlier life of the job has left one."""
        assert self.formation is not None
        formation = self.formation
        if self._tables is not None:
            self._roll_back(formation, self._batch_number)  # the user's own checkpoint may be newer
            self._was_rolled_back = False
            self._resume_tables_from_disk(formation, self._trainer.global_step)
            return
        found = torch.tensor(formation.rank == 0 and self._load_newest_checkpoint())
        if formation.size > 1:
            dist.broadcast(found, src=0)
        if not found:
            return
        for rank in range(1, formation.size):
            if formation.rank == 0:
                transfer.send(self._message(), rank)
            elif formation.rank == rank:
                self._restore(self._received(0))

    def _resume_tables_from_disk(self, formation: Formation, step: int) -> None:
        """Go on from a checkpoint, of the job's or the user's, if it is newer; tables are read by all, each its own part."""
        record = self.world.membership.newest_checkpoint() if formation.rank == 0 else None
        found = [(record.global_step, record.path)] if record is not None and os.path.isdir(record.path) else []
        found += [self._strategy.unread_checkpoint] if self._strategy.unread_checkpoint is not None else []
        mine = max(found, default=(0, ""))
        newest, path = transfer.all_gather(mine)[0] if formation.size > 1 else mine
        if newest > step and not self._load_checkpoint(CheckpointRecord(path=path, global_step=newest)):
            raise WorldError(f"checkpoint {path}, of step {newest}, cannot be read on this host though rank 0 can")

    def _load_newest_checkpoint(self) -> bool:
        record = self.world.membership.newest_checkpoint()
        return record is not None and record.global_step > self._trainer.global_step and self._load_checkpoint(record)

    def _load_checkpoint(self, record: CheckpointRecord) -> bool:
        if not os.path.isabs(record.path):  # a URL, say; this job writes none
            log.error("run %s: ignored a record of a checkpoint at %r", self.world.config.run_id, record.path)
            return False
        try:
            checkpoint = self._strategy.load_checkpoint(record.path, weights_only=True)
        except FileNotFoundError:
            log.warning("run %s: checkpoint %s is not on this host", self.world.config.run_id, record.path)
            return False
        log.warning("run %s: no living worker has the state; going on from %s", self.world.config.run_id, record.path)
        self._restore_checkpoint(checkpoint)
        progress = self._epoch_loop.batch_progress.current.ready
        for loader in self._loaders:
            loader.set_epoch(self._trainer.current_epoch)
            loader.cursor = progress
        self._epoch_loop_fetcher().fetched = progress
        self._updates = self._trainer.global_step
        self._batch = self._batch_number
        self.world.membership.event(
            "resume",
            f"went on from {record.path} at step {record.global_step}",
            {"global_step": record.global_step},
        )
        return True

    def saved_checkpoint(self, path: str) -> None:
        """Rank 0: remember a checkpoint for the case that no living worker is left."""
        if self._rank != 0 or not self._entered:
            return
        try:
            self.world.membership.put_checkpoint(CheckpointRecord(path=path, global_step=self._trainer.global_step))
        except EtcdError as error:
            log.warning("run %s: checkpoint %s is not on record: %s", self.world.config.run_id, path, error)

    # --- leaving -----------------------------------------------------------------------------------------------------------

    def _leave(self, left_out: LeftOutError) -> NoReturn:
        """End this process: the others go on without it. None of the user's code after `fit` runs."""
        for logger in self._trainer.loggers:
            logger.save()
        self._entered = False
        self.left = True
        log.info("worker %s leaves: %s", self.world.worker_id, left_out)
        raise SystemExit(left_out.exit_code)

    def close_loaders(self) -> None:
        """End the training loaders' processes."""
        if self._trainer.fit_loop._combined_loader is not None:
            for loader in self._loaders:
                loader.close()

    def finish(self) -> None:
        """The training loop has ended here, so all updates are done: from here on the job does not change any more.

        Every worker says so before it goes on: the first one to exit must not be taken for lost.
        """
        if not self._entered:
            return
        if self._size > 1:
            # Once the job has finished there are no more rounds, so nobody may still need one to get its last update.
            try:
                if self._tables is None:
                    self.collective(self._end_together)
                elif self._attempt(self._end_together) is None:
                    self._await_finish()
            except WorldError:
                if not self.world.has_finished:
                    raise
        self._entered = False
        self.world.finish(self._trainer.global_step)

    def _end_together(self) -> None:
        frame = sys._getframe()
        with self.world.compared(lambda: Purpose("the end of fit", place=shown(frame))):
            dist.barrier()

    def _await_finish(self) -> None:
        """The others were not all there at the end: either one has ended already, and has said that all was done, or is lost.

        Raises:
            WorldError: it is lost, and its tables with it. The loops are left: there is nowhere to go back to.
        """
        assert self.formation is not None
        number = self.formation.round.number

        def look(view: View) -> str | None:
            if view.job is not None and view.job.phase in ("finished", "failed"):
                return view.job.phase
            newest = view.round
            return "lost" if newest is not None and newest.number > number and not newest.planned else None

        what = "the others to say that the job has finished"
        if self.world.membership.wait_for(look, self.world.config.wait_timeout_s, what) != "finished":
            raise WorldError(
                "a worker was lost after the last step, with its part of the tables: all workers have to start again, "
                "from the newest snapshot or checkpoint"
            )

    def _take_over_rank_zero(self) -> None:
        """Loggers and progress bars live on rank 0 only; make them live here."""
        for logger in self._trainer.loggers:
            if isinstance(logger, CSVLogger) and logger._experiment is None:
                _adopt_csv_log(logger)
        for bar in [c for c in self._callbacks if isinstance(c, ProgressBar)]:
            if getattr(bar, "is_disabled", False):
                bar.enable()
                bar.on_train_start(self._trainer, self._trainer.lightning_module)
                bar.on_train_epoch_start(self._trainer, self._trainer.lightning_module)

    # --- where things are ----------------------------------------------------------------------------------------------------

    @property
    def _callbacks(self) -> list[Any]:
        callbacks: list[Any] = self._trainer.callbacks  # type: ignore[attr-defined]
        return callbacks

    @property
    def progress(self) -> Progress:
        """For whoever watches over this worker, from another thread."""
        if self.formation is None or not self._entered:
            phase: Phase = "setup"
        elif self._pace.is_held_up:
            phase = "resize"
        elif self.is_saving:
            phase = "checkpoint"
        elif self._validation:
            phase = "validation"
        else:
            phase = "step" if self._in_step else "between"
        counts = (self._updates, self._collective, self._epoch_loop.val_loop.batch_progress.total.ready)
        number = self.formation.round.number if self.formation is not None else 0
        return Progress(phase, number, self._pace.steps_in_round, self._batch, counts)

    def _activity(self) -> str:
        """Where this worker is in the training program, for an error message. Any thread."""
        if not self._entered:
            return "before the first step"
        where = "in a training step" if self._in_step else "between two steps"
        if self._validation:
            where = f"in validation run {self._validation}"
        return f"{where} (batch {self._batch})"

    @property
    def is_in_collective(self) -> bool:
        """Whether this worker waits for others."""
        return self._strategy.clock.is_stopped

    @property
    def step_time_s(self) -> float:
        """Of late; 0 while none is known."""
        return self._pace.step_time_s

    @property
    def loads(self) -> list[float]:
        """Samples of a batch over threads, of each worker by rank."""
        total, size = self._loaders[0].global_batch_size, self._size
        threads = self.pulse.threads if len(self.pulse.threads) == size else (1,) * size
        shares = [share(total, rank, size) for rank in range(size)]
        return [max(1, stop - start) / max(1, count) for (start, stop), count in zip(shares, threads, strict=True)]

    @property
    def remaining_steps(self) -> float | None:
        """Batches that the job has still to do; None if nobody knows."""
        return remaining_batches(self._trainer)

    @property
    def workers_by_host(self) -> dict[str, int]:
        """How many workers of the current round each host has, as far as they are on record."""
        records = self.world.membership.view.workers
        members = self.formation.round.members if self.formation is not None else []
        return Counter([*(records[w].host for w in members if w in records)] or [socket.gethostname()])

    @property
    def _position(self) -> Position:
        return Position(
            self._updates,
            self._batch,
            self._in_step,
            self._collective,
            self._validation,
            self._at_boundary and not self._in_window,
            self._tables.whole_in if self._tables is not None else 0,
        )

    @property
    def _epoch_loop(self) -> _TrainingEpochLoop:
        return self._trainer.fit_loop.epoch_loop

    def _epoch_loop_fetcher(self) -> Any:
        return self._trainer.fit_loop._data_fetcher

    @property
    def _loaders(self) -> list[ElasticLoader]:
        combined = self._trainer.fit_loop._combined_loader
        assert combined is not None
        return [loader for loader in combined.flattened if isinstance(loader, ElasticLoader)]

    @property
    def _batch_number(self) -> int:
        loader = self._loaders[0]
        return loader.epoch * len(loader) + loader.cursor

    @property
    def _in_window(self) -> bool:
        return self._epoch_loop.batch_progress.current.ready % self._trainer.accumulate_grad_batches != 0

    @property
    def _rank(self) -> int:
        return self.formation.rank if self.formation is not None else 0

    @property
    def _size(self) -> int:
        return self.formation.size if self.formation is not None else 1

    def _is_failure(self, error: BaseException) -> bool:
        if not self._entered and self.formation is None:
            return False
        return self.world.is_failure(error)


def _adopt_csv_log(logger: CSVLogger) -> None:
    """Open another worker's metrics.csv for appending; opening it the usual way would delete its rows."""
    file = Path(logger.log_dir) / "metrics.csv"
    if not file.exists():
        return
    content = file.read_bytes()
    writer = logger.experiment
    file.write_bytes(content)
    header = content.decode().splitlines()[:1]
    writer.metrics_keys = header[0].split(",") if header else []
