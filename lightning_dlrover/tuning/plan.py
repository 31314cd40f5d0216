"""The settings that a plan may choose from, and the subset worth considering.

All combinations are considered, so the Pareto front is exact. Large numbers of workers are a few percent apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
from numpy.typing import NDArray

from lightning_dlrover.output import counted
from lightning_dlrover.perf import Configuration, configuration_of
from lightning_dlrover.perf.samples import StepProfile
from lightning_dlrover.planner.plan import Settings

__all__ = [
    "Limits",
    "all_settings",
    "configuration",
    "pareto_front",
    "settings_of",
    "sizes_to_consider",
    "tunable_axes",
    "why_not",
]

Floats = NDArray[np.float64]

SPARE_THREADS = 0.5  # tolerance for foreign load, which any machine has a bit of
ALL_SIZES_UP_TO = 128  # numbers of workers up to which each one is considered


@dataclass(frozen=True)
class Limits:
    """The range that a plan may choose from. An empty tuple leaves that setting as it is.

    Example:
        >>> limits = Limits(min_workers=1, max_workers=8, intra_op_threads=(1, 2, 4), failed_sizes=frozenset({3}))
        >>> limits.sizes
        (1, 2, 4, 5, 6, 7, 8)
    """

    min_workers: int
    max_workers: int
    loader_workers: tuple[int, ...] = ()  # per worker
    intra_op_threads: tuple[int, ...] = ()  # per worker
    prefetch_factors: tuple[int, ...] = ()  # used where there are loader workers
    workers_per_node: int = 0  # workers that a new node starts, all of them or none; 0: workers stay on the present nodes
    # Maximum for a worker's node, where each worker has one of its own; 0: the node stays as it is.
    max_cores: float = 0.0
    max_memory_bytes: int = 0
    # Numbers of workers with which a step has failed, or that would leave a node with fewer workers than others.
    failed_sizes: frozenset[int] = frozenset()
    # Cores of the job on a node that other processes keep busy. No more threads than now are considered for these.
    foreign_cores: float = 0.0

    def __post_init__(self) -> None:
        if not 1 <= self.min_workers <= self.max_workers:
            raise ValueError(
                f"cannot plan between {self.min_workers} and {self.max_workers} workers: "
                "min_workers must be at least 1 and at most max_workers"
            )
        least = {"loader_workers": 0, "intra_op_threads": 1, "prefetch_factors": 1}
        for name, low in least.items():
            if wrong := [value for value in getattr(self, name) if value < low]:
                raise ValueError(f"cannot plan with {name} of {wrong[0]}: each must be {low} or more")
        if self.workers_per_node < 0:
            raise ValueError(f"cannot plan with {self.workers_per_node} workers per node; 0 leaves them where they are")
        if not 0 <= self.foreign_cores < math.inf:
            raise ValueError(f"cannot plan with {self.foreign_cores} cores that others keep busy; 0 leaves all to the job")
        if not 0 <= self.max_cores < math.inf or self.max_memory_bytes < 0:
            raise ValueError(
                f"cannot plan with nodes of up to {self.max_cores} cores and {self.max_memory_bytes} bytes; "
                "0 leaves them as they are"
            )

    def allows(self, settings: Settings) -> bool:
        """Return whether the workers are within their limits. The other settings may keep the user's values."""
        return self.min_workers <= settings.num_workers <= self.max_workers and settings.num_workers not in self.failed_sizes

    @property
    def sizes(self) -> tuple[int, ...]:
        """The numbers of workers to choose from."""
        sizes = sizes_to_consider(self.max_workers, max(1, self.workers_per_node), (self.min_workers,))
        return tuple(n for n in sizes if n >= self.min_workers and n not in self.failed_sizes)


