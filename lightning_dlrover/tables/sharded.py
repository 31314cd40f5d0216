"""The embedding tables of one model, as torchrec holds them on this worker: built, found, filled and given back.

All that depends on torchrec's insides is here. `ShardedTables.build` makes the sharded modules for one world, as often as
the world changes, in place: the dense parameters and whoever refers to them stay as they are. `ShardedTables.blocks` finds the
memory of weights and optimizer states, which is read and written in place.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import importlib.util
import itertools
import logging
import os
import threading
import types
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from lightning_dlrover.observe.resources import available_bytes
from lightning_dlrover.tables.arena import Arena
from lightning_dlrover.tables.layout import (
    Region,
    Shard,
)
from lightning_dlrover.tables.optimizers import TableOptimizer
from lightning_dlrover.tables.placement import (
    Plan,
    PlanError,
    TablePlan,
)

__all__ = ["Block", "ShardedTables", "TorchrecMissingError", "has_tables"]

INSTALL_LINE = "pip install 'lightning-dlrover[torchrec]' && pip install --no-deps torchrec==1.8.0"

KEPT = 4
"""The bit of a row that was kept for a copy."""

MAX_CHANGED = 0.3
"""Part of a table's rows: of more, all are copied, which is faster than picking them. Then nobody has to know which."""

NUM_NOTED = 64
"""Steps whose rows are flagged together."""

INIT_ROWS = 4096
"""Rows that are initialised from one seed, so that a table's first values do not depend on how it is sharded."""


class TorchrecMissingError(ImportError):
    """torchrec is needed and not there, or does not load."""


@dataclass(frozen=True)
class Block:
    """What one worker holds of one table: weights, or one of its optimizer states.

    Attributes:
        table: `{module}.{table}`.
        what: `weight`, or `state0`, `state1` in the fused optimizer's order.
        region: rows and columns of the table.
        values: shape ``(rows, cols)`` of the region, or ``(rows,)`` for a row-wise state. The live memory itself.
    """

    table: str
    what: str
    region: Region
    values: torch.Tensor


def has_tables(module: nn.Module) -> bool:
    """Whether `module` has embedding collections of torchrec that are to be sharded. Imports torchrec only if so."""
    names = {base.__name__ for m in module.modules() for base in type(m).__mro__ if base.__module__.startswith("torchrec.")}
    return bool(names & {"EmbeddingBagCollection", "EmbeddingCollection", "ShardedEmbeddingModule"})


def check_torchrec() -> None:
    """Raise `TorchrecMissingError` with the line that installs it, unless torchrec can be used."""
    if importlib.util.find_spec("torchrec") is None:
        raise TorchrecMissingError(f"sharded embedding tables need torchrec, which is not installed: {INSTALL_LINE}")
    try:
        import fbgemm_gpu  # noqa: F401
        import torchrec  # noqa: F401
    except Exception as error:  # a shared library that does not fit this torch, most often
        raise TorchrecMissingError(
            f"torchrec is installed but does not load ({error}); on CPU it needs fbgemm-gpu-cpu, and torchrec itself "
            f"without its dependencies: {INSTALL_LINE}"
        ) from error


