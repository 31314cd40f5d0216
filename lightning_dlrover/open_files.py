"""The limit of open files: raised as far as this user may, and named where it is reached."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import resource
from collections.abc import Mapping
from typing import Any

__all__ = ["files_of", "lack_of_files", "raise_limit", "warn_of_batches"]

log = logging.getLogger(__name__)

ENOUGH = 1 << 20
"""Open files that any worker can do with. Some programs visit all numbers up to the limit, which may be billions."""

MAX_VISITED = 10_000
"""Objects of a batch that are looked at. A batch of more is estimated too low."""

_TEXTS = ("Too many open files", "received 0 items of ancdata")
"""What an error of a loader worker, or of its batch on the way, says where no file can be opened."""


def raise_limit() -> None:
    """Let this process, and those that it starts, open as many files as the hard limit allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = ENOUGH if hard == resource.RLIM_INFINITY else min(hard, ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(OSError, ValueError):  # some sandboxes allow no change
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def files_of(batch: Any) -> int:
    """Return how many files a batch from a loader worker holds open: one for each tensor that came in shared memory."""
    import torch

    storages: set[int] = set()
    seen: set[int] = set()
    left: list[Any] = [batch]
    while left and len(seen) < MAX_VISITED:
        each = left.pop()
        if id(each) in seen or isinstance(each, str | bytes | int | float | type):
            continue
        seen.add(id(each))
        if isinstance(each, torch.Tensor):
            if each.device.type == "cpu" and each.layout == torch.strided and each.numel() and each.is_shared():  # type: ignore[no-untyped-call]
                storages.add(each.untyped_storage().data_ptr())
        elif isinstance(each, Mapping):
            left += each.values()
        elif isinstance(each, list | tuple):
            left += each
        elif hasattr(each, "__dict__"):
            left += vars(each).values()
    return len(storages)


def warn_of_batches(batch: Any, num_workers: int, prefetch_factor: int) -> None:
    """Name the limit of open files before it is reached, if batches in preparation may take all that is left of it.

    Where a loader worker reaches it, torch drops the batch, and the training process waits for it.

    Args:
        batch: the first one from the loader workers.
    """
    import torch.multiprocessing

    if torch.multiprocessing.get_sharing_strategy() != "file_descriptor":  # type: ignore[no-untyped-call]
        return
    of_batch, now = files_of(batch), _open_now()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # A loader worker has two files of each tensor until it is fetched. This process may receive all batches out of turn.
    needed = now + of_batch * max(2 * (prefetch_factor + 1), num_workers * prefetch_factor + 1)
    if of_batch and soft != resource.RLIM_INFINITY and needed > soft:
        log.warning(
            "a batch has %d tensors, each in a file of its own, and %d loader workers prepare %d batches ahead each: a process "
            "may need %d open files, and its limit is %d (hard limit %d, ulimit -n). Call "
            "torch.multiprocessing.set_sharing_strategy('file_system') first, let collate_fn make fewer tensors, or prepare "
            "fewer batches ahead (num_workers x prefetch_factor)",
            *(of_batch, num_workers, prefetch_factor, needed, soft, hard),
        )


def _open_now() -> int:
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return 0


def lack_of_files(error: BaseException) -> OSError | None:
    """Return an error that explains this one of a loader's batches, if it came because no more files can be opened."""
    if getattr(error, "errno", None) != errno.EMFILE and not any(text in str(error) for text in _TEXTS):
        return None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return OSError(
        errno.EMFILE,
        f"this worker has as many files open as it may: {soft}, and its hard limit is {hard} (ulimit -n). "
        "A batch from a loader worker holds a file for each of its tensors until the last reference to it is gone: keep "
        "clones of the tensors instead of batches, prepare fewer batches ahead (num_workers x prefetch_factor), or call "
        "torch.multiprocessing.set_sharing_strategy('file_system') first",
    )
