"""The rows recorded as trained, and the order of lookups in the output of sharded tables."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

pytest.importorskip("torchrec", reason="sharded tables need torchrec")

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec import DataType, EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.planner import ParameterConstraints
from torchrec.optim import RowWiseAdagrad

from lightning_dlrover.tables.layout import PlanError, Region, Shard
from lightning_dlrover.tables.sharded import ShardedTables

ROWS = {"a": 200, "b": 77, "c": 30, "d": 50, "e": 90}
KINDS = {"a": "row_wise", "b": "table_wise", "c": "column_wise", "d": "data_parallel", "e": "row_wise"}
FEATURES = {"a": ["f0", "f1"], "b": ["f2"], "c": ["f3"], "d": ["f4"], "e": ["f5"]}  # two features share a table


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        configs = [
            EmbeddingBagConfig(name=name, embedding_dim=8, num_embeddings=rows, feature_names=FEATURES[name])
            for name, rows in ROWS.items()
        ]
        self.tables = EmbeddingBagCollection(device=torch.device("meta"), tables=configs)
        _apply_optimizer_in_backward(RowWiseAdagrad, self.tables.parameters(), {"lr": 0.1})


@pytest.fixture
def tables() -> Iterator[ShardedTables]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    constraints = {name: ParameterConstraints(sharding_types=[kind], min_partition=4) for name, kind in KINDS.items()}
    sharded = ShardedTables(Model(), torch.device("cpu"), constraints)
    sharded.build(sharded.first_plan(["w"]), ["w"])
    sharded.initialise(1)
    yield sharded
    sharded.close()
    dist.destroy_process_group()


def train(tables: ShardedTables, seed: int, backward: bool = True, of_b: Sequence[int] = ()) -> None:
    """Args: of_b: rows of table b to look up, instead of random ones."""
    generator = torch.Generator().manual_seed(seed)
    keys = [feature for features in FEATURES.values() for feature in features]
    owners = [name for name, features in FEATURES.items() for _ in features]
    lengths = torch.randint(0, 3, (len(keys), 4), generator=generator)  # bags of none, one or two
    values = [
        torch.randint(0, ROWS[name], (int(n.sum()),), generator=generator) for name, n in zip(owners, lengths, strict=True)
    ]
    if of_b:
        values[owners.index("b")] = torch.tensor(of_b)
        lengths[owners.index("b")] = torch.tensor([len(of_b), 0, 0, 0])
    batch = KeyedJaggedTensor(keys=keys, values=torch.cat(values), lengths=lengths.flatten())
    with torch.set_grad_enabled(backward):
        out = tables.module.get_submodule("tables")(batch).values()
    if backward:
        out.pow(2).sum().backward()


def test_kernels_of_a_new_build_count_from_0_until_their_counters_are_set(tables: ShardedTables) -> None:
    assert set(tables.counters()) == {f"tables.{name}" for name, kind in KINDS.items() if kind != "data_parallel"}
    for seed in range(3):
        train(tables, seed)
    counted = tables.counters()
    assert set(counted.values()) == {3}
    assert tables.plan is not None
    tables.build(tables.plan, ["w"])
    assert set(tables.counters().values()) == {0}
    tables.set_counters(counted)
    train(tables, 3)
    assert set(tables.counters().values()) == {4}


def test_changed_rows_are_noted_and_hardly_any_other(tables: ShardedTables, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_dlrover.tables.sharded.MAX_CHANGED", 1.0)
    touched = tables.track()
    for step in range(6):
        moment = step % 2
        touched.mark(moment)
        before = {(b.table, b.what, b.region): b.values.clone() for b in tables.blocks()}
        for i in range(3):
            train(tables, 10 * step + i)
        for block in tables.blocks():
            rows = touched.since(moment, block)
            if block.table == "tables.d":
                assert rows is None  # its optimizer may change all rows
                continue
            assert rows is not None
            changed = (block.values != before[block.table, block.what, block.region]).reshape(len(block.values), -1).any(1)
            assert set(changed.nonzero().flatten().tolist()) <= set(rows.tolist())
            assert len(rows) < 60  # looked-up rows alone, not the whole table


@pytest.mark.parametrize("rows", [[ROWS["b"], 7], [10_000, 7], [-5, 7]])
def test_rows_out_of_range_are_noted_as_fbgemm_trains_them(tables: ShardedTables, rows: list[int]) -> None:
    train(tables, 1, of_b=rows)  # logs a warning at most
    touched = tables.track()
    touched.mark(0)
    (block,) = (b for b in tables.blocks() if b.table == "tables.b" and b.what == "weight")
    before = block.values.clone()
    touched.begin_copy([])
    train(tables, 2, of_b=rows)
    changed = (block.values != before).any(1).nonzero().flatten().tolist()
    noted = touched.since(0, block)
    assert noted is not None
    assert 7 in changed
    assert set(changed) <= set(noted.tolist())
    for kept, of_rows, values in touched.end_copy():
        if kept.table == "tables.b" and kept.what == "weight":
            assert torch.equal(values, before[of_rows])
            assert set(changed) <= set(of_rows.tolist())


def test_before_a_moment_nothing_is_known(tables: ShardedTables) -> None:
    touched = tables.track()
    train(tables, 1)
    assert all(touched.since(0, block) is None for block in tables.blocks())


def test_rows_are_not_tracked_where_most_of_a_table_is_trained(tables: ShardedTables, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_dlrover.tables.sharded.NUM_NOTED", 4)
    touched = tables.track()
    (block,) = (b for b in tables.blocks() if b.table == "tables.b" and b.what == "weight")
    most = list(range(ROWS["b"] // 2))
    for moment in (0, 1, 0):
        touched.mark(moment)
        train(tables, 1, of_b=[3])
        rows = touched.since(moment, block)
        assert rows is not None
        assert 3 in rows.tolist()
        for step in range(400):  # until tracking is given up for all tables
            train(tables, step, of_b=most)
            if not any(any(kernel.followed) for kernel in touched._kernels):
                break
        assert [touched.since(m, block) for m in (0, 1)] == [None, None]
    assert step < 399
    assert not any(kernel._noted for kernel in touched._kernels)


def test_rows_that_are_only_read_are_not_noted(tables: ShardedTables) -> None:
    touched = tables.track()
    touched.mark(0)
    train(tables, 1, backward=False)
    assert all(rows is None or not len(rows) for rows in (touched.since(0, block) for block in tables.blocks()))


@pytest.mark.parametrize("steps_before", [0, 1, 3])
def test_copy_made_during_training_shows_the_state_at_its_start(tables: ShardedTables, steps_before: int) -> None:
    touched = tables.track()
    for first in (0, 100):  # rows kept for one copy must not appear in the next
        blocks = [block for block in tables.blocks() if touched.is_tracked(block)]
        as_begun = [block.values.clone() for block in blocks]
        touched.begin_copy([])
        for i in range(steps_before):
            train(tables, first + i)
        copies = [block.values.clone() for block in blocks]
        for i in range(steps_before, 3):
            train(tables, first + i)
        kept = touched.end_copy()
        assert kept
        for block, rows, values in kept:
            keys = [(b.table, b.what, b.region) for b in blocks]
            copies[keys.index((block.table, block.what, block.region))][rows] = values
        train(tables, first + 50)
        assert all(torch.equal(copy, was) for copy, was in zip(copies, as_begun, strict=True))
        assert not all(torch.equal(copy, block.values) for copy, block in zip(copies, blocks, strict=True))


@pytest.mark.parametrize("optimizer", [torch.optim.Adagrad, RowWiseAdagrad])
def test_tables_of_different_precisions_have_memory_of_their_own(tables: ShardedTables, optimizer: type) -> None:
    kinds = [DataType.FP16, DataType.FP32, DataType.BF16, DataType.FP32, DataType.FP16]
    module = nn.Module()
    module.tables = EmbeddingBagCollection(
        device=torch.device("meta"),
        tables=[
            EmbeddingBagConfig(
                name=f"t{i}", embedding_dim=8, num_embeddings=40_000 * (i + 1), feature_names=[f"g{i}"], data_type=kind
            )
            for i, kind in enumerate(kinds)
        ],
    )
    _apply_optimizer_in_backward(optimizer, module.get_submodule("tables").parameters(), {"lr": 0.1})
    mixed = ShardedTables(module, torch.device("cpu"))
    mixed.build(mixed.first_plan(["w"]), ["w"])
    blocks = mixed.blocks()
    assert len(blocks) == 2 * len(kinds)
    for number, block in enumerate(blocks):
        block.values.fill_(float(number + 1))
    assert [bool((block.values == float(i + 1)).all()) for i, block in enumerate(blocks)] == [True] * len(blocks)
    mixed.close()


@pytest.mark.parametrize("other", ["rows", "columns", "fewer tables", "more tables"])
def test_plan_of_other_tables_is_refused(tables: ShardedTables, other: str) -> None:
    assert tables.plan is not None
    plan = dict(tables.plan)
    b = plan.pop("tables.b")
    if other in ("rows", "columns"):
        rows, cols = (50, 8) if other == "rows" else (77, 4)
        plan["tables.b"] = replace(b, rows=rows, cols=cols, shards=(Shard("w", Region(0, rows, 0, cols)),))
    elif other == "more tables":
        plan |= {"tables.b": b, "tables.z": b}
    with pytest.raises(PlanError, match=r"table 'tables\.[bz]' is .* another name"):
        tables.build(plan, ["w"])
    train(tables, 1)  # no row has changed since


class Named(EmbeddingBagCollection):  # type: ignore[misc]
    pass


def collection_of(kind: type = EmbeddingBagCollection, name: str = "t", device: str = "meta") -> EmbeddingBagCollection:
    config = EmbeddingBagConfig(name=name, embedding_dim=8, num_embeddings=30, feature_names=["f"])
    return kind(device=torch.device(device), tables=[config])


def test_collections_reached_by_several_paths_are_sharded_once_in_each_world(tables: ShardedTables) -> None:
    shared = collection_of()
    module = nn.ModuleDict({"dlrm": nn.ModuleDict({"tables": shared}), "towers": nn.ModuleList([shared, nn.Linear(2, 2)])})
    module["again"] = module["dlrm"]
    ours = ShardedTables(module, torch.device("cpu"))
    plan = ours.first_plan(["w"])
    assert list(plan) == ["dlrm.tables.t"]
    for _ in range(2):
        ours.build(plan, ["w"])
        paths = ["dlrm.tables", "towers.0", "again.tables"]
        assert len({id(module.get_submodule(path)) for path in paths}) == 1
        assert type(module.get_submodule("towers.0")).__name__ == "ShardedEmbeddingBagCollection"
        with ours.aside():
            assert set(module.state_dict()) == {"towers.1.weight", "towers.1.bias"}
        assert module.get_submodule("towers.0") is module.get_submodule("dlrm.tables")
    names = ["dlrm.tables", "towers.0", "again.tables"]
    assert ours.all_names() == {"dlrm.tables.embedding_bags.t.weight": [f"{path}.embedding_bags.t.weight" for path in names]}
    ours.close()


def test_subclass_of_a_collection_is_refused_by_name(tables: ShardedTables) -> None:
    module = nn.ModuleDict({"plain": collection_of(), "mine": collection_of(Named, "u")})
    with pytest.raises(PlanError, match=r"mine: torchrec has no sharder for Named.*sharders="):
        ShardedTables(module, torch.device("cpu"))


def test_table_that_is_one_parameter_with_another_module_is_refused(tables: ShardedTables) -> None:
    shared, head = collection_of(device="cpu"), nn.Linear(8, 30, bias=False)
    head.weight = shared.embedding_bags["t"].weight
    with pytest.raises(PlanError, match=r"tables\.embedding_bags\.t\.weight and head\.weight are one parameter"):
        ShardedTables(nn.ModuleDict({"tables": shared, "head": head}), torch.device("cpu"))


def test_kind_that_no_change_could_reassign_is_refused_at_the_start(tables: ShardedTables) -> None:
    constraints = {"t": ParameterConstraints(sharding_types=["grid_shard"])}
    with pytest.raises(PlanError, match=r"table 't': kind 'grid_shard' .*sharding_constraints"):
        ShardedTables(nn.ModuleDict({"tables": collection_of()}), torch.device("cpu"), constraints)


def built(configs: Sequence[EmbeddingBagConfig]) -> ShardedTables:
    collection = EmbeddingBagCollection(device=torch.device("meta"), tables=list(configs))
    tables = ShardedTables(nn.ModuleDict({"tables": collection}), torch.device("cpu"))
    tables.build(tables.first_plan(["w"]), ["w"])
    tables.initialise(1)
    return tables


def test_init_fn_sees_the_whole_table_and_a_plain_distribution_blocks_of_rows(tables: ShardedTables) -> None:
    sizes: list[int] = []

    def wide(table: torch.Tensor) -> None:
        sizes.append(len(table))
        nn.init.xavier_normal_(table)

    config = EmbeddingBagConfig(name="t", embedding_dim=8, num_embeddings=20_000, feature_names=["f"], init_fn=wide)
    other = EmbeddingBagConfig(name="u", embedding_dim=8, num_embeddings=20_000, feature_names=["g"])
    ours = built([config, other])
    drawn, default = (b.values for b in ours.blocks())
    assert sizes == [20_000]
    assert float(drawn.std()) == pytest.approx((2 / (20_000 + 8)) ** 0.5, rel=0.02)
    assert float(default.abs().max()) == pytest.approx((1 / 20_000) ** 0.5, rel=0.01)
    ours.close()


def test_init_fn_draws_the_same_on_all_workers_and_leaves_their_generators_as_they_were(tables: ShardedTables) -> None:
    def drawn_by_numpy(table: torch.Tensor) -> None:
        table.copy_(torch.from_numpy(np.random.rand(*table.shape) + random.random()))

    found = []
    for worker in range(2):
        np.random.seed(worker)
        random.seed(worker)
        state = np.random.get_state(legacy=False), random.getstate(), torch.get_rng_state()
        config = EmbeddingBagConfig(name="t", embedding_dim=8, num_embeddings=30, feature_names=["f"], init_fn=drawn_by_numpy)
        ours = built([config])
        found.append(ours.blocks()[0].values.clone())
        assert str(np.random.get_state(legacy=False)) == str(state[0])
        assert random.getstate() == state[1]
        assert torch.equal(torch.get_rng_state(), state[2])
        ours.close()
    assert torch.equal(*found)


def test_pooled_embeddings_are_in_the_order_of_the_unsharded_collection(tables: ShardedTables) -> None:
    keys = [feature for features in FEATURES.values() for feature in features]
    batch = KeyedJaggedTensor(keys=keys, values=torch.zeros(len(keys), dtype=torch.int64), lengths=torch.ones(len(keys)).long())
    pooled = tables.module.get_submodule("tables")(batch)
    assert list(pooled.keys()) == keys
    assert torch.equal(pooled.values(), torch.cat([pooled[key] for key in keys], 1))
    assert tables.plan is not None
    assert tables.plan["tables.a"].kind == tables.plan["tables.e"].kind  # first and last, which torchrec puts side by side
