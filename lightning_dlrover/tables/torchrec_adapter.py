"""All use of torchrec: build its sharded modules in our own memory, and find, copy and replace their parts.

`TableOptimizer` translates the user's optimizer into a fused one. All private names of torchrec are in this file, and those
that torch gives to parameters with an optimizer of their own. The functions that build modules replace public names only.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib.util
import itertools
import logging
import os
import types
import warnings
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_dlrover.private_names import check_names
from lightning_dlrover.tables.exchange import Arena
from lightning_dlrover.tables.layout import Plan, PlanError, Region, Shard, TablePlan

INSTALL_LINE = "pip install 'lightning-dlrover[torchrec]' && pip install --no-deps torchrec==1.8.0"

NAMES: dict[str, tuple[str, ...]] = {
    "torchrec.modules.embedding_modules:EmbeddingBagCollection": ("_device",),
    "torchrec.modules.embedding_modules:EmbeddingCollection": ("_device",),
    "torchrec.distributed.model_parallel:DistributedModelParallel": ("_dmp_wrapped_module", "_sharded_parameter_names"),
    "torchrec.distributed.model_parallel:DataParallelWrapper": ("wrap",),
    "torchrec.distributed.collective_utils": ("_INITIALIZED",),
    "torchrec.distributed.comm": ("_CROSS_PG", "_CROSS_PG_2D", "_INTRA_PG", "_INTRA_PG_2D", "_NODE_GROUP_SIZE_2D"),
    "torchrec.distributed.comm_ops": ("dist",),
    "torchrec.distributed.batched_embedding_kernel": ("SplitTableBatchedEmbeddingBagsCodegen",),
    "torchrec.distributed.batched_embedding_kernel:BaseBatchedEmbedding": ("init_parameters",),
    "torchrec.distributed.batched_embedding_kernel:BaseBatchedEmbeddingBag": ("init_parameters",),
    "torchrec.distributed.batched_embedding_kernel:BatchedFusedEmbedding": ("_emb_module",),
    "torchrec.distributed.batched_embedding_kernel:BatchedFusedEmbeddingBag": ("_emb_module",),
    "torchrec.distributed.embedding:ShardedEmbeddingCollection": ("_lookups", "reset_parameters"),
    "torchrec.distributed.embeddingbag:ShardedEmbeddingBagCollection": ("_lookups", "reset_parameters"),
    "torchrec.distributed.embedding:EmbeddingCollectionSharder": ("shard",),
    "torchrec.distributed.embeddingbag:EmbeddingBagCollectionSharder": ("shard",),
    "fbgemm_gpu.split_table_batched_embeddings_ops_training": ("construct_split_state",),
}
"""Names that this file uses or replaces, by their holder, in the form that `check_names` takes."""


class TorchrecMissingError(ImportError):
    """torchrec is needed, but is missing or does not load."""


def has_tables(module: nn.Module) -> bool:
    """Return whether `module` has embedding collections to shard, torchrec's or growing ones. Imports torchrec only if so."""
    rooms = ("torchrec.", "lightning_dlrover.")
    names = {base.__name__ for m in module.modules() for base in type(m).__mro__ if base.__module__.startswith(rooms)}
    return bool(names & {"EmbeddingBagCollection", "EmbeddingCollection", "ShardedEmbeddingModule", "GrowingCollection"})


@functools.cache
def check_torchrec() -> None:
    """Check once that torchrec can be used.

    Raises:
        TorchrecMissingError: it is missing or does not load; the message has the command that installs it.
        MissingNamesError: its release lacks a name that is used here.
    """
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
    check_names("torchrec", NAMES)


def default_sharders() -> list[Any]:
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.types import ShardingType

    by_rows = [ShardingType.ROW_WISE.value, ShardingType.TABLE_ROW_WISE.value]
    grid = ShardingType.GRID_SHARD.value  # its shards cannot be reassigned, see `layout.replan`

    # torchrec offers these on GPUs only, but gloo has all the collectives that they need.
    class BagSharder(EmbeddingBagCollectionSharder):  # type: ignore[misc]
        def sharding_types(self, compute_device_type: str) -> list[str]:
            types = dict.fromkeys([*super().sharding_types(compute_device_type), *by_rows])
            types.pop(grid, None)
            return list(types)

    class Sharder(EmbeddingCollectionSharder):  # type: ignore[misc]
        def sharding_types(self, compute_device_type: str) -> list[str]:
            types = dict.fromkeys([*super().sharding_types(compute_device_type), by_rows[0]])
            if compute_device_type == "cpu":
                types.pop(ShardingType.DATA_PARALLEL.value, None)
            return list(types)

    return [BagSharder(), Sharder()]


