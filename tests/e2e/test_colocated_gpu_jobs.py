"""Lightning jobs that share one GPU."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lightning_dlrover.colocate import run_queue
from lightning_dlrover.colocate.journal import Ended, JobSpec, Profiled, read_records

pytestmark = pytest.mark.gpu

SCRIPT = """
import sys, torch, lightning as L
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from lightning_dlrover import DLRoverCallback, DLRoverStrategy

class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(512, 8192), nn.ReLU(), nn.Linear(8192, 8192), nn.ReLU(), nn.Linear(8192, 1))

    def training_step(self, batch, _):
        return self.layers(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 1e-4)

quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
trainer = L.Trainer(
    strategy=DLRoverStrategy(), callbacks=[DLRoverCallback(plan_every_s=0)], accelerator="gpu", devices=1,
    max_steps=int(sys.argv[1]), max_epochs=-1, **quiet
)
trainer.fit(Model(), DataLoader(TensorDataset(torch.randn(65536, 512)), batch_size=1024))
"""


def test_jobs_share_a_gpu_within_the_peaks_that_were_measured(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    jobs = [JobSpec(f"job-{number}", (sys.executable, "train.py", "1500"), str(tmp_path), device="gpu") for number in range(3)]
    run_queue(jobs, tmp_path / "out", devices=["gpu:0"])
    records = read_records(tmp_path / "out")
    ends = [record for record in records if isinstance(record, Ended)]
    assert [end.result for end in ends] == ["done"] * 3, [end.reason for end in ends]
    assert all(end.gpu_peak_bytes > 1 << 30 for end in ends)
    assert all(end.gpu_peak_bytes <= end.gpu_estimate_bytes for end in ends if end.gpu_estimate_bytes)
    profiles = [record for record in records if isinstance(record, Profiled)]
    assert profiles
    assert 0.05 < profiles[0].use["gpu"] <= 1.0
