"""Tables with given weights on several workers, before and after a change, against one unsharded model of torchrec.

Runs in worker processes. Each worker has weights of its own, of which the first worker's must count.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import PrefixStore, ProcessGroupGloo  # type: ignore[attr-defined]

from lightning_dlrover.tables.exchange import exchange
from lightning_dlrover.tables.layout import Plan, layout_of, plan_from_dict, plan_moves, plan_to_dict, replan
from lightning_dlrover.tables.sharded import ShardedTables
from lightning_dlrover.tables.snapshots import SnapshotConfig
from tests.tables.resharding_oracle import (
    CPU,
    RATE,
    Case,
    Model,
    State,
    Table,
    batch_of,
    constraints,
    gather,
    join_world,
    leave_world,
    train_step,
)
from tests.tables.worker_pool import Worker

TABLES = [
    Table("rows", 5000, 8, "row_wise"),  # more rows than are drawn from one seed
    Table("rows5", 5, 8, "row_wise"),
    Table("whole", 33, 8, "table_wise"),
    Table("everywhere", 40, 8, "data_parallel"),
]
COLUMNS = Table("columns", 101, 16, "column_wise")  # its row-wise states are not those of an unsharded table
SEQUENCES = [Table("seq_rows", 3, 8, "row_wise")]  # some workers have no row
WAYS = ("given", "init_fn", "whole tables")


@dataclass(frozen=True)
class WeightsCase(Case):
    """One job whose tables begin with weights set in one of `WAYS`."""

    way: str = "given"

    @property
    def bags(self) -> list[Table]:
        return TABLES if self.optimizer == "rowwise_adagrad" else [*TABLES, COLUMNS]

    @property
    def sequences(self) -> list[Table]:
        return SEQUENCES


def reference(case: WeightsCase) -> Model:
    """Return the unsharded model with the weights that count."""
    torch.manual_seed(5)
    return Model(case, "cpu")


def model_of(case: WeightsCase, is_first: bool) -> Model:
    right = reference(case)
    if case.way == "given" and is_first:
        return right
    torch.manual_seed(6)
    model = Model(case, "cpu" if case.way == "given" else "meta")
    model.dense.load_state_dict(right.dense.state_dict())
    if case.way == "init_fn":
        for part, theirs in ((model.bags, right.bags), (model.sequences, right.sequences)):
            weights = {name.split(".")[-2]: p.detach() for name, p in theirs.named_parameters()}
            configs: Any = part.embedding_bag_configs() if part is model.bags else part.embedding_configs()
            for config in configs:
                config.init_fn = _copier(weights[config.name])
    return model


def _copier(weights: torch.Tensor) -> Any:
    return lambda table: table.copy_(weights)


class Unsharded:
    """Trains the reference as all workers together do."""

    def __init__(self, case: WeightsCase, data_parallel: set[str]) -> None:
        import torchrec

        self.case, self.model = case, reference(case)
        kinds: dict[str, Any] = {
            "sgd": torch.optim.SGD,
            "adagrad": torch.optim.Adagrad,
            "rowwise_adagrad": torchrec.optim.RowWiseAdagrad,
        }
        for part in (*self.model.bags.modules(), *self.model.sequences.modules()):
            for name, parameter in part.named_parameters(recurse=False):
                setattr(part, name, nn.Parameter(parameter.detach().clone()))  # has no optimizer in its backward pass
        tables = {n: p for n, p in self.model.named_parameters() if not n.startswith("dense.")}
        eps = {} if case.optimizer == "sgd" else {"eps": 1e-8}  # fbgemm's default
        whole = [p for n, p in tables.items() if n in data_parallel]
        self._tables = list(tables.values())
        self._optimizers = [
            kinds[case.optimizer]([p for n, p in tables.items() if n not in data_parallel], lr=RATE, **eps),
            torch.optim.SGD([*whole, *self.model.dense.parameters()], lr=RATE),
        ]

    def step(self, batches: Sequence[Any]) -> None:
        torch.stack([self.model(batch) for batch in batches]).sum().backward()  # type: ignore[no-untyped-call]
        for parameter in self._tables:  # torchrec averages tables' gradients, `train_step` adds up the others
            if parameter.grad is not None:
                parameter.grad /= len(batches)
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def compare(self, found: State, when: str, exactly: bool) -> list[str]:
        failures = []
        for name, parameter in self.model.named_parameters():
            if name.startswith("dense."):
                continue
            table = f"{name.split('.')[0]}.{name.split('.')[-2]}"
            ours, theirs = found[table, "weight"], parameter.detach()
            if not (torch.equal(ours, theirs) if exactly else torch.allclose(ours, theirs, rtol=1e-4, atol=1e-6)):
                failures.append(f"{when}: {table} differs by up to {float((ours - theirs).abs().max()):.3g}")
        return failures


def play_first_weights(worker: Worker, case: WeightsCase) -> list[str]:
    """Build, train, change the workers and train again; return what differs from the unsharded model."""
    me, store = worker.name, worker.store
    first, second = case.worlds
    failures: list[str] = []
    union = [*first, *(w for w in second if w not in first)]
    if me not in union:
        return []
    tables = ShardedTables(model_of(case, me == first[0]), CPU, constraints=constraints(case))
    old_plan: Plan = {}
    stock: Unsharded | None = None
    group = ProcessGroupGloo(PrefixStore("transfer", store), union.index(me), len(union))  # type: ignore[call-arg]
    for number, members in enumerate((first, second)):
        if me in members:
            join_world(PrefixStore(f"world{number}", store), me, members)
        plan: Plan = replan(old_plan, members) if old_plan else {}
        if number == 0 and me in first:
            plan = tables.first_plan(members)
        plan = _shared(store, f"plan{number}", plan, me == first[0])
        old = tables.blocks() if tables.is_built else []
        call = tables.build(plan, members) if me in members else None
        if number == 1:
            moves = plan_moves(layout_of(old_plan), layout_of(plan))
            exchange(group, union, me, moves, old, tables.blocks() if call is not None else [], tables.release)
            tables.drop_former()
            for parameter in tables.module.get_submodule("dense").parameters():
                group.broadcast(parameter.data, 0).wait()  # type: ignore[attr-defined]
        elif call is not None:
            given = tables.given() if me == first[0] else sorted(plan) if case.way == "given" else []
            tables.initialise(7, given, dist.group.WORLD if len(members) > 1 else None, members, me)
            if case.way == "whole tables":
                weights = {n: {"weight": p.detach()} for n, p in reference(case).named_parameters() if n[:5] != "dense"}
                tables.load_whole(weights)
        batches = [batch_of(case, 1000 * number + rank) for rank in range(len(members))]
        whole = {f"bags.embedding_bags.{t.name}.weight" for t in TABLES if t.kind == "data_parallel"}
        stock = stock or Unsharded(case, whole)
        if call is not None:
            assert tables.data_parallel_names() == whole
            if number == 0:
                failures += stock.compare(gather(tables.blocks(), plan, failures), "first", exactly=True)
            train_step(call, tables.data_parallel_names(), batches[members.index(me)])
        stock.step(batches)
        if call is not None:
            failures += stock.compare(gather(tables.blocks(), plan, failures), f"world {number}", exactly=False)
            call = None
            leave_world()
        old_plan = plan
    tables.close()
    return [f"{case.optimizer} {case.way} {first} {second}: {failure}" for failure in failures]


def play_outside_of_a_job(worker: Worker, case: WeightsCase) -> list[str]:
    """Build the tables as under Lightning's plain DDP; return what differs from the first worker's weights."""
    from lightning_dlrover.live.checkpoints import TablesOfTrainer, TablesSettings

    members = case.worlds[0]
    if worker.name not in members:
        return []
    join_world(worker.store, worker.name, members)
    module: Any = model_of(case, worker.name == members[0])
    settings = TablesSettings(constraints(case), None, SnapshotConfig())
    tables = TablesOfTrainer(module, CPU, settings, lambda module, ignored, syncs: module)
    tables.build(CPU)
    assert tables.sharded.plan is not None
    failures: list[str] = []
    found = gather(tables.sharded.blocks(), tables.sharded.plan, failures)
    failures += Unsharded(case, set()).compare(found, "plain DDP", exactly=True)
    assert tables.sharded.given() == []  # their memory is free again
    leave_world()
    return failures


def _shared(store: Any, key: str, plan: Plan, is_author: bool) -> Plan:
    if is_author:
        store.set(key, json.dumps(plan_to_dict(plan)))
    return plan_from_dict(json.loads(store.get(key)))
