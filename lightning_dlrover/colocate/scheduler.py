"""Choose the jobs that run now: ask a policy of `planner/cluster`, and turn its answer into starts, pauses and resumptions.

A policy that may pause jobs (`complementary`) gets more of them to choose from: a few beyond those that run are started ahead,
and then wait with their processes stopped. Each kind of job runs alone for a few steps, once. Jobs that would leave most of the
machine idle at the end of the queue start first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from lightning_dlrover.colocate.knowledge import Knowledge
from lightning_dlrover.colocate.memory import START_BYTES, free_bytes
from lightning_dlrover.colocate.places import LocalDevice
from lightning_dlrover.colocate.tenants import Action, Memory, Pause, Resume, Sizes, Start, Tenant, Waiting
from lightning_dlrover.planner.cluster import Allocation, Device, Job, PolicySettings, Profile, Running, State
from lightning_dlrover.planner.cluster.cores import LEAST_IDLE, CoreUse, Expected, equal_shares, expected, thread_shares
from lightning_dlrover.planner.cluster.mixed import Left, for_cores
from lightning_dlrover.planner.cluster.policies import make_policy
from lightning_dlrover.planner.cluster.policies.turns import turns
from lightning_dlrover.planner.cluster.queue_order import is_overdue, turn_of
from lightning_dlrover.planner.cluster.waiting import with_bounded_wait

__all__ = ["AHEAD", "Scheduler", "jobs_per_core"]

AHEAD = 4
"""Jobs that are started beyond those that run."""
ALONE_LIMIT_S, STEP_LIMIT_S = 90.0, 30.0
"""A job that has not been measured alone within this time, or has made no step for the second, is not measured."""
QUANTUM_S = 30.0
"""Jobs that run stay together for this long, unless one comes or goes."""
LAST_QUANTUM_S = 1.0
"""The same once all jobs have started, if their priorities are equal. They take turns, so that they end together."""
MOST_TOGETHER = 6
PAUSING = ("complementary",)
"""Policies that may pause jobs."""
START = {"cores": 1.0}
"""Use of a job that still starts."""
USUAL_S = 60.0
"""Time of a job on a GPU where that of none is known. Only how many of them are left then counts."""
UNKNOWN_PART = 0.5
"""Part of a device's cores that a job uses where no kind was measured. On a GPU, such a job keeps that busy, too."""


def jobs_per_core(policy: str) -> int:
    """Return the most jobs for each core that run at once: more where the policy sees which ones wait for data."""
    return 4 if policy in PAUSING else 2


@dataclass
class _Alone:
    """The job that a device belongs to while it is measured."""

    job: str
    kind: str
    since_s: float
    num_steps: int
    moved_s: float  # moment of its last step


@dataclass
class _Chosen:
    """The jobs chosen to run on all devices, and the candidates."""

    jobs: Allocation
    among: tuple[object, ...]
    since_s: float


