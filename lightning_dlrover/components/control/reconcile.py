"""Decide which nodes to add and to end, so that the job has as many workers as planned, and judge failures of nodes. Pure.

`reconcile` maps a `ControllerView` to actions such as `AddNode` and `CancelNode`; `controller.py` carries them out.
Workers that leave a shrinking job are not chosen here: the coordinator drops those of a node in the middle, whose app ends.

Plans count workers; a node has `Limits.workers_per_node` of them. A node is added, ended and judged as a whole:

    asked -> running -> ended          as the scheduler reports it
    running: whole -> without one      a worker was killed, and is started again; its neighbours train on
             without one -> whole      that one has joined
             without one -> ended      it had an error, or was killed too often: the others hand over, the node fails

`host_agents.py` decides that on the node. So a failure here is that of a node, once, whichever of its workers failed first.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Literal

from lightning_dlrover.components.targets.target import ANY_SIZE, AppStatus, NodeSize
from lightning_dlrover.rdzv.job.records import EndNotice, PlanRecord
from lightning_dlrover.rdzv.job.sizes import WorldSizes
from lightning_dlrover.rdzv.membership.rounds import JobView


@dataclass(frozen=True)
class Node:
    """State of one node and its app."""

    name: str
    status: AppStatus
    agent_seen: bool = False  # its agent is or was registered
    num_members: int = 0  # workers of it that are members of the current round
    workerless_s: float = 0.0  # time since it last had a registered worker; 0 if it never had one
    idle_s: float = 0.0  # time since it last was a member, or since it was started
    age_s: float = 0.0  # time since it was started; 0 while it waits in a scheduler's queue
    asked_s: float = 0.0  # time since its request to the scheduler
    ended_s: float = 0.0  # time since it ended
    trained_s: float = 0.0  # total time as a member of rounds
    error: str = ""  # failed: the script's error; empty if it was killed
    place: str = ""  # failed: innermost frame of the script in the error's traceback
    could_not_start: bool = False  # failed: its command never ran, `error` holds the reason
    refused: bool = False  # failed: the scheduler refused it, `error` holds the refusal
    refusals_in_a_row: int = 1  # refused: refusals in a row up to this one, forgotten nodes included
    refusal_kind: str = ""  # refused: text that all refusals for this reason share
    after_training: bool = False  # failed in the script's code after `fit`
    stopped_job: bool = False  # failed, and the round lost its last member with it
    left_too_few: bool = False  # failed, and the members without it were too few to train
    checkpoint_step: int = 0  # ended: step of the job's newest checkpoint then; 0: none
    forgiven: bool = False  # failed: before the user last changed the plan, or under another controller
    warned: bool = False
    size: NodeSize = ANY_SIZE
    wanted: NodeSize | None = None  # size that was requested in place; None: no change is under way
    resize: Literal["", "asked", "waiting"] = ""  # waiting: its scheduler has no room for the wanted size now
    resize_s: float = 0.0  # time since that request
    refused_size: NodeSize = ANY_SIZE  # values that it could not get in place
    oversized_s: float = 0.0  # time since the plan asks for a smaller size
    has_let_go: bool = False  # its workers use no more than the smaller size that the plan asks for
    is_accepted: bool = False  # the scheduler has accepted it and returned a handle
    workers: tuple[str, ...] = ()  # ids of its registered workers
    notice: EndNotice | None = None  # the scheduler will end it, and a worker of it is a member
    agentless_s: float = 0.0  # time since all its agents were last registered; 0 if they never were
    lacks_memory: bool = False  # failed: killed for lack of memory, and the plan does not account for it yet

    @property
    def fault(self) -> str:
        """The error and its place in the script."""
        return f"{self.error} (at {self.place})" if self.place else self.error

    @property
    def is_member(self) -> bool:
        """Whether it takes part in the current round."""
        return self.num_members > 0

    @property
    def is_living(self) -> bool:
        return self.status in ("pending", "running")


# Each replaces a varying part of an error's text. The order matters: paths may contain hex digits and numbers.
_VARYING = (
    (re.compile(r"\b\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?"), "TIME"),
    (re.compile(r"\b\d{1,2}:\d\d:\d\d(?:[.,]\d+)?"), "TIME"),
    (re.compile(r"(?<![\w:])\[?(?:[0-9a-fA-F]{0,4}:){2,7}[0-9a-fA-F]{0,4}\]?(?::\d+)?(?![\w:])"), "ADDRESS"),
    (re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?"), "ADDRESS"),
    (re.compile(r"(?<![\w/])(?:\w+://|~|\.{1,2})?/[^\s'\",;:()\[\]{}<>]+"), "PATH"),
    (re.compile(r"\b0x[0-9a-fA-F]+\b"), "HEX"),
    (re.compile(r"\b[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b"), "HEX"),
    (re.compile(r"\b(?=[0-9a-fA-F]*\d)(?=[0-9a-fA-F]*[a-fA-F])[0-9a-fA-F]{7,}\b"), "HEX"),
    (re.compile(r"(?:(?<!\w)[+-])?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?"), "N"),
)


def likeness(error: str) -> str:
    """Return an error's text without process ids, addresses, times, paths and other numbers.

    Two errors with the same rest count as the same error: a data loader's death names another process each time.
    """
    for pattern, name in _VARYING:
        error = pattern.sub(name, error)
    return " ".join(error.split())[:500]


def _kind(node: Node) -> str:
    """Return a key shared by all errors of one mistake: type and place of an error in the script's code, else its likeness."""
    return f"{node.error.partition(':')[0]} in {node.place}" if node.place else likeness(node.error)


