"""Tenants: jobs with processes, the devices that they run on, and the memory that they may use there.

`Tenant` is the state of one job, and `memory_actions` decides how to meet the needs of memory.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from lightning_dlrover.colocate.devices import VISIBLE, Gpu
from lightning_dlrover.tuning.cluster import turn_of
from lightning_dlrover.tuning.resources import available_bytes, available_cores

# The jobs that have processes, and the actions of a dispatcher on them: data only.
#
# waiting -> starting -> asks -> running <-> paused -> ending -> done | failed | waiting (evicted)
#
# | phase | the job | its memory |
# | --- | --- | --- |
# | starting | imports, builds its model; or a command that reports nothing, in its probe | a starting allowance |
# | asks | stands before its first step, with an estimate of its peak | its present memory |
# | running, paused | trains; its processes are stopped (SIGSTOP) | its charge: estimate and margin, or more if it has more |
# | ending | got SIGTERM | its present memory |
#
# Only `dispatcher.py` changes a phase, each by one action below. The job itself changes its reports.

Phase: TypeAlias = Literal["starting", "asks", "running", "paused", "ending"]
Memory: TypeAlias = Literal["host", "gpu"]
"""A job on cores has host memory; one on a GPU has both."""
Sizes: TypeAlias = Mapping[Memory, int]
"""Bytes of each memory of a device."""
Where: TypeAlias = Literal["cpu", "gpu"]
"""A device's type: cores alone, or a GPU with cores for its jobs' own code."""


@dataclass(frozen=True)
class Waiting:
    """A job that has no processes.

    Args:
        expected: for each type of device that it may run on, its peaks there with their margins, from earlier runs of its kind
            or from its owner; absent or 0: unknown.
        not_before_s: moment before which it is not started again, on the dispatcher's clock.
    """

    name: str
    kind: str
    priority: int
    submitted_s: float
    expected: Mapping[Where, Sizes] = field(default_factory=lambda: {"cpu": {}})
    owner: str = ""
    not_before_s: float = 0.0


@dataclass(frozen=True)
class Holding:
    """A job's part of one memory.

    Args:
        charge_bytes: set aside for it.
        resident_bytes: its present memory.
        need_bytes: estimated peak with its margin; 0: unknown.
        is_guess: the need is a guess. The job may use all free memory for its first steps, and its peak then shows the need.
        is_short: it outgrew its charge, and is paused until the device has room.
    """

    charge_bytes: int = 0
    resident_bytes: int = 0
    need_bytes: int = 0
    is_short: bool = False
    is_guess: bool = False

    @property
    def held_bytes(self) -> int:
        """Memory that no other job can have."""
        return max(self.charge_bytes, self.resident_bytes)


@dataclass(frozen=True)
class Tenant:
    """A job with processes.

    Args:
        holdings: its part of each memory of its device.
        is_admitted: it may train, though it may be paused.
        num_processes: processes that train; it has memory for each of them.
        min_processes: minimum number to continue with; 0: as many as it has.
        is_shrinking: it was asked to continue with fewer a moment ago, and has not done so yet.
        steps_left: None where its end is unknown.
        since_s: moment since which it has been in its phase.
        started_s: moment of its start on the dispatcher's clock.
    """

    name: str
    kind: str
    phase: Phase
    device: str
    priority: int
    submitted_s: float
    started_s: float
    holdings: Mapping[Memory, Holding]
    is_admitted: bool = False
    since_s: float = 0.0
    owner: str = ""
    num_processes: int = 1
    min_processes: int = 0
    is_shrinking: bool = False
    steps_left: int | None = None
    num_steps: int = 0

    @property
    def can_shrink(self) -> bool:
        """Whether it is an elastic job that may be asked to continue with fewer processes."""
        return self.phase == "running" and 0 < self.min_processes < self.num_processes

    @property
    def paused_for_memory(self) -> bool:
        """Whether it outgrew a charge, and waits for room."""
        return any(holding.is_short for holding in self.holdings.values())


@dataclass(frozen=True)
class Start:
    """Start a job's command on a device."""

    job: str
    device: str
    charges: Sizes


@dataclass(frozen=True)
class Admit:
    """Let a job that asks make its first step."""

    job: str
    charges: Sizes


