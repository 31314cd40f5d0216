"""The Lightning strategy: applies the job's rounds to a running Trainer.

This module holds Lightning's hooks only, each a few lines long. They hand over to three places:
  - `live/training.py`, when the world changes,
  - `live/loader.py`, for the split of samples over workers,
  - Lightning's own DDP strategy, for everything else.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
from fsspec.core import url_to_fs
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from lightning_dlrover._version import __version__
from lightning_dlrover.checks.arguments import check_arguments
from lightning_dlrover.checks.loaders import (
    batching_of,
    check_data_loader,
    check_step_signature,
)
from lightning_dlrover.checks.script import (
    UnsupportedScriptError,
    check_optimizers,
    different_callbacks,
    explain_single_sample,
    monitoring,
)
from lightning_dlrover.either_strategy import EitherStrategy
from lightning_dlrover.live.devices import own_device
from lightning_dlrover.live.environment import DLRoverEnvironment
from lightning_dlrover.live.loader import ElasticLoader
from lightning_dlrover.live.training import (
    LiveTraining,
    can_meet,
    leave_quietly,
)
from lightning_dlrover.live.unused_parameters import UnusedParameters
from lightning_dlrover.live.validation import exchange_metrics_through
from lightning_dlrover.observe.pulse import OwnClock
from lightning_dlrover.observe.step_times import StepTimes
from lightning_dlrover.output import drop_what_cannot_be_written
from lightning_dlrover.packages import TrainerFn, fabric_submodule, submodule
from lightning_dlrover.rdzv.group import transfer, waits
from lightning_dlrover.rdzv.group.config import WorldConfig
from lightning_dlrover.rdzv.group.leaving import end_with_agent
from lightning_dlrover.rdzv.group.loop import model_fingerprint
from lightning_dlrover.rdzv.group.purpose import (
    Purpose,
    place_of,
)
from lightning_dlrover.rdzv.group.world import World
from lightning_dlrover.rdzv.live.admission import JobClosedError
from lightning_dlrover.rdzv.live.member import Formation, LeftOutError
from lightning_dlrover.tables.checkpoint import (
    load_tables,
    save_tables,
)
from lightning_dlrover.tables.elastic import (
    ElasticTables,
    Restored,
)
from lightning_dlrover.tables.optimizers import (
    TableOptimizer,
    TableOptimizerError,
    in_backward,
)
from lightning_dlrover.tables.sharded import ShardedTables
from lightning_dlrover.tables.snapshot_store import SnapshotStore
from lightning_dlrover.tables.snapshots import SnapshotConfig
from lightning_dlrover.tables.torchrec_parts import has_tables

if TYPE_CHECKING:
    import lightning as L

__all__ = ["DLRoverStrategy"]

TRAINER_FILE = "trainer.ckpt"
TABLES_FOLDER = "tables"
"""Contents of a checkpoint folder with sharded tables: Lightning's own file, and a `torch.distributed.checkpoint` folder."""

log = logging.getLogger(__name__)

T = TypeVar("T")


SHARDED = "_dlrover_sharded"
"""Attribute of a module that this process has trained before. Its tables are sharded already."""


@dataclass
class _Sharded:
    """A module's tables as they were last trained. A copy of the module gets none."""

    tables: ShardedTables | None = None
    model: Any = None
    elastic_tables: ElasticTables | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {}


class _ForwardRedirection:
    """Lightning's detour through DDP's forward. It also ends when DDP raises before it reaches the module."""

    def __init__(self, detour: Any) -> None:
        self._detour = detour

    def __call__(
        self, wrapper_module: torch.nn.Module, original_module: L.LightningModule, method_name: str, *args: Any, **kwargs: Any
    ) -> Any:
        forward = original_module.forward
        try:
            return self._detour(wrapper_module, original_module, method_name, *args, **kwargs)
        except BaseException:
            original_module.forward = forward  # type: ignore[method-assign]
            raise