def sizes_to_consider(most: int, per_node: int, also: Sequence[int] = ()) -> list[int]:
    """Return numbers of workers or devices to choose from, ascending from 0 to `most`.

    Above `ALL_SIZES_UP_TO` they are whole nodes, about 4 % apart: a job's speed hardly differs between two of them.
    Args:
        per_node: workers or devices of one node.
        also: further numbers, such as the present one; those above `most` are left out.
    """
    sizes = set(range(min(most, ALL_SIZES_UP_TO) + 1))
    size = ALL_SIZES_UP_TO
    while size < most:
        size = max(size + per_node, (size * 26 // 25) // per_node * per_node)
        sizes.add(min(size, most))
    return sorted(sizes.union(size for size in also if size <= most))


def tunable_axes(node_cores: float, cores: float) -> dict[str, tuple[int, ...]]:
    """Return, for `Limits`, the values of the tunable settings worth considering on nodes with `node_cores` cores.

    The values are powers of two: within a factor of two of the best number the remaining gain is small.
    Args:
        cores: cores that one worker may use.
    """
    powers = tuple(2**k for k in range(11))
    most_loaders = max(1.0, min(16.0, node_cores or cores, cores))
    return {
        "loader_workers": (0, *(n for n in powers if n <= most_loaders)),
        "intra_op_threads": tuple(sorted({*(n for n in powers if n <= cores), max(1, int(cores))})),
        "prefetch_factors": (2, 4),
    }


def settings_of(profile: StepProfile) -> Settings:
    """Return the settings of a measured profile."""
    prefetch_factor = profile.prefetch_factor if profile.loader_workers else 0
    return Settings(profile.num_workers, profile.loader_workers, profile.intra_op_threads, prefetch_factor)


def all_settings(limits: Limits, now: Settings) -> list[Settings]:
    """Return all settings that `limits` allow, and the present ones, ascending."""
    prefetch = limits.prefetch_factors or (now.prefetch_factor or 2,)
    found = {now}
    for workers, loaders, threads in product(
        limits.sizes,
        limits.loader_workers or (now.loader_workers,),
        limits.intra_op_threads or (now.intra_op_threads,),
    ):
        found.update(Settings(workers, loaders, threads, factor) for factor in (prefetch if loaders else (0,)))
    return sorted(found)


def configuration(settings: Settings, current: StepProfile, limits: Limits, node_cores: float) -> Configuration:
    """Return the current configuration with other settings and the same global batch."""
    num_nodes = min(current.num_nodes, settings.num_workers)
    if limits.workers_per_node:
        num_nodes = math.ceil(settings.num_workers / limits.workers_per_node)
    is_same = settings.num_workers == current.num_workers
    cores = current.cores
    if settings != settings_of(current):
        # Threads and loader workers may request a larger node. A present node never loses cores.
        cores = max(cores, min(limits.max_cores, max(1, settings.intra_op_threads) + settings.loader_workers))
    return replace(
        configuration_of(current, node_cores),
        cores=cores,
        num_workers=settings.num_workers,
        num_nodes=num_nodes,
        local_batch=math.ceil(current.global_batch / settings.num_workers),
        loader_workers=settings.loader_workers,
        intra_op_threads=settings.intra_op_threads,
        prefetch_factor=settings.prefetch_factor,
        fullest_node=current.fullest_node if is_same else 0,
        emptiest_node=current.emptiest_node if is_same else 0,
    )


def why_not(settings: Settings, now: Configuration, asked: Configuration, global_batch: int, limits: Limits) -> str:
    """Return why `settings` cannot or should not be run, before any prediction; empty if they can.

    Threads beyond a node's cores only get in each other's way, so they are not considered, unless they run already.
    """
    if settings.num_workers > global_batch:
        return f"a global batch of {global_batch} leaves workers without a sample"
    if limits.workers_per_node and settings.num_workers % limits.workers_per_node:
        return f"nodes start {counted(limits.workers_per_node, 'worker')} each"
    if asked == now or not asked.node_cores:
        return ""
    threads = asked.workers_on_node * asked.threads
    if asked.threads > 1 and threads > asked.node_cores:
        return f"{threads:g} threads on {asked.node_cores:g} cores of a node"
    # Threads meet at a barrier many times in each step, so one that shares its core makes all others wait.
    # Workers bound to cores of their own do not get the cores of a node that none of them has.
    cores = min(asked.node_cores, asked.workers_on_node * asked.cores)
    free_cores = cores - limits.foreign_cores
    if asked.threads > max(1, now.threads) and threads > free_cores + SPARE_THREADS:
        return f"{threads:g} threads on {cores:g} cores of a node, of which others keep {limits.foreign_cores:.1f} busy"
    loaders = asked.workers_on_node * asked.loader_workers
    if asked.loader_workers > 1 and loaders > 2 * cores:
        return f"{counted(loaders, 'loader worker')} on {cores:g} cores of a node"
    return ""


def pareto_front(gain: Floats, cost: Floats) -> list[int]:
    """Return the indices of candidates that no other beats in both `gain` and `cost`, ascending in cost; of equals, the first.

    Args:
        gain: more is better, shape ``(num_candidates,)``.
        cost: less is better, same shape.
    """
    front: list[int] = []
    best = -math.inf
    for index in np.lexsort((-gain, cost)):
        if gain[index] > best:
            best = float(gain[index])
            front.append(int(index))
    return front
