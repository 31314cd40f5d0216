"""Allocations of a few training steps, and their causes."""

from __future__ import annotations

from dataclasses import dataclass, field

from lightning_dlrover.perf.allocators import Event

__all__ = ["KINDS", "Trace"]

KINDS = ("activations", "workspace", "gradients", "optimizer_state", "embedding_gradients")


@dataclass
class Trace:
    """Allocations of a few steps, in order, and their causes."""

    events: list[Event] = field(default_factory=list)
    kinds: dict[int, str] = field(default_factory=dict)  # handle: one of `KINDS`

    def live_bytes(self, num_events: int) -> dict[str, int]:
        """Return the live bytes of each kind after so many events."""
        live: dict[int, int] = {}
        for handle, num_bytes in self.events[:num_events]:
            if num_bytes:
                live[handle] = num_bytes
            else:
                del live[handle]
        return {kind: sum(size for handle, size in live.items() if self.kinds[handle] == kind) for kind in KINDS}
