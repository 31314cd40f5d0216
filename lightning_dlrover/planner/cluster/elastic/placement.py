"""Turn sizes into devices: on as few nodes as can be, and where jobs are already.

A running job of the same size keeps its devices. All other devices are free; jobs that start or change take them, the largest
first: whole nodes, then the node with the smallest sufficient rest. `consolidation` then mends jobs that are split over more
nodes than they need.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lightning_dlrover.planner.cluster.elastic.consolidation import consolidate
from lightning_dlrover.planner.cluster.elastic.nodes import Nodes
from lightning_dlrover.planner.cluster.jobs import Device, Job

__all__ = ["place"]


def place(
    devices: Sequence[Device],
    per_node: int,
    jobs: Mapping[str, Job],
    numbers: Mapping[str, int],
    running: Mapping[str, Sequence[str]],
) -> dict[str, tuple[str, ...]]:
    """Return the devices of each job that gets some.

    Args:
        devices: all alike, each for one worker.
        per_node: devices of a whole node.
        jobs: at least those of `numbers`.
        numbers: devices of each job; together as many as there are, at most.
        running: the present devices of jobs that have some.
    """
    nodes = Nodes(devices, per_node)
    placed: dict[str, tuple[str, ...]] = {}
    for name, number in numbers.items():
        present = running.get(name, ())
        if len(present) == number and nodes.are_free(present):
            nodes.take(present)
            placed[name] = tuple(present)
    for name in sorted(numbers, key=lambda name: (-numbers[name], name)):
        if name not in placed:
            placed[name] = nodes.find(numbers[name], running.get(name, ()))
            nodes.take(placed[name])
    consolidate(nodes, per_node, jobs, placed, running)
    return placed
