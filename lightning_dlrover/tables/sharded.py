"""The embedding tables of one model on this worker: first values, memory, changed rows, and optimizers.

`ShardedTables` builds the tables for one world, and `UsersOptimizers` connects them to the script's optimizers.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import random
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_dlrover.tables.exchange import Arena, Block, exchange, part_of
from lightning_dlrover.tables.growing import GrowingTables
from lightning_dlrover.tables.growing_rows import SECTIONS
from lightning_dlrover.tables.layout import Plan, PlanError, Region, Shard, TablePlan, check_kinds, plan_moves, replan
from lightning_dlrover.tables.torchrec_adapter import (
    Placer,
    TableOptimizer,
    TableOptimizerError,
    Templates,
    applied_optimizer,
    check_torchrec,
    copy_applied_optimizer,
    default_sharders,
    fast_build,
    first_plan,
    forget_groups,
    gather_uneven_batches,
    held_by,
    in_backward,
    keep_order,
    key_of,
    one_worker_per_node,
    optimizer_states,
    quiet,
    region_of,
    shard,
    torchrec_plan,
)
from lightning_dlrover.tuning.resources import available_bytes

INIT_ROWS = 4096
"""Number of rows initialised from one seed, so that a worker draws little more than the rows that it holds."""

_init = nn.init
ELEMENTWISE = (_init.constant_, _init.normal_, _init.ones_, _init.trunc_normal_, _init.uniform_, _init.zeros_)
"""Functions with values that do not depend on a table's shape. torchrec's default is `uniform_` with bounds."""


def drawn(config: Any, table: str, seed: int, region: Region, dtype: torch.dtype) -> Iterator[tuple[Region, torch.Tensor]]:
    """Yield the first values of a region of a table, in one or more parts of whole rows.

    `init_fn` receives the whole table, unless its values are known not to depend on the shape. Then blocks of rows are drawn,
    and a table may be larger than this worker's memory.
    """
    num_rows = config.num_embeddings
    size = INIT_ROWS if _is_elementwise(config.init_fn) else max(1, num_rows)
    for first in range(region.row0 // size * size, region.row1, size):
        last = min(first + size, num_rows)
        digest = hashlib.sha256(f"{seed}/{table}/{first}".encode()).digest()
        with _seeded(int.from_bytes(digest[:7], "big")), torch.no_grad():
            rows = torch.empty(last - first, config.embedding_dim, dtype=dtype)
            config.init_fn(rows)
        here = Region(first, last, 0, config.embedding_dim).overlap(region)
        assert here is not None
        yield here, rows[here.row0 - first : here.row1 - first, here.col0 : here.col1]


def _is_elementwise(init_fn: Callable[..., Any]) -> bool:
    while isinstance(init_fn, functools.partial):
        init_fn = init_fn.func
    return init_fn in ELEMENTWISE


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed the generators that an `init_fn` may use, and restore them, as workers draw different numbers of tables."""
    of_numpy, of_python = np.random.get_state(), random.getstate()
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            np.random.set_state(np.random.RandomState(seed % 2**32).get_state())
            random.setstate(random.Random(seed).getstate())
            yield
    finally:
        np.random.set_state(of_numpy)
        random.setstate(of_python)


KEPT = 4
"""Flag of a row whose former value is kept for a copy."""

MAX_CHANGED = 0.3
"""Maximum fraction of a table's rows to be copied one by one. Beyond it, copying all is faster and needs no list of rows."""

NUM_NOTED = 64
"""Number of steps with rows flagged in one pass."""


