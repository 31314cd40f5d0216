"""The mixes of `colocation_mixes.py` on a simulated machine: the real scheduler and rules of memory, jobs by arithmetic.

The machine has cores, and perhaps a GPU with cores for its jobs' own code. Cores are divided as `colocate/slowdown.py`
expects, and jobs beside each other lose what `Kind.pressure` takes, and more where they are more than the cores (`CROWDING`).
The GPU serves its jobs' kernels in turn. The scheduler learns from windows, as it does from real jobs. Nothing here is
measured: the figures show what a policy's choices are worth where jobs behave as their profiles say.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from lightning_dlrover.colocate.devices import Gpu
from lightning_dlrover.colocate.journal import Ended, JobSpec, Profiled, Rates, Span
from lightning_dlrover.colocate.scheduler import Knowledge, Scheduler, jobs_per_core
from lightning_dlrover.colocate.slowdown import CoreUse, expected
from lightning_dlrover.colocate.tenants import (
    Action,
    End,
    Holding,
    LocalDevice,
    Memory,
    Start,
    Tenant,
    Waiting,
    after,
    memory_actions,
)

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
    train_s: float  # time of its steps alone, on cores
    start_s: float  # on one core
    gpu_s: float = 0.0  # time of its steps alone on a GPU
    gpu_busy: float = 1.0  # fraction of that in which its kernels run

    def seconds(self, place: LocalDevice) -> float:
        """Return the time of its steps alone on a device."""
        return self.train_s if place.gpu is None else self.gpu_s


KINDS = {
    "compute": Kind(cores=1.85, wait=0.0, pressure=0.03, memory_mib=320, train_s=6.0, start_s=2.2),
    "memory": Kind(cores=1.7, wait=0.0, pressure=0.1, memory_mib=700, train_s=6.0, start_s=2.7),
    "input": Kind(cores=0.1, wait=0.9, pressure=0.01, memory_mib=330, train_s=6.0, start_s=2.2),
    "mixed": Kind(cores=1.0, wait=0.4, pressure=0.05, memory_mib=420, train_s=6.0, start_s=2.2),
}
KINDS |= {
    f"slow_{name}": replace(kind, train_s=2 * kind.train_s) for name, kind in KINDS.items() if name in ("compute", "memory")
}
KINDS |= {
    "slow_input": Kind(cores=0.1, wait=0.9, pressure=0.01, memory_mib=330, train_s=12.0, start_s=2.2),
    "slow_mixed": Kind(cores=0.5, wait=0.75, pressure=0.03, memory_mib=320, train_s=12.0, start_s=2.2),
}
"""CPU time of starts and steps as measured with `colocation_job.py`; pressures are guesses."""


GPU_KINDS = {
    "compute": Kind(1.9, 0.0, 0.03, 320, 120.0, 2.2, gpu_s=8.0, gpu_busy=0.95),
    "memory": Kind(1.7, 0.0, 0.1, 700, 60.0, 2.7, gpu_s=12.0, gpu_busy=0.6),
    "input": Kind(0.3, 0.8, 0.01, 330, 30.0, 2.2, gpu_s=25.0, gpu_busy=0.05),
    "mixed": Kind(1.0, 0.4, 0.05, 420, 45.0, 2.2, gpu_s=15.0, gpu_busy=0.3),
}
"""Jobs that are between 1.2 and 15 times as fast on a GPU as on two cores. All figures are invented."""
GPU = Gpu(0, "GPU-0", "a GPU", 16_000 * MIB, 16_000 * MIB, {"gpu": 1.0})
GPU_CORES = 2.0
ALONE_S = 2.5
"""Seconds after which a kind that runs alone is measured."""


@dataclass
class _Work:
    """What is left of a job: core-seconds of its start, then the fraction of its steps."""

    kind: str
    start_s: float
    left: float = 1.0
    end_s: float = END_S


@dataclass
class Machine:
    """A queue under one policy.

    Args:
        jobs: kinds by name, in the order of the queue.
        at_once: most jobs of a device at once; 0: as `dlrover colocate` chooses.
        with_gpu: whether it has a GPU beside its cores.
        with_cores: whether jobs may run on cores alone.
        is_cold: no kind was measured before.
    """

    policy: str
    jobs: Mapping[str, str]
    kinds: Mapping[str, Kind] = field(default_factory=lambda: KINDS)
    num_cores: float = 2.0
    at_once: int = 0
    seed: int = 0
    with_gpu: bool = False
    with_cores: bool = True
    is_cold: bool = False
    now: float = 0.0

    def __post_init__(self) -> None:
        most = self.at_once or int(jobs_per_core(self.policy) * self.num_cores)
        cores = LocalDevice("cpu", "cpu", (), self.num_cores, 14_000 * MIB, most)
        gpu = replace(cores, name="gpu:0", kind=GPU.name, num_cores=GPU_CORES, gpu=GPU, gpu_bytes=GPU.total_bytes)
        self.places = [*([gpu] if self.with_gpu else []), *([cores] if self.with_cores else [])]
        self.knowledge = Knowledge(device_kinds={place.name: place.kind for place in self.places})
        for name, kind in self.kinds.items() if not self.is_cold else ():
            spec = JobSpec(name, (name,), "/")
            spans = (Span("starting", 0.0, kind.start_s),)
            for place in self.places:
                self.knowledge.learn(_profile(spec.kind, kind, place))
                ended = Ended(name, 1, "done", 0, "", 0.0, 0.0, 0.0, 0.0, kind.memory_mib * MIB, num_steps=0, spans=spans)
                steps = round(kind.train_s / STEP_S)
                self.knowledge.learn_end(spec, replace(ended, num_steps=steps, where=place.where))
        self.scheduler = Scheduler(self.policy, self.knowledge, self.seed, most_together=most)
        specs = {name: JobSpec(name, (kind,), "/") for name, kind in self.jobs.items()}
        self.kind_of = {spec.kind: self.jobs[name] for name, spec in specs.items()}
        self.waiting = {
            name: Waiting(
                name,
                specs[name].kind,
                0,
                0.001 * number,
                {place.where: self.knowledge.expected(specs[name], place.where) for place in self.places},
            )
            for number, name in enumerate(self.jobs)
        }
        self.work = {name: _Work(kind, self.kinds[kind].start_s) for name, kind in self.jobs.items()}
        self.tenants: dict[str, Tenant] = {}
        self.together: dict[str, tuple[str, ...]] = {}  # key: device
        self.since_s: dict[str, float] = {}
        self.busy_s = 0.0
        self.num_started = dict.fromkeys([place.name for place in self.places], 0)

    def run(self, most_s: float = 1e5) -> float:
        """Return the time in which all jobs end."""
        while self.waiting or self.tenants:
            if self.now > most_s:
                raise RuntimeError(f"{len(self.waiting)} jobs wait and {len(self.tenants)} run after {most_s:.0f} s")
            for place in self.places:
                here = [tenant for tenant in self.tenants.values() if tenant.device == place.name]
                for action in memory_actions(place.sizes, here):
                    self._act(action)
            tenants = [*self.tenants.values()]
            for action in self.scheduler.actions(self.now, self.places, [*self.waiting.values()], tenants):
                self._act(action)
            self._advance()
        return self.now

    @property
    def utilisation(self) -> float:
        """Part of the cores' time that was used; with a GPU, of the GPU's time."""
        return self.busy_s / (self.places[0].num_cores * self.now) if not self.with_gpu else self.busy_s / self.now

    def _advance(self) -> None:
        self.now += LOOK_S
        for name in [name for name in self.tenants if self.work[name].left <= 0]:
            self.work[name].end_s -= LOOK_S
            if self.work[name].end_s <= 0:
                del self.tenants[name]
        for place in self.places:
            active = [
                tenant
                for tenant in self.tenants.values()
                if tenant.device == place.name and tenant.phase in ("starting", "running") and self.work[tenant.name].left > 0
            ]
            if active:
                self._run(place, active)

    def _run(self, place: LocalDevice, active: Sequence[Tenant]) -> None:
        real = self._on_cores(place, active) if place.gpu is None else self._on_gpu(active)
        self._learn(place, active, real)
        for tenant in active:
            self._progress(tenant, place, LOOK_S * real[tenant.name])

    def _on_gpu(self, active: Sequence[Tenant]) -> dict[str, float]:
        """Return the speeds of jobs that take turns on the GPU; each that starts has a core."""
        running = [tenant for tenant in active if tenant.phase == "running"]
        kinds = [self.kinds[self.work[tenant.name].kind] for tenant in running]
        uses = [CoreUse(tenant.kind, kind.gpu_busy, 1 - kind.gpu_busy) for tenant, kind in zip(running, kinds, strict=True)]
        found = expected(uses, [1] * len(uses), 1.0) if uses else None
        speeds = {tenant.name: 1.0 for tenant in active}
        if found is not None:
            self.busy_s += LOOK_S * float(sum(found.use))
            speeds |= {tenant.name: float(speed) for tenant, speed in zip(running, found.speeds, strict=True)}
        return speeds

    def _on_cores(self, place: LocalDevice, active: Sequence[Tenant]) -> dict[str, float]:
        shares = self.scheduler.thread_shares(place, [t.kind if t.phase == "running" else "" for t in active])
        uses = [self._use(tenant) for tenant in active]
        found = expected(uses, shares, self.num_cores)
        busy, speeds = found.use, found.speeds
        if not self.with_gpu:
            self.busy_s += LOOK_S * float(sum(busy))
        press = [self.kinds[use.family].pressure if use.family in self.kinds else 0.05 for use in uses]
        wanted = sum(float(expected([use], [threads], threads).use[0]) for use, threads in zip(uses, shares, strict=True))
        crowd = CROWDING * max(0.0, wanted / self.num_cores - 1)
        lost = [1 + crowd + self._pressure(i, press, busy.tolist()) for i in range(len(active))]
        return {tenant.name: float(s) / loss for tenant, s, loss in zip(active, speeds, lost, strict=True)}

    def _pressure(self, index: int, press: Sequence[float], busy: Sequence[float]) -> float:
        """Return what the others take from a job: while it has a core, they have the rest."""
        others = sum(busy) - busy[index]
        total = sum(p * b for p, b in zip(press, busy, strict=True)) - press[index] * busy[index]
        return total * min(1.0, (self.num_cores - 1) / others) if others else 0.0

    def _progress(self, tenant: Tenant, place: LocalDevice, seconds: float) -> None:
        work = self.work[tenant.name]
        if tenant.phase == "starting":
            work.start_s -= seconds
            if work.start_s <= 0:
                need = self.kinds[work.kind].memory_mib * MIB
                holdings = {
                    memory: replace(holding, resident_bytes=need, need_bytes=need)
                    for memory, holding in tenant.holdings.items()
                }
                self.tenants[tenant.name] = replace(tenant, phase="asks", since_s=self.now, holdings=holdings)
        else:
            work.left -= seconds / self.kinds[work.kind].seconds(place)
            steps = round(self.kinds[work.kind].train_s / STEP_S)
            left = max(0, math.ceil(work.left * steps))
            self.tenants[tenant.name] = replace(tenant, steps_left=left, num_steps=steps - left)

    def _learn(self, place: LocalDevice, active: Sequence[Tenant], real: Mapping[str, float]) -> None:
        names = tuple(sorted(tenant.name for tenant in active))
        if names != self.together.get(place.name) or any(tenant.phase == "starting" for tenant in active):
            self.together[place.name], self.since_s[place.name] = names, self.now
        elif len(names) == 1 and self.now - self.since_s[place.name] >= ALONE_S:
            self.since_s[place.name] = self.now
            self.knowledge.learn(_profile(active[0].kind, self.kinds[self.work[names[0]].kind], place))
        elif len(names) > 1 and self.now - self.since_s[place.name] >= WINDOW_S:
            self.since_s[place.name] = self.now
            speeds: dict[str, list[float]] = {}
            for tenant in active:
                speeds.setdefault(tenant.kind, []).append(real[tenant.name])
            means = {kind: sum(each) / len(each) for kind, each in speeds.items()}
            kinds = tuple(sorted(tenant.kind for tenant in active))
            if all(self.knowledge.is_profiled(kind, place.kind) for kind in kinds):
                self.knowledge.learn(Rates(place.name, means, kinds, WINDOW_S, place.kind))

    def _use(self, tenant: Tenant) -> CoreUse:
        kind = self.work[tenant.name].kind
        return CoreUse(kind, self.kinds[kind].cores, self.kinds[kind].wait) if tenant.phase == "running" else START

    def _act(self, action: Action) -> None:
        if isinstance(action, Start):
            job = self.waiting.pop(action.job)
            holdings: dict[Memory, Holding] = {memory: Holding(charge) for memory, charge in action.charges.items()}
            self.tenants[job.name] = Tenant(
                job.name, job.kind, "starting", action.device, 0, job.submitted_s, self.now, holdings, since_s=self.now
            )
            self.num_started[action.device] += 1
            return
        if isinstance(action, End):
            raise RuntimeError(f"jobs of known needs are not ended: {action}")
        tenant = self.tenants[action.job]
        changed = after(tenant, action)
        self.tenants[tenant.name] = changed if changed.phase == tenant.phase else replace(changed, since_s=self.now)


def _profile(name: str, kind: Kind, place: LocalDevice) -> Profiled:
    """Return the measurement of a kind alone."""
    steps_per_s = kind.train_s / STEP_S / kind.seconds(place)
    if place.gpu is None:
        return Profiled(name, place.kind, {"cores": kind.cores, "input": kind.wait}, steps_per_s)
    return Profiled(name, place.kind, {"cores": 0.5, "input": 0.0, "gpu": kind.gpu_busy}, steps_per_s)


def rehearse(
    counts: Mapping[str, int],
    policy: str,
    at_once: int = 0,
    seed: int = 0,
    kinds: Mapping[str, Kind] = KINDS,
    with_gpu: bool = False,
    with_cores: bool = True,
    is_cold: bool = False,
) -> Machine:
    """Run a mix to its end, its jobs in an order drawn from the seed."""
    jobs = [(f"{kind}-{copy}", kind) for kind, count in counts.items() for copy in range(count)]
    random.Random(f"{seed}").shuffle(jobs)
    machine = Machine(
        policy, dict(jobs), kinds, at_once=at_once, seed=seed, with_gpu=with_gpu, with_cores=with_cores, is_cold=is_cold
    )
    machine.run()
    return machine
