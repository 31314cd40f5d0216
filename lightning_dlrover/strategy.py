"""The Lightning strategy: applies the job's rounds to a running Trainer.

This module holds Lightning's hooks only, each a few lines long. They hand over to
  - `live/training.py`, when a Trainer enters the job or ends, and when the world changes,
  - `live/wiring.py`, for the methods of Lightning's loops that are replaced, and the split of samples over workers,
  - `live/checkpoints.py`, for checkpoints, and models with sharded tables,
  - Lightning's own DDP strategy, for everything else.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_dlrover._version import __version__
from lightning_dlrover.checks import (
    check_arguments,
    check_capture,
    check_graphs,
    check_hook_state,
    check_optimizers,
    check_precision_of_tables,
    explain_single_sample,
    warn_of_max_norm,
)
from lightning_dlrover.lightning_compat import TrainerFn
from lightning_dlrover.live import private_api
from lightning_dlrover.live.checkpoints import (
    TABLES_FOLDER,
    WHOLE_TABLES,
    PlainShelf,
    Shelf,
    TablesOfTrainer,
    TablesSettings,
    absolute,
    is_folder,
    record_when_written,
    saving_file,
    saving_folder,
    trainer_file,
)
from lightning_dlrover.live.hooks import WorldInfo
from lightning_dlrover.live.lightning_adapter import ForwardRedirection, apply_layer_sync, in_ddp_on_this_stream, without_model
from lightning_dlrover.live.replica import LiveStrategy, Replica, UnusedParameters, own_device
from lightning_dlrover.live.state import random_state, trained_parameters
from lightning_dlrover.live.training import JobSession, LiveTraining
from lightning_dlrover.live.wiring import Collectives, DLRoverEnvironment, UsersLoaders, wrap_evaluations, wrap_loops
from lightning_dlrover.rdzv.group.config import WorldConfig
from lightning_dlrover.rdzv.group.failures import end_with_agent
from lightning_dlrover.tables.checkpoint import load_tables
from lightning_dlrover.tables.snapshots import SnapshotConfig
from lightning_dlrover.tables.torchrec_adapter import TableOptimizerError, has_tables
from lightning_dlrover.tuning.health import OwnClock
from lightning_dlrover.tuning.profiler import StepTimes

if TYPE_CHECKING:
    import lightning as L


T = TypeVar("T")


class DLRoverStrategy(LiveStrategy):
    """Data-parallel training on workers that may join, leave or be lost while the job runs.

    Under `torchrun --rdzv-backend=etcd-v3` (or `dlrover run`) the world changes live. Started otherwise, this is Lightning's
    own DDP strategy, or plain single-device training for one process.

    Serves Trainers of `lightning` and of `pytorch_lightning`::

        # train.py, started as `dlrover run --workers 1:3 train.py`
        trainer = L.Trainer(strategy=DLRoverStrategy(), callbacks=[DLRoverCallback()])
        trainer.fit(model, DataLoader(dataset, batch_size=512, shuffle=True))

    Args:
        global_batch_size: samples per step over all workers. None: the DataLoader's batch size times the number of workers
            that the job started with, or the fewest that it may have if a pool chose the number. With several training
            loaders it holds for each of them.
        check_interval_s: approximate seconds between two votes on whether the world should change.
        timeout: time limit of one collective.
        sharding_constraints: torchrec's `ParameterConstraints` by table name, for the first plan of a model with embedding
            collections.
        sharders: torchrec's sharders, instead of those for `EmbeddingBagCollection` and `EmbeddingCollection`.
        rerun_epoch_hooks: whether a worker that joins inside an epoch repeats `on_train_epoch_start` of callbacks and module.
            The hooks see the job's epoch and metrics, and run before the worker receives the job's state. Without the repeat,
            anything that such a hook derives from the epoch, and that no checkpoint holds, stays as in epoch 0.
        snapshots: when the state of a model with sharded tables is copied in the hosts' memory, so that the job survives the
            loss of a worker.
        compare_data: whether workers compare a few samples when they start, so that all of them train on the same data.
            Numbers of samples are always compared.
        max_catch_up_s: seconds for which workers wait for a joiner that has to read an `IterableDataset` from the epoch's
            first row up to their place. A joiner that needs longer is refused. Ignored for datasets with a state.
        max_share: largest number of samples that a worker computes in one forward and backward pass; a larger share is computed
            in parts, which needs automatic optimization. None: a share is computed in parts once memory has run out.
            "whole": never, as for a loss that compares the samples of a share with each other. Live jobs only.
        shares: "by-speed" gives a worker that makes the others wait fewer samples of each training batch, and them more as far
            as their memory allows; the loss must be a mean over samples. "equal" splits each batch evenly. Live jobs only.
        on_drift: consequence if weights, buffers or optimizer states differ between workers that made the same updates. "end"
            ends the job with the tensor's name, "repair" copies rank 0's values, "ignore" compares nothing. Live jobs only.
        ddp_kwargs: further arguments of `DDPStrategy` and `DistributedDataParallel`.

    Example:
        The same script trains as one worker under plain ``python``, and elastically under ``dlrover run --workers 1:3``.

        >>> import lightning as L
        >>> from lightning_dlrover import DLRoverCallback, DLRoverStrategy
        >>> trainer = L.Trainer(strategy=DLRoverStrategy(), callbacks=[DLRoverCallback()], accelerator="cpu", logger=False)
        >>> trainer.world_size
        1
    """

    strategy_name = "dlrover"

    def __init__(
        self,
        global_batch_size: int | None = None,
        check_interval_s: float = 0.1,
        timeout: timedelta = timedelta(minutes=30),
        sharding_constraints: Mapping[str, Any] | None = None,
        sharders: Sequence[Any] | None = None,
        snapshots: SnapshotConfig | None = None,
        compare_data: bool = True,
        rerun_epoch_hooks: bool = True,
        max_catch_up_s: float = 60.0,
        max_share: int | Literal["whole"] | None = None,
        shares: Literal["by-speed", "equal"] = "by-speed",
        on_drift: Literal["end", "repair", "ignore"] = "end",
        **ddp_kwargs: Any,
    ) -> None:
        limits = global_batch_size, check_interval_s, timeout
        switches = compare_data, rerun_epoch_hooks
        of_shares = max_catch_up_s, max_share, shares
        check_arguments(*limits, sharding_constraints, sharders, snapshots, *switches, *of_shares, on_drift)
        private_api.check(self._package)
        self._job: JobSession | None = None  # None where the world cannot change
        config = WorldConfig.from_environment(os.environ, __version__)
        if config is not None:
            end_with_agent(config.agent_pid)
            config = replace(config, collective_timeout_s=timeout.total_seconds())
            self._job = JobSession(config, self, check_interval_s)
            ddp_kwargs.setdefault("cluster_environment", DLRoverEnvironment())
        super().__init__(timeout=timeout, **ddp_kwargs)
        self._forward_redirection: Any = ForwardRedirection(self._forward_redirection, self._users_step, self._loss_of)
        self.replica = Replica(self, UnusedParameters(self._ddp_kwargs, self._job is not None))
        self.times = StepTimes()
        self.clock = OwnClock(self.times)
        self._watch: AbstractContextManager[Any] | None = None
        self._global_batch_size = global_batch_size
        self.has_global_batch_size = global_batch_size is not None
        self.compares_data = compare_data
        self.reruns_epoch_hooks = rerun_epoch_hooks
        self.max_share = max_share
        self.shares = shares
        self.on_drift = on_drift
        self._loaders = UsersLoaders(global_batch_size, max_catch_up_s, compare_data)
        self.collectives = Collectives(self._job, self)
        self._tables_settings = TablesSettings(sharding_constraints, sharders, snapshots or SnapshotConfig())
        self.tables = None
        self.fingerprint = ""
        self.unread_checkpoint = None

    def _users_step(self) -> AbstractContextManager[None]:
        return self.live.steps.parts.users_step() if self.live is not None else nullcontext()

    def _loss_of(self, output: Any) -> Any:
        return self.live.steps.loss_of(output) if self.live is not None else output

    # --- place in the job ----------------------------------------------------------------------------------------------------

    @property
    def live(self) -> LiveTraining | None:
        """The job's rounds from this worker's point of view; None when the world cannot change."""
        return self._job.live if self._job is not None else None

    @property
    def world(self) -> WorldInfo:
        """The job's workers and this one's place among them. Outside of a live job, those that Lightning has started."""
        if self.live is not None:
            return self.live.hooks.world
        return WorldInfo(self.world_size, self.global_rank, 0, self.world_size)

    @property
    def notice(self) -> float | None:
        """Time at which this worker will be taken away, in seconds since the epoch; None as long as nobody has announced it."""
        return self.live.world.notice if self.live is not None else None

    @property
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        if self._job is None:
            return self.parallel_devices[self.local_rank % len(self.parallel_devices)]
        num_gpus = torch.cuda.device_count() if self.parallel_devices[0].type == "cuda" else 0
        return own_device(self.parallel_devices, self.local_rank, num_gpus, self._process_group_backend)

    def set_world_ranks(self) -> None:
        if self._job is None:
            super().set_world_ranks()
        else:
            # The environment holds the agent's ranks until the first round, then the round's. `rank_zero_only` is one object
            # of lightning, fabric and their utilities.
            rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        if self._job is None:
            return super().distributed_sampler_kwargs
        rank, world_size = self.own_place
        return {"num_replicas": world_size, "rank": rank}

    @property
    def _is_single(self) -> bool:
        """Whether this is one process that no other can join."""
        return self._job is None and self.num_processes * self.num_nodes == 1

    # --- setting up ------------------------------------------------------------------------------------------------------

    def _configure_launcher(self) -> None:
        if self._job is None and not self._is_single:
            super()._configure_launcher()

    def setup_environment(self) -> None:
        if self._job is None and not self._is_single:
            super().setup_environment()
            return
        assert self.accelerator is not None
        self.accelerator.setup_device(self.root_device)
        self._loaders.keep_samplers(self._lightning_trainer)
        if self._job is not None:
            backend = self._process_group_backend or ("gloo" if self.root_device.type == "cpu" else "cpu:gloo,cuda:nccl")
            self._job.enter(self._lightning_trainer, backend)

    @property
    def _lightning_trainer(self) -> Any:
        assert self.lightning_module is not None
        return self.lightning_module.trainer

    def setup(self, trainer: L.Trainer) -> None:
        assert self.lightning_module is not None
        is_fitting = trainer.state.fn == TrainerFn.FITTING
        if self.tables is not None or has_tables(self.lightning_module):
            self._setup_with_tables(trainer, self.lightning_module, is_fitting)
        elif self._is_single and not is_fitting:
            self._setup_alone(trainer)
        else:
            super().setup(trainer)
            if is_fitting:
                self._check_script()

    def _check_script(self) -> None:
        assert self.lightning_module is not None
        if self.live is not None:
            check_optimizers(self.optimizers)
            check_hook_state(self._ddp_comm_state)
            check_graphs(self.lightning_module)
            if self.live.world.config.max_workers > 1:
                warn_of_max_norm(self.lightning_module)
        self.replica.note_optimizers()

    def _setup_alone(self, trainer: L.Trainer) -> None:
        """Prepare validation, test or prediction as DDP does, without sending weights: there is no process group."""
        assert self.accelerator is not None
        assert self.model is not None
        self.accelerator.setup(trainer)
        self.model = self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        self.setup_precision_plugin()

    def _setup_with_tables(self, trainer: L.Trainer, module: L.LightningModule, is_fitting: bool) -> None:
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        self.precision_plugin.convert_module(module)
        if is_fitting:
            apply_layer_sync(self, module)
        had_none = self.tables is None
        if self.tables is None:
            self.tables = TablesOfTrainer(module, self.root_device, self._tables_settings, self.replica.wrap_beside_tables)
            self.fingerprint = self.tables.fingerprint
            if self._job is not None:
                self._job.tables = self.tables
        else:
            self.tables.take_over()
        tables, is_new = self.tables, had_none and self.tables.is_new
        if is_fitting:
            if not tables.sharded.are_whole:
                check_precision_of_tables(self.precision_plugin)
            self.setup_optimizers(trainer)
            self._check_script()
            try:
                tables.optimizers.move_to_backward(self.optimizers, is_new)
            except TableOptimizerError:
                self.optimizers = []  # Lightning would move their states, and some have no values yet
                raise
        if is_new and self._job is not None:
            self._job.build(tables, trainer)
        elif is_new:
            tables.build(self.root_device)
        if (had_none or is_fitting) and tables.model is not None:
            self.model = tables.model  # Lightning has set it to the bare module
        if is_fitting:
            tables.optimizers.hold_whole_tables(self.optimizers)
        self.setup_precision_plugin()

    def process_dataloader(self, dataloader: object) -> object:
        return self._loaders.replaced(dataloader, self._lightning_trainer, self._job, self)

    def _setup_model(self, model: torch.nn.Module) -> DistributedDataParallel:
        if self._job is None:
            return self.replica.wrap(model, super()._setup_model, None)
        return self.replica.wrap(model, partial(in_ddp_on_this_stream, self), self._job.world)

    def configure_ddp(self) -> None:
        live = self.live
        if (live is None and not self._is_single) or (live is not None and live.position.size > 1):
            super().configure_ddp()

    # --- checkpoints -----------------------------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        of_module = super().lightning_module_state_dict
        return of_module() if self.tables is None else self.tables.state_dict(of_module)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        if self.tables is None:
            checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        else:
            folder = Path(checkpoint_path) if is_folder(checkpoint_path) else None
            checkpoint = super().load_checkpoint(trainer_file(folder) if folder else checkpoint_path, weights_only)
            self.tables.folder_to_load = folder / TABLES_FOLDER if folder else None
            if folder is None:
                checkpoint[WHOLE_TABLES] = True
            if not self.tables.sharded.is_built:
                self.unread_checkpoint = int(checkpoint["global_step"]), absolute(checkpoint_path)
        if self._job is not None:
            start = checkpoint.get("dlrover", {})
            if "sequences" in start:  # the key in checkpoints of earlier commits
                start["iterables"] = start.pop("sequences")
            self._job.start_workers = start.get("start_workers", self._job.start_workers)
            self._job.lane_workers = start.get("lane_workers", self._job.lane_workers)
            if self.live is not None and self._lightning_trainer.state.fn == TrainerFn.FITTING:  # others train no rows
                self.live.windows.resume(start.get("streams", ()))
                self.live.loaders.saved = start
                self.live.checkpoints.saved_random = start.get("random")
        return checkpoint

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        # Tables are read into the shards that each worker has after setup.
        assert self.lightning_module is not None
        return self.tables is not None or has_tables(self.lightning_module)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        tables = self.tables
        if tables is None:
            super().load_model_state_dict(checkpoint, strict)
            return
        folder, tables.folder_to_load = tables.folder_to_load, None
        if tables.sharded.is_built:  # else this is a joiner, which receives the others' state
            if WHOLE_TABLES in checkpoint:
                tables.load_stock_state_dict(checkpoint["state_dict"], strict)
                return
            tables.load_state_dict(checkpoint["state_dict"], strict)
            if folder is not None:
                self.collectives.confirmed("loading tables from a checkpoint", partial(load_tables, tables.sharded, folder))

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if self.tables is not None and not self.tables.sharded.is_built:
            return
        if self.tables is not None and WHOLE_TABLES in checkpoint:
            checkpoint = {"optimizer_states": self.tables.load_stock_optimizers(checkpoint["optimizer_states"])}
        super().load_optimizer_state_dict(checkpoint)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        live, barrier = self.live, super().barrier
        if self._job is not None and live is not None:
            checkpoint["dlrover"] = {
                "start_workers": self._job.start_workers,
                "lane_workers": self._job.lane_workers,
                **(live.loaders.in_checkpoint if self._lightning_trainer.state.fn == TrainerFn.FITTING else {}),
            }
            if "optimizer_states" in checkpoint:
                checkpoint["dlrover"]["random"] = random_state(self.root_device)
            if self.tables is None and "optimizer_states" in checkpoint:
                checkpoint["dlrover"]["parameters"] = trained_parameters(self._lightning_trainer)
        write = partial(super().save_checkpoint, checkpoint, storage_options=storage_options)
        shelf: Shelf = live.checkpoints if live is not None else PlainShelf()
        if self.tables is None:
            save = saving_file(filepath, write, shelf, self, barrier)
            written = self.collectives.confirmed("saving a checkpoint", save)
        else:
            save = saving_folder(self.tables.sharded, filepath, write, shelf, self)
            written = self.collectives.confirmed("saving a checkpoint with tables", save)
        if live is not None and written is not None and "optimizer_states" in checkpoint:
            record_when_written(self.checkpoint_io, written, shelf, self._lightning_trainer.global_step)

    def remove_checkpoint(self, filepath: Any) -> None:
        if self.live is None or not self.is_global_zero or self.live.checkpoints.may_remove(filepath):
            super().remove_checkpoint(filepath)

    # --- a step ----------------------------------------------------------------------------------------------------------

    def watch_next_forward(self, watch: AbstractContextManager[Any]) -> None:
        """Run the next training step inside `watch`. Once, unless the step fails."""
        self._watch = watch

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        live = self.live
        with self.times.measure("forward"):
            if self.tables is not None:
                self.tables.optimizers.pass_on_rates(self.optimizers)
            try:
                with self._watch or nullcontext(), live.metrics.without_empty_share() if live is not None else nullcontext():
                    result = super().training_step(*args, **kwargs)
            except ValueError as error:
                if live is not None:
                    explain_single_sample(error, live.loaders.num_own_samples, self.world_size)
                raise
        self._watch = None
        return result

    def backward(self, closure_loss: Tensor, optimizer: Any | None, *args: Any, **kwargs: Any) -> Tensor:
        live = self.live
        with self.times.measure("backward"):
            if live is not None:
                if (weight := live.loaders.current_loss_weight * live.steps.parts.weight) != 1.0:
                    closure_loss = closure_loss * weight
                check_capture()
                live.steps.backward_begins()
                live.steps.backwards.backward()
            self.clock.backward_begins(closure_loss)
            try:
                with self.replica.unused.searching():
                    result = super().backward(closure_loss, optimizer, *args, **kwargs)
                if live is not None:
                    self.replica.unused.check(self)
            finally:
                self.clock.backward_ended()
        return result

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any | None = None, **kwargs: Any) -> Any:
        live = self.live
        if live is None:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        if not self._lightning_trainer.lightning_module.automatic_optimization:
            live.collectives.check_gradients()  # manual optimization computed them before this call
            live.steps.values_arrive()
        live.steps.before_optimizer_step(optimizer, closure)

        def checked() -> Any:
            result = closure()
            live.collectives.check_gradients()
            live.steps.values_arrive()
            live.steps.drop_update_without_loss()
            return result

        return super().optimizer_step(optimizer, checked, model, **kwargs)

    # --- collectives outside of steps --------------------------------------------------------------------------------------

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        run = super().barrier
        self.collectives.barrier(partial(run, *args, **kwargs), str(args[0] if args else kwargs.get("name") or ""))
        if "run-stage" in args:
            trainer = self._lightning_trainer
            wrap_evaluations(trainer, self.live)
            if trainer.state.fn == TrainerFn.FITTING:
                wrap_loops(trainer, self.live, self)

    def broadcast(self, obj: T, src: int = 0) -> T:
        return self.collectives.broadcast(super().broadcast, obj, src)

    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        return self.collectives.reduce(super().reduce, tensor, group, reduce_op)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        return self.collectives.decide(super().reduce, decision, needs_all=all)

    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        return self.collectives.all_gather(super().all_gather, tensor, group, sync_grads)

    # --- the end -----------------------------------------------------------------------------------------------------------

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        if self._job is not None and self.live is not None and not isinstance(exception, SystemExit):
            self._job.report_error(exception)

    def teardown(self) -> None:
        if self._job is not None:
            self._job.trainer_ends(self._lightning_trainer if self.lightning_module is not None else None)
        if self.tables is not None:
            self.tables.keep_on_module()
        stays = self.tables is not None or (self.lightning_module is not None and has_tables(self.lightning_module))
        # Lightning would move the module to the CPU. Tables stay sharded, on the devices where they are trained.
        with without_model(self) if stays else nullcontext():
            super().teardown()
