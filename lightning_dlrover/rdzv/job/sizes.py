"""Numbers of workers that may be requested for a job: those of `--sizes`, in whole nodes. Pure.

They bind requests: plans, and rounds that admit workers to carry out a plan. A job that has lost a worker continues with all
others, whatever their number, until its request is met again.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

POWERS_OF_TWO = tuple(2**k for k in range(18))
"""The sizes `pow2`, up to more workers than any job has."""

POW2 = "pow2"
CONF_SEPARATOR = "+"
"""Separates sizes in `--rdzv-conf`, where a comma separates options."""


def parse_sizes(text: str, separator: str = ",") -> tuple[int, ...]:
    """Return the sizes in a text such as `1,2,4,8` or `pow2`, ascending.

    Raises:
        ValueError: a part is not a number of workers.
    """
    if text.strip() == POW2:
        return POWERS_OF_TWO
    sizes = set()
    for part in text.split(separator):
        if not part.strip().isdecimal() or not 1 <= int(part) <= POWERS_OF_TWO[-1]:
            example = separator.join("1248")
            raise ValueError(f"{part!r} is not a number of workers above 0; give {POW2}, or sizes such as {example}")
        sizes.add(int(part))
    return tuple(sorted(sizes))


def sizes_within(sizes: Sequence[int], fewest: int, most: int, per_node: int = 1) -> tuple[int, ...]:
    """Return the sizes that a job of `fewest` to `most` workers can have; powers of two outside of its limits are left out.

    Raises:
        ValueError: a listed size is outside of the limits, or does not fill nodes; or no power of two is left.
    """
    able = tuple(size for size in sizes if fewest <= size <= most and size % per_node == 0)
    limits = f"{fewest} to {most} workers"
    if tuple(sizes) == POWERS_OF_TWO:
        if not able:
            whole = f" is a multiple of {per_node}, the workers of a node" if per_node > 1 else " is a power of two"
            examples = [n for n in range(per_node, most + 1, per_node) if n >= fewest][:3]
            raise ValueError(f"no size from {limits}{whole}; list sizes, such as {','.join(map(str, examples))}")
        return able
    for size in sizes:
        if not fewest <= size <= most:
            raise ValueError(f"{size} is outside of the job's limits of {limits}; leave it out, or change the limits")
        if size % per_node:
            raise ValueError(f"{size} workers do not fill nodes of {per_node}; give multiples of {per_node}")
    return able


@dataclass(frozen=True)
class WorldSizes:
    """Numbers of workers that may be requested.

    Example:
        >>> sizes = WorldSizes((1, 2, 4, 8))
        >>> sizes.at_most(7), sizes.at_least(5), sizes.text
        (4, 8, '1, 2, 4 or 8')
        >>> WorldSizes(per_node=2).at_most(7)
        6
    """

    listed: tuple[int, ...] = ()  # ascending; empty: any
    per_node: int = 1  # workers that come and go together, with their node

    def allows(self, num_workers: int) -> bool:
        return num_workers % self.per_node == 0 and self.lists(num_workers)

    def lists(self, num_workers: int) -> bool:
        """Whether the number is a listed one, though it may leave a node with room, as after a loss."""
        return not self.listed or num_workers in self.listed

    def at_most(self, num_workers: int) -> int:
        """Return the largest size up to `num_workers`; the smallest one if there is none."""
        if not self.listed:
            return max(num_workers - num_workers % self.per_node, self.per_node)
        return self.listed[max(0, bisect_right(self.listed, num_workers) - 1)]

    def at_least(self, num_workers: int) -> int:
        """Return the smallest size from `num_workers` on; the largest one if there is none."""
        if not self.listed:
            return -(-num_workers // self.per_node) * self.per_node
        return self.listed[min(bisect_left(self.listed, num_workers), len(self.listed) - 1)]

    @property
    def text(self) -> str:
        """Readable form of the listed sizes: `1, 2, 4 or 8`."""
        return " or ".join(filter(None, (", ".join(map(str, self.listed[:-1])), *map(str, self.listed[-1:])))) or "any"

    @property
    def conf(self) -> str:
        """The listed sizes as `--rdzv-conf` takes them: `1+2+4+8`."""
        return CONF_SEPARATOR.join(map(str, self.listed))


ANY_NUMBER = WorldSizes()