class TouchedRows:
    """The rows of a worker's shards that were trained since each of two moments, called 0 and 1. One byte per row.

    Optimizers in the backward pass change only rows that are looked up. So training may continue while a thread copies the
    shards as they are at one moment, from `begin_copy` to `end_copy`: a row's former value is kept before it is trained.

    Args:
        kernels: torchrec's kernels, each with the path of its collection; `blocks` are their memory.
        growing: tables that keep track of their rows themselves.
    """

    def __init__(self, kernels: Sequence[tuple[str, Any]], blocks: Sequence[Block], growing: GrowingTables) -> None:
        self._growing = growing.rows
        self._copied: list[Block] = []  # of growing tables
        self._masks: dict[tuple[str, Region], tuple[torch.Tensor, set[int]]] = {}
        self._kernels: list[_OfKernel] = []
        self._hooks: list[RemovableHandle] = []
        self._kept: list[tuple[Block, torch.Tensor, torch.Tensor]] | None = None  # not None while a copy is being made
        self._lock = threading.Lock()  # held while the training thread keeps rows, because another thread ends the copy
        held: dict[tuple[str, Region], list[Block]] = {}
        for block in blocks:
            held.setdefault((block.table, block.region), []).append(block)
        for path, kernel in kernels:
            tables = []
            for config in kernel.config.embedding_tables:
                num_rows = 0  # none tracked: its optimizer may change all rows
                if config.local_metadata is not None:
                    num_rows = region_of(config.local_metadata).num_rows
                tables.append(_Tracked(held[key_of(path, config.name), held_by(config)], num_rows, config.num_features()))
            of_kernel = _OfKernel(tables)
            self._kernels.append(of_kernel)
            for config, mask, moments in zip(kernel.config.embedding_tables, of_kernel.masks, of_kernel.followed, strict=True):
                if config.local_metadata is not None:
                    self._masks[key_of(path, config.name), region_of(config.local_metadata)] = mask, moments
            self._hooks.append(kernel.register_forward_pre_hook(functools.partial(self._note, of_kernel)))

    def close(self) -> None:
        """Stop tracking."""
        for hook in self._hooks:
            hook.remove()
        for rows in self._growing.values():
            rows.end_copy()  # of a round that has ended
        self._growing = {}

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
        return (block.table, block.region) in self._masks or (block.table in self._growing and block.what != "filter")

    def begin_copy(self, blocks: Sequence[Block]) -> None:
        """Begin a copy of these blocks in their present state."""
        self._copied = [block for block in blocks if block.table in self._growing]
        self._catch_up()
        with self._lock:
            for mask, _ in self._masks.values():
                mask &= 3
            self._kept = []
        for rows in self._growing.values():
            rows.begin_copy()

    def end_copy(self) -> list[tuple[Block, torch.Tensor, torch.Tensor]]:
        """End the copy; return rows that were trained since `begin_copy`, shape ``(n,)``, and their former values."""
        with self._lock:
            kept, self._kept = self._kept or [], None
        for name, rows in self._growing.items():
            for slots, columns in rows.end_copy():
                of_table = (block for block in self._copied if block.table == name and block.what in columns)
                kept += [(block, slots, columns[block.what]) for block in of_table]
        return kept

    def since(self, moment: int, block: Block) -> torch.Tensor | None:
        """Return the block's rows, counted from its first, that were trained since a moment; None: unknown or too many."""
        if (growing := self._growing.get(block.table)) is not None:
            changed = growing.since(moment) if block.what != "filter" else None
            if changed is None or len(changed) > MAX_CHANGED * len(block.values):
                return None
            return changed[changed < len(block.values)]
        self._catch_up()
        mask, moments = self._masks.get((block.table, block.region), (None, set()))
        if mask is None or moment not in moments or _are_too_many(mask, moment):
            return None
        return (mask & (1 << moment)).nonzero().flatten()

    def mark(self, moment: int) -> None:
        """Set the moment to now."""
        self._catch_up()
        for mask, moments in self._masks.values():
            mask &= 0xFF ^ (1 << moment)
            moments.add(moment)
        for rows in self._growing.values():
            rows.mark(moment)

    def _catch_up(self) -> None:
        with self._lock:
            for kernel in self._kernels:
                kernel.catch_up()


class _Tracked(NamedTuple):
    """One table of a kernel."""

    blocks: Sequence[Block]  # of its shard
    num_rows: int  # tracked
    num_features: int  # that use it


