"""The private names of torch that live process groups depend on, each used only in this file.

`NAMES` lists them, and those that other rooms use. `check` finds the ones that an installed release lacks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
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
    "has_gradient_hook",
    "is_in_backward",
    "is_point_to_point",
    "late_gloo",
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


def late_gloo(store: Store, rank: int, size: int, timeout: timedelta) -> Any:
    """Create a gloo backend that connects two workers at their first message; None if this release of torch has none.

    Creating it needs one request to the store, and each pair of workers that comes to exchange a message two more. A backend
    that connects all pairs at once needs as many sockets in each worker as there are workers.
    """
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    try:
        options._devices = [dist.ProcessGroupGloo.create_default_device(lazy_init=True)]
    except TypeError:
        return None
    options._timeout = timeout
    options._threads = 2
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