def key_of(path: str, table: str) -> str:
    return f"{path}.{table}" if path else table


def configs_of(collection: Any) -> list[Any]:
    is_bag = hasattr(collection, "embedding_bag_configs")
    configs: list[Any] = collection.embedding_bag_configs() if is_bag else collection.embedding_configs()
    return configs


def region_of(metadata: Any) -> Region:
    (row0, col0), (rows, cols) = metadata.shard_offsets, metadata.shard_sizes
    return Region(row0, row0 + rows, col0, col0 + cols)


def held_by(config: Any) -> Region:
    """Return this worker's region of a sharded table."""
    return (
        region_of(config.local_metadata) if config.local_metadata else Region(0, config.num_embeddings, 0, config.embedding_dim)
    )


def on_meta(collection: nn.Module) -> nn.Module:
    """Return a copy without values; optimizers applied to the parameters are transferred to the copy's."""
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


def values_of(collection: nn.Module) -> dict[str, torch.Tensor]:
    """Return the values of a collection's tables that are not on `meta`, by table, in the tables' precision."""
    from torchrec.modules.embedding_configs import data_type_to_dtype

    precisions = {config.name: data_type_to_dtype(config.data_type) for config in configs_of(collection)}
    found = {name.split(".")[-2]: parameter.detach() for name, parameter in collection.named_parameters()}
    return {table: values.to(precisions[table]) for table, values in found.items() if not values.is_meta}


def with_parameters(template: nn.Module) -> nn.Module:
    """Return a fresh copy of a template for torchrec, which modifies the optimizers applied to the parameters."""
    collection = on_meta(template)
    for parameter in collection.parameters():
        if hasattr(parameter, "_optimizer_classes"):
            parameter._in_backward_optimizers = []  # type: ignore[attr-defined]  # marks it as trained in the backward pass
    return collection


def set_submodule(module: nn.Module, path: str, part: nn.Module) -> None:
    if not path:
        raise PlanError("the module is an embedding collection itself: make it a part of a LightningModule")
    module.set_submodule(path, part)


def kernels_in(sharded: Any) -> Iterator[Any]:
    from torchrec.distributed.batched_embedding_kernel import BaseBatchedEmbedding, BaseBatchedEmbeddingBag

    for lookup in getattr(sharded, "_lookups", ()):
        inner = lookup.module if isinstance(lookup, DistributedDataParallel) else lookup
        for kernel in inner.modules():
            if isinstance(kernel, BaseBatchedEmbedding | BaseBatchedEmbeddingBag):
                yield kernel


def optimizer_states(emb_module: Any, num_tables: int) -> list[list[torch.Tensor]]:
    if not hasattr(emb_module, "split_optimizer_states"):
        return [[] for _ in range(num_tables)]  # the user's own optimizer trains it
    states = emb_module.split_optimizer_states()
    # SGD returns one empty list, rather than an empty list for each table.
    return [list(of_table) for of_table in states] or [[] for _ in range(num_tables)]


def keep_order(sharded: nn.Module, template: nn.Module) -> None:
    """Keep pooled embeddings in the unsharded collection's order; torchrec's order depends on the tables' owners."""
    if not hasattr(template, "embedding_bag_configs"):
        return
    from torchrec.sparse.jagged_tensor import KeyedTensor

    configs = configs_of(template)
    features = [feature for config in configs for feature in config.feature_names]
    # A feature that several tables look up has one name per table.
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


def forget_groups() -> None:
    """Make torchrec rebuild its sub-groups, in whose building a newcomer has to take part."""
    from torchrec.distributed import collective_utils, comm

    collective_utils._INITIALIZED = False
    for name in ("_INTRA_PG", "_CROSS_PG", "_INTRA_PG_2D", "_CROSS_PG_2D", "_NODE_GROUP_SIZE_2D"):
        setattr(comm, name, None)