class _OfKernel:
    """One byte for every tracked row of the tables that one kernel holds, in one tensor.

    Attributes:
        followed: per table, moments since which few enough rows were trained to list them.
    """

    def __init__(self, tables: Sequence[_Tracked]) -> None:
        *starts, end = itertools.accumulate((table.num_rows for table in tables), initial=0)
        self.flags = torch.zeros(end + 1, dtype=torch.uint8)  # the last one is shared by all rows that are not tracked
        self.masks = [self.flags[start : start + table.num_rows] for start, table in zip(starts, tables, strict=True)]
        self.followed: list[set[int]] = [set() for _ in tables]
        self._noted: list[tuple[torch.Tensor, Sequence[int]]] = []  # values and lengths of steps that are not flagged yet
        self._num_unchecked = 0  # rows flagged since the last check of their number
        self._blocks = [table.blocks for table in tables]
        self._starts = [*starts, end]
        first = [start if table.num_rows else end for start, table in zip(starts, tables, strict=True)]
        by_key = torch.tensor([table.num_features for table in tables])
        self._first_of_key = torch.tensor(first).repeat_interleave(by_key)
        self._rows_of_key = torch.tensor([table.num_rows for table in tables]).repeat_interleave(by_key)

    def note(self, features: Any) -> None:
        """Record the looked-up rows for `catch_up` to flag. Flagging each step separately would mostly wait for memory."""
        if not any(self.followed):
            return
        lengths = features.length_per_key()
        self._noted.append((features.values()[: sum(lengths)].clone(), lengths))
        if len(self._noted) >= NUM_NOTED:
            self.catch_up()

    def catch_up(self) -> None:
        """Flag the rows of all recorded steps."""
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
        """Return the places in `flags` of all looked-up rows, of shape ``(num_values,)``."""
        lengths = features.length_per_key()
        return self._places([(features.values()[: sum(lengths)], lengths)])

    def _places(self, noted: Sequence[tuple[torch.Tensor, Sequence[int]]]) -> torch.Tensor:
        rows = torch.cat([values for values, _ in noted]).to("cpu", torch.int64)
        by_key = torch.tensor([length for _, lengths in noted for length in lengths])
        first, limit = (
            of.repeat(len(noted)).repeat_interleave(by_key, output_size=len(rows))
            for of in (self._first_of_key, self._rows_of_key)
        )
        # fbgemm uses row 0 for invalid indices.
        places: torch.Tensor = first + rows.masked_fill((rows < 0) | (rows >= limit), 0)
        return places

    def split(self, rows: torch.Tensor) -> Iterator[tuple[Block, torch.Tensor]]:
        """Split ascending places in `flags` by block, and yield each one's own rows."""
        borders = torch.searchsorted(rows, torch.tensor(self._starts)).tolist()
        for index, blocks in enumerate(self._blocks):
            of_table = rows[borders[index] : borders[index + 1]] - self._starts[index]
            if len(of_table):
                yield from ((block, of_table) for block in blocks)


def _are_too_many(mask: torch.Tensor, moment: int) -> bool:
    return int((mask & (1 << moment)).count_nonzero()) > MAX_CHANGED * len(mask)


