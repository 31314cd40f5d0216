"""The embedding collections of one model before they are sharded."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass
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
    values_of,
    with_parameters,
)

__all__ = ["Templates"]


@dataclass(frozen=True)
class _Tie:
    """A further reference to a module: `parent.name` is the module at `path`."""

    parent: nn.Module
    name: str
    path: str


class Templates:
    """The unsharded embedding collections of a module, on `meta`. torchrec shards fresh copies of them for every world.

    A collection that a model refers to by several paths, as two towers with common tables do, has the first of them here, and
    the sharded one gets all of them.

    Args:
        module: holds the collections; copies take their places in it.
        module_types: types that one of the sharders can shard.

    Attributes:
        by_path: the collections, by their first paths.
        given: values of the tables that were not on `meta`, by table. They are the user's own memory.

    Raises:
        PlanError: there is no collection, or one that cannot be sharded again.
    """

    def __init__(self, module: nn.Module, module_types: Collection[type], device: torch.device) -> None:
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
        if not self.by_path:
            raise PlanError("the module has no embedding collection that one of the sharders can shard")
        first_paths = {id(module.get_submodule(path)): path for path in self.by_path}
        self._paths: dict[str, list[str]] = {path: [] for path in self.by_path}
        for path, part in module.named_modules(remove_duplicate=False):
            if id(part) in first_paths:
                self._paths[first_paths[id(part)]].append(path)
        self._refuse_shared_parameters()
        self._ties = [tie for tie in _ties_in(module) if any(f"{path}.".startswith(f"{tie.path}.") for path in self.by_path)]

    def _refuse_shared_parameters(self) -> None:
        """Raise an error for a table that another module has, too: a sharded one would train without it."""
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
        """Let all references to a collection lead to the one that is at its first path."""
        for tie in self._ties:
            tie.parent.add_module(tie.name, self._module.get_submodule(tie.path))

    @contextlib.contextmanager
    def once(self) -> Iterator[None]:
        """Show every collection at its first path only: torchrec would plan and shard it again at each of the others."""
        for tie in self._ties:
            tie.parent.add_module(tie.name, nn.Module())
        try:
            yield
        finally:
            self._tie()

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Remove the collections from the module for a while, sharded or not."""
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
        """Return all names that each parameter has in the module's state dict, by the first of them."""
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
