"""Decide which nodes to add and to end, so that the job has as many workers as its plan says.

A pure function of what etcd and the scheduler say; `controller.py` carries the decision out. Which worker leaves when there are
too many is not decided here: the workers' convener drops one from the middle, which hands over and exits, and its app ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = ["Action", "AddNode", "AppStatus", "CancelNode", "Give", "JobView", "Node", "Patience", "Warn", "reconcile"]

AppStatus = Literal["pending", "running", "succeeded", "failed", "cancelled", "gone"]


@dataclass(frozen=True)
class Patience:
    """How often and for how long things may go wrong; times in seconds."""

    max_failures: int = 8  # nodes in a row that failed without a new round between them
    max_same_error: int = 3  # times that one error of the script may stop the whole job within `same_error_s`
    same_error_s: float = 900.0
    first_backoff_s: float = 0.5  # before a failed node is replaced; doubles with every failure in a row
    max_backoff_s: float = 30.0
    submit_s: float = 20.0  # a scheduler that may have taken a node on shows it
    cancel_s: float = 60.0  # from a node's cancellation to the next attempt
    exit_s: float = 30.0  # from a worker's last sign to the end of its node
    surplus_s: float = 60.0  # a node that the plan has no room for
    register_s: float = 60.0  # a started node has registered in etcd
    come_s: float = 900.0  # a started node that has not registered by then is replaced
    settle_s: float = 2.0  # what etcd and the scheduler say may be so far apart
    etcd_s: float = 120.0  # etcd does not answer, and no node is left


@dataclass(frozen=True)
class Node:
    """One one-node app."""

    name: str
    status: AppStatus
    agent_seen: bool = False  # its agent is registered, or was
    has_worker: bool = False  # its training process is registered
    is_member: bool = False  # that worker is a member of the current round
    workerless_s: float = 0.0  # since it last had a registered worker; 0 if it never had one
    idle_s: float = 0.0  # since it last was a member, or since it was started
    age_s: float = 0.0  # since it was started; 0 while it waits in a scheduler's queue
    ended_s: float = 0.0  # since it ended
    error: str = ""  # failed: by an error of the script; empty when it was killed
    stopped_job: bool = False  # failed, and with it the last member of the round was gone
    warned: bool = False

    @property
    def is_living(self) -> bool:
        return self.status in ("pending", "running")


@dataclass(frozen=True)
class JobView:
    """What is decided on."""

    phase: Literal["none", "starting", "training", "finished", "failed"]
    wanted: int
    nodes: Sequence[Node]
    may_act: bool = True  # we hold the job's controller key, and etcd answers
    etcd_away_s: float = 0.0  # since etcd last answered; 0 while it does
    failures_in_a_row: int = 0  # without a new round between them
    since_failure_s: float = 0.0
    stop: str = ""  # why somebody wants the whole job to end
    unfinished_fit: int = 0  # number of the `fit` after the first that was begun and not ended; 0: none


@dataclass(frozen=True)
class AddNode:
    pass


@dataclass(frozen=True)
class CancelNode:
    name: str
    reason: str


@dataclass(frozen=True)
class Warn:
    name: str
    text: str


@dataclass(frozen=True)
class Give:
    """Nothing is left to do: the job is over."""

    exit_code: int
    reason: str


Action = AddNode | CancelNode | Warn | Give


def reconcile(view: JobView, patience: Patience = Patience()) -> list[Action]:
    """What to do now; nothing when all is as the plan says, or when it is not ours to act."""
    if not view.may_act:
        return _end_without_etcd(view, patience)
    living = [node for node in view.nodes if node.is_living]
    if view.stop:
        exit_code = 0 if view.phase == "finished" else 1
        return [CancelNode(n.name, view.stop) for n in living] or [Give(exit_code, view.stop)]
    if view.phase == "finished":
        if not living and view.unfinished_fit:
            return [Give(1, f"all workers have ended in fit number {view.unfinished_fit} of the script, which was not done")]
        if not living:
            return [Give(0, "the job has finished")]
        # A worker may go on with the script's code after `fit` for as long as it likes; a node without one may not.
        done = [n for n in living if not n.has_worker and max(n.workerless_s, n.idle_s) > patience.exit_s]
        return [CancelNode(n.name, "the job has finished") for n in done]
    give_up = _give_up(view, living, patience)
    if give_up:
        return [CancelNode(n.name, "the job has failed") for n in living] or [Give(1, give_up)]
    if not living and (end := _end_without_job(view, patience)):
        return [end]
    return [*_additions(view, living, patience), *_cancellations(view, living, patience), *_warnings(living, patience)]


def _end_without_etcd(view: JobView, patience: Patience) -> list[Action]:
    """The end when nobody is left whom etcd's return could help; whether the job has finished is known to etcd alone."""
    last = min(view.nodes, key=lambda node: node.ended_s, default=None)
    if last is None or any(node.is_living for node in view.nodes):
        return []
    waited_s = min(view.etcd_away_s, last.ended_s)
    if waited_s <= patience.etcd_s:
        return []
    reason = (
        f"all nodes have ended (the last: {last.name}, {last.status}) and etcd has not answered for {waited_s:.0f} s since, "
        "so whether the training was done is not known; see the nodes' output, start etcd again, and run the job once more "
        "under the same name to go on with it"
    )
    return [Give(1, reason)]


