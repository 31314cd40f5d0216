"""Keep the jobs of a device within its memory. Pure.

A job gets its memory before it needs it: the sum of all charges never exceeds the device. A job that outgrows its charge gets
more if there is room. Else an elastic one gives a process up. Any other is paused, or goes back to the queue if its present
memory is too much. The others never pay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lightning_dlrover.colocate.tenants import Action, Admit, Charge, End, Pause, Resume, Shrink, Tenant

__all__ = ["GROWTH", "START_BYTES", "free_bytes", "memory_actions"]

START_BYTES = 1 << 30
"""Allowance of a job with an unknown need: a Python process that has imported torch and Lightning has 0.5 GiB."""
GROWTH = 1.25
"""A job that has outgrown its charge gets this times its present memory."""
HEADROOM = 0.02
"""Part of a device beyond which a paused job's memory endangers others: processes grow between two looks."""


def free_bytes(memory_bytes: int, tenants: Sequence[Tenant]) -> int:
    """Return the memory of a device that none of its tenants holds."""
    return memory_bytes - sum(tenant.held_bytes for tenant in tenants)


def memory_actions(memory_bytes: int, tenants: Sequence[Tenant]) -> list[Action]:
    """Return the actions that keep a device within its memory.

    Args:
        memory_bytes: memory of the device that jobs may use.
        tenants: all jobs on it.
    """
    actions: list[Action] = []
    left = {tenant.name: tenant for tenant in sorted(tenants, key=lambda t: (-t.priority, t.submitted_s, t.name))}
    for tenant in list(left.values()):
        if tenant.phase != "ending" and tenant.resident_bytes > tenant.charge_bytes:
            action, changed = _outgrown(memory_bytes, tenant, list(left.values()))
            actions += action
            left[tenant.name] = changed
    for tenant in list(left.values()):
        free = free_bytes(memory_bytes, list(left.values()))
        if tenant.phase == "asks":
            need = max(tenant.need_bytes, tenant.resident_bytes)
            if need > memory_bytes:
                actions.append(End(tenant.name, "failed", _too_large(need, memory_bytes)))
                left[tenant.name] = replace(tenant, phase="ending")
            elif need - tenant.held_bytes <= free:
                actions.append(Admit(tenant.name, need))
                left[tenant.name] = replace(tenant, phase="running", charge_bytes=need)
        elif tenant.phase == "paused" and tenant.paused_for_memory:
            need = min(int(GROWTH * tenant.resident_bytes), memory_bytes)
            if need - tenant.held_bytes <= free:
                actions += [Charge(tenant.name, need), Resume(tenant.name)]
                left[tenant.name] = replace(tenant, phase="running", charge_bytes=need)
    return actions + _untangled(list(left.values()))


def _outgrown(memory_bytes: int, tenant: Tenant, tenants: Sequence[Tenant]) -> tuple[list[Action], Tenant]:
    """Return the actions about a job that has more than its charge, and the job afterwards."""
    free = free_bytes(memory_bytes, tenants)
    wanted = int(GROWTH * tenant.resident_bytes)
    if wanted - tenant.held_bytes <= free:
        return [Charge(tenant.name, wanted)], replace(tenant, charge_bytes=wanted)
    if tenant.resident_bytes > memory_bytes or len(tenants) == 1:
        if tenant.resident_bytes <= memory_bytes:
            return [Charge(tenant.name, memory_bytes)], replace(tenant, charge_bytes=memory_bytes)
        reason = _too_large(tenant.resident_bytes, memory_bytes)
        return [End(tenant.name, "failed", reason)], replace(tenant, phase="ending")
    told = f"it has {_mib(tenant.resident_bytes)}, {_mib(tenant.charge_bytes)} were expected"
    if free < HEADROOM * memory_bytes:
        reason = f"{told}, and other jobs hold the rest of {_mib(memory_bytes)}"
        return [End(tenant.name, "evicted", reason)], replace(tenant, phase="ending")
    if tenant.can_shrink:
        asked = [] if tenant.is_shrinking else [Shrink(tenant.name, tenant.num_processes - 1, told)]
        return [*asked], replace(tenant, is_shrinking=True)
    held = replace(tenant, phase="paused", paused_for_memory=True, charge_bytes=tenant.resident_bytes)
    if tenant.phase == "paused":
        return ([] if tenant.paused_for_memory else [Pause(tenant.name, told, for_memory=True)]), held
    return [Pause(tenant.name, f"{told}; it goes on when others have ended", for_memory=True)], held


def _untangled(tenants: Sequence[Tenant]) -> list[Action]:
    """Send the youngest job back to the queue if all that are left wait for each other's memory."""
    waits = [t for t in tenants if t.phase == "asks" or (t.phase == "paused" and t.paused_for_memory)]
    if not waits or len(waits) < len(tenants) or len(tenants) < 2:
        return []
    youngest = max(waits, key=lambda t: (-t.priority, t.started_s, t.name))
    others = f"{len(tenants) - 1} other jobs that wait" if len(tenants) > 2 else "another job that waits"
    return [End(youngest.name, "evicted", f"it needs {_mib(youngest.need_bytes)}, beside {others} for memory, too")]


def _too_large(need: int, memory_bytes: int) -> str:
    return (
        f"it needs {_mib(need)} of memory, and the device has {_mib(memory_bytes)} for jobs; make its batch or tables smaller, "
        "or run it elsewhere"
    )


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"
