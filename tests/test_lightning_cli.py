"""Strategy and callback as `LightningCLI` creates them from a configuration."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest

from lightning_dlrover import DLRoverCallback, DLRoverStrategy
from lightning_dlrover.live import training
from tests.support.live_parts import BETWEEN, a_formation, hellos

pytest.importorskip("jsonargparse", reason="LightningCLI needs it")

from lightning.pytorch.cli import LightningCLI, SaveConfigCallback

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
    assert [callback._tuning.plan_every_s for callback in trainer.callbacks if isinstance(callback, DLRoverCallback)] == [0]  # type: ignore[attr-defined]


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


@pytest.mark.parametrize("number", [1, 2])
def test_configuration_is_written_again_only_by_a_job_that_comes_back(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.yaml").write_text("of an earlier life\n")
    args = ["--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.logger=false", "--trainer.strategy=dlrover"]
    cli = LightningCLI(Model, run=False, args=[*args, f"--trainer.default_root_dir={tmp_path}"])
    saving = next(each for each in cli.trainer.callbacks if isinstance(each, SaveConfigCallback))  # type: ignore[attr-defined]
    first_round = a_formation("w0", hellos(BETWEEN), number=number)
    monkeypatch.setattr(training, "World", lambda *_: SimpleNamespace(start=lambda: first_round))
    monkeypatch.setattr(training.JobSession, "_take_over_world", lambda *_: SimpleNamespace(continue_runs=lambda: None))
    etcd = SimpleNamespace(endpoints="127.0.0.1:2379")
    config: Any = SimpleNamespace(
        workers_per_node=1, node_workers=1, min_workers=1, max_workers=2, pool="", etcd=etcd, prefix="/dlrover", run_id="job"
    )
    strategy: Any = cli.trainer.strategy
    training.JobSession(config, strategy, 0.1)._start(cli.trainer, "gloo")
    with pytest.raises(RuntimeError, match="to NOT exist") if number == 1 else nullcontext():
        saving.setup(cli.trainer, cli.model, "fit")
    assert ((tmp_path / "config.yaml").read_text() == "of an earlier life\n") == (number == 1)