def most_frequent(nodes: Iterable[Node]) -> tuple[int, str]:
    """Return the count of the most frequent error, and its newest text. Killed and refused nodes have no error."""
    failed = [node for node in nodes if node.error and not node.refused]
    counts = Counter(_kind(node) for node in failed)
    if not counts:
        return 0, ""
    kind, count = counts.most_common(1)[0]
    return count, min((n for n in failed if _kind(n) == kind), key=lambda n: n.ended_s).fault


def stops_without_progress(nodes: Sequence[Node], checkpoint_step: int, progress_s: float) -> list[Node]:
    """Return the failed nodes that have stopped the whole job since its last progress, oldest first.

    A stopped job resumes from its newest checkpoint, so progress is a newer checkpoint. If none is known, the script may write
    its own. In that case `progress_s` seconds of training count as progress.
    """
    if not checkpoint_step and any(n.is_living and n.trained_s >= progress_s for n in nodes):
        return []
    stops: list[Node] = []
    for node in sorted(nodes, key=lambda n: -n.ended_s):
        if node.status != "failed" or not node.stopped_job or node.checkpoint_step < checkpoint_step:
            continue
        if not checkpoint_step and node.trained_s >= progress_s:
            stops.clear()
        stops.append(node)
    return stops


def _useful_since_s(nodes: Sequence[Node], useful_s: float) -> float:
    """Return the seconds since the request of the newest node that was worth adding; infinite without one."""
    return min((node.asked_s for node in nodes if node.trained_s >= useful_s), default=float("inf"))


def starvations(nodes: Sequence[Node], useful_s: float) -> list[Node]:
    """Return failed nodes that left too few members to train, since a replacement was last of use.

    The members keep the state, so the next checkpoint does not prove progress.
    """
    since_s = _useful_since_s(nodes, useful_s)
    return [n for n in nodes if n.left_too_few and not n.forgiven and n.ended_s < since_s]


def early_failures(nodes: Sequence[Node], useful_s: float) -> list[Node]:
    """Return nodes that failed before they were useful, while others trained on, and after the last useful one."""
    useful_since_s = _useful_since_s(nodes, useful_s)
    failed = [n for n in nodes if n.status == "failed" and not (n.refused or n.stopped_job or n.forgiven)]
    return [n for n in failed if n.trained_s < useful_s and n.ended_s < useful_since_s]


def refusals(nodes: Sequence[Node]) -> list[Node]:
    """Return nodes that the scheduler has refused since it last accepted one, oldest first."""
    taken_s = min((node.asked_s for node in nodes if not node.refused), default=float("inf"))
    refused = [node for node in nodes if node.refused and not node.forgiven and node.asked_s < taken_s]
    return sorted(refused, key=lambda n: -n.ended_s)


def num_refusals(refused: Sequence[Node]) -> int:
    """Return the number of refusals in a row. It exceeds `refused` once the oldest nodes are forgotten."""
    return max(len(refused), refused[-1].refusals_in_a_row) if refused else 0


MIN_NOT_STARTED = 2
"""Nodes that could not start, after which the fault is that of their image or command."""


def culprit(nodes: Sequence[Node], together_s: float) -> Node | None:
    """Return the first node that failed by an error of its own. One node that could not start may be its host's fault."""
    causes = root_causes(nodes, nodes, together_s)
    if sum(node.could_not_start for node in causes) < MIN_NOT_STARTED:
        causes = [node for node in causes if not node.could_not_start]
    return max(causes, key=lambda n: n.ended_s, default=None)