@dataclass(frozen=True)
class Charge:
    """Set aside another amount of memory for a job."""

    job: str
    memory: Memory
    charge_bytes: int


@dataclass(frozen=True)
class Pause:
    """Stop a job's processes for a while.

    Args:
        memory: the memory in which it has outgrown its charge; None: others run.
    """

    job: str
    reason: str
    memory: Memory | None = None


@dataclass(frozen=True)
class Resume:
    """Continue a job's processes. It is short of no memory any more."""

    job: str


@dataclass(frozen=True)
class Shrink:
    """Ask an elastic job to continue with fewer processes."""

    job: str
    num_processes: int
    reason: str


@dataclass(frozen=True)
class End:
    """End a job's processes: it has failed, or goes back to the queue with a larger expectation."""

    job: str
    result: Literal["failed", "evicted"]
    reason: str


Action: TypeAlias = Start | Admit | Charge | Pause | Resume | Shrink | End


def after(tenant: Tenant, action: Admit | Charge | Pause | Resume | Shrink | End) -> Tenant:
    """Return a job as it is after an action on it, but for the time."""
    if isinstance(action, Admit):
        return replace(_charged(tenant, action.charges), phase="running", is_admitted=True)
    if isinstance(action, Charge):
        return _charged(tenant, {action.memory: action.charge_bytes})
    if isinstance(action, Pause):
        if action.memory is None:
            return replace(tenant, phase="paused")
        holding = tenant.holdings[action.memory]
        short = replace(holding, charge_bytes=holding.resident_bytes, is_short=True)
        return replace(tenant, phase="paused", holdings={**tenant.holdings, action.memory: short})
    if isinstance(action, Resume):
        enough = {memory: replace(holding, is_short=False) for memory, holding in tenant.holdings.items()}
        return replace(tenant, phase="running" if tenant.is_admitted else "starting", holdings=enough)
    if isinstance(action, Shrink):
        return replace(tenant, is_shrinking=True)
    return replace(tenant, phase="ending")


def _charged(tenant: Tenant, charges: Sizes) -> Tenant:
    changed = {memory: replace(tenant.holdings[memory], charge_bytes=charge) for memory, charge in charges.items()}
    return replace(tenant, holdings={**tenant.holdings, **changed})


MEMORIES: tuple[Memory, ...] = ("host", "gpu")
START_BYTES: Sizes = {"host": 1 << 30, "gpu": 1 << 30}
"""Allowance of a job with an unknown need: a Python process that has imported torch and Lightning has 0.5 GiB on the host, and
the context of CUDA 0.5 GiB on the GPU."""
GROWTH = 1.25
"""Factor of the present memory that a job is charged after it has outgrown its charge."""
HEADROOM = 0.02
"""Part of a device beyond which a paused job's memory endangers others: processes grow between two looks."""


def free_bytes(memory: Memory, size: int, tenants: Iterable[Tenant]) -> int:
    """Return the bytes of a device's memory that none of its tenants holds."""
    return size - sum(tenant.holdings[memory].held_bytes for tenant in tenants)


# A job is granted memory before it needs it: the sum of all charges never exceeds the device. A job that outgrows its charge
# is granted more if the device has room. Else an elastic one gives up a process. Any other is paused, or goes back to the
# queue if its present memory is too much. The others never pay.
def memory_actions(sizes: Sizes, tenants: Sequence[Tenant]) -> list[Action]:
    """Return the actions that keep the jobs of a device within its memory: the host's, and on a GPU also the GPU's.

    Args:
        sizes: bytes of each memory of the device that jobs may use.
        tenants: all jobs on it, each with a holding of each of its memories.
    """
    actions: list[Action] = []
    left = {tenant.name: tenant for tenant in sorted(tenants, key=turn_of)}

    def decide(found: Sequence[Admit | Charge | Pause | Resume | Shrink | End]) -> None:
        for action in found:
            actions.append(action)
            left[action.job] = after(left[action.job], action)

    for memory, size in sizes.items():
        for tenant in [*left.values()]:
            if tenant.phase != "ending" and tenant.holdings[memory].resident_bytes > tenant.holdings[memory].charge_bytes:
                decide(_outgrown(memory, size, tenant, [*left.values()]))
    for name in left:
        decide(_waiting(sizes, left[name], [*left.values()]))
    return actions + _untangled([*left.values()])


