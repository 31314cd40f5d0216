"""Lightning's Trainer, as the parts of a live fit use it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from lightning_dlrover.live import lightning_names

if TYPE_CHECKING:
    import lightning as L

    from lightning_dlrover.live.lightning_names import EpochLoop
    from lightning_dlrover.live.live_strategy import LiveStrategy
    from lightning_dlrover.tables.elastic import ElasticTables

__all__ = ["TrainerOfFit"]


class TrainerOfFit:
    """One Trainer and its strategy, see `ports.TrainerPort`. Both change while a `fit` runs, so nothing is kept of them."""

    def __init__(self, trainer: L.Trainer, strategy: LiveStrategy) -> None:
        self.lightning = trainer
        self.strategy = strategy

    @property
    def module(self) -> L.LightningModule:
        return self.lightning.lightning_module

    @property
    def is_automatic(self) -> bool:
        return self.module.automatic_optimization

    @property
    def optimizers(self) -> list[Any]:
        return self.lightning.optimizers

    @property
    def callbacks(self) -> list[Any]:
        return self.lightning.callbacks  # type: ignore[attr-defined, no-any-return]  # Lightning does not declare them

    @property
    def accumulate_grad_batches(self) -> int:
        return self.lightning.accumulate_grad_batches

    @property
    def global_step(self) -> int:
        return self.lightning.global_step

    @property
    def current_epoch(self) -> int:
        return self.lightning.current_epoch

    @property
    def epoch_loop(self) -> EpochLoop:
        return self.lightning.fit_loop.epoch_loop

    @property
    def num_handed_out(self) -> int:
        progress = self.epoch_loop.batch_progress
        return progress.current.ready

    @property
    def results(self) -> Any:
        return lightning_names.results_of(self.epoch_loop)

    @property
    def device(self) -> torch.device:
        return self.strategy.root_device

    @property
    def elastic_tables(self) -> ElasticTables | None:
        return self.strategy.elastic_tables
