"""Search for hyperparameters with Optuna: one `fit` for each trial, of which unpromising ones are pruned.

dlrover run --workers 1:3 examples/optuna_search.py

Every worker runs the same study. Its sampler has a seed and all workers report the same values, so they ask for the same
trials; rank 0 alone decides whether a trial is pruned. docs/guide/search.md describes what joins and losses mean here.
"""

import argparse
import logging
import time
from typing import Any

import lightning as L
import optuna
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_dlrover import DLRoverCallback, DLRoverStrategy


class PruneTogether(L.Callback):
    """Reports the monitored value of each validation, and prunes the trial on all workers if rank 0's study says so."""

    def __init__(self, trial: optuna.Trial, monitor: str) -> None:
        self.trial, self.monitor = trial, monitor
        self.reports: dict[int, float] = {}

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        expected = trainer.strategy.broadcast(self.trial.params)
        if expected != self.trial.params:
            raise ValueError(
                f"trial {self.trial.number} has {self.trial.params} here and {expected} on rank 0: seed the sampler"
            )

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.sanity_checking:
            return
        self.report(trainer.current_epoch, float(trainer.callback_metrics[self.monitor]))
        # Every worker has an answer, because rank 0 may be lost before it has sent its own.
        if trainer.strategy.broadcast(self.trial.should_prune()):
            raise optuna.TrialPruned(f"after epoch {trainer.current_epoch}")

    def report(self, epoch: int, value: float) -> None:
        if epoch not in self.reports:
            self.trial.report(value, epoch)
            self.reports[epoch] = value

    # A worker that joins a trial receives the others' reports with the state of all callbacks.
    def state_dict(self) -> dict[str, Any]:
        return {"reports": dict(self.reports)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for epoch, value in state_dict["reports"].items():
            self.report(epoch, value)


class Net(L.LightningModule):
    def __init__(self, width: int, rate: float, step_s: float) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 1))
        self.rate, self.step_s = rate, step_s

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        time.sleep(self.step_s)
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def validation_step(self, batch: list[torch.Tensor], _: int) -> None:
        self.log("error", nn.functional.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), self.rate)


def loader(num_rows: int, seed: int) -> DataLoader[tuple[torch.Tensor, ...]]:
    x = torch.randn(num_rows, 6, generator=torch.Generator().manual_seed(seed))
    return DataLoader(TensorDataset(x, (x[:, :2] ** 2).sum(1, keepdim=True)), 24)


def objective(trial: optuna.Trial, epochs: int, step_s: float) -> float:
    L.seed_everything(trial.number, verbose=False)
    width, rate = trial.suggest_int("width", 4, 64, log=True), trial.suggest_float("rate", 1e-4, 0.2, log=True)
    trainer = L.Trainer(
        strategy=DLRoverStrategy(),
        callbacks=[DLRoverCallback(), PruneTogether(trial, "error")],
        max_epochs=epochs,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Net(width, rate, step_s), loader(480, 0), loader(96, 1))
    return float(trainer.callback_metrics["error"])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=12)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--step-s", type=float, default=0.0, help="seconds that each step takes in addition")
    given = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(
        sampler=optuna.samplers.TPESampler(seed=1, n_startup_trials=4),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=2),
    )
    study.optimize(lambda trial: objective(trial, given.epochs, given.step_s), n_trials=given.trials)
    states = "".join(trial.state.name[0] for trial in study.trials)  # C: complete, P: pruned
    print(f"trials {states}, best {study.best_value:.6f} with {study.best_params}", flush=True)


if __name__ == "__main__":
    main()