def _waiting(sizes: Sizes, tenant: Tenant, tenants: Sequence[Tenant]) -> list[Admit | Charge | Resume | End]:
    """Return the actions about a job that waits for memory, if it does."""
    if tenant.phase == "asks":
        needs = {memory: max(tenant.holdings[memory].need_bytes, tenant.holdings[memory].resident_bytes) for memory in sizes}
        for memory, size in sizes.items():
            if needs[memory] > size:
                return [End(tenant.name, "failed", _too_large(memory, needs[memory], size))]
        if not _fits(needs, sizes, tenant, tenants):
            return []
        for memory in [memory for memory, holding in tenant.holdings.items() if holding.is_guess]:
            needs[memory] = tenant.holdings[memory].held_bytes + free_bytes(memory, sizes[memory], tenants)
        return [Admit(tenant.name, needs)]
    if tenant.phase == "paused" and tenant.paused_for_memory:
        short = {memory: holding for memory, holding in tenant.holdings.items() if holding.is_short}
        needs = {memory: min(int(GROWTH * holding.resident_bytes), sizes[memory]) for memory, holding in short.items()}
        if _fits(needs, sizes, tenant, tenants):
            return [*(Charge(tenant.name, memory, need) for memory, need in needs.items()), Resume(tenant.name)]
    return []


def _fits(needs: Sizes, sizes: Sizes, tenant: Tenant, tenants: Iterable[Tenant]) -> bool:
    """Whether a job may have this much of each memory, given the others."""
    return all(
        need - tenant.holdings[memory].held_bytes <= free_bytes(memory, sizes[memory], tenants)
        for memory, need in needs.items()
    )


def _outgrown(memory: Memory, size: int, tenant: Tenant, tenants: Sequence[Tenant]) -> list[Charge | Shrink | Pause | End]:
    """Return the actions about a job that has more than its charge."""
    free = free_bytes(memory, size, tenants)
    holding = tenant.holdings[memory]
    resident = holding.resident_bytes
    wanted = int(GROWTH * resident)
    if wanted - holding.held_bytes <= free:
        return [Charge(tenant.name, memory, wanted)]
    if resident > size:
        return [End(tenant.name, "failed", _too_large(memory, resident, size))]
    if len(tenants) == 1:
        return [Charge(tenant.name, memory, size)]
    reason = f"it has {_mib(resident)}{_of(memory)}, {_mib(holding.charge_bytes)} were expected"
    if free < HEADROOM * size:
        return [End(tenant.name, "evicted", f"{reason}, and other jobs hold the rest of {_mib(size)}")]
    if tenant.can_shrink:
        return [] if tenant.is_shrinking else [Shrink(tenant.name, tenant.num_processes - 1, reason)]
    if tenant.phase == "paused":
        return [] if holding.is_short else [Pause(tenant.name, reason, memory)]
    return [Pause(tenant.name, f"{reason}; it resumes once others have ended", memory)]


def _untangled(tenants: Sequence[Tenant]) -> list[Action]:
    """Send the youngest job back to the queue if all remaining ones wait for each other's memory."""
    waits = [t for t in tenants if t.phase == "asks" or (t.phase == "paused" and t.paused_for_memory)]
    if len(waits) < max(2, len(tenants)):
        return []
    youngest = max(waits, key=lambda t: (-t.priority, t.started_s, t.name))
    others = f"{len(tenants) - 1} other jobs that wait" if len(tenants) > 2 else "another job that waits"
    need = " and ".join(f"{_mib(holding.need_bytes)}{_of(memory)}" for memory, holding in youngest.holdings.items())
    return [End(youngest.name, "evicted", f"it needs {need}, next to {others} for memory, too")]


def _too_large(memory: Memory, need: int, size: int) -> str:
    return (
        f"it needs {_mib(need)} of {'GPU ' if memory == 'gpu' else ''}memory, and the device has {_mib(size)} for jobs; "
        "make its batch or tables smaller, or run it elsewhere"
    )


