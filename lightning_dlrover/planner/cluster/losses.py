"""Lost nodes in a simulation, and their cost for a job."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

__all__ = ["Fragility", "NodeLoss", "draw_losses"]


@dataclass(frozen=True)
class NodeLoss:
    """A node that is lost and replaced at once, such as by an eviction: the workers on it start again there."""

    at_s: float
    node: str


@dataclass(frozen=True)
class Fragility:
    """The consequences of a lost worker for its job, and of memory that grows beyond its limit.

    Args:
        checkpoint_s: seconds of steps between checkpoints, from which the job restarts; 0: no finished step is lost, as other
            workers hold the state.
        restart_s: seconds without a step after a loss.
        most_losses: the job fails at the next one.
        fails_at_steps: it fails once it has made so many steps.
    """

    checkpoint_s: float = 0.0
    restart_s: float = 0.0
    most_losses: float = math.inf
    fails_at_steps: float = math.inf

    def __post_init__(self) -> None:
        if not (self.checkpoint_s >= 0 and self.restart_s >= 0 and self.most_losses >= 0 and self.fails_at_steps > 0):
            raise ValueError(f"{self} has a negative figure, or fails before its first step")


def draw_losses(nodes: Sequence[str], per_node_hour: float, rng: random.Random) -> Iterator[NodeLoss]:
    """Yield losses in order of time, for ever: a Poisson process on each node.

    Args:
        per_node_hour: mean number of losses of a node in an hour.
    """
    at_s = 0.0
    while per_node_hour > 0 and nodes:
        at_s += rng.expovariate(per_node_hour * len(nodes) / 3600)
        yield NodeLoss(at_s, rng.choice(nodes))
