"""Choose the next changes of a pool from one look at it. Pure: `writer.py` carries them out."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from lightning_dlrover.planner.cluster.elastic import ELASTIC_POLICIES
from lightning_dlrover.planner.cluster.pool.elastic_policy import as_asked, elastic_divider
from lightning_dlrover.planner.cluster.pool.jobs import PoolJob
from lightning_dlrover.planner.cluster.pool.moves import Move, next_moves
from lightning_dlrover.planner.cluster.pool.owners import Owners, queue_in_order
from lightning_dlrover.planner.cluster.pool.resources import Resources
from lightning_dlrover.planner.cluster.pool.sizes import Divider, wanted_sizes, why_never
from lightning_dlrover.planner.cluster.pool.waits import Wait, queue_of
from lightning_dlrover.planner.cluster.queue_order import turn_of

__all__ = ["Choice", "Rules", "choose", "reason_of"]

DEFAULT_MAX_WAIT_S = 3600.0
DEFAULT_POLICY = "jct"


@dataclass(frozen=True)
class Rules:
    """The rules of a brain.

    Args:
        policy: name of a policy for elastic jobs.
        max_wait_s: a job that has waited longer goes before all others.
        owners: their weights and quotas.
        counts_others: whether jobs that are in no pool take part of the budget.
    """

    budget: Resources
    policy: str = DEFAULT_POLICY
    max_wait_s: float = DEFAULT_MAX_WAIT_S
    owners: Owners = field(default_factory=Owners)
    counts_others: bool = True

    @cached_property
    def divide(self) -> Divider:
        """The policy.

        Raises:
            ValueError: there is none with that name.
        """
        return elastic_divider(self.policy, self.max_wait_s)

    def treated(self, jobs: Sequence[PoolJob]) -> Sequence[PoolJob]:
        """Return jobs as the policy treats them."""
        return as_asked(jobs, self.budget, self.owners) if ELASTIC_POLICIES[self.policy].rigid else jobs


@dataclass(frozen=True)
class Choice:
    """The next acts of a brain.

    Args:
        wanted: the number of workers that each job should have in the end.
        moves: the changes to make now.
        refused: reasons by name of jobs that can never start.
        gone: jobs of which nothing is left.
        waits: of the queue, in order.
    """

    wanted: Mapping[str, int]
    moves: Sequence[Move]
    refused: Mapping[str, str]
    gone: Collection[str]
    waits: Sequence[Wait]

    def is_settled(self, jobs: Sequence[PoolJob]) -> bool:
        """Whether every job has the size that it should have, so that nothing is expected to happen soon."""
        return not self.moves and all(job.held == self.wanted.get(job.name, 0) and job.alive == job.held for job in jobs)


def choose(jobs: Sequence[PoolJob], rules: Rules, now_s: float, may_grow: bool) -> Choice:
    """Return the next changes.

    Args:
        may_grow: whether everything that runs is sure to be on record.
    """
    jobs, budget, owners = rules.treated(jobs), rules.budget, rules.owners
    refused = {job.name: reason for job in jobs if job.is_waiting and (reason := why_never(job, budget, owners))}
    able = [job for job in jobs if job.name not in refused]
    wanted = wanted_sizes(able, budget, rules.divide, now_s, rules.max_wait_s, owners)
    queue = queue_in_order(able, budget, owners, now_s, rules.max_wait_s)
    running = sorted((job for job in able if not job.is_waiting), key=turn_of)
    moves = next_moves([*queue.jobs, *queue.beyond_quota, *running], budget, wanted, may_grow)
    started = {move.name for move in moves}
    waits = queue_of([job for job in able if job.name not in started], budget, now_s, rules.max_wait_s, owners)
    gone = [job.name for job in jobs if not job.is_present and not job.alive]
    return Choice(wanted, moves, refused, gone, waits)


def reason_of(job: PoolJob, move: Move, jobs: Sequence[PoolJob], wanted: Mapping[str, int]) -> str:
    """Explain a change for people: the predicted gain or loss, and the other jobs that change with it."""
    text = f"{move.before} -> {move.after} workers" if move.before else f"starts with {_workers(move.after)}"
    before, after = job.rate(move.before), job.rate(move.after)
    if move.before and before is not None and after is not None:
        text += f": {after.samples_per_s / before.samples_per_s:.2f} times the throughput"
    changed = [other for other in jobs if other.name != job.name and wanted.get(other.name, other.held) != other.held]
    if changed:
        texts = [f"{other.name} {other.held} -> {wanted[other.name]}" for other in sorted(changed, key=lambda o: o.name)]
        text += f"; with it {', '.join(texts[:4])}" + (f" and {len(texts) - 4} more" if len(texts) > 4 else "")
    return text


def _workers(number: int) -> str:
    return f"{number} worker{'s' if number != 1 else ''}"