def _of(memory: Memory) -> str:
    return " of the GPU's memory" if memory == "gpu" else ""


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"


CPU = "cpu"
"""Kind of all devices without a GPU. To a policy, each device is a kind of its own, as jobs stay where they are."""
RESERVE = 0.1
"""Fraction of the available memory that is never granted: room for the page cache, and for growth between two looks."""
MOST_ON_GPU = 4
"""Most jobs that share a GPU for each one that would share a core: each takes half a gigabyte for its context alone."""
FORMS = "`cpu`, `cpu:CORES` such as cpu:0-3, `gpu:NUMBER`, or `gpu:NUMBER:CORES`"


@dataclass(frozen=True)
class LocalDevice:
    """One device for jobs: cores of this machine with a part of its memory, and perhaps a GPU.

    Args:
        kind: `cpu`, or the model of the GPU. Devices of one kind are equally fast.
        cores: numbers of the cores that its jobs are bound to.
        num_cores: cores that they may keep busy; fewer than `cores` under a quota.
        memory_bytes: host memory for all its jobs together.
        most_jobs: most jobs that run at once. Paused ones do not count.
        gpu: the GPU that its jobs share; None: they get none.
        gpu_bytes: memory of the GPU for all its jobs together.
    """

    name: str
    kind: str
    cores: tuple[int, ...]
    num_cores: float
    memory_bytes: int
    most_jobs: int
    gpu: Gpu | None = None
    gpu_bytes: int = 0

    @property
    def where(self) -> Where:
        """Its type."""
        return "cpu" if self.gpu is None else "gpu"

    @property
    def sizes(self) -> Sizes:
        """Bytes of each of its memories."""
        return {"host": self.memory_bytes} if self.gpu is None else {"host": self.memory_bytes, "gpu": self.gpu_bytes}

    @property
    def limits(self) -> Mapping[str, float]:
        """Largest use of each resource, as policies know it."""
        return {"cores": self.num_cores, **(self.gpu.limits if self.gpu is not None else {})}

    def environment(self, threads: int) -> Mapping[str, str]:
        """Return the variables of a job with this number of threads for each process."""
        return {
            "OMP_NUM_THREADS": str(threads),
            # Threads that spin while they wait for others take the cores of the other jobs.
            "OMP_WAIT_POLICY": "passive",
            "KMP_BLOCKTIME": "0",
            VISIBLE: "" if self.gpu is None else self.gpu.uuid,
        }


def gpus_of(devices: Sequence[str]) -> list[int]:
    """Return the numbers of the GPUs that a command line names.

    Raises:
        ValueError: a device is unknown.
    """
    return [asked.gpu for asked in map(_Asked.of, devices) if asked.gpu is not None]


def local_devices(
    devices: Sequence[str],
    memory_bytes: int = 0,
    most_jobs: int = 0,
    jobs_per_core: int = 2,
    usable: Set[int] | None = None,
    num_cores: float | None = None,
    available: int | None = None,
    gpus: Mapping[int, Gpu] | None = None,
) -> list[LocalDevice]:
    """Return the devices that a command line names: `cpu` for all cores of this process, `cpu:0-3` for some, `gpu:0` for a GPU.

    A GPU has cores, too, for its jobs' own code and input. Devices that name no cores share those that no other names.

    Args:
        memory_bytes: host memory for the jobs of all devices; 0: the memory that is available now, less a reserve.
        most_jobs: most jobs of one device that run at once; 0: `jobs_per_core` times its cores, and no more than four times
            `jobs_per_core` on a GPU.
        usable: cores of this process. None: ask the system; also for `num_cores` and `available`.
        gpus: GPUs of this machine, by their numbers.

    Raises:
        ValueError: a device is unknown, has a core that this process may not use, or shares one with another device.
    """
    usable = os.sched_getaffinity(0) if usable is None else usable
    num_cores = available_cores() if num_cores is None else num_cores
    available = available_bytes() if available is None else available
    if memory_bytes > available:
        raise ValueError(f"--memory is {memory_bytes >> 20} MiB, and {available >> 20} MiB are available; give less")
    memory_bytes = memory_bytes or int((1 - RESERVE) * available)
    gpus = gpus or {}
    cores_of = _divided([_Asked.of(device) for device in devices], usable)
    total = sum(map(len, cores_of.values()))
    share = min(1.0, num_cores / total)
    found: list[LocalDevice] = []
    for asked, cores in cores_of.items():
        if asked.gpu is not None and asked.gpu not in gpus:
            known = ", ".join(f"gpu:{index} ({gpu.name})" for index, gpu in sorted(gpus.items())) or "none"
            raise ValueError(f"--devices: there is no gpu:{asked.gpu} that this process may use; there are: {known}")
        gpu = None if asked.gpu is None else gpus[asked.gpu]
        gpu_bytes = 0 if gpu is None else int((1 - RESERVE) * gpu.free_bytes)
        if gpu is not None and gpu_bytes < START_BYTES["gpu"]:
            raise ValueError(
                f"--devices: gpu:{gpu.index} has only {gpu.free_bytes >> 20} MiB free; end its programs, or leave it out"
            )
        most = jobs_per_core * math.ceil(share * len(cores))
        found.append(
            LocalDevice(
                name=asked.name,
                kind=CPU if gpu is None else gpu.name,
                cores=cores,
                num_cores=share * len(cores),
                memory_bytes=memory_bytes * len(cores) // total,
                most_jobs=most_jobs or (most if gpu is None else min(most, MOST_ON_GPU * jobs_per_core)),
                gpu=gpu,
                gpu_bytes=gpu_bytes,
            )
        )
    return found