class ShardedTables:
    """All embedding collections in one module.

    Args:
        module: holds `EmbeddingBagCollection`s or `EmbeddingCollection`s, on any device, `meta` too: their values are not used.
        device: where the tables are trained.
        constraints: torchrec's, by table name, for the first plan.
        sharders: torchrec's, for other modules or with fused parameters; by default those of the two collections.

    Raises:
        TorchrecMissingError: torchrec cannot be imported.
        PlanError: a module that cannot be sharded anew.
    """

    def __init__(
        self,
        module: nn.Module,
        device: torch.device,
        constraints: Mapping[str, Any] | None = None,
        sharders: Sequence[Any] | None = None,
    ) -> None:
        check_torchrec()
        self.module = module
        self.device = device
        self.plan: dict[str, TablePlan] | None = None
        self.optimizers: dict[str, TableOptimizer] = {}  # taken from the user's, by parameter name
        self.frozen: set[str] = set()  # names of those that no optimizer has; the parameters of sharded tables are views
        self._are_apart = False  # see `train_with`
        self._rates: tuple[Any, dict[str, float]] | None = None  # set last, and in which build
        self._constraints = dict(constraints or {})
        self._sharders = list(sharders) if sharders is not None else _default_sharders()
        module_types = {sharder.module_type for sharder in self._sharders}
        self._templates: dict[str, nn.Module] = {}
        for path, part in module.named_modules():
            if "ManagedCollision" in type(part).__name__ and device.type == "cpu":
                raise PlanError(
                    f"{path}: {type(part).__name__} cannot be trained on CPU (fbgemm has no kernel to evict rows); "
                    "use a plain EmbeddingBagCollection, or a GPU"
                )
            if type(part) in module_types:
                self._templates[path] = _on_meta(part)
        if not self._templates:
            raise PlanError("the module has no embedding collection that one of the sharders can shard")
        self._arena = Arena(self._num_addresses)
        for path, template in self._templates.items():
            _set_submodule(module, path, _with_parameters(template))

    @property
    def _has_fused_params(self) -> bool:
        return any(getattr(sharder, "fused_params", None) for sharder in self._sharders)

    def train_with(self, optimizers: Mapping[str, TableOptimizer], are_apart: bool) -> None:
        """Apply these in the backward pass, by parameter name; from the next `build` on.

        Args:
            are_apart: their learning rates may come to differ, which those of tables in one kernel cannot.
        """
        self.optimizers = dict(optimizers)
        self._are_apart = are_apart
        for path, template in self._templates.items():
            for name, parameter in template.named_parameters():
                if (optimizer := optimizers.get(_key(path, name))) is not None:
                    parameter._optimizer_classes = [optimizer.kind]  # type: ignore[attr-defined]
                    # In any case, so that a kernel holds none of the tables that the script has applied an optimizer to.
                    arguments = {**optimizer.arguments, "use_one_tbe_per_table": are_apart}
                    parameter._optimizer_kwargs = [arguments]  # type: ignore[attr-defined]

    def inseparable(self, groups: Mapping[str, Hashable]) -> tuple[str, str] | None:
        """Two tables of different parameter groups that one kernel may train with one learning rate; None if all are separate.

        Args:
            groups: by parameter name.
        """
        if self._are_apart:
            return None
        for path, template in self._templates.items():
            names = [key for name, _ in template.named_parameters() if (key := _key(path, name)) in groups]
            for name in names[1:]:
                if groups[name] != groups[names[0]]:
                    return names[0], name
        return None

    def without_optimizer(self) -> set[str]:
        """Names of parameters that nothing trains in their backward pass, though they are not for the user's optimizers."""
        if self._has_fused_params:
            return set()
        names = set()
        for path, template in self._templates.items():
            for name, parameter in template.named_parameters():
                constraint = self._constraints.get(name.split(".")[-2])
                is_whole = constraint is not None and constraint.sharding_types == ["data_parallel"]
                applied: Any = None if self.is_built else self.module.get_parameter(_key(path, name))
                if hasattr(applied, "_optimizer_classes") and not hasattr(parameter, "_optimizer_classes"):
                    # By the user's `configure_optimizers`.
                    parameter._optimizer_classes = applied._optimizer_classes  # type: ignore[attr-defined]
                    parameter._optimizer_kwargs = applied._optimizer_kwargs  # type: ignore[attr-defined]
                if not is_whole and not hasattr(parameter, "_optimizer_classes"):
                    names.add(_key(path, name))
        return names

    def set_rates(self, rates: Mapping[str, float]) -> None:
        """Set the learning rates of tables that are trained in their backward pass, by parameter name."""
        if self._rates is not None and self._rates[0] is self.plan and self._rates[1] == rates:
            return
        self._rates = (self.plan, dict(rates))
        by_table = {
            _key(path, name.split(".")[-2]): rates.get(_key(path, name))
            for path, template in self._templates.items()
            for name, _ in template.named_parameters()
        }
        for path in self._templates:
            for kernel in _kernels(self.module.get_submodule(path)):
                wanted = {by_table.get(_key(path, table.name)) for table in kernel.config.embedding_tables}
                if wanted != {None} and hasattr(kernel.emb_module, "set_learning_rate"):
                    (rate,) = wanted  # see `train_with`
                    kernel.emb_module.set_learning_rate(rate)

    @property
    def is_built(self) -> bool:
        return self.plan is not None

    # --- planning ------------------------------------------------------------------------------------------------------

    def first_plan(self, members: Sequence[str], batch_size: int | None = None) -> dict[str, TablePlan]:
        """torchrec's own choice for `members`, worker ids in rank order. Deterministic."""
        from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology

        with _quiet():
            planner = EmbeddingShardingPlanner(
                topology=Topology(world_size=len(members), local_world_size=1, compute_device=self.device.type),
                batch_size=batch_size,
                constraints=self._constraints or None,
            )
            chosen = planner.plan(self.module, self._sharders).plan
        plan: dict[str, TablePlan] = {}
        for path in self._templates:
            configs = {config.name: config for config in _configs(self._templates[path])}
            for name, sharding in chosen[path].items():
                config = configs[name]
                whole = Region(0, config.num_embeddings, 0, config.embedding_dim)
                if sharding.sharding_spec is None:
                    shards = tuple(Shard(worker, whole) for worker in members)
                else:
                    shards = tuple(
                        Shard(members[shard.placement.rank()], _region(shard)) for shard in sharding.sharding_spec.shards
                    )
                plan[_key(path, name)] = TablePlan(
                    sharding.sharding_type, sharding.compute_kernel, whole.row1, whole.col1, shards
                )
        return plan

    def _torchrec_plan(self, plan: Plan, members: Sequence[str]) -> Any:
        from torch.distributed._shard.metadata import ShardMetadata
        from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec
        from torchrec.distributed.types import EmbeddingModuleShardingPlan, ParameterSharding, ShardingPlan

        by_module: dict[str, Any] = {}
        for path, template in self._templates.items():
            by_module[path] = EmbeddingModuleShardingPlan()
            for config in _configs(template):
                table = plan[_key(path, config.name)]
                spec = None
                if table.kind != "data_parallel":
                    spec = EnumerableShardingSpec(
                        [
                            ShardMetadata(
                                shard_offsets=[s.region.row0, s.region.col0],
                                shard_sizes=[s.region.num_rows, s.region.num_cols],
                                placement=f"rank:{members.index(s.owner)}/{self.device}",
                            )
                            for s in table.shards
                        ]
                    )
                by_module[path][config.name] = ParameterSharding(
                    sharding_type=table.kind,
                    compute_kernel=table.kernel,
                    ranks=[members.index(s.owner) for s in table.shards],
                    sharding_spec=spec,
                )
        return ShardingPlan(by_module)

    # --- building ------------------------------------------------------------------------------------------------------

    def build(
        self,
        plan: Plan,
        members: Sequence[str],
        wrap_dense: Callable[[nn.Module, list[str]], nn.Module] = lambda module, ignored: module,
    ) -> nn.Module:
        """Shard the module for the current default process group, whose ranks are `members`.

        Rows that this worker held before are where they were. All others are for the caller to fill, see `initialise` and
        `exchange`: zeros, or what was left there. What was built before for another world is replaced; its memory stays until
        `drop_former`.

        Args:
            plan: where every table goes.
            wrap_dense: makes the module data-parallel but for the parameters named.

        Returns:
            The module to call.

        Raises:
            PlanError: the plan is of other tables.
        """
        from torchrec.distributed.model_parallel import DataParallelWrapper, DistributedModelParallel
        from torchrec.distributed.types import ShardingEnv

        class Wrapper(DataParallelWrapper):  # type: ignore[misc]
            def wrap(self, dmp: Any, env: Any, device: torch.device) -> None:
                sharded = set(DistributedModelParallel._sharded_parameter_names(dmp._dmp_wrapped_module))
                if set(dict(dmp.named_parameters())) - sharded:
                    dmp._dmp_wrapped_module = wrap_dense(dmp._dmp_wrapped_module, sorted(sharded))

        self._check(plan)
        for path, template in self._templates.items():
            _set_submodule(self.module, path, _with_parameters(template))
        _forget_groups()
        _gather_uneven_batches()
        self._arena.begin()
        with _quiet(), _one_worker_per_node(), _fast_build(_Placer(self._arena, self._path_of), self._sharders):
            parallel = DistributedModelParallel(
                module=self.module,
                env=ShardingEnv.from_process_group(dist.group.WORLD),
                device=self.device,
                plan=self._torchrec_plan(plan, members),
                sharders=self._sharders,
                data_parallel_wrapper=Wrapper(),
            )
        self._arena.drop_reserve()  # what was too much
        for path, template in self._templates.items():
            _keep_order(self.module.get_submodule(path), template)
        self.plan = dict(plan)
        wrapped: nn.Module = parallel._dmp_wrapped_module
        return wrapped

    def _check(self, plan: Plan) -> None:
        """Name the table that differs, as in a snapshot of another script: torchrec would tell of shapes of tensors."""
        ours = {
            _key(path, config.name): (config.num_embeddings, config.embedding_dim)
            for path, template in self._templates.items()
            for config in _configs(template)
        }
        theirs = {name: (table.rows, table.cols) for name, table in plan.items()}
        for name in sorted(ours.keys() | theirs.keys()):
            if ours.get(name) != theirs.get(name):
                sizes = [f"of {s[0]} rows and {s[1]} columns" if s else "missing" for s in (ours.get(name), theirs.get(name))]
                raise PlanError(
                    f"table {name!r} is {sizes[0]} in this model and {sizes[1]} in the job's: start the script as before, "
                    "or a job of another name"
                )

    def reserve(self, num_workers: int) -> int:
        """Touch the memory that a worker of so many needs for its tables, where it is available. Returns how much, in bytes."""
        wanted = self.num_bytes // num_workers if self.device.type == "cpu" else 0
        if wanted > available_bytes() // 2:
            return 0
        self._arena.reserve(wanted)
        return wanted

    @property
    def num_bytes(self) -> int:
        """Of all tables and the states of their optimizers, about: those kept as they are when tables are trained on CPU."""
        total = 0
        for template in self._templates.values():
            for parameter in template.parameters():
                optimizers = [each.__name__ for each in getattr(parameter, "_optimizer_classes", [])]
                states = parameter.shape[0] if "RowWiseAdagrad" in optimizers else parameter.numel() * ("Adagrad" in optimizers)
                total += parameter.nbytes + 4 * states
        return total

    @property
    def _num_addresses(self) -> int:
        """For weights and row-wise states of all tables; twice, as they may be cut anew by columns; half of it for gaps."""
        parameters = [p for template in self._templates.values() for p in template.parameters()]
        return sum(3 * (p.nbytes + 4 * p.shape[0]) + (16 << 20) for p in parameters)

    def _path_of(self, module: nn.Module) -> str:
        return next(path for path in self._templates if self.module.get_submodule(path) is module)

    def foresee(self, plan: Plan, worker: str) -> Callable[[], None]:
        """What touches the memory of rows that `worker`, which is this one, will have to take from others; for any thread."""
        blocks = self.blocks()
        missing: list[tuple[int, int]] = []  # address and bytes
        growth = -sum(block.values.nbytes for block in blocks)
        for block in blocks:
            if not block.region.num_rows:
                continue
            row_bytes = block.values.nbytes // block.region.num_rows
            for region in (s.region for s in plan[block.table].shards if s.owner == worker):
                if (region.col0, region.col1) == (block.region.col0, block.region.col1):
                    growth += region.num_rows * row_bytes
                    for part in region.without(block.region):
                        address = block.values.data_ptr() + (part.row0 - block.region.row0) * row_bytes
                        missing.append((address, part.num_rows * row_bytes))

        def touch_missing() -> None:
            left = growth  # what takes the place of rows that are given away is touched when those are gone
            for address, num_bytes in missing:
                self._arena.touch(address, min(num_bytes, max(0, left)))
                left -= num_bytes

        return touch_missing

    def drop_former(self) -> None:
        """Give back the memory of rows that only a former build held."""
        self._arena.finish()

    def release(self, values: torch.Tensor) -> None:
        """Give back the memory of rows of a former build that nobody needs any more."""
        self._arena.release(values)

    def reset(self) -> None:
        """Give the tables back; the module holds none, on `meta`, until the next `build`."""
        for path, template in self._templates.items():
            _set_submodule(self.module, path, _with_parameters(template))
        self._arena.close()
        self.plan = None

    def initialise(self, seed: int) -> None:
        """Give every table its first values, which depend on the seed and its name only, not on how it is sharded."""
        configs = {_key(path, c.name): c for path, template in self._templates.items() for c in _configs(template)}
        for block in self.blocks():
            if block.what != "weight" or not block.region.num_values:
                continue
            config = configs[block.table]
            for first in range(block.region.row0 // INIT_ROWS * INIT_ROWS, block.region.row1, INIT_ROWS):
                last = min(first + INIT_ROWS, config.num_embeddings)
                digest = hashlib.sha256(f"{seed}/{block.table}/{first}".encode()).digest()
                with torch.random.fork_rng(devices=[]), torch.no_grad():
                    torch.manual_seed(int.from_bytes(digest[:7], "big"))
                    rows = torch.empty(last - first, config.embedding_dim, dtype=block.values.dtype)
                    config.init_fn(rows)
                    here = Region(first, last, 0, config.embedding_dim).overlap(block.region)
                    assert here is not None
                    part = rows[here.row0 - first : here.row1 - first, here.col0 : here.col1]
                    part_of(block, here).copy_(part)

    # --- finding -------------------------------------------------------------------------------------------------------

    def blocks(self) -> list[Block]:
        """All that this worker holds, in an order that is the same each time."""
        found: list[Block] = []
        for path in self._templates:
            for kernel in _kernels(self.module.get_submodule(path)):
                tables = kernel.config.embedding_tables
                weights = kernel.emb_module.split_embedding_weights()
                states = _optimizer_states(kernel.emb_module, len(tables))
                for config, weight, of_table in zip(tables, weights, states, strict=True):
                    region, name = _held(config), _key(path, config.name)
                    found.append(Block(name, "weight", region, weight.detach()))
                    found += [Block(name, f"state{i}", region, state) for i, state in enumerate(of_table)]
        return found

    def track(self) -> TouchedRows:
        """Note from now on which rows are trained, until the next `build`."""
        return TouchedRows([kernel for path in self._templates for kernel in self._kernels_of(path)], self.blocks())

    def _kernels_of(self, path: str) -> list[tuple[str, Any]]:
        return [(path, kernel) for kernel in _kernels(self.module.get_submodule(path))]

    def counters(self) -> dict[str, torch.Tensor]:
        """What fused optimizers count, such as Adam's steps: the same on all workers, and part of the replicated state."""
        found = {}
        for path in self._templates:
            for kernel in _kernels(self.module.get_submodule(path)):
                for name in ("iter", "iter_cpu"):
                    counter = getattr(kernel.emb_module, name, None)
                    if isinstance(counter, torch.Tensor):
                        found[f"{path}/{'/'.join(t.name for t in kernel.config.embedding_tables)}/{name}"] = counter
        return found

    def parameter_names(self) -> set[str]:
        """Names, in the module's state dict, of all tables, however they are sharded."""
        return {
            f"{path}.{name}" if path else name
            for path, template in self._templates.items()
            for name in dict(template.named_parameters())
        }

    def data_parallel_names(self) -> set[str]:
        """Names of tables that every worker holds whole and its own optimizer trains."""
        assert self.plan is not None
        names = set()
        for path, template in self._templates.items():
            for name in dict(template.named_parameters()):
                if self.plan[_key(path, name.split(".")[-2])].kind == "data_parallel":
                    names.add(f"{path}.{name}" if path else name)
        return names

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Leave the tables out of the module, for what concerns the rest of it only, such as its state dict."""
        parts = {path: self.module.get_submodule(path) for path in self._templates}
        try:
            for path in parts:
                _set_submodule(self.module, path, nn.Module())
            yield
        finally:
            for path, part in parts.items():
                _set_submodule(self.module, path, part)

    def close(self) -> None:
        self._arena.close()


class _Tracked(NamedTuple):
    """One table of a kernel: the blocks of its shard, of which so many rows are tracked, and how many features look it up."""

    blocks: Sequence[Block]
    num_rows: int
    num_features: int


class _OfKernel:
    """One byte for every tracked row of the tables that one kernel holds, in one tensor.

    Attributes:
        followed: of each table, the moments since which it is worth telling apart the rows that were trained.
    """

    def __init__(self, tables: Sequence[_Tracked]) -> None:
        *starts, end = itertools.accumulate((table.num_rows for table in tables), initial=0)
        self.flags = torch.zeros(end + 1, dtype=torch.uint8)  # the last one: of all rows that are not tracked
        self.masks = [self.flags[start : start + table.num_rows] for start, table in zip(starts, tables, strict=True)]
        self.followed: list[set[int]] = [set() for _ in tables]
        self._noted: list[tuple[torch.Tensor, Sequence[int]]] = []  # values and lengths of steps that are not flagged yet
        self._num_unchecked = 0  # rows that were flagged since somebody looked how many are
        self._blocks = [table.blocks for table in tables]
        self._starts = [*starts, end]
        first = [start if table.num_rows else end for start, table in zip(starts, tables, strict=True)]
        by_key = torch.tensor([table.num_features for table in tables])
        self._first_of_key = torch.tensor(first).repeat_interleave(by_key)
        self._rows_of_key = torch.tensor([table.num_rows for table in tables]).repeat_interleave(by_key)

    def note(self, features: Any) -> None:
        """Remember what is looked up; `catch_up` flags it. One step at a time, most of it would be waiting for memory."""
        if not any(self.followed):
            return
        lengths = features.length_per_key()
        self._noted.append((features.values()[: sum(lengths)].clone(), lengths))
        if len(self._noted) >= NUM_NOTED:
            self.catch_up()

    def catch_up(self) -> None:
        """Flag the rows of all steps that were noted."""
        if self._noted:
            noted, self._noted = self._noted, []
            places = self._places(noted)
            self.flags.index_fill_(0, places, 3)
            self._num_unchecked += len(places)
            if self._num_unchecked > MAX_CHANGED / 3 * len(self.flags):
                self._num_unchecked = 0
                for mask, moments in zip(self.masks, self.followed, strict=True):
                    moments -= {moment for moment in moments if _are_too_many(mask, moment)}

    def rows_of(self, features: Any) -> torch.Tensor:
        """The places in `flags` of all rows that are looked up, of shape ``(num_values,)``."""
        lengths = features.length_per_key()
        return self._places([(features.values()[: sum(lengths)], lengths)])

    def _places(self, noted: Sequence[tuple[torch.Tensor, Sequence[int]]]) -> torch.Tensor:
        rows = torch.cat([values for values, _ in noted]).to("cpu", torch.int64)
        by_key = torch.tensor([length for _, lengths in noted for length in lengths])
        first, limit = (
            of.repeat(len(noted)).repeat_interleave(by_key, output_size=len(rows))
            for of in (self._first_of_key, self._rows_of_key)
        )
        # Row 0 is what fbgemm takes for what is no row.
        places: torch.Tensor = first + rows.masked_fill((rows < 0) | (rows >= limit), 0)
        return places

    def split(self, rows: torch.Tensor) -> Iterator[tuple[Block, torch.Tensor]]:
        """Ascending places in `flags` by block: rows of each one's own."""
        borders = torch.searchsorted(rows, torch.tensor(self._starts)).tolist()
        for index, blocks in enumerate(self._blocks):
            of_table = rows[borders[index] : borders[index + 1]] - self._starts[index]
            if len(of_table):
                yield from ((block, of_table) for block in blocks)


class TouchedRows:
    """Which rows of a worker's shards were trained since each of two moments, called 0 and 1. One byte per row.

    Only rows that are looked up are changed by optimizers in the backward pass. So while somebody copies the shards as they are
    at one moment, from `begin_copy` to `end_copy`, training may go on: what a row was like is kept before it is trained.

    Args:
        kernels: of torchrec, each with the path of its collection.
        blocks: what they hold.
    """

    def __init__(self, kernels: Sequence[tuple[str, Any]], blocks: Sequence[Block]) -> None:
        self._masks: dict[tuple[str, Region], tuple[torch.Tensor, set[int]]] = {}
        self._kernels: list[_OfKernel] = []
        self._hooks: list[RemovableHandle] = []
        self._kept: list[tuple[Block, torch.Tensor, torch.Tensor]] | None = None  # while there is a copy being made
        self._lock = threading.Lock()  # held while rows are kept: by the thread that trains, when another one ends the copy
        held: dict[tuple[str, Region], list[Block]] = {}
        for block in blocks:
            held.setdefault((block.table, block.region), []).append(block)
        for path, kernel in kernels:
            tables = []
            for config in kernel.config.embedding_tables:
                num_rows = 0  # trained by an optimizer that may change all rows
                if config.local_metadata is not None:
                    num_rows = _region(config.local_metadata).num_rows
                tables.append(_Tracked(held[_key(path, config.name), _held(config)], num_rows, config.num_features()))
            of_kernel = _OfKernel(tables)
            self._kernels.append(of_kernel)
            for config, mask, moments in zip(kernel.config.embedding_tables, of_kernel.masks, of_kernel.followed, strict=True):
                if config.local_metadata is not None:
                    self._masks[_key(path, config.name), _region(config.local_metadata)] = mask, moments
            self._hooks.append(kernel.register_forward_pre_hook(functools.partial(self._note, of_kernel)))

    def close(self) -> None:
        """Note nothing any more."""
        for hook in self._hooks:
            hook.remove()

    def _note(self, tables: _OfKernel, kernel: Any, arguments: tuple[Any, ...]) -> None:
        if not torch.is_grad_enabled():
            return
        with self._lock:
            if self._kept is None:
                tables.note(arguments[0])
                return
            rows = tables.rows_of(arguments[0])
            new: torch.Tensor = torch.unique(rows[tables.flags[rows] < KEPT])
            for block, of_block in tables.split(new):
                self._kept.append((block, of_block, block.values.detach()[of_block.to(block.values.device)]))
            tables.flags.index_fill_(0, rows, 3 | KEPT)

    def is_tracked(self, block: Block) -> bool:
        """Whether it is known which rows of the block are trained."""
        return (block.table, block.region) in self._masks

    def begin_copy(self) -> None:
        """The blocks are to be copied as they are now."""
        self._catch_up()
        with self._lock:
            for mask, _ in self._masks.values():
                mask &= 3
            self._kept = []

    def end_copy(self) -> list[tuple[Block, torch.Tensor, torch.Tensor]]:
        """All is copied: rows, of shape ``(n,)``, that were trained since `begin_copy`, and their values until then."""
        with self._lock:
            kept, self._kept = self._kept or [], None
            return kept

    def since(self, moment: int, block: Block) -> torch.Tensor | None:
        """Rows of the block, from its first, that were trained since a moment; None: they are not known, or too many."""
        self._catch_up()
        mask, moments = self._masks.get((block.table, block.region), (None, set()))
        if mask is None or moment not in moments or _are_too_many(mask, moment):
            return None
        return (mask & (1 << moment)).nonzero().flatten()

    def mark(self, moment: int) -> None:
        """The moment is now."""
        self._catch_up()
        for mask, moments in self._masks.values():
            mask &= 0xFF ^ (1 << moment)
            moments.add(moment)

    def _catch_up(self) -> None:
        with self._lock:
            for kernel in self._kernels:
                kernel.catch_up()


def _are_too_many(mask: torch.Tensor, moment: int) -> bool:
    return int((mask & (1 << moment)).count_nonzero()) > MAX_CHANGED * len(mask)


def part_of(block: Block, region: Region) -> torch.Tensor:
    """The values of `region`, which lies inside the block: a view, of rows only where the values are row-wise."""
    rows = block.values[region.row0 - block.region.row0 : region.row1 - block.region.row0]
    return rows if rows.dim() == 1 else rows[:, region.col0 - block.region.col0 : region.col1 - block.region.col0]


# --- torchrec's insides -------------------------------------------------------------------------------------------------------


def _default_sharders() -> list[Any]:
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.types import ShardingType

    by_rows = [ShardingType.ROW_WISE.value, ShardingType.TABLE_ROW_WISE.value]

    # torchrec offers these on GPUs only, but gloo has all the collectives that they need.
    class BagSharder(EmbeddingBagCollectionSharder):  # type: ignore[misc]
        def sharding_types(self, compute_device_type: str) -> list[str]:
            return list(dict.fromkeys([*super().sharding_types(compute_device_type), *by_rows]))

    class Sharder(EmbeddingCollectionSharder):  # type: ignore[misc]
        def sharding_types(self, compute_device_type: str) -> list[str]:
            types = dict.fromkeys([*super().sharding_types(compute_device_type), by_rows[0]])
            if compute_device_type == "cpu":
                types.pop(ShardingType.DATA_PARALLEL.value, None)
            return list(types)

    return [BagSharder(), Sharder()]


def _key(path: str, table: str) -> str:
    return f"{path}.{table}" if path else table


def _keep_order(sharded: nn.Module, template: nn.Module) -> None:
    """Let pooled embeddings be in the order of the unsharded collection: torchrec's follows who holds which table."""
    if not hasattr(template, "embedding_bag_configs"):
        return
    from torchrec.sparse.jagged_tensor import KeyedTensor

    configs = _configs(template)
    features = [feature for config in configs for feature in config.feature_names]
    # A feature that several tables look up has a name for each of them.
    wanted = [f"{f}@{c.name}" if features.count(f) > 1 else f for c in configs for f in c.feature_names]

    def in_order(pooled: Any) -> Any:
        keys = pooled.keys()
        if keys == wanted or set(keys) != set(wanted):
            return pooled
        lengths = dict(zip(keys, pooled.length_per_key(), strict=True))
        values = torch.cat([pooled[key] for key in wanted], dim=1)
        return KeyedTensor(keys=wanted, length_per_key=[lengths[key] for key in wanted], values=values)

    def add(module: nn.Module, arguments: Any, result: Any) -> None:
        result.callbacks.append(in_order)

    sharded.register_forward_hook(add)


def _configs(collection: Any) -> list[Any]:
    is_bag = hasattr(collection, "embedding_bag_configs")
    configs: list[Any] = collection.embedding_bag_configs() if is_bag else collection.embedding_configs()
    return configs


def _region(metadata: Any) -> Region:
    (row0, col0), (rows, cols) = metadata.shard_offsets, metadata.shard_sizes
    return Region(row0, row0 + rows, col0, col0 + cols)


def _held(config: Any) -> Region:
    """Of a sharded table, what this worker has."""
    return (
        _region(config.local_metadata) if config.local_metadata else Region(0, config.num_embeddings, 0, config.embedding_dim)
    )


def _on_meta(collection: nn.Module) -> nn.Module:
    """A copy without values; what was applied to the parameters is remembered on those of the copy."""
    memo: dict[int, Any] = {}
    for parameter in collection.parameters():
        clone = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)
        for name in ("_optimizer_classes", "_optimizer_kwargs"):
            if hasattr(parameter, name):
                setattr(clone, name, copy.deepcopy(getattr(parameter, name)))
        memo[id(parameter)] = clone
    template: nn.Module = copy.deepcopy(collection, memo)
    if hasattr(template, "_device"):
        template._device = torch.device("meta")  # type: ignore[assignment]
    return template


