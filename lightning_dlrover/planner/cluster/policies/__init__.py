"""The policies by name. Each decides in one file; `make_policy` adds the bound on waiting and the priorities that all keep."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from lightning_dlrover.planner.cluster.policies.complementary import complementary
from lightning_dlrover.planner.cluster.policies.fifo import fifo
from lightning_dlrover.planner.cluster.policies.muri import muri
from lightning_dlrover.planner.cluster.policies.random_sets import random_sets
from lightning_dlrover.planner.cluster.policies.rmixer import rmixer
from lightning_dlrover.planner.cluster.policies.rmixer_mixed import rmixer_mixed
from lightning_dlrover.planner.cluster.policies.sequential import sequential
from lightning_dlrover.planner.cluster.policy import Policy, PolicySettings
from lightning_dlrover.planner.cluster.waiting import PlacementRule, with_bounded_wait

__all__ = ["POLICIES", "make_policy"]

POLICIES: Mapping[str, Callable[[PolicySettings], PlacementRule]] = {
    "sequential": sequential,
    "fifo": fifo,
    "random_sets": random_sets,
    "rmixer": rmixer,
    "rmixer_mixed": rmixer_mixed,
    "muri": muri,
    "complementary": complementary,
}


def make_policy(name: str, settings: PolicySettings | None = None) -> Policy:
    """Return the policy with that name.

    Raises:
        ValueError: there is no such policy.
    """
    if name not in POLICIES:
        raise ValueError(f"there is no policy {name!r}; choose one of {', '.join(POLICIES)}")
    settings = settings or PolicySettings()
    return with_bounded_wait(POLICIES[name](settings), settings.max_wait_s)