class DLRoverStrategy(EitherStrategy):
    """Data-parallel training on workers that may join, leave or be lost while the job runs.

    Under `torchrun --rdzv-backend=etcd-v3` (or `dlrover run`) the world changes live. Started otherwise, this is Lightning's
    own DDP strategy, or plain single-device training for one process.

    Serves Trainers of `lightning` and of `pytorch_lightning`::

        # train.py, started as `dlrover run --workers 1:3 train.py`
        trainer = L.Trainer(strategy=DLRoverStrategy(), callbacks=[DLRoverCallback()])
        trainer.fit(model, DataLoader(dataset, batch_size=512, shuffle=True))

    Args:
        global_batch_size: samples per step over all workers. None: the DataLoader's batch size times the number of workers
            that the job started with. With several training loaders it holds for each of them.
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
        ddp_kwargs: further arguments of `DDPStrategy` and `DistributedDataParallel`.
    """

    strategy_name = "dlrover"
    _in_job: ClassVar[DLRoverStrategy | None] = None  # strategy through which this process has entered its job
    _closes_at_exit: ClassVar[bool] = False

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
        **ddp_kwargs: Any,
    ) -> None:
        check_arguments(
            global_batch_size,
            check_interval_s,
            timeout,
            sharding_constraints,
            sharders,
            snapshots,
            compare_data,
            rerun_epoch_hooks,
        )
        self._world_config = WorldConfig.from_environment(os.environ, __version__)
        if self._world_config is not None:
            end_with_agent()
            self._world_config = dataclasses.replace(self._world_config, collective_timeout_s=timeout.total_seconds())
            ddp_kwargs.setdefault("cluster_environment", DLRoverEnvironment())
        super().__init__(timeout=timeout, **ddp_kwargs)
        self._forward_redirection: Any = _ForwardRedirection(self._forward_redirection)
        self.unused = UnusedParameters(self._ddp_kwargs, self._world_config is not None)
        self.times = StepTimes()
        self.clock = OwnClock()
        self._watch: AbstractContextManager[Any] | None = None
        # Parameters of the model in DDP, each with a flag: trainable when DDP wrapped the model.
        self._wrapped: list[tuple[torch.nn.Parameter, bool]] = []
        self._global_batch_size = global_batch_size
        self._check_interval_s = check_interval_s
        self.compares_data = compare_data
        self.reruns_epoch_hooks = rerun_epoch_hooks
        self._world: World | None = None
        self._live: LiveTraining | None = None
        self._undo_quiet: Callable[[], None] | None = None  # set while Lightning handles a leave before this Trainer's loops
        self._start_workers = 0
        self._is_alone = False  # True while hooks run that other workers do not run now
        self._use_distributed_sampler: bool | None = None  # the Trainer's original setting
        self._trainer: Any = None
        self._sharding_constraints = sharding_constraints
        self._sharders = sharders
        self._snapshot_config = snapshots or SnapshotConfig()
        self._tables: ShardedTables | None = None
        self._optimized: list[list[list[tuple[str, Any]]]] = []  # names and parameters, by optimizer and group
        self._table_groups: dict[str, tuple[int, int]] = {}  # optimizer and group of each table that left them, by table name
        self._frozen_tables: set[str] = set()  # tables that no optimizer trains
        self._tables_to_load: Path | None = None  # folder of the tables that belong to the next loaded state dict
        self.unread_checkpoint: tuple[int, str] | None = None  # step and folder of the user's checkpoint; a joiner skips it
        self._has_dense_state = False  # True once all workers' dense parameters are alike
        self.elastic_tables: ElasticTables | None = None
        self._snapshot_stores: list[SnapshotStore] = []  # stores of all models with tables that this script has trained
        self.fingerprint = ""

    # --- place in the job ----------------------------------------------------------------------------------------------------

    @property
    def live(self) -> LiveTraining | None:
        """The job's rounds from this worker's point of view; None when the world cannot change."""
        return self._live

    @property
    def has_global_batch_size(self) -> bool:
        return self._global_batch_size is not None

    @property
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        if self._world_config is None:
            return self.parallel_devices[self.local_rank % len(self.parallel_devices)]
        num_gpus = torch.cuda.device_count() if self.parallel_devices[0].type == "cuda" else 0
        return own_device(self.parallel_devices, self.local_rank, num_gpus, self._process_group_backend)

    def set_world_ranks(self) -> None:
        if self._world_config is None:
            super().set_world_ranks()
        else:
            # The environment holds the agent's ranks until the first round, then the round's.
            self._tell_rank()

    def enter_round(self, global_rank: int, world_size: int) -> None:
        """Take a place in a new round."""
        assert self.cluster_environment is not None
        self.cluster_environment.set_global_rank(global_rank)
        self.cluster_environment.set_world_size(world_size)
        self._tell_rank()

    def _tell_rank(self) -> None:
        # lightning, fabric and their utilities share this one object.
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        if self._world_config is None:
            return super().distributed_sampler_kwargs
        return {"num_replicas": self.world_size, "rank": self.global_rank if self.world_size > 1 else 0}

    def _configure_launcher(self) -> None:
        if self._world_config is None and self._is_single:
            return
        if self._world_config is None:
            super()._configure_launcher()

    @property
    def _is_single(self) -> bool:
        """Whether this is one process that no other can join."""
        return self._world_config is None and self.num_processes * self.num_nodes == 1

    # --- setting up ------------------------------------------------------------------------------------------------------

    def setup_environment(self) -> None:
        if self._world_config is None and not self._is_single:
            super().setup_environment()
            return
        assert self.accelerator is not None
        self.accelerator.setup_device(self.root_device)
        self._take_loaders_as_they_are()
        if self._world_config is None:
            return
        former = DLRoverStrategy._in_job
        if former is not None and former._live is not None and former._world is not None and self._is_about_to_fit:
            try:
                former._live.begin_later_fit()
            except SystemExit:
                if former is not self:  # else the former Trainer is quiet already
                    self._undo_quiet = leave_quietly(self._lightning_trainer)
                raise
        if self._live is None or former not in (self, None):
            self._enter_job()
        if self._live is not None:
            self._live.searches.attend(self._lightning_trainer.callbacks)

    @property
    def _is_about_to_fit(self) -> bool:
        trainer = self._lightning_trainer
        is_search = any(getattr(callback, "_early_exit", False) for callback in trainer.callbacks)  # `Tuner.lr_find`
        return bool(trainer.state.fn == TrainerFn.FITTING and not is_search)

    def _enter_job(self) -> None:
        """Start the world for the script's first Trainer, or take it over from an earlier one."""
        assert self._world_config is not None
        if "DLROVER_NODE" in os.environ:  # `dlrover run` has chosen where the output goes
            drop_what_cannot_be_written()
        fabric_submodule(self._package, "utilities.seed").reset_seed()
        if (former := DLRoverStrategy._in_job) is not None and former._world is not None:
            self._go_on_from(former)
            return
        backend = self._process_group_backend or ("gloo" if self.root_device.type == "cpu" else "cpu:gloo,cuda:nccl")
        trainer = self._lightning_trainer
        try:
            self._world = World(self._world_config, backend, can_meet)
            formation = self._world.start()
        except JobClosedError as error:
            # A worker started again, or late, for a job that has ended meanwhile. Nothing is wrong with it.
            log.warning("%s", error)
            self._close_world()
            raise SystemExit(0) from error
        except LeftOutError as left_out:
            log.info("this worker leaves: %s", left_out)
            self._close_world()
            self._undo_quiet = leave_quietly(trainer)
            raise SystemExit(left_out.exit_code) from left_out
        except BaseException:
            self._close_world()
            raise
        DLRoverStrategy._in_job = self
        DLRoverStrategy._close_at_exit()
        self._live = LiveTraining(self, trainer, self._world, formation, self._check_interval_s)
        waits.time_with(self.clock.stopped)
        self._take_place(formation)
        if formation is not None and formation.rank == 0:
            self._compare_with_arguments(formation.size)
        if formation is not None and formation.size > 1:
            self._compare_callbacks()

    def _compare_callbacks(self) -> None:
        """Compare callbacks before Lightning's first collectives.

        Collectives of a callback that some workers lack would meet other collectives.

        Raises:
            UnsupportedScriptError: the workers have different callbacks.
        """
        assert self._live is not None
        mine = monitoring(self._lightning_trainer.callbacks)
        by_rank = self._live.named("the comparison of callbacks", lambda: transfer.all_gather(mine))
        for rank, theirs in enumerate(by_rank):  # all workers compare with rank 0, so that all of them end
            if problem := different_callbacks(by_rank[0], theirs, "rank 0", f"rank {rank}"):
                raise UnsupportedScriptError(problem)

    def _compare_with_arguments(self, num_workers: int) -> None:
        """Warn if the script was written for another number of workers than the job's: a step then has another batch size."""
        devices = self._lightning_trainer._accelerator_connector._devices_flag
        by_default = devices in (-1, "-1", type(self.accelerator).auto_device_count())  # here "auto" is a number
        per_node = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if by_default else self.num_processes
        if (wanted := per_node * self.num_nodes) in (1, num_workers):
            return
        assert self._world_config is not None
        log.warning(
            "Trainer(devices=%r, num_nodes=%d) is meant for %d workers, but has no effect in a live job: it starts with %d "
            "and may have %d to %d, as set by `dlrover run --workers MIN:MAX`, or torchrun's --nnodes and --nproc-per-node. "
            "A step takes the DataLoader's batch size times %d; DLRoverStrategy(global_batch_size=...) sets it for any number",
            *(devices, self.num_nodes, wanted, num_workers),
            *(self._world_config.min_workers, self._world_config.max_workers, num_workers),
        )

    def _take_place(self, formation: Formation | None) -> None:
        assert self._world_config is not None
        if formation is not None:
            self.enter_round(formation.rank, formation.size)
        else:
            # Alone until admitted, and never the worker that logs.
            self.enter_round(self._world_config.max_workers, 1)

    def _go_on_from(self, former: DLRoverStrategy) -> None:
        """Take over the world from the strategy of an earlier Trainer in the same script."""
        assert former._live is not None
        self._world, former._world = former._world, None
        assert self._world is not None
        formation = former._live.formation
        DLRoverStrategy._in_job = self
        DLRoverStrategy._close_at_exit()
        self._start_workers = former._start_workers
        self._live = LiveTraining(self, self._lightning_trainer, self._world, formation, self._check_interval_s)
        self._snapshot_stores = former._snapshot_stores
        self._live.searches.num_begun = former._live.searches.num_begun
        waits.time_with(self.clock.stopped)
        self._take_place(formation)

    @classmethod
    def _close_at_exit(cls) -> None:
        # Registered once: a handler for each strategy would keep every Trainer and model of the script alive.
        if not DLRoverStrategy._closes_at_exit:
            DLRoverStrategy._closes_at_exit = True
            atexit.register(_close_newest_world)

    def _take_loaders_as_they_are(self) -> None:
        """Keep Lightning from replacing samplers: its own shuffles every training loader, even where the user does not."""
        connector = self._lightning_trainer._accelerator_connector
        if self._use_distributed_sampler is None:
            self._use_distributed_sampler = connector.use_distributed_sampler
        # Lightning splits predictions itself, because it needs their indices.
        predicting = self._lightning_trainer.state.fn == TrainerFn.PREDICTING
        connector.use_distributed_sampler = predicting and self._use_distributed_sampler

    @property
    def _lightning_trainer(self) -> Any:
        assert self.lightning_module is not None
        return self.lightning_module.trainer

    # --- models with sharded tables ----------------------------------------------------------------------------------------

    def setup(self, trainer: L.Trainer) -> None:
        assert self.lightning_module is not None
        if self._tables is None and not has_tables(self.lightning_module):
            if self._is_single and trainer.state.fn != TrainerFn.FITTING:
                self._setup_alone(trainer)
                return
            super().setup(trainer)
            if trainer.state.fn == TrainerFn.FITTING:
                self._note_optimizers()
            return
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        self.precision_plugin.convert_module(self.lightning_module)
        if trainer.state.fn == TrainerFn.FITTING and self._layer_sync is not None:
            self._layer_sync.apply(self.lightning_module)  # applied in place: the module itself is no normalization layer
        former: _Sharded | None = self.lightning_module.__dict__.get(SHARDED)
        is_new = False
        if self._tables is None and former is not None and former.tables is not None:
            # Another Trainer of this script has trained the module.
            self._tables, self.model, self.elastic_tables = former.tables, former.model, former.elastic_tables
        elif self._tables is None:
            is_new = True
            self.fingerprint = model_fingerprint(self.lightning_module)
            self._tables = ShardedTables(self.lightning_module, self.root_device, self._sharding_constraints, self._sharders)
            self._dense_to_device()
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
            self._note_optimizers()
            try:
                self._take_tables_from_optimizers(is_new)
            except TableOptimizerError:
                self.optimizers = []  # Lightning would move their states, and some have no values yet
                raise
        if is_new:
            self._build_tables(self._tables)
        if trainer.state.fn == TrainerFn.FITTING:
            self._give_tables_to_optimizers()
        self.setup_precision_plugin()

    def _setup_alone(self, trainer: L.Trainer) -> None:
        """Prepare validation, test or prediction as DDP does, without sending weights: there is no process group."""
        assert self.accelerator is not None
        assert self.model is not None
        self.accelerator.setup(trainer)
        self.model = self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        self.setup_precision_plugin()

    def _note_optimizers(self) -> None:
        assert self.lightning_module is not None
        if self._live is not None:
            check_optimizers(self.optimizers)
        was_found = self.unused.found
        self.unused.note_optimizers(self.lightning_module.automatic_optimization, len(self.optimizers))
        if self.unused.found and not was_found and isinstance(self.model, DistributedDataParallel):
            self.wrap_model()  # Lightning wraps it before the optimizers are there

    def _build_tables(self, tables: ShardedTables) -> None:
        live = self._live
        if live is not None:
            assert self._world is not None
            self.elastic_tables = ElasticTables(tables, self._world, self._snapshot_config, self._wrap_dense)
            if self.elastic_tables.store is not None:
                self._snapshot_stores.append(self.elastic_tables.store)
            if live.formation is not None:
                self.model = self.elastic_tables.start(live.formation, torch.initial_seed())
            else:
                # A joiner gets its shards when it is admitted. Until then it cannot compute with them.
                self._lightning_trainer.num_sanity_val_steps = 0
            return
        if not dist.is_initialized():
            # torchrec's collectives need a group, even with one worker. The tables need it for as long as they are used.
            backend = "gloo" if self.root_device.type == "cpu" else "cpu:gloo,cuda:nccl"
            dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
            atexit.register(_leave_group)
        members = [str(rank) for rank in range(dist.get_world_size())]
        self.model = tables.build(tables.first_plan(members), members, self._wrap_dense)
        seed = torch.tensor(torch.initial_seed() % 2**63, device=self.root_device)
        dist.broadcast(seed, 0)  # tables that every worker holds whole must be alike
        tables.initialise(int(seed))

    def _wrap_dense(self, module: torch.nn.Module, sharded: list[str]) -> torch.nn.Module:
        if self.world_size == 1:
            return module
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, sharded)  # type: ignore[no-untyped-call]
        kwargs = self._ddp_kwargs
        # When training continues, all workers have equal parameters already, or are about to receive them.
        self._ddp_kwargs = {**kwargs, "init_sync": not self._has_dense_state}
        try:
            wrapped = self._setup_model(module)
        finally:
            self._ddp_kwargs = kwargs
        if self.root_device.type == "cuda":  # the same as Lightning does for models without tables
            register = submodule(self._package, "overrides.distributed")._register_ddp_comm_hook
            register(wrapped, self._ddp_comm_state, self._ddp_comm_hook, self._ddp_comm_wrapper)
        return wrapped

    def _setup_model(self, model: torch.nn.Module) -> DistributedDataParallel:
        self._wrapped = [(p, p.requires_grad) for p in model.parameters()]
        kwargs = self._ddp_kwargs
        if self.unused.found:
            self._ddp_kwargs = {**kwargs, "find_unused_parameters": True}
        try:
            wrapped = super()._setup_model(model)
        finally:
            self._ddp_kwargs = kwargs
        self.clock.stop_in_forward(wrapped)
        if self._world is not None and self._ddp_comm_hook is None:
            self._world.guard(wrapped)
        return wrapped

    def _dense_to_device(self) -> None:
        if self.root_device.type == "cpu":
            return
        assert self._tables is not None
        assert self.lightning_module is not None
        tables = self._tables.parameter_names()
        for path, part in self.lightning_module.named_modules():
            if not any(name.startswith(f"{path}.") and path for name in tables):
                part._apply(lambda t: t.to(self.root_device), recurse=False)

    @property
    def table_names(self) -> set[str]:
        """Names of the parameters that are torchrec's tables."""
        return self._tables.parameter_names() if self._tables is not None else set()

    @property
    def sharded_names(self) -> set[str]:
        """Names of the parameters that differ between workers."""
        return self.table_names - self._whole_tables.keys() if self._tables is not None else set()

    def start_tables(self, formation: Formation) -> None:
        """Build new tables with all members of a round in which no worker has any."""
        assert self.elastic_tables is not None
        self._has_dense_state = False
        self.model = self.elastic_tables.start(formation, torch.initial_seed())
        self._give_tables_to_optimizers()

    def reshard_tables(self, formation: Formation, standing: Sequence[str]) -> None:
        """Bring the tables over from the former round's workers, which are all present."""
        assert self.elastic_tables is not None
        self._has_dense_state = True
        self.model = self.elastic_tables.reshard(formation, standing)
        self._give_tables_to_optimizers()

    def roll_tables_back(self, formation: Formation, batch: int) -> Restored | None:
        """Take the tables from the newest complete snapshot at or after a batch; None if there is none."""
        assert self.elastic_tables is not None
        self._has_dense_state = True
        rolled_back = self.elastic_tables.roll_back(formation, batch)
        if rolled_back is None:
            return None
        self.model, restored = rolled_back
        self._give_tables_to_optimizers()
        return restored

    def _take_tables_from_optimizers(self, is_new: bool) -> None:
        """Move the user's optimizers of tables into the backward pass, unless they are applied there already.

        Args:
            is_new: the tables are not built yet.

        Raises:
                TableOptimizerError: a table cannot be trained in the backward pass, or is in no optimizer.
        """
        assert self.lightning_module is not None
        assert self._tables is not None
        parameters = dict(self.lightning_module.named_parameters())
        names = {id(p): name for name, p in parameters.items()}
        self._optimized = [
            [[(names.get(id(p), ""), p) for p in group["params"]] for group in optimizer.param_groups]
            for optimizer in self.optimizers
        ]
        missing = self._tables.without_optimizer() | self._tables.optimizers.keys()
        self._table_groups, chosen = {}, {}
        for i, (optimizer, groups) in enumerate(zip(self.optimizers, self._optimized, strict=True)):
            for j, (group, entries) in enumerate(zip(optimizer.param_groups, groups, strict=True)):
                for name in sorted({name for name, _ in entries} & missing):
                    chosen[name] = in_backward(name.removesuffix(".weight"), optimizer, group, self.root_device.type)
                    self._table_groups[name] = i, j
        for name in sorted(missing - chosen.keys()):
            if parameters[name].requires_grad and name not in self._tables.frozen:
                way_out = "freeze it with requires_grad_(False)" if is_new else "make a new model"
                raise TableOptimizerError(
                    f"table {name.removesuffix('.weight')} is in none of the optimizers of configure_optimizers, nor is one "
                    f"applied in its backward pass: add it to one, or {way_out}"
                )
            chosen[name] = TableOptimizer(torch.optim.SGD, {"lr": 0.0})
        self._frozen_tables = self._tables.frozen = chosen.keys() - self._table_groups.keys()
        group_of: dict[str, Hashable] = {name: self._table_groups.get(name, "frozen") for name in chosen}
        if is_new:
            self._tables.train_with(chosen, len(set(group_of.values())) > 1)
        for name, chosen_now in chosen.items():
            if chosen_now.differs(self._tables.optimizers.get(name, TableOptimizer(torch.optim.SGD, {}))):
                raise TableOptimizerError(
                    f"table {name.removesuffix('.weight')} was sharded for another optimizer before in this script, or for "
                    "none, as by trainer.validate: only its learning rate can change; make a new model, and call fit first"
                )
        if inseparable := self._tables.inseparable(group_of):
            both = " and ".join(name.removesuffix(".weight") for name in inseparable)
            raise TableOptimizerError(
                f"tables {both} are in different parameter groups of configure_optimizers. An earlier fit of this script had "
                "them in one group, so one kernel trains both with one learning rate: keep them in one group, or make a new "
                "model and call fit with these groups first"
            )

    def _give_tables_to_optimizers(self) -> None:
        """Give the user's optimizers the tables that they train: those that every worker holds whole."""
        assert self.lightning_module is not None
        assert self._tables is not None
        now = dict(self.lightning_module.named_parameters())
        tables = self._tables.parameter_names()
        theirs = self._tables.data_parallel_names() if self._tables.is_built else set()
        for optimizer, groups in zip(self.optimizers, self._optimized, strict=True):
            for group, entries in zip(optimizer.param_groups, groups, strict=True):
                for i, (name, former) in enumerate(entries):
                    if name not in tables:
                        continue
                    entries[i] = (name, now[name] if name in theirs else None)
                    state = optimizer.state.pop(former, None) if former is not None else None
                    if state and name in theirs:
                        optimizer.state[now[name]] = _with_values(state, group, now[name].device)
                group["params"] = [parameter for _, parameter in entries if parameter is not None]

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the module's state without sharded tables, which checkpoints hold in another form."""
        if self._tables is None:
            return super().lightning_module_state_dict()
        with self._tables.aside():
            state = super().lightning_module_state_dict()
        return {**state, **{name: parameter.detach() for name, parameter in self._whole_tables.items()}}

    @property
    def _whole_tables(self) -> dict[str, torch.nn.Parameter]:
        """Tables that every worker holds whole, by their names in the state dict."""
        assert self._tables is not None
        assert self.lightning_module is not None
        names = self._tables.data_parallel_names() if self._tables.is_built else set()
        return {name: p for name, p in self.lightning_module.named_parameters() if name in names}

    def configure_ddp(self) -> None:
        if (self._live is None and not self._is_single) or (
            self._live is not None and self._live.formation is not None and self._live.formation.size > 1
        ):
            super().configure_ddp()

    def wrap_model(self, in_validation: bool = False) -> None:
        """Wrap the model for the current round. All workers have equal parameters already.

        Args:
            in_validation: whether any worker is in a validation, where `send_buffers` has sent the buffers. It must be equal on
                all workers: one that has already ended the validation makes its next forward pass together with the others'
                first one after it.
        """
        assert self.lightning_module is not None
        if self._tables is not None:
            return  # the tables' build has wrapped it
        self.model = self.lightning_module
        self._pl_static_graph_delay_done = False  # manual optimization: the new replica needs the call, too
        if self.world_size > 1:
            kwargs = self._ddp_kwargs
            self._ddp_kwargs = {**kwargs, "init_sync": False}
            try:
                self.configure_ddp()
            finally:
                self._ddp_kwargs = kwargs
            if in_validation and isinstance(self.model, DistributedDataParallel):
                self.model.require_forward_param_sync = False

    def send_buffers(self) -> dict[str, Tensor]:
        """Give all workers rank 0's buffers before a validation.

        DDP does so in each worker's first forward pass. A worker without a sample of the first dataloader, or without any left
        after a loss, makes that pass later than the others or never. It would meet them in another collective.

        Returns:
            A copy of the sent buffers, for a worker that did not receive them because of a loss; see `take_buffers`.
        """
        model = self.model
        sent: dict[str, Tensor] = {}
        if isinstance(model, DistributedDataParallel) and self.world_size > 1:
            if model.broadcast_buffers and any(True for _ in model.module.buffers()):
                model._sync_buffers()  # type: ignore[no-untyped-call]
                sent = {name: buffer.detach().clone() for name, buffer in model.named_module_buffers.items()}
            model.require_forward_param_sync = False
        return sent

    def take_buffers(self, sent: Mapping[str, Tensor]) -> None:
        """Set the buffers that `send_buffers` returned, here or on another worker."""
        assert self.lightning_module is not None
        own = dict(self.lightning_module.named_buffers())
        with torch.no_grad():
            for name, buffer in sent.items():
                own[name].copy_(buffer)

    def wrap_what_was_unfrozen(self) -> None:
        """Wrap the model anew if parameters were unfrozen since the last wrap.

        DDP reduces only the gradients of parameters that were trainable when it was made. The workers' weights would drift
        apart after a callback unfreezes layers while training. Manual optimization is left alone: it switches parameters on
        and off in each step, as Lightning's `toggle_optimizer` does.
        """
        assert self.lightning_module is not None
        if self._tables is not None or self.world_size == 1 or not self.lightning_module.automatic_optimization:
            return
        if any(p.requires_grad and not was_trainable for p, was_trainable in self._wrapped):
            self.wrap_model()

    def process_dataloader(self, dataloader: object) -> object:
        live = self._live
        trainer = self._lightning_trainer
        fitting = trainer.state.fn == TrainerFn.FITTING
        if isinstance(dataloader, ElasticLoader):
            dataloader = dataloader.users_loader  # Lightning has put ours into the user's CombinedLoader
        if live is None or trainer.predicting or (not fitting and not isinstance(dataloader, DataLoader)):
            return dataloader
        training = bool(trainer.training or (fitting and trainer.state.stage == "train"))
        if fitting:
            check_data_loader(
                dataloader, self._use_distributed_sampler is False, "train_dataloader" if training else "val_dataloader"
            )
            takes = submodule(self._package, "utilities.signature_utils").is_param_in_hook_signature
            check_step_signature(training and takes(trainer.lightning_module.training_step, "dataloader_iter", explicit=True))
        assert isinstance(dataloader, DataLoader)
        workers = self._agree_on_start_workers()
        global_batch = batching_of(dataloader).batch_size * workers
        if training and self._global_batch_size is not None:
            global_batch = self._global_batch_size
        return ElasticLoader(
            dataloader,
            global_batch,
            training=training,
            before_next=live.boundary if training else None,
            place=lambda: (self.global_rank if self.world_size > 1 else 0, self.world_size),
            sockets=lambda: live.world.owned_sockets,
            materialise=lambda order: self.broadcast(order, 0),
        )

    def _agree_on_start_workers(self) -> int:
        """Return the factor of a DataLoader's batch size: the number of workers of the job's first start."""
        assert self._live is not None
        membership = self._live.world.membership
        formation = self._live.formation
        if formation is not None and formation.rank == 0:
            # A resumed checkpoint has its own number.
            number = self._start_workers or formation.size
            membership.update_job(lambda job: job if job.start_workers else dataclasses.replace(job, start_workers=number))
        if self._start_workers == 0:
            self._start_workers = membership.wait_for(
                lambda view: view.job.start_workers if view.job and view.job.start_workers else None,
                self._live.world.config.wait_timeout_s,
                "rank 0 to say how many workers the job started with",
            )
        return self._start_workers

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        folder = Path(checkpoint_path)
        if self._tables is None:
            checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        elif not (folder / TRAINER_FILE).is_file():
            raise FileNotFoundError(
                f"checkpoint {folder}: there is no {TRAINER_FILE} in it; a model with sharded tables is saved as a folder "
                f"with {TRAINER_FILE} and {TABLES_FOLDER}"
            )
        else:
            checkpoint = super().load_checkpoint(folder / TRAINER_FILE, weights_only)
            self._tables_to_load = folder / TABLES_FOLDER
            if not self._tables.is_built:
                self.unread_checkpoint = int(checkpoint["global_step"]), str(folder.absolute())
        self._start_workers = checkpoint.get("dlrover", {}).get("start_workers", self._start_workers)
        return checkpoint

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        # Tables are read into the shards that each worker has after setup.
        assert self.lightning_module is not None
        return self._tables is not None or has_tables(self.lightning_module)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if self._tables is None:
            super().load_model_state_dict(checkpoint, strict)
            return
        if not self._tables.is_built:
            return  # a joiner, which receives the others' state
        assert self.lightning_module is not None
        state = dict(checkpoint["state_dict"])
        with torch.no_grad():
            for name, parameter in self._whole_tables.items():
                if name in state:
                    parameter.copy_(state.pop(name))
        with self._tables.aside():
            self.lightning_module.load_state_dict(state, strict=strict)
        if self._tables_to_load is not None:
            tables, folder, self._tables_to_load = self._tables, self._tables_to_load, None
            self._collective("loading tables from a checkpoint", lambda: load_tables(tables, folder))

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if self._tables is None or self._tables.is_built:
            super().load_optimizer_state_dict(checkpoint)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        if self._live is not None:
            checkpoint["dlrover"] = {"start_workers": self._start_workers}
        if self._tables is None:
            self._save_whole(checkpoint, filepath, storage_options)
        elif "://" in str(filepath):
            raise ValueError(
                f"checkpoint {filepath}: all workers save a model with sharded tables into one folder, which cannot be a URL: "
                "set ModelCheckpoint(dirpath=...) or Trainer(default_root_dir=...) to a folder that all hosts share"
            )
        else:
            self._collective(
                "saving a checkpoint with tables", lambda: self._save_with_tables(checkpoint, Path(filepath), storage_options)
            )
        if self._live is not None and "optimizer_states" in checkpoint:
            path = str(filepath) if "://" in str(filepath) else os.path.abspath(filepath)
            self._when_written(path, functools.partial(self._live.saved_checkpoint, path, self._lightning_trainer.global_step))

    def _when_written(self, path: str, record: Callable[[], None]) -> None:
        """Put a checkpoint on record once it exists, which may be later: a plugin may write it in its own thread."""
        executor = getattr(self.checkpoint_io, "_executor", None)
        if executor is None:
            record()
        else:
            # The executor has one thread, which runs tasks in order. It may have failed to write the file.
            executor.submit(lambda: None if self.unreadable(path) else record())

    def unreadable(self, path: str) -> str:
        """Return why this worker cannot read a checkpoint of the job; empty if it can."""
        try:
            filesystem, local_path = url_to_fs(path)
            if not filesystem.exists(local_path):
                return "it does not exist on this host"
            if not filesystem.isdir(local_path):
                with filesystem.open(local_path, "rb") as file:
                    file.read(1)
        except Exception as error:  # file systems of other libraries raise any exception
            return f"{type(error).__name__}: {error}"
        return ""

    def load_own_checkpoint(self, path: str, names: Collection[str]) -> dict[str, Any]:
        """Load a checkpoint that this job has written, by a path from the job's records.

        Args:
            names: classes and functions that this script's own checkpoints refer to. Only these are loaded.

        Raises:
            UnpicklingError: the checkpoint holds others.
        """
        with torch.serialization.safe_globals(transfer.resolved(names)):
            return self.load_checkpoint(path, weights_only=True)

    def _save_whole(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any) -> None:
        """Write one file on rank 0. If that worker is lost while it writes, the next rank 0 writes it."""
        was_written = False

        def save() -> None:
            nonlocal was_written
            if self.is_global_zero and not was_written:
                super(DLRoverStrategy, self).save_checkpoint(checkpoint, filepath, storage_options)
                was_written = True
            super(DLRoverStrategy, self).barrier()

        self._collective("saving a checkpoint", save)

    def _save_with_tables(self, checkpoint: dict[str, Any], folder: Path, storage_options: Any) -> None:
        """Write a folder that appears only when it is complete."""
        assert self._tables is not None
        if not self._tables.is_built:
            return
        unfinished = folder.with_name(f".{folder.name}.unfinished")
        if self.is_global_zero:
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True)
        dist.barrier()
        save_tables(self._tables, unfinished / TABLES_FOLDER)
        super().save_checkpoint(checkpoint, unfinished / TRAINER_FILE, storage_options)
        dist.barrier()
        if self.is_global_zero:
            _replace_folder(folder, unfinished)
        dist.barrier()

    # --- a step ----------------------------------------------------------------------------------------------------------

    def watch_next_forward(self, watch: AbstractContextManager[Any]) -> None:
        """Run the next training step inside `watch`. Once, unless the step fails."""
        self._watch = watch

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        started, blocked_s = time.perf_counter(), self.clock.blocked_s
        if (self._table_groups or self._frozen_tables) and self._tables is not None and self._tables.is_built:
            # Schedulers set the rates in the parameter groups, which the tables have left.
            groups = {name: self.optimizers[i].param_groups[j] for name, (i, j) in self._table_groups.items()}
            rates = {name: float(group["lr"]) for name, group in groups.items()}
            self._tables.set_rates(rates | dict.fromkeys(self._frozen_tables, 0.0))
        try:
            counting = self._live.metrics.without_empty_share() if self._live is not None else nullcontext()
            with self._watch or nullcontext(), counting:
                result = super().training_step(*args, **kwargs)
            self._watch = None
            return result
        except ValueError as error:
            if self._live is not None:
                explain_single_sample(error, self._live.num_own_samples, self.world_size)
            raise
        finally:
            blocked_s = self.clock.blocked_s - blocked_s
            self.times.communication_s += blocked_s
            self.times.forward_s += time.perf_counter() - started - blocked_s

    def backward(self, closure_loss: Tensor, optimizer: Any | None, *args: Any, **kwargs: Any) -> Tensor:
        started, blocked_s = time.perf_counter(), self.clock.blocked_s
        try:
            weight = 1.0
            if self._live is not None:
                weight = self._live.loss_weight()
                self._live.backward_begins()
            if weight != 1.0:
                closure_loss = closure_loss * weight
            if self._live is not None:
                self._live.backwards.backward()
            self.clock.backward_begins(closure_loss)
            result = super().backward(closure_loss, optimizer, *args, **kwargs)
            if self._live is not None:
                assert self.lightning_module is not None
                self.unused.check(
                    self.lightning_module, self.model, lambda: self.table_names, self.world_size, self.is_global_zero
                )
            return result
        finally:
            self.clock.backward_ended()
            blocked_s = self.clock.blocked_s - blocked_s
            self.times.communication_s += blocked_s
            self.times.backward_s += time.perf_counter() - started - blocked_s

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any | None = None, **kwargs: Any) -> Any:
        live = self._live
        if live is None:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        if not self._lightning_trainer.lightning_module.automatic_optimization:
            live.check_gradients()  # manual optimization computed them before this call
        live.before_optimizer_step(optimizer, closure)

        def checked() -> Any:
            result = closure()
            live.check_gradients()
            return result

        return super().optimizer_step(optimizer, checked, model, **kwargs)

    # --- collectives outside of steps --------------------------------------------------------------------------------------

    def _collective(
        self, kind: str, run: Callable[[], T], details: str = "", *, same_line: bool = False, is_joint: bool = True
    ) -> T:
        """Run a collective of all workers, once they have confirmed that all of them are about to run it.

        Args:
            kind: name in the error if they are not.
            details: further text that workers compare.
            same_line: whether the user's code must have called it from the same line on all workers.
            is_joint: whether no worker gets the result before all have begun the collective.
        """
        live = self._live
        if live is None:
            return run()
        frame = sys._getframe(1)

        def compared() -> T:
            with live.world.compared(lambda: Purpose(kind, details, place_of(frame), same_line)):
                live.check_group()
                return run()

        return live.collective(compared, is_joint)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        if self._is_alone:
            return
        name = str(args[0] if args else kwargs.get("name") or "")
        self._collective("strategy.barrier", lambda: super(DLRoverStrategy, self).barrier(*args, **kwargs), name)
        if "run-stage" not in args:
            return
        if self._live is not None:
            self._live.metrics.attach()
            trainer = self._lightning_trainer
            for loop in (trainer.validate_loop, trainer.test_loop, trainer.fit_loop.epoch_loop.val_loop):
                self._live.validation.end_each_dataloader(loop)
        if self._lightning_trainer.state.fn == TrainerFn.FITTING:
            self._attach()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Turn collectives into no-ops, as with one worker, because the others do not take part in them."""
        self._is_alone = True
        try:
            yield
        finally:
            self._is_alone = False

    def broadcast(self, obj: T, src: int = 0) -> T:
        if self._is_alone:
            return obj
        run = super().broadcast
        # The source does not wait for the others.
        return self._collective("strategy.broadcast", lambda: run(obj, src), f"what rank {src} has", is_joint=False)

    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        if not isinstance(tensor, Tensor) or self._is_alone:
            return tensor
        if not tensor.is_floating_point() and str(reduce_op).lower() in ("mean", "avg"):
            tensor = tensor.double()  # a mean is otherwise rounded to the tensor's type, such as the type of sample counts
        run = super().reduce
        if group is not None and group is not dist.group.WORLD:
            return run(tensor, group, reduce_op)  # a group of some workers only, which no round can repeat
        name = _logged_name(sys._getframe(1))
        # On a copy, as a reduction works in place: a failed attempt must leave the input of the next one untouched.
        result = self._collective(
            "strategy.reduce",
            lambda: run(tensor.clone(), group, reduce_op),
            f"{_described(tensor)} ({reduce_op})" + (f", logged as {name!r}" if name else ""),
            same_line=not name,
        )
        return result.to(tensor.device)  # a result taken from another worker arrives on the CPU

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        if self._is_alone:
            return decision

        def decide() -> bool:
            # Compared with the size of the world that took the vote: a worker may take over the answer in a smaller one.
            total = super(DLRoverStrategy, self).reduce(torch.tensor(int(decision), device=self.root_device), reduce_op="sum")
            return bool(total == self.world_size) if all else bool(total)

        return self._collective("strategy.reduce_boolean_decision", decide)

    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        if self._is_alone:
            return tensor
        run = super().all_gather
        if group is dist.group.WORLD:
            group = None  # `LightningModule.all_gather` names the current one, which a loss replaces
        if group is not None:
            return run(tensor, group, sync_grads)
        result = self._collective(
            "strategy.all_gather", lambda: run(tensor, group, sync_grads), _described(tensor), same_line=True
        )
        return result.to(tensor.device)  # a result taken from another worker arrives on the CPU

    # --- the Trainer's loops ---------------------------------------------------------------------------------------------

    def _attach(self) -> None:
        """Wrap the parts of Lightning's loops that a change of the world must not break."""
        trainer = self._lightning_trainer
        epoch_loop = trainer.fit_loop.epoch_loop
        times, clock, live = self.times, self.clock, self._live
        if live is not None:
            live.fit_begins()

        def timed(run: Callable[..., Any]) -> Callable[..., Any]:
            def run_timed(*args: Any) -> Any:
                started, own = time.perf_counter(), clock.read()
                try:
                    return run(*args)
                finally:
                    times.run_s += time.perf_counter() - started
                    if live is not None:
                        live.batch_done(own)

            return run_timed

        automatic, manual = epoch_loop.automatic_optimization, epoch_loop.manual_optimization
        automatic.__dict__.pop("run", None)
        manual.__dict__.pop("run", None)
        run_automatic, run_manual = automatic.run, manual.run
        if live is None:
            automatic.run, manual.run = timed(run_automatic), timed(run_manual)
            return
        automatic.run = timed(lambda *args: live.run_automatic(run_automatic, *args))
        manual.run = timed(lambda *args: live.run_manual(run_manual, *args))
        val_loop = epoch_loop.val_loop
        for name in ("run", "reset", "_evaluation_step"):
            val_loop.__dict__.pop(name, None)
        run_validation, reset, evaluate = val_loop.run, val_loop.reset, val_loop._evaluation_step
        val_loop.run = lambda: live.run_validation(run_validation)
        val_loop.reset = lambda: live.validation.begin_batches(val_loop, reset)
        val_loop._evaluation_step = lambda *args: live.validation.step(val_loop, evaluate, *args)
        exchange_metrics_through(live)
        for loop in (epoch_loop, trainer.fit_loop):
            for name in ("advance", "on_advance_end"):
                loop.__dict__.pop(name, None)
        if self._tables is not None:
            advance, end_advance, end_epoch = epoch_loop.advance, epoch_loop.on_advance_end, trainer.fit_loop.on_advance_end
            epoch_loop.advance = lambda fetcher: live.again_if_rolled_back(advance, fetcher)
            epoch_loop.on_advance_end = lambda fetcher: live.end_batch(end_advance, fetcher)
            trainer.fit_loop.on_advance_end = lambda: live.end_epoch(end_epoch)
        epoch_loop.__dict__.pop("_should_check_val_fx", None)
        if getattr(trainer, "_val_check_time_interval", None) is not None:
            # Each worker reads its own clock, and workers that validate would wait for those that do not. Rank 0 decides.
            is_due = epoch_loop._should_check_val_fx
            epoch_loop._should_check_val_fx = lambda fetcher: self.broadcast(is_due(fetcher), 0)

        def then_agree(run: Callable[..., None], phase: str) -> Callable[..., None]:
            def run_then_agree(*args: Any) -> None:
                run(*args)
                live.agree_on_stop(phase)

            return run_then_agree

        epoch_loop.advance = then_agree(epoch_loop.advance, "batch")
        epoch_loop.on_advance_end = then_agree(epoch_loop.on_advance_end, "validation")
        trainer.fit_loop.on_advance_end = then_agree(trainer.fit_loop.on_advance_end, "epoch")
        trainer.__dict__.pop("save_checkpoint", None)
        save_checkpoint = trainer.save_checkpoint
        trainer.save_checkpoint = lambda *args, **kwargs: live.run_saving(save_checkpoint, *args, **kwargs)
        # Lightning's own version broadcasts on every step whether rank 0 received SIGTERM. It hangs when another rank did.
        epoch_loop._broadcast_sigterm_tensor = lambda: None
        live.world.listen_for_sigterm()
        live.is_in_loops = True

    # --- the end -----------------------------------------------------------------------------------------------------------

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        if self._live is not None and not isinstance(exception, SystemExit):
            self._live.world.report_error(exception)

    def teardown(self) -> None:
        trainer = self._lightning_trainer if self.lightning_module is not None else None
        if self._undo_quiet is not None:
            self._undo_quiet()
            self._undo_quiet = None
        if self._live is not None and trainer is not None:
            self._live.left_quietly()
            self._live.close_loaders()
            self._live.is_in_loops = False
            if trainer.state.fn == TrainerFn.FITTING and not trainer.interrupted and not self._live.is_standby:
                self._live.finish()
            if trainer.interrupted or self._live.left:
                self._close_world()
        if self._tables is None and (self.lightning_module is None or not has_tables(self.lightning_module)):
            super().teardown()
            return
        if self._tables is not None:
            # Kept on the module, because the tables hold the module itself: both live equally long.
            self._tables.module.__dict__[SHARDED] = _Sharded(self._tables, self.model, self.elastic_tables)
        # Lightning would move the module to the CPU. Tables stay sharded, on the devices where they are trained.
        module, model, self._lightning_module = self._lightning_module, self.model, None
        try:
            super().teardown()
        finally:
            self._lightning_module, self.model = module, model

    def _close_world(self) -> None:
        if self.elastic_tables is not None:
            self.elastic_tables.close(self._is_over)
            self.elastic_tables = None
        for store in self._snapshot_stores:  # includes models that an earlier Trainer has trained
            store.close()
            if self._is_over():
                store.clear()
        if self._world is not None:
            with suppress(Exception):
                self._world.leave()
        self._world = None

    def _is_over(self) -> bool:
        """Whether no worker will ever continue the job, so that nothing of it need be kept for one."""
        world = self._world
        return world is not None and (world.ask_whether_finished() or world.ask_whether_cancelled())


