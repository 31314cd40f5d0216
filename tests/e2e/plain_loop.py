"""A training loop of plain PyTorch, without Lightning, that is live-elastic through `rdzv/world.py` alone."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from toy_job import Recorder

from lightning_dlrover.rdzv.world import Formation, LeftOutError, World, WorldConfig, is_group_failure


@dataclass(frozen=True)
class PlainSettings:
    """A loop that counts: its state after a step must be the same on all workers."""

    num_steps: int = 600
    step_s: float = 0.01


class _Loop:
    def __init__(self, recorder: Recorder, settings: PlainSettings) -> None:
        config = WorldConfig.from_environment(os.environ, "1")
        assert config is not None
        self.recorder = recorder
        self.settings = settings
        self.world = World(config)
        self.step = 0
        self.state = torch.zeros(2, dtype=torch.float64)
        self.formation: Formation | None = None

    @property
    def hello(self) -> bytes:
        return str(self.step).encode()

    def run(self) -> None:
        formation = self.world.start()
        self._enter(formation if formation is not None else self.world.admit(b"", ""))
        while self.step < self.settings.num_steps:
            try:
                self._one_step()
                self._maybe_switch()
            except RuntimeError as error:
                if not (is_group_failure(error) or self.world.broken):
                    raise
                failed = True
            else:
                failed = False
            if failed:  # outside of the `except` block, which would keep the old group alive
                self._recover()

    def _recover(self) -> None:
        while True:
            formation = self.world.recover(self.hello)
            try:
                self._enter(formation)
            except RuntimeError as error:
                if not (is_group_failure(error) or self.world.broken):
                    raise
            else:
                return

    def _enter(self, formation: Formation) -> None:
        """Take over step and state from whoever is furthest."""
        self.formation = formation
        steps = {worker: int(hello or b"-1") for worker, hello in formation.hellos.items()}
        furthest = max(steps, key=lambda worker: (steps[worker], -formation.rank_of(worker)))
        together = torch.cat([torch.tensor([float(self.step)], dtype=torch.float64), self.state])
        if formation.size > 1:
            dist.broadcast(together, formation.rank_of(furthest))
        self.step, self.state = int(together[0]), together[1:]
        self.recorder.write("entered", round=formation.round.number, step=self.step)

    def _one_step(self) -> None:
        assert self.formation is not None
        time.sleep(self.settings.step_s)
        self.recorder.moment("forward")
        contribution = torch.tensor([1.0, self.step * 0.5], dtype=torch.float64) / self.formation.size
        if self.formation.size > 1:
            dist.all_reduce(contribution)
        self.state = self.state + contribution
        self.step += 1
        self.recorder.write(
            "done",
            step=self.step,
            state=[round(float(value), 6) for value in self.state],
            world=self.formation.size,
            round=self.formation.round.number,
            pid=os.getpid(),
        )

    def _maybe_switch(self) -> None:
        if not self.world.is_voting:
            self.world.propose()
            return
        number, _ = self.world.agreed()
        if number is not None:
            self._enter(self.world.switch(number, self.hello))


def run_plain_loop(recorder: Recorder, settings: PlainSettings) -> None:
    loop = _Loop(recorder, settings)
    try:
        loop.run()
    except LeftOutError:
        recorder.write("left")
    loop.world.leave()
    recorder.write("after_loop", step=loop.step)
