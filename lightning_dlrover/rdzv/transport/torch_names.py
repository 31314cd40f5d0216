"""The private names of torch that live process groups depend on, each used only in this file.

`NAMES` lists them, and those that other rooms use. `check` finds the ones that an installed release lacks.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from lightning_dlrover.private_names import MissingNamesError, check_names

try:
    from torch._C import _distributed_c10d as _c10d

    HashStore = _c10d.HashStore
    PrefixStore = _c10d.PrefixStore
    Store = _c10d.Store
    TCPStore = _c10d.TCPStore
except (ImportError, AttributeError) as error:
    raise MissingNamesError("torch", [f"torch._C._distributed_c10d ({error})"]) from error


POINT_TO_POINT = frozenset((12, 13, 14))
"""`c10d::OpType` of send, receive and receive from any source. A wait for one that times out breaks its connections."""

NAMES: dict[str, tuple[str, ...]] = {
    "torch._C._distributed_c10d": ("HashStore", "PrefixStore", "Store", "TCPStore", "Work"),
    "torch._C._distributed_c10d:Work": ("wait", "_get_op_type"),
    "torch.distributed.distributed_c10d": (
        *("ProcessGroupGloo", "_unregister_all_process_groups", "_update_default_pg", "_world", "Backend"),
        *("_DistributedBackendOptions", "_unpickler"),
    ),
    "torch.distributed.distributed_c10d:Backend": ("_BackendPlugin", "_plugins"),
    "torch.distributed.distributed_c10d:_World": (
        *("group_count", "pg_backend_config", "pg_coalesce_state", "pg_group_ranks", "pg_map", "pg_names", "pg_to_tag"),
        "tags_to_pg",
    ),
    "torch.distributed:ProcessGroup": ("_get_backend", "_register_backend", "_set_default_backend"),
    "torch.distributed:ProcessGroupGloo": ("_get_sequence_number_for_group", "_Options"),
    "torch.distributed:ProcessGroupGloo._Options": ("_devices", "_threads", "_timeout"),
    "torch": ("_foreach_copy_",),
    "torch.nn:Module": ("_buffers",),
    "torch._C": ("_current_graph_task_id", "_remove_worker_pids"),
    "torch.autograd:Variable._execution_engine": ("queue_callback",),
    "torch.nn.parallel:DistributedDataParallel": (
        *("_comm_hooks", "_distributed_broadcast_coalesced", "_remove_autograd_hooks", "_sync_buffers"),
    ),
    "torch.utils.data:DataLoader": ("_get_iterator", "_iterator"),
    "torch.utils.data.dataloader": ("_BaseDataLoaderIter",),
    "torch.utils.data.dataloader:_MultiProcessingDataLoaderIter": (
        *("_index_queues", "_mark_worker_as_unavailable", "_persistent_workers", "_pin_memory_thread_done_event", "_shutdown"),
        *("_prefetch_factor", "_shutdown_workers", "_try_put_index", "_worker_pids_set", "_worker_result_queue", "_workers"),
        *("_workers_done_event", "_workers_status"),
    ),
    "torch.utils.data._utils.worker": ("_worker_info",),
    "torch.utils._python_dispatch": ("TorchDispatchMode",),
    "torch._weights_only_unpickler": ("_get_allowed_globals",),
    "torch.utils.flop_counter": ("flop_registry", "sdpa_flop"),
}
"""The names by their holder, as `check_names` takes them."""


@functools.cache
def check() -> None:
    """Raise `MissingNamesError` if the installed torch lacks one of the names. Takes some milliseconds, once."""
    check_names("torch", NAMES)


def replace_unpickler(unpickler: type) -> None:
    """Set the class that torch's object collectives use to unpickle messages."""
    module: Any = dist.distributed_c10d
    module._unpickler = unpickler


def accepted_in_files() -> Mapping[str, Any]:
    """Return the classes and functions by name that `torch.load(weights_only=True)` accepts in any file."""
    accepted: Mapping[str, Any] = torch._weights_only_unpickler._get_allowed_globals()
    return accepted


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

    With devices that connect late it needs one request to the store, and two more for each pair of workers that exchanges a
    message. Otherwise it connects all pairs at once, and needs as many sockets as there are workers.
    """
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = list(devices)
    options._timeout = timeout
    options._threads = 2 * len(devices)
    return dist.ProcessGroupGloo(store, rank, size, options)


def num_begun(*groups: Any) -> int:
    """Return the number of collectives and messages that any code of this worker has begun in groups or backends."""
    return sum(group._get_sequence_number_for_group() for group in groups)


def backend_of(group: Any, device: torch.device) -> Any:
    """Return the backend of a group for tensors on `device`."""
    return group._get_backend(device)


def control_group(store: Store, rank: int, size: int, connected: Any) -> Any:
    """Return a group for tensors on the CPU over a connected gloo backend. Torch's tables do not contain it."""
    group: Any = dist.ProcessGroup(store, rank, size)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, connected)
    return group


