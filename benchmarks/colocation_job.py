"""A small DLRM-like job for `colocation.py`: plain PyTorch, which reports its memory and its steps as DLRoverCallback does.

    python colocation_job.py KIND STEPS [SEED]

It trains on the GPU that the dispatcher gave it, if any.

compute   wide MLPs, small tables
memory    many random rows of tables that no cache holds
input     each batch waits for a store
mixed     some of each

Their steps take milliseconds. A step of the kinds slow_... has many batches, and takes 0.5 to 3 s alone on two cores.

The optimizer is written out: the first one of `torch.optim` imports as much again as all of torch.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass, replace

import torch
from torch import nn

from lightning_dlrover.colocate.admission_client import AdmissionClient, AdmissionReport
from lightning_dlrover.tuning.profiler import gpu_bytes

LEARNING_RATE = 0.01
WARMUP_STEPS = 5


@dataclass(frozen=True)
class Kind:
    """A model and its input."""

    rows: int
    dim: int
    num_tables: int
    lookups: int
    width: int
    batch: int
    wait_s: float  # of each batch
    batches: int = 1  # of each step


KINDS = {
    "compute": Kind(rows=10_000, dim=16, num_tables=4, lookups=2, width=768, batch=256, wait_s=0.0),
    "memory": Kind(rows=300_000, dim=64, num_tables=4, lookups=16, width=64, batch=512, wait_s=0.0),
    "input": Kind(rows=50_000, dim=16, num_tables=4, lookups=4, width=64, batch=128, wait_s=0.02),
    "mixed": Kind(rows=200_000, dim=32, num_tables=4, lookups=8, width=256, batch=256, wait_s=0.003),
}
KINDS |= {
    "slow_compute": replace(KINDS["compute"], batches=30),
    "slow_memory": replace(KINDS["memory"], batches=50),
    "slow_input": replace(KINDS["input"], wait_s=0.3, batches=6),
    "slow_mixed": replace(KINDS["compute"], wait_s=0.05, batches=40),
}


class Model(nn.Module):
    """Tables, an MLP over their sums and the dense features."""

    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(kind.rows, kind.dim, mode="sum", sparse=True) for _ in range(kind.num_tables)
        )
        size = kind.num_tables * kind.dim + 13
        self.top = nn.Sequential(
            *(nn.Linear(size, kind.width), nn.ReLU(), nn.Linear(kind.width, kind.width), nn.ReLU(), nn.Linear(kind.width, 1))
        )

    def forward(self, dense: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        looked_up = [table(ids[:, number]) for number, table in enumerate(self.tables)]
        output: torch.Tensor = self.top(torch.cat([dense, *looked_up], 1))
        return output


def main() -> None:
    kind, steps, seed = KINDS[sys.argv[1]], int(sys.argv[2]), int((*sys.argv[3:], "0")[0])
    torch.manual_seed(seed)
    # CUDA must not be used before the estimate, which needs copies of this process.
    device = torch.device("cuda" if os.environ.get("CUDA_VISIBLE_DEVICES") else "cpu")
    model = Model(kind)

    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(kind.wait_s)
        return torch.randn(kind.batch, 13), torch.randint(kind.rows, (kind.batch, kind.num_tables, kind.lookups))

    def step(batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        dense, ids = batch
        return nn.functional.binary_cross_entropy_with_logits(model(dense, ids), dense.new_zeros(len(dense), 1))

    client = AdmissionClient.from_environment(os.environ, 0)
    if client is not None:
        if client.needs_no_estimate:
            report = AdmissionReport(os.getpid(), time.monotonic())
        else:
            from lightning_dlrover.colocate.peak_memory import estimate_peak, report_of

            optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE)
            report = report_of(
                estimate_peak(model, [optimizer], batch(), step, device=device.type), on_gpu=device.type == "cuda"
            )
        answer = client.ask(report)
        torch.set_num_threads(answer.threads or torch.get_num_threads())
    model.to(device)
    started = time.monotonic()
    for done in range(1, steps + 1):
        if done == WARMUP_STEPS + 1:
            started = time.monotonic()
        waited_s = 0.0
        for _ in range(kind.batches):
            began = time.monotonic()
            dense, ids = batch()
            waited_s += time.monotonic() - began
            torch.autograd.backward(step((dense.to(device), ids.to(device))))
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        parameter.add_(parameter.grad, alpha=-LEARNING_RATE)
                        parameter.grad = None
        if client is not None:
            client.step_ended(waited_s)
            if client.is_due:
                client.report(steps - done, torch.get_num_threads(), gpu_bytes=gpu_bytes(device))
                if (threads := client.answer().threads) and threads != torch.get_num_threads():
                    torch.set_num_threads(threads)
    if device.type == "cuda":
        torch.cuda.synchronize()
    print(f"{max(1, steps - WARMUP_STEPS) / (time.monotonic() - started):.3f} steps/s", flush=True)


if __name__ == "__main__":
    main()
