"""The speed of two elastic jobs on the same devices as a policy knows it, and how sure that is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from lightning_dlrover.planner.cluster.jobs import Job

__all__ = ["Beside", "BesideSpeeds"]


@dataclass(frozen=True)
class BesideSpeeds:
    """Predicted speeds of two jobs beside each other, each over its speed alone on these devices.

    Args:
        speeds: of the first and the second job, shape ``(2, n)``; 0 where they do not fit together, or must not share.
        spreads: standard deviations of the logarithms of these speeds, of that shape.
    """

    speeds: NDArray[np.float64]
    spreads: NDArray[np.float64]


class Beside(Protocol):
    """Predicts the speeds of two jobs that share all of their devices."""

    def may_share(self, job: Job, /) -> bool:
        """Return whether there is any other job, and any size, with which this one may share devices."""
        ...

    def speeds(self, one: Job, other: Job, num_devices: NDArray[np.integer[Any]], /) -> BesideSpeeds:
        """Return the speeds of both jobs with so many devices, packed on as few nodes as can be.

        Args:
            num_devices: above 0, shape ``(n,)``.
        """
        ...
