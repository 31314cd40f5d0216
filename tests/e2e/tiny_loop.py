"""The script of most jobs that `dlrover run` runs in tests: a plain loop, as most of them need no Lightning.

It counts, so that a lost or repeated step shows, until a file appears or for some steps. Its arguments can make it fail.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_dlrover.rdzv import World


class Count:
    """A state that a worker can only get from others or by making all steps. It is too large to travel inside a message."""

    def __init__(self) -> None:
        self.value = torch.zeros(2000, dtype=torch.float64)

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.value = state_dict["value"]

    def of_steps(self) -> list[float]:
        """Return the number of steps and the sum of their numbers."""
        found: list[float] = self.value[:2].round(decimals=6).tolist()
        return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--until", type=Path)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--slow-from", type=int, help="a step; it and later ones are slow until the file of --fast exists")
    parser.add_argument("--fast", type=Path)
    parser.add_argument("--records", type=Path, help="a file; each worker appends a line after each step, and one at the end")
    parser.add_argument("--fail-at", type=int, default=-1)
    parser.add_argument("--greedy", type=Path, help="a file; the worker whose process id is in it takes more and more memory")
    given = parser.parse_args()
    torch.set_num_threads(1)
    held, count = [], Count()

    def record(**values: Any) -> None:
        if given.records is not None:
            line = {"pid": os.getpid(), "agent": os.environ["DLROVER_AGENT_ID"], "state": count.of_steps(), **values}
            with given.records.open("a") as file:
                file.write(json.dumps(line) + "\n")

    with World.from_environment() as world:
        for step in world.steps(given.steps, check_interval_s=0.03, count=count):
            with step:
                if step.number == given.fail_at:
                    raise ArithmeticError(f"the script's own error at step {given.fail_at}")
                is_slow = given.slow_from is not None and step.number >= given.slow_from and not given.fast.exists()
                time.sleep(0.5 if is_slow else 0.02)
                together = torch.full((2001,), step.number / step.size, dtype=torch.float64)
                together[0] = 1 / step.size
                together[-1] = given.until is not None and given.until.exists()
                dist.all_reduce(together)
                count.value = count.value + together[:-1]
                step.is_last = bool(together[-1] > 0)  # all workers stop after the same step
            if step.was_made:
                record(step=step.number + 1, world=step.size)
            if given.greedy is not None and given.greedy.exists() and given.greedy.read_text() == str(os.getpid()):
                held.append(bytearray(100 << 20))
    record(final=count.of_steps())
    print(f"trained for {step.number + 1} steps", flush=True)


if __name__ == "__main__":
    main()
