"""The state that a joiner receives, and that a resumed Trainer continues with."""

from __future__ import annotations

import copy
import dataclasses
import enum
import functools
import warnings
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import lightning.pytorch.callbacks as lightning_callbacks
import numpy as np
import pytest
import pytorch_lightning
import torch
from lightning.pytorch.callbacks import BaseFinetuning, Callback
from lightning.pytorch.loggers import CSVLogger, Logger
from sklearn.preprocessing import StandardScaler
from torch.utils.data import DataLoader, TensorDataset

from lightning_dlrover import DLRoverStrategy
from lightning_dlrover.live import state
from lightning_dlrover.live.state import LoggedValue, _adopt_csv_log, _leave_comet, is_lightnings, resume, trained_parameters
from lightning_dlrover.rdzv.transport import transfer
from tests.support.quiet_trainer import quiet_trainer


class Size(enum.Enum):
    SMALL = 1


@dataclasses.dataclass
class Words:
    known: dict[str, int]


@dataclasses.dataclass
class Checked:
    """Runs its own code when it is created."""

    value: int

    def __post_init__(self) -> None:
        raise AssertionError("ran")


class Scaler:
    def __init__(self) -> None:
        self.mean = 2.0


class Outer:
    class Inner:
        pass


def sent(value: object, own: object = None) -> object:
    """Send `value` to a worker that has `own` in its state; return the result there."""
    return transfer.loads(transfer.pack(value).body, (LoggedValue,), transfer.names_in(transfer.pack(own)))


@pytest.mark.parametrize("value", [Size.SMALL, Words({"a": 1}), [Size.SMALL, Words({})]])
def test_enums_and_dataclasses_are_accepted_unasked(value: object) -> None:
    assert sent(value) == value


def test_classes_of_the_own_state_are_accepted() -> None:
    received = sent(Scaler(), own=Scaler())
    assert isinstance(received, Scaler)
    assert received.mean == 2.0
    fitted = sent(StandardScaler().fit([[1.0], [3.0]]), own=StandardScaler())
    assert isinstance(fitted, StandardScaler)
    assert fitted.mean_ == pytest.approx([2.0])
    maker = sent(functools.partial(torch.nn.Linear, 3), own=functools.partial(torch.nn.Linear, 2))
    assert isinstance(maker, functools.partial)
    assert maker.args == (3,)


def test_other_classes_are_refused_by_name() -> None:
    with pytest.raises(transfer.TransferError, match="Scaler, a type not allowed in transfers"):
        sent(Scaler(), own=Words({}))
    checked = object.__new__(Checked)
    checked.value = 1
    with pytest.raises(transfer.TransferError, match="Checked, a type not allowed in transfers"):
        sent(checked)


def test_class_inside_a_class_is_refused_with_advice() -> None:
    with pytest.raises(transfer.TransferError, match="move its class, which is inside another one"):
        sent(Outer.Inner(), own=Outer.Inner())


def test_object_that_cannot_be_written_is_named() -> None:
    with pytest.raises(transfer.TransferError, match=r"lambda.*leave it out of state_dict and on_save_checkpoint"):
        transfer.pack({"kept": lambda: 1})


def test_subclasses_of_lightnings_callbacks_are_recognised() -> None:
    class Kept(lightning_callbacks.ModelCheckpoint):
        pass

    class ModelCheckpoint(Callback):
        """Shares its name with Lightning's class, and nothing else."""

    assert is_lightnings(Kept(), "ModelCheckpoint")
    assert not is_lightnings(ModelCheckpoint(), "ModelCheckpoint")


@pytest.mark.parametrize(
    "trained, fresh",
    [
        (torch.ones(3), torch.zeros(3)),
        (np.ones(3), np.zeros(3)),
        ([1.0, 2.0], []),
        (deque([torch.ones(2)]), deque()),
        ({"seen": 4}, {}),
        ({3}, set()),
        (torch.ones(3), 0),
        (2, 0),
    ],
)
def test_attributes_that_differ_on_a_joiner_are_named(trained: object, fresh: object, caplog: pytest.LogCaptureFixture) -> None:
    def holding(value: object) -> torch.nn.Module:
        part = Part()
        part.kept = value
        return torch.nn.Sequential(part)

    theirs = state._plain_attributes(holding(trained))
    state._warn_of_attributes(holding(copy.deepcopy(trained)), theirs)
    assert not caplog.text
    state._warn_of_attributes(holding(fresh), theirs)
    assert "the model's attributes 0.kept (" in caplog.text


class Part(torch.nn.Module):
    """Keeps something that is no buffer."""

    kept: Any


