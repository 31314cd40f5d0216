"""A `training_step` that returns None, for a bad row: on one worker, and on all."""

from __future__ import annotations

from pathlib import Path

from tests.support.dlrover_process import Dlrover

SCRIPT = """
import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_dlrover import DLRoverCallback, DLRoverStrategy

class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 1)
        self.weights = []

    def training_step(self, batch, _):
        if torch.isnan(batch[0]).any():
            return None
        return self.net(batch[0]).square().mean()

    def on_train_batch_end(self, *_):
        sums = self.all_gather(self.net.weight.detach().sum())
        assert sums.unique().numel() == 1 and sums.isfinite().all(), sums
        self.weights.append(sums[0].item())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01, momentum=0.9)

L.seed_everything(1)
rows = torch.ones(32, 4)
rows[9] = rows[20:24] = float("nan")  # of the batches of 4 rows, one half of number 2, and all of number 5
trainer = L.Trainer(
    accelerator="cpu", strategy=DLRoverStrategy(), callbacks=[DLRoverCallback()], max_epochs=1, logger=False,
    enable_checkpointing=False, enable_progress_bar=False,
)
model = Model()
trainer.fit(model, DataLoader(TensorDataset(rows), 2))
print("world", trainer.world_size, "steps", trainer.global_step, end=" ")
print("moved at", [i for i in range(1, 8) if model.weights[i] != model.weights[i - 1]])
"""


def test_batch_without_loss_moves_no_weight_and_a_share_without_loss_ends_no_worker(dlrover: Dlrover, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    run = dlrover.start("--workers", "2", script)
    assert run.wait_for_exit(90) == 0, run.output
    assert run.output.count("world 2 steps 8 moved at [1, 2, 3, 4, 6, 7]") == 2, run.output
    assert "[round] round 2" not in run.output
