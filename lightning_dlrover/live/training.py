"""Carry a Lightning training loop from one round of the job to the next.

`LiveTraining` chooses this worker's action at the few places where the world may change: admit a joiner, switch, redo a
step after a loss, or take over a result that only others received. `strategy.py` calls it from Lightning's hooks. The process
groups themselves are formed by `rdzv/group/world.py`.

Every worker's place in the program is a `Position`. Training steps and the strategy's collectives keep all workers within one
optimizer update and a few small collectives of each other. After a loss the survivors compare their positions:
  - A worker that lacks the last update takes weights and optimizer state from one that has it.
  - A worker inside a step that has not lost an update repeats the step, with its new share of the same batch.
  - A worker that lacks the result of a collective outside of a step takes it from one that has it.
  - A worker in a validation run continues it, with a part of the lost worker's samples; see `validation.py`.
"""

from __future__ import annotations

import copy
import json
import logging
import math
import os
import socket
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar

import torch
import torch.distributed as dist
import torchmetrics

from lightning_dlrover.checks.script import (
    BackwardCheck,
    different_rates,
    rates,
    rates_digest,
)
from lightning_dlrover.live import loggers
from lightning_dlrover.live import reserve as memory
from lightning_dlrover.live.data_fingerprint import (
    DataFingerprint,
    fingerprint_data,
    refuse_different_data,
    refuse_other_data,
)
from lightning_dlrover.live.epoch_metrics import (
    EpochMetrics,
    Partial,
    add_partial,
    partial_values,
    reset_metrics,
    restore_partial,
)
from lightning_dlrover.live.loader import (
    ElasticLoader,
    share,
)
from lightning_dlrover.live.redo import (
    Before,
    call_restart_hooks,
    metrics_of,
)
from lightning_dlrover.live.searches import Searches
from lightning_dlrover.live.settings import SettingsInForce
from lightning_dlrover.live.state import (
    STATE_CLASSES,
    StateError,
    TrainerState,
    dump,
    parts_with_hparams,
    restore,
    resume,
)
from lightning_dlrover.live.train_loaders import (
    TrainLoaders,
    refetch,
)
from lightning_dlrover.live.unused_parameters import IncompleteBackwardError
from lightning_dlrover.live.validation import Validation
from lightning_dlrover.observe.pulse import (
    NUM_SAID,
    OwnTime,
    Pulse,
)
from lightning_dlrover.observe.resources import available_cores
from lightning_dlrover.packages import CSVLogger, ModelCheckpoint, ProgressBar, TensorBoardLogger
from lightning_dlrover.rdzv.etcd.errors import EtcdError
from lightning_dlrover.rdzv.group import transfer
from lightning_dlrover.rdzv.group.aborts import wait_for_device
from lightning_dlrover.rdzv.group.left_state import LeftStateError
from lightning_dlrover.rdzv.group.loop import (
    Pace,
    handover,
    model_fingerprint,
)
from lightning_dlrover.rdzv.group.purpose import (
    Purpose,
    place_of,
    shown,
)
from lightning_dlrover.rdzv.group.world import World
from lightning_dlrover.rdzv.job.events import FitResumed, StateRolledBack
from lightning_dlrover.rdzv.job.records import (
    CheckpointRecord,
    from_fields,
)
from lightning_dlrover.rdzv.live.member import (
    Formation,
    LeftOutError,
    RoundEndedError,
    WorldError,
)
from lightning_dlrover.rdzv.live.rounds import View
from lightning_dlrover.tables.snapshot import SnapshotError

if TYPE_CHECKING:
    import lightning as L
    from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop

    from lightning_dlrover.strategy import DLRoverStrategy
    from lightning_dlrover.tables.elastic import ElasticTables

__all__ = ["LiveTraining", "Position", "Progress", "batches_done", "can_meet", "leave_quietly", "remaining_batches"]

log = logging.getLogger(__name__)

T = TypeVar("T")

NUM_COPIES = 5
"""Copies of the model's memory to reserve: gradients, their buckets, an optimizer's two moments, the weights as they arrive."""


@dataclass(frozen=True)
class Position:
    """A worker's place in the training program, published to the others on entering a round."""

    updates: int  # optimizer updates done (gradient accumulation: windows)
    batch: int  # global batches handed out over all epochs
    in_step: bool
    collective: int  # collectives outside of steps since the newest batch was handed out
    validation: int  # number of the current validation run; 0 outside
    at_boundary: bool  # between two batches and two windows, where joiners can receive the state
    tables: int = 0  # last round with all sharded tables in its members' memory; 0: no tables, or incomplete ones
    has_unused: bool = False  # parameters without a gradient were found, so DDP has to search for them
    stopped_at: str = ""  # newest place at which all workers wanted to stop, see `agree_on_stop`

    def encode(self) -> bytes:
        return json.dumps(self.__dict__).encode()

    @staticmethod
    def decode(hello: bytes) -> Position | None:
        """Return the position, or None for a joiner, which has none yet.

        Raises:
            ValueError: these bytes are no position.
        """
        if not hello:
            return None
        fields = json.loads(hello)
        if not isinstance(fields, dict):
            raise ValueError(f"a worker's position is {hello!r:.80}; another program may write into the round's store")
        return from_fields(Position, fields, "a worker's position")


Phase = Literal["setup", "step", "between", "validation", "checkpoint", "resize"]


@dataclass(frozen=True)
class Progress:
    """A worker's activity and counters, which soon change while it makes progress."""

    phase: Phase
    round_number: int
    steps_in_round: int
    batch: int  # global batches handed out over all epochs
    counts: tuple[int, ...]  # updates, collectives, validation batches


@dataclass
class _Update:
    """Everything that one optimizer update changed; sent to a survivor that missed it."""

    model: dict[str, torch.Tensor]
    optimizers: list[dict[str, Any]]
    groups: list[list[dict[str, Any]]]  # each optimizer's own values in its parameter groups, without hyperparameters
    scaler: dict[str, Any]  # mixed precision's loss scaler
    manual_steps: dict[str, Any]
    # Manual optimization: gradients added up by the batches since the last optimizer step, and whether there are any.
    gradients: list[torch.Tensor | None] | None = None  # one per parameter; None: not part of this update
    window_is_open: bool = False


def can_meet(hellos: Mapping[str, bytes]) -> bool:
    """Return whether the workers entering a round can continue together: joiners can receive the state only between steps."""
    positions = [Position.decode(hello) for hello in hellos.values()]
    standing = [p for p in positions if p is not None]
    return len(standing) in (0, len(positions)) or all(p.at_boundary and p.batch == standing[0].batch for p in standing)


def remaining_batches(trainer: L.Trainer) -> float | None:
    """Return the number of batches still to train on; None if it is unknown.

    A batch may take several optimizer steps, as in manual optimization of two models, or be one of several in a step.
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
    """Return the number of batches that the job has trained on, over all epochs, the current one included."""
    return trainer.fit_loop.epoch_loop.total_batch_idx + 1


class _RolledBack(Exception):
    """Abandons the work in progress: all workers are back at the newest snapshot, and the batch after it comes next."""


class _Frozen:
    """The trainable flags of all parameters. Lightning's `toggle_optimizer` changes them for a part of a step."""

    def __init__(self, module: L.LightningModule) -> None:
        self._module = module
        self._flags = [(parameter, parameter.requires_grad) for parameter in module.parameters()]
        self._toggled = dict(module._param_requires_grad_state)

    def restore(self) -> None:
        for parameter, flag in self._flags:
            parameter.requires_grad_(flag)
        self._module._param_requires_grad_state = dict(self._toggled)


