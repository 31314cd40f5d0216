"""The speed of an elastic job as a policy knows it: steps/s by number of devices and nodes, and how sure that is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["Scaling", "Speeds"]


@dataclass(frozen=True)
class Speeds:
    """Predicted speeds.

    Args:
        steps_per_s: of the whole job, with its global batch; shape ``(n,)``. 0: it cannot run so.
        spread: standard deviation of the logarithm of each, shape ``(n,)``; 0: measured there, or known.
    """

    steps_per_s: NDArray[np.float64]
    spread: NDArray[np.float64]


class Scaling(Protocol):
    """Predicts the speed of one job. Its global batch does not depend on the number of its devices."""

    def speeds(self, num_devices: NDArray[np.integer[Any]], num_nodes: NDArray[np.integer[Any]]) -> Speeds:
        """Return the speeds with so many devices on so many nodes, spread as evenly as can be.

        Args:
            num_devices: above 0, shape ``(n,)``.
            num_nodes: from 1 to `num_devices`, shape ``(n,)``.
        """
        ...
