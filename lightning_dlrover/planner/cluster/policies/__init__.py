"""The policies by name. Each decides in one file; `make_policy` adds the bound on waiting that all of them keep."""

from __future__ import annotations

from lightning_dlrover.planner.cluster.policy import Policy, PolicySettings

__all__ = ["POLICIES", "make_policy"]

POLICIES = ("sequential", "fifo", "random_sets", "rmixer", "muri", "complementary")


def make_policy(name: str, settings: PolicySettings | None = None) -> Policy:
    """Return the policy with that name.

    Raises:
        ValueError: there is no such policy.
    """
    raise NotImplementedError
