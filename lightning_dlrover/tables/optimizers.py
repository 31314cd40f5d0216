"""Translate the user's optimizer of an embedding table into one that torchrec applies in the backward pass.

Sharded tables have no gradients for an ordinary optimizer: fbgemm's kernels update the rows of a batch while they compute its
gradients. Only optimizers that these kernels compute exactly as the user's are translated; others are rejected.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["TableOptimizer", "TableOptimizerError", "fused_states", "in_backward"]

ON_CPU = ("SGD", "Adagrad", "RowWiseAdagrad")
"""Optimizers with CPU kernels in fbgemm."""


class TableOptimizerError(ValueError):
    """A table that its optimizer from the script cannot train."""


@dataclass(frozen=True)
class TableOptimizer:
    """Optimizer of one table in its backward pass.

    Attributes:
        kind: class that torchrec translates to a kernel.
        arguments: the kernel's; `lr` is the initial rate.
    """

    kind: type
    arguments: Mapping[str, Any]

    def differs(self, other: TableOptimizer) -> bool:
        """Return whether more than the learning rate differs."""
        return self.kind is not other.kind or {**self.arguments, "lr": 0} != {**other.arguments, "lr": 0}


@dataclass(frozen=True)
class _Rule:
    """Translation of an optimizer's parameter group options to arguments of a kernel.

    Attributes:
        taken: options that the kernel has, too.
        unset: options that the kernel lacks: they must be off.
    """

    taken: tuple[str, ...] = ()
    unset: tuple[str, ...] = ("weight_decay", "maximize")


_OF_ADAM = ("betas", "eps", "weight_decay")

_RULES = {
    "SGD": _Rule(unset=("momentum", "weight_decay", "maximize")),
    "Adagrad": _Rule(("eps",), ("lr_decay", "weight_decay", "initial_accumulator_value", "maximize")),
    "RowWiseAdagrad": _Rule(("eps",), ("lr_decay", "weight_decay", "initial_accumulator_value", "maximize")),
    # fbgemm decays weights as AdamW does, beside the gradient instead of in it.
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
    """Translate the state that an ordinary optimizer has saved of a whole table.

    Returns:
        States by `state0` and `state1`, and the number of counted steps.

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
    """Return an optimizer that trains `table` as `optimizer` would.

    Args:
        group: the optimizer's parameter group that contains the table.

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
        if group.get(option, optimizer.defaults.get(option)):
            value = group.get(option, optimizer.defaults.get(option))
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
