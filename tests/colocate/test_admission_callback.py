"""A Trainer next to other jobs of a dispatcher: it waits before its first step, and takes the threads that it is granted."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_dlrover import DLRoverCallback, DLRoverStrategy, variables
from lightning_dlrover.colocate.admission_client import AdmissionReport, Answer, read_reports, write_answer
from tests.support.quiet_trainer import quiet_trainer
from tests.support.waiting import eventually

NUM_STEPS = 30


class Model(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 256), nn.Linear(256, 1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        time.sleep(0.02)
        output: Tensor = self.net(batch[0])
        return output.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters())


def fit() -> L.Trainer:
    trainer = quiet_trainer(strategy=DLRoverStrategy(), callbacks=[DLRoverCallback(plan_every_s=0)], max_steps=NUM_STEPS)
    trainer.fit(Model(), DataLoader(TensorDataset(torch.randn(2000, 8)), batch_size=16))
    return trainer


@contextmanager
def admitted(folder: Path) -> Iterator[list[AdmissionReport]]:
    """Admit the job that asks in a folder; the list then holds its report."""
    seen: list[AdmissionReport] = []

    def dispatcher() -> None:
        seen.extend(eventually(lambda: [report for report in read_reports(folder) if report.waits], "a job that asks"))
        write_answer(folder, Answer(admitted=True, request=seen[0].request, threads=1))

    answering = threading.Thread(target=dispatcher)
    answering.start()
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        yield seen
    finally:
        torch.set_num_threads(threads)
        answering.join(30)


def test_trainer_asks_before_its_first_step_and_reports_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variables.SEAT, str(tmp_path))
    with admitted(tmp_path) as seen:
        trainer = fit()
        assert torch.get_num_threads() == 1
    assert trainer.global_step == NUM_STEPS
    (asked,) = seen
    assert asked.num_steps == 0
    assert asked.estimate_bytes > 50 << 20, asked.estimate_note
    assert asked.step_bytes > 0
    (last,) = read_reports(tmp_path)
    assert 10 < last.num_steps <= NUM_STEPS
    assert last.steps_left == NUM_STEPS - last.num_steps
    assert last.step_s > 0.02 * (last.num_steps - 1)


def test_trainer_of_a_measured_kind_estimates_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variables.SEAT, str(tmp_path))
    write_answer(tmp_path, Answer(memory_known=True))
    with admitted(tmp_path) as seen:
        assert fit().global_step == NUM_STEPS
    assert [report.estimate_bytes for report in seen] == [0]


def test_trainer_that_runs_by_itself_waits_for_no_dispatcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(variables.SEAT, raising=False)
    assert fit().global_step == NUM_STEPS