def applied_optimizer(parameter: nn.Parameter) -> list[type]:
    """Return the classes of the optimizers applied to a parameter in its backward pass."""
    found: list[type] = getattr(parameter, "_optimizer_classes", [])
    return found


def apply_optimizer(parameter: nn.Parameter, kind: type, arguments: Mapping[str, Any]) -> None:
    """Let torchrec train a table in its backward pass."""
    parameter._optimizer_classes = [kind]  # type: ignore[attr-defined]
    parameter._optimizer_kwargs = [dict(arguments)]  # type: ignore[attr-defined]


def copy_applied_optimizer(source: nn.Parameter, target: nn.Parameter) -> None:
    """Apply another parameter's optimizer, if it has one and this parameter has none."""
    if hasattr(source, "_optimizer_classes") and not hasattr(target, "_optimizer_classes"):
        target._optimizer_classes = source._optimizer_classes  # type: ignore[attr-defined]
        target._optimizer_kwargs = source._optimizer_kwargs  # type: ignore[attr-defined]


def shard(wrap_dense: Callable[[nn.Module, list[str]], nn.Module], **arguments: Any) -> nn.Module:
    """Create a `DistributedModelParallel`, let `wrap_dense` wrap its dense part, and return the module that it calls."""
    from torchrec.distributed.model_parallel import DataParallelWrapper, DistributedModelParallel

    class Wrapper(DataParallelWrapper):  # type: ignore[misc]
        def wrap(self, dmp: Any, env: Any, device: torch.device) -> None:
            sharded = set(DistributedModelParallel._sharded_parameter_names(dmp._dmp_wrapped_module))
            if set(dict(dmp.named_parameters())) - sharded:
                dmp._dmp_wrapped_module = wrap_dense(dmp._dmp_wrapped_module, sorted(sharded))

    wrapped: nn.Module = DistributedModelParallel(**arguments, data_parallel_wrapper=Wrapper())._dmp_wrapped_module
    return wrapped


def first_plan(
    module: nn.Module,
    collections: Mapping[str, nn.Module],
    device: torch.device,
    sharders: Sequence[Any],
    constraints: Mapping[str, Any],
    members: Sequence[str],
    batch_size: int | None,
) -> dict[str, TablePlan]:
    """Return torchrec's own plan for `members`, worker ids in rank order. Deterministic.

    Args:
        collections: by their paths in `module`.
        constraints: torchrec's, by table name.
    """
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology

    with quiet():
        planner = EmbeddingShardingPlanner(
            topology=Topology(world_size=len(members), local_world_size=1, compute_device=device.type),
            batch_size=batch_size,
            constraints=constraints or None,
        )
        chosen = planner.plan(module, sharders).plan
    plan: dict[str, TablePlan] = {}
    for path in collections:
        configs = {config.name: config for config in configs_of(collections[path])}
        for name, sharding in chosen[path].items():
            config = configs[name]
            whole = Region(0, config.num_embeddings, 0, config.embedding_dim)
            if sharding.sharding_spec is None:
                shards = tuple(Shard(worker, whole) for worker in members)
            else:
                shards = tuple(
                    Shard(members[shard.placement.rank()], region_of(shard)) for shard in sharding.sharding_spec.shards
                )
            plan[key_of(path, name)] = TablePlan(
                sharding.sharding_type, sharding.compute_kernel, whole.row1, whole.col1, shards
            )
    return plan


