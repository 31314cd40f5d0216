"""The mixes of `colocation_mixes.py` on a simulated machine: the real scheduler and rules of memory, jobs by arithmetic.

Cores are divided as `planner/cluster/cores.py` expects, and jobs beside each other lose what `Kind.pressure` takes, and more
where they are more than the cores (`CROWDING`). The scheduler learns from windows, as it does from real jobs. Nothing here is
measured: the figures show what a policy's choices are worth where jobs behave as their profiles say.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from lightning_dlrover.colocate.jobs_file import JobSpec
from lightning_dlrover.colocate.journal import Ended, Profiled, Rates, Span
from lightning_dlrover.colocate.knowledge import Knowledge
from lightning_dlrover.colocate.memory import memory_actions
from lightning_dlrover.colocate.places import Place
from lightning_dlrover.colocate.schedule import Scheduler, jobs_per_core
from lightning_dlrover.colocate.tenants import Action, End, Holding, Memory, Start, Tenant, Waiting, after
from lightning_dlrover.planner.cluster.cores import CoreUse, expected

__all__ = ["KINDS", "Kind", "Machine", "rehearse"]

LOOK_S = 0.1
WINDOW_S = 4.0
STEP_S = 0.01
END_S = 0.2
"""Seconds after a job's last step until the dispatcher knows of its end."""
MIB = 1 << 20
START = CoreUse("start", 1.0)
CROWDING = 0.1
"""Part of its speed that each job loses if all together want twice the cores, as measured with four jobs on two cores."""


@dataclass(frozen=True)
class Kind:
    """A kind of job: busy cores and the fraction of waiting alone, and what its memory traffic takes from another job."""

    cores: float
    wait: float
    pressure: float
    memory_mib: int
    train_s: float  # time of its steps alone
    start_s: float  # on one core


KINDS: Mapping[str, Kind] = {
    "compute": Kind(cores=1.85, wait=0.0, pressure=0.03, memory_mib=320, train_s=6.0, start_s=2.2),
    "memory": Kind(cores=1.7, wait=0.0, pressure=0.1, memory_mib=700, train_s=6.0, start_s=2.7),
    "input": Kind(cores=0.1, wait=0.9, pressure=0.01, memory_mib=330, train_s=6.0, start_s=2.2),
    "mixed": Kind(cores=1.0, wait=0.4, pressure=0.05, memory_mib=420, train_s=6.0, start_s=2.2),
}
"""CPU time of starts and steps as measured with `colocation_job.py`; pressures are guesses."""


@dataclass
class _Work:
    """What is left of a job: core-seconds of its start, then seconds alone of its steps."""

    kind: str
    start_s: float
    train_s: float
    end_s: float = END_S


