"""Collections of growing tables in one process, and in two."""

from __future__ import annotations

import copy
import functools
import pickle
from typing import Any

import pytest

pytest.importorskip("torchrec", reason="growing tables are called with torchrec's features")
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torchrec import EmbeddingBagConfig, EmbeddingConfig, KeyedJaggedTensor, PoolingType

from lightning_dlrover import GrowingEmbeddingBagCollection, GrowingEmbeddingCollection, Growth
from lightning_dlrover.tables.growing import GrowingTables, init_of
from lightning_dlrover.tables.growing_optimizers import Ftrl, RowWiseAdagrad, Sgd
from lightning_dlrover.tables.growing_rows import SECTIONS, keys_of
from lightning_dlrover.tables.layout import PlanError
from lightning_dlrover.tables.sharded import TouchedRows

IDS = torch.tensor([5, -7, 5, 2**62, 5, -(2**63), 2**62, 9, 5])
LENGTHS = torch.tensor([1, 2, 0, 1, 2, 3])


def configs(pooling: PoolingType = PoolingType.SUM) -> list[Any]:
    return [
        EmbeddingBagConfig(name="a", num_embeddings=100, embedding_dim=8, feature_names=["f", "g"], pooling=pooling),
        EmbeddingBagConfig(name="b", num_embeddings=100, embedding_dim=4, feature_names=["h"], pooling=pooling),
    ]


def features(weights: Tensor | None = None) -> Any:
    return KeyedJaggedTensor(keys=["f", "g", "h"], values=IDS, lengths=LENGTHS, weights=weights)


def row_of(tables: Any, table: str, id_: int) -> Tensor:
    rows = tables.rows()[table]
    found: Tensor = rows.columns["weight"][rows.slots_of(keys_of(torch.tensor([id_])))][0]
    return found


@pytest.mark.parametrize("pooling", [PoolingType.SUM, PoolingType.MEAN])
@pytest.mark.parametrize("is_weighted", [False, True])
def test_bags_and_updates_equal_those_of_ordinary_embeddings(pooling: PoolingType, is_weighted: bool) -> None:
    torch.manual_seed(0)
    tables = GrowingEmbeddingBagCollection(configs(pooling), Sgd(0.5), is_weighted=is_weighted)
    weights = torch.rand(len(IDS)) if is_weighted else None
    tables(features(weights))  # creates the rows
    bags = [slice(0, 1), slice(1, 3), slice(3, 3), slice(3, 4), slice(4, 6), slice(6, 9)]
    rows = {t: {int(i): row_of(tables, t, int(i)).clone().requires_grad_() for i in set(IDS.tolist())} for t in "ab"}
    expected = []
    for feature, table in enumerate("aab"):
        for bag in bags[2 * feature : 2 * feature + 2]:
            scales = weights[bag] if weights is not None else torch.ones(bag.stop - bag.start)
            terms = [rows[table][int(i)] * s for i, s in zip(IDS[bag], scales, strict=True)]
            total = sum(terms, torch.zeros(8 if table == "a" else 4))
            expected.append(total / max(1, len(terms)) if pooling == PoolingType.MEAN else total)
    found = tables(features(weights))
    assert found.keys() == ["f", "g", "h"]
    for feature in range(3):
        bag = found[found.keys()[feature]]
        assert torch.allclose(bag, torch.stack(expected[2 * feature : 2 * feature + 2]), atol=1e-6)
    found.values().pow(2).sum().backward()
    sum(each.pow(2).sum() for each in expected).backward()  # type: ignore[union-attr]
    for table, of_table in rows.items():
        for id_, row in of_table.items():
            if row.grad is not None:
                assert torch.allclose(row_of(tables, table, id_), row.detach() - 0.5 * row.grad, atol=1e-5)


def test_a_sequence_has_a_row_for_each_of_its_ids() -> None:
    config = EmbeddingConfig(name="a", num_embeddings=100, embedding_dim=8, feature_names=["f", "g", "h"])
    tables = GrowingEmbeddingCollection([config], Sgd(0.5))
    found = tables(features())
    assert found["h"].lengths().tolist() == [2, 3]
    assert torch.equal(found["h"].values()[0], found["f"].values()[0])  # id 5, or the same rows
    assert (found["g"].values()[0] == row_of(tables, "a", 2**62)).all()
    before = row_of(tables, "a", 9).clone()
    found["h"].values().sum().backward()
    assert torch.allclose(row_of(tables, "a", 9), before - 0.5, atol=1e-6)