def torchrec_plan(collections: Mapping[str, nn.Module], device: torch.device, plan: Plan, members: Sequence[str]) -> Any:
    """Return a plan in torchrec's form: worker ids become ranks."""
    from torch.distributed._shard.metadata import ShardMetadata
    from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec
    from torchrec.distributed.types import EmbeddingModuleShardingPlan, ParameterSharding, ShardingPlan

    by_module: dict[str, Any] = {}
    for path, template in collections.items():
        by_module[path] = EmbeddingModuleShardingPlan()
        for config in configs_of(template):
            table = plan[key_of(path, config.name)]
            spec = None
            if table.kind != "data_parallel":
                spec = EnumerableShardingSpec(
                    [
                        ShardMetadata(
                            shard_offsets=[s.region.row0, s.region.col0],
                            shard_sizes=[s.region.num_rows, s.region.num_cols],
                            placement=f"rank:{members.index(s.owner)}/{device}",
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


@functools.cache
def gather_uneven_batches() -> None:
    """Allow row-wise tables to be trained with shares of a batch that differ by a sample: gloo gathers only equal ones."""
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
    # torchrec's own calls cause these warnings in every worker's output.
    warnings.filterwarnings("ignore", ".*(all_gather_into_tensor|reduce_scatter_tensor)` is deprecated", FutureWarning)


class _AllWork:
    def __init__(self, works: Sequence[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep torchrec's advice about its own calls out of the user's output, because we make these calls."""
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
def one_worker_per_node() -> Iterator[None]:
    """Make torchrec's "node" one worker while modules are built, because it must divide every world size."""
    names = ("LOCAL_WORLD_SIZE", "TORCHREC_RESOLVED_POD_SIZE")
    former = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, "1"))
    try:
        yield
    finally:
        for name, value in former.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


class Placer:
    """Places the shards of tables that are about to be built."""

    def __init__(self, arena: Arena, path_of: Callable[[nn.Module], str]) -> None:
        self.path_of = path_of
        self.path = ""  # path of the collection being built
        self.configs: Sequence[Any] = ()  # tables held together
        self._arena = arena

    def weights(self, dtype: torch.dtype) -> tuple[torch.Tensor, list[int]]:
        """Return a buffer, and the offset of every table in it, in values."""
        return self._arena.values(dtype), self._offsets("weight", dtype, is_row_wise=False)

    def row_wise_states(self) -> tuple[torch.Tensor, list[int]]:
        return self._arena.values(torch.float32), self._offsets("state0", torch.float32, is_row_wise=True)

    def full_states(self, weights: torch.dtype, offsets: list[int]) -> tuple[torch.Tensor, list[int]]:
        """Return a buffer with the weights' offsets: fbgemm uses a weight's index for its state, whatever offsets it gets.

        It starts behind all weights; for weights of half the width, which are further apart, behind the others' states.
        """
        start = self._arena.num_bytes * (2 if weights.itemsize < 4 else 1)
        self._offsets("state0", torch.float32, is_row_wise=False, places=[start + 4 * at for at in offsets])
        return self._arena.values(torch.float32, start), offsets

    def _offsets(self, what: str, dtype: torch.dtype, is_row_wise: bool, places: Sequence[int] | None = None) -> list[int]:
        found: list[Any] = []
        end = 0
        for name, group in itertools.groupby(self.configs, lambda config: config.name):
            configs = list(group)
            regions = [held_by(config) for config in configs]
            row_bytes = [dtype.itemsize * (1 if is_row_wise else region.num_cols) for region in regions]
            sizes = [region.num_rows * of_row for region, of_row in zip(regions, row_bytes, strict=True)]
            if len(configs) == 1:
                region, of_row = regions[0], row_bytes[0]
                key: Any = (self.path, name, what, dtype, region.col0, region.col1)
                size, first = configs[0].num_embeddings * of_row, region.row0 * of_row
            else:  # torchrec requires several shards of one table side by side
                key, size, first = (self.path, name, what, dtype, *regions), sum(sizes), 0
            at = places[len(found)] - first if places is not None and size else None
            start = self._arena.place(key, size, first, sum(sizes), at) if sum(sizes) else 0
            starts = [start + before for before in itertools.accumulate([0, *sizes[:-1]])]
            found += [at // dtype.itemsize if num_bytes else None for at, num_bytes in zip(starts, sizes, strict=True)]
            end = (start + sum(sizes)) // dtype.itemsize if sum(sizes) else end
        # A shard without rows has the next one's place, as in torchrec: its kernels derive from that how to add up. The last
        # one has the place behind the one before it.
        following = end
        for i in reversed(range(len(found))):
            if found[i] is None:
                found[i] = following
            following = found[i]
        return found


@contextlib.contextmanager
def fast_build(placer: Placer, sharders: Sequence[Any]) -> Iterator[None]:
    """Make fbgemm use memory from `placer`, without initialisation, which would touch all of it three times."""
    from torchrec.distributed import batched_embedding_kernel as kernels
    from torchrec.distributed.embedding import ShardedEmbeddingCollection
    from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection

    def nothing(self: Any) -> None: ...

    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.object(kernels, "SplitTableBatchedEmbeddingBagsCodegen", _in_arena(placer)))
        for sharder in sharders:
            stack.enter_context(patch.object(sharder, "shard", _noting_path(placer, sharder.shard)))
        for base in (kernels.BaseBatchedEmbedding, kernels.BaseBatchedEmbeddingBag):
            stack.enter_context(patch.object(base, "__init__", _noting_tables(placer, base.__init__)))
            stack.enter_context(patch.object(base, "init_parameters", nothing))
        for collection in (ShardedEmbeddingBagCollection, ShardedEmbeddingCollection):
            stack.enter_context(patch.object(collection, "reset_parameters", nothing))
        yield


def _noting_tables(placer: Placer, init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def noted(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        placer.configs = config.embedding_tables
        init(self, config, *args, **kwargs)

    return noted


def _noting_path(placer: Placer, shard: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(shard)
    def noted(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        placer.path = placer.path_of(module)
        return shard(module, *args, **kwargs)

    return noted


def _in_arena(placer: Placer) -> type:
    """Return a kernel with its tables at the addresses from `placer`, in place of torchrec's kernel."""
    from fbgemm_gpu import split_table_batched_embeddings_ops_training as training
    from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
    from torchrec.distributed import batched_embedding_kernel as kernels

    stock, split_state = kernels.SplitTableBatchedEmbeddingBagsCodegen, training.construct_split_state

    class InArena(stock):  # type: ignore[misc, valid-type]
        def __init__(self, embedding_specs: Sequence[tuple[int, int, Any, Any]], *args: Any, **kwargs: Any) -> None:
            precision = kwargs.get("weights_precision", SparseType.FP32)
            optimizer = kwargs.get("optimizer", EmbOptimType.EXACT_SGD)
            states: list[tuple[torch.Tensor, list[int]]] = []  # buffers and offsets, ordered like fbgemm's requests
            is_on_host = all(spec[2] == EmbeddingLocation.HOST for spec in embedding_specs)
            is_float = precision in (SparseType.FP32, SparseType.FP16, SparseType.BF16)
            if is_on_host and is_float:  # even without rows: fbgemm would take a kernel with empty memory for a GPU's
                states.append(placer.weights(precision.as_dtype()))
                if optimizer == EmbOptimType.EXACT_ROWWISE_ADAGRAD:
                    states.append(placer.row_wise_states())
                elif optimizer == EmbOptimType.EXACT_ADAGRAD:
                    states.append(placer.full_states(precision.as_dtype(), states[0][1]))
                buffers = (buffer for buffer, _ in states)
                kwargs["preallocated_host_buffers"] = dict(zip(("weights", "momentum1"), buffers, strict=False))
            requested = iter(states)

            def placed(*of_tables: Any, **how: Any) -> Any:
                state, found = split_state(*of_tables, **how), next(requested, None)
                return state if found is None else state._replace(offsets=found[1], host_size=found[0].numel())

            with patch.object(training, "construct_split_state", placed):
                super().__init__(embedding_specs, *args, **kwargs)
            if is_on_host:
                # fbgemm's backward pass looks for the next table with rows, even behind the last one.
                rows: torch.Tensor = self.hash_size_cumsum  # type: ignore[has-type]
                self.hash_size_cumsum = torch.cat([rows, rows[-1:] + 1])
            if states:
                # It spans all addresses, of which this worker uses few, so optimizers and summaries must not count it.
                object.__setattr__(self, "weights_host", self._parameters.pop("weights_host"))

    return InArena


ON_CPU = ("SGD", "Adagrad", "RowWiseAdagrad")
"""Optimizers with CPU kernels in fbgemm."""


class TableOptimizerError(ValueError):
    """A table cannot be trained with its optimizer from the script."""


@dataclass(frozen=True)
class TableOptimizer:
    """Optimizer of one table in its backward pass.

    Sharded tables have no gradients for an ordinary optimizer: fbgemm's kernels update the rows of a batch while they compute
    its gradients. Only optimizers that these kernels compute exactly as the user's are translated; others are refused.
    """

    kind: type  # class that torchrec translates to a kernel
    arguments: Mapping[str, Any]  # the kernel's; `lr` is the initial rate

    def differs(self, other: TableOptimizer) -> bool:
        """Return whether more than the learning rate differs."""
        return self.kind is not other.kind or {**self.arguments, "lr": 0} != {**other.arguments, "lr": 0}


@dataclass(frozen=True)
class _Rule:
    """Translation of an optimizer's parameter group options to arguments of a kernel."""

    taken: tuple[str, ...]  # options that the kernel has
    unset: tuple[str, ...]  # options that the kernel lacks: they must be off


_OF_ADAM = ("betas", "eps", "weight_decay")
_OF_ADAGRAD = _Rule(("eps",), ("lr_decay", "weight_decay", "initial_accumulator_value", "maximize"))

_RULES = {
    "SGD": _Rule((), ("momentum", "weight_decay", "maximize")),
    "Adagrad": _OF_ADAGRAD,
    "RowWiseAdagrad": _OF_ADAGRAD,
    # fbgemm decays weights as AdamW does, separately from the gradient and not through it.
    "Adam": _Rule(("betas", "eps"), ("weight_decay", "amsgrad", "maximize")),
    "AdamW": _Rule(_OF_ADAM, ("amsgrad", "maximize")),
    "PartialRowWiseAdam": _Rule(_OF_ADAM, ()),
    "LAMB": _Rule(_OF_ADAM, ()),
    "PartialRowWiseLAMB": _Rule(_OF_ADAM, ()),
    "LarsSGD": _Rule(("momentum", "weight_decay"), ()),
}


_STATES = {"SGD": (), "Adagrad": ("sum",), "RowWiseAdagrad": ("sum",), "Adam": ("exp_avg", "exp_avg_sq")}
"""Names of an ordinary optimizer's states of a table, in the order of the fused optimizer's."""


def fused_states(table: str, optimizer: TableOptimizer, saved: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], int]:
    """Translate an ordinary optimizer's saved state of a whole table into `state0` and `state1`, and its number of steps.

    Raises:
        TableOptimizerError: another optimizer has saved it.
    """
    names = _STATES.get(optimizer.kind.__name__)
    if names is None or any(name not in saved for name in names):
        raise TableOptimizerError(
            f"table {table}: the checkpoint has the optimizer states {', '.join(sorted(saved)) or 'of none'}, which are not "
            f"those of {optimizer.kind.__name__}: keep the optimizer of the checkpoint, or load its weights only, with "
            "load_from_checkpoint"
        )
    states = {f"state{i}": saved[name] for i, name in enumerate(names)}
    if optimizer.kind.__name__ == "RowWiseAdagrad":
        states = {what: values.reshape(-1) for what, values in states.items()}
    return states, int(saved.get("step", 0))


def in_backward(table: str, optimizer: Any, group: Mapping[str, Any], device_type: str) -> TableOptimizer:
    """Return an optimizer that trains `table` as `optimizer` would, in the parameter group that contains the table.

    Raises:
        TableOptimizerError: no kernel does.
    """
    kind = type(optimizer)
    name = kind.__name__
    known = sorted(set(ON_CPU if device_type == "cpu" else _RULES))
    ways_out = (
        f"Train it with one of {', '.join(known)}, apply one of them yourself with "
        "torch.distributed.optim._apply_optimizer_in_backward, or keep the table whole on every worker, where any optimizer "
        f"trains it: sharding_constraints={{{table.split('.')[-1]!r}: ParameterConstraints(sharding_types=['data_parallel'])}}"
    )
    is_stock = kind.__module__.startswith(("torch.optim.", "torchrec.optim."))
    if not is_stock or name not in known:
        where = "on CPU" if device_type == "cpu" else "in its backward pass"
        raise TableOptimizerError(f"table {table}: fbgemm has no kernel to train it with {name} {where}. {ways_out}")
    rule = _RULES[name]
    for option in rule.unset:
        if value := group.get(option, optimizer.defaults.get(option)):
            raise TableOptimizerError(
                f"table {table}: fbgemm's kernel for {name} has no {option}, which is {value} here. Give the table a parameter "
                f"group or an optimizer of its own without it. {ways_out}"
            )
    arguments: dict[str, Any] = {"lr": float(group["lr"])}
    for option in rule.taken:
        if option == "betas":
            arguments["beta1"], arguments["beta2"] = (float(beta) for beta in group["betas"])
        elif option in group:
            arguments[option] = float(group[option])
    return TableOptimizer(torch.optim.Adam if name == "AdamW" else kind, arguments)


@dataclass(frozen=True)
class _Tie:
    """A further reference to a module: `parent.name` is the module at `path`."""

    parent: nn.Module
    name: str
    path: str


class Templates:
    """The unsharded embedding collections of a module, on `meta`. torchrec shards fresh copies of them for every world.

    A collection with several paths in the model, as in two towers with common tables, has the first of them here. The sharded
    one is put at all of them.

    Args:
        module: holds the collections; copies take their places in it.
        module_types: types that one of the sharders can shard.
        may_be_none: whether the module may have no collection.

    Attributes:
        by_path: the collections, by their first paths.
        given: values of the tables that were not on `meta`, by table, in the user's own memory.

    Raises:
        PlanError: the model has no collection, or one that cannot be sharded again.
    """

    def __init__(
        self, module: nn.Module, module_types: Collection[type], device: torch.device, may_be_none: bool = False
    ) -> None:
        self._module = module
        self.by_path: dict[str, nn.Module] = {}
        self.given: dict[str, torch.Tensor] = {}
        for path, part in module.named_modules():
            if "ManagedCollision" in type(part).__name__ and device.type == "cpu":
                raise PlanError(
                    f"{path}: {type(part).__name__} cannot be trained on CPU (fbgemm has no kernel to evict rows); "
                    "use a plain EmbeddingBagCollection, or a GPU"
                )
            if type(part) in module_types:
                self.by_path[path] = on_meta(part)
                self.given |= {key_of(path, table): values for table, values in values_of(part).items()}
            elif isinstance(part, tuple(module_types)):
                base = next(base.__name__ for base in type(part).__mro__ if base in module_types)
                raise PlanError(
                    f"{path}: torchrec has no sharder for {type(part).__name__}, and would replace it by a sharded {base} "
                    f"without its own methods: make it a module that has an {base}, or set DLRoverStrategy(sharders=[...]) to "
                    "one with this module_type"
                )
        if not self.by_path and not may_be_none:
            raise PlanError("the module has no embedding collection that one of the sharders can shard")
        first_paths = {id(module.get_submodule(path)): path for path in self.by_path}
        self._paths: dict[str, list[str]] = {path: [] for path in self.by_path}
        for path, part in module.named_modules(remove_duplicate=False):
            if id(part) in first_paths:
                self._paths[first_paths[id(part)]].append(path)
        self._refuse_shared_parameters()
        self._ties = [tie for tie in _ties_in(module) if any(f"{path}.".startswith(f"{tie.path}.") for path in self.by_path)]

    def _refuse_shared_parameters(self) -> None:
        """Raise an error for a table that another module shares, which would not be trained with the sharded table."""
        holders: dict[int, list[str]] = {}
        for path, part in self._module.named_modules():
            for name, parameter in part.named_parameters(recurse=False):
                holders.setdefault(id(parameter), []).append(key_of(path, name))
        for name, parameter in self._module.named_parameters():
            shared = holders[id(parameter)]
            if len(shared) > 1 and any(each.startswith(f"{path}.") for each in shared for path in self.by_path):
                raise PlanError(
                    f"{' and '.join(shared)} are one parameter ({name}): a table that is sharded cannot be shared as a tensor; "
                    "refer to its collection from both places instead"
                )

    def install(self) -> None:
        """Put fresh copies into the module."""
        for path, template in self.by_path.items():
            set_submodule(self._module, path, with_parameters(template))
        self._tie()

    def _tie(self) -> None:
        """Make all references to a collection lead to the one at its first path."""
        for tie in self._ties:
            tie.parent.add_module(tie.name, self._module.get_submodule(tie.path))

    @contextlib.contextmanager
    def once(self) -> Iterator[None]:
        """Show every collection at its first path only: torchrec would shard it again at each of the others."""
        for tie in self._ties:
            tie.parent.add_module(tie.name, nn.Module())
        try:
            yield
        finally:
            self._tie()

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Remove the collections from the module inside the block, sharded or not."""
        parts = {path: self._module.get_submodule(path) for path in self.by_path}
        try:
            for path in parts:
                set_submodule(self._module, path, nn.Module())
            self._tie()
            yield
        finally:
            for path, part in parts.items():
                set_submodule(self._module, path, part)
            self._tie()

    # --- contents of the module ----------------------------------------------------------------------------------------

    def path_of(self, module: nn.Module) -> str:
        return next(path for path in self.by_path if self._module.get_submodule(path) is module)

    def kernels(self) -> Iterator[tuple[str, Any]]:
        """Yield all kernels of the sharded collections, each with the path of its collection."""
        for path in self.by_path:
            for kernel in kernels_in(self._module.get_submodule(path)):
                yield path, kernel

    # --- tables and their parameters -----------------------------------------------------------------------------------

    def configs(self) -> dict[str, Any]:
        """Return torchrec's configurations, by table."""
        return {key_of(path, c.name): c for path, template in self.by_path.items() for c in configs_of(template)}

    def parameters(self) -> Iterator[tuple[str, str, nn.Parameter]]:
        """Yield the name in the module's state dict, the table, and the parameter of all tables."""
        for path, template in self.by_path.items():
            for name, parameter in template.named_parameters():
                yield key_of(path, name), key_of(path, name.split(".")[-2]), parameter

    def all_names(self) -> dict[str, list[str]]:
        """Return all names of each parameter in the module's state dict, by the first of them."""
        return {
            key_of(path, name): [key_of(each, name) for each in self._paths[path]]
            for path, template in self.by_path.items()
            for name, _ in template.named_parameters()
        }

    @property
    def num_bytes(self) -> int:
        """Approximate size of all tables and of their optimizer states, counted as for training on CPU."""
        total = 0
        for _, _, parameter in self.parameters():
            optimizers = [each.__name__ for each in applied_optimizer(parameter)]
            states = parameter.shape[0] if "RowWiseAdagrad" in optimizers else parameter.numel() * ("Adagrad" in optimizers)
            total += parameter.nbytes + 4 * states
        return total

    @property
    def num_addresses(self) -> int:
        """Addresses for weights and row-wise states of all tables, twice for a new cut of columns, and half of it for gaps."""
        return sum(3 * (p.nbytes + 4 * p.shape[0]) + (16 << 20) for _, _, p in self.parameters())

    # --- optimizers ----------------------------------------------------------------------------------------------------

    def train_with(self, optimizers: Mapping[str, TableOptimizer], are_apart: bool) -> None:
        """Apply these optimizers, by parameter name, in the backward pass of copies that are installed from now on."""
        for name, _, parameter in self.parameters():
            if (optimizer := optimizers.get(name)) is not None:
                # Applied to all, so that no kernel mixes them with optimizers that the script applied.
                apply_optimizer(parameter, optimizer.kind, {**optimizer.arguments, "use_one_tbe_per_table": are_apart})

    def inseparable(self, groups: Mapping[str, Hashable]) -> tuple[str, str] | None:
        """Return two tables of one collection in different groups; None: there are none."""
        for path, template in self.by_path.items():
            names = [key for name, _ in template.named_parameters() if (key := key_of(path, name)) in groups]
            for name in names[1:]:
                if groups[name] != groups[names[0]]:
                    return names[0], name
        return None


def _ties_in(module: nn.Module) -> list[_Tie]:
    """Return all references to modules that `module` contains already at an earlier path."""
    ties: list[_Tie] = []
    seen = {id(module): ""}

    def look(parent: nn.Module, path: str) -> None:
        for name, part in parent._modules.items():
            if part is None:
                continue
            if id(part) in seen:
                ties.append(_Tie(parent, name, seen[id(part)]))
            else:
                seen[id(part)] = key_of(path, name)
                look(part, key_of(path, name))

    look(module, "")
    return ties
