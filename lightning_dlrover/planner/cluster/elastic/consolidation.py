"""Bring jobs together that are split over more nodes than they need, where that gains more than the moves cost.

A split job takes whole nodes and the smallest sufficient rest. Where no node has the room, small jobs of one node go elsewhere,
the fewest devices that will do. A move is worth its cost if the device seconds that the split job saves until its end, or in
`LASTS_S`, exceed those that all moved jobs lose.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from lightning_dlrover.planner.cluster.elastic.nodes import Nodes
from lightning_dlrover.planner.cluster.jobs import Job

__all__ = ["LASTS_S", "consolidate"]

LASTS_S = 600.0
"""Seconds for which a placement is expected to last."""

MOST_MENDED = 32
"""Split jobs that one decision looks at, the largest first. Bounds its time."""

MOST_NODES = 16
"""Nodes that are tried to make room for a part of a split job, those with the fewest devices to move first."""


def consolidate(
    nodes: Nodes,
    per_node: int,
    jobs: Mapping[str, Job],
    placed: dict[str, tuple[str, ...]],
    running: Mapping[str, Sequence[str]],
) -> None:
    """Change `placed`, and the free devices of `nodes`, where a move is worth its cost.

    Args:
        placed: devices of each job, which are not free in `nodes`.
        running: devices that jobs have now. A job that is to get others pays for a change anyway.
    """
    split = [name for name, names in placed.items() if len(nodes.of(names)) > -(-len(names) // per_node)]
    for name in sorted(split, key=lambda name: (-len(placed[name]), name))[:MOST_MENDED]:
        if len(nodes.of(placed[name])) == -(-len(placed[name]) // per_node):
            continue  # it was mended with another
        moves = _moves(nodes, per_node, name, placed)
        if moves is not None and not _is_worth(nodes, jobs, moves, name, placed, running):
            _take_back(nodes, moves, placed)
        elif moves is not None:
            placed.update(moves)


def _moves(nodes: Nodes, per_node: int, name: str, placed: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]] | None:
    """Return the new devices of a split job and of those that make room, taken in `nodes`; None: none, and nothing changes."""
    moves: dict[str, tuple[str, ...]] = {}
    nodes.release(placed[name])
    found: list[str] = []
    number = len(placed[name])
    while len(found) < number:
        part = min(per_node, number - len(found))
        node = nodes.fullest_with(part) or _make_room(nodes, part, name, placed, moves)
        if node is None:
            nodes.release(found)
            moves[name] = ()
            _take_back(nodes, moves, placed)
            return None
        free = sorted(nodes.free_on(node), key=lambda device: device not in placed[name])[:part]
        nodes.take(free)
        found += free
    moves[name] = tuple(found)
    return moves


def _make_room(
    nodes: Nodes, number: int, name: str, placed: Mapping[str, tuple[str, ...]], moves: dict[str, tuple[str, ...]]
) -> str | None:
    """Move small jobs away from the node where that takes the fewest devices; None: there is no such node."""
    tenants: dict[str, list[str]] = {}
    for other, devices in placed.items():
        on = nodes.of(moves.get(other, devices))
        if other != name and other not in moves and len(on) == 1:
            tenants.setdefault(on[0], []).append(other)
    options = []
    for node, others in tenants.items():
        missing, leave = number - len(nodes.free_on(node)), []
        for other in sorted(others, key=lambda other: (len(placed[other]), other)):
            if missing > 0:
                leave.append(other)
                missing -= len(placed[other])
        if missing <= 0:
            options.append((sum(len(placed[other]) for other in leave), node, leave))
    for _, node, leave in sorted(options)[:MOST_NODES]:
        if _leave(nodes, node, leave, placed, moves):
            return node
    return None


def _leave(
    nodes: Nodes, node: str, leave: Sequence[str], placed: Mapping[str, tuple[str, ...]], moves: dict[str, tuple[str, ...]]
) -> bool:
    """Move all of these jobs to other nodes, each to one; False, and nothing changes, if one finds no room."""
    done: list[str] = []
    for other in sorted(leave, key=lambda other: (-len(placed[other]), other)):
        target = nodes.fullest_with(len(placed[other]), without=(node,))
        if target is None:
            for moved in done:
                nodes.release(moves.pop(moved))
                nodes.take(placed[moved])
            return False
        devices = tuple(nodes.free_on(target)[: len(placed[other])])
        nodes.take(devices)
        nodes.release(placed[other])
        moves[other] = devices
        done.append(other)
    return True


def _take_back(nodes: Nodes, moves: Mapping[str, Sequence[str]], placed: Mapping[str, tuple[str, ...]]) -> None:
    for devices in moves.values():
        nodes.release(devices)
    for name in moves:
        nodes.take(placed[name])


def _is_worth(
    nodes: Nodes,
    jobs: Mapping[str, Job],
    moves: Mapping[str, tuple[str, ...]],
    name: str,
    placed: Mapping[str, tuple[str, ...]],
    running: Mapping[str, Sequence[str]],
) -> bool:
    job, size = jobs[name], len(placed[name])
    if job.scaling is None:
        return False
    counts = np.array([len(nodes.of(placed[name])), len(nodes.of(moves[name]))])
    before, after = job.scaling.speeds(np.array([size, size]), counts).steps_per_s.tolist()
    if not after > before:
        return False
    seconds = LASTS_S if job.steps_left is None else min(LASTS_S, job.steps_left / after)
    lost = sum(
        (jobs[other].change_s + jobs[other].join_s) * len(devices)
        for other, devices in moves.items()
        if set(placed[other]) == set(running.get(other, ())) and set(devices) != set(placed[other])
    )
    return bool(size * seconds * (1 - before / after) > lost)
