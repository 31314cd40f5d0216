"""Keep memory at hand for a change of the world.

A page that a process touches for the first time costs microseconds, many where the operating system is a guest itself: for a
model and its optimizer state that adds up to the longest part of a switch. So a worker touches what it will need while nobody
waits for it, and tells the C library to keep what is freed.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Collection, Mapping

import torch

from lightning_dlrover.observe.resources import available_bytes

__all__ = ["reserve"]

log = logging.getLogger(__name__)

# glibc's mallopt(3)
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
NEVER = 2**31 - 1
LARGEST_KEPT = 32 << 20
"""Where glibc's own adaptive threshold ends, too: larger blocks are given back, or they would leave gaps in the heap."""

USERS_OWN = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD")


def reserve(
    module: torch.nn.Module, num_copies: int, but: Collection[str] = (), environ: Mapping[str, str] = os.environ
) -> bool:
    """Touch the module's trainable parameters, and `num_copies` times their memory for later allocations.

    Embeddings with sparse gradients do not count: most of their memory is never gone through. From then on the process keeps
    the blocks below 32 MiB that it frees. Does nothing with another C library than glibc, with allocation settings of the
    user's own, or where all workers of the node would take more than half of the memory that is available. Processes forked
    afterwards share the pages, which undoes the work.

    Args:
        but: names of parameters that do not count: sharded tables, which have memory of their own kind.

    Returns:
        Whether the memory was reserved.
    """
    libc = ctypes.CDLL(None)  # its calls release Python's lock: touching may take seconds
    if not hasattr(libc, "gnu_get_libc_version") or any(environ.get(name) for name in USERS_OWN):
        return False
    sparse = {id(p) for m in module.modules() if getattr(m, "sparse", False) for p in m.parameters(recurse=False)}
    parameters = [
        p
        for name, p in module.named_parameters()
        if p.requires_grad and p.device.type == "cpu" and id(p) not in sparse and name not in but
    ]
    num_bytes = num_copies * sum(p.nbytes for p in parameters)
    if num_bytes * int(environ.get("LOCAL_WORLD_SIZE", "1")) > available_bytes() // 2:
        log.info("not enough memory is available to reserve %d MiB: changes of the world will take longer", num_bytes >> 20)
        return False
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc.argtypes = [ctypes.c_size_t]
    libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    libc.mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT)
    libc.mallopt(M_TRIM_THRESHOLD, NEVER)
    sizes = [min(LARGEST_KEPT // 2, num_bytes - done) for done in range(0, num_bytes, LARGEST_KEPT // 2)]
    blocks = [libc.malloc(size) for size in sizes]
    for block, size in zip(blocks, sizes, strict=True):
        if block:
            libc.memset(block, 0, size)
    for block in blocks:
        libc.free(block)
    with torch.no_grad():
        for parameter in parameters:
            parameter.mul_(1)
    return True
