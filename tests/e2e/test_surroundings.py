"""A job trains in surroundings that were not made for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.dlrover_process import Dlrover

TRAIN = """
import sys

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_dlrover import DLRoverCallback, DLRoverStrategy

class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 1)

    def training_step(self, batch, _):
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)

if __name__ == "__main__":
    L.seed_everything(1)
    trainer = L.Trainer(
        accelerator="cpu", strategy=DLRoverStrategy(), callbacks=[DLRoverCallback()], max_epochs=2, logger=False,
        enable_checkpointing=False, enable_progress_bar=False,
    )
    trainer.fit(Model(), DataLoader(TensorDataset(torch.ones(64, 4)), 4))
    print("ends with", sys.argv[1:], trainer.global_step, trainer.world_size)
"""

OF_OTHERS = {
    "RANK": "7",
    "WORLD_SIZE": "9",
    "LOCAL_RANK": "3",
    "LOCAL_WORLD_SIZE": "4",
    "NODE_RANK": "5",
    "GROUP_RANK": "6",
    "MASTER_ADDR": "elsewhere.invalid",
    "MASTER_PORT": "1",
    "PET_NNODES": "4",
    "PET_NPROC_PER_NODE": "2",
    "SLURM_JOB_ID": "77",
    "SLURM_JOB_NAME": "train",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NODELIST": "a,b",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_JOB_NUM_NODES": "2",
    "PBS_JOBID": "3.x",
    "PBS_NODEFILE": "/nonexistent",
    "LSB_JOBID": "4",
    "LSB_DJOB_RANKFILE": "/nonexistent",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "2",
    "PMI_SIZE": "4",
    "KUBERNETES_PORT": "tcp://192.0.2.1:443",
}
"""Variables of launchers and schedulers that know nothing of the job."""


def test_module_trains_for_a_user_without_name_and_home_beside_variables_of_others(dlrover: Dlrover, tmp_path: Path) -> None:
    unknown = ["unshare", "--user", "--map-user=54321"]
    if subprocess.run([*unknown, "true"], check=False, capture_output=True).returncode:
        pytest.skip("this machine has no user namespaces")
    package = dlrover.folder / "package"
    package.mkdir()
    (package / "train.py").write_text(TRAIN)
    taken = ("HOME", "USER", "LOGNAME", "XDG_DATA_HOME", "DLROVER_HISTORY")
    nameless = ["env", *(f"--unset={name}" for name in taken)]
    others = [f"{name}={value}" for name, value in OF_OTHERS.items()]
    run = [sys.executable, "-m", "lightning_dlrover.cli", "run", "--workers", "2:2", "-m", "package.train", "--lr", "1"]
    done = dlrover.process([*unknown, *nameless, *others, f"TMPDIR={tmp_path}", *run], timeout_s=90)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("ends with ['--lr', '1'] 16 2") == 2, done.stdout
    assert not (dlrover.folder / "~").exists()
