"""Keep the jobs of a device within its memory: the host's, and on a GPU also the GPU's. Pure.

A job gets its memory before it needs it: the sum of all charges never exceeds the device. A job that outgrows its charge gets
more if there is room. Else an elastic one gives a process up. Any other is paused, or goes back to the queue if its present
memory is too much. The others never pay.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lightning_dlrover.colocate.tenants import (
    Action,
    Admit,
    Charge,
    End,
    Memory,
    Pause,
    Resume,
    Shrink,
    Sizes,
    Tenant,
    after,
)
from lightning_dlrover.planner.cluster.queue_order import turn_of

__all__ = ["GROWTH", "MEMORIES", "START_BYTES", "free_bytes", "memory_actions"]

MEMORIES: tuple[Memory, ...] = ("host", "gpu")
START_BYTES: Sizes = {"host": 1 << 30, "gpu": 1 << 30}
"""Allowance of a job with an unknown need: a Python process that has imported torch and Lightning has 0.5 GiB on the host, and
the context of CUDA 0.5 GiB on the GPU."""
GROWTH = 1.25
"""A job that has outgrown its charge gets this times its present memory."""
HEADROOM = 0.02
"""Part of a device beyond which a paused job's memory endangers others: processes grow between two looks."""


def free_bytes(memory: Memory, size: int, tenants: Iterable[Tenant]) -> int:
    """Return the bytes of a device's memory that none of its tenants holds."""
    return size - sum(tenant.holdings[memory].held_bytes for tenant in tenants)


def memory_actions(sizes: Sizes, tenants: Sequence[Tenant]) -> list[Action]:
    """Return the actions that keep a device within its memory.

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
    """Whether a job may have this much of each memory, beside the others."""
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
    told = f"it has {_mib(resident)}{_of(memory)}, {_mib(holding.charge_bytes)} were expected"
    if free < HEADROOM * size:
        return [End(tenant.name, "evicted", f"{told}, and other jobs hold the rest of {_mib(size)}")]
    if tenant.can_shrink:
        return [] if tenant.is_shrinking else [Shrink(tenant.name, tenant.num_processes - 1, told)]
    if tenant.phase == "paused":
        return [] if holding.is_short else [Pause(tenant.name, told, memory)]
    return [Pause(tenant.name, f"{told}; it goes on when others have ended", memory)]


def _untangled(tenants: Sequence[Tenant]) -> list[Action]:
    """Send the youngest job back to the queue if all that are left wait for each other's memory."""
    waits = [t for t in tenants if t.phase == "asks" or (t.phase == "paused" and t.paused_for_memory)]
    if not waits or len(waits) < len(tenants) or len(tenants) < 2:
        return []
    youngest = max(waits, key=lambda t: (-t.priority, t.started_s, t.name))
    others = f"{len(tenants) - 1} other jobs that wait" if len(tenants) > 2 else "another job that waits"
    need = " and ".join(f"{_mib(holding.need_bytes)}{_of(memory)}" for memory, holding in youngest.holdings.items())
    return [End(youngest.name, "evicted", f"it needs {need}, beside {others} for memory, too")]


def _too_large(memory: Memory, need: int, size: int) -> str:
    return (
        f"it needs {_mib(need)} of {'GPU ' if memory == 'gpu' else ''}memory, and the device has {_mib(size)} for jobs; "
        "make its batch or tables smaller, or run it elsewhere"
    )


def _of(memory: Memory) -> str:
    return " of the GPU's memory" if memory == "gpu" else ""


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"
