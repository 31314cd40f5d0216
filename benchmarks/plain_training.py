"""A training script of plain PyTorch, the same loop in two behaviours. Its workers record every step.

`--behaviour=live`: the workers come and go while it trains. `--behaviour=restart`: it does not use our package. torchrun
restarts all its workers when one fails, and they resume from the checkpoint.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from jobs import Step, add_device_options, use_backend
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

GLOBAL_BATCH_SIZE = 24
NUM_FEATURES = 64


@dataclass(frozen=True)
class Options:
    behaviour: str
    device: str
    backend: str  # of process groups; empty: gloo, and NCCL for tensors of a GPU
    records: Path
    max_steps: int
    step_floor_s: float
    checkpoint: Path
    checkpoint_every: int

    @staticmethod
    def from_command_line() -> Options:
        parser = argparse.ArgumentParser(description=__doc__)
        parser.add_argument("--behaviour", choices=("live", "restart"), required=True)
        add_device_options(parser)
        parser.add_argument("--records", type=Path, required=True)
        parser.add_argument("--max-steps", type=int, required=True)
        parser.add_argument("--step-floor-s", type=float, default=0.0)
        parser.add_argument("--checkpoint", type=Path, required=True)
        parser.add_argument("--checkpoint-every", type=int, default=20)
        return Options(**vars(parser.parse_args()))

    @property
    def process_group_backend(self) -> str:
        return self.backend or ("cpu:gloo,cuda:nccl" if self.device == "cuda" else "gloo")


class Training:
    """Model, optimizer and the work of one step."""

    def __init__(self, options: Options) -> None:
        torch.manual_seed(7)
        self.model = torch.nn.Sequential(torch.nn.Linear(NUM_FEATURES, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
        self.model.to(options.device)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        self._options = options
        self._file = (options.records / f"{os.getpid()}.jsonl").open("a", buffering=1)

    def make(self, replica: DistributedDataParallel, number: int, rank: int, world_size: int) -> list[int]:
        """Make one step; return the samples of this worker's share."""
        time.sleep(self._options.step_floor_s)
        first = number * GLOBAL_BATCH_SIZE
        samples = list(range(first + rank, first + GLOBAL_BATCH_SIZE, world_size))
        inputs = torch.tensor(samples, dtype=torch.float32)[:, None] * torch.linspace(0.1, 1.0, NUM_FEATURES)
        inputs = inputs.sin().to(self._options.device)
        self.optimizer.zero_grad()
        loss = mse_loss(replica(inputs), inputs[:, :8].sum(1, keepdim=True), reduction="sum") * world_size / GLOBAL_BATCH_SIZE
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return samples

    def record(self, number: int, rank: int, world_size: int, round_number: int, samples: list[int]) -> None:
        digest = hashlib.md5(usedforsecurity=False)
        for parameter in self.model.parameters():
            digest.update(parameter.detach().cpu().numpy().tobytes())
        step = Step(os.getpid(), time.monotonic(), number, 0, rank, world_size, round_number, digest.hexdigest()[:12], samples)
        self._file.write(step.encode())

    def load(self) -> int:
        """Number of steps made before, from the checkpoint."""
        if not self._options.checkpoint.exists():
            return 0
        saved = torch.load(self._options.checkpoint)
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        return int(saved["num_made"])

    def save(self, num_made: int, rank: int) -> None:
        """Write a checkpoint, if one is due and this worker writes it."""
        if rank == 0 and num_made % self._options.checkpoint_every == 0:
            state = {"num_made": num_made, "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
            unfinished = self._options.checkpoint.with_suffix(f".{os.getpid()}")
            torch.save(state, unfinished)
            unfinished.rename(self._options.checkpoint)


def restart(options: Options, training: Training) -> None:
    """Train like any script for torchrun."""
    dist.init_process_group(options.process_group_backend, timeout=timedelta(minutes=30))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    replica = DistributedDataParallel(training.model)
    for number in range(training.load(), options.max_steps):
        samples = training.make(replica, number, rank, world_size)
        training.record(number + 1, rank, world_size, 0, samples)
        training.save(number + 1, rank)
    dist.barrier()
    dist.destroy_process_group()


def live(options: Options, training: Training) -> None:
    from lightning_dlrover.rdzv import World

    first_step = training.load()
    with World.from_environment(options.process_group_backend) as world:
        state: dict[str, Any] = {"model": training.model, "optimizer": training.optimizer}
        for step in world.steps(options.max_steps, first_step=first_step, **state):
            with step:
                if step.round_is_new:
                    replica = DistributedDataParallel(training.model, init_sync=False)
                    world.guard(replica)
                samples = training.make(replica, step.number, step.rank, step.size)
            if step.was_made:
                assert world.formation is not None
                training.record(step.number + 1, step.rank, step.size, world.formation.round.number, samples)
                training.save(step.number + 1, step.rank)


def main() -> None:
    options = Options.from_command_line()
    use_backend(options.backend)
    {"live": live, "restart": restart}[options.behaviour](options, Training(options))


if __name__ == "__main__":
    main()
