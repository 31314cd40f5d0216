"""Keep memory at hand for a change of the world.

A page that a process touches for the first time costs microseconds, and many of them inside a virtual machine. For a model and
its optimizer state these add up to the longest part of a switch. So a worker touches its future memory while no other worker
waits for it, and makes the C library keep freed blocks.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Collection, Mapping

import torch

from lightning_dlrover import variables
from lightning_dlrover.observe.resources import available_bytes

__all__ = ["reserve"]

log = logging.getLogger(__name__)

# glibc's mallopt(3)
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
NEVER = 2**31 - 1
LARGEST_KEPT = 32 << 20
"""Bytes of the largest block to keep, as in glibc's adaptive threshold. Keeping larger ones would leave gaps in the heap."""

USERS_OWN = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD")


def reserve(
    module: torch.nn.Module, num_copies: int, but: Collection[str] = (), environ: Mapping[str, str] = os.environ
) -> bool:
    """Touch the module's trainable parameters, and `num_copies` times their memory for later allocations.

    Embeddings with sparse gradients do not count, because most of their memory is never touched. From then on the
    process keeps blocks below 32 MiB that it frees.

    Nothing is reserved in three cases: the C library is not glibc, the user has allocation settings, or all workers of the
    node would take more than half of the available memory. Processes forked afterwards share the pages, which undoes the
    work.

    Args:
        but: names of parameters that do not count: sharded tables, which have another kind of memory.

    Returns:
        Whether the memory was reserved.
    """
    libc = ctypes.CDLL(None)  # its calls release Python's lock, as touching may take seconds
    if not hasattr(libc, "gnu_get_libc_version") or any(environ.get(name) for name in USERS_OWN):
        return False
    sparse = {id(p) for m in module.modules() if getattr(m, "sparse", False) for p in m.parameters(recurse=False)}
    parameters = [
        p
        for name, p in module.named_parameters()
        if p.requires_grad and p.device.type == "cpu" and id(p) not in sparse and name not in but
    ]
    num_bytes = num_copies * sum(p.nbytes for p in parameters)
    if num_bytes * variables.workers_here(environ) > available_bytes() // 2:
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
