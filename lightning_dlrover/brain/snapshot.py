"""Show a pool as plain data: the process that decides, jobs with their sizes, and waiting jobs with reasons."""

from __future__ import annotations

from typing import Any

from lightning_dlrover.brain.decisions import Rules
from lightning_dlrover.brain.seen import SeenJob
from lightning_dlrover.brain.watch import PoolView
from lightning_dlrover.planner.cluster.pool.jobs import held_by
from lightning_dlrover.planner.cluster.pool.owners import Owners
from lightning_dlrover.planner.cluster.pool.resources import Resources

__all__ = ["rules_of", "snapshot_of"]

_FORMER_POLICIES = {"ours": "jct"}
"""Names of policies in the records of earlier brains, and today's."""


def rules_of(view: PoolView) -> Rules | None:
    """Return the rules of the brain that decides, None if no process does."""
    brain = view.brain
    if brain is None:
        return None
    owners = Owners(brain.owner_weights, {owner: Resources.within(quota) for owner, quota in brain.quotas.items()})
    policy = _FORMER_POLICIES.get(brain.policy, brain.policy)
    return Rules(Resources.within(brain.budget), policy, brain.max_wait_s, owners)


def snapshot_of(view: PoolView, now: float) -> dict[str, Any]:
    """Return the pool as data for JSON: running jobs first, then the queue in order.

    Args:
        now: seconds since the epoch.
    """
    rules = rules_of(view)

    def place(seen: SeenJob) -> tuple[bool, int, float, str]:
        job = seen.job
        return job.is_waiting, seen.grant.place if seen.grant is not None else 0, job.submitted_s, job.name

    return {
        "brain": None
        if view.brain is None
        else {"host": view.brain.host, "pid": view.brain.pid, "policy": view.brain.policy, "decisions": view.brain.number},
        "budget": rules.budget.text if rules is not None else "",
        "used": held_by(view.pool_jobs).text,
        "jobs": [_job(seen, now) for seen in sorted(view.jobs.values(), key=place)],
    }


def _job(seen: SeenJob, now: float) -> dict[str, Any]:
    job, grant = seen.job, seen.grant
    left_s = job.seconds_left(job.held) if job.held else None
    return {
        "job": job.name,
        "owner": job.owner,
        "priority": job.priority,
        "weight": job.weight,
        "workers": job.held,
        "granted": job.granted,
        "alive": job.alive,
        "min_workers": job.min_workers,
        "max_workers": job.max_workers,
        "has": job.needs.times(job.held).text,
        "state": _state(seen),
        "place": grant.place if grant is not None else 0,
        "expected_s": max(0.0, grant.expected_at - now) if grant is not None and grant.expected_at else None,
        "waited_s": max(0.0, now - job.submitted_s) if job.is_waiting else None,
        "left_s": left_s,
        "reason": grant.reason if grant is not None else "",
    }


def _state(seen: SeenJob) -> str:
    job, grant = seen.job, seen.grant
    if seen.is_outside:
        return "runs outside of all pools"
    if not job.is_present:
        return "its `dlrover run` is gone"
    if grant is not None and grant.state == "refused":
        return "refused"
    if job.is_waiting:
        return "waits"
    if seen.phase in ("finished", "failed"):
        return f"has {seen.phase}, its nodes end"
    if job.is_by_hand:
        return "runs, its size set by hand"
    if job.alive > job.granted:
        return "shrinks"
    if job.alive < job.granted:
        return "starts" if not job.alive else "grows"
    return "runs" if job.rates else "runs, its speed by size not known yet"
