"""Write the job's plan, as far as its owner leaves that to the planner.

A plan has one owner (`PlanRecord.owner`):

- the planner chooses all settings, and the number of workers is binding if a controller carries it out
- a pool chooses the number of workers, and the planner the settings of each worker
- a user who has set a plan by hand keeps all of it

The controller that starts and ends nodes reads the plan from etcd.
"""

from __future__ import annotations

import math
from dataclasses import replace

from lightning_dlrover.learn.autotuner import Proposal
from lightning_dlrover.learn.decision_log import DecisionLog
from lightning_dlrover.learn.write_budget import stored_bytes
from lightning_dlrover.perf.samples import StepProfile
from lightning_dlrover.planner.plan import Settings
from lightning_dlrover.planner.space import settings_of
from lightning_dlrover.rdzv.job.records import PlanRecord, encode
from lightning_dlrover.rdzv.live.membership import Membership

PATIENCE_WITH_A_PLAN_S = 120.0
"""Seconds that a plan may take to be carried out before the next one: new nodes may queue, and must start."""


class PlanWriter:
    """The planner's hand on the job's plan.

    Args:
        decisions: bounds the bytes of plans that only recommend, together with those of decisions.
    """

    def __init__(self, membership: Membership, decisions: DecisionLog) -> None:
        self._membership = membership
        self._decisions = decisions
        self._first_seen: tuple[PlanRecord | None, float] = (None, 0.0)  # newest plan, and when this worker first saw it
        self._written: PlanRecord | None = None  # plan after this worker's newest write
        self._replaced: PlanRecord | None = None  # plan in this worker's view before that; the view follows etcd a little later

    def is_under_way(self, profile: StepProfile, now: float) -> bool:
        """Whether the current plan is still being carried out. Judging it now would revert it.

        Args:
            profile: the newest window.
            now: seconds of a monotonic clock.
        """
        plan = self._membership.view.plan
        if self._written is not None and plan == self._replaced:
            plan = self._written
        if plan is None or not plan.created_at:
            return False
        if plan != self._first_seen[0]:
            self._first_seen = plan, now
        # Not measured by the plan's time, because its writer's clock may differ by hours.
        if now - self._first_seen[1] >= PATIENCE_WITH_A_PLAN_S:
            return False
        return (plan.binding and plan.num_workers != profile.num_workers) or not _is_tuned(plan, settings_of(profile))

    def write(self, proposal: Proposal, seen: PlanRecord | None, *, now: float, at: float) -> None:
        """Make a proposal the job's plan, unless a user owns the plan or it asks for nothing new.

        Args:
            seen: the plan that the proposal is based on.
            now: seconds of a monotonic clock.
            at: seconds since the epoch.

        Raises:
            EtcdError: the plan was not written.
        """
        if seen is not None and seen.owner == "user":
            return
        wanted = proposed_plan(proposal, seen, at)
        if seen is not None and _asked(seen) == _asked(wanted):
            return
        only_recommends = not proposal.is_binding and seen is not None and _asked(seen)[2:] == _asked(wanted)[2:]
        if only_recommends and not self._decisions.may_recommend(stored_bytes(encode(wanted)), now):
            return
        node_memory_mb = math.ceil(proposal.decision.node_memory_bytes / 2**20)

        def planned(newest: PlanRecord | None) -> PlanRecord | None:
            return merged_plan(wanted, newest, node_memory_mb, keeps_workers=proposal.keeps_workers)

        replaced = self._membership.view.plan
        self._written, self._replaced = self._membership.shared.update_plan(planned), replaced


def proposed_plan(proposal: Proposal, seen: PlanRecord | None, at: float) -> PlanRecord:
    """Return the plan that a proposal asks for, where `seen` is the present one.

    Args:
        at: seconds since the epoch.
    """
    decision, chosen = proposal.decision, proposal.decision.chosen
    node_cpus = seen.node_cpus if seen is not None else None
    if decision.is_change and proposal.is_binding and decision.node_cores:
        node_cpus = math.ceil(decision.node_cores)
    plan = PlanRecord(
        num_workers=proposal.advice.chosen_workers,
        source="planner",
        reason=decision.reason,
        binding=proposal.is_binding,
        decision_id=decision.decision_id,
        created_at=at,
        loader_workers=chosen.loader_workers,
        intra_op_threads=chosen.intra_op_threads,
        prefetch_factor=chosen.prefetch_factor,
        node_cpus=node_cpus,
    )
    return _with_workers_of(seen, plan) if seen is not None and seen.owner == "pool" else plan


def merged_plan(
    wanted: PlanRecord, newest: PlanRecord | None, node_memory_mb: int, *, keeps_workers: bool = False
) -> PlanRecord | None:
    """Return the plan to write over `newest`, which others may have written in the meantime; None: leave it as it is.

    Args:
        node_memory_mb: MiB that a node needs; 0: any.
        keeps_workers: whether the number of workers stays as `newest` has it, even if the planner owns it.
    """
    if newest is None:
        return replace(wanted, node_memory_mb=node_memory_mb or None)
    if newest.owner == "user":
        return None
    if newest.owner == "pool":
        wanted = _with_workers_of(newest, wanted)
    elif keeps_workers:  # more may have been planned because memory ran out
        wanted = replace(wanted, num_workers=newest.num_workers, binding=newest.binding)
    # Node memory raised after a failure must not be reverted by a plan of settings.
    return replace(wanted, node_memory_mb=max(newest.node_memory_mb or 0, node_memory_mb) or None)


def _with_workers_of(pools: PlanRecord, wanted: PlanRecord) -> PlanRecord:
    """Return the wanted settings of each worker, with the number of workers that the job's pool has planned."""
    return replace(wanted, num_workers=pools.num_workers, binding=pools.binding, source=pools.source, reason=pools.reason)


def _asked(plan: PlanRecord) -> tuple[int | bool | None, ...]:
    """Return the settings that a plan requests."""
    settings = plan.loader_workers, plan.intra_op_threads, plan.prefetch_factor
    return plan.num_workers, plan.binding, *settings, plan.node_cpus


def _is_tuned(plan: PlanRecord, settings: Settings) -> bool:
    """Whether `settings` match the plan's settings that each worker applies by itself."""
    asked = (plan.loader_workers, plan.intra_op_threads, plan.prefetch_factor if plan.loader_workers != 0 else None)
    has = (settings.loader_workers, settings.intra_op_threads, settings.prefetch_factor)
    return all(a is None or a == h for a, h in zip(asked, has, strict=True))
