"""Trains a small model for a few steps in a separate process, for each configuration read from standard input.

Prints a JSON line for each: the peak of the training process and its loader workers, as in a profile.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_dlrover.tuning.resources import MemoryWatch

WIDTH, NUM_LAYERS, SAMPLE_FLOATS, EMBEDDING_DIM = 1024, 8, 12_288, 64
NUM_STEPS = 3


class Samples(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 1 << 16

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((SAMPLE_FLOATS,), float(index))


def model() -> nn.Module:
    layers: list[nn.Module] = [nn.Linear(SAMPLE_FLOATS, WIDTH)]
    for _ in range(NUM_LAYERS):
        layers += [nn.Tanh(), nn.Linear(WIDTH, WIDTH)]
    return nn.Sequential(*layers)


def train(asked: dict[str, Any]) -> int:
    """Train and return the peak in bytes."""
    torch.set_num_threads(1)
    network = model()
    table = torch.ones(asked["embedding_bytes"] // 4 // EMBEDDING_DIM // asked["num_workers"], EMBEDDING_DIM)
    optimizer = torch.optim.Adam(network.parameters())
    prefetch = asked["prefetch_factor"] if asked["loader_workers"] else None
    loader = DataLoader(
        Samples(), batch_size=asked["local_batch"], num_workers=asked["loader_workers"], prefetch_factor=prefetch
    )
    with MemoryWatch(sample_s=0.02) as watch:
        for step, batch in enumerate(loader):
            network(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            table[step % len(table)] += 1
            if step == NUM_STEPS:
                break
        return watch.take().peak_bytes


def main() -> None:
    for line in sys.stdin:
        reader, writer = os.pipe()
        child = os.fork()  # before any step: this process keeps torch, and nothing else, in memory
        if child == 0:
            os.write(writer, str(train(json.loads(line))).encode())
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as result:
            peak = result.read()
        os.waitpid(child, 0)
        print(json.dumps({**json.loads(line), "peak_memory_bytes": int(peak)}), flush=True)


if __name__ == "__main__":
    main()
