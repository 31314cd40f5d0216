"""The embedding collections of one model before they are sharded."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Hashable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from lightning_dlrover.tables.optimizers import TableOptimizer
from lightning_dlrover.tables.placement import PlanError
from lightning_dlrover.tables.torchrec_parts import (
    applied_optimizer,
    apply_optimizer,
    configs_of,
    kernels_in,
    key_of,
    on_meta,
    set_submodule,
    with_parameters,
)

__all__ = ["Templates"]


class Templates:
    """The unsharded embedding collections of a module, on `meta`. torchrec shards fresh copies of them for every world.

    Args:
        module: holds the collections; copies take their places in it.
        module_types: types that one of the sharders can shard.

    Raises:
        PlanError: there is no collection, or one that cannot be sharded again.
    """

    def __init__(self, module: nn.Module, module_types: Collection[type], device: torch.device) -> None:
        self._module = module
        self.by_path: dict[str, nn.Module] = {}
        for path, part in module.named_modules():
            if "ManagedCollision" in type(part).__name__ and device.type == "cpu":
                raise PlanError(
                    f"{path}: {type(part).__name__} cannot be trained on CPU (fbgemm has no kernel to evict rows); "
                    "use a plain EmbeddingBagCollection, or a GPU"
                )
            if type(part) in module_types:
                self.by_path[path] = on_meta(part)
        if not self.by_path:
            raise PlanError("the module has no embedding collection that one of the sharders can shard")

    def install(self) -> None:
        """Put fresh copies into the module."""
        for path, template in self.by_path.items():
            set_submodule(self._module, path, with_parameters(template))

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Remove the collections from the module for a while, sharded or not."""
        parts = {path: self._module.get_submodule(path) for path in self.by_path}
        try:
            for path in parts:
                set_submodule(self._module, path, nn.Module())
            yield
        finally:
            for path, part in parts.items():
                set_submodule(self._module, path, part)

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
                # Applied in any case, so that a kernel holds no table with an optimizer applied by the script.
                apply_optimizer(parameter, optimizer.kind, {**optimizer.arguments, "use_one_tbe_per_table": are_apart})

    def inseparable(self, groups: Mapping[str, Hashable]) -> tuple[str, str] | None:
        """Return two tables of one collection in different groups; None: there are none."""
        for path, template in self.by_path.items():
            names = [key for name, _ in template.named_parameters() if (key := key_of(path, name)) in groups]
            for name in names[1:]:
                if groups[name] != groups[names[0]]:
                    return names[0], name
        return None
