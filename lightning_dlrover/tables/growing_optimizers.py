"""Optimizers of growing tables. Each updates the rows of one step in place, with states that belong to a row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class RowOptimizer(Protocol):
    """Updates rows with their gradients.

    Attributes:
        lr: learning rate.
    """

    @property
    def lr(self) -> float: ...

    def widths(self, dim: int) -> Sequence[int]:
        """Return the number of values of each state for a row of `dim` weights."""

    def begin(self, weights: Tensor, states: Sequence[Tensor]) -> None:
        """Set the states of new rows, which are zeros."""

    def update(self, weights: Tensor, states: Sequence[Tensor], grads: Tensor) -> None:
        """Update ``(n, dim)`` weights, and states of ``(n, width)`` each, in place."""


@dataclass(frozen=True)
class Sgd:
    """Stochastic gradient descent."""

    lr: float

    def widths(self, dim: int) -> Sequence[int]:
        return ()

    def begin(self, weights: Tensor, states: Sequence[Tensor]) -> None: ...

    def update(self, weights: Tensor, states: Sequence[Tensor], grads: Tensor) -> None:
        weights.add_(grads, alpha=-self.lr)


@dataclass(frozen=True)
class Adagrad:
    """Adagrad (Duchi et al., JMLR 2011), with one accumulator per weight."""

    lr: float
    eps: float = 1e-8
    initial: float = 0.0  # of the accumulators

    def widths(self, dim: int) -> Sequence[int]:
        return (dim,)

    def begin(self, weights: Tensor, states: Sequence[Tensor]) -> None:
        states[0].fill_(self.initial)

    def update(self, weights: Tensor, states: Sequence[Tensor], grads: Tensor) -> None:
        states[0].addcmul_(grads, grads)
        weights.addcdiv_(grads, states[0].sqrt().add_(self.eps), value=-self.lr)


@dataclass(frozen=True)
class RowWiseAdagrad:
    """Adagrad with one accumulator per row: the mean of squared gradients, as in fbgemm's and torchrec's."""

    lr: float
    eps: float = 1e-8

    def widths(self, dim: int) -> Sequence[int]:
        return (1,)

    def begin(self, weights: Tensor, states: Sequence[Tensor]) -> None: ...

    def update(self, weights: Tensor, states: Sequence[Tensor], grads: Tensor) -> None:
        states[0].add_(torch.linalg.vector_norm(grads, dim=1, keepdim=True).square_().div_(grads.shape[1]))
        weights.addcmul_(grads, states[0].sqrt().add_(self.eps).reciprocal_(), value=-self.lr)


@dataclass(frozen=True)
class Adam:
    """Adam (Kingma and Ba, ICLR 2015) on the rows of a step. Each row counts its own updates, as rows begin at any step."""

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def widths(self, dim: int) -> Sequence[int]:
        return (dim, dim, 1)

    def begin(self, weights: Tensor, states: Sequence[Tensor]) -> None: ...

    def update(self, weights: Tensor, states: Sequence[Tensor], grads: Tensor) -> None:
        mean, square, count = states
        first, second = self.betas
        count.add_(1.0)
        mean.lerp_(grads, 1.0 - first)
        square.mul_(second).addcmul_(grads, grads, value=1.0 - second)
        step = self.lr / (1.0 - first**count)
        root = (square / (1.0 - second**count)).sqrt_().add_(self.eps)
        weights.sub_(step * mean / root)


@dataclass(frozen=True)
class Ftrl:
    """FTRL-Proximal with per-coordinate rates (McMahan et al., KDD 2013, algorithm 1): `l1` makes weights exactly zero."""

    lr: float  # alpha
    l1: float = 0.0
    l2: float = 0.0
    beta: float = 1.0

    def widths(self, dim: int) -> Sequence[int]:
        return (dim, dim)

    def begin(self, weights: Tensor, states: Sequence[Tensor]) -> None:
        # The sum of gradients that would have led to the first weights.
        states[0].copy_(-weights * (self.beta / self.lr + self.l2) - weights.sign() * self.l1)

    def update(self, weights: Tensor, states: Sequence[Tensor], grads: Tensor) -> None:
        linear, square = states
        grown = torch.addcmul(square, grads, grads)
        linear.add_(grads - (grown.sqrt() - square.sqrt()) / self.lr * weights)
        square.copy_(grown)
        shrunk = linear.abs().sub_(self.l1).clamp_(min=0.0) * linear.sign()
        weights.copy_(-shrunk / ((self.beta + square.sqrt()) / self.lr + self.l2))