class Scheduler:
    """
    Args:
        policy: name of the policy.
        knowledge: measurements of earlier jobs.
        seed: for a policy that chooses at random.
        wait_s: a job that has waited longer goes before all others.
        most_together: most jobs of any device that run at once.

    Raises:
        ValueError: the policy is unknown.
    """

    def __init__(
        self, policy: str, knowledge: Knowledge, seed: int = 0, wait_s: float = 3600.0, most_together: int = MOST_TOGETHER
    ) -> None:
        self.policy_name = policy
        self._knowledge = knowledge
        self._may_pause = policy in PAUSING
        self._shares = thread_shares if self._may_pause else equal_shares
        settings = PolicySettings(knowledge, wait_s, seed, most_together)
        if self._may_pause:
            self._policy, self._policy_at_end = (with_bounded_wait(turns(settings, last), wait_s) for last in (False, True))
        else:
            self._policy = self._policy_at_end = make_policy(policy, settings)
        self._wait_s = wait_s
        self._chosen: _Chosen | None = None
        self._side_by_side = 1.0  # most cores of a job beside others
        self._alone: dict[str, _Alone] = {}
        self._given_up: set[str] = set()  # kinds that could not be measured alone

    def threads(self, place: LocalDevice, num_jobs: int) -> int:
        """Return the threads of each process of a job that runs beside others, so that all together use each core once."""
        if self.policy_name == "sequential":
            num_jobs = 1
        return max(1, round(place.num_cores / max(1, num_jobs)))

    def thread_shares(self, place: LocalDevice, kinds: Sequence[str]) -> list[int]:
        """Return the threads of each process of jobs that run side by side, by their measured use or in equal parts.

        Args:
            kinds: of the jobs; "" stands for a job that still starts.
        """
        cores = [self._use(kind, place)["cores"] if kind else START["cores"] for kind in kinds]
        return self._shares(cores, place.num_cores)

    def _use(self, kind: str, place: LocalDevice) -> Mapping[str, float]:
        """Return what a kind of job uses alone on a device: as measured, else as its kin or a usual job does."""
        if known := self._knowledge.use(kind, place.kind):
            return {"cores": 1.0, **known}
        return {"cores": max(1.0, UNKNOWN_PART * place.num_cores), **({} if place.gpu is None else {"gpu": 1.0})}

    def actions(
        self, now: float, places: Sequence[LocalDevice], waiting: Sequence[Waiting], tenants: Sequence[Tenant]
    ) -> list[Action]:
        """Return the starts, pauses and resumptions that are due."""
        self._side_by_side = float(max((self.threads(place, 2) for place in places), default=1))
        able = [job for job in waiting if job.not_before_s <= now]
        wanted = self._wanted(now, places, able, tenants, are_last=not waiting)
        suitable = {job.name: _suitable(job, places) for job in able}
        actions: list[Action] = []
        for place in sorted(places, key=lambda place: place.gpu is None):  # the GPUs have the first choice
            here = [tenant for tenant in tenants if tenant.device == place.name]
            actions += self._of_tenants(now, place, here, {name for name, where in wanted.items() if place.name in where})
            if place.name not in self._alone:
                started = {action.job for action in actions if isinstance(action, Start)}
                for_here = [job for job in able if place in suitable[job.name] and job.name not in started]
                if self._may_pause:
                    chosen = self._ahead(now, place, places, for_here, tenants)
                else:
                    num_running = sum(tenant.phase in ("starting", "asks", "running") for tenant in here)
                    wanted_here = [job for job in for_here if place.name in wanted.get(job.name, ())]
                    chosen = sorted(wanted_here, key=turn_of)[: max(0, place.most_jobs - num_running)]
                actions += _starts(place, here, chosen)
        return _once(actions)

    def _wanted(
        self, now: float, places: Sequence[LocalDevice], waiting: Sequence[Waiting], tenants: Sequence[Tenant], are_last: bool
    ) -> Allocation:
        """Return the policy's answer. One that may pause jobs is asked only when its choice has changed, or is old."""
        if not self._may_pause:
            return self._policy(self._state(now, places, waiting, tenants))
        able = [tenant for tenant in tenants if tenant.is_admitted and not tenant.paused_for_memory]
        starting = [tenant for tenant in tenants if tenant.phase == "starting"]
        names = (tuple(sorted(tenant.name for tenant in each)) for each in (able, starting))
        among = (*names, self._knowledge.num_profiles, are_last)
        # A job of a low priority that has waited too long keeps its turn for longer: it gets few.
        are_equal = len({tenant.priority for tenant in able}) <= 1
        quantum_s = LAST_QUANTUM_S if are_last and are_equal else QUANTUM_S
        is_old = self._chosen is None or self._chosen.among != among or now - self._chosen.since_s > quantum_s
        # A job that has waited too long and now runs is not overdue any more. It keeps its place for the quantum.
        overdue = {t.name for t in able if t.phase == "paused" and is_overdue(t.since_s, now, self._wait_s)}
        if self._chosen is None or is_old or not overdue <= self._chosen.jobs.keys():
            policy = self._policy_at_end if are_last else self._policy
            self._chosen = _Chosen(policy(self._state_of_able(now, places, able, starting)), among, now)
        return self._chosen.jobs

    def _of_tenants(self, now: float, place: LocalDevice, tenants: Sequence[Tenant], wanted: set[str]) -> list[Action]:
        """Return the pauses and resumptions of a device's jobs."""
        if not self._may_pause:
            return []
        alone = self._measured_alone(now, place, tenants)
        actions: list[Action] = []
        for tenant in tenants:
            is_chosen = tenant.name in wanted or not tenant.is_admitted
            # A job that shows its peak holds all memory that is free. The sooner it has made its first steps, the better.
            shows_peak = any(holding.is_guess for holding in tenant.holdings.values())
            runs = shows_peak or (is_chosen if alone is None else tenant.name == alone)
            if tenant.phase in ("running", "starting") and not runs:
                actions.append(Pause(tenant.name, "others run" if alone is None else f"{alone} is measured alone"))
            elif tenant.phase == "paused" and not tenant.paused_for_memory and runs:
                actions.append(Resume(tenant.name))
        return actions

    def _measured_alone(self, now: float, place: LocalDevice, tenants: Sequence[Tenant]) -> str | None:
        """Return the job that has the device to itself at the moment, to be measured; None if none has."""
        current = self._alone.get(place.name)
        by_name = {tenant.name: tenant for tenant in tenants}
        if current is not None:
            tenant = by_name.get(current.job)
            is_measured = self._knowledge.is_profiled(current.kind, place.kind)
            is_gone = tenant is None or tenant.phase == "ending"
            if tenant is not None and tenant.num_steps > current.num_steps:
                current.num_steps, current.moved_s = tenant.num_steps, now
            is_late = now - current.since_s > ALONE_LIMIT_S or now - current.moved_s > STEP_LIMIT_S
            if not (is_measured or is_gone or is_late):
                return current.job
            if not is_measured:
                self._given_up.add(current.kind)  # too short to be measured, or without steps
            del self._alone[place.name]
        for tenant in tenants:
            is_able = tenant.is_admitted and not tenant.paused_for_memory
            is_known = tenant.kind in self._given_up or self._knows(tenant.kind, place)
            if is_able and not is_known and len(tenants) > 1:
                self._alone[place.name] = _Alone(tenant.name, tenant.kind, now, tenant.num_steps, now)
                return tenant.name
        return None

    def _knows(self, kind: str, place: LocalDevice) -> bool:
        """Whether a kind need not be measured alone on a device."""
        return self._knowledge.is_profiled(kind, place.kind) or self._knowledge.is_as_its_kin(kind, place.kind)

    def _ahead(
        self,
        now: float,
        place: LocalDevice,
        places: Sequence[LocalDevice],
        waiting: Sequence[Waiting],
        tenants: Sequence[Tenant],
    ) -> list[Waiting]:
        """Return the job that starts next, so that a policy has a choice; none with enough of them, or without a free core."""
        here = [tenant for tenant in tenants if tenant.device == place.name]
        num_paused = sum(tenant.phase == "paused" and not tenant.paused_for_memory for tenant in here)
        num_starting = sum(tenant.phase in ("starting", "asks") for tenant in here)
        # A start keeps one core busy. One is always under way.
        busy = num_starting + sum(self._cores_beside_others(self._use(t.kind, place)) for t in here if t.phase == "running")
        overdue = [job for job in waiting if is_overdue(job.submitted_s, now, self._wait_s)]
        if num_starting and busy + LEAST_IDLE > place.num_cores:
            return []
        if len(here) >= place.most_jobs + AHEAD or (num_paused >= AHEAD and not overdue):
            return []
        if overdue:
            return sorted(overdue, key=turn_of)[:1]
        ranks = self._ranks(place, places, waiting, tenants)
        able = [job for job in waiting if job.name in ranks]
        return sorted(able, key=lambda job: (-job.priority, ranks[job.name], job.submitted_s, job.name))[:1]

    def _ranks(
        self, place: LocalDevice, places: Sequence[LocalDevice], waiting: Sequence[Waiting], tenants: Sequence[Tenant]
    ) -> dict[str, float]:
        """Return the order in which jobs start on a device, those of the lowest rank first. Jobs that should not are absent.

        Where jobs have a choice, cores take those that they are good at, and only while these end before the GPUs are idle.
        Elsewhere, those start first that would leave most of the device idle at the end.
        """
        gpus, cores = [each for each in places if each.gpu is not None], [each for each in places if each.gpu is None]
        free = [job for job in waiting if len(job.expected) > 1]
        if not (gpus and cores and free):
            idle_s = {job.kind: self._knowledge.idle_s(job.kind, place.kind, place.limits) for job in waiting}
            return {job.name: -idle_s[job.kind] for job in waiting}
        pair = gpus[0], place if place.gpu is None else cores[0]
        kinds = {*(job.kind for job in waiting), *(each.kind for each in tenants)}
        steps = {kind: self._knowledge.num_steps(kind) for kind in kinds}
        steps |= {each.kind: each.num_steps + each.steps_left for each in tenants if each.steps_left is not None}
        known_s = [found for kind, number in steps.items() if (found := self._seconds(kind, number, pair[0])) is not None]
        usual_s = fmean(known_s) if known_s else USUAL_S
        left = {job.name: self._left(job.kind, steps[job.kind], *pair, usual_s) for job in waiting}
        if place.gpu is not None:
            return {name: -each.price for name, each in left.items()}
        there = {
            each.name: self._left(each.kind, steps[each.kind] if each.steps_left is None else each.steps_left, *pair, usual_s)
            for each in tenants
        }
        on_gpus = [there[each.name] for each in tenants if each.device in {gpu.name for gpu in gpus}]
        on_cores = [there[each.name] for each in tenants if each.device == place.name]
        at_once = sum(gpu.most_jobs for gpu in gpus)
        chosen = for_cores([left[job.name] for job in free], on_gpus, on_cores, at_once, len(gpus), place.num_cores)
        only = {job.name: left[job.name].price for job in waiting if len(job.expected) == 1}
        return only | {free[index].name: left[free[index].name].price for index in chosen}

    def _left(self, kind: str, steps: int, gpu: LocalDevice, cores: LocalDevice, usual_s: float) -> Left:
        """Return what is left of a job, on a GPU and on cores.

        Args:
            steps: 0: unknown.
            usual_s: time of a job on a GPU where its own is unknown.
        """
        speed = self._knowledge.speed(kind, gpu.kind)
        gpu_s = usual_s if (found := self._seconds(kind, steps, gpu)) is None else found
        busy = min(1.0, self._use(kind, gpu).get("gpu", 1.0))
        beside = self._beside_others(self._use(kind, cores))
        cores_s = gpu_s * speed / self._knowledge.speed(kind, cores.kind) / float(beside.speeds[0])
        return Left(gpu_s, busy, cores_s, float(beside.use[0]))

    def _seconds(self, kind: str, steps: int, gpu: LocalDevice) -> float | None:
        """Return the time of steps alone on a GPU; None where their number or speed is unknown."""
        return steps / self._knowledge.speed(kind, gpu.kind) if steps and self._knowledge.has_speed(kind) else None

    def _cores_beside_others(self, use: Mapping[str, float]) -> float:
        """Return the cores that a job keeps busy if no other takes them. Alone it may have had more threads."""
        return float(self._beside_others(use).use[0])

    def _beside_others(self, use: Mapping[str, float]) -> Expected:
        """Return the use and speed of a job with as many threads as each of two has."""
        alone = CoreUse("", use["cores"], use.get("input", 0.0))
        return expected([alone], [max(1, round(self._side_by_side))], alone.cores)

    # --- as policies see it --------------------------------------------------------------------------------------------------

    def _state(self, now: float, places: Sequence[LocalDevice], waiting: Sequence[Waiting], tenants: Sequence[Tenant]) -> State:
        """Return the state for a policy that starts jobs and lets them run to their ends."""
        by_name = {place.name: place for place in places}
        jobs = []
        for job in waiting:
            needs = {place.kind: (place, _charges(job, place)) for place in _suitable(job, places)}
            jobs.append(self._job(job, needs, None))
        running = []
        for tenant in tenants:
            place = by_name[tenant.device]
            held = {memory: holding.held_bytes for memory, holding in tenant.holdings.items()}
            running.append(Running(self._job(tenant, {place.kind: (place, held)}, None), (tenant.device,), tenant.started_s))
        return State(now, tuple(_device(place) for place in places), tuple(jobs), tuple(running))

    def _state_of_able(
        self, now: float, places: Sequence[LocalDevice], able: Sequence[Tenant], starting: Sequence[Tenant]
    ) -> State:
        """Return the state for a policy that chooses among jobs that could all run at once: each has its memory.

        Those that start run in any case. Each keeps one core busy.
        """
        # Jobs that run do not wait. The longer one has run, the later is its turn.
        by_name = {place.name: place for place in places}
        jobs = tuple(
            self._job(
                tenant,
                {tenant.device: (by_name[tenant.device], {})},
                tenant.since_s if tenant.phase == "paused" else 2 * now - tenant.since_s,
            )
            for tenant in able
        )
        running = tuple(
            Running(Job(tenant.name, {tenant.device: Profile(0, 1.0, START)}), (tenant.device,), tenant.started_s)
            for tenant in starting
        )
        return State(now, tuple(replace(_device(place), kind=place.name) for place in places), jobs, running)

    def _job(self, of: Waiting | Tenant, needs: Mapping[str, tuple[LocalDevice, Sizes]], waiting_since_s: float | None) -> Job:
        """Return a job as policies see it.

        Args:
            needs: for each kind of device that the policy knows, a device, and the memory that the job takes there; empty: it
                has it already.
        """
        profiles = {}
        for kind, (place, charge) in needs.items():
            use = self._use(of.kind, place)
            use = {**use, "cores": self._cores_beside_others(use)}
            host_bytes = charge.get("host", 0)
            sizes = (host_bytes, 0) if place.gpu is None else (charge.get("gpu", 0), host_bytes)
            profiles[kind] = Profile(sizes[0], self._knowledge.speed(of.kind, place.kind), use, sizes[1])
        are_known = all(self._knows(of.kind, place) for place, _ in needs.values())
        return Job(
            of.name,
            profiles,
            steps_left=of.steps_left if isinstance(of, Tenant) and are_known else None,
            submitted_s=of.submitted_s,
            waiting_since_s=waiting_since_s,
            priority=of.priority,
            owner=of.owner,
            family=of.kind,
        )


