"""Sharded tables are trained like the user's optimizer would train them, or refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.quiet_trainer import quiet_trainer

pytest.importorskip("torchrec", reason="sharded tables need torchrec")

import lightning as L
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.optim import SGD, Adagrad, Adam, AdamW
from torch.utils.data import DataLoader, TensorDataset
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.planner import ParameterConstraints
from torchrec.optim import RowWiseAdagrad

from lightning_dlrover import DLRoverStrategy
from lightning_dlrover.checks import UnsupportedScriptError
from lightning_dlrover.tables.torchrec_adapter import TableOptimizerError, in_backward

ROWS = {"a": 40, "b": 23}

Configure = Callable[["Model"], Any]


@pytest.fixture(autouse=True)
def no_group_is_left() -> Iterator[None]:
    """Destroy the process group of sharded tables, which otherwise lasts as long as the script."""
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


class Model(L.LightningModule):
    def __init__(self, configure: Configure) -> None:
        super().__init__()
        torch.manual_seed(5)
        configs = [
            EmbeddingBagConfig(
                name=name,
                embedding_dim=8,
                num_embeddings=rows,
                feature_names=[name],
                init_fn=lambda rows: nn.init.constant_(rows, 0.1),
            )
            for name, rows in ROWS.items()
        ]
        self.tables = EmbeddingBagCollection(device=torch.device("cpu"), tables=configs)
        self.net = nn.Linear(16, 1)
        self._configure = configure

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        ids, target = batch
        values = torch.cat([ids % rows for rows in ROWS.values()])
        found = self.tables(KeyedJaggedTensor(keys=list(ROWS), values=values, lengths=torch.ones(len(values)).long()))
        return nn.functional.mse_loss(self.net(found.values()), target)

    def configure_optimizers(self) -> Any:
        return self._configure(self)

    def table(self, name: str) -> nn.Parameter:
        found: nn.Parameter = self.tables.get_parameter(f"embedding_bags.{name}.weight")
        return found


def train(folder: Path, strategy: Any, model: Model, epochs: int = 3, **options: Any) -> dict[str, Tensor]:
    """Train and return the tables."""
    random = torch.Generator().manual_seed(0)
    rows = TensorDataset(torch.randint(0, 10**6, (60,), generator=random), torch.randn(60, 1, generator=random))
    trainer = quiet_trainer(strategy=strategy, max_epochs=epochs, default_root_dir=folder, **options)
    trainer.fit(model, DataLoader(rows, batch_size=6))
    tables = getattr(strategy, "tables", None)
    if tables is None:
        return {f"tables.{name}": model.table(name).detach() for name in ROWS}
    return {block.table: block.values.clone() for block in tables.sharded.blocks() if block.what == "weight"}


def assert_same(stock: dict[str, Tensor], ours: dict[str, Tensor]) -> None:
    assert stock.keys() == ours.keys()
    for name, table in stock.items():
        torch.testing.assert_close(ours[name], table, msg=lambda text, name=name: f"{name}: {text}")  # type: ignore[misc]


def one_group(kind: Any, **arguments: Any) -> Configure:
    return lambda model: kind(model.parameters(), **arguments)


def scheduled(model: Model) -> Any:
    """Groups with their own rates and schedules."""
    rest = [*model.net.parameters(), model.table("b")]
    groups: list[dict[str, Any]] = [{"params": [model.table("a")], "lr": 0.3}, {"params": rest}]
    optimizer = Adagrad(groups, lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda step: 0.9**step, lambda step: 1 / (1 + step)])
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def frozen(model: Model) -> Any:
    model.table("b").requires_grad_(False)
    return SGD([p for p in model.parameters() if p.requires_grad], 0.1)


def frozen_with_warm_up(model: Model) -> Any:
    """The first rate of the trained table is that of the frozen one."""
    optimizer = frozen(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 5))
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def in_groups(*rates: float) -> Configure:
    """Give each table its own group."""

    def configure(model: Model) -> Any:
        groups = [{"params": [model.table(name)], "lr": rate} for name, rate in zip(ROWS, rates, strict=True)]
        return SGD([{"params": list(model.net.parameters()), "lr": 0.1}, *groups], 0.1)

    return configure


@pytest.mark.parametrize(
    "configure",
    [one_group(SGD, lr=0.1), one_group(Adagrad, lr=0.1, eps=1e-3), scheduled, frozen, frozen_with_warm_up],
    ids=["sgd", "adagrad", "scheduled groups", "frozen table", "frozen table and warm-up"],
)
def test_tables_end_as_with_the_ordinary_optimizer(configure: Configure, tmp_path: Path) -> None:
    stock = train(tmp_path, "auto", Model(configure))
    ours = train(tmp_path, DLRoverStrategy(), Model(configure))
    assert_same(stock, ours)
    assert not torch.equal(ours["tables.a"], torch.full_like(ours["tables.a"], 0.1))


def without(name: str) -> Configure:
    return lambda model: SGD([p for p in model.parameters() if p is not model.table(name)], 0.1)


@pytest.mark.parametrize("later", [in_groups(0.05, 0.0), in_groups(0.05, 0.2)], ids=["one rests", "other rates"])
def test_separate_tables_have_the_rates_of_a_later_fit(later: Configure, tmp_path: Path) -> None:
    found = []
    for strategy in (lambda: "auto", DLRoverStrategy):
        model = Model(in_groups(0.1, 0.1))
        train(tmp_path, strategy(), model, epochs=1)
        model._configure = later
        found.append(train(tmp_path, strategy(), model, epochs=1))
    assert_same(*found)


def test_frozen_table_stays_frozen_in_a_later_fit(tmp_path: Path) -> None:
    model = Model(without("b"))
    model.table("b").requires_grad_(False)
    for _ in range(2):
        tables = train(tmp_path, DLRoverStrategy(), model, epochs=1)
        assert torch.equal(tables["tables.b"], torch.full_like(tables["tables.b"], 0.1))


@pytest.mark.parametrize(
    "later, message",
    [
        (in_groups(0.1, 0.2), r"bags\.a and tables\.embedding_bags\.b are in different parameter groups"),
        (without("b"), r"bags\.b is in none .* or make a new model"),
    ],
    ids=["groups of its own", "missing"],
)
def test_table_of_a_shared_kernel_cannot_leave_it_in_a_later_fit(later: Configure, message: str, tmp_path: Path) -> None:
    model = Model(one_group(SGD, lr=0.1))
    train(tmp_path, DLRoverStrategy(), model, epochs=1)
    model._configure = later
    with pytest.raises(TableOptimizerError, match=message):
        train(tmp_path, DLRoverStrategy(), model, epochs=1)


def test_optimizer_applied_by_the_script_is_kept(tmp_path: Path) -> None:
    def configure(model: Model) -> Any:
        return Adam(model.parameters(), 1e-3)

    by_hand = Model(configure)
    _apply_optimizer_in_backward(Adagrad, by_hand.tables.parameters(), {"lr": 0.1})
    ours = train(tmp_path, DLRoverStrategy(), by_hand, epochs=1)
    assert not torch.equal(ours["tables.a"], torch.full_like(ours["tables.a"], 0.1))


@pytest.mark.parametrize("kind", [Adam, Adagrad])
def test_whole_tables_are_trained_by_any_optimizer(kind: Any, tmp_path: Path) -> None:
    whole = {name: ParameterConstraints(sharding_types=["data_parallel"]) for name in ROWS}
    stock = train(tmp_path, "auto", Model(one_group(kind, lr=0.01)))
    ours = train(tmp_path, DLRoverStrategy(sharding_constraints=whole), Model(one_group(kind, lr=0.01)))
    assert_same(stock, ours)


@pytest.mark.parametrize(
    "configure, message",
    [
        (one_group(Adam, lr=0.01), "table tables.embedding_bags.a: .* Adam on CPU.*data_parallel"),
        (one_group(SGD, lr=0.01, momentum=0.9), "no momentum, which is 0.9"),
        (one_group(Adagrad, lr=0.01, weight_decay=0.1), "no weight_decay, which is 0.1"),
        (lambda model: SGD(model.net.parameters(), 0.1), "tables.embedding_bags.a is in none of the optimizers"),
    ],
)
def test_optimizer_without_a_kernel_is_refused(configure: Configure, message: str, tmp_path: Path) -> None:
    with pytest.raises(TableOptimizerError, match=message):
        train(tmp_path, DLRoverStrategy(), Model(configure))


ADAM = {"lr": 0.02, "beta1": 0.8, "beta2": 0.9, "eps": 1e-7}


@pytest.mark.parametrize(
    "kind, options, device, found_kind, arguments",
    [
        (Adam, {"betas": (0.8, 0.9)}, "cuda", Adam, ADAM),
        (AdamW, {"betas": (0.8, 0.9)}, "cuda", Adam, {**ADAM, "weight_decay": 0.01}),
        (RowWiseAdagrad, {}, "cpu", RowWiseAdagrad, {"lr": 0.02, "eps": 1e-7}),
    ],
)
def test_optimizer_in_backward_keeps_its_arguments(
    kind: Any, options: Any, device: str, found_kind: Any, arguments: Any
) -> None:
    optimizer = kind([nn.Parameter(torch.zeros(2, 2))], lr=0.02, eps=1e-7, **options)
    found = in_backward("t", optimizer, optimizer.param_groups[0], device)
    assert (found.kind, found.arguments) == (found_kind, arguments)


def test_sync_batchnorm_works_with_tables(tmp_path: Path) -> None:
    model = Model(one_group(SGD, lr=0.1))
    model.net = nn.Sequential(nn.Linear(16, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))  # type: ignore[assignment]
    with pytest.raises(ValueError, match="SyncBatchNorm expected input tensor to be on GPU"):
        train(tmp_path, DLRoverStrategy(), model, sync_batchnorm=True)
    assert any(isinstance(part, nn.SyncBatchNorm) for part in model.modules())


def test_scaled_gradients_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedScriptError, match="precision='16-mixed' scales the loss"):
        train(tmp_path, DLRoverStrategy(), Model(one_group(SGD, lr=0.1)), plugins=[MixedPrecision("16-mixed", "cpu")])
