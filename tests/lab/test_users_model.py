from __future__ import annotations

from pathlib import Path

import pytest

from lightning_dlrover.lab.characterize.measure import Effort, check_users_model, measure_users_model
from lightning_dlrover.lab.characterize.points import Point

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
def test_model_that_cannot_be_measured_is_refused_in_words(script: Path, name: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_users_model(f"{script}:{name}")