def _device(place: LocalDevice) -> Device:
    memory_bytes = place.memory_bytes if place.gpu is None else place.gpu_bytes
    return Device(place.name, place.kind, place.name, memory_bytes, place.limits, place.most_jobs)


def _suitable(job: Waiting, places: Sequence[LocalDevice]) -> list[LocalDevice]:
    """Return the devices that a job may start on: those large enough, or all if none is. It then fails with the reason."""
    able = [place for place in places if place.where in job.expected]
    large = [
        place for place in able if all(job.expected[place.where].get(memory, 0) <= size for memory, size in place.sizes.items())
    ]
    return large or able


def _charges(job: Waiting, place: LocalDevice) -> dict[Memory, int]:
    """Return what is set aside for a job that starts."""
    expected = job.expected[place.where]
    return {memory: min(expected.get(memory, 0) or START_BYTES[memory], size) for memory, size in place.sizes.items()}


def _starts(place: LocalDevice, tenants: Sequence[Tenant], chosen: Sequence[Waiting]) -> list[Action]:
    """Return the starts of jobs for which a device has memory, in their order."""
    free = {memory: free_bytes(memory, size, tenants) for memory, size in place.sizes.items()}
    actions: list[Action] = []
    for job in chosen:
        charges = _charges(job, place)
        if any(charge > free[memory] for memory, charge in charges.items()):
            # Nothing overtakes a job that waits for memory, else it might wait forever.
            break
        free = {memory: free[memory] - charge for memory, charge in charges.items()}
        actions.append(Start(job.name, place.name, charges))
    return actions


def _once(actions: Sequence[Action]) -> list[Action]:
    """Return the first action about each job."""
    first: dict[str, Action] = {}
    for action in actions:
        first.setdefault(action.job, action)
    return [*first.values()]
