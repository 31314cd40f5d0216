"""Throughput of a share that is computed in parts, against the same share computed at once.

    python benchmarks/parts.py [--device cpu|cuda] [--batch-size N] [--parts N] [--rounds N] [--quick]

One worker of a live job trains a perceptron. Whole shares and shares in parts take turns of a few steps inside one `fit`. A
round is one turn of each, in alternating order, and gives one ratio: the median step at once over the median step in parts.
The result is the median ratio over all rounds. The first round is left out.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import lightning as L
import torch
from jobs import Workspace, describe_machine, result_line
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_dlrover import DLRoverStrategy

NUM_FEATURES, NUM_LAYERS = 256, 6
Steps = dict[tuple[int, int], list[float]]
"""Seconds of steps by round and side: 0 at once, 1 in parts."""

NUM_IGNORED_STEPS = 2
"""Number of ignored steps at the start of each turn: the allocator has kept blocks of other sizes."""


class Turns(L.LightningModule):
    """Times its steps, and changes the samples of one pass from turn to turn.

    Args:
        rooms: samples of one pass, at once and in parts.
        turn_steps: steps of a turn.
    """

    def __init__(self, width: int, rooms: tuple[int, int], turn_steps: int) -> None:
        super().__init__()
        sizes = [NUM_FEATURES, *[width] * NUM_LAYERS]
        layers = [part for pair in itertools.pairwise(sizes) for part in (nn.Linear(*pair), nn.GELU())]
        self.net = nn.Sequential(*layers, nn.Linear(width, 1))
        self.rooms = rooms
        self.turn_steps = turn_steps
        self.steps: Steps = {}

    def turn_of(self, batch_idx: int) -> tuple[int, int]:
        """Return the round and the side of a step."""
        turn = batch_idx // self.turn_steps
        number, place = divmod(turn, 2)
        return number, (place + number) % 2

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        strategy: Any = self.trainer.strategy
        strategy.live.steps.parts.room = self.rooms[self.turn_of(batch_idx)[1]]
        self.began = self.now()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % self.turn_steps >= NUM_IGNORED_STEPS:
            self.steps.setdefault(self.turn_of(batch_idx), []).append(self.now() - self.began)

    def now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 1e-3)


def train(endpoint: str, batch_size: int, width: int, num_parts: int, turn_steps: int, rounds: int, is_gpu: bool) -> Steps:
    """Train as the only worker of a job, and return the seconds of its steps."""
    os.environ |= {
        "DLROVER_ENDPOINT": endpoint,
        "DLROVER_RUN_ID": "parts",
        "DLROVER_AGENT_ID": "w0",
        "DLROVER_MAX_NODES": "1",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
    }
    torch.set_num_threads(1)
    model = Turns(width, (batch_size, -(-batch_size // num_parts)), turn_steps)
    rows = TensorDataset(torch.randn(batch_size, NUM_FEATURES), torch.randn(batch_size, 1))
    same_rows = torch.utils.data.Subset(rows, list(range(batch_size)) * (2 * rounds * turn_steps))  # in each step
    trainer = L.Trainer(
        strategy=DLRoverStrategy(),
        accelerator="gpu" if is_gpu else "cpu",
        devices=1,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(same_rows, batch_size))
    return model.steps


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="device of the worker")
    parser.add_argument("--batch-size", type=int, help="samples of the share (default: 512, on a GPU 65536)")
    parser.add_argument("--width", type=int, help="width of the model's layers (default: 512, on a GPU 2048)")
    parser.add_argument("--parts", type=int, default=2, help="parts of a share")
    parser.add_argument("--rounds", type=int, default=15, help="number of rounds")
    parser.add_argument("--turn-steps", type=int, default=8, help="steps of a turn")
    parser.add_argument("--quick", action="store_true", help="three rounds")
    options = parser.parse_args()
    is_gpu = options.device == "cuda"
    batch_size, width = options.batch_size or (65536 if is_gpu else 512), options.width or (2048 if is_gpu else 512)
    rounds = 1 + (3 if options.quick else options.rounds)  # the first one is left out
    print(describe_machine() + (f"; {torch.cuda.get_device_name()}" if is_gpu else ""), flush=True)
    # The worker signs off while its process ends, and needs an etcd until then.
    with Workspace("parts") as space, ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        arguments = space.etcd().endpoint, batch_size, width, options.parts, options.turn_steps, rounds, is_gpu
        steps = pool.submit(train, *arguments).result()
    medians = {turn: statistics.median(seconds) for turn, seconds in steps.items()}
    pairs = [(medians[number, 0], medians[number, 1]) for number in range(1, rounds)]
    for side, name in enumerate(("at once", f"in {options.parts} parts")):
        print(f"{name}: {1e3 * statistics.median(pair[side] for pair in pairs):.2f} ms per step of {batch_size} samples")
    ratios = sorted(whole / parts for whole, parts in pairs)
    print(f"throughput in parts over that at once: {ratios[0]:.3f} to {ratios[-1]:.3f} in {len(ratios)} rounds")
    print(result_line({"parts": statistics.median(ratios)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
