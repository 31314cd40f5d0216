"""The policies that a brain can decide by."""

from __future__ import annotations

from lightning_dlrover.planner.cluster.pool.first_come import first_come
from lightning_dlrover.planner.cluster.pool.marginal_gain import by_marginal_gain
from lightning_dlrover.planner.cluster.pool.sizes import Divider

__all__ = ["divider"]


def divider(name: str, max_wait_s: float) -> Divider:
    """Return the policy of this name.

    Raises:
        ValueError: there is none.
    """
    known: dict[str, Divider] = {"marginal-gain": by_marginal_gain, "first-come": first_come}
    if name not in known:
        raise ValueError(f"there is no policy {name!r}; choose one of {', '.join(known)}")
    return known[name]
