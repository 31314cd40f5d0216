"""The free devices of each node, and which of them make a job's devices lie on few nodes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from lightning_dlrover.planner.cluster.jobs import Device

__all__ = ["Nodes"]


class Nodes:
    """Free devices by node, and nodes by the number of their free devices. Orders are those of the state, so equal states
    give equal placements."""

    def __init__(self, devices: Sequence[Device], per_node: int) -> None:
        self._per_node = per_node
        self._node_of = {device.name: device.node for device in devices}
        self._free: dict[str, dict[str, None]] = {}
        for device in devices:
            self._free.setdefault(device.node, {})[device.name] = None
        self._by_count: dict[int, dict[str, None]] = {}
        for node, free in self._free.items():
            self._by_count.setdefault(len(free), {})[node] = None

    def are_free(self, names: Sequence[str]) -> bool:
        """Return whether devices exist, differ, and have no worker yet."""
        return len(set(names)) == len(names) and all(
            name in self._node_of and name in self._free[self._node_of[name]] for name in names
        )

    def take(self, names: Sequence[str]) -> None:
        """Take devices that are free."""
        for name in names:
            node = self._node_of[name]
            self._count(node, -1)
            del self._free[node][name]

    def release(self, names: Sequence[str]) -> None:
        """Give devices back."""
        for name in names:
            node = self._node_of[name]
            self._count(node, 1)
            self._free[node][name] = None

    def free_on(self, node: str) -> list[str]:
        """The free devices of a node."""
        return list(self._free[node])

    def of(self, names: Sequence[str]) -> list[str]:
        """The nodes of devices, each once."""
        return list(dict.fromkeys(self._node_of[name] for name in names))

    def fullest_with(self, number: int, without: Collection[str] = ()) -> str | None:
        """The node with the fewest free devices that suffice."""
        for count in sorted(count for count, nodes in self._by_count.items() if nodes and count >= number):
            for node in self._by_count[count]:
                if node not in without:
                    return node
        return None

    def _count(self, node: str, change: int) -> None:
        count = len(self._free[node])
        del self._by_count[count][node]
        self._by_count.setdefault(count + change, {})[node] = None

    def find(self, number: int, own: Sequence[str]) -> tuple[str, ...]:
        """Return so many free devices on few nodes, rather those that the job has already.

        Raises:
            ValueError: fewer are free.
        """
        own_nodes: dict[str, int] = {}
        for name in own:
            if name in self._node_of and name in self._free[self._node_of[name]]:
                own_nodes[self._node_of[name]] = own_nodes.get(self._node_of[name], 0) + 1
        found: list[str] = []
        used: dict[str, None] = {}
        while len(found) < number:
            node = self._best_node(number - len(found), own_nodes, used)
            if node is None:
                raise ValueError(f"{number} devices are needed, and only {len(found)} are free")
            used[node] = None
            free = self._free[node]
            mine = [name for name in own if self._node_of.get(name) == node and name in free]
            others = [name for name in free if name not in mine]
            found += [*mine, *others][: number - len(found)]
        return tuple(found)

    def _best_node(self, number: int, own: Mapping[str, int], used: Mapping[str, None]) -> str | None:
        """A node with room for a whole node's part or all that is missing, rather one of the job's own; else the emptiest."""
        wanted = min(number, self._per_node)
        mine = [node for node in own if node not in used and len(self._free[node]) >= wanted]
        if mine:
            return min(mine, key=lambda node: (-own[node], len(self._free[node])))
        counts = sorted(count for count, nodes in self._by_count.items() if count and nodes)
        for count in [*(c for c in counts if c >= wanted), *(c for c in reversed(counts) if c < wanted)]:
            for node in self._by_count[count]:
                if node not in used:
                    return node
        return None
