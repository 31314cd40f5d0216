"""Strategy and callback as `LightningCLI` creates them from a configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest

from lightning_dlrover import DLRoverCallback, DLRoverStrategy

pytest.importorskip("jsonargparse", reason="LightningCLI needs it")

from lightning.pytorch.cli import LightningCLI

CONFIG = """
trainer:
  accelerator: cpu
  devices: 1
  logger: false
  strategy:
    class_path: lightning_dlrover.DLRoverStrategy
    init_args: {global_batch_size: 16, timeout: "0:10:00"}
    dict_kwargs: {find_unused_parameters: true}
  callbacks:
    - class_path: lightning_dlrover.DLRoverCallback
      init_args: {plan_every_s: 0}
"""


@pytest.fixture(autouse=True)
def _own_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["train.py"])


class Model(L.LightningModule):
    pass


def trainer_of(args: list[str], **kwargs: Any) -> L.Trainer:
    return LightningCLI(Model, run=False, args=args, save_config_callback=None, **kwargs).trainer


def test_configuration_sets_strategy_and_callback(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(CONFIG)
    trainer = trainer_of(["--config", str(file)])
    strategy = trainer.strategy
    assert isinstance(strategy, DLRoverStrategy)
    assert strategy._global_batch_size == 16
    assert strategy._ddp_kwargs == {"find_unused_parameters": True}
    assert [callback._intentions.plan_every_s for callback in trainer.callbacks if isinstance(callback, DLRoverCallback)] == [0]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "strategy",
    ["dlrover", {"class_path": "lightning_dlrover.DLRoverStrategy", "init_args": {"check_interval_s": 1.0}}],
    ids=str,
)
def test_trainer_defaults_hold_a_name_or_a_class_path(strategy: Any) -> None:
    defaults = {"accelerator": "cpu", "devices": 1, "logger": False, "strategy": strategy}
    assert isinstance(trainer_of([], trainer_defaults=defaults).strategy, DLRoverStrategy)


def test_command_line_sets_the_strategys_arguments() -> None:
    args = ["--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.logger=false"]
    args += ["--trainer.strategy=lightning_dlrover.DLRoverStrategy", "--trainer.strategy.global_batch_size=4"]
    strategy = trainer_of(args).strategy
    assert isinstance(strategy, DLRoverStrategy)
    assert strategy._global_batch_size == 4