def root_causes(failed: Iterable[Node], nodes: Sequence[Node], together_s: float) -> list[Node]:
    """Return those of `failed` with an error of their own, and not within `together_s` of a killed node's end."""
    killed = [node.ended_s for node in nodes if node.status == "failed" and not node.error]
    own = [node for node in failed if node.status == "failed" and node.error and not node.refused]
    return [node for node in own if not any(abs(node.ended_s - ended_s) <= together_s for ended_s in killed)]


OUT_OF_MEMORY_FACTOR = 2
"""Factor on the memory of nodes after one was killed for lack of memory. The amount it would have needed is unknown."""


@dataclass(frozen=True)
class Limits:
    """Bounds of the job's number of workers and of each node's size.

    Raises:
        ValueError: a bound of the workers is not a multiple of `workers_per_node`.
    """

    min_workers: int
    max_workers: int
    min_size: NodeSize = ANY_SIZE
    max_size: NodeSize = ANY_SIZE
    workers_per_node: int = 1
    sizes: tuple[int, ...] = ()  # numbers of workers that may be requested, ascending; empty: any

    def __post_init__(self) -> None:
        if self.min_workers % self.workers_per_node or self.max_workers % self.workers_per_node:
            raise ValueError(
                f"{self.min_workers} to {self.max_workers} workers do not fill nodes of {self.workers_per_node}: give multiples"
            )

    @property
    def world_sizes(self) -> WorldSizes:
        """The numbers of workers that may be requested."""
        return WorldSizes(self.sizes, self.workers_per_node)

    def size(self, plan: PlanRecord | None) -> NodeSize:
        """Return the size of nodes in `plan`, kept within the limits."""
        asked = (plan.node_cpus or 0, plan.node_memory_mb or 0) if plan is not None else (0, 0)
        low, high = self.min_size, self.max_size
        return NodeSize(min(high.cpus, max(low.cpus, asked[0])), min(high.memory_mb, max(low.memory_mb, asked[1])))

    def chosen_size(self, plan: PlanRecord | None) -> NodeSize:
        """Return the values of `size` that the plan itself contains; 0 for the others, to which no node shrinks."""
        size = self.size(plan)
        if plan is None:
            return ANY_SIZE
        return NodeSize(size.cpus if plan.node_cpus else 0, size.memory_mb if plan.node_memory_mb else 0)

    def num_workers(self, plan: PlanRecord | None) -> int:
        """Return the workers to request for `plan`: its number, kept within the limits and rounded down to a size.

        A plan that only recommends requests the minimum.
        """
        asked = plan.num_workers if plan is not None and plan.binding else self.min_workers
        return self.world_sizes.at_most(min(self.max_workers, max(self.min_workers, asked)))

    def num_nodes(self, plan: PlanRecord | None) -> int:
        """Return the nodes that `plan` fills. Workers that would leave a node with room are not started."""
        return self.num_workers(plan) // self.workers_per_node


@dataclass(frozen=True)
class FailurePolicy:
    """Tolerance for failures and delays; times in seconds."""

    max_failures: int = 8  # failed nodes in a row without a new round between them
    max_same_error: int = 3  # stops without progress by one error of the script, or ends of joining nodes by it
    max_stops: int = 20  # stops of the job without progress, whatever the cause
    progress_s: float = 900.0  # training time that counts as progress if no checkpoint is known
    useful_s: float = 300.0  # training time after which a node was worth adding
    same_error_s: float = 900.0  # period during which a recurring error delays the next node
    together_s: float = 30.0  # failures this close to each other may share one cause
    first_backoff_s: float = 0.5  # pause before a failed node is replaced; doubles with every failure in a row
    max_backoff_s: float = 30.0
    max_long_backoff_s: float = 300.0  # limit while others train, after more than `max_failures`
    first_refusal_s: float = 2.0  # pause after a refused node; doubles with every refusal in a row
    max_refusal_s: float = 60.0
    submit_s: float = 20.0  # time for a scheduler to list an accepted node
    first_cancel_s: float = 2.0  # pause after a refused cancellation; doubles with every refusal, up to `cancel_s`
    cancel_s: float = 60.0  # pause between a node's cancellation and the next attempt
    exit_s: float = 30.0  # time between a worker's last sign and the end of its node
    surplus_s: float = 60.0  # tolerated time of a node beyond the plan
    register_s: float = 60.0  # time for a started node to register in etcd, before a warning
    come_s: float = 900.0  # time for a started node to register in etcd, before its replacement
    let_go_s: float = 30.0  # time for the workers of a shrinking node to use less, before it shrinks
    shrink_s: float = 60.0  # time for a scheduler to take resources back in place, before the node keeps them
    resize_s: float = (
        300.0  # time for a scheduler to give a node that it accepted to enlarge its resources, before its replacement
    )
    whole_s: float = 300.0  # time that a node may train without one of its agents, before its replacement
    settle_s: float = 2.0  # tolerated delay between etcd and the scheduler
    show_s: float = 0.0  # minimum interval between looks at the nodes' output; 0: in each step
    etcd_s: float = 120.0  # tolerated absence of etcd once no node remains


