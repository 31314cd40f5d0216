"""The limit of open files: raised as far as this user may, and named where it is reached."""

from __future__ import annotations

import contextlib
import errno
import resource

__all__ = ["lack_of_files", "raise_limit"]

ENOUGH = 1 << 20
"""Open files that any worker can do with. Some programs visit all numbers up to the limit, which may be billions."""

_TEXTS = ("Too many open files", "received 0 items of ancdata")
"""What an error of a loader worker, or of its batch on the way, says where no file can be opened."""


def raise_limit() -> None:
    """Let this process, and those that it starts, open as many files as the hard limit allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = ENOUGH if hard == resource.RLIM_INFINITY else min(hard, ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(OSError, ValueError):  # some sandboxes allow no change
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


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
