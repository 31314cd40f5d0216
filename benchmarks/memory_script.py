"""The script of `memory_growth.py`: a training with memory that grows in every step.

`leak`: a list that is never emptied. `table`: rows that are created when their key first occurs, each on the worker that owns
the key. A new owner of keys creates their rows anew, so a worker holds a share of all rows that the job has used.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from torch.utils.data import DataLoader
from training import Perceptron, RepeatedRows

from lightning_dlrover import DLRoverCallback, DLRoverStrategy

BYTES_PER_ROW = 65536


class Growing(Perceptron):
    def __init__(self, what: str, bytes_per_step: int, step_s: float) -> None:
        super().__init__(64, 1, step_s)
        self._what = what
        self._rows_per_step = bytes_per_step // BYTES_PER_ROW
        self._rows: dict[int, np.ndarray[Any, Any]] = {}

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        seen = (self.trainer.global_step + 1) * self._rows_per_step
        if self._what == "leak":
            first = len(self._rows)
            new = list(range(first, first + self._rows_per_step))
        else:
            mine = range(self.trainer.global_rank, seen, self.trainer.world_size)
            for key in [key for key in self._rows if key not in mine]:
                del self._rows[key]
            new = [key for key in mine if key not in self._rows]
        for key in new:
            self._rows[key] = np.full(BYTES_PER_ROW // 8, float(key))
        return super().training_step(batch, batch_idx)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--what", choices=("leak", "table"), required=True)
    parser.add_argument("--bytes-per-step", type=int, required=True)
    parser.add_argument("--step-s", type=float, default=0.05)
    parser.add_argument("--max-steps", type=int, required=True)
    parser.add_argument("--static", action="store_true", help="train without the watchdog")
    parser.add_argument("--finished", type=Path, required=True, help="file that rank 0 writes at the end")
    options = parser.parse_args()
    L.seed_everything(7, verbose=False)
    trainer = L.Trainer(
        accelerator="cpu",
        strategy=DLRoverStrategy(),
        callbacks=[] if options.static else [DLRoverCallback(window_s=1.0, plan_every_s=0, history="off")],
        max_steps=options.max_steps,
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = DataLoader(RepeatedRows(1_000_000), batch_size=32, shuffle=True)
    trainer.fit(Growing(options.what, options.bytes_per_step, options.step_s), loader)
    if trainer.is_global_zero:
        options.finished.write_text(str(trainer.global_step))


if __name__ == "__main__":
    main()
