"""Measurements of a worker's fit for the watchdog and the callback. Nothing here changes the fit."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from lightning_dlrover.data.lane_plan import share
from lightning_dlrover.live.ports import Batches, Round, TrainerPort
from lightning_dlrover.live.position import FitPosition
from lightning_dlrover.observe.pulse import Pulse
from lightning_dlrover.rdzv.group.loop import Pace
from lightning_dlrover.rdzv.group.world import World
from lightning_dlrover.rdzv.live.member import Formation

if TYPE_CHECKING:
    import lightning as L

__all__ = ["FitProgress", "Progress", "batches_done", "remaining_batches"]

Phase = Literal["setup", "step", "parts", "between", "validation", "checkpoint", "resize"]


@dataclass(frozen=True)
class Progress:
    """A worker's activity and counters, which soon change while it makes progress."""

    phase: Phase
    round_number: int
    steps_in_round: int
    batch: int  # global batches handed out over all epochs
    counts: tuple[int, ...]  # updates, collectives, validation batches, looks for new rows, parts of shares


class FitProgress:
    """Measurements of this worker's fit; may be read from another thread."""

    def __init__(
        self,
        world: World,
        round_: Round,
        batches: Batches,
        trainer: TrainerPort,
        position: FitPosition,
        pace: Pace,
        pulse: Pulse,
    ) -> None:
        self._round = round_
        self._batches = batches
        self._trainer = trainer
        self._position = position
        self.world = world
        self.pulse = pulse
        self._pace = pace
        self._clock = trainer.strategy.clock

    @property
    def formation(self) -> Formation | None:
        return self._round.formation

    @property
    def now(self) -> Progress:
        position = self._position
        if position.formation is None or not position.has_entered:
            phase: Phase = "setup"
        elif self._pace.is_held_up:
            phase = "resize"
        elif position.is_saving:
            phase = "checkpoint"
        elif position.validation:
            phase = "validation"
        elif position.is_in_parts:
            phase = "parts"
        else:
            phase = "step" if position.in_step else "between"
        val_loop = self._trainer.epoch_loop.val_loop
        num_val_batches = val_loop.batch_progress.total.ready
        number = position.formation.round.number if position.formation is not None else 0
        counts = (position.updates, position.collective, num_val_batches, position.looks, position.parts)
        return Progress(phase, number, self._pace.steps_in_round, position.batch, counts)

    @property
    def is_in_collective(self) -> bool:
        """Whether this worker waits for others."""
        return self._clock.is_stopped

    @property
    def step_time_s(self) -> float:
        """Recent seconds per step; 0 while unknown."""
        return self._pace.step_time_s

    @property
    def loads(self) -> list[float]:
        """Samples per thread in one batch, for each worker by rank."""
        first, size = self._batches.first, self._round.size
        threads = self.pulse.threads if len(self.pulse.threads) == size else (1,) * size
        shares = [share(first.global_batch_size, rank, size) for rank in range(size)]
        return [max(1, stop - start) / max(1, count) for (start, stop), count in zip(shares, threads, strict=True)]

    @property
    def remaining_steps(self) -> float | None:
        """Batches that the job still has to train on; None if unknown."""
        return remaining_batches(self._trainer.lightning)

    @property
    def workers_by_host(self) -> dict[int, int]:
        """Number of the current round's workers on each host, by a number of the host."""
        return Counter((self.formation.round.hosts if self.formation is not None else []) or [0])

    @property
    def own_host(self) -> int:
        """Number of this worker's host in the current round."""
        formation = self.formation
        return formation.round.hosts[formation.rank] if formation is not None and formation.round.hosts else 0

    @property
    def untunable(self) -> dict[str, str]:
        """Settings of a plan that this worker cannot carry out, each with the reason."""
        return {"loader_workers": refusal} if (refusal := self._batches.refusal) else {}


def remaining_batches(trainer: L.Trainer) -> float | None:
    """Return the number of batches still to train on; None if it is unknown.

    A batch may take several optimizer steps, as in manual optimization of two models, or be one of several in a step.
    """
    done = batches_done(trainer)
    left = []
    if trainer.max_epochs not in (None, -1):
        assert trainer.max_epochs is not None
        left.append(trainer.num_training_batches * max(trainer.max_epochs, 1) - done)
    if trainer.max_steps != -1:
        steps_per_batch = 1 / trainer.accumulate_grad_batches
        if not trainer.lightning_module.automatic_optimization and done and trainer.global_step:
            steps_per_batch = trainer.global_step / done
        left.append((trainer.max_steps - trainer.global_step) / steps_per_batch)
    return max(0.0, float(min(left))) if left and math.isfinite(min(left)) else None


def batches_done(trainer: L.Trainer) -> int:
    """Return the number of batches that the job has trained on, over all epochs, the current one included."""
    return trainer.fit_loop.epoch_loop.total_batch_idx + 1