@dataclass
class Machine:
    """A queue under one policy.

    Args:
        jobs: kinds by name, in the order of the queue.
        at_once: most jobs at once; 0: as `dlrover colocate` chooses.
    """

    policy: str
    jobs: Mapping[str, str]
    kinds: Mapping[str, Kind] = field(default_factory=lambda: KINDS)
    num_cores: float = 2.0
    at_once: int = 0
    seed: int = 0
    now: float = 0.0

    def __post_init__(self) -> None:
        most = self.at_once or int(jobs_per_core(self.policy) * self.num_cores)
        self.place = Place("cpu", "cpu", (), self.num_cores, 14_000 * MIB, most)
        self.knowledge = Knowledge()
        for name, kind in self.kinds.items():
            spec = JobSpec(name, (name,), "/")
            self.knowledge.learn(Profiled(spec.kind, "cpu", {"cores": kind.cores, "input": kind.wait}, 1 / STEP_S))
            spans = (Span("starting", 0.0, kind.start_s),)
            ended = Ended(name, 1, "done", 0, "", 0.0, 0.0, 0.0, 0.0, kind.memory_mib * MIB, num_steps=0, spans=spans)
            self.knowledge.learn_end(spec, replace(ended, num_steps=round(kind.train_s / STEP_S)))
        self.scheduler = Scheduler(self.policy, self.knowledge, self.seed, most_together=most)
        specs = {name: JobSpec(name, (kind,), "/") for name, kind in self.jobs.items()}
        self.waiting = {
            name: Waiting(name, specs[name].kind, 0, 0.001 * number, self.knowledge.expected(specs[name]))
            for number, name in enumerate(self.jobs)
        }
        self.work = {name: _Work(kind, self.kinds[kind].start_s, self.kinds[kind].train_s) for name, kind in self.jobs.items()}
        self.tenants: dict[str, Tenant] = {}
        self.together: tuple[str, ...] = ()
        self.since_s = 0.0
        self.busy_s = 0.0

    def run(self, most_s: float = 1e5) -> float:
        """Return the time in which all jobs end."""
        while self.waiting or self.tenants:
            if self.now > most_s:
                raise RuntimeError(f"{len(self.waiting)} jobs wait and {len(self.tenants)} run after {most_s:.0f} s")
            for action in memory_actions(self.place.sizes, [*self.tenants.values()]):
                self._act(action)
            tenants = [*self.tenants.values()]
            for action in self.scheduler.actions(self.now, [self.place], [*self.waiting.values()], tenants):
                self._act(action)
            self._advance()
        return self.now

    @property
    def utilisation(self) -> float:
        """Part of the cores' time that was used."""
        return self.busy_s / (self.num_cores * self.now)

    def _advance(self) -> None:
        self.now += LOOK_S
        for name in [name for name in self.tenants if self.work[name].train_s <= 0]:
            self.work[name].end_s -= LOOK_S
            if self.work[name].end_s <= 0:
                del self.tenants[name]
        active = [
            tenant
            for tenant in self.tenants.values()
            if tenant.phase in ("starting", "running") and self.work[tenant.name].train_s > 0
        ]
        if not active:
            return
        shares = self.scheduler.thread_shares(self.place, [t.kind if t.phase == "running" else "" for t in active])
        uses = [self._use(tenant) for tenant in active]
        found = expected(uses, shares, self.num_cores)
        busy, speeds = found.use, found.speeds
        self.busy_s += LOOK_S * float(sum(busy))
        press = [self.kinds[use.family].pressure if use.family in self.kinds else 0.05 for use in uses]
        wanted = sum(float(expected([use], [threads], threads).use[0]) for use, threads in zip(uses, shares, strict=True))
        crowd = CROWDING * max(0.0, wanted / self.num_cores - 1)
        lost = [1 + crowd + self._pressure(i, press, busy.tolist()) for i in range(len(active))]
        real = {tenant.name: float(s) / loss for tenant, s, loss in zip(active, speeds, lost, strict=True)}
        self._learn(active, real)
        for tenant in active:
            self._progress(tenant, LOOK_S * real[tenant.name])

    def _pressure(self, index: int, press: Sequence[float], busy: Sequence[float]) -> float:
        """Return what the others take from a job: while it has a core, they have the rest."""
        others = sum(busy) - busy[index]
        total = sum(p * b for p, b in zip(press, busy, strict=True)) - press[index] * busy[index]
        return total * min(1.0, (self.num_cores - 1) / others) if others else 0.0

    def _progress(self, tenant: Tenant, seconds: float) -> None:
        work = self.work[tenant.name]
        if tenant.phase == "starting":
            work.start_s -= seconds
            if work.start_s <= 0:
                need = self.kinds[work.kind].memory_mib * MIB
                holding = replace(tenant.holdings["host"], resident_bytes=need, need_bytes=need)
                self.tenants[tenant.name] = replace(tenant, phase="asks", since_s=self.now, holdings={"host": holding})
        else:
            work.train_s -= seconds
            self.tenants[tenant.name] = replace(tenant, steps_left=max(0, math.ceil(work.train_s / STEP_S)))

    def _learn(self, active: Sequence[Tenant], real: Mapping[str, float]) -> None:
        names = tuple(sorted(tenant.name for tenant in active))
        if names != self.together or any(tenant.phase == "starting" for tenant in active):
            self.together, self.since_s = names, self.now
        elif len(names) > 1 and self.now - self.since_s >= WINDOW_S:
            self.since_s = self.now
            speeds: dict[str, list[float]] = {}
            for tenant in active:
                speeds.setdefault(tenant.kind, []).append(real[tenant.name])
            means = {kind: sum(each) / len(each) for kind, each in speeds.items()}
            self.knowledge.learn(Rates("cpu", means, tuple(sorted(tenant.kind for tenant in active)), WINDOW_S))

    def _use(self, tenant: Tenant) -> CoreUse:
        kind = self.work[tenant.name].kind
        return CoreUse(kind, self.kinds[kind].cores, self.kinds[kind].wait) if tenant.phase == "running" else START

    def _act(self, action: Action) -> None:
        if isinstance(action, Start):
            job = self.waiting.pop(action.job)
            holdings: dict[Memory, Holding] = {memory: Holding(charge) for memory, charge in action.charges.items()}
            self.tenants[job.name] = Tenant(
                job.name, job.kind, "starting", "cpu", 0, job.submitted_s, self.now, holdings, since_s=self.now
            )
            return
        if isinstance(action, End):
            raise RuntimeError(f"jobs of known needs are not ended: {action}")
        tenant = self.tenants[action.job]
        changed = after(tenant, action)
        self.tenants[tenant.name] = changed if changed.phase == tenant.phase else replace(changed, since_s=self.now)


def rehearse(
    counts: Mapping[str, int], policy: str, at_once: int = 0, seed: int = 0, kinds: Mapping[str, Kind] = KINDS
) -> Machine:
    """Run a mix to its end, its jobs in an order drawn from the seed."""
    jobs = [(f"{kind}-{copy}", kind) for kind, count in counts.items() for copy in range(count)]
    random.Random(f"{seed}").shuffle(jobs)
    machine = Machine(policy, dict(jobs), kinds, at_once=at_once, seed=seed)
    machine.run()
    return machine
