"""A small script with Lightning. It trains until a file appears or for some steps.

Steps sleep, and compute next to nothing: their time depends neither on other processes nor on the machine. With `--sample-s`
it grows with a worker's share of the global batch, so that more workers are faster. Options let it fail, or die, in a hook.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_dlrover import DLRoverCallback, DLRoverStrategy

BALLAST = Path("ballast")
"""A file in the working directory with the MiB that each worker shall take, a few more in each step."""

MIB_PER_STEP = 10


class TinyModel(L.LightningModule):
    def __init__(self, until: Path | None, step_s: float, sample_s: float, fail_at: int) -> None:
        super().__init__()
        self.net = nn.Linear(8, 1)
        self.until = until
        self.step_s, self.sample_s, self.fail_at = step_s, sample_s, fail_at
        self.ballast: list[bytes] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if self.trainer.global_step == self.fail_at:
            raise ArithmeticError(f"the script's own error at step {self.fail_at}")
        time.sleep(self.step_s + self.sample_s * len(batch[0]))
        return nn.functional.mse_loss(self.net(batch[0]), batch[0].sum(1, keepdim=True))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.until is not None:
            # As with `EarlyStopping`, all workers stop after the same step.
            self.trainer.should_stop = self.trainer.strategy.reduce_boolean_decision(self.until.exists(), all=False)
        if BALLAST.exists() and len(self.ballast) * MIB_PER_STEP < int(BALLAST.read_text()):
            self.ballast.append(b"x" * (MIB_PER_STEP << 20))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 1e-3)


def meet_fate(bad: Path) -> None:
    """Kill the only worker that arrives while the file `bad` exists; fail if `bad` is a folder."""
    if bad.is_dir():
        raise OSError(f"process {os.getpid()} finds no device")
    with contextlib.suppress(FileNotFoundError):
        bad.unlink()
        os.kill(os.getpid(), signal.SIGKILL)


class HookLog:
    """Appends each call of a hook of the changing job to a file, one line of JSON each."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def on_world_change(self, trainer: Any, module: Any, former: Any, world: Any) -> None:
        self._add({"change": [former.size if former is not None else None, world.size], "round": world.round})

    def on_notice(self, trainer: Any, module: Any, notice: float) -> None:
        self._add({"notice": notice})

    def _add(self, call: dict[str, Any]) -> None:
        with self._file.open("a") as file:
            file.write(json.dumps({"pid": os.getpid(), "at": time.time(), **call}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--until", type=Path)
    parser.add_argument("--steps", type=int, default=-1)
    parser.add_argument("--step-s", type=float, default=0.02)
    parser.add_argument("--sample-s", type=float, default=0.0)
    parser.add_argument("--global-batch", type=int)
    parser.add_argument("--window-s", type=float, default=0.5)
    parser.add_argument("--only-resizes", action="store_true")
    parser.add_argument("--fail-at", type=int, default=-1)
    parser.add_argument("--fail-after-fit", action="store_true")
    parser.add_argument("--loader-workers", type=int, default=0)
    parser.add_argument("--fateful-hook", help="where a worker is killed, or fails, before its first batch; see `meet_fate`")
    parser.add_argument("--bad", type=Path)
    parser.add_argument("--hook-log", type=Path, default=Path(os.devnull), help="file for the calls of `HookLog`")
    given = parser.parse_args()
    torch.set_num_threads(1)
    L.seed_everything(1, verbose=False)
    tuning: dict[str, Any] = {"tune": ["num_workers"]} if given.only_resizes else {}
    hook_log = HookLog(given.hook_log)
    tuning |= {"on_world_change": hook_log.on_world_change, "on_notice": hook_log.on_notice}
    trainer = L.Trainer(
        strategy=DLRoverStrategy(global_batch_size=given.global_batch),
        callbacks=[] if given.fateful_hook else [DLRoverCallback(window_s=given.window_s, plan_every_s=1.0, **tuning)],
        accelerator="cpu",
        max_epochs=-1,
        max_steps=given.steps,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    loader = DataLoader(TensorDataset(torch.randn(4096, 8)), batch_size=8, shuffle=True, num_workers=given.loader_workers)
    hooks = {given.fateful_hook: lambda *_, **__: meet_fate(given.bad)} if given.fateful_hook else {}
    trainer.fit(type("Model", (TinyModel,), hooks)(given.until, given.step_s, given.sample_s, given.fail_at), loader)
    if trainer.is_global_zero:
        print(f"trained for {trainer.global_step} steps", flush=True)
    if given.fail_after_fit:
        raise OSError("could not write the final model")


if __name__ == "__main__":
    main()
