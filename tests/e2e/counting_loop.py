"""A script for `dlrover run` that counts its steps: a lost or repeated one shows in its records.

Each worker appends a line to a file of its own after each step, and writes the count once the loop has ended.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

from lightning_dlrover.rdzv import World
from tests.e2e.plain_loop import Count


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, help="of the records; a file `enough` in it ends the loop")
    given = parser.parse_args()
    torch.set_num_threads(1)
    count = Count()
    records = (given.folder / f"{os.getpid()}.jsonl").open("w", buffering=1)
    with World.from_environment() as world:
        for step in world.steps(1_000_000, count=count):
            with step:
                time.sleep(0.02)
                own = torch.tensor([1.0, step.number, (given.folder / "enough").exists()], dtype=torch.float64)
                together = own / torch.tensor([step.size, step.size, 1.0])
                dist.all_reduce(together)
                count.value = count.value + together[:2]
                step.is_last = bool(together[2] > 0)
            if step.was_made:
                line = {"step": step.number + 1, "world": step.size, "state": count.value.round(decimals=6).tolist()}
                records.write(json.dumps(line) + "\n")
    (given.folder / f"{os.getpid()}.final").write_text(json.dumps(count.value.round(decimals=6).tolist()))


if __name__ == "__main__":
    main()