class LiveTraining:
    """One worker's part in a live job, from `Trainer.fit`'s entrance to its end.

    Args:
            formation: the first round, or None on a worker that joins later.
            check_interval_s: approximate seconds between two votes on whether to switch.
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
        self.is_saving = False  # set while a checkpoint is saved
        self.is_in_loops = False  # set from the Trainer's run-stage barrier on
        self.searches = Searches(self)
        self._fit = 1  # number of this `fit` in the script
        self._is_finishing = False
        self._is_between_fits = False
        self._undo_quiet: Callable[[], None] | None = None  # set while Lightning handles this worker's leave
        self._saved_request = 0  # newest request for a checkpoint that was carried out
        self._strategy = strategy
        self._trainer = trainer
        self.pulse = Pulse()
        self.backwards = BackwardCheck()
        self.metrics = EpochMetrics(self, trainer)
        self._was_at_boundary = strategy.clock.read()
        self._pace = Pace(world, check_interval_s, self._wishes)
        self._settings = SettingsInForce(available_cores())
        self._train_loaders = TrainLoaders(strategy.has_global_batch_size)
        self._updates = 0
        self._batch = 0
        self._in_step = False
        self._is_redoing = False  # set while the open window's batches are repeated, between two batches
        self._collective = 0
        self._validation = 0
        self.validation = Validation(self)
        self._entered = False  # set once the training loop is reached; from here on the worker survives losses
        self._results: dict[tuple[int, int], Any] = {}
        self._missed: dict[tuple[int, int], Any] = {}
        self._weighed: int | None = None  # batch under computation, if not the last one handed out
        self._window_is_stale = False  # a lost worker took its share of the open accumulation window's gradients
        self._at_boundary = False
        self._undo: _Update | None = None
        self._outgoing: transfer.Packed | None = None  # state for the joiners of the round that is being formed
        self._names_in_state: frozenset[str] = frozenset()  # classes that this script keeps in checkpoints
        self._was_rolled_back = False
        self._snapshots_are_readable = False  # False until one was read back
        world.activity, world.is_in_step = self._activity, lambda: self._is_computing
        self._max_manual_steps = 0  # most optimizer steps in one batch; 0: not known, so there may be several
        self._manual_steps = 0
        self._wants_stop = False  # `should_stop` was set on this worker and not on all
        self._vote_fit = 0  # `fit` of the script in which the newest vote began
        self._stopped_at = ""  # newest place at which all workers had set `should_stop`
        self._manual_window_is_open = False  # the last batches ended without an optimizer step
        self._before: Before | None = None  # record from before the open accumulation window
        self._metrics: list[torchmetrics.Metric] = []  # torchmetrics objects of the user's module
        self._frozen: _Frozen | None = None  # set while a manual step may freeze parameters, as `toggle_optimizer` does
        self._gradients: list[torch.Tensor | None] | None = None  # gradients of the parameters before a manual step
        self._num_backwards = 0  # backward passes in the current step
        self._max_backwards = 0  # most backward passes in one step; 0: not known

    def fit_begins(self) -> None:
        """Reset the state of one `fit`, before Lightning's loops run."""
        self.world.num_fits += 1
        self._fit = self.world.num_fits
        self._manual_window_is_open = self._wants_stop = self._window_is_stale = False
        self._stopped_at = ""

    def begin_later_fit(self) -> None:
        """Continue with the remaining workers before another `fit` of the script sets up.

        A worker may have been lost since the last step. If that happened while all workers met at the end of `fit`, some have
        continued and others have not. They meet here, and those that are behind receive the results that they lack.
        Raises:
            WorldError: no round could be formed.
        """
        if self.world.num_fits == 0 or self.is_standby:
            return  # this is the first `fit`
        number = self.world.num_fits + 1
        self.world.begin_fit(number)  # no later: a worker lost from here on must not count as finished
        if self._size == 1 or self._tables is not None:
            return
        self._entered = self._is_between_fits = True
        try:
            self.exchange(f"the start of fit number {number}", self._meet)
        finally:
            self._entered = self._is_between_fits = False

    def _meet(self) -> None:
        if not dist.is_initialized():
            raise RoundEndedError("the round has ended")  # this worker left it at the end of the former `fit`
        dist.barrier()

    # --- the switch point ----------------------------------------------------------------------------------------------

    def boundary(self, loader: ElasticLoader) -> None:
        """Run the switch point between two batches: the only place where survivors, joiners and leavers have the same state."""
        if loader is not self._loaders[0] or self.searches.is_running:
            return
        self._keep_step()
        self._pace.step_ended()
        self._at_boundary = True
        self._follow_plan()
        if not self._entered:
            self._enter(loader)
        elif loader.cursor < loader.num_epoch_batches:
            while self._attempt(self._bring_up_to_date) is None:
                with suppress(_RolledBack):  # then this is another boundary; the loops see no difference
                    self._recover()
        self._strategy.wrap_what_was_unfrozen()
        self._at_boundary = False
        self._was_at_boundary = self._strategy.clock.read()
        if loader.cursor < loader.num_epoch_batches:
            self._batch = self._batch_number + 1
            self._collective = 0
            self._results = {key: value for key, value in self._results.items() if key[0] >= self._batch - 1}

    def _keep_step(self) -> None:
        combined = self._trainer.fit_loop._combined_loader
        assert combined is not None
        self._train_loaders.keep_step(combined, self._loaders, int(self._trainer.num_training_batches))

    def _follow_plan(self) -> None:
        """Apply the plan's settings for each worker. Other workers may do so a few steps earlier or later."""
        done = self._settings.follow(self.world.membership.view.plan, self._loaders)
        if done is not None and self._rank == 0 and not self.is_standby:
            self.world.event(*done)

    @property
    def untunable(self) -> dict[str, str]:
        """Settings of a plan that this worker cannot carry out, each with the reason."""
        refusal = next((loader.refusal for loader in self._loaders if loader.refusal), "")
        return {"loader_workers": refusal} if refusal else {}

    def _enter(self, loader: ElasticLoader) -> None:
        fingerprint = self._strategy.fingerprint or model_fingerprint(self._trainer.lightning_module)
        data = self._fingerprint_data()
        self._metrics = metrics_of(self._trainer.lightning_module)
        loader.warm_up()  # before memory is reserved: forked processes share pages, which are copied on the next write
        if self.world.config.max_workers > 1:
            memory.reserve(self._trainer.lightning_module, NUM_COPIES, self._strategy.table_names)
        if self.formation is not None:
            self._entered = True
            progress = self._epoch_loop.batch_progress.current.ready
            for each in self._loaders:
                each.cursor = progress  # not 0 when a checkpoint from inside an epoch was resumed
            self._epoch_loop_fetcher().fetched = progress
            self._updates = self._trainer.global_step
            self.world.announce(fingerprint, loader.global_batch_size, data.encode())
            self._batch = self._batch_number
            while self._attempt(self._begin_together, data) is None:
                self._recover()
        else:
            if self._tables is not None:
                self._tables.make_ready()
            self._names_in_state = self._names_in_own_state()
            self._admit(fingerprint, data)
        self._pace.went_on(self._batch_number + 1)

    def _begin_together(self, data: DataFingerprint) -> None:
        """First round: compare the members' data, join their loggers' runs, and resume an earlier life of the job."""
        assert self.formation is not None
        self._names_in_state = self._names_in_own_state()
        if self.formation.rank == 0 and self.world.config.max_workers > 1:
            loggers.begin(self._trainer.loggers)
        if self.formation.size > 1:
            runs = transfer.all_gather(loggers.capture(self._trainer.loggers) if self.formation.rank == 0 else [])[0]
            if self.formation.rank != 0:
                loggers.adopt(self._trainer.loggers, runs)
        has_finished = self.world.has_finished
        if self.formation.size > 1:
            mine = data.encode(), [loader.order_seed for loader in self._loaders], has_finished
            said = transfer.all_gather(mine)
            refuse_different_data([other for other, _, _ in said], f"run {self.world.config.run_id!r}")
            self._train_loaders.take_order_seeds(said[0][1])
            has_finished = any(each for _, _, each in said)  # workers learn of it at different times
        if not has_finished:  # else this is a later `fit`, and the checkpoints belong to an earlier one
            self._resume_newest_checkpoint()

    def _fingerprint_data(self) -> DataFingerprint:
        val = self._epoch_loop.val_loop._combined_loader
        val_loaders = [x for x in val.flattened if isinstance(x, ElasticLoader)] if val is not None else None
        compare = self._strategy.compares_data and self.world.config.max_workers > 1
        return fingerprint_data(self._loaders, val_loaders, compare)

    def _admit(self, fingerprint: str, data: DataFingerprint) -> None:
        self._refuse_data_of_another_job(data)
        formation = self._admission(fingerprint)
        self._refuse_data_of_another_job(data)  # again, as the job may have begun only now
        try:
            while self._attempt(self._settle, formation, None) is None:
                formation = self._recover_formation(b"")
        except Exception:
            self.world.resign()  # so that the others need not wait until this process ends
            raise
        self._entered = True
        self.is_standby = False

    def _refuse_data_of_another_job(self, data: DataFingerprint) -> None:
        job = self.world.membership.view.job
        if job is not None and job.data:
            run = f"run {self.world.config.run_id!r}: this worker's data"
            refuse_other_data(data, job.data, run, "the job's", self.world.consequence_of_refusal())

    def _admission(self, fingerprint: str) -> Formation:
        try:
            return self.world.admit(b"", fingerprint)
        except LeftOutError as left_out:
            self._leave(left_out)

    def _bring_up_to_date(self) -> None:
        """Redo the work of a lost worker, then check whether the world is to change."""
        if self._window_is_stale:
            self._is_redoing = True
            try:
                self._redo_window()
            finally:
                self._is_redoing = False
        self._maybe_switch()

    def _maybe_switch(self) -> None:
        if self._in_window and not self.world.broken:
            return  # gradients of earlier micro-batches belong to the current split
        number = self._pace.round_to_switch_to(self._batch_number)
        if self.world.wishes:
            wishes, num_said = self.world.wishes, NUM_SAID * self._size
            # The first vote may have begun in an earlier fit, with a model that had tables.
            self.world.wishes = wishes[: -num_said - 4] if self._tables is not None else []
            if wishes[-num_said - 3] != -wishes[-num_said - 2]:
                self._refuse_different_rates()
            if wishes[-num_said - 4] and self._vote_fit == self._fit:  # else the vote began in an earlier fit
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
        """Save a checkpoint where the user keeps them, else in the Trainer's folder. All workers call it between two steps."""
        kept = (str(c.dirpath) for c in self._callbacks if isinstance(c, ModelCheckpoint) and c.dirpath)
        folder = next(kept, str(self._trainer.default_root_dir)).rstrip("/")  # may be a URL
        self._at_boundary = False  # a loss meanwhile must not count as one at a boundary
        try:
            self._trainer.save_checkpoint(f"{folder}/dlrover-{self.world.config.run_id}.ckpt")
        finally:
            self._at_boundary = True

    def _switch(self, number: int) -> None:
        former = self.formation
        assert former is not None
        round_ = self.world.membership.view.round
        assert round_ is not None  # the workers have voted for it
        is_leaving = self.world.worker_id not in round_.members
        # The set of leavers may change until the round has formed, so every worker's values are kept at hand.
        values = self._partial_values(with_large=is_leaving) if former.size > 1 else {}
        said = self._gathered(((round_.number, round_.kind, round_.members), values))
        parts: list[Partial] = [each for _, each in said]
        # Some workers may already see a newer round than the one voted for. All decide by the union of the rounds they see.
        seen = [each for each, _ in said]
        if any((its_number, kind) == (number, "stop") for its_number, kind, _ in seen):  # the state in memory would be lost
            self._keep_for_successors()
            if self._trainer.checkpoint_callbacks:
                self._save_checkpoint()
        self._pace.held_up()
        # By all workers, while the former group exists: a user's `on_save_checkpoint` may hold a collective.
        is_joined = any(not {*members} <= {*former.round.members} for _, _, members in seen)
        self._outgoing = self._packed_message() if is_joined and self._tables is None else None
        if self.formation is not former:
            # A worker was lost meanwhile, and the survivors have met in another round. They vote again there.
            self._outgoing = None
            return
        self._collective += 1  # a worker that reaches this line has the results of all collectives above
        position = self._position
        by_worker = dict(zip(former.round.members, parts, strict=True))
        try:
            formation = self.world.switch(number, position.encode())
        except LeftOutError as left_out:
            if self._tables is not None:
                self._tables.hand_over(left_out.round)
            self._leave(left_out)
        if formation.rank == 0:
            self._add_partials([part for w, part in by_worker.items() if w not in formation.round.members])
        self._settle(formation, position)

    def _keep_for_successors(self) -> None:
        """Keep the state in host memory if no worker stays, where the agent is about to start another group of workers."""
        if self._tables is not None or self._fit > 1 or not any(self._gathered(self.world.left_state is not None)):
            return
        values = self._gathered(self._partial_values())
        step = self._trainer.global_step
        try:
            packed = transfer.pack({"state": self._message(), "values": values})
            self.world.keep_for_successors(step, packed)
        except Exception as error:
            if self.world.is_failure(error):
                raise
            log.error("run %s: the next group of workers cannot go on from step %d: %s", self.world.config.run_id, step, error)

    def _resume_left_state(self) -> bool:
        """Continue from the state that a former group of workers left in its host's memory, unless a checkpoint is newer.

        All members call it in a round in which no worker has the state. Returns whether they continued from it.
        """
        if self._tables is not None:
            return False
        left, record = self.world.left_state, self._unread_checkpoint()
        mine = left.step() if left is not None else None, record.global_step if record is not None else 0
        said = self._gathered((mine, self.world.has_finished))
        if any(has_finished for _, has_finished in said):  # workers learn of it at different times
            return False
        found = [each for each, _ in said]
        newest = max([step for step, _ in found if step is not None], default=-1)
        if newest < max([self._trainer.global_step, *(saved for _, saved in found)]):
            return False
        source = [step for step, _ in found].index(newest)
        message: Any = None
        if left is not None and self._rank == source:
            try:
                message = left.read(STATE_CLASSES, self._names_in_state)
            except LeftStateError as error:
                log.warning("run %s: %s", self.world.config.run_id, error)
        if not any(self._gathered(message is not None)):
            return False
        for rank in (rank for rank in range(self._size) if rank != source):
            if self._rank == source:
                transfer.send(message, rank)
            elif self._rank == rank:
                message = transfer.receive(source, STATE_CLASSES, self._names_in_state)
        try:
            self._restore(TrainerState(**message["state"]), enters_epoch=True)
        except Exception as error:
            if left is not None and not self.world.is_failure(error):
                left.remove()  # else the next group would end like this one
            raise
        if self._rank == 0:
            self._add_partials(message["values"])
            text = f"went on from the state of step {newest} in a host's memory"
            self.world.event(FitResumed(newest), text)
        # Lightning drops values logged before an epoch's first batch, and mistakes a new process's first batch for that one.
        self._trainer._logger_connector._first_loop_iter = False if self._loaders[0].cursor else None
        return True

    def _partial_values(self, with_large: bool = True) -> Partial:
        """Return the values that this worker has logged so far in this epoch."""
        return partial_values(self._epoch_loop._results, self._trainer.lightning_module, with_large)

    def _add_partials(self, parts: Sequence[Partial]) -> None:
        for part in parts:
            add_partial(self._epoch_loop._results, self._trainer.lightning_module, part)

    # --- training steps ------------------------------------------------------------------------------------------------

    def run_automatic(self, run: Callable[..., Any], optimizer: Any, batch_idx: int, kwargs: Any) -> Any:
        """Run Lightning's automatic optimization of one batch, and repeat it as often as its collectives fail."""
        progress = self._epoch_loop.automatic_optimization.optim_progress.optimizer
        closes_window = not self._trainer.fit_loop._should_accumulate()
        again = False

        def compute() -> Any:
            # A worker may also be lost while earlier batches are computed again.
            own = self._redo_window(inside=True) if again else kwargs
            self._num_backwards = 0  # those of earlier batches do not belong to this step
            return run(optimizer, batch_idx, own)

        if (self._epoch_loop.batch_progress.current.ready - 1) % self._trainer.accumulate_grad_batches == 0:
            self._remember()
        undo = self._copy_if_weights_move_inside(optimizer) if closes_window else None
        while True:
            self._in_step = True
            before = copy.deepcopy(progress.state_dict())
            if (done := self._attempt(compute)) is not None:
                result = done[0]
                break
            skip = self._recover()
            progress.load_state_dict(before)
            if skip:
                progress.step.increment_ready()
                progress.step.increment_completed()
                result = {}
                break
            if undo is not None:
                self._apply(copy.deepcopy(undo))
            call_restart_hooks(self._trainer, batch_idx)
            again = True
        self._in_step = False
        if closes_window:
            self._max_backwards = max(self._max_backwards, self._num_backwards)
            self._updates += 1
            self._before = None
        self.metrics.agree_on_step()
        return result

    def run_manual(self, run: Callable[..., Any], kwargs: Any) -> Any:
        """Run the user's own optimization of one batch. Undo and repeat it as often as its collectives fail."""
        progress = self._epoch_loop.manual_optimization.optim_step_progress
        self._remember()
        if self._size > 1:
            self._frozen = _Frozen(self._trainer.lightning_module)
            self._gradients = self._copy_of_gradients()
        while True:
            self._begin_manual_batch()
            before = copy.deepcopy(progress.state_dict())
            skip = False
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
            self._restore_gradients()
            call_restart_hooks(self._trainer, self._epoch_loop.batch_progress.current.ready - 1)
            if self._before is not None:
                self._before.restore()
            kwargs = self._fetch_again(1)[0]
            self._is_logged_for(kwargs)
        self._in_step = False
        self._updates += 1
        self._max_manual_steps = max(self._max_manual_steps, self._manual_steps)
        if not skip:  # else the window is the other worker's, as this worker took over its update
            # If no step was ever seen, the user steps optimizers that Lightning has not wrapped.
            self._manual_window_is_open = self._manual_steps == 0 and progress.total.completed > 0
        self._undo = self._before = self._frozen = self._gradients = None
        self.metrics.agree_on_step()
        return result

    def _remember(self) -> None:
        """Record the logged values before an accumulation window, in case its batches are computed again."""
        self._before = Before(self._metrics, self._epoch_loop._results) if self._size > 1 else None

    def _copy_if_weights_move_inside(self, optimizer: Any) -> _Update | None:
        """Copy the state that `optimizer.step` overwrites between evaluations of its closure; None if it has only one."""
        raw = getattr(optimizer, "optimizer", optimizer)  # unwraps Lightning's optimizer
        of_torch = type(raw).__module__.startswith("torch.optim")
        moves = isinstance(raw, torch.optim.LBFGS) or self._max_backwards > 1 or (self._max_backwards == 0 and not of_torch)
        if not moves or self._size == 1 or self._tables is not None:
            return None
        return copy.deepcopy(self._capture())

    def _copy_of_gradients(self) -> list[torch.Tensor | None]:
        """Return the gradients that a manual step adds to; none where the step before has used them."""
        parameters = list(self._trainer.lightning_module.parameters())
        if not self._manual_window_is_open:
            return [None] * len(parameters)
        return [None if p.grad is None else p.grad.detach().clone() for p in parameters]

    def _restore_gradients(self) -> None:
        self._set_gradients(self._gradients or ())

    def _set_gradients(self, gradients: Sequence[torch.Tensor | None]) -> None:
        for parameter, gradient in zip(self._trainer.lightning_module.parameters(), gradients, strict=False):
            parameter.grad = None if gradient is None else gradient.to(parameter.device, copy=True)

    def _last_update(self) -> _Update:
        """Return the state for a worker that lacks this one's last update. This worker may be in the step after it."""
        gradients = None
        if not self._trainer.lightning_module.automatic_optimization:
            gradients = self._gradients if self._gradients is not None else self._copy_of_gradients()
        return replace(self._capture(), gradients=gradients, window_is_open=self._manual_window_is_open)

    def backward_begins(self) -> None:
        self._num_backwards += 1

    def batch_done(self, started: OwnTime) -> None:
        """Record the time of this worker's share of a batch.

        Args:
            started: clock reading when the share began.
        """
        if self._entered:
            self.pulse.step_ended(self._strategy.clock.read().since(started), data=started.since(self._was_at_boundary))

    def _begin_manual_batch(self) -> None:
        self._in_step = True
        self._manual_steps, self._undo = 0, None
        self.backwards.batch_begins()

    def loss_weight(self) -> float:
        """Return the weight of this worker's mean loss in the current batch; 1 when all shares are equal."""
        if not self._trainer.training or self._size == 1:
            return 1.0
        loader = self._loaders[0]
        return self._train_loaders.loss_weight(loader.cursor - 1 if self._weighed is None else self._weighed)

    def before_optimizer_step(self, optimizer: Any, closure: Any) -> None:
        """Manual optimization: keep the state that a batch's first update will overwrite, if the batch may hold several."""
        if not self._in_step or self._trainer.lightning_module.automatic_optimization:
            return
        if self.world.config.max_workers > 1:
            self.backwards.optimizer_step(optimizer, closure)
        # With sharded tables, recovery from a loss goes back to a snapshot.
        if self._manual_steps == 0 and self._max_manual_steps != 1 and self._size > 1 and self._tables is None:
            self._undo = copy.deepcopy(self._capture())
        self._manual_steps += 1

    def _attempt(self, run: Callable[..., T], *args: Any) -> tuple[T] | None:
        # The caller recovers outside of the `except` block, because a live traceback would keep the old group alive.
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
                inside: whether the last batch handed out is still to be computed.

        Returns:
            The arguments of the training step for that batch; None if not `inside`.
        """
        handed_out = self._epoch_loop.batch_progress.current.ready
        earlier = (handed_out - inside) % self._trainer.accumulate_grad_batches
        is_automatic = self._trainer.lightning_module.automatic_optimization
        # In manual optimization, gradients of earlier batches are already means over all workers of that time.
        if not inside and (earlier == 0 or not is_automatic):
            self._window_is_stale = False
            return None
        if self._before is not None:
            self._before.restore()
        optimizer = self._trainer.optimizers[0]
        optimizer.zero_grad()
        steps = self._fetch_again(earlier + inside)
        try:
            for i, kwargs in enumerate(steps[:earlier]):
                self._weighed = self._loaders[0].cursor - inside - earlier + i
                self._is_logged_for(kwargs)
                batch_idx = handed_out - inside - earlier + i
                with self._strategy.block_backward_sync():
                    self._epoch_loop.automatic_optimization._make_closure(kwargs, optimizer, batch_idx)()
        finally:
            self._weighed = None
        self._window_is_stale = False
        if inside:
            self._is_logged_for(steps[-1])
        return steps[-1] if inside else None

    def _is_logged_for(self, kwargs: Any) -> None:
        """Make Lightning weight the next logged values by the size of this batch."""
        results = self._epoch_loop._results
        results.batch, results.batch_size = kwargs["batch"] if "batch" in kwargs else next(iter(kwargs.values())), None

    def _fetch_again(self, num_batches: int) -> list[Any]:
        """Return the last batches handed out, split for the current world, as arguments of the training step."""
        trainer = self._trainer
        combined = trainer.fit_loop._combined_loader
        assert combined is not None
        loaders = self._loaders
        for loader in loaders:
            loader.reshard(self._rank, self._size, rewind=num_batches)
        steps = []
        for i in range(num_batches):
            batch = refetch(combined, loaders)
            batch = trainer.precision_plugin.convert_input(batch)
            batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0)
            batch = self._strategy.batch_to_device(batch, dataloader_idx=0)
            batch_idx = self._epoch_loop.batch_progress.current.ready - num_batches + i
            steps.append(self._epoch_loop._build_kwargs(OrderedDict(), batch, batch_idx))
        return steps

    # --- outside of steps ------------------------------------------------------------------------------------------------

    def collective(self, run: Callable[[], T], is_joint: bool = True) -> T:
        """Run a collective of the strategy. If it fails, repeat it with the survivors or take its result from one of them.

        Args:
            is_joint: whether it ends nowhere before all workers have entered it. Then all have the results of earlier ones.
        """
        if not self._entered or self._is_computing:
            return run()
        self._collective += 1
        key = (self._batch, self._collective)
        while True:
            if key in self._missed:
                result: T = self._missed.pop(key)
                break
            if (done := self._attempt(self._checked, run)) is not None:
                result = done[0]
                break
            self._recover()
        if is_joint:
            self._results = {}
        self._results[key] = result
        return result

    def exchange(self, what: str, run: Callable[[], T]) -> T:
        """Run a collective of our own under a name, which the error shows if other workers meanwhile run another one."""
        return self.collective(lambda: self.named(what, run))

    def named(self, what: str, run: Callable[[], T]) -> T:
        """Run collectives under one name, which all workers must share."""
        frame = sys._getframe(1)
        with self.world.compared(lambda: Purpose(what, place=place_of(frame), any_place=True)):
            return run()

    def collective_once(self, run: Callable[[], T]) -> tuple[T] | None:
        """Run a collective that must not be repeated before a loss is handled.

        Returns:
            Its result, or that of another survivor; None if no worker has it, after the survivors have met again.
        """
        self._collective += 1
        key = (self._batch, self._collective)
        result = self._attempt(self._checked, run)
        if result is None:
            self._recover()
            if key not in self._missed:
                self._collective -= 1  # the other workers count the next attempt as the same collective
                return None
            result = (self._missed.pop(key),)
        self._results = {key: result[0]}
        return result

    def agree_on_stop(self, phase: str) -> None:
        """Let `trainer.should_stop` end the loops on all workers at one place.

        If all workers have set it, as Lightning's own callbacks do, they stop here. Otherwise the workers without it are a step
        ahead by the time this is noticed, so all stop after the next vote.
        """
        trainer = self._trainer
        if not trainer.should_stop or not self._entered or self._size == 1 or not trainer.fit_loop._can_stop_early:
            return
        place = f"stop/{self._fit}/{phase}/{self._batch}"
        while (reached := self._attempt(self.world.all_reach, place)) is None:
            self._recover()
            if self._have_stopped(place):
                reached = (True,)
                break
        if reached[0]:
            self._stopped_at = place
            return
        if not self._wants_stop:
            log.warning("worker %s: trainer.should_stop was not set on all workers; all will stop soon", self.world.worker_id)
        trainer.should_stop, self._wants_stop = False, True

    def _have_stopped(self, place: str) -> bool:
        """Return whether members of the new round found all workers at `place` before the former round broke, and went on."""
        assert self.formation is not None
        positions = (Position.decode(hello) for hello in self.formation.hellos.values())
        return any(position is not None and position.stopped_at == place for position in positions)

    def check_gradients(self) -> None:
        """Raise if gradients may come from an aborted reduction: these must not reach the weights."""
        if self._size == 1 or not self._entered:
            return
        wait_for_device(self._strategy.root_device)
        if self.world.broken:
            raise self.world.broken_error()

    def _checked(self, run: Callable[[], T]) -> T:
        """Return the result of a collective outside of steps, unless an NCCL abort has ended it early."""
        result = run()
        if self._strategy.root_device.type == "cuda" and self._size > 1:
            wait_for_device(self._strategy.root_device)
            if self.world.broken:
                raise self.world.broken_error()
        return result

    def check_group(self) -> None:
        """Raise if an abort has removed the group: Lightning's collectives would silently do nothing."""
        if self._size > 1 and not dist.is_initialized():
            raise self.world.broken_error()

    def run_validation(self, run: Callable[[], T]) -> T:
        """Run a validation, which continues with the survivors when a worker is lost; see `validation.py`."""
        if not self._entered:
            return run()
        self._validation = self.validation.number + 1
        try:
            result: T = self.validation.run(run)
        finally:
            self._validation = 0
        return result

    def send_buffers(self) -> None:
        """Send rank 0's buffers. All workers call it before a validation."""
        if self._size > 1:
            sent = self.exchange("the broadcast of buffers before a validation", self._strategy.send_buffers)
            self._strategy.take_buffers(sent)  # they may come from another worker's result

    def recover_if_broken(self) -> None:
        """Form the next round if this one has ended. Call it where no unfinished work would have to be repeated."""
        if self.world.broken:
            self._recover()

    def attempt(self, run: Callable[..., T], *args: Any) -> tuple[T] | None:
        """Return the result of a function with collectives; None if one failed, after which the caller has to `recover`."""
        return self._attempt(run, *args)

    def recover(self) -> None:
        self._recover()

    @property
    def num_collectives(self) -> int:
        """Number of collectives outside of steps since the last batch was handed out."""
        return self._collective

    def run_saving(self, save: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Run Lightning's saving of a checkpoint, and mark the time as one without visible progress."""
        self.is_saving = True
        try:
            save(*args, **kwargs)
        finally:
            self.is_saving = False

    # --- recovering --------------------------------------------------------------------------------------------------------

    def _recover(self) -> bool:
        """Form the next round with the survivors. Return whether this step's update was taken over from another worker.

        Raises:
                _RolledBack: the model has sharded tables, which are incomplete after any unfinished step.
        """
        self._window_is_stale = True
        self._outgoing = None
        if self._in_step and self._frozen is not None:
            self._frozen.restore()  # before the next wrap: DDP reduces the parameters that are trainable then
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
        """Bring all workers of a new round to a common state. Return whether this worker took over a missed update."""
        positions = {w: Position.decode(hello) for w, hello in formation.hellos.items()}
        standing = {w: p for w, p in positions.items() if p is not None}
        plan = handover(formation.round.members, {w: p.updates if p is not None else None for w, p in positions.items()})
        self.formation = formation
        strategy = self._strategy
        strategy.enter_round(formation.rank, formation.size)
        if standing:
            strategy.unused.agree(any(p.has_unused for p in standing.values()), formation.rank == 0)
        if not self._is_between_fits:
            for loader in self._loaders:
                loader.reshard(formation.rank, formation.size)
        me = self.world.worker_id
        if self._tables is not None:
            self._settle_tables(formation, standing, plan.joining)
            self._pace.went_on(self._batch_number + 1)
            return False
        has_resumed = not standing and self._resume_left_state()
        if not standing and not has_resumed and me == formation.round.members[0]:
            self._load_newest_checkpoint()
        for source, worker in plan.behind:
            if me == source:
                transfer.send(vars(self._last_update()), formation.rank_of(worker))
            elif me == worker:
                missed = standing[source].updates - standing[me].updates
                if missed != 1 or not standing[me].in_step:
                    raise WorldError(f"this worker missed {missed} updates and has to start again")
                self._apply(_Update(**transfer.receive(formation.rank_of(source))))
        if len(standing) > 1:
            self._share_results(formation, standing)
        if any(p.validation for p in standing.values()):
            self._settle_validation(formation)
        if not has_resumed:  # else all have it
            self._give_state(formation, plan.joining)
        if not self._is_between_fits:  # else the Trainer is about to do both
            strategy.wrap_model(in_validation=any(p.validation for p in standing.values()))
            if formation.rank == 0:
                self._take_over_rank_zero()
        last = max((p.batch for p in standing.values()), default=0)
        self._pace.went_on(last + 1)
        return any(me == worker for _, worker in plan.behind)

    def _settle_validation(self, formation: Formation) -> None:
        report = self.validation.report((self._batch, self._collective) in self._missed)
        reports = transfer.all_gather(report) if formation.size > 1 else [report]
        self.validation.settle(reports, formation.rank)

    # --- sharded tables ------------------------------------------------------------------------------------------------------

    @property
    def _tables(self) -> ElasticTables | None:
        return self._strategy.elastic_tables

    def _wishes(self) -> list[int]:
        assert self.formation is not None
        self._vote_fit = self._fit
        said = self.pulse.say(self.formation.round.number, self._rank, self._size)
        tables = self._tables.wishes() if self._tables is not None else []
        digest = rates_digest(self._trainer.optimizers)
        return [*tables, -int(self._wants_stop), digest, -digest, self.world.membership.checkpoint_request(), *said]

    def _refuse_different_rates(self) -> None:
        error = different_rates(transfer.all_gather(rates(self._trainer.optimizers)), self._rank)
        if error is not None:
            raise error

    def _settle_tables(
        self, formation: Formation, standing: Mapping[str, Position], joining: Sequence[tuple[str, str]]
    ) -> None:
        """Bring all workers of a new round to a common state: the current one if it is complete, else that of a snapshot."""
        assert self._tables is not None
        stand = [w for w in formation.round.members if w in standing]
        places = {(p.batch, p.updates, p.tables, p.at_boundary) for p in standing.values()}
        # After a loss no worker can hand over the lost workers' shards.
        if formation.round.planned and len(places) == 1 and all(p.at_boundary and p.tables for p in standing.values()):
            try:
                self._strategy.reshard_tables(formation, stand)
            except BaseException:
                self._tables.broken()
                raise
            self._give_state(formation, joining)
        else:
            is_back = self._roll_back(formation, 0 if standing else self._batch_number)
            # These processes cannot recover: a worker inside the loops cannot return to their beginning.
            if not is_back and standing:
                raise WorldError(
                    "workers were lost with tables of which no snapshot is complete: all workers have to start again, "
                    "from the newest checkpoint if there is one"
                )
            if not is_back:
                self._strategy.start_tables(formation)
            if not standing:
                # A joiner's loops have the position of the user's checkpoint, though nothing else of it was loaded.
                self._resume_tables_from_disk(formation, self._trainer.global_step if is_back else 0)
        if formation.rank == 0:
            self._take_over_rank_zero()

    def _roll_back(self, formation: Formation, batch: int = 0) -> bool:
        """Go back to the newest complete snapshot. Return False if there is none at or after that batch."""
        restored = self._strategy.roll_tables_back(formation, batch)
        if restored is None:
            return False
        undone = max(0, self._batch - restored.batch)
        snapshot = transfer.loads(restored.state, STATE_CLASSES, self._names_in_state)
        for optimizer in self._trainer.optimizers:
            optimizer.zero_grad()
        self._restore(TrainerState(**snapshot["state"]), enters_epoch=not formation.hellos.get(self.world.worker_id))
        own = snapshot["values"] if restored.is_own else {"logged": {}, "states": {}}
        restore_partial(self._epoch_loop._results, self._trainer.lightning_module, own)
        self._add_partials([transfer.loads(other, STATE_CLASSES, self._names_in_state)["values"] for other in restored.of_lost])
        # Lightning drops values logged before an epoch's first batch, and mistakes a new process's first batch for that one.
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
            number = formation.round.number
            rolled_back = StateRolledBack(number, restored.batch, undone)
            self.world.event(rolled_back, f"round {number}: back at batch {restored.batch}, {undone} to do again")
        return True

    def _snapshot(self) -> dict[str, Any]:
        """Return everything except the tables, as plain data."""
        return {"state": self._message(), "values": self._partial_values()}

    def _packed_snapshot(self) -> bytes:
        """Return the bytes that `_roll_back` reads.

        Raises:
            SnapshotError: they could not be read. It is detected here, rather than after a loss when nothing else is left.
        """
        try:
            packed = transfer.dumps(self._snapshot())
        except transfer.TransferError as error:
            raise SnapshotError(str(error)) from error
        if not self._snapshots_are_readable:
            try:
                transfer.loads(packed, STATE_CLASSES, self._names_in_state)
            except transfer.TransferError as error:
                raise SnapshotError(f"it could not be read again: {error}") from error
            self._snapshots_are_readable = True
        return packed

    def again_if_rolled_back(self, advance: Callable[..., None], fetcher: Any) -> None:
        """Run Lightning's work on one batch. After a rollback, run it on the batch after the snapshot."""
        while True:
            try:
                advance(fetcher)
                return
            except _RolledBack:
                continue

    def end_batch(self, end: Callable[..., None], fetcher: Any) -> None:
        """Run Lightning's work between two batches, such as validation. A rollback ends it."""
        with suppress(_RolledBack):
            end(fetcher)

    def end_epoch(self, end: Callable[[], None]) -> None:
        """Run Lightning's work at the end of an epoch. After a rollback into the epoch, train on its rest first."""
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
        """Send the state to joiners, each from the worker it is paired with."""
        me = self.world.worker_id
        state, self._outgoing = self._outgoing, None
        # If all are new, all pack it, though one would do: a user's `on_save_checkpoint` may hold a collective.
        are_all_new = not any(formation.hellos.values())
        is_sender = any(me == sender for sender, _ in joining)
        if state is None and joining and (are_all_new or is_sender):
            state = self._packed_message(is_sent=is_sender)
        for sender, worker in joining:
            if me == sender:
                transfer.send(state, formation.rank_of(worker))
            elif me == worker:
                self._restore(self._received(formation.rank_of(sender)), enters_epoch=True, joins=True)

    def _share_results(self, formation: Formation, standing: dict[str, Position]) -> None:
        """Send results of collectives outside of steps to the workers that lack them."""
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
            groups=[[_kept_in(group) for group in optimizer.param_groups] for optimizer in self._trainer.optimizers],
            scaler=self._trainer.precision_plugin.state_dict(),
            manual_steps=self._epoch_loop.manual_optimization.optim_step_progress.state_dict(),
        )

    def _apply(self, update: _Update) -> None:
        with torch.no_grad():
            for name, value in self._trainer.lightning_module.state_dict().items():
                if isinstance(value, torch.Tensor):
                    value.copy_(update.model[name])
        for optimizer, state, kept in zip(self._trainer.optimizers, update.optimizers, update.groups, strict=True):
            # The rates are left out: this worker's schedulers have not seen the update yet and will set them.
            groups = [{**own, **new} for own, new in zip(optimizer.state_dict()["param_groups"], kept, strict=True)]
            optimizer.load_state_dict({"state": state, "param_groups": groups})
        if update.scaler:
            self._trainer.precision_plugin.load_state_dict(update.scaler)
        self._epoch_loop.manual_optimization.optim_step_progress.load_state_dict(update.manual_steps)
        if update.gradients is not None:
            self._set_gradients(update.gradients)
            self._manual_window_is_open = update.window_is_open

    def _message(self) -> dict[str, Any]:
        """Return the state for a joiner."""
        dumped = dump(self._trainer, self._loaders)
        dumped.counters = {
            "updates": self._updates,
            "validations": self.validation.number,
            "saved_request": self._saved_request,
        }
        return vars(dumped)

    def _names_in_own_state(self) -> frozenset[str]:
        """Return the classes and functions in this script's checkpoints. Detect early whether any worker can join at all."""
        if self.world.config.max_workers == 1:
            return frozenset()
        try:
            message = self._message(), [dict(part.hparams) for part in parts_with_hparams(self._trainer)]
        except Exception as error:  # a user's hook may need values that only training provides
            if self.world.is_failure(error):
                raise
            log.debug("no state to look at before training: %s", error)
            return frozenset()
        found: set[str] = set()
        for i, part in enumerate(message):
            try:
                packed = transfer.pack(part)
                names = transfer.names_in(packed)
                transfer.outline(packed, STATE_CLASSES, names)
                found |= names
            except transfer.TransferError as error:
                if i == 0 and self.formation is not None and self._tables is None:
                    log.warning("run %s: nobody can join: %s", self.world.config.run_id, error)
                    self.world.close_to_joiners(str(error))
                    return frozenset(found)
        if self.formation is not None and self.formation.rank == 0:
            self.world.close_to_joiners("")
        return frozenset(found)

    def _packed_message(self, is_sent: bool = True) -> transfer.Packed:
        """Return the state for a joiner, or the reason why there is none: a state that cannot be sent ends no training worker.

        Args:
            is_sent: whether a worker needs it. Otherwise this worker's state may still lack values that a user's hook needs.
        """
        try:
            return transfer.pack(self._message())
        except Exception as error:
            if self.world.is_failure(error):
                raise
            if is_sent:
                log.warning("run %s: nobody can join: %s", self.world.config.run_id, error, exc_info=error)
                self.world.close_to_joiners(f"{type(error).__name__}: {error}")
            return transfer.pack({"refused": f"{type(error).__name__}: {error}"})

    def _received(self, from_rank: int) -> TrainerState:
        """Return the state that another worker's `_packed_message` has made."""
        message = transfer.receive(from_rank, STATE_CLASSES, self._names_in_state)
        if "refused" in message:
            raise StateError(
                f"the others cannot hand over the job's state: {message['refused']}. The job goes on without this worker"
            )
        return TrainerState(**message)

    def _restore(self, received: TrainerState, *, enters_epoch: bool = False, joins: bool = False) -> None:
        trainer = self._trainer
        place = received.loaders[0].epoch * len(self._loaders[0]) + received.loaders[0].cursor, self._rank
        restore(trainer, self._strategy, self._loaders, received, place, enters_epoch=enters_epoch, joins=joins)
        reset_metrics(trainer.lightning_module)
        self._train_loaders.take_order_seeds([loader_state.seed for loader_state in received.loaders])
        fetcher, cursor = self._epoch_loop_fetcher(), self._loaders[0].cursor
        fetcher.fetched = cursor
        fetcher.done = cursor >= self._loaders[0].num_epoch_batches  # the sender may have been at an epoch's end
        self._updates = received.counters["updates"]
        self._saved_request = received.counters["saved_request"]
        self.validation.number = received.counters["validations"]
        self._batch = self._batch_number

    def _resume_newest_checkpoint(self) -> None:
        """First round: continue from the job's newest checkpoint if an earlier life of the job has left one.

        Raises:
                WorldError: there is one, but no worker can read it.
        """
        assert self.formation is not None
        formation = self.formation
        if self._tables is not None:
            self._roll_back(formation, self._batch_number)  # the user's own checkpoint may be newer
            self._was_rolled_back = False
            self._resume_tables_from_disk(formation, self._trainer.global_step)
            return
        if self._resume_left_state():
            return
        record = self._unread_checkpoint()
        newest = self._gathered((record.global_step, record.path) if record is not None else None)[0]
        if newest is None:
            return
        record = CheckpointRecord(path=newest[1], global_step=newest[0])
        problems = self._gathered(self._strategy.unreadable(record.path))
        if all(problems):
            raise WorldError(self._cannot_read(record.path, problems[0]))
        source = problems.index("")
        if formation.rank == source:
            self._load_checkpoint(record)
        # By all workers, though one would do: a user's `on_save_checkpoint` may hold a collective.
        packed = self._packed_message(is_sent=formation.rank == source) if formation.size > 1 else None
        if self.formation is not formation:
            raise RoundEndedError("a worker was lost while the newest checkpoint was being handed on")
        for rank in (rank for rank in range(formation.size) if rank != source):
            if formation.rank == source:
                transfer.send(packed, rank)
            elif formation.rank == rank:
                self._restore(self._received(source), enters_epoch=True)

    def _gathered(self, mine: Any) -> list[Any]:
        """Exchange small objects; return those of all members, by rank."""
        return transfer.all_gather(mine) if self._size > 1 else [mine]

    def _resume_tables_from_disk(self, formation: Formation, step: int) -> None:
        """Continue from the job's or the user's checkpoint if it is newer. Each worker reads its own part of the tables."""
        record = self.world.membership.newest_checkpoint() if formation.rank == 0 else None
        found = [(record.global_step, record.path)] if record is not None and os.path.isdir(record.path) else []
        found += [self._strategy.unread_checkpoint] if self._strategy.unread_checkpoint is not None else []
        newest, path = self._gathered(max(found, default=(0, "")))[0]
        if newest > step:
            self._load_checkpoint(CheckpointRecord(path=path, global_step=newest))

    def _unread_checkpoint(self) -> CheckpointRecord | None:
        """The job's newest checkpoint, if it is ahead of this worker."""
        record = self.world.membership.newest_checkpoint()
        if record is None or record.global_step <= self._trainer.global_step:
            return None
        if not os.path.isabs(record.path) and "://" not in record.path:  # this job writes no such path
            log.error("run %s: ignored a record of a checkpoint at %r", self.world.config.run_id, record.path)
            return None
        return record

    def _cannot_read(self, path: str, problem: str) -> str:
        return (
            f"run {self.world.config.run_id!r}: the newest checkpoint {path} cannot be read here: {problem}. Training from the "
            "beginning would overwrite the job's results: let checkpoints be written where all hosts can read them "
            "(ModelCheckpoint(dirpath=...), a shared folder or a URL), or start a new job under another name"
        )

    def _load_newest_checkpoint(self) -> None:
        """Load the newest checkpoint on the first of the joiners, once all workers with the state are gone.

        Raises:
            WorldError: it cannot be read here. The next worker tries.
        """
        record = self._unread_checkpoint()
        if record is not None:
            if problem := self._strategy.unreadable(record.path):
                raise WorldError(self._cannot_read(record.path, problem))
            self._load_checkpoint(record)

    def _load_checkpoint(self, record: CheckpointRecord) -> None:
        try:
            checkpoint = self._strategy.load_own_checkpoint(record.path, self._names_in_state)
        except Exception as error:  # a foreign or broken file may raise anything
            if self.world.is_failure(error):
                raise
            raise WorldError(self._cannot_read(record.path, str(error))) from error
        log.warning("run %s: no living worker has the state; going on from %s", self.world.config.run_id, record.path)
        resume(self._trainer, checkpoint, self._strategy.reruns_epoch_hooks)
        progress = self._epoch_loop.batch_progress.current.ready
        for loader in self._loaders:
            loader.set_epoch(self._trainer.current_epoch)
            loader.cursor = progress
        fetcher = self._epoch_loop_fetcher()
        fetcher.fetched, fetcher.done = progress, progress >= self._loaders[0].num_epoch_batches
        self._updates = self._trainer.global_step
        self._batch = self._batch_number
        resumed = FitResumed(record.global_step)
        self.world.membership.event(resumed, f"went on from {record.path} at step {record.global_step}")

    def saved_checkpoint(self, path: str, global_step: int) -> None:
        """Rank 0: record a checkpoint, in case no living worker is left."""
        if self._rank != 0 or not self._entered:
            return
        try:
            self.world.membership.put_checkpoint(CheckpointRecord(path=path, global_step=global_step))
        except EtcdError as error:
            log.warning("run %s: checkpoint %s is not on record: %s", self.world.config.run_id, path, error)

    # --- leaving -----------------------------------------------------------------------------------------------------------

    def _leave(self, left_out: LeftOutError) -> NoReturn:
        """End this process; the others continue without it. None of the user's code after `fit` runs."""
        if self._is_finishing and left_out.round.number == 0:
            raise left_out  # others have reached the end, so this worker's script continues, too
        for logger in self._trainer.loggers:
            logger.save()
        self._undo_quiet = leave_quietly(self._trainer)
        self._entered = False
        self.left = True
        log.info("worker %s leaves: %s", self.world.worker_id, left_out)
        raise SystemExit(left_out.exit_code)

    def left_quietly(self) -> None:
        """Undo `leave_quietly`, if this worker leaves, once Lightning has handled it."""
        if self._undo_quiet is not None:
            self._undo_quiet()
            self._undo_quiet = None

    def close_loaders(self) -> None:
        """End the training loaders' processes."""
        if self._trainer.fit_loop._combined_loader is not None:
            for loader in self._loaders:
                loader.close()

    def finish(self) -> None:
        """Mark the end of the training loop. All updates are done, so the job does not change from here on.

        Every worker publishes this before it continues, so that the first one to exit does not count as lost.
        """
        if not self._entered:
            if self._fit > 1 and self.formation is not None:
                self.world.finish(self._trainer.global_step, self._fit)  # there was nothing to train
            return
        self._is_finishing = True
        if self._size > 1:
            # A finished job has no more rounds, so no worker may still need one to get its last update.
            try:
                if self._tables is None:
                    self.exchange("the end of training", self._end_together)
                elif self._attempt(self._end_together) is None:
                    self._await_finish()
            except WorldError:
                if not self.world.has_finished_fit(self._fit):
                    raise
        self._entered = self._is_finishing = False
        self.world.finish(self._trainer.global_step, self._fit)

    def _end_together(self) -> None:
        frame = sys._getframe()
        with self.world.compared(lambda: Purpose("the end of fit", place=shown(frame))):
            dist.barrier()

    def _await_finish(self) -> None:
        """Find out why workers were missing at the end: one has already ended and published that all is done, or one is lost.

        Raises:
            WorldError: it is lost, together with its tables. The loops have ended, so there is nothing to go back to.
        """
        assert self.formation is not None
        number = self.formation.round.number

        def look(view: View) -> str | None:
            if self.world.has_finished_fit(self._fit):
                return "finished"
            if view.job is not None and view.job.is_over:
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
        """Start rank 0's loggers and progress bars on this worker, as they run on rank 0 only."""
        loggers.take_over(self._trainer.loggers)
        for bar in [c for c in self._callbacks if isinstance(c, ProgressBar)]:
            if getattr(bar, "is_disabled", False):
                bar.enable()
                bar.on_train_start(self._trainer, self._trainer.lightning_module)
                bar.on_train_epoch_start(self._trainer, self._trainer.lightning_module)

    # --- position and counters -----------------------------------------------------------------------------------------------

    @property
    def _callbacks(self) -> list[Any]:
        callbacks: list[Any] = self._trainer.callbacks  # type: ignore[attr-defined]
        return callbacks

    @property
    def num_workers(self) -> int:
        """Workers of the current round; 1 on a worker that is not admitted yet."""
        return self._size

    @property
    def sample_weight(self) -> float:
        """Weight of this worker's share of the last training batch, relative to an equal share."""
        if self._trainer.fit_loop._combined_loader is None or not self._loaders or not self._loaders[0].cursor:
            return 1.0
        batch = self._loaders[0].cursor - 1
        return self._train_loaders.loss_weight(batch) if self._loaders[0].has_samples(batch) else 1.0

    @property
    def num_own_samples(self) -> int:
        """This worker's share of the last training batch."""
        return self._loaders[0].num_own_samples(self._loaders[0].cursor - 1)

    @property
    def device(self) -> torch.device:
        return self._strategy.root_device

    @property
    def progress(self) -> Progress:
        """The watchdog's view of this worker; may be read from another thread."""
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
        """Describe this worker's place in the training program for an error message. Called from any thread."""
        if not self._entered or self._is_between_fits:
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
        """Recent seconds per step; 0 while unknown."""
        return self._pace.step_time_s

    @property
    def loads(self) -> list[float]:
        """Samples per thread in one batch, for each worker by rank."""
        total, size = self._loaders[0].global_batch_size, self._size
        threads = self.pulse.threads if len(self.pulse.threads) == size else (1,) * size
        shares = [share(total, rank, size) for rank in range(size)]
        return [max(1, stop - start) / max(1, count) for (start, stop), count in zip(shares, threads, strict=True)]

    @property
    def remaining_steps(self) -> float | None:
        """Batches that the job still has to train on; None if unknown."""
        return remaining_batches(self._trainer)

    @property
    def workers_by_host(self) -> dict[str, int]:
        """Number of the current round's workers on each host, as far as they are on record."""
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
            self._strategy.unused.found,
            self._stopped_at,
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
        # Not derived from the epoch: loaders made anew may be shorter, and this number must grow.
        return self._epoch_loop.batch_progress.total.ready

    @property
    def _is_computing(self) -> bool:
        """Whether collectives belong to a batch that would be repeated as a whole."""
        return self._in_step or self._is_redoing

    @property
    def _in_window(self) -> bool:
        if not self._trainer.lightning_module.automatic_optimization:
            return self._manual_window_is_open
        return self._epoch_loop.batch_progress.current.ready % self._trainer.accumulate_grad_batches != 0

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    @property
    def _rank(self) -> int:
        return self.formation.rank if self.formation is not None else 0

    @property
    def _size(self) -> int:
        return self.formation.size if self.formation is not None else 1

    def _is_failure(self, error: BaseException) -> bool:
        if not self._entered and self.formation is None:
            return False
        return isinstance(error, IncompleteBackwardError) or self.world.is_failure(error)


