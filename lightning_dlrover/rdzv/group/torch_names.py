"""The private names of torch that live process groups depend on, each used only in this file.

`NAMES` lists them, and those that other rooms use. `check` finds the ones that an installed release lacks.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from lightning_dlrover.private_names import MissingNamesError, check_names

try:
    from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore
except ImportError as error:
    raise MissingNamesError("torch", [f"torch._C._distributed_c10d ({error})"]) from error

__all__ = [
    "NAMES",
    "HashStore",
    "PrefixStore",
    "Store",
    "TCPStore",
    "abort_process_group",
    "after_backward",
    "backend_of",
    "check",
    "gloo",
    "gloo_devices",
    "has_gradient_hook",
    "is_in_backward",
    "is_point_to_point",
    "num_begun",
    "replace_buffer_broadcast",
    "work_class",
]

POINT_TO_POINT = frozenset((12, 13, 14))
"""`c10d::OpType` of send, receive and receive from any source. A wait for one that times out breaks its connections."""

NAMES: dict[str, tuple[str, ...]] = {
    "torch._C._distributed_c10d": ("HashStore", "PrefixStore", "Store", "TCPStore", "Work"),
    "torch._C._distributed_c10d:Work": ("wait", "_get_op_type"),
    "torch.distributed.distributed_c10d": ("ProcessGroupGloo", "_abort_process_group"),
    "torch.distributed:ProcessGroup": ("_get_backend",),
    "torch.distributed:ProcessGroupGloo": ("_get_sequence_number_for_group", "_Options"),
    "torch.distributed:ProcessGroupGloo._Options": ("_devices", "_threads", "_timeout"),
    "torch": ("_foreach_copy_",),
    "torch.nn:Module": ("_buffers",),
    "torch._C": ("_current_graph_task_id", "_remove_worker_pids"),
    "torch.autograd:Variable._execution_engine": ("queue_callback",),
    "torch.nn.parallel:DistributedDataParallel": ("_comm_hooks", "_distributed_broadcast_coalesced", "_sync_buffers"),
    "torch.utils.data:DataLoader": ("_get_iterator", "_iterator"),
    "torch.utils.data.dataloader:_MultiProcessingDataLoaderIter": (
        *("_index_queues", "_mark_worker_as_unavailable", "_persistent_workers", "_pin_memory_thread_done_event", "_shutdown"),
        *("_prefetch_factor", "_shutdown_workers", "_try_put_index", "_worker_pids_set", "_worker_result_queue", "_workers"),
        *("_workers_done_event", "_workers_status"),
    ),
    "torch.utils.data._utils.worker": ("_worker_info",),
    "torch.utils._python_dispatch": ("TorchDispatchMode",),
    "torch.utils.flop_counter": ("flop_registry", "sdpa_flop"),
}
"""The names by their holder, as `check_names` takes them."""


@functools.cache
def check() -> None:
    """Raise `MissingNamesError` if the installed torch lacks one of the names. Takes some milliseconds, once."""
    check_names("torch", NAMES)


def work_class() -> Any:
    """Return the class of all works, including those that C++ returns."""
    return torch._C._distributed_c10d.Work


def is_point_to_point(work: Any) -> bool:
    """Whether a work is one message between two workers."""
    return work._get_op_type() in POINT_TO_POINT


def gloo_devices(is_late: bool) -> list[Any]:
    """Create gloo's listening port and its thread for sockets; none if this release of torch cannot connect late.

    The thread wakes up a hundred times a second, even without a message. Groups with devices that do not connect late can share
    them. Those that connect late cannot, because they number their connections by rank.

    Args:
        is_late: whether two workers connect only at their first message.
    """
    create = dist.ProcessGroupGloo.create_device
    interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    try:
        if interfaces:
            return [create(interface=name, lazy_init=is_late) for name in interfaces]
        return [dist.ProcessGroupGloo.create_default_device(lazy_init=is_late)]
    except TypeError:
        if is_late:
            return []
    return [create(interface=name) for name in interfaces] or [dist.ProcessGroupGloo.create_default_device()]


def gloo(store: Store, rank: int, size: int, timeout: timedelta, devices: Sequence[Any]) -> Any:
    """Create a gloo backend, with torch's usual number of threads for operations.

    With devices that connect late it needs one request to the store, and each pair of workers that comes to exchange a message
    two more. Otherwise it connects all pairs at once, and needs as many sockets as there are workers.
    """
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = list(devices)
    options._timeout = timeout
    options._threads = 2 * len(devices)
    return dist.ProcessGroupGloo(store, rank, size, options)


def num_begun(group: Any) -> int:
    """Return the number of collectives and messages that any code of this worker has begun in a group or a backend."""
    number: int = group._get_sequence_number_for_group()
    return number


def backend_of(group: Any, device: torch.device) -> Any:
    """Return the backend of a group for tensors on `device`."""
    return group._get_backend(device)


def abort_process_group() -> None:
    """Abort the default group, which ends NCCL collectives in flight."""
    dist.distributed_c10d._abort_process_group()


def is_in_backward() -> bool:
    """Whether autograd runs in this thread: collectives there overlap with those of DDP."""
    return int(torch._C._current_graph_task_id()) != -1


def after_backward(callback: Callable[[], None]) -> None:
    """Call `callback` at the end of the backward pass that runs in this thread.

    Raises:
        RuntimeError: no backward pass is running.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def has_gradient_hook(replica: DistributedDataParallel) -> bool:
    """Whether a model has a communication hook, or optimizers that run in the backward pass."""
    return bool(replica._comm_hooks) or any(hasattr(p, "_in_backward_optimizers") for p in replica.module.parameters())


def replace_buffer_broadcast(replica: DistributedDataParallel, broadcast: Callable[..., None]) -> None:
    """Make DDP's forward pass copy rank 0's buffers to all workers with `broadcast`."""
    replica._distributed_broadcast_coalesced = broadcast  # type: ignore[method-assign]
