"""A training loop of plain PyTorch, without Lightning, that is live-elastic through `World.steps` alone."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from lightning_dlrover.rdzv import World
from tests.e2e.toy_job import Recorder


@dataclass(frozen=True)
class PlainSettings:
    """A loop that counts. Its state after a step must be the same on all workers."""

    num_steps: int = 600
    step_s: float = 0.01
    last_step: int | None = None  # a step that turns out to be the last one
    backend: str = "gloo"


class Count:
    """A state that a worker can only get from other workers or by making all steps."""

    def __init__(self) -> None:
        self.value = torch.zeros(2, dtype=torch.float64)

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.value = state_dict["value"]


def run_plain_loop(recorder: Recorder, settings: PlainSettings) -> None:
    count, norm = Count(), torch.nn.BatchNorm1d(2)
    with World.from_environment(settings.backend) as world:
        for step in world.steps(settings.num_steps, check_interval_s=0.03, count=count, norm=norm):
            with step:
                assert world.formation is not None
                number = world.formation.round.number
                if step.round_is_new:
                    recorder.write("entered", round=number, step=step.number)
                recorder.pace(settings.step_s)
                recorder.moment("forward")
                norm(torch.ones(2, 2))  # counts its calls
                contribution = torch.tensor([1.0, step.number * 0.5], dtype=torch.float64) / step.size
                told_to_end = torch.tensor([float(recorder.place.end.exists())], dtype=torch.float64)
                together = torch.cat([contribution, told_to_end])
                dist.all_reduce(together)
                recorder.moment("reduced")
                step.confirm(together)
                count.value = count.value + together[:2]
                step.is_last = step.number == settings.last_step or bool(together[2] > 0)
            if step.was_made:
                state = [round(float(value), 6) for value in count.value]
                recorder.write("done", step=step.number + 1, state=state, world=step.size, round=number, pid=os.getpid())
                assert norm.num_batches_tracked is not None
                recorder.write("batches", step=step.number + 1, batches=int(norm.num_batches_tracked))
                recorder.moment("made")
    recorder.write("after_loop", step=step.number)
