"""Jobs of a pool that are only records: their runs, plans and agents, as a brain sees those of real jobs.

Each job follows its plan one worker at a time, when the test lets it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from lightning_dlrover.pool.view import GrantRecord, MemberRecord, PoolKeys
from lightning_dlrover.rdzv.etcd.client import EtcdClient
from lightning_dlrover.rdzv.job.events import DecisionMade, record_of
from lightning_dlrover.rdzv.job.journal import Journal, readable
from lightning_dlrover.rdzv.job.records import AgentRecord, Keys, PlanRecord, encode
from lightning_dlrover.tuning.plan import Candidate, Decision, Settings
from tests.support.stored import stored

GLOBAL_BATCH = 64


def decision(rates: list[float], current: int = 1, left_s: float | None = 1000.0, number: int = 1) -> Decision:
    """A planner's decision to stay, which predicts these samples/s for 1, 2, ... workers of one core."""
    candidates = tuple(
        Candidate(Settings(n, 0, 1, 0), GLOBAL_BATCH / r, 60 / r, 70 / r, r, 0.0, n == current, True, cores=float(n))
        for n, r in enumerate(rates, start=1)
    )
    runs, step_s = Settings(current, 0, 1, 0), GLOBAL_BATCH / rates[current - 1]
    return Decision(number, time.time(), runs, runs, "", candidates, step_s, step_s, False, left_s=left_s)


@dataclass
class PooledJobs:
    """The jobs of one pool.

    Args:
        budget: workers that all of them may have together; more at any time is an error of the brain.
    """

    client: EtcdClient
    pool: PoolKeys
    budget: int
    agents: dict[str, list[str]] = field(default_factory=dict)  # keyed by job
    by_hand: set[str] = field(default_factory=set)
    _num_agents: int = 0

    def keys(self, name: str) -> Keys:
        return Keys(f"{self.pool.pool}-{name}", self.pool.prefix)

    def submit(self, name: str, workers: tuple[int, int] = (1, 2), priority: int = 0) -> None:
        """Write the member record, as a `dlrover run --pool` does."""
        member = MemberRecord("host", 1, *workers, submitted_at=time.time(), priority=priority)
        self.client.put(self.pool.members + self.keys(name).run_id, encode(member))
        self.agents[name] = []

    def grant(self, name: str) -> GrantRecord | None:
        return readable(GrantRecord, self.client.get(self.pool.grants + self.keys(name).run_id))

    def plan(self, name: str) -> PlanRecord | None:
        return readable(PlanRecord, self.client.get(self.keys(name).plan))

    def granted(self, name: str) -> GrantRecord:
        return stored(self.client, GrantRecord, self.pool.grants + self.keys(name).run_id)

    def planned(self, name: str) -> PlanRecord:
        return stored(self.client, PlanRecord, self.keys(name).plan)

    def decide(self, name: str, rates: list[float], left_s: float | None = 1000.0) -> None:
        """Let the job's planner publish its predictions."""
        made = decision(rates, max(1, len(self.agents[name])), left_s)
        Journal(self.client, self.keys(name)).append(record_of(DecisionMade(made.to_data()), ""), "test")

    def set_by_hand(self, name: str, num_workers: int) -> None:
        self.client.put(self.keys(name).plan, encode(PlanRecord(num_workers, "user", "by hand", True)))
        self.by_hand.add(name)

    def follow(self, name: str | None = None) -> None:
        """Let each job, or one of them, begin if it was granted a place, and take one step towards its plan."""
        for each in [name] if name is not None else list(self.agents):
            grant, plan = self.grant(each), self.plan(each)
            if plan is None and grant is not None and grant.state == "granted":
                plan = PlanRecord(grant.num_workers, "brain", grant.reason, True)
                self.client.put(self.keys(each).plan, encode(plan))
            if plan is None:
                continue
            has = self.agents[each]
            if len(has) < plan.num_workers:
                self._num_agents += 1
                has.append(f"agent{self._num_agents}")
                record = AgentRecord(has[-1], "host", 1, 1, "running")
                self.client.put(self.keys(each).agents + has[-1], encode(record))
            elif len(has) > plan.num_workers:
                self.client.delete(self.keys(each).agents + has.pop())
            self.check()

    def lose_agents(self, name: str) -> None:
        """Let all agents of a job vanish, as when it was killed."""
        for agent in self.agents[name]:
            self.client.delete(self.keys(name).agents + agent)
        self.agents[name] = []

    def end(self, name: str) -> None:
        """End a job in order."""
        self.lose_agents(name)
        self.client.delete(self.keys(name).plan)
        self.client.delete(self.pool.grants + self.keys(name).run_id)
        self.client.delete(self.pool.members + self.keys(name).run_id)
        del self.agents[name]

    def kill(self, name: str) -> None:
        """Let a job's `dlrover run` be gone, and its agents stay."""
        self.client.delete(self.pool.members + self.keys(name).run_id)

    @property
    def sizes(self) -> dict[str, int]:
        return {name: len(agents) for name, agents in self.agents.items()}

    def check(self) -> None:
        """Assert that the budget is kept, unless a person has set sizes beyond it."""
        total = sum(self.sizes.values())
        assert total <= self.budget or self.by_hand, f"{total} workers with a budget of {self.budget}: {self.sizes}"