def leave_quietly(trainer: Any) -> Callable[[], None]:
    """Keep Lightning from treating this worker's leave, an exception, as the failure of the job.

    The user's `on_exception` hooks do not run. So no alert is sent, no checkpoint is saved, and trackers' runs do not fail.

    Returns:
        A function that undoes it, once Lightning has handled the exception.
    """
    callbacks, loggers, datamodule = trainer.callbacks, trainer.loggers, trainer.datamodule
    own = __name__.partition(".")[0]
    trainer.callbacks = [c for c in callbacks if isinstance(c, ProgressBar) or type(c).__module__.startswith(own)]
    trainer.loggers = [each for each in loggers if isinstance(each, (CSVLogger, TensorBoardLogger))]  # local files only
    if datamodule is not None:
        datamodule.on_exception = lambda exception: None

    def undo() -> None:
        trainer.callbacks, trainer.loggers = callbacks, loggers
        if datamodule is not None:
            del datamodule.on_exception

    return undo


_SET_BY_SCHEDULERS = {"lr", "initial_lr", "max_lr", "min_lr", "swa_lr", "betas", "momentum", "base_momentum", "max_momentum"}


def _kept_in(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's own values in a parameter group, as of schedule-free optimizers, Prodigy and D-Adaptation."""
    data = (bool, int, float, str, torch.Tensor, type(None))
    return {k: v for k, v in group.items() if k != "params" and k not in _SET_BY_SCHEDULERS and isinstance(v, data)}