@dataclass(frozen=True)
class ControllerView:
    """Facts about the job that decisions rest on."""

    phase: Literal["none", "starting", "training", "finished", "failed"]
    wanted: int  # nodes
    nodes: Sequence[Node]
    target: str = "its scheduler"  # place where nodes run
    may_act: bool = True  # this controller holds the job's key, and etcd answers
    etcd_away_s: float = 0.0  # time since etcd last answered; 0 while it does
    failures_in_a_row: int = 0  # failures without a new round between them
    since_failure_s: float = 0.0  # time since the newest failure, refused nodes excluded
    has_stepped: bool = True  # False before the job's first step
    fewest: int = 1  # minimum number of workers to train
    checkpoint_step: int = 0  # step of the newest checkpoint; 0: none is known
    stop: str = ""  # reason of a request to end the whole job
    unfinished_fit: int = 0  # number of the `fit` after the first that has begun and not ended; 0: none
    size: NodeSize = ANY_SIZE  # planned size of a node
    chosen_size: NodeSize = ANY_SIZE  # values of it that the plan itself contains; 0: not contained
    in_place: bool = False  # running nodes may get another size without a new process
    members: Mapping[str, str] = field(default_factory=dict)  # node of each member of the current round, in rank order
    leaving: Set[str] = frozenset()  # registered workers asked to leave, at once or once replaced
    notices: Mapping[str, EndNotice] = field(default_factory=dict)  # workers on nodes that will be taken away

    @classmethod
    def of(cls, view: JobView, limits: Limits, nodes: Sequence[Node]) -> ControllerView:
        """Derive the view from etcd's records, with the plan kept within the limits."""
        names = nodes_of_agents(view)
        # Workers to be replaced train on until their replacements have started. So do those whose nodes will be taken away, and
        # which have asked to leave since: the job may need them as long as no other has come.
        noticed = view.replacements | view.notices.keys()
        replaced = {names.get(view.workers[w].agent_id) or w for w in noticed & {*view.survivors}}
        return cls(
            phase=view.job.phase if view.job is not None else "none",
            has_stepped=view.job is not None and view.job.has_stepped,
            unfinished_fit=view.job.unfinished_fit if view.job is not None else 0,
            wanted=limits.num_nodes(view.plan) + len(replaced | _given_back(view, limits.workers_per_node)),
            nodes=nodes,
            fewest=limits.min_workers,
            size=limits.size(view.plan),
            chosen_size=limits.chosen_size(view.plan),
            members={worker: names.get(view.workers[worker].agent_id, "") for worker in view.survivors},
            leaving=(view.drains | view.replacements) & view.workers.keys(),
            notices=view.notices,
        )


def _given_back(view: JobView, workers_per_node: int) -> set[str]:
    """Return nodes that have lost a worker for good and have asked their other workers to leave.

    Below the job's minimum these cannot leave before others have come.
    """
    num_agents = Counter(nodes_of_agents(view).values())
    groups = view.by_node(view.workers)
    nodes = {view.nodes[group[0]] for group in groups if view.drains >= {*group}}
    return {node for node in nodes if 0 < num_agents[node] < workers_per_node}


def nodes_of_agents(view: JobView) -> dict[str, str]:
    """Return each agent's node name, by agent; empty for one that no controller has started."""
    return {agent.agent_id: agent.labels.get("node", "") for agent in view.agents.values()}


@dataclass(frozen=True)
class AddNode:
    pass


@dataclass(frozen=True)
class CancelNode:
    name: str
    reason: str


@dataclass(frozen=True)
class WithdrawNode:
    """End a node that still waits for more than the plan requests, or any host has. This precedes additions."""

    name: str


@dataclass(frozen=True)
class ReplaceWorker:
    """Let a worker leave once another one can take its place."""

    worker: str
    reason: str
    notice: EndNotice | None = None  # its node will be taken away


@dataclass(frozen=True)
class EnlargeNodes:
    """Give later nodes `memory_mb` within the limits, because one was killed for lack of memory."""

    name: str
    size: NodeSize  # size of the killed node
    memory_mb: int


