"""A plain PyTorch loop, without Lightning, with workers that may come, go and be killed while it trains.

    python examples/plain_pytorch.py                                                      # one worker, no etcd
    torchrun --rdzv-backend=etcd-v3 --rdzv-endpoint=HOST:PORT --rdzv-id=JOB --rdzv-conf=live=1 --nnodes=1:4 \
        --nproc-per-node=1 examples/plain_pytorch.py                                      # more join by the same command

However often the world changes, every sample is trained on once per epoch, in the same global batches. The final parameters
are those of an undisturbed run, within rounding.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from lightning_dlrover.rdzv import Step, World

SEED = 1


def rows_of_step(step: Step, num_rows: int, batch_size: int) -> tuple[torch.Tensor, int]:
    """Return this worker's share of the step's global batch, as row numbers, and the number of rows in the whole batch.

    The step's number is the cursor: it determines the epoch, the order, the place in it and the owner of each row.
    """
    steps_per_epoch = -(-num_rows // batch_size)
    epoch, place = divmod(step.number, steps_per_epoch)
    order = torch.randperm(num_rows, generator=torch.Generator().manual_seed(SEED + epoch))
    batch = order[place * batch_size : (place + 1) * batch_size]
    return batch[step.rank :: step.size], len(batch)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--rows", type=int, default=4000)
    parser.add_argument("--batch-size", type=int, default=64, help="global: of all workers together")
    parser.add_argument("--step-s", type=float, default=0.0, help="sleep in every step, to watch workers come and go")
    parser.add_argument("--save", type=Path, help="rank 0 writes the model's parameters here at the end")
    options = parser.parse_args()

    torch.manual_seed(SEED)
    inputs = torch.randn(options.rows, 20)
    targets = (inputs @ torch.randn(20, 4)).argmax(1)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    num_steps = options.epochs * -(-options.rows // options.batch_size)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=num_steps + 1)

    with World.from_environment() as world:
        for step in world.steps(num_steps, model=model, optimizer=optimizer, scheduler=scheduler):
            with step:
                if step.round_is_new:
                    replica = DistributedDataParallel(model, init_sync=False)  # parameters are already equal
                    world.guard(replica)
                    print(f"step {step.number}: rank {step.rank} of {step.size}", flush=True)
                rows, num_rows = rows_of_step(step, options.rows, options.batch_size)
                time.sleep(options.step_s)
                optimizer.zero_grad()
                # DDP averages over workers, but their shares may differ by a row. The loss must average over the batch.
                loss = cross_entropy(replica(inputs[rows]), targets[rows], reduction="sum") * step.size / num_rows
                loss.backward()
                optimizer.step()
                scheduler.step()
        if step.rank == 0:
            accuracy = (model(inputs).argmax(1) == targets).float().mean()
            print(f"finished after {num_steps} steps, accuracy {accuracy:.3f}", flush=True)
            if options.save:
                torch.save(model.state_dict(), options.save)


if __name__ == "__main__":
    main()
