"""Jobs with workers that share one device through gloo, for `test_gpu_jobs.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader

from lightning_dlrover import DLRoverStrategy
from tests.e2e.toy_job import SEED, L, Recorder, Rows, ToyModel, ToySettings, make_trainer


@dataclass(frozen=True)
class DeviceSettings(ToySettings):
    accelerator: str = "cpu"


class DeviceModel(ToyModel):
    """Records the device of its state and the device memory in use."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        states = [v for o in self.trainer.optimizers for state in o.state.values() for v in state.values()]
        tensors = [*self.parameters(), *(v for v in states if isinstance(v, torch.Tensor) and v.dim())]
        self.recorder.write(
            "device",
            **self.where(),
            kinds=sorted({tensor.device.type for tensor in tensors}),
            taken=torch.cuda.memory_allocated() if self.device.type == "cuda" else 0,
        )
        super().on_train_batch_end(outputs, batch, batch_idx)


def train_on_device(recorder: Recorder, settings: DeviceSettings) -> None:
    """Run `train_toy` on one device that all workers share, which NCCL would refuse."""
    L.seed_everything(SEED, verbose=False)
    trainer = make_trainer(
        recorder.place.folder,
        strategy=DLRoverStrategy(global_batch_size=settings.batch_size, check_interval_s=0.03, process_group_backend="gloo"),
        accelerator=settings.accelerator,
        devices=1,
        max_epochs=settings.max_epochs,
        limit_val_batches=0,
    )
    loader = DataLoader(Rows(settings.num_rows), settings.batch_size, shuffle=settings.shuffle)
    trainer.fit(DeviceModel(recorder, settings.step_s), loader)
    recorder.write("after_fit", step=trainer.global_step)
