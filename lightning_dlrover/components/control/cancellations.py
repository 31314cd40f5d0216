"""Have a scheduler end nodes, and repeat the request while they are alive."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from lightning_dlrover.components.control.node_registry import NodeRegistry
from lightning_dlrover.components.control.office import Office
from lightning_dlrover.components.control.reconcile import FailurePolicy
from lightning_dlrover.components.targets.target import App, Target, TargetError

__all__ = ["Cancellations"]

log = logging.getLogger(__name__)


class Cancellations:
    """End nodes of the registry, and strays: nodes of this job without a record."""

    def __init__(self, run_id: str, office: Office, target: Target, registry: NodeRegistry, policy: FailurePolicy) -> None:
        self._run_id = run_id
        self._office = office
        self._target = target
        self._registry = registry
        self._policy = policy
        self._strays: dict[str, float] = {}  # handles of nodes without a record, and when they were last cancelled

    def cancel(self, names: Sequence[str]) -> None:
        """End nodes, all at once. Those of unknown fate are ended once the scheduler lists them."""
        for name in names:
            entry = self._registry.entries[name]
            entry.cancelled = True
            entry.ended_at = entry.ended_at or time.monotonic()
        if names and self._target.outlives_controller:
            self._registry.save()  # local nodes end with this process: their end must not wait for an unreachable etcd
        self.repeat()

    def repeat(self) -> None:
        """Have the scheduler end cancelled nodes that have not ended. Refused requests are repeated with a growing pause."""
        now = time.monotonic()
        due = {
            entry.handle: entry
            for entry in self._registry.entries.values()
            if entry.cancelled and not entry.has_ended and entry.handle is not None and now >= entry.cancel_at
        }
        if not due:
            return
        try:
            self._target.cancel(due)
        except TargetError as error:
            for entry in due.values():
                entry.cancel_failures += 1
            num_failures = max(entry.cancel_failures for entry in due.values())
            pause_s = min(self._policy.cancel_s, self._policy.first_cancel_s * 2.0 ** min(20, num_failures - 1))
            for entry in due.values():
                entry.cancel_at = now + pause_s
            log.warning(
                "run %s: %s could not be ended, which is tried again in %.0f s: %s",
                *(self._run_id, ", ".join(due), pause_s, error),
            )
            return
        for entry in due.values():
            entry.cancel_at, entry.cancel_failures = now + self._policy.cancel_s / 2, 0
            if not self._target.outlives_controller:
                entry.status = "cancelled"

    def end_strays(self, listed: Sequence[App]) -> None:
        """End nodes that carry the job's mark without a record: an abandoned request was carried out after all."""
        now = time.monotonic()
        entries = self._registry.entries.values()
        known = {entry.handle for entry in entries if not entry.has_ended or entry.cancelled}
        strays = [a for a in listed if a.is_living and a.handle not in known]
        due = [a for a in strays if now - self._strays.get(a.handle, -float("inf")) > self._policy.cancel_s]
        # A node that has ended may still be listed as alive for a moment.
        ended_at = {entry.handle: entry.ended_at or now for entry in entries}
        due = [a for a in due if now - ended_at.get(a.handle, -float("inf")) > self._policy.settle_s]
        if not due or not self._office.still_holds():
            return
        log.warning("run %s: ending %s: no request for it exists", self._run_id, ", ".join(a.handle for a in due))
        self._strays.update((a.handle, now) for a in due)
        try:
            self._target.cancel([a.handle for a in due])
        except TargetError as error:
            log.warning("run %s: %s", self._run_id, error)
