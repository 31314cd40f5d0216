"""Loss after one pass over planted data: clicks drawn from a known model, so that the best possible loss is known."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_dlrover.characterize.point import Point

__all__ = ["normalized_entropy"]

NUM_SAMPLES, NUM_TEST = 48_000, 16_000
INIT_STD = 0.05


def normalized_entropy(point: Point, seed: int) -> float:
    """Train once over the planted data; return the test loss over that of the base rate. The same seed gives the same."""
    torch.set_num_threads(point.threads)
    generator = torch.Generator().manual_seed(seed)
    dense, ids, clicks = _planted(point, generator)
    torch.manual_seed(seed)
    table = nn.Embedding(point.num_sparse * point.rows, point.dim)
    nn.init.normal_(table.weight, std=INIT_STD)
    net = nn.Sequential(
        nn.Linear(point.num_dense + point.num_sparse * point.dim, point.width), nn.ReLU(), nn.Linear(point.width, 1)
    )
    optimizer = torch.optim.Adagrad([*table.parameters(), *net.parameters()], lr=point.learning_rate)
    offsets = torch.arange(point.num_sparse) * point.rows

    def loss(rows: slice) -> Tensor:
        inputs = torch.cat([dense[rows], table(ids[rows] + offsets).flatten(1)], 1)
        return F.binary_cross_entropy_with_logits(net(inputs).squeeze(1), clicks[rows])

    for first in range(0, NUM_SAMPLES, point.batch):
        optimizer.zero_grad()
        loss(slice(first, min(first + point.batch, NUM_SAMPLES))).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    with torch.no_grad():
        test = slice(NUM_SAMPLES, NUM_SAMPLES + NUM_TEST)
        rate = float(clicks[test].mean())
        base = -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate))
        return float(loss(test)) / base


def _planted(point: Point, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    total = NUM_SAMPLES + NUM_TEST
    dense = torch.randn(total, point.num_dense, generator=generator)
    ids = torch.randint(point.rows, (total, point.num_sparse), generator=generator)
    weights = torch.randn(point.num_sparse, point.rows, generator=generator)
    of_ids = torch.stack([weights[i][ids[:, i]] for i in range(point.num_sparse)], 1).sum(1)
    logits = of_ids + dense @ torch.randn(point.num_dense, generator=generator) / math.sqrt(point.num_dense) - 1.0
    return dense, ids, torch.bernoulli(torch.sigmoid(logits), generator=generator)