def test_validation_creates_no_rows() -> None:
    tables = GrowingEmbeddingBagCollection(configs(), Sgd(0.5))
    tables.eval()
    tables(features())
    tables.train()
    with torch.no_grad():
        tables(features())
    assert [rows.num_rows for rows in tables.rows().values()] == [0, 0]


def test_ids_without_a_row_train_the_row_that_they_share() -> None:
    tables = GrowingEmbeddingBagCollection(configs(), Sgd(0.5), {"a": Growth(min_count=99)})
    before = row_of(tables, "a", 5).clone()
    tables(features()).values().sum().backward()
    rows = tables.rows()
    assert rows["a"].num_rows == 0
    assert rows["b"].num_rows > 0
    assert (row_of(tables, "a", 5) != before).all()


def test_rows_stay_while_a_backward_pass_is_still_to_come() -> None:
    tables = GrowingEmbeddingBagCollection(configs(), Sgd(0.5), Growth(max_rows=1))
    first, second = tables(features()).values().sum(), tables(features()).values().sum()
    first.backward()
    assert tables.rows()["b"].num_rows > 1  # the second lookup still refers to them
    second.backward()
    assert tables.rows()["b"].num_rows <= 1


def test_state_dict_holds_all_rows() -> None:
    tables = GrowingEmbeddingBagCollection(configs(), RowWiseAdagrad(0.5), Growth(min_count=2))
    for _ in range(3):
        tables(features()).values().sum().backward()
    other = GrowingEmbeddingBagCollection(configs(), RowWiseAdagrad(0.5), Growth(min_count=2))
    other.load_state_dict(tables.state_dict())
    for each in (tables, other):
        each(features()).values().sum().backward()
    tables.eval(), other.eval()
    assert torch.equal(tables(features()).values(), other(features()).values())
    with pytest.raises(ValueError, match="growing tables"):
        GrowingEmbeddingBagCollection(configs()[:1], Sgd(0.5)).set_extra_state(tables.get_extra_state())


def test_learning_rate_may_change() -> None:
    tables = GrowingEmbeddingBagCollection(configs(), Sgd(0.5))
    tables(features())
    tables.set_learning_rate(0.0)
    before = row_of(tables, "b", 9).clone()
    tables(features()).values().sum().backward()
    assert torch.equal(row_of(tables, "b", 9), before)


@pytest.mark.parametrize(
    "init_fn, kind, low, high",
    [
        (None, "uniform", -0.1, 0.1),
        (nn.init.zeros_, "uniform", 0.0, 0.0),
        (functools.partial(nn.init.normal_, std=0.3), "normal", 0.0, 0.3),
        (functools.partial(nn.init.uniform_, a=-2.0, b=3.0), "uniform", -2.0, 3.0),
        (functools.partial(nn.init.constant_, val=4.0), "uniform", 4.0, 4.0),
    ],
)
def test_first_weights_follow_init_fn(init_fn: Any, kind: str, low: float, high: float) -> None:
    init = init_of(EmbeddingBagConfig(name="a", num_embeddings=100, embedding_dim=8, feature_names=["f"], init_fn=init_fn))
    assert (init.kind, init.low, init.high) == (kind, low, high)


def test_collections_that_cannot_work_are_refused() -> None:
    orthogonal = EmbeddingBagConfig(
        name="a", num_embeddings=9, embedding_dim=8, feature_names=["f"], init_fn=nn.init.orthogonal_
    )
    with pytest.raises(ValueError, match="init_fn"):
        GrowingEmbeddingBagCollection([orthogonal], Sgd(0.5))
    with pytest.raises(ValueError, match="at least one"):
        GrowingEmbeddingBagCollection([], Sgd(0.5))
    with pytest.raises(ValueError, match="the name 'a'"):
        GrowingEmbeddingBagCollection([configs()[0], configs()[0]], Sgd(0.5))
    with pytest.raises(ValueError, match="the table 'c'"):
        GrowingEmbeddingBagCollection(configs(), Sgd(0.5), {"c": Growth()})
    tables = GrowingEmbeddingBagCollection(configs(), Sgd(0.5))
    with pytest.raises(TypeError, match="not copied"):
        copy.deepcopy(tables)
    with pytest.raises(TypeError, match="not pickled"):
        pickle.dumps(tables)


def _look_up(rank: int, port: int) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    try:
        with pytest.raises(RuntimeError, match="DLRoverStrategy"):
            GrowingEmbeddingBagCollection(configs(), Sgd(0.5))(features())
    finally:
        dist.destroy_process_group()


