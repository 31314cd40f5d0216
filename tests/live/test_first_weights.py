"""Tables begin with the weights that a script has given them, as with stock Lightning: one worker, real Trainers."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.quiet_trainer import quiet_trainer

pytest.importorskip("torchrec", reason="sharded tables need torchrec")

import lightning as L
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.utils.data import DataLoader
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.planner import ParameterConstraints
from torchrec.optim import RowWiseAdagrad

from lightning_dlrover import DLRoverStrategy
from lightning_dlrover.tables.checkpoint import CheckpointError
from lightning_dlrover.tables.exchange import Block

ROWS = {"a": 6000, "b": 30, "c": 50}  # more rows than are drawn from one seed
DIM = 8
KINDS = {"a": "row_wise", "b": "column_wise", "c": "data_parallel"}
OPTIMIZERS = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "rowwise_adagrad": RowWiseAdagrad}
WAYS = ("assignment", "load_state_dict", "load_from_checkpoint", "ckpt_path", "init_fn")


@pytest.fixture(autouse=True)
def no_group_left() -> Iterator[None]:
    """Sharded tables need a process group, which a script's strategy leaves until its process ends."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def pretrained(table: str) -> torch.Tensor:
    return torch.randn(ROWS[table], DIM, generator=torch.Generator().manual_seed(ROWS[table]))


def from_pretrained(table: str) -> Any:
    return lambda weights: weights.data.copy_(pretrained(table))