@dataclass(frozen=True)
class Warn:
    name: str
    text: str


@dataclass(frozen=True)
class FinishJob:
    """End the job: its work is done."""

    exit_code: int
    reason: str
    is_trained: bool = False  # training was complete, regardless of the script's code after it


@dataclass(frozen=True)
class ResizeNode:
    """Request another size for a running node in place. The present size withdraws an earlier request."""

    name: str
    size: NodeSize


@dataclass(frozen=True)
class KeepSize:
    """Give up the change of a node's size that is under way."""

    name: str
    reason: str


Action = AddNode | CancelNode | WithdrawNode | ReplaceWorker | ResizeNode | KeepSize | Warn | FinishJob


def enlargements(nodes: Sequence[Node]) -> list[EnlargeNodes]:
    """Return failures that call for larger nodes. Apply them before `reconcile`: the next node has the new size then."""
    return [EnlargeNodes(n.name, n.size, OUT_OF_MEMORY_FACTOR * n.size.memory_mb) for n in nodes if n.lacks_memory]


def reconcile(view: ControllerView, policy: FailurePolicy = FailurePolicy()) -> list[Action]:
    """Return the actions to take now; none if the job matches its plan, or if this controller may not act."""
    if not view.may_act:
        return _end_without_etcd(view, policy)
    withdrawals = [WithdrawNode(node.name) for node in _too_large(view)]
    others = _decide_on_others(_without_too_large(view), policy)
    return [*withdrawals, *_resizes(view, policy), *_replacements(view, policy), *others]


def _decide_on_others(view: ControllerView, policy: FailurePolicy) -> list[Action]:
    """Decide everything except the sizes of nodes."""
    living = [node for node in view.nodes if node.is_living]
    if view.stop:
        exit_code = 0 if view.phase == "finished" else 1
        return [CancelNode(n.name, view.stop) for n in living] or [FinishJob(exit_code, view.stop, not exit_code)]
    if view.phase == "finished":
        if not living and view.unfinished_fit:
            return [FinishJob(1, f"all workers have ended in unfinished fit number {view.unfinished_fit} of the script")]
        if not living:
            return [_end_after_training(view)]
        # A worker may run the script's code after `fit` for any time; a node without a worker may not.
        done = [n for n in living if not n.workers and max(n.workerless_s, n.idle_s) > policy.exit_s]
        return [CancelNode(n.name, "the job has finished") for n in done]
    give_up = _give_up(view, living, policy)
    if give_up:
        return [CancelNode(n.name, "the job has failed") for n in living] or [FinishJob(1, give_up)]
    if not living and (end := _end_without_job(view, policy)):
        return [end]
    return [*_additions(view, living, policy), *_cancellations(view, living, policy), *_warnings(living, policy)]


def _too_large(view: ControllerView) -> list[Node]:
    """Return waiting nodes that exceed the planned size. They are withdrawn before any other action."""
    return [n for n in view.nodes if n.status == "pending" and n.is_accepted and not view.size.is_at_least(n.size)]


def _without_too_large(view: ControllerView) -> ControllerView:
    """Return the job after the withdrawal of nodes that are too large."""
    names = {node.name for node in _too_large(view)}
    return replace(view, nodes=[replace(n, status="cancelled", ended_s=0.0) if n.name in names else n for n in view.nodes])


def _replacements(view: ControllerView, policy: FailurePolicy) -> list[ReplaceWorker]:
    """Return workers to leave once replaced: those on nodes that will be taken away or that have lost a worker for good, and
    those on one undersized node."""
    noticed = [
        ReplaceWorker(worker, f"{node.name} {node.notice}", node.notice)
        for node in view.nodes
        if node.notice is not None
        for worker in node.workers
        if node.notice.updates(view.notices.get(worker))
    ]
    broken = [
        (node, f"a worker of {node.name} ended for good {node.agentless_s:.0f} s ago")
        for node in view.nodes
        if view.phase == "training" and node.is_living and node.is_member and node.agentless_s > policy.whole_s
    ]
    gone = {*view.leaving, *(each.worker for each in noticed)}
    leaving = [ReplaceWorker(worker, reason) for node, reason in broken for worker in node.workers if worker not in gone]
    return [*leaving, *noticed, *_too_small(view)]