class Own(Logger):
    """A user's logger."""

    def __init__(self) -> None:
        self.run = ""

    name = version = "own"

    def log_metrics(self, metrics: Any, step: Any = None) -> None: ...

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {"run": self.run}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.run = state["run"]


def test_next_version_is_rank_0s(tmp_path: Path) -> None:
    first, other = CSVLogger(tmp_path), pytorch_lightning.loggers.CSVLogger(tmp_path)
    runs = state.capture_runs([first])
    (tmp_path / "lightning_logs" / "version_0").mkdir(parents=True)
    state.adopt_runs([other], runs)
    assert other.version == first.version == 0


def test_logger_of_the_users_own_gets_its_state() -> None:
    first, other = Own(), Own()
    first.run = "a"
    state.adopt_runs([other], state.capture_runs([first]))
    assert other.run == "a"


def test_experiment_that_comet_starts_too_early_is_ended() -> None:
    ended: list[bool] = []
    logger = SimpleNamespace(_experiment=SimpleNamespace(end=lambda: ended.append(True)))
    _leave_comet(logger)
    assert ended == [True]
    assert logger._experiment is None


@pytest.mark.parametrize("new", [{"loss": 2.0}, {"loss": 2.0, "val": 0.5}], ids=["same columns", "new column"])
@pytest.mark.parametrize("num_rows", [0, 3])
def test_a_csv_log_taken_over_from_another_worker_keeps_its_rows(num_rows: int, new: dict[str, Any], tmp_path: Path) -> None:
    former, successor = (CSVLogger(tmp_path, name="log", version=0) for _ in range(2))
    for step in range(num_rows):
        former.log_metrics({"loss": float(step)}, step)
    if num_rows:
        former.save()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # must not warn, for example that earlier rows will be deleted
        _adopt_csv_log(successor)
    successor.log_metrics(new, num_rows)
    successor.save()
    rows = (Path(successor.log_dir) / "metrics.csv").read_text().splitlines()
    assert {*rows[0].split(",")} == {"step", *new}
    assert len(rows) == num_rows + 2


Groups = list[list[float]]


class Thaw(BaseFinetuning):
    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.body)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.body, optimizer, lr=0.25)


class Model(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)
        self.seen: list[tuple[int, Groups, bool]] = []

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        groups = [[group["lr"], len(group["params"])] for group in self.trainer.optimizers[0].param_groups]
        self.seen.append((self.trainer.global_step, groups, all(p.requires_grad for p in self.parameters())))
        loss: torch.Tensor = self.head(self.body(batch[0])).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], 0.5)


class Keep(Callback):
    """Keeps the checkpoint after a step, as the strategy of a job writes it."""

    def __init__(self, step: int, file: Path) -> None:
        self._step, self._file = step, file

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if self._step % 4:
            self._keep(trainer)

    def on_train_epoch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self._keep(trainer)

    def _keep(self, trainer: L.Trainer) -> None:
        if trainer.global_step == self._step and not self._file.exists():
            checkpoint = trainer._checkpoint_connector.dump_checkpoint()
            checkpoint["dlrover"] = {"parameters": trained_parameters(trainer)}
            torch.save(checkpoint, self._file)


class Resume(Callback):
    """Continues from a checkpoint once the first epoch has begun, as a worker of a job does."""

    def __init__(self, file: Path) -> None:
        self._checkpoint = torch.load(file, weights_only=True)

    def on_train_epoch_start(self, trainer: L.Trainer, *_: Any) -> None:
        checkpoint, self._checkpoint = self._checkpoint, None
        if checkpoint is not None:
            resume(trainer, checkpoint)


def train(folder: Path, *callbacks: Callback) -> Model:
    model = Model()
    trainer = quiet_trainer(max_epochs=4, default_root_dir=folder, strategy=DLRoverStrategy(), callbacks=list(callbacks))
    trainer.fit(model, DataLoader(TensorDataset(torch.ones(8, 2)), 2))
    return model


@pytest.mark.parametrize("step", [2, 4, 6, 8, 10])  # 4 and 8 are ends of epochs; epoch 1 begins with step 4
def test_unfrozen_parameters_are_trained_in_their_groups_after_a_resume(step: int, tmp_path: Path) -> None:
    whole = train(tmp_path, Thaw(), Keep(step, tmp_path / "kept.ckpt"))
    resumed = train(tmp_path, Thaw(), Resume(tmp_path / "kept.ckpt"))
    assert [len(groups) for _, groups, _ in whole.seen] == [1] * 4 + [2] * 12
    rest = 4 - step % 4  # steps until the epoch's end, which only a job's own loaders find again
    assert resumed.seen[:rest] == whole.seen[step : step + rest]