class Model(L.LightningModule):
    """Two towers that share their tables."""

    def __init__(
        self, optimizer: str = "sgd", device: str = "cpu", has_init_fn: bool = False, in_backward: bool = False
    ) -> None:
        super().__init__()
        self.optimizer = optimizer
        torch.manual_seed(3)
        tables = [
            EmbeddingBagConfig(
                name=name,
                embedding_dim=DIM,
                num_embeddings=rows,
                feature_names=[name],
                init_fn=from_pretrained(name) if has_init_fn else None,
            )
            for name, rows in ROWS.items()
        ]
        self.tables = EmbeddingBagCollection(device=torch.device(device), tables=tables)
        self.item = nn.ModuleDict({"tables": self.tables})
        torch.manual_seed(4)
        self.net = nn.Linear(DIM * len(ROWS), 1, bias=False)  # row-wise Adagrad takes no vectors
        if in_backward:
            _apply_optimizer_in_backward(OPTIMIZERS[optimizer], self.tables.parameters(), {"lr": 0.1})

    def embedded(self, ids: torch.Tensor) -> torch.Tensor:
        values = torch.cat([ids % rows for rows in ROWS.values()])
        batch = KeyedJaggedTensor(keys=list(ROWS), values=values, lengths=torch.ones(len(values), dtype=torch.int64))
        found: torch.Tensor = self.item["tables"](batch).values()
        # Fused optimizers update the rows in each backward pass, so only SGD adds up over two lookups as without sharding.
        return found + self.tables(batch).values() if self.optimizer == "sgd" else found

    def training_step(self, ids: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.net(self.embedded(ids)).tanh().mean()
        return loss

    def test_step(self, ids: torch.Tensor, batch_idx: int) -> None:
        self.log("mean", self.embedded(ids).mean())

    def configure_optimizers(self) -> Any:
        return OPTIMIZERS[self.optimizer](self.parameters(), lr=0.1)


class Rows(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, i: int) -> int:
        return 7919 * i


def trainer_of(folder: Path, is_sharded: bool, max_epochs: int = 1, kinds: dict[str, str] = KINDS) -> L.Trainer:
    constraints = {name: ParameterConstraints(sharding_types=[kind], min_partition=4) for name, kind in kinds.items()}
    return quiet_trainer(
        strategy=DLRoverStrategy(sharding_constraints=constraints) if is_sharded else "auto",
        max_epochs=max_epochs,
        default_root_dir=folder,
    )


def fit(trainer: L.Trainer, model: Model, ckpt_path: Path | None = None) -> dict[str, torch.Tensor]:
    """Train, and return all weights and the states of the tables' optimizers."""
    trainer.fit(model, DataLoader(Rows(), 4), ckpt_path=ckpt_path)
    if not isinstance(trainer.strategy, DLRoverStrategy):
        (optimizer,) = trainer.optimizers
        names = {id(p): name.split(".")[-2] for name, p in model.named_parameters()}
        states = {
            f"{names[id(p)]}.sum": state["sum"].reshape(len(p), -1) for p, state in optimizer.state.items() if "sum" in state
        }
        weights = {name.split(".")[-2]: p.detach() for name, p in model.tables.named_parameters()}
        return {**weights, **states, "net": model.net.weight.detach()}
    found = {"net": model.net.weight.detach()}
    for block in blocks_of(trainer):
        table = block.table.split(".")[-1]
        values = block.values.reshape(block.region.num_rows, -1).clone()
        key = table if block.what == "weight" else f"{table}.sum"
        # Parts of a table with its columns cut come in order.
        found[key] = torch.cat([found[key], values], 1) if key in found else values
    return found


def blocks_of(trainer: L.Trainer) -> list[Block]:
    assert isinstance(trainer.strategy, DLRoverStrategy)
    assert trainer.strategy.tables is not None
    return trainer.strategy.tables.sharded.blocks()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("way", WAYS)
def test_given_weights_train_as_with_stock_lightning(tmp_path: Path, way: str, optimizer: str) -> None:
    torch.manual_seed(9)
    path = tmp_path / "stock.ckpt"
    former = Model(optimizer)
    stock = trainer_of(tmp_path, is_sharded=False)
    fit(stock, former)
    stock.save_checkpoint(path)

    def model(is_sharded: bool) -> Model:
        if way == "load_from_checkpoint":
            return Model.load_from_checkpoint(path, optimizer=optimizer)
        made = Model(optimizer, "meta" if is_sharded and way in ("ckpt_path", "init_fn") else "cpu", way == "init_fn")
        if way == "load_state_dict":
            made.load_state_dict(former.state_dict())
        elif way == "assignment":
            for name, bag in made.tables.embedding_bags.items():
                bag.weight.data = pretrained(name)
        return made

    from_path = path if way == "ckpt_path" else None
    expected = fit(trainer_of(tmp_path, False, max_epochs=2), model(is_sharded=False), from_path)
    # A row-wise state is a mean over the columns of a shard, so it differs where columns are cut.
    kinds = {**KINDS, "b": "table_wise"} if optimizer == "rowwise_adagrad" else KINDS
    found = fit(trainer_of(tmp_path, True, max_epochs=2, kinds=kinds), model(is_sharded=True), from_path)
    assert optimizer == "sgd" or {"a.sum", "b.sum"} <= expected.keys() & found.keys()
    for key in sorted(expected.keys() & found.keys()):
        torch.testing.assert_close(found[key], expected[key], msg=key)
    assert {"a", "b", "c", "net"} <= found.keys()


def test_tables_keep_their_weights_in_trainer_test(tmp_path: Path) -> None:
    model = Model()
    with torch.no_grad():
        for parameter in model.tables.parameters():
            parameter.fill_(7.0)
    (metrics,) = trainer_of(tmp_path, is_sharded=True).test(model, DataLoader(Rows(), 4))
    assert metrics["mean"] == 14.0  # of two towers


def test_stock_checkpoint_is_tested_with_its_weights(tmp_path: Path) -> None:
    stock = trainer_of(tmp_path, is_sharded=False)
    fit(stock, Model())
    stock.save_checkpoint(tmp_path / "stock.ckpt")
    expected, found = (
        trainer_of(tmp_path, is_sharded).test(Model(device=device), DataLoader(Rows(), 4), ckpt_path=tmp_path / "stock.ckpt")
        for is_sharded, device in ((False, "cpu"), (True, "meta"))
    )
    assert found[0]["mean"] == pytest.approx(expected[0]["mean"], rel=1e-6)


def test_collection_at_two_paths_stays_one_in_every_state(tmp_path: Path) -> None:
    model = Model()
    trainer = trainer_of(tmp_path, is_sharded=True)
    fit(trainer, model)
    assert model.item["tables"] is model.tables
    assert type(model.tables).__name__ == "ShardedEmbeddingBagCollection"
    trainer.save_checkpoint(tmp_path / "sharded")
    saved = torch.load(tmp_path / "sharded" / "trainer.ckpt", weights_only=True)["state_dict"]
    assert saved.keys() == {"net.weight", "tables.embedding_bags.c.weight"}
    before = {b.table: b.values.clone() for b in blocks_of(trainer)}
    again = Model(device="meta")
    resumed = trainer_of(tmp_path, is_sharded=True)
    fit(resumed, again, tmp_path / "sharded")  # has ended
    assert again.item["tables"] is again.tables
    assert all(torch.equal(b.values, before[b.table]) for b in blocks_of(resumed) if "b" not in b.table.split("."))


def test_checkpoint_without_a_table_is_refused_by_name(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, is_sharded=True)
    fit(trainer, Model())
    trainer.save_checkpoint(tmp_path / "sharded")
    with pytest.raises(CheckpointError, match=r"does not have tables\.embedding_bags\.a\.weight.*folder must be given"):
        fit(trainer_of(tmp_path, is_sharded=True, max_epochs=2), Model(), tmp_path / "sharded" / "trainer.ckpt")


def test_states_missing_in_a_stock_checkpoint_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stock = trainer_of(tmp_path, is_sharded=False)
    fit(stock, Model("rowwise_adagrad", in_backward=True))
    stock.save_checkpoint(tmp_path / "stock.ckpt")
    with caplog.at_level(logging.WARNING):
        model = Model("rowwise_adagrad", in_backward=True)
        fit(trainer_of(tmp_path, is_sharded=True, max_epochs=2), model, tmp_path / "stock.ckpt")
    assert "no optimizer states of the tables tables.embedding_bags.a, tables.embedding_bags.b" in caplog.text
