"""The strategy without a job around it: its refusals, and the unchanged training of a plain script."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import StrategyRegistry
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import lightning_dlrover
from lightning_dlrover import DLRoverStrategy
from lightning_dlrover.live.training import JobSession
from lightning_dlrover.tuning.profiler import HostMark
from tests.support.quiet_trainer import quiet_trainer

JOB = {"DLROVER_RUN_ID": "job", "DLROVER_ENDPOINT": "localhost:2379", "DLROVER_AGENT_ID": "a"}


class Model(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(4, 1)
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def trainer_of(folder: Path, strategy: Any) -> L.Trainer:
    return quiet_trainer(strategy=strategy, max_epochs=2, default_root_dir=folder)


def train(folder: Path, strategy: Any, model: Model | None = None) -> Model:
    L.seed_everything(0, verbose=False)
    generator = torch.Generator().manual_seed(0)
    rows = TensorDataset(torch.randn(20, 4, generator=generator), torch.randn(20, 1, generator=generator))
    model = model or Model()
    trainer = trainer_of(folder, strategy)
    trainer.fit(model, DataLoader(rows, batch_size=6))  # any other distributed strategy of Lightning's would shuffle it
    assert trainer.world_size == 1
    return model


@pytest.fixture(autouse=True)
def no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in JOB:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def in_job(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name, value in JOB.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


@pytest.mark.parametrize("by_name", [False, True])
def test_a_plain_script_trains_exactly_as_without_the_strategy(by_name: bool, tmp_path: Path) -> None:
    ours = train(tmp_path, "dlrover" if by_name else DLRoverStrategy())
    stock = train(tmp_path, "auto")
    assert ours.losses == stock.losses
    assert len(ours.losses) == 8
    assert not torch.distributed.is_initialized()


def test_plain_script_validates_tests_and_predicts(tmp_path: Path) -> None:
    class Evaluated(Model):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val", float(len(batch)))

        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("test", float(len(batch)))

        def predict_step(self, batch: Any, batch_idx: int) -> int:
            return len(batch)

    model = train(tmp_path, DLRoverStrategy(), Evaluated())
    trainer = quiet_trainer(strategy=DLRoverStrategy(), default_root_dir=tmp_path)
    loader = DataLoader(TensorDataset(torch.zeros(6, 8)), 3)
    assert trainer.validate(model, loader, verbose=False) == [{"val": 1.0}]
    assert trainer.test(model, loader, verbose=False) == [{"test": 1.0}]
    assert trainer.predict(model, loader) == [1, 1]


def test_a_plain_script_has_no_live_job(tmp_path: Path) -> None:
    strategy = DLRoverStrategy()
    marks = []

    def mark() -> HostMark:
        marks.append(HostMark())
        return marks[-1]

    strategy.times.start(mark)
    model = train(tmp_path, strategy)
    assert strategy.live is None
    assert len(marks) == 8 * len(model.losses)  # each is an event on a GPU
    seconds = strategy.times.end_step().seconds()
    assert seconds is not None
    assert min(seconds["forward"], seconds["backward"], seconds["optimizer"]) > 0


def test_the_strategy_is_known_by_name() -> None:
    assert lightning_dlrover.DLRoverStrategy is DLRoverStrategy
    assert "dlrover" in StrategyRegistry


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"global_batch_size": 0}, "global_batch_size is 0, it must be at least 1"),
        ({"check_interval_s": 0.0}, "check_interval_s is 0.0, it must be above 0"),
        ({"check_interval_s": float("nan")}, "check_interval_s is nan"),
        ({"timeout": timedelta()}, "timeout is 0:00:00, it must be above 0"),
        ({"global_batch_size": "64"}, "global_batch_size of DLRoverStrategy is '64', of type str; .* whole number"),
        ({"global_batch_size": 64.0}, "is 64.0, of type float"),
        ({"global_batch_size": True}, "is True, of type bool"),
        ({"check_interval_s": "1"}, "check_interval_s .* must be a number of seconds"),
        ({"timeout": 60}, "timeout .* must be a datetime.timedelta"),
        ({"sharders": object()}, "sharders .* must be a list of torchrec's sharders"),
        ({"sharding_constraints": []}, "sharding_constraints .* must be a mapping"),
        ({"snapshots": 30}, "snapshots .* must be a SnapshotConfig, or None"),
        ({"max_share": 0}, "max_share is 0, it must be at least 1"),
        ({"max_share": "all"}, "max_share .* must be a whole number of samples, 'whole' or None"),
        ({"compare_data": "no"}, "compare_data .* must be True or False"),
    ],
)
def test_an_argument_that_cannot_be_meant_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        DLRoverStrategy(**arguments)


@pytest.mark.parametrize("missing", ["DLROVER_ENDPOINT", "DLROVER_AGENT_ID"])
def test_incomplete_job_environment_is_an_error_that_names_the_rest(missing: str, in_job: pytest.MonkeyPatch) -> None:
    in_job.delenv(missing)
    with pytest.raises(ValueError, match=f"{missing}.*torchrun --rdzv-backend=etcd-v3"):
        DLRoverStrategy()


def test_text_in_the_environment_in_place_of_a_number_is_named(in_job: pytest.MonkeyPatch) -> None:
    in_job.setenv("DLROVER_MAX_NODES", "many")
    with pytest.raises(ValueError, match="DLROVER_MAX_NODES is 'many', not a whole number"):
        DLRoverStrategy()


def test_the_timeout_of_the_strategy_holds_for_the_groups_it_forms(in_job: pytest.MonkeyPatch) -> None:
    strategy = DLRoverStrategy(timeout=timedelta(seconds=77))
    assert strategy._job is not None
    assert strategy._job.config.collective_timeout_s == 77


def test_leave_between_two_fits_runs_no_on_exception(in_job: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Alarm(L.Callback):
        was_raised = False

        def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
            self.was_raised = True

    def leave() -> None:
        raise SystemExit(0)

    live = SimpleNamespace(fits=SimpleNamespace(begin_later=leave))
    former = SimpleNamespace(live=live, world=object(), continue_after_error=lambda: None)
    in_job.setattr(JobSession, "newest", former)
    alarm = Alarm()
    trainer = quiet_trainer(strategy=DLRoverStrategy(), default_root_dir=tmp_path, callbacks=[alarm])
    with pytest.raises(SystemExit):
        trainer.fit(Model(), DataLoader(TensorDataset(torch.zeros(4, 4), torch.zeros(4, 1))))
    assert not alarm.was_raised
    assert alarm in trainer.callbacks  # type: ignore[attr-defined]


def test_forward_that_ends_early_leaves_the_module_unchanged() -> None:
    class Broken(torch.nn.Module):
        """Simulates DDP when a worker is lost during the broadcast of buffers."""

        def forward(self, *_: Any) -> None:
            raise RuntimeError("Connection closed by peer")

    class Doubling(L.LightningModule):
        def forward(self, value: int) -> int:
            return 2 * value

    module = Doubling()
    with pytest.raises(RuntimeError, match="closed by peer"):
        DLRoverStrategy()._forward_redirection(Broken(), module, "training_step", 1)
    assert module(3) == 6


@pytest.mark.parametrize("op, expected", [("mean", torch.float64), ("sum", torch.int64)])
def test_a_mean_of_whole_numbers_is_not_rounded(op: str, expected: torch.dtype) -> None:
    assert DLRoverStrategy().reduce(torch.tensor(3), reduce_op=op).dtype == expected


class TableModel(Model):
    """A model with one table, which its first batch trains."""

    def __init__(self) -> None:
        super().__init__()
        torchrec = pytest.importorskip("torchrec", reason="sharded tables need torchrec")
        config = torchrec.EmbeddingBagConfig(name="t", embedding_dim=4, num_embeddings=50, feature_names=["f"])
        self.tables = torchrec.EmbeddingBagCollection(device=torch.device("meta"), tables=[config])
        self.jagged = torchrec.KeyedJaggedTensor
        self.called: list[type] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.called.append(type(self.trainer.strategy.model))
        ids = torch.arange(len(batch[0]))
        found = self.tables(self.jagged(keys=["f"], values=ids, lengths=torch.ones_like(ids)))
        return nn.functional.mse_loss(self.net(batch[0] + found.values()), batch[1])

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("loss", batch[0].mean())


@pytest.fixture
def group_of_tables() -> Iterator[None]:
    """Destroy the process group that a Trainer with tables makes for the rest of its process."""
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group_of_tables")
def test_trained_model_with_tables_is_garbage_collected(tmp_path: Path) -> None:
    model = train(tmp_path, DLRoverStrategy(), TableModel())
    trained = weakref.ref(model)
    del model
    gc.collect()
    assert trained() is None


@pytest.mark.usefixtures("group_of_tables")
def test_dense_part_beside_tables_stays_in_ddp_in_later_fits(tmp_path: Path) -> None:
    class OneOfTwo(DLRoverStrategy):
        world_size = 2

    first, second = trainer_of(tmp_path, OneOfTwo()), trainer_of(tmp_path, OneOfTwo())
    model, rows = TableModel(), DataLoader(TensorDataset(torch.zeros(6, 4), torch.zeros(6, 1)), 6)
    for trainer, last_epoch in ((first, 1), (first, 2), (second, 1), (first, 3)):
        trainer.fit_loop.max_epochs = last_epoch
        trainer.fit(model, rows)
        trainer.validate(model, rows, verbose=False)  # Lightning sets the bare module for it
    assert model.called == [DistributedDataParallel] * 4
    assert first.strategy.model is second.strategy.model
