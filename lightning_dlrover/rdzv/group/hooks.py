"""Wrap all collectives on the default group of `torch.distributed`, so that a meeting can compare them."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from lightning_dlrover.rdzv.group import waits
from lightning_dlrover.rdzv.group.meeting import CollectiveMonitor
from lightning_dlrover.rdzv.group.purpose import tensors_in

__all__ = ["MESSAGES", "OPERATIONS", "compare_with"]

OPERATIONS = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce_coalesced",
    "broadcast": "broadcast",
    "allgather": "all_gather",
    "_allgather_base": "all_gather_into_tensor",
    "all_gather_single": "all_gather_into_tensor",  # newer versions of torch call this one, and the other two "_single"
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "reduce_scatter": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "reduce_scatter_single": "reduce_scatter_tensor",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all_single",
    "all_to_all_single": "all_to_all_single",
    "barrier": "barrier",
}

MESSAGES = ("send", "recv", "recv_anysource")

_find_meeting: Callable[[], Callable[[], CollectiveMonitor | None] | None] = lambda: None  # noqa: E731


def compare_with(meeting: weakref.WeakMethod[Callable[[], CollectiveMonitor | None]]) -> None:
    """Compare all later collectives on the default group, whichever code calls them.

    Args:
        meeting: returns the round's meeting, or None while there is none.
    """
    global _find_meeting
    _find_meeting = meeting
    _install_hooks()


@functools.cache
def _install_hooks() -> None:
    kind: Any = dist.ProcessGroup
    for method, name in OPERATIONS.items():
        if (original := getattr(kind, method, None)) is not None:
            setattr(kind, method, _compared_first(original, name))
    for method in MESSAGES:
        setattr(kind, method, _as_message(getattr(kind, method)))
    kind.monitored_barrier = _as_messages(kind.monitored_barrier)


def _compared_first(original: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(original)
    def begin(self: Any, *args: Any, **kwargs: Any) -> Any:
        find = _find_meeting()
        meeting = find() if find is not None else None
        if meeting is not None:
            meeting.before(self, name, args)
        work = original(self, *args, **kwargs)
        if meeting is not None and not waits.guards_all() and {tensor.device.type for tensor in tensors_in(args)} == {"cpu"}:
            waits.is_of_host(work)
        return work

    return begin


def _as_message(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def begin(self: Any, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        find = _find_meeting()
        meeting = find() if find is not None else None
        with meeting.one_message(self, tensors) if meeting is not None else contextlib.nullcontext():
            if meeting is not None and meeting.connects_late and self is dist.group.WORLD:
                return waits.begin(lambda: original(self, tensors, *args, **kwargs))
            return original(self, tensors, *args, **kwargs)

    return begin


def _as_messages(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a monitored barrier, in which rank 0 exchanges messages with each other rank. It is not compared, because its caller
    sets the timeout."""

    @functools.wraps(original)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        find = _find_meeting()
        meeting = find() if find is not None else None
        with meeting.only_messages(self) if meeting is not None else contextlib.nullcontext():
            return original(self, *args, **kwargs)

    return run
