"""Amounts of the resources that a pool's jobs share."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["UNLIMITED", "Resources"]

TOLERANCE = 1e-9
"""Relative excess of a budget that is rounding."""


@dataclass(frozen=True)
class Resources:
    """Cores, GPUs and memory: of a budget, of one worker, or of a job."""

    cores: float = 0.0
    gpus: float = 0.0
    memory_mb: float = 0.0

    def __add__(self, other: Resources) -> Resources:
        return Resources(self.cores + other.cores, self.gpus + other.gpus, self.memory_mb + other.memory_mb)

    def __sub__(self, other: Resources) -> Resources:
        return self + other.times(-1)

    def times(self, number: float) -> Resources:
        return Resources(*(each * number if each else 0.0 for each in (self.cores, self.gpus, self.memory_mb)))

    def fits(self, into: Resources) -> bool:
        """Whether `into` has at least this much of each resource that is needed."""
        pairs = ((self.cores, into.cores), (self.gpus, into.gpus), (self.memory_mb, into.memory_mb))
        return all(need <= 0 or need <= has + TOLERANCE * max(1.0, abs(need)) for need, has in pairs)

    def most(self, of: Resources) -> float:
        """Return how many times `of` fits in here; infinite if it needs nothing that is limited."""
        pairs = ((self.cores, of.cores), (self.gpus, of.gpus), (self.memory_mb, of.memory_mb))
        counts = [math.floor(has / need + TOLERANCE) if math.isfinite(has) else math.inf for has, need in pairs if need > 0]
        return max(0, min(counts, default=math.inf))

    @property
    def limits(self) -> dict[str, float]:
        """The amounts by name, without unlimited ones. `within` is the reverse."""
        return {name: amount for name, amount in vars(self).items() if math.isfinite(amount)}

    @staticmethod
    def within(limits: Mapping[str, float]) -> Resources:
        """Return a budget of these amounts by name; those that are absent are unlimited."""
        return Resources(**{name: limits.get(name, math.inf) for name in ("cores", "gpus", "memory_mb")})

    @property
    def text(self) -> str:
        """For people, without resources that are absent or unlimited: `2 cores, 1 GPU, 4 GiB`."""
        parts = []
        for amount, one, several in ((self.cores, "core", "cores"), (self.gpus, "GPU", "GPUs")):
            if amount and math.isfinite(amount):
                parts.append(f"{amount:g} {one if amount == 1 else several}")
        if self.memory_mb and math.isfinite(self.memory_mb):
            parts.append(f"{self.memory_mb / 1024:.3g} GiB")
        return ", ".join(parts) or "nothing"


UNLIMITED = Resources(math.inf, math.inf, math.inf)
