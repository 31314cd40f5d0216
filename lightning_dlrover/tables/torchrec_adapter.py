"""Builds torchrec's sharded modules in preallocated memory, again for every world, and without torchrec's warnings."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_dlrover.tables.arena import Arena
from lightning_dlrover.tables.layout import Region, Shard
from lightning_dlrover.tables.placement import Plan, TablePlan
from lightning_dlrover.tables.torchrec_parts import configs_of, held_by, key_of, region_of

__all__ = [
    "Placer",
    "fast_build",
    "first_plan",
    "gather_uneven_batches",
    "one_worker_per_node",
    "patched",
    "quiet",
    "torchrec_plan",
]


def first_plan(
    module: nn.Module,
    collections: Mapping[str, nn.Module],
    device: torch.device,
    sharders: Sequence[Any],
    constraints: Mapping[str, Any],
    members: Sequence[str],
    batch_size: int | None,
) -> dict[str, TablePlan]:
    """Return torchrec's own choice for `members`, worker ids in rank order. Deterministic.

    Args:
        collections: the collections by their paths in `module`.
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
def patched(owner: Any, name: str, value: object) -> Iterator[None]:
    """Replace an attribute of a module, a class or an object for a while."""
    is_own = name in vars(owner)
    former = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if is_own:
            setattr(owner, name, former)
        else:
            delattr(owner, name)  # restores the inherited attribute


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep torchrec's advice about its own calls out of the user's output, because these calls are our responsibility."""
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

    def weights(self, dtype: torch.dtype) -> torch.Tensor:
        return self._arena.values(dtype)

    def weight_offsets(self, dtype: torch.dtype) -> list[int]:
        """Return the offset of every table in `weights`, in values."""
        return self._offsets("weight", dtype, is_row_wise=False)

    def row_wise_states(self) -> torch.Tensor:
        return self._arena.values(torch.float32)

    def row_wise_state_offsets(self) -> list[int]:
        return self._offsets("state0", torch.float32, is_row_wise=True)

    def full_states(self, weights: torch.dtype) -> torch.Tensor:
        return self._arena.values(torch.float32, self._start_of_full_states(weights))

    def full_state_offsets(self, weights: torch.dtype, weight_offsets: Sequence[int]) -> list[int]:
        """Return the weights' offsets: fbgemm uses a weight's index for its state, whatever offsets it is given."""
        start = self._start_of_full_states(weights)
        self._offsets("state0", torch.float32, is_row_wise=False, beside=[start + 4 * at for at in weight_offsets])
        return list(weight_offsets)

    def _start_of_full_states(self, weights: torch.dtype) -> int:
        """Return the start in bytes: behind all weights, and for weights of half the width, which are further apart, behind
        the others' states."""
        return self._arena.num_bytes * (2 if weights.itemsize < 4 else 1)

    def _offsets(self, what: str, dtype: torch.dtype, is_row_wise: bool, beside: Sequence[int] | None = None) -> list[int]:
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
            at = beside[len(found)] - first if beside is not None and size else None
            start = self._arena.place(key, size, first, sum(sizes), at) if sum(sizes) else 0
            places = [start + before for before in itertools.accumulate([0, *sizes[:-1]])]
            found += [place // dtype.itemsize if num_bytes else None for place, num_bytes in zip(places, sizes, strict=True)]
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
        stack.enter_context(patched(kernels, "SplitTableBatchedEmbeddingBagsCodegen", _in_arena(placer)))
        for sharder in sharders:
            stack.enter_context(patched(sharder, "shard", _noting_path(placer, sharder.shard)))
        for base in (kernels.BaseBatchedEmbedding, kernels.BaseBatchedEmbeddingBag):
            stack.enter_context(patched(base, "__init__", _noting_tables(placer, base.__init__)))
            stack.enter_context(patched(base, "init_parameters", nothing))
        for collection in (ShardedEmbeddingBagCollection, ShardedEmbeddingCollection):
            stack.enter_context(patched(collection, "reset_parameters", nothing))
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
            buffers: dict[str, torch.Tensor] = {}
            offsets: list[list[int]] = []  # ordered like fbgemm's requests
            is_on_host = all(spec[2] == EmbeddingLocation.HOST for spec in embedding_specs)
            is_float = precision in (SparseType.FP32, SparseType.FP16, SparseType.BF16)
            if is_on_host and is_float:  # without any rows, too: fbgemm would take a kernel with empty memory for a GPU's
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

            with patched(training, "construct_split_state", placed):
                super().__init__(embedding_specs, *args, **kwargs)
            if is_on_host:
                # fbgemm's backward pass looks for the next table with rows, behind the last one too.
                rows: torch.Tensor = self.hash_size_cumsum  # type: ignore[has-type]
                self.hash_size_cumsum = torch.cat([rows, rows[-1:] + 1])
            if "weights" in buffers:
                # It spans all addresses, of which this worker uses few, so optimizers and summaries must not count it.
                object.__setattr__(self, "weights_host", self._parameters.pop("weights_host"))

    return InArena
