from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from lightning_dlrover.lab.characterize import measure
from lightning_dlrover.lab.characterize.measure import (
    Effort,
    EnergyMeter,
    check_users_model,
    measure_limit,
    measure_users_model,
)
from lightning_dlrover.lab.characterize.points import Point
from tests.support.fake_nvml import FakeNvml, use_gpu

SCRIPT = """
import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset

class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

class WithData(Net):
    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.randn(640, 8)), 16)

class NeedsArguments(WithData):
    def __init__(self, width):
        super().__init__()

number = 3
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "users_net.py"
    path.write_text(SCRIPT)
    return path


def test_users_model_is_measured_by_lightnings_parts(script: Path) -> None:
    name = f"{script}:WithData"
    check_users_model(name)
    share = measure_users_model(Point("yours", model=name), Effort(block_s=0.03, num_blocks=3))
    assert len(share.blocks) == 3
    assert set(share.part_s) == {"data", "forward", "backward", "optimizer"}
    step_s = sorted(share.blocks)[1]
    assert 0.5 * step_s < sum(share.part_s.values()) < 2 * step_s


@pytest.mark.parametrize(
    "name, words",
    [
        ("Net", "has no train_dataloader"),
        ("NeedsArguments", "it must take no arguments"),
        ("Missing", "has no Missing"),
        ("number", "is a int, not a class"),
    ],
)
def test_model_that_cannot_be_measured_is_refused_with_the_reason(script: Path, name: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_users_model(f"{script}:{name}")


def test_energy_is_that_of_the_gpu_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml(tmp_path, (1, 1, 1))
    monkeypatch.setattr(measure, "load_nvml", lambda: nvml)
    use_gpu(monkeypatch, "2abc")
    nvml.joules = [1.0, 2.0, 3.0]
    meter = EnergyMeter(cuda=True, powercap=tmp_path)
    assert meter.joules() == 3.0
    nvml.joules = [10.0, 20.0, 30.5]
    assert meter.joules() == 30.5


def test_slice_of_a_gpu_has_no_energy_because_the_counter_is_the_whole_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "load_nvml", lambda: FakeNvml(tmp_path))
    use_gpu(monkeypatch, "slice-of-0abc")
    assert EnergyMeter(cuda=True, powercap=tmp_path).joules() is None


@pytest.mark.gpu
def test_random_rows_come_from_memory_and_not_from_a_cache(tmp_path: Path) -> None:
    copied, read = (statistics.median(measure_limit(name, 1, tmp_path)) for name in ("gpu_copy", "gpu_rows"))
    assert 0.05 * copied < read < copied