def _with_values(state: dict[str, Any], group: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Give values to the state that an optimizer, such as Adagrad, has created for a table without values."""
    start = group.get("initial_accumulator_value", 0.0)
    return {
        key: torch.full_like(value, start, device=device) if isinstance(value, Tensor) and value.is_meta else value
        for key, value in state.items()
    }


def _close_newest_world() -> None:
    if DLRoverStrategy._in_job is not None:
        DLRoverStrategy._in_job._close_world()


def _described(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _logged_name(frame: FrameType | None) -> str:
    """Return the name of the logged value if Lightning reduces one on behalf of `self.log`."""
    for _ in range(3):
        if frame is None:
            return ""
        if frame.f_globals.get("__name__", "").endswith(".logger_connector.result"):
            return str(getattr(getattr(frame.f_locals.get("self"), "meta", None), "name", ""))
        frame = frame.f_back
    return ""


def _replace_folder(folder: Path, new: Path) -> None:
    """Replace a folder or a file by a new folder. Except for a moment, one of the two always exists."""
    former = folder.with_name(f".{folder.name}.former")
    _remove(former)
    with suppress(FileNotFoundError):
        folder.rename(former)
    new.rename(folder)
    _remove(former)  # last, because it may take long and this process may be killed meanwhile


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _leave_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
