"""Judge the failures of a job's nodes: group repeated errors, and detect progress between them.

Pure functions of the nodes' state. By them `reconcile.py` decides when to give the job up, when to stop adding nodes, and how
long to pause before the next one.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lightning_dlrover.components.targets.target import ANY_SIZE, AppStatus, NodeSize

__all__ = [
    "Node",
    "culprit",
    "early_failures",
    "likeness",
    "most_frequent",
    "num_refusals",
    "of_their_own",
    "refusals",
    "starvations",
    "stops_without_progress",
]


@dataclass(frozen=True)
class Node:
    """State of one node and its app."""

    name: str
    status: AppStatus
    agent_seen: bool = False  # its agent is or was registered
    has_worker: bool = False  # a training process of it is registered
    num_members: int = 0  # workers of it that are members of the current round
    workerless_s: float = 0.0  # time since it last had a registered worker; 0 if it never had one
    idle_s: float = 0.0  # time since it last was a member, or since it was started
    age_s: float = 0.0  # time since it was started; 0 while it waits in a scheduler's queue
    asked_s: float = 0.0  # time since its request to the scheduler
    ended_s: float = 0.0  # time since it ended
    trained_s: float = 0.0  # total time as a member of rounds
    error: str = ""  # failed: the script's error; empty if it was killed
    place: str = ""  # failed: innermost frame of the script in the error's traceback
    refused: bool = False  # failed: the scheduler refused it, `error` holds the refusal
    refusals_in_a_row: int = 1  # refused: refusals in a row up to this one, forgotten nodes included
    after_training: bool = False  # failed in the script's code after `fit`
    stopped_job: bool = False  # failed, and the round lost its last member with it
    left_too_few: bool = False  # failed, and the members without it were too few to train
    checkpoint_step: int = 0  # ended: step of the job's newest checkpoint then; 0: none
    forgiven: bool = False  # failed: before the user last changed the plan, or under another controller
    warned: bool = False
    size: NodeSize = ANY_SIZE
    is_taken_on: bool = False  # the scheduler has accepted it and returned a handle
    workers: tuple[str, ...] = ()  # ids of its registered workers
    wanted_back: bool = False  # the scheduler will end it soon, and a worker of it is a member
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
    """Return what the errors of one mistake have in common: type and place of one in the script's code, else the likeness."""
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


def starvations(nodes: Sequence[Node], useful_s: float) -> list[Node]:
    """Return failed nodes that left too few members to train, since a replacement was last of use.

    The members keep the state, so the next checkpoint says nothing about progress.
    """
    useful_since_s = min((node.asked_s for node in nodes if node.trained_s >= useful_s), default=float("inf"))
    return [n for n in nodes if n.left_too_few and not n.forgiven and n.ended_s < useful_since_s]


def early_failures(nodes: Sequence[Node], useful_s: float) -> list[Node]:
    """Return nodes that failed before they were useful, while others trained on, and after the last useful one."""
    useful_since_s = min((node.asked_s for node in nodes if node.trained_s >= useful_s), default=float("inf"))
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


def culprit(nodes: Sequence[Node], together_s: float) -> Node | None:
    """Return the first node that failed by an error of its own."""
    own = of_their_own(nodes, nodes, together_s)
    return max(own, key=lambda n: n.ended_s, default=None)


def of_their_own(failed: Iterable[Node], nodes: Sequence[Node], together_s: float) -> list[Node]:
    """Return those of `failed` that did not fail as a consequence of another node's end.

    Args:
        together_s: seconds around a killed node's end within which other failures may be its consequences.
    """
    killed = [node.ended_s for node in nodes if node.status == "failed" and not node.error]
    own = [node for node in failed if node.status == "failed" and node.error and not node.refused]
    return [node for node in own if not any(abs(node.ended_s - ended_s) <= together_s for ended_s in killed)]