def _with_parameters(template: nn.Module) -> nn.Module:
    """A fresh copy of a template, for torchrec to shard: it writes into what was applied to the parameters."""
    collection = _on_meta(template)
    for parameter in collection.parameters():
        if hasattr(parameter, "_optimizer_classes"):
            parameter._in_backward_optimizers = []  # type: ignore[attr-defined]  # marks it as trained in the backward pass
    return collection


def _set_submodule(module: nn.Module, path: str, part: nn.Module) -> None:
    if not path:
        raise PlanError("the module is an embedding collection itself: make it a part of a LightningModule")
    module.set_submodule(path, part)


def _kernels(sharded: Any) -> Iterator[Any]:
    from torchrec.distributed.batched_embedding_kernel import BaseBatchedEmbedding, BaseBatchedEmbeddingBag

    for lookup in getattr(sharded, "_lookups", ()):
        inner = lookup.module if isinstance(lookup, DistributedDataParallel) else lookup
        for kernel in inner.modules():
            if isinstance(kernel, BaseBatchedEmbedding | BaseBatchedEmbeddingBag):
                yield kernel


def _optimizer_states(emb_module: Any, num_tables: int) -> list[list[torch.Tensor]]:
    if not hasattr(emb_module, "split_optimizer_states"):
        return [[] for _ in range(num_tables)]  # trained by an optimizer of the user's
    states = emb_module.split_optimizer_states()
    # SGD has none at all, rather than none for each table.
    return [list(of_table) for of_table in states] or [[] for _ in range(num_tables)]


