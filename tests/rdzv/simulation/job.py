"""One job: its nodes with an agent each, their connections, and the state shared by its workers."""

from __future__ import annotations

import random
from dataclasses import dataclass

from lightning_dlrover.rdzv.etcd.types import Delete, Put
from lightning_dlrover.rdzv.job.records import AgentRecord, Keys, RoundRecord, encode
from lightning_dlrover.rdzv.membership.coordinator import eviction

from .etcd import Etcd
from .invariants import Checks
from .kernel import Kernel
from .process import LEASE_S, Meeting, State, Worker


@dataclass
class Node:
    number: int
    alive: bool = True
    side: int = 0  # nodes on different sides do not reach each other
    worker: Worker | None = None


class Job:
    def __init__(self, seed: int) -> None:
        self.kernel = kernel = Kernel(seed)
        rng = kernel.rng
        self.keys = Keys("job", "/sim")
        self.etcd = Etcd(kernel, self.keys)
        self.checks = Checks(self)
        self.etcd.on_write = self.checks.wrote
        self.min_workers = rng.choice([1, 1, 1, 2, 2, 3])
        self.max_workers = self.min_workers + rng.randint(0, 3)
        self.step_s = rng.choice([0.3, 0.6, 1.0])
        self.workers: dict[str, Worker] = {}
        self.nodes: list[Node] = []
        self.restarting = 0
        self._meetings: dict[tuple[int, tuple[str, ...]], Meeting] = {}
        self._updates: dict[tuple[int, int], State] = {}
        self._num_tokens = 0
        # Numbers of workers with which a growth fails in the script's code, drawn apart from all other faults.
        own = random.Random(f"outgrown {seed}")
        self.outgrown = (
            {own.randint(self.min_workers + 1, self.max_workers)}
            if self.max_workers > self.min_workers and own.random() < 0.25
            else set()
        )
        # Numbers of workers that may be requested, empty: any.
        own = random.Random(f"sizes {seed}")
        able = range(self.min_workers, self.max_workers + 1)
        self.sizes = sorted(own.sample(able, own.randint(1, len(able)))) if own.random() < 0.25 else []
        for _ in self.outgrown:
            self.kernel.after(own.uniform(3.0, 12.0), lambda: self.start_node(0.0))
        self.network_changed_at = 0.0
        self.has_only_cuts = False  # nothing happens but short cuts from etcd

    # --- nodes

    def start_node(self, delay_s: float) -> None:
        node = Node(len(self.nodes))
        self.nodes.append(node)
        agent = AgentRecord(f"agent-{node.number}", "host", 1, 1, "running")
        self.etcd.txn([], [Put(self.keys.agents + agent.agent_id, encode(agent))])
        self._start_worker(node, delay_s)

    def _start_worker(self, node: Node, delay_s: float) -> None:
        self.restarting += 1

        def start() -> None:
            self.restarting -= 1
            if node.alive:
                worker = Worker(self, f"w{len(self.workers)}", node.number)
                self.workers[worker.id] = node.worker = worker
                self.kernel.log(worker.id, "starts on node", node.number)
                worker.begin()

        self.kernel.after(delay_s, start)

    def lose_node(self, node: Node) -> None:
        node.alive = False
        if node.worker is not None:
            node.worker.kill()
        self.kernel.after(LEASE_S, lambda: self._forget_agent(node))

    def _forget_agent(self, node: Node) -> None:
        self.etcd.txn([], [Delete(f"{self.keys.agents}agent-{node.number}")])

    def ended(self, worker: Worker) -> None:
        """Play the agent: evict the worker, and start another unless it has left for good."""
        node = self.nodes[worker.node]
        if not node.alive:
            return
        if worker.outcome == "left":
            self._forget_agent(node)
            return
        delay_s = 0.05 + self.kernel.rng.random()

        def evict() -> None:
            if node.alive and self.etcd.up:
                self.evict(worker.id)

        self.kernel.after(delay_s, evict)
        self._start_worker(node, delay_s + self.kernel.rng.random())

    @property
    def num_staying(self) -> int:
        """Number of workers that are present or about to start, and not drained."""
        drains = self.etcd.views[-1].drains
        return self.restarting + sum(w.process.alive and w.id not in drains for w in self.workers.values())

    def evict(self, worker_id: str, share: float = 1.0) -> None:
        """Remove a worker's records, each with the probability `share`: an evicting worker may itself die in between."""
        if (record := self.etcd.entries.get(self.keys.workers + worker_id)) is not None:
            for write in eviction(record, self.etcd.entries.get(self.keys.coordinator), self.keys):
                if share == 1.0 or self.kernel.rng.random() < share:
                    self.etcd.txn(write.compare, write.ops)

    # --- connections

    def connected(self, one: str, other: str) -> bool:
        a, b = self.nodes[self.workers[one].node], self.nodes[self.workers[other].node]
        return a is b or (a.alive and b.alive and a.side == b.side)

    def refuses(self, by: str, worker_id: str) -> bool:
        """Return whether the worker's port is known to be closed: its process is gone, its node is not."""
        worker = self.workers.get(worker_id)
        return worker is not None and not worker.process.alive and self.connected(by, worker_id)

    # --- shared state

    def meeting(self, round_: RoundRecord) -> Meeting:
        return self._meetings.setdefault((round_.number, tuple(round_.members)), Meeting(self, round_))

    @property
    def meetings(self) -> list[Meeting]:
        return list(self._meetings.values())

    def start_over(self) -> State:
        self._num_tokens += 1
        return State(0, self._num_tokens)

    def update(self, state: State, meeting: Meeting) -> State:
        """The state after a step that a group made together: the same on all its members."""
        key = (state.token, meeting.round.number)
        if key not in self._updates:
            self._num_tokens += 1
            self._updates[key] = State(state.step + 1, self._num_tokens)
        return self._updates[key]
