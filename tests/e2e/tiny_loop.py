"""The script of most jobs that `dlrover run` runs in tests: a plain loop, as most of them need no Lightning.

It trains until a file appears; its arguments can make it fail.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from lightning_dlrover.rdzv import World


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--until", type=Path)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--fail-at", type=int, default=-1)
    parser.add_argument("--greedy", type=Path, help="a file; the worker whose process id is in it takes more and more memory")
    given = parser.parse_args()
    torch.set_num_threads(1)
    held = []
    with World.from_environment() as world:
        for step in world.steps(given.steps, model=nn.Linear(8, 1)):
            with step:
                if step.number == given.fail_at:
                    raise ArithmeticError(f"the script's own error at step {given.fail_at}")
                time.sleep(0.02)
                is_enough = torch.tensor([float(given.until is not None and given.until.exists())])
                dist.all_reduce(is_enough)  # all workers stop after the same step
                step.is_last = bool(is_enough > 0)
            if given.greedy is not None and given.greedy.exists() and given.greedy.read_text() == str(os.getpid()):
                held.append(bytearray(100 << 20))
    print(f"trained for {step.number + 1} steps", flush=True)


if __name__ == "__main__":
    main()