def _forget_groups() -> None:
    """Make torchrec build its sub-groups anew: the others would wait for a newcomer's part in building them."""
    from torchrec.distributed import collective_utils, comm

    collective_utils._INITIALIZED = False
    for name in ("_INTRA_PG", "_CROSS_PG", "_INTRA_PG_2D", "_CROSS_PG_2D", "_NODE_GROUP_SIZE_2D"):
        setattr(comm, name, None)


@functools.cache
def _gather_uneven_batches() -> None:
    """Let row-wise tables be trained with shares of a batch that differ by a sample: gloo gathers equal ones only."""
    from torchrec.distributed import comm_ops

    class Distributed(types.ModuleType):
        def __getattr__(self, name: str) -> Any:
            return getattr(dist, name)

        @staticmethod
        def all_gather(gathered: list[torch.Tensor], mine: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
            if len({part.shape for part in gathered}) == 1 or dist.get_backend(group) == "nccl":
                return dist.all_gather(gathered, mine, group=group, async_op=async_op)
            gathered[dist.get_rank(group)].copy_(mine)
            work = _AllWork(
                [dist.broadcast(part, group_src=r, group=group, async_op=True) for r, part in enumerate(gathered) if len(part)]
            )
            return work if async_op else work.wait()

    comm_ops.dist = Distributed("torch.distributed")
    # Of torchrec's calls, in every worker's output.
    warnings.filterwarnings("ignore", ".*(all_gather_into_tensor|reduce_scatter_tensor)` is deprecated", FutureWarning)


class _AllWork:
    def __init__(self, works: Sequence[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep torchrec's advice about its own calls, which are ours to answer for, out of the user's output."""
    logger = logging.getLogger("torchrec")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        logger.setLevel(level)


@contextlib.contextmanager
def _one_worker_per_node() -> Iterator[None]:
    """torchrec's "node" must divide every world size, which only one worker does; read while modules are built."""
    with mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": "1", "TORCHREC_RESOLVED_POD_SIZE": "1"}):
        yield


class _Placer:
    """Says where the shards of tables lie that are about to be built."""

    def __init__(self, arena: Arena, path_of: Callable[[nn.Module], str]) -> None:
        self.path_of = path_of
        self.path = ""  # of the collection that is being built
        self.configs: Sequence[Any] = ()  # of the tables that are held together
        self._arena = arena

    def weights(self, dtype: torch.dtype) -> torch.Tensor:
        return self._arena.values(dtype)

    def weight_offsets(self, dtype: torch.dtype) -> list[int]:
        """Of every table in `weights`, in values."""
        return self._offsets("weight", dtype, is_row_wise=False)

    def row_wise_states(self) -> torch.Tensor:
        return self._arena.values(torch.float32)

    def row_wise_state_offsets(self) -> list[int]:
        return self._offsets("state0", torch.float32, is_row_wise=True)

    def full_states(self, weights: torch.dtype) -> torch.Tensor:
        return self._arena.values(torch.float32, self._start_of_full_states(weights))

    def full_state_offsets(self, weights: torch.dtype, weight_offsets: Sequence[int]) -> list[int]:
        """Those of the weights: fbgemm takes a weight's number for that of its state, whatever it is told."""
        start = self._start_of_full_states(weights)
        self._offsets("state0", torch.float32, is_row_wise=False, beside=[start + 4 * at for at in weight_offsets])
        return list(weight_offsets)

    def _start_of_full_states(self, weights: torch.dtype) -> int:
        """In bytes: behind all weights, and those of half as wide ones, which are further apart, behind the others'."""
        return self._arena.num_bytes * (2 if weights.itemsize < 4 else 1)

    def _offsets(self, what: str, dtype: torch.dtype, is_row_wise: bool, beside: Sequence[int] | None = None) -> list[int]:
        found: list[Any] = []
        for name, group in itertools.groupby(self.configs, lambda config: config.name):
            configs = list(group)
            regions = [_held(config) for config in configs]
            row_bytes = [dtype.itemsize * (1 if is_row_wise else region.num_cols) for region in regions]
            sizes = [region.num_rows * of_row for region, of_row in zip(regions, row_bytes, strict=True)]
            if len(configs) == 1:
                region, of_row = regions[0], row_bytes[0]
                key: Any = (self.path, name, what, dtype, region.col0, region.col1)
                size, first = configs[0].num_embeddings * of_row, region.row0 * of_row
            else:  # torchrec takes several shards of one table to lie side by side
                key, size, first = (self.path, name, what, dtype, *regions), sum(sizes), 0
            at = beside[len(found)] - first if beside is not None and size else None
            start = self._arena.place(key, size, first, sum(sizes), at) if sum(sizes) else 0
            places = [start + before for before in itertools.accumulate([0, *sizes[:-1]])]
            found += [place // dtype.itemsize if num_bytes else None for place, num_bytes in zip(places, sizes, strict=True)]
        # A shard without rows lies where the next one does, as with torchrec, whose kernels conclude from it how to add up.
        for i in reversed(range(len(found))):
            if found[i] is None:
                found[i] = found[i + 1] if i + 1 < len(found) else 0
        return found


@contextlib.contextmanager
def _fast_build(placer: _Placer, sharders: Sequence[Any]) -> Iterator[None]:
    """Let fbgemm take memory where `placer` says, and nobody initialise it: that would touch all of it, three times."""
    from fbgemm_gpu import split_table_batched_embeddings_ops_training as training
    from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
    from torchrec.distributed import batched_embedding_kernel as kernels
    from torchrec.distributed.embedding import ShardedEmbeddingCollection
    from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection

    stock, split_state = kernels.SplitTableBatchedEmbeddingBagsCodegen, training.construct_split_state

    class InArena(stock):  # type: ignore[misc, valid-type]
        def __init__(self, embedding_specs: Sequence[tuple[int, int, Any, Any]], *args: Any, **kwargs: Any) -> None:
            precision = kwargs.get("weights_precision", SparseType.FP32)
            optimizer = kwargs.get("optimizer", EmbOptimType.EXACT_SGD)
            buffers: dict[str, torch.Tensor] = {}
            offsets: list[list[int]] = []  # in the order in which fbgemm asks for them
            is_on_host = all(spec[2] == EmbeddingLocation.HOST for spec in embedding_specs)
            is_float = precision in (SparseType.FP32, SparseType.FP16, SparseType.BF16)
            if is_on_host and is_float and any(spec[0] * spec[1] for spec in embedding_specs):
                buffers["weights"] = placer.weights(precision.as_dtype())
                offsets.append(placer.weight_offsets(precision.as_dtype()))
                if optimizer == EmbOptimType.EXACT_ROWWISE_ADAGRAD:
                    buffers["momentum1"] = placer.row_wise_states()
                    offsets.append(placer.row_wise_state_offsets())
                elif optimizer == EmbOptimType.EXACT_ADAGRAD:
                    buffers["momentum1"] = placer.full_states(precision.as_dtype())
                    offsets.append(placer.full_state_offsets(precision.as_dtype(), offsets[0]))
                kwargs["preallocated_host_buffers"] = buffers
            asked = zip(offsets, buffers.values(), strict=True)

            def placed(*of_tables: Any, **how: Any) -> Any:
                state = split_state(*of_tables, **how)
                found = next(asked, None)
                return state if found is None else state._replace(offsets=found[0], host_size=found[1].numel())

            with mock.patch.object(training, "construct_split_state", placed):
                super().__init__(embedding_specs, *args, **kwargs)
            if "weights" in buffers:
                # All addresses, of which this worker's rows are few: nothing that an optimizer or a summary should count.
                object.__setattr__(self, "weights_host", self._parameters.pop("weights_host"))

    def noting_tables(init: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(init)
        def noted(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
            placer.configs = config.embedding_tables
            init(self, config, *args, **kwargs)

        return noted

    def noting_path(shard: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(shard)
        def noted(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            placer.path = placer.path_of(module)
            return shard(module, *args, **kwargs)

        return noted

    def nothing(self: Any) -> None: ...

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(kernels, "SplitTableBatchedEmbeddingBagsCodegen", InArena))
        for sharder in sharders:
            stack.enter_context(mock.patch.object(sharder, "shard", noting_path(sharder.shard)))
        for base in (kernels.BaseBatchedEmbedding, kernels.BaseBatchedEmbeddingBag):
            stack.enter_context(mock.patch.object(base, "__init__", noting_tables(base.__init__)))
            stack.enter_context(mock.patch.object(base, "init_parameters", nothing))
        for collection in (ShardedEmbeddingBagCollection, ShardedEmbeddingCollection):
            stack.enter_context(mock.patch.object(collection, "reset_parameters", nothing))
        yield
