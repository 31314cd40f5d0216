"""The reference DLRM (Naumov et al., arXiv 1906.00091), with a step that can be cut into parts.

A step runs in one of two ways: as users write it, with one backward pass, or cut at the borders between the parts. Cut, each
part's forward and backward pass run by themselves, and the times of the parts can be read. Both do the same work.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_dlrover.characterize.inputs import Batch
from lightning_dlrover.characterize.point import PARTS, Point
from lightning_dlrover.characterize.work import layers
from lightning_dlrover.observe.step_times import Mark, marks_of

__all__ = ["LEARNING_RATE", "Clock", "LocalTables", "Model", "Tables"]

LEARNING_RATE = 0.01


class Clock:
    """Sums the time of each part; `mark` ends a part. On a GPU the marks are events on its stream."""

    def __init__(self, cuda: bool) -> None:
        self._cuda = cuda
        self._now = marks_of(torch.device("cuda" if cuda else "cpu"))
        self._is_forward = False
        self._marks: list[tuple[str, bool, Mark]] = []

    def begin(self) -> None:
        self._is_forward = True
        self._marks.append(("", False, self._now()))

    def mark(self, part: str) -> None:
        self._marks.append((part, self._is_forward, self._now()))

    def turn(self) -> None:
        """Begin the backward pass."""
        self._is_forward = False

    def seconds(self) -> tuple[dict[str, float], float]:
        """Return the seconds of each part, and those that the forward pass computed in them."""
        if self._cuda:
            torch.cuda.synchronize()
        found, forward_s = dict.fromkeys(PARTS, 0.0), 0.0
        for (_, _, before), (part, is_forward, after) in itertools.pairwise(self._marks):
            if part:
                took_s = after.seconds_since(before)
                found[part] += took_s
                forward_s += took_s if is_forward and part not in ("data", "communication") else 0.0
        return found, forward_s


class Tables(Protocol):
    """The tables of one worker. A step calls `look_up`, `backward` if it is cut, and `update`."""

    def look_up(self, ids: Tensor, clock: Clock | None) -> Tensor: ...

    def backward(self, vectors: Tensor, gradient: Tensor, clock: Clock | None) -> None: ...

    def update(self, clock: Clock | None) -> None: ...


class LocalTables:
    """Tables that this worker holds whole. With other workers, their gradients' rows are exchanged."""

    def __init__(self, point: Point, device: torch.device) -> None:
        self._bags = nn.ModuleList()
        for _ in range(point.num_sparse):
            weight = torch.empty(point.rows, point.dim, device=device).fill_(0.01)  # touches all pages
            self._bags.append(nn.EmbeddingBag.from_pretrained(weight, freeze=False, mode="sum", sparse=True))
        self._optimizer = torch.optim.SGD(self._bags.parameters(), lr=LEARNING_RATE)
        self._num_workers = point.num_workers

    def look_up(self, ids: Tensor, clock: Clock | None) -> Tensor:
        return torch.stack([bag(of_table) for bag, of_table in zip(self._bags, ids, strict=True)], 1)

    def backward(self, vectors: Tensor, gradient: Tensor, clock: Clock | None) -> None:
        torch.autograd.backward(vectors, gradient)

    def update(self, clock: Clock | None) -> None:
        if self._num_workers > 1:
            for bag in self._bags:
                dist.all_reduce(bag.weight.grad)
            if clock:
                clock.mark("communication")
        self._optimizer.step()
        self._optimizer.zero_grad()


class Model(nn.Module):
    """The dense part on this worker, and its tables."""

    def __init__(self, point: Point, device: torch.device, tables: Tables | None, rate: float = LEARNING_RATE) -> None:
        super().__init__()
        bottom, top = layers(point)
        self.bottom = _perceptron(bottom).to(device) if tables else None
        self.top = _perceptron(top)[:-1].to(device)  # the last layer has no ReLU
        self.tables = tables
        num_vectors = point.num_sparse + 1
        self._pairs = torch.triu_indices(num_vectors, num_vectors, offset=1, device=device)
        self._flat = (self._pairs[0] * num_vectors + self._pairs[1]).contiguous()
        self._parameters_in_order = [*self.parameters()]
        self._optimizer = torch.optim.SGD(self._parameters_in_order, lr=rate)
        self._num_workers = point.num_workers
        self._device = device

    def interact(self, dense: Tensor, looked_up: Tensor) -> Tensor:
        """Join the dense vector with the dot products of all pairs of vectors."""
        vectors = torch.cat([dense.unsqueeze(1), looked_up], 1)
        dots = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1).index_select(1, self._flat)
        return torch.cat([dense, dots], 1)

    def forward(self, batch: Batch) -> Tensor:
        if self.tables is None or self.bottom is None:
            joined = batch.dense
        else:
            looked_up = self.tables.look_up(batch.ids, None).to(self._device)
            joined = self.interact(self.bottom(batch.dense), looked_up)
        logits: Tensor = self.top(joined)
        return logits

    def step(self, batch: Batch) -> None:
        """Make a step as users write it."""
        loss = F.binary_cross_entropy_with_logits(self(batch), batch.labels)
        loss.backward()  # type: ignore[no-untyped-call]
        self._update(None)

    def cut_step(self, batch: Batch, clock: Clock) -> None:
        """Make the same step, cut into its parts."""
        tables, bottom = self.tables, self.bottom
        if tables is None or bottom is None:
            self._top(batch.dense, batch.labels, clock)
            self._update(clock)
            return
        vectors = tables.look_up(batch.ids, clock)
        looked_up = vectors.detach().to(self._device).requires_grad_()
        clock.mark("embedding")
        out = bottom(batch.dense)
        dense = out.detach().requires_grad_()
        clock.mark("bottom_mlp")
        joined = self.interact(dense, looked_up)
        features = joined.detach().requires_grad_()
        clock.mark("interaction")
        self._top(features, batch.labels, clock)
        torch.autograd.backward(joined, features.grad)
        clock.mark("interaction")
        torch.autograd.backward(out, dense.grad)
        clock.mark("bottom_mlp")
        assert looked_up.grad is not None
        tables.backward(vectors, looked_up.grad.to(vectors.device), clock)
        clock.mark("embedding")
        self._update(clock)

    def _top(self, features: Tensor, labels: Tensor, clock: Clock) -> None:
        loss = F.binary_cross_entropy_with_logits(self.top(features), labels)
        clock.mark("top_mlp")
        clock.turn()
        loss.backward()  # type: ignore[no-untyped-call]
        clock.mark("top_mlp")

    def _update(self, clock: Clock | None) -> None:
        if self._num_workers > 1:
            _average([p.grad for p in self._parameters_in_order if p.grad is not None], self._num_workers)
            if clock:
                clock.mark("communication")
        if self.tables is not None:
            self.tables.update(clock)
        self._optimizer.step()
        self._optimizer.zero_grad()
        if clock:
            clock.mark("optimizer")


def _perceptron(sizes: Sequence[tuple[int, int]]) -> nn.Sequential:
    build: Callable[[int, int], list[nn.Module]] = lambda i, o: [nn.Linear(i, o), nn.ReLU()]  # noqa: E731
    return nn.Sequential(*(part for i, o in sizes for part in build(i, o)))


def _average(gradients: Sequence[Tensor], num_workers: int) -> None:
    """Average gradients over the workers in one all-reduce, which nothing hides."""
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    flat /= num_workers
    first = 0
    for gradient in gradients:
        gradient.copy_(flat[first : first + gradient.numel()].view_as(gradient))
        first += gradient.numel()