def _give_up(view: JobView, living: Sequence[Node], patience: Patience) -> str | None:
    """Why starting nodes again would not help, or None."""
    failed = [node for node in view.nodes if node.status == "failed"]
    if view.phase == "failed":
        return "the job has failed"
    # News of the first step may arrive after that of the worker's end.
    own_fault = next((node for node in failed if node.error and node.ended_s > patience.settle_s), None)
    if view.phase in ("none", "starting") and own_fault:
        # Nothing was trained yet, so the next attempt would go the same way.
        return f"{own_fault.name} failed before training began: {own_fault.error}"
    for error, count in _recent_errors([n for n in failed if n.stopped_job], patience).items():
        if count >= patience.max_same_error:
            return f"the same error stopped the job {count} times: {error}"
    if view.failures_in_a_row >= patience.max_failures and not any(node.is_member for node in living):
        return f"{view.failures_in_a_row} nodes in a row have failed"
    return None


def _recent_errors(nodes: Sequence[Node], patience: Patience) -> Counter[str]:
    return Counter(n.error for n in nodes if n.error and n.ended_s <= patience.same_error_s)


def _end_without_job(view: JobView, patience: Patience) -> Give | None:
    """The job's end when all nodes have ended but no worker said that the job has."""
    last = min(view.nodes, key=lambda node: node.ended_s, default=None)
    if last is None or last.ended_s <= patience.settle_s:
        return None
    if view.phase == "training":
        ended = last.status == "succeeded"
        return Give(1, "all workers have ended without an error, but the training was not done") if ended else None
    if all(node.status != "succeeded" for node in view.nodes):
        return None
    if last.status == "failed":
        return Give(1, f"{last.name} was killed after other nodes had ended")
    return Give(0, "the script has ended on all nodes")


def _additions(view: JobView, living: Sequence[Node], patience: Patience) -> list[Action]:
    if view.phase in ("none", "starting") and any(node.status == "succeeded" or node.error for node in view.nodes):
        return []  # the script ends without training, or fails; another node would only run it once more
    if not living and view.nodes and min(node.ended_s for node in view.nodes) <= patience.settle_s:
        return []  # the news that the job has finished may be on its way
    # A node that joins and then always fails makes a new round each time, but no progress.
    repeats = max(_recent_errors(view.nodes, patience).values(), default=0)
    failures = max(view.failures_in_a_row, repeats)
    backoff_s = min(patience.max_backoff_s, patience.first_backoff_s * 2.0 ** min(20, failures - 1))
    if failures > 0 and view.since_failure_s < backoff_s:
        return []
    return [AddNode()] * max(0, view.wanted - len(living))


def _cancellations(view: JobView, living: Sequence[Node], patience: Patience) -> list[Action]:
    hung = [n for n in living if n.workerless_s > patience.exit_s and not n.has_worker]
    # Cut off, or hung in the absence of any controller that could have seen it.
    silent = [n for n in living if not n.agent_seen and n.age_s > patience.come_s]
    others = [n for n in living if n not in hung and n not in silent and not n.is_member and n.idle_s > patience.surplus_s]
    # A node whose worker has left is about to end: none that is on its way must go for it.
    leaving = [n for n in living if n.workerless_s > 0.0 and not n.has_worker]
    excess = max(0, len(living) - len(leaving) - view.wanted)
    surplus = sorted(others, key=lambda n: (n.has_worker, n.age_s))[:excess]
    return [
        *(CancelNode(n.name, f"its worker has left {n.workerless_s:.0f} s ago, but the node does not end") for n in hung),
        *(CancelNode(n.name, f"it was started {n.age_s:.0f} s ago and has not reached etcd") for n in silent),
        *(CancelNode(n.name, f"the plan has no room for it since {n.idle_s:.0f} s") for n in surplus),
    ]


def _warnings(living: Sequence[Node], patience: Patience) -> list[Action]:
    silent = [n for n in living if not n.agent_seen and not n.warned and n.age_s > patience.register_s]
    return [Warn(n.name, f"{n.name} was started {n.age_s:.0f} s ago and has not reached etcd; see its log") for n in silent]
