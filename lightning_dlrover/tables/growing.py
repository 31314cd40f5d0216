"""Embedding collections whose tables grow: `GrowingEmbeddingBagCollection` and `GrowingEmbeddingCollection`.

They are called like torchrec's collections. Each worker owns the rows of some sections of keys (`growing_rows.py`). A lookup
sends each worker's distinct keys to their owners, receives the rows, and pools them; the backward pass sends the gradients of
these rows, which their owners apply at once. `GrowingTables` connects all collections of a module to a plan of owners.
"""

from __future__ import annotations

import contextlib
import functools
import os
import struct
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX

from lightning_dlrover.tables.exchange import Block, exchange, largest
from lightning_dlrover.tables.growing_optimizers import Ftrl, RowOptimizer
from lightning_dlrover.tables.growing_rows import FILTER_CELLS, SECTIONS, Growth, Init, Rows, keys_of, pack, sections_of
from lightning_dlrover.tables.layout import HASH_RANGES, Move, Plan, PlanError, Region, Shard, TablePlan, plan_moves, replan
from lightning_dlrover.tables.snapshot_store import Part
from lightning_dlrover.tables.torchrec_adapter import set_submodule

EVERY_ID = Growth()

_ADDRESSES = 32 << 40
"""Bytes of addresses for one collection: a process has 128 TiB."""

_OF_HOST = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@dataclass
class _Table:
    config: Any  # torchrec's
    rows: Rows
    borders: Tensor  # first section of each rank, and `SECTIONS`
    lookups: weakref.WeakSet[_Lookup] = field(default_factory=weakref.WeakSet)