def next_size(node: Node, plan: NodeSize, chosen: NodeSize) -> NodeSize:
    """Return the size that a running node should get in place next; its present one if it has all that it can get.

    Cores and memory change one after the other, so that a scheduler that refuses one still gives the other. Memory grows first,
    because its lack kills, and what grows precedes what shrinks. A refused value is not requested again.

    Args:
        chosen: values of `plan` that a node may shrink to; 0: it does not shrink.
    """
    have, refused = node.size, node.refused_size
    may_change_cores, may_change_memory = plan.cpus != refused.cpus, plan.memory_mb != refused.memory_mb
    more_memory = may_change_memory and plan.memory_mb > have.memory_mb
    more_cores = may_change_cores and plan.cpus > have.cpus
    if more_memory:
        return replace(have, memory_mb=plan.memory_mb)
    if more_cores or (may_change_cores and 0 < chosen.cpus < have.cpus):
        return replace(have, cpus=plan.cpus)
    if may_change_memory and 0 < chosen.memory_mb < have.memory_mb:
        return replace(have, memory_mb=plan.memory_mb)
    return have


def _resizes(view: ControllerView, policy: FailurePolicy) -> list[ResizeNode | KeepSize]:
    """Return changes of nodes' sizes in place, and the end of those that take too long.

    One node changes at a time: a change that a scheduler cannot make after all may end the node. One that only waits for room
    does not hold up the others. All nodes get more memory at once, as one of them is about to use up its own.
    """
    if not view.in_place or view.stop or view.phase not in ("starting", "training"):
        return []
    running = [node for node in view.nodes if node.status == "running" and node.is_accepted]
    stuck = [keep for node in running if (keep := _stuck(node, policy)) is not None]
    if stuck:
        return [*stuck]
    changing = [node for node in running if node.resize == "asked"]
    sizes = {node.name: next_size(node, view.size, view.chosen_size) for node in running if node not in changing}
    growing = [node for node in running if node.name in sizes and sizes[node.name].memory_mb > node.size.memory_mb]
    if asked := [ResizeNode(n.name, sizes[n.name]) for n in growing if sizes[n.name] != (n.wanted or n.size)]:
        return [*asked]
    for node in changing or running:
        size = next_size(node, view.size, view.chosen_size)
        if size == (node.wanted or node.size):
            continue
        shrinks = not size.is_at_least(node.size)
        if not shrinks or node.has_let_go or node.oversized_s > policy.let_go_s:
            return [ResizeNode(node.name, size)]
    return []


def _stuck(node: Node, policy: FailurePolicy) -> KeepSize | None:
    """Return the end of a node's change that takes too long. A node that waits for room to grow may wait for any time."""
    if node.wanted is None:
        return None
    if not node.wanted.is_at_least(node.size) and node.resize_s > policy.shrink_s:
        return KeepSize(node.name, f"it has not been taken back for {node.resize_s:.0f} s")
    if node.resize == "asked" and node.resize_s > policy.resize_s:
        return KeepSize(node.name, f"its scheduler has not given it within {node.resize_s:.0f} s")
    return None


def _grows_in_place(node: Node, view: ControllerView) -> bool:
    """Whether a node smaller than planned may get all that it lacks without a replacement."""
    lacks_refused = (view.size.cpus > node.size.cpus and view.size.cpus == node.refused_size.cpus) or (
        view.size.memory_mb > node.size.memory_mb and view.size.memory_mb == node.refused_size.memory_mb
    )
    return view.in_place and not lacks_refused


def _too_small(view: ControllerView) -> list[ReplaceWorker]:
    """Return the workers of one node smaller than planned that cannot grow in place. The next one follows after its
    replacement."""
    living = [node for node in _without_too_large(view).nodes if node.is_living]
    small = {n.name: n for n in living if not n.size.is_at_least(view.size) and not _grows_in_place(n, view)}
    is_changing = view.leaving or not all(node.is_member for node in living)
    if not small or view.phase != "training" or is_changing:
        return []
    for first in view.members.values():
        if first in small:
            reason = f"a node of {view.size} instead of {small[first].size}"
            return [ReplaceWorker(worker, reason) for worker, name in view.members.items() if name == first]
    return []


def _end_without_etcd(view: ControllerView, policy: FailurePolicy) -> list[Action]:
    """Return the job's end if no node remains that etcd's return could help. Only etcd records whether the job has finished."""
    last = min(view.nodes, key=lambda node: node.ended_s, default=None)
    if last is None or any(node.is_living for node in view.nodes):
        return []
    waited_s = min(view.etcd_away_s, last.ended_s)
    if waited_s <= policy.etcd_s:
        return []
    reason = (
        f"all nodes have ended (the last: {last.name}, {last.status}) and etcd has not answered for {waited_s:.0f} s since, "
        "so whether training has finished is unknown; see the nodes' output, start etcd again, and run the job once more "
        "under the same name to continue it"
    )
    return [FinishJob(1, reason)]