def test_workers_that_do_not_share_the_rows_are_refused(free_tcp_port: int) -> None:
    mp.spawn(_look_up, (free_tcp_port,), nprocs=2)  # type: ignore[no-untyped-call]


def test_shared_rows_are_one_for_each_section() -> None:
    tables = GrowingEmbeddingBagCollection(configs(), Sgd(0.5), Growth(min_count=9))
    ids = torch.arange(20_000)
    slots = tables.rows()["a"].slots_of(keys_of(ids))
    assert int(slots.max()) < SECTIONS
    assert len(set(slots.tolist())) == SECTIONS


class Towers(nn.Module):
    def __init__(self, is_shared: bool) -> None:
        super().__init__()
        self.user = GrowingEmbeddingBagCollection(configs(), Sgd(0.5))
        self.item = self.user if is_shared else GrowingEmbeddingBagCollection(configs(), Sgd(0.5))


def test_a_collection_in_two_places_is_refused() -> None:
    GrowingTables(Towers(is_shared=False))
    with pytest.raises(PlanError, match="user and item are one growing collection"):
        GrowingTables(Towers(is_shared=True))


def test_a_second_backward_pass_of_a_lookup_is_refused() -> None:
    tables = GrowingEmbeddingBagCollection(configs(), Sgd(0.5))
    total = tables(features()).values().sum()
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="one backward pass"):
        total.backward()


def test_tables_with_a_feature_in_common_are_refused() -> None:
    both = [EmbeddingBagConfig(name=n, num_embeddings=9, embedding_dim=4, feature_names=["f"]) for n in "ab"]
    with pytest.raises(ValueError, match="'f' is used by two tables"):
        GrowingEmbeddingBagCollection(both, Sgd(0.5))


def test_learning_rate_of_ftrl_stays() -> None:
    with pytest.raises(ValueError, match="Ftrl"):
        GrowingEmbeddingBagCollection(configs(), Ftrl(0.5)).set_learning_rate(0.1)


def test_counters_carry_step_seed_and_learning_rate_to_a_joiner() -> None:
    module = nn.Module()
    module.tables = GrowingEmbeddingBagCollection(configs(), Sgd(0.5))
    module.tables.set_learning_rate(0.125)
    module.tables(features()).values().sum().backward()
    other = nn.Module()
    other.tables = GrowingEmbeddingBagCollection(configs(), Sgd(0.5))
    joiner = GrowingTables(other)
    joiner.set_counters(GrowingTables(module).counters())
    rows = other.tables.rows()["a"]
    assert (rows.step, rows.optimizer.lr, rows.seed) == (1, 0.125, module.tables.rows()["a"].seed)


def test_a_table_that_grows_while_it_is_copied_is_copied_as_it_was() -> None:
    module = nn.Module()
    module.tables = GrowingEmbeddingBagCollection(configs(), Sgd(0.5))
    growing = GrowingTables(module)
    module.tables(features()).values().sum().backward()
    before = {(b.table, b.what): b.values.clone() for b in growing.blocks()}
    blocks, touched = growing.blocks(), TouchedRows([], [], growing)
    touched.begin_copy(blocks)
    many = torch.cat([IDS[:6], torch.arange(3 * SECTIONS)])  # more than a block has room for
    lengths = torch.tensor([1, 2, 0, 3, 0, len(many) - 6])
    for _ in range(2):
        found = module.tables(KeyedJaggedTensor(keys=["f", "g", "h"], values=many, lengths=lengths))
        found.values().sum().backward()
    copied = {(b.table, b.what): b.values.clone() for b in blocks}
    for block, slots, values in touched.end_copy():
        copied[block.table, block.what][slots] = values  # as `PartWriter.put_rows` does
    used = {f"tables.{name}": SECTIONS + number for name, number in {"a": 3, "b": 3}.items()}
    for (table, what), values in before.items():
        assert torch.equal(copied[table, what][: used[table]], values[: used[table]]), (table, what)


def test_a_copy_that_was_broken_off_does_not_keep_rows_from_leaving() -> None:
    module = nn.Module()
    module.tables = GrowingEmbeddingBagCollection(configs(), Sgd(0.5), Growth(max_rows=1))
    touched = TouchedRows([], [], GrowingTables(module))
    touched.begin_copy([])
    module.tables(features()).values().sum().backward()
    assert module.tables.rows()["b"].num_rows > 1
    touched.close()
    module.tables(features()).values().sum().backward()
    assert module.tables.rows()["b"].num_rows <= 1