@dataclass(frozen=True)
class _Asked:
    """A device as the command line has it.

    Args:
        cores: empty: none are named.
    """

    name: str
    gpu: int | None
    cores: frozenset[int] = field(default_factory=frozenset)

    @classmethod
    def of(cls, device: str) -> _Asked:
        kind, _, rest = device.partition(":")
        if kind == "cpu":
            if ":" in device and not rest:
                raise ValueError(f"--devices: {device!r} names no cores; give some, such as cpu:0-3")
            return cls(device, None, _cores(device, rest))
        number, colon, cores = rest.partition(":")
        if kind != "gpu" or not re.fullmatch(r"\d{1,3}", number) or (colon and not cores):
            raise ValueError(f"--devices: {device!r} is not {FORMS}")
        return cls(f"gpu:{int(number)}", int(number), _cores(device, cores))


def _divided(asked: Sequence[_Asked], usable: Set[int]) -> dict[_Asked, tuple[int, ...]]:
    """Return the cores of each device: those that it names, or an equal part of the rest."""
    taken: dict[int, str] = {}
    names = [device.name for device in asked]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"--devices: {twice[0]} is named twice; name each device once")
    for device in asked:
        if wrong := sorted(device.cores - usable):
            raise ValueError(
                f"--devices: {device.name!r}: this process may use the cores {_ranges(sorted(usable))}, not {_ranges(wrong)}"
            )
        for core in device.cores:
            if core in taken:
                raise ValueError(f"--devices: {device.name} and {taken[core]} share core {core}; give each core to one device")
            taken[core] = device.name
    without = [device for device in asked if not device.cores]
    rest = sorted(usable - taken.keys())
    if len(rest) < len(without):
        left = ", ".join(device.name for device in without)
        raise ValueError(f"--devices: {len(rest)} of {len(usable)} cores are left for {left}; each needs at least one")
    found = {device: tuple(sorted(device.cores)) for device in asked}
    for number, device in enumerate(without):
        found[device] = tuple(rest[number * len(rest) // len(without) : (number + 1) * len(rest) // len(without)])
    return found


def _ranges(cores: Sequence[int]) -> str:
    """Return `0, 2 to 99` for ascending numbers of cores."""
    runs: list[list[int]] = []
    for core in cores:
        if runs and core == runs[-1][1] + 1:
            runs[-1][1] = core
        else:
            runs.append([core, core])
    return ", ".join(f"{first} to {last}" if first < last else str(first) for first, last in runs)


def _cores(device: str, numbers: str) -> frozenset[int]:
    found: set[int] = set()
    for part in numbers.split(",") if numbers else ():
        match = re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise ValueError(f"--devices: {device!r}: {part!r} is not a core or range of cores, such as 2 or 0-3")
        found.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return frozenset(found)
