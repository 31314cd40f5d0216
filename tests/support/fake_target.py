"""A place where nodes are only entries. It passes the tests of every target (`tests/contract/test_target.py`)."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from lightning_dlrover.components.targets.target import ANY_SIZE, App, AppStatus, NodeSize, NotTakenError, Resize, TargetError
from lightning_dlrover.rdzv.job.records import EndNotice
from lightning_dlrover.spares import Spares


@dataclass
class FakeTarget:
    """Nodes that start at once and end on request. All dictionaries are by node; nodes that have ended stay listed."""

    folder: Path  # holds the nodes' output
    name: str = "fake"
    outlives_controller: bool = False
    spares: Spares | None = None
    nodes: dict[str, AppStatus] = field(default_factory=dict)
    handles: dict[str, str] = field(default_factory=dict)
    marks: dict[str, str] = field(default_factory=dict)
    sizes: dict[str, NodeSize] = field(default_factory=dict)
    late: list[str] = field(default_factory=list)  # requested, but not accepted before `deliver`
    cancelled: list[str] = field(default_factory=list)
    out_of_memory: set[str] = field(default_factory=set)
    notices: dict[str, EndNotice] = field(default_factory=dict)  # key: node
    released: list[str] = field(default_factory=list)
    submissions: list[str] = field(default_factory=list)  # every accepted request
    refuses: str = ""  # reason why no node is accepted
    refusal: type[Exception] = NotTakenError
    answers: bool = True
    loses_requests: bool = False
    accepts_lost: bool = False  # such requests are executed all the same
    ends_at_once: bool = True  # end as soon as they are cancelled
    num_cancels: int = 0  # requests
    is_closed: bool = False
    mark: str = ""
    resizes_in_place: bool = False
    no_room: dict[str, str] = field(default_factory=dict)  # reason why a node waits for another size
    rigid: dict[str, str] = field(default_factory=dict)  # reason why a node cannot have another size
    resizes: list[tuple[str, NodeSize]] = field(default_factory=list)  # requests, in their order

    def successor(self) -> FakeTarget:
        """Return another controller's interface to the same nodes."""
        return copy.copy(self)

    def open(self, mark: str) -> None:
        assert mark
        self.mark = mark

    def start(self, node: str, size: NodeSize = ANY_SIZE) -> str:
        self.sizes[node] = size
        if self.refuses:
            raise self.refusal(self.refuses)
        if self.loses_requests:
            if self.accepts_lost:
                self.submit(node)
            else:
                self.late.append(node)
            raise TargetError("no answer")
        return self.submit(node)

    def submit(self, node: str) -> str:
        self.submissions.append(node)
        assert node not in self.nodes
        self.nodes[node], self.marks[node] = "running", self.mark
        self.handles[node] = f"{len(self.nodes)}/{node}"
        self.log(node).touch()
        return self.handles[node]

    def deliver(self) -> None:
        """Accept the requests that were lost."""
        for node in self.late:
            self.submit(node)
        self.late.clear()

    def owns(self, node: str, handle: str) -> bool:
        return re.fullmatch(rf"\d+/{node}", handle) is not None

    def apps(self) -> list[App]:
        self._answer()
        ours = {node: status for node, status in self.nodes.items() if self.marks[node] == self.mark}
        return [App(node, self.handles[node], status in ("pending", "running")) for node, status in ours.items()]

    def status(self, handle: str) -> AppStatus:
        return self.nodes[self._node(handle)]

    def cancel(self, handles: Iterable[str]) -> None:
        self.num_cancels += 1
        self._answer()
        for node in map(self._node, handles):
            self.cancelled.append(node)
            if self.nodes[node] in ("pending", "running") and self.ends_at_once:
                # Slurm and Kubernetes report a cancelled node as failed, TorchX does not.
                self.nodes[node] = "failed" if self.outlives_controller else "cancelled"

    def resize(self, handle: str, size: NodeSize) -> Resize:
        node = self._node(handle)
        self.resizes.append((node, size))
        self._answer()
        if size == self.sizes[node]:
            return Resize("done")
        if node in self.rigid:
            return Resize("refused", self.rigid[node])
        if node in self.no_room:
            return Resize("waiting", self.no_room[node])
        self.sizes[node] = size
        return Resize("done")

    def ran_out_of_memory(self, handle: str) -> bool:
        return self._node(handle) in self.out_of_memory

    def release(self, handle: str) -> bool:
        self.released.append(self._node(handle))
        return True

    def notice(self, handle: str) -> EndNotice | None:
        return self.notices.get(self._node(handle))

    def logs(self, handle: str) -> list[Path]:
        return [self.log(self._node(handle))]

    def close(self) -> None:
        self.is_closed = True
        if not self.outlives_controller:
            self.nodes |= dict.fromkeys(self.living, "cancelled")

    def log(self, node: str) -> Path:
        return self.folder / f"{node}.log"

    @property
    def living(self) -> list[str]:
        return [node for node, status in self.nodes.items() if status == "running"]

    def _answer(self) -> None:
        if not self.answers:
            raise TargetError("no answer")

    def _node(self, handle: str) -> str:
        node = handle.partition("/")[2]
        assert self.handles[node] == handle
        return node
