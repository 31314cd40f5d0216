"""Scripts that are right with two workers and wrong with three, for `test_growth.py`."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.e2e.plain_loop import PlainSettings, run_plain_loop
from tests.e2e.toy_job import Recorder, ToyModel, ToySettings, train_toy


class OutgrownError(Exception):
    """The script's own error."""


class Outgrown(ToyModel):
    """Fails with three workers, unless it is told to be right."""

    @property
    def is_too_large(self) -> bool:
        return self.trainer.world_size == 3 and not self.trainer.sanity_checking

    def fail_if_too_large(self) -> None:
        if self.is_too_large:
            raise OutgrownError("written for two workers")


class OnAll(Outgrown):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.fail_if_too_large()
        return super().training_step(batch, batch_idx)


class OnRankZero(Outgrown):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.trainer.global_rank == 0:
            self.fail_if_too_large()
        return super().training_step(batch, batch_idx)


class OnJoiner(Outgrown):
    """A joiner's host is broken: whatever it computes there fails."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.recorder.place.agent_id not in ("w0", "w1"):
            self.fail_if_too_large()
        return super().training_step(batch, batch_idx)


class InHookOfJoiner(Outgrown):
    """The same, outside of a step, where it ends the joiner's process."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.recorder.place.agent_id not in ("w0", "w1"):
            self.fail_if_too_large()
        super().on_train_batch_end(outputs, batch, batch_idx)


class InBackward(Outgrown):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        loss.register_hook(lambda gradient: self.fail_if_too_large())  # type: ignore[no-untyped-call]
        return loss


class InOptimizer(Outgrown):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        super().on_before_optimizer_step(optimizer)
        self.fail_if_too_large()


class AfterSomeSteps(Outgrown):
    steps_of_three = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.steps_of_three += self.is_too_large
        if self.steps_of_three > 5:
            self.fail_if_too_large()
        return super().training_step(batch, batch_idx)


class UnequalShares(Outgrown):
    """Gathers the shares, which two workers have in equal sizes."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if dist.is_initialized() and len(batch[0]) * self.trainer.world_size in (8, 9, 6):
            parts = [torch.empty_like(batch[0]) for _ in range(self.trainer.world_size)]
            dist.all_gather(parts, batch[0].contiguous())
        return super().training_step(batch, batch_idx)


class OtherCollectives(Outgrown):
    """Rank 2 takes part in no reduction of the others."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if dist.is_initialized() and self.trainer.global_rank < 2:
            dist.all_reduce(torch.ones(1))
        return super().training_step(batch, batch_idx)


class SingleSample(Outgrown):
    """Batch normalization needs two samples, and the smallest of three shares of four samples has one."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.net.insert(1, nn.BatchNorm1d(16, track_running_stats=False))


MODELS: dict[str, type[Outgrown]] = {
    each.__name__: each
    for each in (
        *(OnAll, OnRankZero, OnJoiner, InHookOfJoiner, InBackward, InOptimizer, AfterSomeSteps, UnequalShares),
        *(OtherCollectives, SingleSample),
    )
}


class ForGood(ToyModel):
    """Fails from the first step with two workers on, also after one of them has left."""

    has_failed = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.has_failed = self.has_failed or self.trainer.world_size == 2
        if self.has_failed:
            raise OutgrownError("the script's own")
        return super().training_step(batch, batch_idx)


def train_for_good(recorder: Recorder, settings: ToySettings) -> None:
    train_toy(recorder, settings, ForGood)


def train_outgrown(recorder: Recorder, of: tuple[str, ToySettings]) -> None:
    name, settings = of
    train_toy(recorder, settings, MODELS[name])


def train_plain_outgrown(recorder: Recorder, settings: PlainSettings) -> None:
    reduce = dist.all_reduce

    def all_reduce(*args: Any, **kwargs: Any) -> Any:
        if dist.get_world_size() == 3:
            raise OutgrownError(f"written for two workers (process {os.getpid()})")
        return reduce(*args, **kwargs)

    dist.all_reduce = all_reduce
    run_plain_loop(recorder, settings)