def backend_beside_gloo(name: str, store: Store, rank: int, size: int, timeout: timedelta) -> Any:
    """Create a backend as `init_process_group` would. It connects at its first collective."""
    c10d: Any = dist.distributed_c10d
    with _replacing:
        if name == "nccl":
            options = c10d.ProcessGroupNCCL.Options()
            options.is_high_priority_stream = False
            options._timeout = timeout
            options.global_ranks_in_group = list(range(size))
            return c10d.ProcessGroupNCCL(store, rank, size, options)
        plugin = c10d.Backend._plugins[name.upper()]
        if not plugin.extended_api:
            return plugin.creator_fn(store, rank, size, timeout)
        arguments = c10d._DistributedBackendOptions()
        arguments.store, arguments.group_rank, arguments.group_size, arguments.timeout = store, rank, size, timeout
        arguments.group_id, arguments.global_ranks_in_group = "", list(range(size))
        return plugin.creator_fn(arguments, None)


@contextlib.contextmanager
def as_connected(backends: Mapping[str, Any]) -> Iterator[None]:
    """Make `init_process_group` use backends that are connected already instead of creating its own.

    Args:
        backends: by name, such as `gloo`.
    """
    with _replacing, contextlib.ExitStack() as undo:
        for name, connected in backends.items():
            undo.enter_context(_plugin_as(name, connected) if name not in _CLASSES else _class_as(_CLASSES[name], connected))
        yield


_CLASSES = {"gloo": "ProcessGroupGloo", "nccl": "ProcessGroupNCCL"}

_replacing = threading.Lock()
"""Held while the classes of connected backends are replaced: another thread may be about to connect the next round's."""


@contextlib.contextmanager
def _class_as(class_name: str, connected: Any) -> Iterator[None]:
    module: Any = dist.distributed_c10d
    original = getattr(module, class_name)
    handed_over = [connected]  # emptied later: the classes below live until they are collected, and the group must not

    class Meta(type):
        def __call__(cls, *args: object, **kwargs: object) -> Any:
            # Torch creates a second one, for its own checks, if TORCH_DISTRIBUTED_DEBUG=DETAIL.
            return handed_over.pop() if handed_over else original(*args, **kwargs)

        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, original)

        def __getattr__(cls, name: str) -> Any:
            return getattr(original, name)

    class Connected(metaclass=Meta):
        pass

    setattr(module, class_name, Connected)
    try:
        yield
    finally:
        handed_over.clear()
        setattr(module, class_name, original)


@contextlib.contextmanager
def _plugin_as(name: str, connected: Any) -> Iterator[None]:
    plugins = dist.distributed_c10d.Backend._plugins
    original = plugins[name.upper()]
    handed_over = [connected]
    plugins[name.upper()] = dist.distributed_c10d.Backend._BackendPlugin(lambda *_: handed_over.pop(), False)
    try:
        yield
    finally:
        handed_over.clear()
        plugins[name.upper()] = original


def default_groups() -> list[Any]:
    """Return all groups of torch's tables, the newest first: the default group and those that the script has created."""
    names = dist.distributed_c10d._world.pg_names.copy()  # another thread may create one
    return sorted(names, key=lambda group: names[group], reverse=True)


def abort(groups: Sequence[Any]) -> None:
    """Abort all communicators of some groups or backends, which ends their collectives. May take long."""
    nccl: Any = None
    with contextlib.suppress(RuntimeError, AttributeError, IndexError):  # no backend for the device, or a backend itself
        nccl = groups[-1]._get_backend(torch.device("cuda"))
    # Aborts of several communicators must not wait for each other, see pytorch issue 119797.
    begin, end = (getattr(nccl, name, lambda: None) for name in ("_group_start", "_group_end"))
    begin()
    errors = []
    for group in groups:
        try:
            group.abort()
        except Exception as error:  # the others must be aborted nonetheless
            errors.append(error)
    end()
    if errors:
        raise errors[0]


def forget_groups() -> None:
    """Remove all groups from torch's tables, so that a further default group can be created. Ends none of them."""
    module: Any = dist.distributed_c10d
    module._update_default_pg(None)
    world = module._world
    for table in ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "pg_to_tag", "tags_to_pg", "pg_coalesce_state"):
        getattr(world, table).clear()
    module._unregister_all_process_groups()
    world.group_count = 0


def is_in_backward() -> bool:
    """Whether autograd runs in this thread: collectives there overlap with those of DDP."""
    return int(torch._C._current_graph_task_id()) != -1


def after_backward(callback: Callable[[], None]) -> None:
    """Call `callback` at the end of the backward pass that runs in this thread.

    Raises:
        RuntimeError: no backward pass is running.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def retire(replica: object) -> None:
    """Remove the hooks of a model that DDP has wrapped for a former round.

    A pass that has broken leaves them armed. If any thread still held the model, as one that reads stacks may for a moment,
    they would run in the next round's passes, too, and refuse to mark a gradient as ready twice.
    """
    if isinstance(replica, DistributedDataParallel):
        replica._remove_autograd_hooks()  # type: ignore[no-untyped-call]


def has_gradient_hook(replica: DistributedDataParallel) -> bool:
    """Whether a model has a communication hook, or optimizers that run in the backward pass."""
    return bool(replica._comm_hooks) or any(hasattr(p, "_in_backward_optimizers") for p in replica.module.parameters())


def replace_buffer_broadcast(replica: DistributedDataParallel, broadcast: Callable[..., None]) -> None:
    """Make DDP's forward pass copy rank 0's buffers to all workers with `broadcast`."""
    replica._distributed_broadcast_coalesced = broadcast  # type: ignore[method-assign]
