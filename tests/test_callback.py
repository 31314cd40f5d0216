"""The callback in a real Trainer of one process: its measurements, logs, plans and messages."""

from __future__ import annotations

import logging
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_dlrover import DLRoverCallback, DLRoverStrategy
from lightning_dlrover import callback as callback_module
from lightning_dlrover.callback import SERIES
from lightning_dlrover.live.fit_parts import remaining_batches
from lightning_dlrover.rdzv.job.records import RoundRecord
from lightning_dlrover.rdzv.membership.member import Formation
from lightning_dlrover.tuning.analyst import Analyst
from lightning_dlrover.tuning.autoscale import TrialWatch
from lightning_dlrover.tuning.plan import Candidate, Decision, Settings
from lightning_dlrover.tuning.profiler import StepProfiler
from lightning_dlrover.tuning.samples import STEP_PARTS, StepProfile
from tests.support.quiet_trainer import quiet_trainer


class Model(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(8, 1)
        self.fail_at = -1

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if batch_idx == self.fail_at:
            raise ArithmeticError("the model's own")
        return nn.functional.mse_loss(self.net(batch[0]), batch[0].sum(1, keepdim=True))

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val", self.net(batch[0]).mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 1e-3)


def loader(num_rows: int = 800) -> DataLoader[tuple[Tensor, ...]]:
    return DataLoader(TensorDataset(torch.randn(num_rows, 8)), batch_size=8)


def trainer(tmp_path: Path, callback: DLRoverCallback, **kwargs: Any) -> L.Trainer:
    logger = CSVLogger(str(tmp_path), name="", version="")
    defaults = {"strategy": DLRoverStrategy(), "callbacks": [callback], "max_epochs": 2, "logger": logger}
    return quiet_trainer(**{**defaults, "log_every_n_steps": 10, **kwargs})


def test_windows_are_logged_and_a_recommendation_is_given_at_the_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    run = trainer(tmp_path, DLRoverCallback(window_s=0.01, plan_every_s=0.01))
    run.fit(Model(), loader(), loader(16))
    rows = [line.split(",") for line in (tmp_path / "metrics.csv").read_text().splitlines()]
    windows = [dict(zip(rows[0], row, strict=True)) for row in rows[1:]]
    first, *found = [w for w in windows if w.get("dlrover/step_time_s")]
    assert (first["dlrover/world_size"], first["dlrover/stall_s"], first["dlrover/step_time_s"]) == ("1.0", "0.0", "nan")
    assert {f"dlrover/{name}" for name in SERIES} == {name for name in rows[0] if name.startswith("dlrover/")}
    assert found
    for window in found:
        parts = sum(float(window[f"dlrover/{part}_s"]) for part in STEP_PARTS)
        assert parts == pytest.approx(float(window["dlrover/step_time_s"]), rel=1e-3)
        assert float(window["dlrover/world_size"]) == 1
        assert float(window["dlrover/global_batch"]) == 8
    (last,) = [r.getMessage() for r in caplog.records if r.getMessage().startswith("DLRover: ")]
    assert "`dlrover run` resizes a job while it trains" in last


@pytest.mark.parametrize(
    "step_s, high_s, advice",
    [
        (0.01, 0.015, "2 workers would be faster: 10 ms a step predicted (9 ms to 15 ms), 20 ms measured with one"),
        (0.01, 0.05, "2 workers might be faster: 10 ms a step predicted (9 ms to 50 ms), 20 ms measured with one"),
        (0.0195, 0.05, "one worker is enough for this job on this machine, with 20 ms a step"),
    ],
)
def test_advice_after_a_fit_promises_no_more_than_the_prediction(step_s: float, high_s: float, advice: str) -> None:
    one, two = Settings(1, 0, 1, 0), Settings(2, 0, 1, 0)
    candidates = (
        Candidate(one, 0.02, 0.019, 0.021, 1.0, 0.0, measured=True, feasible=True),
        Candidate(two, step_s, 0.009, high_s, 1.0, 0.0, measured=False, feasible=True),
    )
    stays = Decision(1, 0.0, one, one, "1 s of work is left", candidates, 0.02, 0.02, explored=False)
    assert callback_module._advice(stays) == advice


def test_rate_of_slow_first_steps_is_not_in_the_progress_bar(tmp_path: Path) -> None:
    class Bar(L.Callback):
        def __init__(self) -> None:
            self.shown: list[bool] = []

        def on_train_batch_end(self, trainer: L.Trainer, *_: object) -> None:
            self.shown.append("samples/s" in trainer.progress_bar_metrics)

    callback = DLRoverCallback(window_s=1e-9, plan_every_s=0)  # a window has three steps
    trainer(tmp_path, callback, callbacks=[callback, bar := Bar()], max_epochs=1).fit(Model(), loader())
    assert not bar.shown[3]
    assert bar.shown[-1]


def test_planning_can_be_switched_off(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    trainer(tmp_path, DLRoverCallback(window_s=0.01, plan_every_s=0)).fit(Model(), loader())
    assert not [r for r in caplog.records if r.getMessage().startswith("DLRover: ")]


def test_one_callback_may_be_used_for_several_fits(tmp_path: Path) -> None:
    callback = DLRoverCallback(window_s=0.01, plan_every_s=0.01)
    for number in range(2):
        run = trainer(tmp_path / str(number), callback, max_steps=30)
        run.fit(Model(), loader())
        assert run.global_step == 30


def test_the_scripts_own_error_is_not_hidden(tmp_path: Path) -> None:
    model = Model()
    model.fail_at = 5
    with pytest.raises(ArithmeticError, match="the model's own"):
        trainer(tmp_path, DLRoverCallback(window_s=0.001)).fit(model, loader())


def test_another_strategy_is_refused_with_the_line_to_change(tmp_path: Path) -> None:
    run = trainer(tmp_path, DLRoverCallback(), strategy="auto")
    with pytest.raises(TypeError, match=r"strategy=DLRoverStrategy\(\)"):
        run.fit(Model(), loader())


@pytest.mark.parametrize("window_s, plan_every_s", [(0.0, 1.0), (-1.0, 1.0), (1.0, -1.0)])
def test_settings_without_meaning_are_refused(window_s: float, plan_every_s: float) -> None:
    with pytest.raises(ValueError, match="window_s"):
        DLRoverCallback(window_s, plan_every_s)


def test_untunable_setting_is_refused_by_its_name() -> None:
    with pytest.raises(ValueError, match=r"tune names \['batch_size'\].*num_workers, loader_workers"):
        DLRoverCallback(tune=["num_workers", "batch_size"])  # type: ignore[list-item]


class TwoSteps(Model):
    """Takes two optimizer steps for each batch, as a generator and its critic do."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        for _ in range(2):
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()


class Remaining(L.Callback):
    """Remaining work after each batch."""

    def __init__(self) -> None:
        self.seen: list[float | None] = []

    def on_train_batch_end(self, trainer: L.Trainer, *_: object) -> None:
        self.seen.append(remaining_batches(trainer))


@pytest.mark.parametrize(
    "model, limits",
    [
        (Model, {"max_epochs": 2}),
        (Model, {"max_epochs": 2, "accumulate_grad_batches": 4}),
        (Model, {"max_epochs": -1, "max_steps": 10, "accumulate_grad_batches": 4}),
        (TwoSteps, {"max_epochs": 2}),
        (TwoSteps, {"max_epochs": 5, "max_steps": 80}),
    ],
)
def test_windows_and_remaining_work_are_counted_in_batches(
    model: type[Model], limits: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    windows: list[StepProfile] = []
    close_window = StepProfiler.close_window

    def closed(self: StepProfiler, *args: object) -> StepProfile | None:
        profile = close_window(self, *args)  # type: ignore[arg-type]
        windows.extend([profile] if profile is not None else [])
        return profile

    monkeypatch.setattr(StepProfiler, "close_window", closed)
    remaining = Remaining()
    callback = DLRoverCallback(window_s=0.001, plan_every_s=0)
    trainer(tmp_path, callback, callbacks=[callback, remaining], **limits).fit(model(), loader(160))
    num = 40
    assert len(remaining.seen) == num
    # The remaining batches are known from the batches per optimizer step.
    assert remaining.seen == pytest.approx([num - 1.0 - i for i in range(num)], abs=3)
    assert remaining.seen[-1] == 0
    assert len(windows) > 2
    for before, after in pairwise(windows):
        assert after.first_step == before.first_step + before.num_steps


def test_rounds_are_not_compared_by_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callback_module, "_new_place", lambda strategy, *_: strategy.live.formation.round.number)
    callback = DLRoverCallback()
    trainer: Any = SimpleNamespace(fit_loop=SimpleNamespace(_combined_loader=None))
    strategy: Any = SimpleNamespace(live=SimpleNamespace(formation=None))
    for record in [RoundRecord(number, ["w"], "", "loss", False) for number in range(1, 50)]:
        strategy.live.formation = None  # a round without a step
        strategy.live.formation = Formation(record, {}, 0)
        place: Any = callback._place(trainer, strategy)
        assert place == record.number


def test_trial_of_threads_far_too_slow_is_given_up_after_a_few_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callback_module, "TrialWatch", lambda: TrialWatch(min_s=0.0))
    given_up: list[Decision] = []
    monkeypatch.setattr(Analyst, "give_up", lambda _, trial, step_s: given_up.append(trial))
    threads = torch.get_num_threads()
    for number, more in enumerate((0, 1)):
        before, runs = Settings(1, 0, threads - 1, 0), Settings(1, 0, threads + more, 0)
        candidate = Candidate(runs, 1e-9, 1e-9, 1e-9, 1.0, 0.0, measured=False, feasible=True)
        trial = Decision(number, 0.0, before, runs, "a trial", (candidate,), 1e-9, 1e-9, explored=True)
        monkeypatch.setattr(Analyst, "trial", trial)
        callback = DLRoverCallback(window_s=1000.0, plan_every_s=0)
        trainer(tmp_path / str(number), callback, max_steps=5).fit(Model(), loader())
    # The first step has no duration, and two are needed. The second job does not run with the threads of its trial.
    assert [trial.decision_id for trial in given_up] == [0, 0, 0]