def _give_up(view: ControllerView, living: Sequence[Node], policy: FailurePolicy) -> str | None:
    """Return why restarting nodes would not help, or None."""
    if view.phase == "failed":
        return "the job has failed"
    if _is_before_first_step(view) and (reason := _failed_before_training(view, policy)):
        return reason
    stops = stops_without_progress(view.nodes, view.checkpoint_step, policy.progress_s)
    tries = [*stops, *starvations(view.nodes, policy.useful_s)]
    # A killed node may have caused others to fail: their errors are consequences.
    count, error = most_frequent(root_causes(tries, view.nodes, policy.together_s))
    if count >= policy.max_same_error:
        return f"the same error stopped the job {count} times without progress in between: {error}"
    if len(stops) >= policy.max_stops:
        cause = stops[-1].fault or "it was killed; its host may lack memory, see the nodes' output and the kernel's log there"
        return f"the job was stopped {len(stops)} times without progress in between; the last time by {stops[-1].name}: {cause}"
    if view.failures_in_a_row >= policy.max_failures and not any(node.is_member for node in living):
        return f"{view.failures_in_a_row} nodes in a row have failed"
    last_s = min((node.ended_s for node in view.nodes if not node.refused), default=float("inf"))
    refused = [node for node in refusals(view.nodes) if node.ended_s < last_s]  # refusals while others trained did no harm
    if len(refused) >= policy.max_failures and not living:
        return f"no node is left, and {len(refused)} in a row were refused; {refused[-1].name}: {refused[-1].error}"
    return None


def _is_before_first_step(view: ControllerView) -> bool:
    return view.phase in ("none", "starting") or (view.phase == "training" and not view.has_stepped)


def _failed_before_training(view: ControllerView, policy: FailurePolicy) -> str:
    """Return why the next attempt would fail in the same way before any step."""
    refused = refusals(view.nodes)
    if refused and len(refused) == len(view.nodes):
        return f"{refused[0].name} failed before the first step: {refused[0].error}"
    # The record of the first step may arrive after that of the worker's end.
    first = culprit(view.nodes, policy.together_s)
    if first is None or first.ended_s <= policy.settle_s:
        return ""
    return f"{first.name} failed before the first step: {first.fault}"


def _end_after_training(view: ControllerView) -> FinishJob:
    """Return the end of a trained job. Its exit code is the script's, which may have saved its model last."""
    failed = max((node for node in view.nodes if node.after_training), key=lambda node: node.ended_s, default=None)
    if failed is None:
        return FinishJob(0, "the job has finished", is_trained=True)
    why = failed.fault or "it was killed"
    return FinishJob(1, f"training has finished, but {failed.name} failed after it: {why}", is_trained=True)


def _end_without_job(view: ControllerView, policy: FailurePolicy) -> FinishJob | None:
    """Return the job's end if all nodes have ended without a worker reporting it."""
    last = min(view.nodes, key=lambda node: node.ended_s, default=None)
    if last is None or last.ended_s <= policy.settle_s:
        return None
    if view.phase == "training":
        ended = last.status == "succeeded"
        return FinishJob(1, "all workers have ended without an error, but training has not finished") if ended else None
    if all(node.status != "succeeded" for node in view.nodes):
        return None
    if last.status == "failed":
        return FinishJob(1, f"{last.name} was killed after other nodes had ended")
    why = "no Trainer reached its first step"
    if view.phase == "none":
        why = "no worker joined the job; its Trainer needs strategy='dlrover'"
    return FinishJob(0, f"the script ended without training: {why}")


def _additions(view: ControllerView, living: Sequence[Node], policy: FailurePolicy) -> list[Action]:
    if view.phase in ("none", "starting") and any(node.status == "succeeded" for node in view.nodes):
        return []  # the script ends without training; another node would only repeat it
    newest_s = min((node.ended_s for node in view.nodes if not node.is_living and not node.refused), default=float("inf"))
    if not living and newest_s <= policy.settle_s:
        return []  # the record that the job has finished may be on its way
    if _is_before_first_step(view) and culprit(view.nodes, policy.together_s) is not None:
        return []  # the script fails
    count, pause_s, since_s = _pause(view, living, policy)
    if _why_growth_stopped(view, living, policy) or (count and since_s < pause_s):
        return []
    return [AddNode()] * max(0, view.wanted - len(living))


