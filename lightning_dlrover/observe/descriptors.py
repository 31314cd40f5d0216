"""Properties of a model that do not depend on its hardware: work per sample, bytes sent, and bytes held.

Each process observes one forward pass: `with watch: training_step(...)`.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_flop

__all__ = ["Descriptors", "ForwardWatch", "dense_gradient_bytes", "embedding_bytes", "uses_dynamo"]

FORWARD_AND_BACKWARD = 3
"""Ratio of both passes' FLOPs to the forward pass's. Backward computes two products for each one (Kaplan et al., 2020,
section 2.1)."""


@dataclass(frozen=True)
class Descriptors:
    """One sample's share of the work of a forward and backward pass, outside and inside of tables; 0 where unknown."""

    dense_flops: int = 0
    lookups_per_sample: float = 0.0


class ForwardWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the FLOPs and the looked-up rows of the computation inside its block, once.

    Operations without a formula in torch count nothing, and errors of a formula never reach the observed code. Code compiled by
    `torch.compile` runs unobserved, so nothing is known where Dynamo is in use.

    Args:
        module: the model; its sharded tables are observed, too.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0
        self.lookups = 0
        self._module = module
        self._hooks = ExitStack()

    def descriptors(self, num_samples: int) -> Descriptors:
        """Return the descriptors of one of the samples in the observed pass."""
        if uses_dynamo(self._module):
            return Descriptors()
        return Descriptors(FORWARD_AND_BACKWARD * self.flops // num_samples, self.lookups / num_samples)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return whether Dynamo compiles within the block. Otherwise it skips each frame it meets there permanently."""
        return True

    def __enter__(self) -> ForwardWatch:
        self.flops = self.lookups = 0  # a failed step is repeated
        for part in self._module.modules():
            if tables := _sharded_tables(part):
                handle = part.register_forward_pre_hook(lambda _, inputs, tables=tables: self._look_up(tables, inputs))
                self._hooks.callback(handle.remove)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._hooks.close()
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        # With manual optimization the block includes the backward pass, which has a graph task.
        if torch._C._current_graph_task_id() == -1:
            with suppress(Exception):  # a formula may not fit these arguments; the user's step must go on
                self._count(func, args, kwargs, result)
        return result

    def _count(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        packet = getattr(func, "_overloadpacket", func)
        name = getattr(packet, "__name__", "")
        if (formula := flop_registry.get(packet)) is not None:
            self.flops += formula(*args, **kwargs, out_val=result)
        elif name.startswith("_scaled_dot_product") and "backward" not in name:  # CPU kernels, absent from torch's registry
            self.flops += sdpa_flop(*args[:3])
        elif name == "embedding" or name.startswith("_embedding_bag"):
            self.lookups += args[1].numel()

    def _look_up(self, tables: list[Any], inputs: tuple[Any, ...]) -> None:
        with suppress(Exception):  # torchrec itself reports wrong features
            for features in inputs:
                rows = dict(zip(features.keys(), features.length_per_key(), strict=True))
                self.lookups += sum(rows.get(name, 0) for table in tables for name in table.feature_names)


def uses_dynamo(module: nn.Module) -> bool:
    """Return whether parts of `module` are compiled, or Dynamo has met any code of this process."""
    if any(getattr(part, "_compiled_call_impl", None) is not None or hasattr(part, "_orig_mod") for part in module.modules()):
        return True
    convert_frame = sys.modules.get("torch._dynamo.convert_frame")
    return convert_frame is not None and bool(convert_frame.input_codes.seen)


def embedding_bytes(module: nn.Module) -> int:
    """Return the bytes of all tables in `module`, including those on other workers."""
    total = 0
    for part in module.modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag):
            total += part.weight.nbytes
        total += sum(t.num_embeddings * t.embedding_dim * _item_bytes(t) for t in _sharded_tables(part))
    return total


def dense_gradient_bytes(module: nn.Module, sharded: Collection[str]) -> int:
    """Return the bytes of the gradients that data-parallel workers reduce in every step.

    Args:
        sharded: names of parameters that differ between workers. Tables with sparse gradients do not count either, because
            only their looked-up rows are sent.
    """
    sparse = {id(p) for m in module.modules() if getattr(m, "sparse", False) for p in m.parameters(recurse=False)}
    return sum(p.nbytes for n, p in module.named_parameters() if p.requires_grad and n not in sharded and id(p) not in sparse)


def _sharded_tables(part: nn.Module) -> list[Any]:
    """Return torchrec's table configurations if `part` is one of its sharded collections; torchrec need not be installed."""
    if not type(part).__name__.startswith("Sharded"):
        return []
    return list(getattr(part, "_embedding_bag_configs", None) or getattr(part, "_embedding_configs", None) or ())


def _item_bytes(table: Any) -> int:
    kinds = {"FP16": 2, "BF16": 2, "INT8": 1, "UINT8": 1}
    return kinds.get(getattr(getattr(table, "data_type", None), "name", ""), torch.float32.itemsize)
