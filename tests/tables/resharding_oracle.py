"""Trains sharded tables through changes of the workers and compares them with stock torchrec. Runs in worker processes.

Before and after each change all weights and optimizer states are gathered. They must be equal, bit for bit. Then they are
loaded into a model that stock torchrec builds from scratch for the new workers, and both make the same step. The results must
also be equal bit for bit, because both add the same numbers in the same order.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import PrefixStore, ProcessGroupGloo  # type: ignore[attr-defined]

from lightning_dlrover.tables import exchange as exchange_module
from lightning_dlrover.tables import torchrec_adapter as parts_module
from lightning_dlrover.tables.exchange import Block, ExchangeStats, exchange, part_of
from lightning_dlrover.tables.layout import (
    Plan,
    Region,
    Shard,
    TablePlan,
    layout_of,
    plan_from_dict,
    plan_moves,
    plan_to_dict,
    replan,
)
from lightning_dlrover.tables.sharded import ShardedTables
from tests.tables.worker_pool import WORKERS, Worker

CPU = torch.device("cpu")
LOCAL_BATCH_SIZE = 4
RATE = 0.1


@dataclass(frozen=True)
class Table:
    name: str
    rows: int
    cols: int
    kind: str = ""
    mean: bool = False
    num_features: int = 1


BAGS = [
    Table("whole", 33, 8, "table_wise"),
    Table("rows", 50, 8, "row_wise", num_features=2),
    Table("rows7", 7, 16, "row_wise", mean=True),
    Table("rows5", 5, 8, "row_wise"),
    Table("rows1", 1, 8, "row_wise"),
    Table("many_rows", 5000, 8, "row_wise"),
    Table("one", 1, 8, "table_wise"),
    Table("columns", 101, 16, "column_wise"),
    Table("whole_rows", 64, 8, "table_row_wise"),
    Table("whole_columns", 20, 16, "table_column_wise", mean=True),
    Table("everywhere", 40, 8, "data_parallel"),
]
# None is data_parallel: torchrec 1.8 itself cannot call such an EmbeddingCollection on CPU.
SEQUENCES = [
    Table("seq_whole", 9, 8, "table_wise"),
    Table("seq_rows", 7, 8, "row_wise"),
    Table("seq_columns", 30, 8, "column_wise"),
]
# Tables for manual plans with changing kinds. Columns are cut in 2, 3 or 6. The large one's row-wise state has several pages.
CHANGING_BAGS = [Table(f"bag{i}", rows, 24) for i, rows in enumerate([5000, 50, 7, 101, 1])] + [
    Table("everywhere", 40, 8, "data_parallel")
]
CHANGING_SEQUENCES = [Table(f"seq{i}", rows, 24) for i, rows in enumerate([4000, 7, 31])]
BAG_KINDS = ["table_wise", "row_wise", "column_wise", "table_row_wise", "table_column_wise"]
SEQUENCE_KINDS = ["table_wise", "row_wise", "column_wise"]
SHIFTS = [0, 1, 3, 6, 10, 10]  # rotations by 1, 2, 3, 4 and 0: every kind becomes every other
NUM_COLUMN_SHARDS = [3, 2, 3, 6, 2, 3]


@dataclass(frozen=True)
class Case:
    """One job.

    Attributes:
        optimizer: optimizer of the tables: sgd, rowwise_adagrad or adagrad.
        plans: source of the first placement: `constrained` (each table has its kind), `planner` (torchrec's choice), or
            `by_hand`, where kinds also change with the workers.
        worlds: worker names in rank order, one world after the other.
    """

    optimizer: str
    plans: str
    worlds: tuple[tuple[str, ...], ...]

    @property
    def bags(self) -> list[Table]:
        return CHANGING_BAGS if self.plans == "by_hand" else BAGS

    @property
    def sequences(self) -> list[Table]:
        return CHANGING_SEQUENCES if self.plans == "by_hand" else SEQUENCES


@dataclass(frozen=True)
class Outcome:
    failures: list[str]
    kinds: list[str]  # kinds by table and by world that included this worker
    stats: ExchangeStats


State = dict[tuple[str, str], torch.Tensor]
"""Values by table and `weight` or `state0`: shape ``(rows, cols)``. A row-wise state is repeated over its columns."""


# --- the job ------------------------------------------------------------------------------------------------------------------


class Model(nn.Module):
    def __init__(self, case: Case, device: str = "meta") -> None:
        import torchrec
        from torch.distributed.optim import _apply_optimizer_in_backward
        from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig, PoolingType

        super().__init__()
        self.bags = EmbeddingBagCollection(
            device=torch.device(device),
            tables=[
                EmbeddingBagConfig(
                    name=t.name,
                    embedding_dim=t.cols,
                    num_embeddings=t.rows,
                    feature_names=features(t),
                    pooling=PoolingType.MEAN if t.mean else PoolingType.SUM,
                )
                for t in case.bags
            ],
        )
        self.sequences = EmbeddingCollection(
            device=torch.device(device),
            tables=[
                EmbeddingConfig(name=t.name, embedding_dim=t.cols, num_embeddings=t.rows, feature_names=features(t))
                for t in case.sequences
            ],
        )
        optimizers = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "rowwise_adagrad": torchrec.optim.RowWiseAdagrad}
        for part in (self.bags, self.sequences):
            _apply_optimizer_in_backward(optimizers[case.optimizer], part.parameters(), {"lr": RATE})
        self.dense = nn.Linear(sum(t.cols * t.num_features for t in case.bags), 1)

    def _pooled(self, batch: Any) -> torch.Tensor:
        """Concatenate by name: stock torchrec's order follows the sharding."""
        pooled = self.bags(batch)
        return torch.cat([pooled[key] for key in sorted(pooled.keys())], 1)

    def forward(self, batch: Any) -> torch.Tensor:
        # Bounded gradients keep every optimizer stable.
        loss: torch.Tensor = self.dense(self._pooled(batch)).tanh().mean()
        for jagged in self.sequences(batch).values():
            loss = loss + jagged.values().sin().sum() / LOCAL_BATCH_SIZE
        return loss


def features(table: Table) -> list[str]:
    return [f"f_{table.name}_{i}" for i in range(table.num_features)]


def batch_of(case: Case, seed: int) -> Any:
    """Bags of 0 to 3 ids."""
    from torchrec import KeyedJaggedTensor

    random = torch.Generator().manual_seed(seed)
    keys, values, lengths = [], [], []
    for table in [*case.bags, *case.sequences]:
        for feature in features(table):
            keys.append(feature)
            lengths.append(torch.randint(0, 4, (LOCAL_BATCH_SIZE,), generator=random))
            values.append(torch.randint(0, table.rows, (int(lengths[-1].sum()),), generator=random))
    return KeyedJaggedTensor(keys=keys, values=torch.cat(values), lengths=torch.cat(lengths))


def train_step(call: nn.Module, data_parallel: set[str], batch: Any) -> torch.Tensor:
    """Return the loss. Tables are trained in the backward pass; dense parameters and replicated tables by plain SGD."""
    loss: torch.Tensor = call(batch)
    loss.backward()  # type: ignore[no-untyped-call]
    trained = {name: p for name, p in call.named_parameters() if name in data_parallel or name.startswith("dense.")}
    assert len(trained) == 2 + len(data_parallel)
    with torch.no_grad():
        for name, parameter in trained.items():
            assert parameter.grad is not None
            if name.startswith("dense."):
                dist.all_reduce(parameter.grad)
            parameter.sub_(RATE * parameter.grad)
    for parameter in trained.values():
        parameter.grad = None  # last, because replicated tables may be slices of one parameter
    return loss.detach()


# --- plans --------------------------------------------------------------------------------------------------------------------


def plan_by_hand(case: Case, number: int, members: Sequence[str]) -> dict[str, TablePlan]:
    plan = {}
    for part, group, kinds in (("bags", case.bags, BAG_KINDS), ("sequences", case.sequences, SEQUENCE_KINDS)):
        for i, table in enumerate(group):
            kind = table.kind or kinds[(i + SHIFTS[number]) % len(kinds)]
            owner = members[i % len(members)]
            if kind in ("column_wise", "table_column_wise"):
                count = NUM_COLUMN_SHARDS[number]
                width = table.cols // count
                shards = [
                    Shard(
                        members[(i + j) % len(members)] if kind == "column_wise" else owner,
                        Region(0, table.rows, j * width, (j + 1) * width),
                    )
                    for j in range(count)
                ]
            elif kind == "row_wise":
                block = -(-table.rows // len(members))
                shards = [
                    Shard(w, Region(min(j * block, table.rows), min((j + 1) * block, table.rows), 0, table.cols))
                    for j, w in enumerate(members)
                ]
            else:
                owners = members if kind == "data_parallel" else [owner]
                shards = [Shard(w, Region(0, table.rows, 0, table.cols)) for w in owners]
            kernel = "dense" if kind == "data_parallel" else "fused"
            plan[f"{part}.{table.name}"] = TablePlan(kind, kernel, table.rows, table.cols, tuple(shards))
    return plan


def first_plan(case: Case, tables: ShardedTables, members: Sequence[str]) -> dict[str, TablePlan]:
    return plan_by_hand(case, 0, members) if case.plans == "by_hand" else tables.first_plan(members)


def join_world(store: Any, me: str, members: Sequence[str]) -> None:
    dist.init_process_group("gloo", store=store, rank=members.index(me), world_size=len(members))


def leave_world() -> None:
    """End the process group once all its workers are done."""
    dist.barrier()
    dist.destroy_process_group()


def stock_plan(model: Model, plan: Plan, members: Sequence[str]) -> Any:
    """Plan for the same tables on the same workers, built by torchrec's own helpers."""
    from torchrec.distributed import sharding_plan as helpers
    from torchrec.distributed.types import ShardingPlan

    def generator(table: TablePlan) -> Any:
        ranks = [members.index(s.owner) for s in table.shards]

        def table_column_wise(*args: Any) -> Any:
            sharding = helpers.column_wise(ranks=ranks, compute_kernel=table.kernel)(*args)
            sharding.sharding_type = "table_column_wise"
            return sharding

        return {
            "table_wise": lambda: helpers.table_wise(ranks[0], compute_kernel=table.kernel),
            "row_wise": lambda: helpers.row_wise(compute_kernel=table.kernel),
            "column_wise": lambda: helpers.column_wise(ranks=ranks, compute_kernel=table.kernel),
            "table_row_wise": lambda: helpers.table_row_wise(host_index=ranks[0]),
            "table_column_wise": lambda: table_column_wise,
            "data_parallel": helpers.data_parallel,
        }[table.kind]()

    by_module = {}
    for path in ("bags", "sequences"):
        generators = {name.split(".")[1]: generator(t) for name, t in plan.items() if name.startswith(f"{path}.")}
        by_module[path] = helpers.construct_module_sharding_plan(
            model.get_submodule(path), generators, local_size=1, world_size=len(members), device_type="cpu"
        )
    return ShardingPlan(by_module)


def stock_model(case: Case, plan: Plan, members: Sequence[str]) -> Any:
    """Model built by torchrec alone."""
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.types import ShardingEnv

    model = Model(case, device="cpu")
    parts_module.forget_groups()
    with mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": "1"}):
        return DistributedModelParallel(
            module=model,
            env=ShardingEnv.from_process_group(dist.group.WORLD),
            device=CPU,
            plan=stock_plan(model, plan, members),
            init_data_parallel=False,  # `train_step` reduces the dense parameters
        )


# --- comparing ----------------------------------------------------------------------------------------------------------------


def stock_blocks(model: Any) -> list[Block]:
    blocks = []
    for path in ("bags", "sequences"):
        for kernel in parts_module.kernels_in(model.module.get_submodule(path)):
            tables = kernel.config.embedding_tables
            states = parts_module.optimizer_states(kernel.emb_module, len(tables))
            for table, weight, of_table in zip(tables, kernel.emb_module.split_embedding_weights(), states, strict=True):
                region = parts_module.held_by(table)
                values = [weight.detach(), *of_table]
                for what, tensor in zip(["weight", "state0", "state1"], values, strict=False):
                    blocks.append(Block(f"{path}.{table.name}", what, region, tensor))
    return blocks


def gather(blocks: Sequence[Block], plan: Plan, failures: list[str]) -> State:
    mine = [(b.table, b.what, b.region, b.values.clone()) for b in blocks]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    state: State = {}
    for table, what, region, values in (entry for worker in everyone for entry in worker):
        whole = state.setdefault((table, what), torch.full((plan[table].rows, plan[table].cols), torch.nan))
        part = whole[region.row0 : region.row1, region.col0 : region.col1]
        wide = values if values.dim() == 2 else values[:, None].expand_as(part)
        if plan[table].kind == "data_parallel" and not part.isnan().all() and not torch.equal(part, wide):
            failures.append(f"{table} {what}: replicas differ")
        part.copy_(wide)
    failures += [f"{key}: nobody has all of it" for key, values in state.items() if values.isnan().any()]
    return state


def expected_after(before: State, plan: Plan, row_wise_states: bool) -> tuple[State, set[tuple[str, str]]]:
    """Expected states, and the keys of those that match only nearly: means over columns are sums in any order."""
    after, nearly = dict(before), set()
    for (table, what), values in before.items():
        if what == "weight" or not row_wise_states:
            continue
        after[table, what] = values.clone()
        for shard in plan[table].shards:
            region = shard.region
            old = values[region.row0 : region.row1, region.col0 : region.col1]
            if region.num_values and not bool((old == old[:, :1]).all()):
                nearly.add((table, what))
                after[table, what][region.row0 : region.row1, region.col0 : region.col1] = (
                    old.double().mean(1, keepdim=True).float()
                )
    return after, nearly


def compare(what: str, expected: State, found: State, nearly: set[tuple[str, str]], plan: Plan, failures: list[str]) -> None:
    if expected.keys() != found.keys():
        failures.append(f"{what}: {sorted(expected.keys() ^ found.keys())} on one side only")
    for key in expected.keys() & found.keys():
        a, b = expected[key], found[key]
        if not (torch.allclose(a, b, rtol=1e-6, atol=0.0) if key in nearly else torch.equal(a, b)):
            rows = sorted({int(r) for r in (a != b).nonzero()[:, 0]})
            failures.append(
                f"{what}: {key}, now {plan[key[0]].kind}, {len(rows)} rows differ, from {rows[0]} to {rows[-1]}, by up to "
                f"{float((a - b).abs().max()):.3g}"
            )


def fill(blocks: Sequence[Block], state: State) -> None:
    for block in blocks:
        r = block.region
        values = state[block.table, block.what][r.row0 : r.row1, r.col0 : r.col1]
        block.values.copy_(values if block.values.dim() == 2 else values[:, 0] if r.num_cols else values.sum(1))


# --- playing ------------------------------------------------------------------------------------------------------------------


def play(worker: Worker, case: Case) -> Outcome:
    me, store = worker.name, worker.store
    failures: list[str] = []
    kinds: list[str] = []
    total = ExchangeStats()
    torch.manual_seed(0)
    model = Model(case)
    dense = model.dense.weight
    tables = ShardedTables(model, CPU, constraints=constraints(case))
    plan: dict[str, TablePlan] = {}
    before: State = {}
    previous: tuple[str, ...] = ()
    for number, members in enumerate(case.worlds):
        union = sorted({*members, *previous})
        name = f"{case.optimizer} {case.plans} {number}: {previous} -> {members}"
        if me not in union:
            previous = members
            continue
        group = ProcessGroupGloo(PrefixStore(f"transfer{number}", store), union.index(me), len(union)) if previous else None  # type: ignore[call-arg]
        if me in members:
            join_world(PrefixStore(f"world{number}", store), me, members)
        if not previous:
            plan = first_plan(case, tables, members)
        else:
            if me == previous[0]:
                store.set(f"plan{number}", json.dumps(plan_to_dict(plan)))
            old_plan = plan_from_dict(json.loads(store.get(f"plan{number}")))
            plan = plan_by_hand(case, number, members) if case.plans == "by_hand" else replan(old_plan, members)
        old_blocks = tables.blocks() if me in previous else []
        call = tables.build(plan, members) if me in members else None
        new_blocks = tables.blocks() if call is not None else []
        if previous:
            moves = plan_moves(layout_of(old_plan), layout_of(plan))
            stats = exchange(group, union, me, moves, old_blocks, new_blocks, tables.release)
            total.sent_bytes += stats.sent_bytes
            total.received_bytes += stats.received_bytes
            total.copied_bytes += stats.copied_bytes
            # Dense parameters travel separately: here, from any worker that was there before.
            source = union.index(next(w for w in previous if w in union))
            for parameter in model.dense.parameters():
                group.broadcast(parameter.data, source).wait()  # type: ignore[union-attr]
        else:
            tables.initialise(7)
        old_blocks = []
        tables.drop_former()
        group = None
        if call is not None:
            assert model.dense.weight is dense
            kinds += sorted({t.kind for t in plan.values()})
            found = gather(tables.blocks(), plan, failures)
            if me in previous:
                expected, nearly = expected_after(before, plan, case.optimizer == "rowwise_adagrad")
                compare(f"{name}, exchanged", expected, found, nearly, plan, failures)
            compare_with_stock(case, name, call, model, tables, found, plan, members, number, failures)
            train_step(call, tables.data_parallel_names(), batch_of(case, 1000 * number + 500 + members.index(me)))
            before = gather(tables.blocks(), plan, failures)
            call = None
            leave_world()
        else:
            tables.reset()
        previous = members
    tables.close()
    return Outcome(failures, kinds, total)


def constraints(case: Case) -> dict[str, Any] | None:
    from torchrec.distributed.planner import ParameterConstraints

    if case.plans != "constrained":
        return None
    return {t.name: ParameterConstraints(sharding_types=[t.kind], min_partition=4) for t in [*case.bags, *case.sequences]}


def compare_with_stock(
    case: Case,
    name: str,
    call: nn.Module,
    model: Model,
    tables: ShardedTables,
    state: State,
    plan: Plan,
    members: Sequence[str],
    number: int,
    failures: list[str],
) -> None:
    """Make the same step with both models from the same state, and compare the results."""
    stock = stock_model(case, plan, members)
    stock.module.dense.load_state_dict(model.dense.state_dict())
    fill(stock_blocks(stock), state)
    batch = batch_of(case, 1000 * number + dist.get_rank())
    data_parallel = tables.data_parallel_names()
    ours = train_step(call, data_parallel, batch)
    theirs = train_step(stock.module, data_parallel, batch)
    if not torch.equal(ours, theirs):
        failures.append(f"{name}: loss {ours} where stock torchrec has {theirs}")
    if not torch.equal(model.dense.weight, stock.module.dense.weight):
        failures.append(f"{name}: dense parameters differ from stock torchrec's after a step")
    mine, stocks = ({(b.table, b.what, b.region): b.values for b in found} for found in (tables.blocks(), stock_blocks(stock)))
    if mine.keys() != stocks.keys():
        failures.append(f"{name}: blocks {mine.keys() ^ stocks.keys()} are not where stock torchrec has them")
    for key in mine.keys() & stocks.keys():
        if not torch.equal(mine[key], stocks[key]):
            failures.append(f"{name}: {key} differs from stock torchrec's after a step, {plan[key[0]].kind}")


# --- a peer that dies ---------------------------------------------------------------------------------------------------------


def exchange_with_a_death(worker: Worker, dies: str, message_bytes: int, after_messages: int | None) -> tuple[str, float]:
    """Every worker sends 8 MiB to every other one; one of them ends before, or after `after_messages` messages.

    Returns:
        Name of the raised error, and the seconds until it.
    """
    me, count = worker.name, len(WORKERS)
    cols, old_shards, new_shards, row = 64, [], [], 0
    for source, target in itertools.product(WORKERS, repeat=2):
        num_rows = 32 * 1024 if source != target else 16
        region = Region(row, row + num_rows, 0, cols)
        old_shards.append(Shard(source, region))
        new_shards.append(Shard(target, region))
        row += num_rows
    old, new = (
        [Block("t", "weight", s.region, torch.zeros(s.region.num_rows, cols)) for s in shards if s.owner == me]
        for shards in (old_shards, new_shards)
    )
    group = ProcessGroupGloo(PrefixStore("transfer", worker.store), WORKERS.index(me), count)  # type: ignore[call-arg]
    group.barrier().wait()  # type: ignore[attr-defined]
    left = after_messages

    def release(values: torch.Tensor) -> None:
        nonlocal left
        if left is not None and me == dies:
            left -= 1
            if left < 0:
                os._exit(1)

    if me == dies and after_messages is None:
        os._exit(1)
    start = time.monotonic()
    try:
        with mock.patch.multiple(exchange_module, CHUNK_BYTES=message_bytes, STALL_S=2.0):
            exchange(group, WORKERS, me, plan_moves({"t": old_shards}, {"t": new_shards}), old, new, release)
    except Exception as error:
        return type(error).__name__, time.monotonic() - start
    return "nothing", time.monotonic() - start


# --- first values -------------------------------------------------------------------------------------------------------------


def first_values(worker: Worker, case: Case) -> State:
    """First values of all tables, in a world of the case's first members; empty for other workers."""
    members = case.worlds[0]
    if worker.name not in members:
        return {}
    join_world(worker.store, worker.name, members)
    tables = ShardedTables(Model(case), CPU, constraints=constraints(case))
    plan = first_plan(case, tables, members)
    call = tables.build(plan, members)
    tables.initialise(7)
    failures: list[str] = []
    state = gather(tables.blocks(), plan, failures)
    assert not failures
    assert all(torch.equal(part_of(b, b.region), b.values) for b in tables.blocks())
    del call
    leave_world()
    return state if worker.name == members[0] else {}
