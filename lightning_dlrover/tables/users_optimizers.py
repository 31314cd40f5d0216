"""Tables in the optimizers of the user's script.

Tables that are trained in their backward pass leave the user's optimizers. They follow the learning rates of the parameter
groups that they have left. Tables that every worker holds whole stay in the optimizers.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_dlrover.tables.optimizers import TableOptimizer, TableOptimizerError, in_backward
from lightning_dlrover.tables.sharded import ShardedTables

__all__ = ["UsersOptimizers"]


class UsersOptimizers:
    """The optimizers of one `fit` after another, which all train the same tables."""

    def __init__(self, tables: ShardedTables) -> None:
        self._tables = tables
        self._entries: list[list[list[tuple[str, Any]]]] = []  # names and parameters, by optimizer and group
        self._groups: dict[str, tuple[int, int]] = {}  # optimizer and group of each table that left them, by table name
        self._frozen: set[str] = set()  # tables that no optimizer trains

    def move_to_backward(self, optimizers: Sequence[Any], is_new: bool) -> None:
        """Train tables in the backward pass, unless they are trained there already.

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
        """Put into the optimizers, after each build of the tables, those that every worker holds whole, and no others."""
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
        """Split optimizer states of an unsharded run into those for the optimizers and those of sharded tables.

        Args:
            saved: one `state_dict` for each optimizer, whose groups have all parameters in the order of the script.

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
        """Give the tables the learning rates that schedulers have set in the parameter groups that they have left."""
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