def _pause(view: ControllerView, living: Sequence[Node], policy: FailurePolicy) -> tuple[int, float, float]:
    """Return the failures or refusals that delay the next node, the length of the pause, and the time already waited."""
    # A node that joins and always fails creates a new round each time, but no progress.
    recent = [node for node in view.nodes if node.status == "failed" and node.ended_s <= policy.same_error_s]
    stops = stops_without_progress(view.nodes, view.checkpoint_step, policy.progress_s)
    early = [n for n in early_failures(view.nodes, policy.useful_s) if n.ended_s <= policy.same_error_s]
    failures = max(view.failures_in_a_row, most_frequent(recent)[0], len(stops), len(early))
    refused = refusals(view.nodes)
    if refused and refused[-1].ended_s <= view.since_failure_s:
        count = num_refusals(refused)
        return count, _doubled_s(policy.first_refusal_s, policy.max_refusal_s, count), refused[-1].ended_s
    is_long = failures > policy.max_failures and any(node.is_member for node in living)
    longest_s = policy.max_long_backoff_s if is_long else policy.max_backoff_s
    return failures, _doubled_s(policy.first_backoff_s, longest_s, failures), view.since_failure_s


def _doubled_s(first_s: float, longest_s: float, count: int) -> float:
    return min(longest_s, first_s * 2.0 ** min(20, count - 1)) if count else 0.0


def _why_growth_stopped(view: ControllerView, living: Sequence[Node], policy: FailurePolicy) -> str:
    """Return why no more nodes join the training ones: all would fail in the same way. Empty below the job's minimum."""
    if sum(node.num_members for node in living) < view.fewest:
        return ""
    count, error = most_frequent(early_failures(view.nodes, policy.useful_s))
    if count < policy.max_same_error:
        return ""
    return (
        f"no more nodes are added, {count} that joined have failed with the same error: {error}; once the cause is "
        "fixed, `dlrover scale` or another `dlrover run` of the job adds nodes again"
    )


def why_none_is_added(view: ControllerView, policy: FailurePolicy = FailurePolicy()) -> str:
    """Return why the job has fewer nodes than planned; empty if it has not, or only briefly."""
    view = _without_too_large(view)
    living = [node for node in view.nodes if node.is_living]
    if len(living) >= view.wanted or view.stop or view.phase in ("finished", "failed"):
        return ""
    if stopped := _why_growth_stopped(view, living, policy):
        return stopped
    count, pause_s, _ = _pause(view, living, policy)
    if refused := refusals(view.nodes):
        tries = f"try {num_refusals(refused)} in a row; the next one {pause_s:.0f} s later"
        return f"{refused[-1].name} was refused ({tries}): {refused[-1].error}"
    if count < policy.max_same_error:
        return ""
    return f"the next node is started {pause_s:.0f} s after the last failure, number {count} since the job's last progress"


def kind_of_delay(view: ControllerView, why: str) -> str:
    """Return a key that stays the same while `why`, from `why_none_is_added`, changes only in counts, names and wording."""
    refused = refusals(view.nodes)
    kind = refused[-1].refusal_kind if refused and refused[-1].error in why else ""
    return kind or likeness(why)


def _cancellations(view: ControllerView, living: Sequence[Node], policy: FailurePolicy) -> list[Action]:
    hung = [n for n in living if n.workerless_s > policy.exit_s and not n.workers]
    # Severed, or hung while no controller was there to notice.
    silent = [n for n in living if n not in hung and not n.agent_seen and not n.workers and n.age_s > policy.come_s]
    others = [n for n in living if n not in hung and n not in silent and not n.is_member and n.idle_s > policy.surplus_s]
    # A node that its worker has left is about to end. No starting node must be cancelled in its place.
    leaving = [n for n in living if n.workerless_s > 0.0 and not n.workers]
    excess = max(0, len(living) - len(leaving) - view.wanted)
    surplus = sorted(others, key=lambda n: (bool(n.workers), n.age_s))[:excess]
    return [
        *(CancelNode(n.name, f"its worker left {n.workerless_s:.0f} s ago, but the node does not end") for n in hung),
        *(CancelNode(n.name, f"it was started {n.age_s:.0f} s ago and has not reached etcd") for n in silent),
        *(CancelNode(n.name, f"the plan has had no room for it for {n.idle_s:.0f} s") for n in surplus),
    ]


def _warnings(living: Sequence[Node], policy: FailurePolicy) -> list[Action]:
    silent = [n for n in living if not n.agent_seen and not n.warned and n.age_s > policy.register_s]
    return [Warn(n.name, f"{n.name} was started {n.age_s:.0f} s ago and has not reached etcd; see its log") for n in silent]
