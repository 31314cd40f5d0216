"""The end of a job's output: errors that the script catches or not, and how to continue."""

from __future__ import annotations

import signal
from pathlib import Path

from tests.support.dlrover_process import Dlrover

SCRIPT = """
import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_dlrover import DLRoverCallback, DLRoverStrategy

class Pruned(Exception):
    pass

class Prune(L.Callback):
    def on_train_epoch_end(self, trainer, pl_module):
        raise Pruned

class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 1)

    def training_step(self, batch, _):
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)

def fit(*callbacks):
    L.seed_everything(1)
    trainer = L.Trainer(
        accelerator="cpu", strategy=DLRoverStrategy(), callbacks=[DLRoverCallback(), *callbacks], max_epochs=2, logger=False,
        enable_checkpointing=False, enable_progress_bar=False,
    )
    trainer.fit(Model(), DataLoader(TensorDataset(torch.ones(64, 4)), 4))
    return trainer.global_step, trainer.world_size
"""


def test_study_continues_after_fits_that_an_error_has_ended(dlrover: Dlrover, tmp_path: Path) -> None:
    script = tmp_path / "study.py"
    script.write_text(
        SCRIPT
        + """
found = []
for callbacks in ([Prune()], [], [Prune()], [], [Prune()]):
    try:
        found.append(fit(*callbacks))
    except Pruned:
        found.append("pruned")
print("found", found)
"""
    )
    run = dlrover.start("--workers", "2", script)
    assert run.wait_for_exit(90) == 0, run.output
    whole = "(16, 2)"
    assert run.output.count(f"found ['pruned', {whole}, 'pruned', {whole}, 'pruned']") == 2
    assert "Traceback" not in run.output


def test_error_in_the_first_step_is_shown_once(dlrover: Dlrover, tmp_path: Path) -> None:
    script = tmp_path / "faulty.py"
    script.write_text(
        SCRIPT.replace("return self.net(batch[0])", "raise ValueError('boom')\n        return self.net(batch[0])") + "fit()\n"
    )
    run = dlrover.start("--workers", "2", script)
    assert run.wait_for_exit(90) == 1
    assert run.output.count("Traceback") == 1, run.output
    assert "[round] round 2" not in run.output
    last = run.output.splitlines()[-1]
    assert "failed before the first step: ValueError: boom (at " in last
    assert last.endswith("faulty.py:21 (training_step))")


def test_interrupted_job_ends_with_its_checkpoint_and_the_next_move(dlrover: Dlrover, tmp_path: Path) -> None:
    script = tmp_path / "kept.py"
    script.write_text(
        SCRIPT.replace("        return self.net", "        time.sleep(0.02)\n        return self.net")
        .replace("import torch\n", "import time\nimport torch\n", 1)
        .replace("max_epochs=2", "max_epochs=999")
        .replace("enable_checkpointing=False", f"default_root_dir={str(tmp_path)!r}")
        + "fit(L.pytorch.callbacks.ModelCheckpoint('kept', every_n_train_steps=4))\n"
    )
    run = dlrover.start("--workers", "1", script)
    run.wait_for(lambda: list(tmp_path.rglob("epoch=*.ckpt")), "a checkpoint")
    run.process.send_signal(signal.SIGINT)
    assert run.wait_for_exit(60) == 130
    last = run.output.splitlines()[-1]
    assert last.startswith("dlrover: newest checkpoint of job job: /")
    assert "to continue from it, start a job under another --rdzv-id with trainer.fit(..., ckpt_path='/" in last
    assert Path(last.partition("ckpt_path='")[2].partition("'")[0]).is_file()
