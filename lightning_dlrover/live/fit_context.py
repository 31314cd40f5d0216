"""The objects that all parts of one live `fit` work with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lightning_dlrover.live.position import FitPosition
from lightning_dlrover.live.resilient import ResilientCollectives
from lightning_dlrover.live.train_loaders import TrainLoaders
from lightning_dlrover.rdzv.group.world import World

if TYPE_CHECKING:
    import lightning as L

    from lightning_dlrover.live.live_strategy import LiveStrategy

__all__ = ["FitContext"]


@dataclass(frozen=True)
class FitContext:
    """One Trainer in its job. Each object changes while the `fit` runs, and none is replaced."""

    trainer: L.Trainer
    strategy: LiveStrategy
    world: World
    position: FitPosition
    collectives: ResilientCollectives
    loaders: TrainLoaders

    @property
    def callbacks(self) -> list[Any]:
        """The Trainer's callbacks. Lightning does not declare them."""
        return self.trainer.callbacks  # type: ignore[attr-defined, no-any-return]
