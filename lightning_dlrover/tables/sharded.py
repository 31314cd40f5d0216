"""The embedding tables of one model, as torchrec holds them on this worker.

`ShardedTables.build` creates the sharded modules for one world, again after each change of the world. It works in place: the
dense parameters and all references to them stay as they are. `ShardedTables.blocks` returns the memory of weights and optimizer
states, which is read and written in place.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_dlrover.observe.resources import available_bytes
from lightning_dlrover.tables.arena import Arena
from lightning_dlrover.tables.block import Block, part_of
from lightning_dlrover.tables.exchange import exchange
from lightning_dlrover.tables.first_values import drawn
from lightning_dlrover.tables.layout import Region, Shard, plan_moves
from lightning_dlrover.tables.optimizers import TableOptimizer
from lightning_dlrover.tables.placement import Plan, PlanError, TablePlan, check_kinds, replan
from lightning_dlrover.tables.templates import Templates
from lightning_dlrover.tables.torchrec_build import (
    Placer,
    fast_build,
    first_plan,
    gather_uneven_batches,
    one_worker_per_node,
    quiet,
    torchrec_plan,
)
from lightning_dlrover.tables.torchrec_parts import (
    applied_optimizer,
    check_torchrec,
    copy_applied_optimizer,
    default_sharders,
    forget_groups,
    held_by,
    keep_order,
    key_of,
    optimizer_states,
    shard,
)
from lightning_dlrover.tables.touched import TouchedRows

__all__ = ["ShardedTables"]


class ShardedTables:
    """All embedding collections in one module.

    Args:
        module: holds `EmbeddingBagCollection`s or `EmbeddingCollection`s, on any device, `meta` too. Values are kept until
            `forget_given`, see `initialise`.
        constraints: torchrec's, by table name, for the first plan.
        sharders: torchrec's, for other modules or with fused parameters; by default those of the two collections.

    Raises:
        TorchrecMissingError: torchrec cannot be imported.
        PlanError: a module that cannot be sharded again.
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
        self.optimizers: dict[str, TableOptimizer] = {}  # derived from the user's, by parameter name
        self.frozen: set[str] = set()  # names of tables without an optimizer; the parameters of sharded tables are views
        self._are_apart = False  # see `train_with`
        self._rates: tuple[Any, dict[str, float]] | None = None  # rates set last, and their build
        self._constraints = dict(constraints or {})
        check_kinds({name: c.sharding_types or () for name, c in self._constraints.items()})
        self._sharders = list(sharders) if sharders is not None else default_sharders()
        self._templates = Templates(module, {sharder.module_type for sharder in self._sharders}, device)
        self._arena = Arena(self._templates.num_addresses)
        self._templates.install()

    @property
    def _has_fused_params(self) -> bool:
        return any(getattr(sharder, "fused_params", None) for sharder in self._sharders)

    def train_with(self, optimizers: Mapping[str, TableOptimizer], are_apart: bool) -> None:
        """Apply these optimizers in the backward pass, by parameter name, from the next `build` on.

        Args:
            are_apart: whether their learning rates may diverge, which is impossible for tables in one kernel.
        """
        self.optimizers = dict(optimizers)
        self._are_apart = are_apart
        self._templates.train_with(optimizers, are_apart)

    def inseparable(self, groups: Mapping[str, Hashable]) -> tuple[str, str] | None:
        """Return two tables of different parameter groups that may share a kernel, and so its learning rate; else None."""
        return None if self._are_apart else self._templates.inseparable(groups)

    def without_optimizer(self) -> set[str]:
        """Return names of parameters that have no optimizer in the backward pass, and must have none of the user's."""
        if self._has_fused_params:
            return set()
        names = set()
        for name, _, parameter in self._templates.parameters():
            if not self.is_built:  # the user's `configure_optimizers` applied it
                copy_applied_optimizer(self.module.get_parameter(name), parameter)
            if not self._is_whole(name) and not applied_optimizer(parameter):
                names.add(name)
        return names

    def with_states(self) -> set[str]:
        """Return names of parameters whose optimizer in the backward pass has states."""
        return {
            name
            for name, _, parameter in self._templates.parameters()
            if any(kind is not torch.optim.SGD for kind in applied_optimizer(parameter)) or self._has_fused_params
        }

    @property
    def are_whole(self) -> bool:
        """Whether every worker holds all tables, so that none is trained in the backward pass."""
        return all(self._is_whole(name) for name, _, _ in self._templates.parameters())

    def _is_whole(self, name: str) -> bool:
        constraint = self._constraints.get(name.split(".")[-2])
        return constraint is not None and constraint.sharding_types == ["data_parallel"]

    def set_rates(self, rates: Mapping[str, float]) -> None:
        """Set the learning rates of tables trained in the backward pass, by parameter name."""
        if self._rates is not None and self._rates[0] is self.plan and self._rates[1] == rates:
            return
        self._rates = (self.plan, dict(rates))
        by_table = {table: rates.get(name) for name, table, _ in self._templates.parameters()}
        for path, kernel in self._templates.kernels():
            wanted = {by_table.get(key_of(path, table.name)) for table in kernel.config.embedding_tables}
            if wanted != {None} and hasattr(kernel.emb_module, "set_learning_rate"):
                (rate,) = wanted  # see `train_with`
                kernel.emb_module.set_learning_rate(rate)

    @property
    def is_built(self) -> bool:
        return self.plan is not None

    def first_plan(self, members: Sequence[str], batch_size: int | None = None) -> dict[str, TablePlan]:
        """Return torchrec's own choice for `members`, worker ids in rank order. Deterministic."""
        collections = self._templates.by_path
        with self._templates.once():
            arguments = self.device, self._sharders, self._constraints, members, batch_size
            plan = first_plan(self.module, collections, *arguments)
        replan(plan, members)  # refuses, before anything is trained, what the first change would refuse
        return plan

    # --- building ------------------------------------------------------------------------------------------------------

    def build(
        self,
        plan: Plan,
        members: Sequence[str],
        wrap_dense: Callable[[nn.Module, list[str]], nn.Module] = lambda module, ignored: module,
    ) -> nn.Module:
        """Shard the module for the current default process group; `members` are its ranks.

        Rows that this worker held before stay in place. The caller must fill all others, see `initialise` and `exchange`: they
        hold zeros or old values. A former build for another world is replaced; its memory stays until `drop_former`.

        Args:
            wrap_dense: makes the module data-parallel, except for the named parameters.

        Returns:
            The module to call.

        Raises:
            PlanError: the plan has other tables.
        """
        from torchrec.distributed.types import ShardingEnv

        self._check(plan)
        self._templates.install()
        forget_groups()
        gather_uneven_batches()
        self._arena.begin()
        placer = Placer(self._arena, self._templates.path_of)
        with quiet(), one_worker_per_node(), fast_build(placer, self._sharders), self._templates.once():
            wrapped = shard(
                wrap_dense,
                module=self.module,
                env=ShardingEnv.from_process_group(dist.group.WORLD),
                device=self.device,
                plan=torchrec_plan(self._templates.by_path, self.device, plan, members),
                sharders=self._sharders,
            )
        self._arena.drop_reserve()  # the part that was not needed
        for path, template in self._templates.by_path.items():
            keep_order(self.module.get_submodule(path), template)
        self.plan = dict(plan)
        return wrapped

    def _check(self, plan: Plan) -> None:
        """Raise an error that names the differing table, as in another script's snapshot: torchrec would only name shapes."""
        ours = {name: (config.num_embeddings, config.embedding_dim) for name, config in self._templates.configs().items()}
        theirs = {name: (table.rows, table.cols) for name, table in plan.items()}
        for name in sorted(ours.keys() | theirs.keys()):
            if ours.get(name) != theirs.get(name):
                sizes = [f"of {s[0]} rows and {s[1]} columns" if s else "missing" for s in (ours.get(name), theirs.get(name))]
                raise PlanError(
                    f"table {name!r} is {sizes[0]} in this model and {sizes[1]} in the job's: start the script as before, "
                    "or a job of another name"
                )

    def reserve(self, num_workers: int) -> int:
        """Touch the memory that each of `num_workers` needs for its tables, if available. Returns the number of bytes."""
        wanted = self.num_bytes // num_workers if self.device.type == "cpu" else 0
        if wanted > available_bytes() // 2:
            return 0
        self._arena.reserve(wanted)
        return wanted

    @property
    def num_bytes(self) -> int:
        """Approximate size of all tables and of their optimizer states, counted as for training on CPU."""
        return self._templates.num_bytes

    def foresee(self, plan: Plan, worker: str) -> Callable[[], None]:
        """Return a function, for any thread, that touches the memory of rows that `worker`, this one, will receive."""
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
            left = growth  # memory in place of rows that are sent away is touched after they are gone
            for address, num_bytes in missing:
                self._arena.touch(address, min(num_bytes, max(0, left)))
                left -= num_bytes

        return touch_missing

    def drop_former(self) -> None:
        """Give back the memory of rows that only a former build held."""
        self._arena.finish()

    def release(self, values: torch.Tensor) -> None:
        """Give back the memory of rows of a former build that are no longer needed."""
        self._arena.release(values)

    def reset(self) -> None:
        """Give the tables back; until the next `build`, the module holds them on `meta`, without values."""
        self._templates.install()
        self._arena.close()
        self.plan = None

    def given(self) -> list[str]:
        """Return the tables that had values here before they were sharded, in order. Others were on `meta`."""
        return sorted(self._templates.given)

    def initialise(
        self,
        seed: int,
        given: Sequence[str] = (),
        group: dist.ProcessGroup | None = None,
        members: Sequence[str] = ("",),
        me: str = "",
    ) -> None:
        """Set the first values of every table, which depend neither on its sharding nor on the number of workers.

        Args:
            seed: the same on all workers.
            given: tables with values on the first worker, which sends them to their owners. The others are drawn.
            group: process group with `members` as its ranks; None if there is one worker.
            members: worker ids in rank order.
            me: this worker's id.
        """
        assert self.plan is not None
        configs, kept = self._templates.configs(), set(given)
        weights = [block for block in self.blocks() if block.what == "weight"]
        for block in sorted(weights, key=lambda block: block.table):
            if block.table not in kept and block.region.num_values:
                for region, values in drawn(configs[block.table], block.table, seed, block.region, block.values.dtype):
                    part_of(block, region).copy_(values)
        if not kept:
            return
        whole = {name: Region(0, self.plan[name].rows, 0, self.plan[name].cols) for name in given}
        moves = plan_moves(
            {name: [Shard(members[0], region)] for name, region in whole.items()},
            {name: self.plan[name].shards for name in given},
        )
        old = [Block(name, "weight", whole[name], self._templates.given[name]) for name in given] if me == members[0] else []
        exchange(group, members, me, moves, old, [block for block in weights if block.table in kept])

    def forget_given(self) -> None:
        """Free the values that tables had before they were sharded. They count until the job trains."""
        self._templates.given.clear()

    def load_whole(self, values: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Take this worker's part of whole tables.

        Args:
            values: by parameter name, then by `weight`, `state0`, `state1`: shape ``(rows, cols)``, or ``(rows,)`` for a
                row-wise state. What is missing is left as it is.

        Raises:
            ValueError: a shape differs.
        """
        tables = self.tables_by_name()
        by_table = {tables[name]: of_table for name, of_table in values.items()}
        for block in self.blocks():
            whole = by_table.get(block.table, {}).get(block.what)
            if whole is None:
                continue
            config = self._templates.configs()[block.table]
            shape = (config.num_embeddings, config.embedding_dim)[: block.values.dim()]
            if tuple(whole.shape) != shape:
                raise ValueError(f"table {block.table}: its {block.what} has the shape {tuple(whole.shape)} instead of {shape}")
            rows = whole[block.region.row0 : block.region.row1]
            with torch.no_grad():
                block.values.copy_(rows if rows.dim() == 1 else rows[:, block.region.col0 : block.region.col1])

    # --- finding -------------------------------------------------------------------------------------------------------

    def blocks(self) -> list[Block]:
        """Return all blocks that this worker holds, always in the same order."""
        found: list[Block] = []
        for path, kernel in self._templates.kernels():
            tables = kernel.config.embedding_tables
            weights = kernel.emb_module.split_embedding_weights()
            states = optimizer_states(kernel.emb_module, len(tables))
            for config, weight, of_table in zip(tables, weights, states, strict=True):
                region, name = held_by(config), key_of(path, config.name)
                found.append(Block(name, "weight", region, weight.detach()))
                found += [Block(name, f"state{i}", region, state) for i, state in enumerate(of_table)]
        return found

    def track(self) -> TouchedRows:
        """Track from now on which rows are trained, until the next `build`."""
        return TouchedRows(list(self._templates.kernels()), self.blocks())

    def counters(self) -> dict[str, int]:
        """Return the steps that kernels have counted, by table: Adam's and LAMB's corrections of their means depend on them.

        Only of tables that this worker holds a shard of; all owners of a table have counted the same.
        """
        found: dict[str, int] = {}
        for path, kernel in self._templates.kernels():
            if counters := _counters_of(kernel):
                number = max(int(counter) for counter in counters)
                found |= {key_of(path, table.name): number for table in kernel.config.embedding_tables}
        return found

    def set_counters(self, counters: Mapping[str, int]) -> None:
        """Set what `counters` has returned, on any workers. A new `build` begins to count at 0."""
        for path, kernel in self._templates.kernels():
            number = max((counters.get(key_of(path, t.name), 0) for t in kernel.config.embedding_tables), default=0)
            for counter in _counters_of(kernel):
                counter.fill_(number)

    def all_names(self) -> dict[str, list[str]]:
        """Return all names of each table in the module's state dict, by the first of them: a shared collection has several."""
        return self._templates.all_names()

    def tables_by_name(self) -> dict[str, str]:
        """Return the table of each parameter name."""
        return {name: table for name, table, _ in self._templates.parameters()}

    def parameter_names(self) -> set[str]:
        """Return the names of all tables in the module's state dict, independent of their sharding."""
        return {name for name, _, _ in self._templates.parameters()}

    def data_parallel_names(self) -> set[str]:
        """Return the names of tables that every worker holds whole and trains with its own optimizer."""
        assert self.plan is not None
        plan = self.plan
        return {name for name, table, _ in self._templates.parameters() if plan[table].kind == "data_parallel"}

    def aside(self) -> AbstractContextManager[None]:
        """Remove the tables from the module for the duration of code that needs the rest only, such as its state dict."""
        return self._templates.aside()

    def close(self) -> None:
        self._arena.close()


def _counters_of(kernel: Any) -> list[torch.Tensor]:
    """Return a kernel's counter, which fbgemm keeps on the host and on the device."""
    found = [getattr(kernel.emb_module, name, None) for name in ("iter_cpu", "iter")]
    return [counter for counter in found if isinstance(counter, torch.Tensor)]
