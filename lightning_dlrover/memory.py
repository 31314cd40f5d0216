"""Keep memory at hand for a change of the world.

A page that a process touches for the first time costs microseconds, many where the operating system is a guest itself: for a
model and its optimizer state that adds up to the longest part of a switch. So a worker touches what it will need while nobody
waits for it, and tells the C library to keep what is freed.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Mapping

import psutil
import torch

__all__ = ["reserve"]

log = logging.getLogger(__name__)

# glibc's mallopt(3)
M_TRIM_THRESHOLD = -1
M_MMAP_MAX = -4
NEVER = 2**31 - 1

USERS_OWN = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD")


def reserve(module: torch.nn.Module, num_copies: int, environ: Mapping[str, str] = os.environ) -> bool:
    """Touch the module's trainable parameters, and `num_copies` times their memory for later allocations.

    From then on the process keeps what it frees. Does nothing with another C library than glibc, with allocation settings of
    the user's own, or where it would take more than half of the memory that is available. Processes forked afterwards share
    the pages, which undoes the work.

    Returns:
        Whether the memory was reserved.
    """
    libc = ctypes.CDLL(None)  # its calls release Python's lock: touching may take seconds
    if not hasattr(libc, "gnu_get_libc_version") or any(environ.get(name) for name in USERS_OWN):
        return False
    parameters = [p for p in module.parameters() if p.requires_grad and p.device.type == "cpu"]
    num_bytes = num_copies * sum(p.nbytes for p in parameters)
    if num_bytes > psutil.virtual_memory().available // 2:
        log.info("not enough memory is available to reserve %d MiB: changes of the world will take longer", num_bytes >> 20)
        return False
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc.argtypes = [ctypes.c_size_t]
    libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    libc.mallopt(M_MMAP_MAX, 0)
    libc.mallopt(M_TRIM_THRESHOLD, NEVER)
    block = libc.malloc(num_bytes)
    if not block:
        return False
    libc.memset(block, 0, num_bytes)
    libc.free(block)
    with torch.no_grad():
        for parameter in parameters:
            parameter.mul_(1)
    return True