class ShardedTables:
    """All embedding collections in one module, as torchrec holds them on this worker.

    `build` creates the sharded modules for one world, again after each change of the world. It works in place: the dense
    parameters and all references to them stay as they are. `blocks` returns the memory of weights and optimizer states, which
    is read and written in place.

    Args:
        module: holds `EmbeddingBagCollection`s or `EmbeddingCollection`s, on any device, `meta` too. Values are kept until
            `forget_given`, see `initialise`.
        constraints: torchrec's, by table name, for the first plan.
        sharders: torchrec's, for other modules or with fused parameters; by default those of the two collections.

    Raises:
        TorchrecMissingError: torchrec cannot be imported.
        PlanError: a module cannot be sharded again.
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
        self.frozen: set[str] = set()  # names of tables without an optimizer
        self._are_apart = False  # see `train_with`
        self._rates: tuple[Any, dict[str, float]] | None = None  # the plan of the last build with set rates, and these
        self._constraints = dict(constraints or {})
        check_kinds({name: c.sharding_types or () for name, c in self._constraints.items()})
        self._sharders = list(sharders) if sharders is not None else default_sharders()
        self.growing = GrowingTables(module)
        module_types = {sharder.module_type for sharder in self._sharders}
        self._templates = Templates(module, module_types, device, may_be_none=bool(self.growing))
        self._arena = Arena(self._templates.num_addresses)
        self._templates.install()

    @property
    def _has_fused_params(self) -> bool:
        return any(getattr(sharder, "fused_params", None) for sharder in self._sharders)

    def train_with(self, optimizers: Mapping[str, TableOptimizer], are_apart: bool) -> None:
        """Apply these optimizers in the backward pass, by parameter name, from the next `build` on.

        If they `are_apart`, their learning rates may diverge, which is impossible for tables in one kernel.
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
        """Return names of parameters with an optimizer in the backward pass that has states."""
        return {
            name
            for name, _, parameter in self._templates.parameters()
            if any(kind is not torch.optim.SGD for kind in applied_optimizer(parameter)) or self._has_fused_params
        }

    @property
    def are_whole(self) -> bool:
        """Whether every worker holds all tables, so that none is trained in the backward pass."""
        return not self.growing and all(self._is_whole(name) for name, _, _ in self._templates.parameters())

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
        """Return torchrec's own plan for `members`, worker ids in rank order. Deterministic."""
        arguments = self.device, self._sharders, self._constraints, members, batch_size
        plan: dict[str, TablePlan] = {}
        if self._templates.by_path:
            with self._templates.once():
                plan = first_plan(self.module, self._templates.by_path, *arguments)
        plan |= self.growing.first_plan(members)
        replan(plan, members)  # raises errors of the first change before training
        return plan

    # --- building ------------------------------------------------------------------------------------------------------

    def build(
        self,
        plan: Plan,
        members: Sequence[str],
        wrap_dense: Callable[[nn.Module, list[str]], nn.Module] = lambda module, ignored: module,
    ) -> nn.Module:
        """Shard the module for the current default process group; `members` are its ranks.

        Rows that this worker held before stay in place. All others hold zeros or old values, and the caller must fill them, see
        `initialise` and `exchange`. A former build is replaced; its memory stays until `drop_former`.

        Args:
            wrap_dense: makes the module data-parallel, except for the named parameters.

        Returns:
            The module to call.

        Raises:
            PlanError: the plan has other tables.
        """
        self._check(plan)
        self.growing.connect(plan)
        self.plan = dict(plan)
        if not self._templates.by_path:
            return wrap_dense(self.module, []) if any(True for _ in self.module.parameters()) else self.module
        return self._build_fixed(plan, members, wrap_dense)

    def _build_fixed(
        self, plan: Plan, members: Sequence[str], wrap_dense: Callable[[nn.Module, list[str]], nn.Module]
    ) -> nn.Module:
        from torchrec.distributed.types import ShardingEnv

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
        return wrapped

    def _check(self, plan: Plan) -> None:
        """Raise an error that names a differing table, as in another script's snapshot: torchrec would only name shapes."""
        ours = {name: (config.num_embeddings, config.embedding_dim) for name, config in self._templates.configs().items()}
        ours |= {name: (SECTIONS, rows.dim) for name, rows in self.growing.rows.items()}
        theirs = {name: (table.rows, table.cols) for name, table in plan.items()}
        for name in sorted(ours.keys() | theirs.keys()):
            if ours.get(name) != theirs.get(name):
                sizes = [f"of {s[0]} rows and {s[1]} columns" if s else "missing" for s in (ours.get(name), theirs.get(name))]
                raise PlanError(
                    f"table {name!r} is {sizes[0]} in this model and {sizes[1]} in the job's: start the script as before, "
                    "or a job of another name"
                )

    def reserve(self, num_workers: int) -> int:
        """Touch the memory that each of `num_workers` needs for its tables, if available. Return the number of bytes."""
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
            left = growth  # the rest is touched once the rows to be sent away are gone
            for address, num_bytes in missing:
                self._arena.touch(address, min(num_bytes, max(0, left)))
                left -= num_bytes

        return touch_missing

    def drop_former(self) -> None:
        """Release the memory of rows that only a former build held."""
        self._arena.finish()

    def release(self, values: torch.Tensor) -> None:
        """Release the memory of a former build's rows that are no longer needed."""
        self._arena.release(values)

    def reset(self) -> None:
        """Release the tables; until the next `build`, the module holds them on `meta`, without values."""
        self._templates.install()
        self._arena.close()
        self.growing.reset()
        self.plan = None

    def given(self) -> list[str]:
        """Return the tables that had values here before they were sharded, sorted. Others were on `meta`."""
        return sorted({*self._templates.given, *(name for name, rows in self.growing.rows.items() if rows.num_rows)})

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
            given: tables that had values on the first worker, which sends them to their owners, as Lightning's DDP does. The
                others are drawn by their `init_fn`.
            group: process group with `members` as its ranks; None if there is one worker.
            members: worker ids in rank order.
            me: this worker's id.
        """
        assert self.plan is not None
        self.growing.initialise(seed, given, self.plan, group, members, me)
        given = [name for name in given if name not in self.growing.rows]
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
        """Free the values that tables had before they were sharded. They matter until the job trains."""
        self._templates.given.clear()
        self.growing.forget_given()

    def load_whole(self, values: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Take this worker's part of whole tables.

        Args:
            values: by parameter name, then by `weight`, `state0`, `state1`: shape ``(rows, cols)``, or ``(rows,)`` for a
                row-wise state. Missing parts keep their values.

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
        """Return all blocks of fixed tables that this worker holds, always in the same order."""
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
        return TouchedRows(list(self._templates.kernels()), self.blocks(), self.growing)

    def counters(self) -> dict[str, int]:
        """Return the steps that kernels have counted, by table of this worker: Adam's and LAMB's bias corrections need them.

        All owners of a table have counted the same.
        """
        found: dict[str, int] = {}
        for path, kernel in self._templates.kernels():
            if counters := _counters_of(kernel):
                number = max(int(counter) for counter in counters)
                found |= {key_of(path, table.name): number for table in kernel.config.embedding_tables}
        return found | self.growing.counters()

    def set_counters(self, counters: Mapping[str, int]) -> None:
        """Set values that `counters` returned on any workers. A new `build` counts from 0."""
        self.growing.set_counters(counters)
        for path, kernel in self._templates.kernels():
            number = max((counters.get(key_of(path, t.name), 0) for t in kernel.config.embedding_tables), default=0)
            for counter in _counters_of(kernel):
                counter.fill_(number)

    def all_names(self) -> dict[str, list[str]]:
        """Return all names of each table in the module's state dict by the first one: a shared collection has several."""
        return self._templates.all_names()

    def tables_by_name(self) -> dict[str, str]:
        """Return the table of each parameter name."""
        return {name: table for name, table, _ in self._templates.parameters()}

    def parameter_names(self) -> set[str]:
        """Return the names of all tables in the module's state dict, independent of their sharding."""
        return set(self.tables_by_name())

    def data_parallel_names(self) -> set[str]:
        """Return the names of tables that every worker holds whole and trains with its own optimizer."""
        assert self.plan is not None
        plan = self.plan
        return {name for name, table, _ in self._templates.parameters() if plan[table].kind == "data_parallel"}

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Remove the tables from the module inside the block, for code that needs only the rest, such as its state dict."""
        with self._templates.aside(), self.growing.aside():
            yield

    def close(self) -> None:
        self._arena.close()


def _counters_of(kernel: Any) -> list[torch.Tensor]:
    """Return a kernel's counter, which fbgemm keeps on the host and on the device."""
    found = [getattr(kernel.emb_module, name, None) for name in ("iter_cpu", "iter")]
    return [counter for counter in found if isinstance(counter, torch.Tensor)]


