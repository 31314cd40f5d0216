"""Decide which cores and devices of one machine each node gets. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

__all__ = ["Allocation", "NothingFreeError", "Share"]


class NothingFreeError(RuntimeError):
    """Too few devices are free for a node."""


@dataclass(frozen=True)
class Share:
    """Cores and devices of one node."""

    cores: tuple[int, ...] = ()  # ascending; empty: bound to no core
    devices: tuple[str, ...] = ()  # owned exclusively


class Allocation:
    """Cores and devices by owning node.

    Cores are exclusive while enough are free. After that, nodes share those with the fewest users. Devices are never shared.
    The same calls in the same order give the same shares.

    Args:
        cores: numbers of the usable cores.
        devices: names of the usable devices, in the order of assignment.
    """

    def __init__(self, cores: Sequence[int], devices: Sequence[str] = ()) -> None:
        self._cores = sorted(cores)
        self._devices = list(dict.fromkeys(devices))
        self._shares: dict[str, Share] = {}

    def take(self, node: str, num_cores: int = 0, num_devices: int = 0, usable: Collection[str] | None = None) -> Share:
        """Give a node cores and devices; all cores if it requests more than exist.

        Args:
            usable: names of the only devices that it may have; None: any.

        Raises:
            NothingFreeError: too few devices are free; the node gets nothing.
            ValueError: the node has a share already.
        """
        if node in self._shares:
            raise ValueError(f"{node} has {self._shares[node]} already")
        taken = {device: owner for owner, share in self._shares.items() for device in share.devices}
        free = [each for each in self.free_devices if usable is None or each in usable]
        if num_devices > len(free):
            owners = list(dict.fromkeys(taken.values()))
            others = f"; {', '.join(owners)} {'have' if len(owners) > 1 else 'has'} the others" if owners else ""
            raise NothingFreeError(f"{node} needs {num_devices} GPUs, and {len(free)} of {len(self._devices)} are free{others}")
        self._shares[node] = Share(self._least_used(num_cores, self._use()), tuple(free[:num_devices]))
        return self._shares[node]

    @property
    def free_devices(self) -> list[str]:
        """Devices that no node has."""
        taken = {device for share in self._shares.values() for device in share.devices}
        return [device for device in self._devices if device not in taken]

    def give_back(self, node: str) -> Share:
        """Take back a node's share. Return it, empty if it has none."""
        return self._shares.pop(node, Share())

    def spread(self) -> dict[str, Share]:
        """Move nodes that share cores to less used ones where possible. Return the changed shares."""
        changed = {}
        for node, share in reversed(self._shares.items()):  # newest first, so that the oldest node keeps its cores
            use = self._use()
            use.subtract(share.cores)
            cores = self._least_used(len(share.cores), use, share.cores)
            if sum(use[core] for core in cores) < sum(use[core] for core in share.cores):
                changed[node] = Share(cores, share.devices)
                self._shares[node] = changed[node]
        return changed

    def shared_cores(self, node: str) -> tuple[int, ...]:
        """Return the cores of a node that other nodes use, too."""
        use = self._use()
        return tuple(core for core in self._shares.get(node, Share()).cores if use[core] > 1)

    def _least_used(self, num_cores: int, use: Counter[int], rather: Collection[int] = ()) -> tuple[int, ...]:
        ordered = sorted(self._cores, key=lambda core: (use[core], core not in rather, core))
        return tuple(sorted(ordered[:num_cores]))

    def _use(self) -> Counter[int]:
        return Counter(core for share in self._shares.values() for core in share.cores)
