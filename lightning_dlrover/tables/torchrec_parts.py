"""Access to the parts of torchrec's modules: find, copy and replace them.

All private names of torchrec are in this file, and those that torch gives to parameters with an optimizer of their own.
`torchrec_build` replaces public ones only.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_dlrover.private_names import check_names
from lightning_dlrover.tables.layout import Region
from lightning_dlrover.tables.placement import PlanError

__all__ = [
    "NAMES",
    "TorchrecMissingError",
    "applied_optimizer",
    "apply_optimizer",
    "check_torchrec",
    "configs_of",
    "copy_applied_optimizer",
    "default_sharders",
    "forget_groups",
    "has_tables",
    "held_by",
    "keep_order",
    "kernels_in",
    "key_of",
    "on_meta",
    "optimizer_states",
    "region_of",
    "set_submodule",
    "shard",
    "values_of",
    "with_parameters",
]

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
"""Names that this file and `torchrec_build` use or replace, by their holder, as `check_names` takes them."""


class TorchrecMissingError(ImportError):
    """torchrec is needed, but missing or impossible to load."""


def has_tables(module: nn.Module) -> bool:
    """Return whether `module` has embedding collections of torchrec to shard. Imports torchrec only if so."""
    names = {base.__name__ for m in module.modules() for base in type(m).__mro__ if base.__module__.startswith("torchrec.")}
    return bool(names & {"EmbeddingBagCollection", "EmbeddingCollection", "ShardedEmbeddingModule"})


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
    grid = ShardingType.GRID_SHARD.value  # its shards cannot be reassigned, see `placement.replan`

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
    """Return the values of a collection's tables that are not on `meta`, by the table's name, in the tables' own precision."""
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
    """Make torchrec rebuild its sub-groups: otherwise the others would wait for a newcomer to take part in building them."""
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
