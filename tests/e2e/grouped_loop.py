"""A plain loop for agents that start several workers each. Its state counts the completed steps.

Steps from `SLOW_FROM` on are slow until a file `fast` exists in the folder.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_dlrover.rdzv import World

SLOW_FROM, SLOW_S = 24, 0.5
NUM_STEPS = 60


class Count:
    def __init__(self) -> None:
        self.value = torch.zeros(2000)  # large enough to travel outside the message

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.value = state_dict["value"]


def main() -> None:
    folder, count = Path(sys.argv[1]), Count()
    with World.from_environment() as world:
        for step in world.steps(NUM_STEPS, check_interval_s=0.03, count=count):
            with step:
                if step.number >= SLOW_FROM and not (folder / "fast").exists():
                    time.sleep(SLOW_S)
                share = torch.full((2000,), 1.0 / step.size)
                dist.all_reduce(share)
                count.value = count.value + share
            line = {"step": step.number + 1, "pid": os.getpid(), "agent": os.environ["DLROVER_AGENT_ID"]}
            line["count"] = round(float(count.value[-1]), 3)
            if step.was_made:
                with (folder / "trace").open("a") as file:
                    file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