class UsersOptimizers:
    """The script's optimizers of one `fit` after another, which all train the same tables.

    Tables that are trained in their backward pass leave them, and follow the learning rates of the parameter groups that they
    have left. Tables that every worker holds whole stay.
    """

    def __init__(self, tables: ShardedTables) -> None:
        self._tables = tables
        self._entries: list[list[list[tuple[str, Any]]]] = []  # names and parameters, by optimizer and group
        self._groups: dict[str, tuple[int, int]] = {}  # optimizer and group of each table that left them, by table name
        self._frozen: set[str] = set()  # tables that no optimizer trains

    def move_to_backward(self, optimizers: Sequence[Any], is_new: bool) -> None:
        """Train tables in the backward pass, unless they already are.

        Args:
            is_new: the tables are not built yet.

        Raises:
            TableOptimizerError: a table cannot be trained in the backward pass, or is in no optimizer.
        """
        parameters = dict(self._tables.module.named_parameters())
        names = {id(p): name for name, p in parameters.items()}
        self._entries = [
            [[(names.get(id(p), ""), p) for p in group["params"]] for group in optimizer.param_groups]
            for optimizer in optimizers
        ]
        missing = self._tables.without_optimizer() | self._tables.optimizers.keys()
        chosen = self._chosen(optimizers, missing)
        for name in sorted(missing - chosen.keys()):
            if parameters[name].requires_grad and name not in self._tables.frozen:
                way_out = "freeze it with requires_grad_(False)" if is_new else "make a new model"
                raise TableOptimizerError(
                    f"table {name.removesuffix('.weight')} is in none of the optimizers of configure_optimizers, nor is one "
                    f"applied in its backward pass: add it to one, or {way_out}"
                )
            chosen[name] = TableOptimizer(torch.optim.SGD, {"lr": 0.0})
        self._frozen = self._tables.frozen = chosen.keys() - self._groups.keys()
        group_of: dict[str, Hashable] = {name: self._groups.get(name, "frozen") for name in chosen}
        if is_new:
            self._tables.train_with(chosen, len(set(group_of.values())) > 1)
        self._refuse_changes(chosen, group_of)

    def _chosen(self, optimizers: Sequence[Any], missing: set[str]) -> dict[str, TableOptimizer]:
        """Return an optimizer for each of the missing tables that the user's optimizers hold."""
        self._groups, chosen = {}, {}
        for i, (optimizer, groups) in enumerate(zip(optimizers, self._entries, strict=True)):
            for j, (group, entries) in enumerate(zip(optimizer.param_groups, groups, strict=True)):
                for name in sorted({name for name, _ in entries} & missing):
                    chosen[name] = in_backward(name.removesuffix(".weight"), optimizer, group, self._tables.device.type)
                    self._groups[name] = i, j
        return chosen

    def _refuse_changes(self, chosen: Mapping[str, TableOptimizer], group_of: Mapping[str, Hashable]) -> None:
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

    def hold_whole_tables(self, optimizers: Sequence[Any]) -> None:
        """Put the tables that every worker holds whole, and no others, into the optimizers. Call it after each build."""
        now = dict(self._tables.module.named_parameters())
        tables = self._tables.parameter_names()
        theirs = self._tables.data_parallel_names() if self._tables.is_built else set()
        for optimizer, groups in zip(optimizers, self._entries, strict=True):
            for group, entries in zip(optimizer.param_groups, groups, strict=True):
                for i, (name, former) in enumerate(entries):
                    if name not in tables:
                        continue
                    entries[i] = (name, now[name] if name in theirs else None)
                    state = optimizer.state.pop(former, None) if former is not None else None
                    if state and name in theirs:
                        optimizer.state[now[name]] = _with_values(state, group, now[name].device)
                group["params"] = [parameter for _, parameter in entries if parameter is not None]

    def split_states(self, saved: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, dict[str, Any]]]:
        """Split the optimizers' `state_dict`s of an unsharded run, which have all parameters in the order of the script.

        Returns:
            `state_dict`s without sharded tables, and the states of these by parameter name.
        """
        rest: list[dict[str, Any]] = []
        of_tables: dict[str, dict[str, Any]] = {}
        for of_optimizer, groups in zip(saved, self._entries, strict=False):
            state, kept = dict(of_optimizer["state"]), []
            for group, entries in zip(of_optimizer["param_groups"], groups, strict=False):
                if len(group["params"]) != len(entries):  # another model: the optimizer itself refuses it
                    kept.append(group)
                    continue
                of_group = list(zip(group["params"], entries, strict=True))
                for key, (name, parameter) in of_group:
                    if parameter is None and key in state:
                        of_tables[name] = state.pop(key)
                kept.append({**group, "params": [key for key, (_, parameter) in of_group if parameter is not None]})
            rest.append({**of_optimizer, "state": state, "param_groups": kept})
        return rest, of_tables

    def pass_on_rates(self, optimizers: Sequence[Any]) -> None:
        """Set the tables' learning rates to those that schedulers have set in the groups that the tables have left."""
        if (self._groups or self._frozen) and self._tables.is_built:
            groups = {name: optimizers[i].param_groups[j] for name, (i, j) in self._groups.items()}
            rates = {name: float(group["lr"]) for name, group in groups.items()}
            self._tables.set_rates(rates | dict.fromkeys(self._frozen, 0.0))


def _with_values(state: dict[str, Any], group: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Give values to the state that an optimizer, such as Adagrad, has created for a table without values."""
    start = group.get("initial_accumulator_value", 0.0)
    return {
        key: torch.full_like(value, start, device=device) if isinstance(value, Tensor) and value.is_meta else value
        for key, value in state.items()
    }