class GrowingCollection(nn.Module):
    """Growing tables, and the lookups of their rows.

    Args:
        tables: torchrec's configurations. `num_embeddings` does not limit the rows. As in torchrec, it sets the range of the
            first weights, unless `weight_init_min` and `weight_init_max` or `init_fn` do.
        optimizer: trains the rows in the backward pass.
        growth: of all tables, or by table name.

    Raises:
        ValueError: there is no table, or a configuration is not supported here; the message has the reason.
    """

    def __init__(
        self, tables: Sequence[Any], optimizer: RowOptimizer, growth: Growth | Mapping[str, Growth] = EVERY_ID
    ) -> None:
        super().__init__()
        names = [config.name for config in tables]
        if not names:
            raise ValueError("a collection needs at least one table")
        if doubled := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two tables have the name {doubled[0]!r}")
        features = [feature for config in tables for feature in config.feature_names]
        if doubled := sorted({feature for feature in features if features.count(feature) > 1}):
            raise ValueError(f"feature {doubled[0]!r} is used by two tables: give each table features of its own")
        if isinstance(growth, Mapping) and (unknown := sorted(growth.keys() - set(names))):
            raise ValueError(f"growth names the table {unknown[0]!r}; there are {', '.join(names)}")
        self._tables: dict[str, _Table] = {}
        for config in tables:
            of_table = growth.get(config.name, Growth()) if isinstance(growth, Mapping) else growth
            needed = min(_OF_HOST, _ADDRESSES // len(names), 2 * (of_table.max_bytes or _OF_HOST) + (1 << 30))
            rows = Rows(config.name, config.embedding_dim, optimizer, of_table, init_of(config), needed)
            rows.begin(torch.initial_seed() % 2**62)
            self._tables[config.name] = _Table(config, rows, torch.tensor([0, SECTIONS]))
        # Gives autograd a reason to call our backward pass. Not a parameter: optimizers and DDP must not see it.
        self._anchor = torch.zeros((), requires_grad=True)

    def __deepcopy__(self, memo: object) -> Any:
        raise TypeError("growing tables are not copied: their rows may fill this host's memory; copy the rest of the module")

    def __reduce_ex__(self, protocol: object) -> Any:
        raise TypeError("growing tables are not pickled: save a checkpoint, which holds their rows")

    def rows(self) -> dict[str, Rows]:
        """Return the rows of each table on this worker, by its name."""
        return {name: table.rows for name, table in self._tables.items()}

    def set_learning_rate(self, lr: float) -> None:
        """Set the learning rate of all tables, for example from a scheduler.

        Raises:
            ValueError: the optimizer is `Ftrl`, whose states belong to one rate.
        """
        for table in self._tables.values():
            if isinstance(table.rows.optimizer, Ftrl):
                raise ValueError("Ftrl keeps its learning rate: with another one its states would mean other weights")
            table.rows.optimizer = replace(table.rows.optimizer, lr=lr)  # type: ignore[type-var]

    def connect(self, borders: Mapping[str, Sequence[int]]) -> None:
        """Set the owners of each table's sections: the first section of each rank of the default group, and `SECTIONS`."""
        for name, table in self._tables.items():
            table.borders = torch.tensor(borders[name])

    def get_extra_state(self) -> dict[str, Any]:
        """Return all rows, for the checkpoints of a run with one worker."""
        return {
            name: {
                "rows": pack(table.rows.columns, table.rows.num_slots, table.rows.filter, 0, SECTIONS),
                "numbers": torch.tensor([table.rows.seed, table.rows.step]),
            }
            for name, table in self._tables.items()
        }

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        """Take the rows that `get_extra_state` returned.

        Raises:
            ValueError: they are those of other tables.
        """
        if state.keys() != self._tables.keys():
            raise ValueError(f"the checkpoint has the growing tables {sorted(state)}, this model {sorted(self._tables)}")
        for name, of_table in state.items():
            rows = self._tables[name].rows
            rows.clear()
            rows.seed, rows.step = of_table["numbers"].tolist()
            rows.take(of_table["rows"], 0, SECTIONS)

    def _looked_up(self, features: Any) -> dict[str, tuple[Tensor, Tensor]]:
        """Look up all features. Return for each the rows of its table, and the index of each of its values among them."""
        by_key = features.offset_per_key()
        numbers = {key: i for i, key in enumerate(features.keys())}
        values, sizes, asked = features.values().cpu().to(torch.int64), [], []
        for table in self._tables.values():
            of_table = [numbers[feature] for feature in table.config.feature_names]
            parts = [values[by_key[i] : by_key[i + 1]] for i in of_table]
            sizes.append([len(part) for part in parts])
            asked.append(torch.unique(keys_of(torch.cat(parts)), return_inverse=True, return_counts=True))
        lookup = _Lookup(list(self._tables.values()), [keys for keys, _, _ in asked], [counts for _, _, counts in asked])
        if len(self._tables[next(iter(self._tables))].borders) - 1 != _world_size():
            raise RuntimeError(
                f"growing tables are looked up by {_world_size()} workers, which do not share them: train with "
                "DLRoverStrategy, which lets each worker own some of the rows, or with one worker"
            )
        is_training = self.training and torch.is_grad_enabled()
        rows = _RowsOf.apply(self._anchor, lookup) if is_training else lookup.forward(is_training=False)  # type: ignore[no-untyped-call]
        return {
            feature: (of_table, index)
            for table, of_table, (_, indexes, _), lengths in zip(self._tables.values(), rows, asked, sizes, strict=True)
            for feature, index in zip(table.config.feature_names, torch.split(indexes, lengths), strict=True)
        }


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


class GrowingEmbeddingBagCollection(GrowingCollection):
    """Tables with a row for each id that occurs, pooled per sample. Called like torchrec's `EmbeddingBagCollection`.

    Example:
        >>> from torchrec import EmbeddingBagConfig
        >>> from lightning_dlrover.tables.growing_optimizers import RowWiseAdagrad
        >>> tables = GrowingEmbeddingBagCollection(
        ...     tables=[EmbeddingBagConfig(name="item", num_embeddings=1_000_000, embedding_dim=16, feature_names=["item"])],
        ...     optimizer=RowWiseAdagrad(lr=0.02),
        ...     growth=Growth(min_count=2, max_bytes=8 << 30),
        ... )
    """

    def __init__(
        self,
        tables: Sequence[Any],
        optimizer: RowOptimizer,
        growth: Growth | Mapping[str, Growth] = EVERY_ID,
        is_weighted: bool = False,
    ) -> None:
        super().__init__(tables, optimizer, growth)
        self.is_weighted = is_weighted

    def forward(self, features: Any) -> Any:
        """Return the pooled rows of a `KeyedJaggedTensor` as a `KeyedTensor`, in the order of the tables' features."""
        from torchrec import KeyedTensor, PoolingType

        found = self._looked_up(features)
        numbers = {key: i for i, key in enumerate(features.keys())}
        by_key, device = features.offset_per_key(), features.values().device
        lengths = features.lengths().cpu().view(len(numbers), -1)
        weights = features.weights().cpu() if self.is_weighted else None
        keys, widths, pooled = [], [], []
        for table in self._tables.values():
            for feature in table.config.feature_names:
                i, (rows, index) = numbers[feature], found[feature]
                offsets = F.pad(lengths[i].to(torch.int64).cumsum(0), (1, 0))[:-1]
                of_feature = weights[by_key[i] : by_key[i + 1]] if weights is not None else None
                is_mean = table.config.pooling == PoolingType.MEAN
                mode = "mean" if is_mean and of_feature is None else "sum"
                bags = F.embedding_bag(index, _never_empty(rows), offsets, mode=mode, per_sample_weights=of_feature)
                if is_mean and of_feature is not None:
                    bags = bags / lengths[i].clamp(min=1).unsqueeze(1)
                keys.append(feature)
                widths.append(table.config.embedding_dim)
                pooled.append(bags)
        return KeyedTensor(keys, widths, torch.cat(pooled, 1).to(device))


class GrowingEmbeddingCollection(GrowingCollection):
    """Tables with a row for each id that occurs, not pooled. Called like torchrec's `EmbeddingCollection`.

    Example:
        >>> from torchrec import EmbeddingConfig
        >>> from lightning_dlrover.tables.growing_optimizers import Adagrad
        >>> item = EmbeddingConfig(name="item", num_embeddings=1_000_000, embedding_dim=16, feature_names=["item"])
        >>> tables = GrowingEmbeddingCollection([item], Adagrad(lr=0.02))
    """

    def forward(self, features: Any) -> dict[str, Any]:
        """Return the rows of a `KeyedJaggedTensor` as a `JaggedTensor` for each feature."""
        from torchrec import JaggedTensor

        numbers, device = {key: i for i, key in enumerate(features.keys())}, features.values().device
        lengths = features.lengths().view(len(numbers), -1)
        return {
            feature: JaggedTensor(values=rows.index_select(0, index).to(device), lengths=lengths[numbers[feature]])
            for feature, (rows, index) in self._looked_up(features).items()
        }


def _never_empty(rows: Tensor) -> Tensor:
    """Return rows with at least one: `embedding_bag` takes no empty table, though no bag has an entry."""
    return rows if len(rows) else F.pad(rows, (0, 0, 0, 1))


class _Lookup:
    """One lookup of all tables of a collection: the distinct keys of this worker, and what it was asked as an owner.

    Args:
        keys: by table, ascending, hence in the order of their owners' ranks.
        counts: occurrences of each key.
    """

    def __init__(self, tables: Sequence[_Table], keys: Sequence[Tensor], counts: Sequence[Tensor]) -> None:
        self._tables = tables
        self._keys = keys
        self._counts = counts
        self._size = len(tables[0].borders) - 1
        self._slots: list[Tensor] = []  # as an owner, by table
        self._index: list[Tensor] = []  # of each asked key among `_slots`
        self._asked: list[Tensor] = []  # occurrences of each of `_slots`
        self.is_open = False  # whether the backward pass is still to come

    def forward(self, is_training: bool) -> tuple[Tensor, ...]:
        """Return the rows of `keys` by table, ``(n, dim)``. New ids get rows only if the model is being trained."""
        if is_training:
            self.is_open = True  # its slots must stay
            for table in self._tables:
                table.lookups.add(self)
        size, tables = self._size, self._tables
        if size == 1:
            self._asked = list(self._counts)
            self._slots = [
                table.rows.slots_of(keys, counts if is_training else None)
                for table, keys, counts in zip(tables, self._keys, self._counts, strict=True)
            ]
            return tuple(
                table.rows.columns["weight"].index_select(0, slots) for table, slots in zip(tables, self._slots, strict=True)
            )
        cuts = [torch.searchsorted(sections_of(keys), table.borders) for table, keys in zip(tables, self._keys, strict=True)]
        self._mine = torch.stack([cut.diff() for cut in cuts], 1)  # (rank, table): keys that this worker asks of a rank
        self._theirs = torch.empty_like(self._mine)  # that a rank asks of this one
        dist.all_to_all_single(self._theirs, self._mine)
        sent = [torch.stack([keys, counts], 1) for keys, counts in zip(self._keys, self._counts, strict=True)]
        arrived = _swapped(sent, self._mine, self._theirs)
        answers = []
        for table, asked in zip(tables, arrived, strict=True):
            keys, index = torch.unique(asked[:, 0], return_inverse=True)
            counts = torch.zeros(len(keys), dtype=torch.int64).index_add_(0, index, asked[:, 1].contiguous())
            slots = table.rows.slots_of(keys, counts if is_training else None)
            self._slots.append(slots)
            self._index.append(index)
            self._asked.append(counts)
            answers.append(table.rows.columns["weight"].index_select(0, slots).index_select(0, index))
        return tuple(_swapped(answers, self._theirs, self._mine))

    def backward(self, grads: Sequence[Tensor]) -> None:
        """Train the rows with the gradients of what `forward` returned; the mean over workers counts, as with DDP.

        Raises:
            RuntimeError: it was called before. The rows may have moved since.
        """
        if not self.is_open:
            raise RuntimeError("a lookup of growing tables has one backward pass: add up the losses before it")
        if self._size > 1:
            theirs = _swapped([grad.contiguous() for grad in grads], self._mine, self._theirs)
            grads = [
                torch.zeros(len(slots), grad.shape[1]).index_add_(0, index, grad).div_(self._size)
                for slots, index, grad in zip(self._slots, self._index, theirs, strict=True)
            ]
        self.is_open = False
        for table, slots, grad, counts in zip(self._tables, self._slots, grads, self._asked, strict=True):
            if (slots < SECTIONS).any():  # ids without a row share one
                slots, index = torch.unique(slots, return_inverse=True)
                grad = torch.zeros(len(slots), grad.shape[1]).index_add_(0, index, grad)
                counts = torch.zeros(len(slots), dtype=torch.int64).index_add_(0, index, counts)
            table.rows.train(slots, grad, counts)
            if not any(lookup.is_open for lookup in table.lookups):
                table.rows.evict()


class _RowsOf(torch.autograd.Function):
    """The rows of a lookup, whose backward pass trains them."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, lookup: _Lookup) -> tuple[Tensor, ...]:
        ctx.lookup = lookup
        return lookup.forward(is_training=True)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:
        ctx.lookup.backward(grads)
        return None, None


def _swapped(parts: Sequence[Tensor], sent: Tensor, received: Tensor) -> list[Tensor]:
    """Exchange rows of several tensors with all ranks of the default group.

    Args:
        parts: by table, the rows for all ranks in rank order.
        sent: rows by rank and table.
        received: the same of the answer.

    Returns:
        By table, the rows of all ranks in rank order.
    """
    widths = [part.shape[1] for part in parts]
    pieces = [torch.split(part, counts) for part, counts in zip(parts, sent.T.tolist(), strict=True)]
    out = torch.cat([piece.reshape(-1) for of_rank in zip(*pieces, strict=True) for piece in of_rank])
    sizes = torch.tensor(widths)
    incoming = (received * sizes).sum(1).tolist()
    arrived = torch.empty(sum(incoming), dtype=out.dtype)
    dist.all_to_all_single(arrived, out, incoming, (sent * sizes).sum(1).tolist())
    by_rank = iter(torch.split(arrived, (received * sizes).flatten().tolist()))
    rows = [[next(by_rank).view(-1, width) for width in widths] for _ in range(len(received))]
    return [torch.cat(of_table) for of_table in zip(*rows, strict=True)]


_SCALARS: dict[Any, tuple[str, ...]] = {
    nn.init.uniform_: ("a", "b"),
    nn.init.normal_: ("mean", "std"),
    nn.init.constant_: ("val",),
}


def init_of(config: Any) -> Init:
    """Return the distribution of a table's first weights.

    Raises:
        ValueError: `init_fn` may need the whole table, which never exists.
    """
    init_fn: Any = config.init_fn
    values = {"a": 0.0, "b": 1.0, "mean": 0.0, "std": 1.0, "val": 0.0}
    if isinstance(init_fn, functools.partial):
        init_fn, names = init_fn.func, _SCALARS.get(init_fn.func, ())
        values |= dict(zip(names, config.init_fn.args, strict=False)) | config.init_fn.keywords
    if init_fn is nn.init.uniform_:
        return Init("uniform", values["a"], values["b"])
    if init_fn is nn.init.normal_:
        return Init("normal", values["mean"], values["std"])
    if init_fn in (nn.init.constant_, nn.init.zeros_):
        return Init("uniform", values["val"], values["val"])
    raise ValueError(
        f"table {config.name!r}: rows appear one by one, so its init_fn must be uniform_, normal_, constant_ or zeros_ of "
        "torch.nn.init, or a functools.partial of one of them"
    )


# The growing tables of a whole module, and their owners.


@dataclass(frozen=True)
class Source:
    """Rows of some sections of one table: those in this worker's memory, or in a part of a snapshot."""

    sections: Region
    columns: Mapping[str, Tensor]
    num_slots: int
    filter: Tensor


@dataclass
class Packed:
    """The moves of growing rows of one exchange, as blocks of bytes that `exchange` can send."""

    moves: list[Move] = field(default_factory=list)
    old: list[Block] = field(default_factory=list)
    new: list[Block] = field(default_factory=list)
    arriving: list[tuple[str, Region, Tensor]] = field(default_factory=list)  # table, sections, bytes


class GrowingTables:
    """All growing tables of one module, by `{path}.{table}`.

    Raises:
        PlanError: a collection has several paths in the module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        paths: dict[int, list[str]] = {}
        for path, part in module.named_modules(remove_duplicate=False):
            if isinstance(part, GrowingCollection):
                paths.setdefault(id(part), []).append(path)
        for several in paths.values():
            if len(several) > 1:
                raise PlanError(f"{' and '.join(several)} are one growing collection: refer to it from one place")
        self._given: dict[str, Tensor] = {}  # rows before the first step, by table
        self.collections = {path: part for path, part in module.named_modules() if isinstance(part, GrowingCollection)}
        self.rows = {
            f"{path}.{name}" if path else name: rows
            for path, collection in self.collections.items()
            for name, rows in collection.rows().items()
        }
        for name, rows in self.rows.items():
            rows.name = name

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def num_bytes(self) -> int:
        return sum(rows.num_bytes for rows in self.rows.values())

    def own_in(self, plan: Plan, me: str) -> dict[str, Region]:
        """Return the sections of each table that a worker owns in a plan."""
        return {name: shard.region for name in self.rows for shard in plan[name].shards if shard.owner == me}

    def first_plan(self, members: Sequence[str]) -> dict[str, TablePlan]:
        """Return equal ranges of sections for `members`, worker ids in rank order."""
        whole = {
            name: TablePlan(HASH_RANGES, "growing", SECTIONS, rows.dim, (Shard(members[0], Region(0, SECTIONS, 0, rows.dim)),))
            for name, rows in self.rows.items()
        }
        return replan(whole, members)

    def connect(self, plan: Plan) -> None:
        """Let lookups ask the owners of a plan; its shards are in rank order."""
        for path, collection in self.collections.items():
            prefix = f"{path}." if path else ""
            collection.connect(
                {name: [*(shard.region.row0 for shard in plan[prefix + name].shards), SECTIONS] for name in collection.rows()}
            )

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Remove the collections from the module inside the block."""
        try:
            for path in self.collections:
                set_submodule(self._module, path, nn.Module())
            yield
        finally:
            for path, collection in self.collections.items():
                set_submodule(self._module, path, collection)

    def initialise(self, seed: int, given: Sequence[str], plan: Plan, group: Any, members: Sequence[str], me: str) -> None:
        """Begin all tables, with the first worker's rows of those that are `given`. Arguments as for `ShardedTables`."""
        self._given |= {
            name: pack(rows.columns, rows.num_slots, rows.filter, 0, SECTIONS)
            for name, rows in self.rows.items()
            if rows.num_rows and rows.owned == (0, SECTIONS)
        }
        for name, rows in self.rows.items():
            if name not in given:
                rows.begin(seed)
            elif me != members[0]:
                rows.clear()
            rows.seed = seed
        kept = [name for name in sorted(self.rows) if name in given]
        whole = {name: [Shard(members[0], Region(0, SECTIONS, 0, self.rows[name].dim))] for name in kept}
        moves = plan_moves(whole, {name: plan[name].shards for name in kept})
        packed = self.packed(group, moves, me, self.sources())
        exchange(group, members, me, packed.moves, packed.old, packed.new)
        steps = largest(group, {name: self.rows[name].step for name in kept})
        for name, step in steps.items():
            self.rows[name].step = step
        self.take(packed, self.own_in(plan, me))

    # --- changes of workers ----------------------------------------------------------------------------------------------

    def sources(self) -> dict[str, list[Source]]:
        """Return this worker's rows."""
        return {
            name: [Source(Region(*rows.owned, 0, rows.dim), rows.columns, rows.num_slots, rows.filter)]
            for name, rows in self.rows.items()
        }

    def sources_in(self, parts: Iterable[Part], plan: Plan) -> dict[str, list[Source]]:
        """Return the rows in parts of a snapshot that was taken under a plan."""
        found: dict[str, list[Source]] = {name: [] for name in self.rows}
        for part in parts:
            blocks = part.blocks()
            for name, rows in self.rows.items():
                columns = {block.what: block.values for block in blocks if block.table == name}
                counts = columns.get("filter", torch.zeros(SECTIONS, FILTER_CELLS, dtype=torch.uint8))
                num_slots = part.header.counters[_SLOTS.format(name)]
                of_rows = {column: columns[column] for column in rows.columns}
                found[name] += [
                    Source(shard.region, of_rows, num_slots, counts)
                    for shard in plan[name].shards
                    if shard.owner == part.header.owner
                ]
        return found

    def without(self, moves: Sequence[Move]) -> list[Move]:
        """Return the moves of other tables."""
        return [move for move in moves if move.table not in self.rows]

    def packed(
        self, group: Any, moves: Sequence[Move], me: str, sources: Mapping[str, Sequence[Source]], stay: bool = True
    ) -> Packed:
        """Pack the rows of moves for `exchange`. All workers of the group must call it with the same moves.

        Args:
            sources: this worker's rows.
            stay: whether rows that keep their owner are in its memory already.

        Raises:
            RuntimeError: a peer is lost.
        """
        growing = [move for move in moves if move.table in self.rows and not (stay and move.source == move.target)]
        contents: dict[int, Tensor] = {}
        for i, move in enumerate(growing):
            if move.source == me:
                source = next(s for s in sources[move.table] if s.sections.overlap(move.region) == move.region)
                contents[i] = pack(source.columns, source.num_slots, source.filter, move.region.row0, move.region.row1)
        sizes = {str(i): len(contents[i]) if i in contents else 0 for i in range(len(growing))}
        kept = {i for i, move in enumerate(growing) if move.source == move.target}
        packed = Packed()
        for i, size in enumerate(largest(group, sizes).values()):
            move, region = growing[i], Region(0, size, 0, 1)
            if i in kept:
                if move.source == me:
                    packed.arriving.append((move.table, move.region, contents.pop(i)))
                continue
            name = f"{move.table}/{move.region.row0}"
            packed.moves.append(Move(name, region, move.source, move.target, region))
            if move.source == me:
                packed.old.append(Block(name, "rows", region, contents[i]))
            if move.target == me:
                arriving = torch.empty(size, dtype=torch.uint8)
                packed.new.append(Block(name, "rows", region, arriving))
                packed.arriving.append((move.table, move.region, arriving))
        return packed

    def take(self, packed: Packed, own: Mapping[str, Region]) -> None:
        """Take the rows that have arrived, and drop those outside of this worker's `own` sections."""
        for name, region in own.items():
            self.rows[name].own(region.row0, region.row1)
        packed.old.clear()
        packed.new.clear()
        while packed.arriving:  # each is freed before the next one is taken
            table, region, arrived = packed.arriving.pop()
            self.rows[table].take(arrived, region.row0, region.row1)

    def load_whole(self, state: dict[str, Any]) -> None:
        """Take this worker's sections of whole tables, which a run with one worker has saved. Removes them from `state`.

        Raises:
            ValueError: they are those of other tables.
        """
        owned = {name: rows.owned for name, rows in self.rows.items()}
        for path, collection in self.collections.items():
            saved = state.pop(f"{path}.{_EXTRA_STATE_KEY_SUFFIX}" if path else _EXTRA_STATE_KEY_SUFFIX, None)
            if saved is not None:
                collection.set_extra_state(saved)
        for name, sections in owned.items():
            self.rows[name].own(*sections)

    def clear(self) -> None:
        """Drop all rows."""
        for rows in self.rows.values():
            rows.clear()

    def reset(self) -> None:
        """Return to the rows before the first step."""
        self.clear()
        for name, rows in self.rows.items():
            rows.own(0, SECTIONS)
            if name in self._given:
                rows.take(self._given[name], 0, SECTIONS)

    def forget_given(self) -> None:
        """Free the rows before the first step, because the job trains."""
        self._given.clear()

    # --- snapshots -------------------------------------------------------------------------------------------------------

    def blocks(self) -> list[Block]:
        """Return the memory of all rows. Blocks have some room, so that they keep their size while a table grows a little."""
        found: list[Block] = []
        for name, rows in self.rows.items():
            step = 1 << max(10, rows.num_slots.bit_length() - 4)
            num = min(-(-rows.num_slots // step) * step, rows.max_slots)
            for column, values in rows.columns.items():
                width = values.shape[1] if values.dim() > 1 else 1
                found.append(Block(name, column, Region(0, num, 0, width), values[:num]))
            if rows.growth.min_count > 1:
                found.append(Block(name, "filter", Region(0, SECTIONS, 0, FILTER_CELLS), rows.filter))
        return found

    def counters(self) -> dict[str, int]:
        """Return the numbers that belong to the rows: steps by table, and seeds and numbers of slots under other names."""
        found: dict[str, int] = {}
        for name, rows in self.rows.items():
            (rate,) = struct.unpack("<q", struct.pack("<d", rows.optimizer.lr))  # bits of positive numbers keep their order
            found |= {name: rows.step, _SEED.format(name): rows.seed, _SLOTS.format(name): rows.num_slots}
            found[_RATE.format(name)] = rate
        return found

    def set_counters(self, counters: Mapping[str, int]) -> None:
        """Set the steps, seeds and learning rates that `counters` returned on any worker."""
        for name, rows in self.rows.items():
            rows.step = counters.get(name, rows.step)
            rows.seed = counters.get(_SEED.format(name), rows.seed)
            if rate := counters.get(_RATE.format(name)):
                (lr,) = struct.unpack("<d", struct.pack("<q", rate))
                rows.optimizer = replace(rows.optimizer, lr=lr)  # type: ignore[type-var]


_SEED, _SLOTS, _RATE = "{}/seed", "{}/slots", "{}/lr"
"""Names of further counters of a table."""
