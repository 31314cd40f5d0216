"""Safety margin of memory estimates, learned from the errors of earlier ones."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["MemoryMargin"]

# Margin without records, as a share of the estimate. Where blocks lie in the heap is chance: the peak of one MLP of the models that
# the estimator was tuned on was 1.33 times its estimate in one run of three, and 0.94 times in another.
DEFAULT_SHARE = 0.35
MIN_SHARE = 0.02  # the peaks of two equal runs differ by about this much
RISK = 0.05  # probability that a job needs more than its estimate and margin
MAX_RECORDS = 500  # the newest count: an estimator changes, and so do jobs


@dataclass(frozen=True)
class MemoryMargin:
    """One-sided bound on the relative error of the next estimate; create it with `of`.

        margin = MemoryMargin.of([(estimate_bytes, measured_bytes), ...])
        margin.bytes_for(900 << 20)

    Split conformal prediction (Vovk, Gammerman and Shafer, Algorithmic Learning in a Random World, 2005; Papadopoulos et al.,
    ECML 2002): the ceil((n + 1)(1 - risk))-th smallest of n past errors bounds the next error with probability 1 - risk, if
    past and next jobs come in any order with equal probability.
    """

    share: float  # relative to the estimate
    num_records: int

    @classmethod
    def of(cls, records: Iterable[tuple[int, int]] = (), risk: float = RISK) -> MemoryMargin:
        """Return the margin that earlier jobs teach.

        With too few records for a bound (fewer than 19 at a risk of 0.05), it is the default, or the largest error if that is
        more.
        Args:
            records: estimate without its margin and measured peak, bytes, oldest first.
        Raises:
            ValueError: a figure is not positive, or the risk is outside (0, 1).
        """
        if not 0 < risk < 1:
            raise ValueError(f"risk={risk!r} of too small a margin is outside (0, 1): 0.05 is usual")
        pairs = [*records][-MAX_RECORDS:]
        for index, (estimate, measured) in enumerate(pairs):
            if estimate <= 0 or measured <= 0:
                raise ValueError(
                    f"memory record {index} of {len(pairs)} has estimate {estimate!r} and measured peak {measured!r} bytes: "
                    "leave out jobs without both figures"
                )
        errors = sorted(measured / estimate - 1 for estimate, measured in pairs)
        needed = math.ceil(1 / risk) - 1
        if len(errors) >= needed:
            found = errors[math.ceil((len(errors) + 1) * (1 - risk)) - 1]
        else:
            found = max([DEFAULT_SHARE, *errors])
        return cls(max(MIN_SHARE, found), len(errors))

    def bytes_for(self, estimate_bytes: int) -> int:
        """Return the margin of an estimate."""
        return math.ceil(self.share * estimate_bytes)
