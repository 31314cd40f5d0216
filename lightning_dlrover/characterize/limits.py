"""Limits of the machine, measured in a worker: memory and matrix multiply of each device, all-reduce and disk."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]
from torch.nn import functional as F

__all__ = ["GPU", "LIMITS", "NEEDS_WORKERS", "measure_limit"]

GPU = "gpu_"
"""Begin of the names of a GPU's limits."""
BLOCK_S = 0.12
NUM_BLOCKS = 5
COPY_BYTES = 256 * 2**20
ROWS_BYTES = 512 * 2**20
ROW_VALUES = 32
DISK_BYTES = 64 * 2**20
ALL_REDUCE_BYTES = 16 * 2**20
MATRIX, GPU_MATRIX = 1536, 8192  # a smaller one does not fill a GPU
BAGS, LOOKUPS = 4096, 32
NUM_IDS = ROWS_BYTES // (4 * ROW_VALUES)
"""Different lookups: as many as the table has rows, so that they come back to a row only once it has left all caches."""


def measure_limit(name: str, threads: int, folder: Path) -> tuple[float, ...]:
    """Return the limit in each block, in the unit that `LIMITS` names.

    Raises:
        OSError: the disk refuses.
    """
    torch.set_num_threads(threads)
    device = torch.device("cuda" if name.startswith(GPU) else "cpu")
    with threadpool_limits(threads):
        return _MEASURES[name.removeprefix(GPU)](threads, folder, device)


def _copy(threads: int, folder: Path, device: torch.device) -> tuple[float, ...]:
    """Bytes read and written by a copy, as STREAM counts them."""
    if device.type == "cuda":
        source = torch.ones(COPY_BYTES // 4, device=device)
        target = torch.empty_like(source)
        return _rates(lambda: target.copy_(source), 2 * COPY_BYTES / 1e9, device)
    # Torch's memory, because numpy asks the kernel for huge pages, which tables do not get.
    arrays, targets = ([torch.ones(COPY_BYTES // 4 // threads).numpy() for _ in range(threads)] for _ in range(2))
    with ThreadPoolExecutor(threads) as pool:  # numpy copies without Python's lock
        return _rates(lambda: [*pool.map(np.copyto, targets, arrays)], 2 * COPY_BYTES / 1e9, device)


def _rows(threads: int, folder: Path, device: torch.device) -> tuple[float, ...]:
    """Bytes of random table rows that lookups read."""
    table = torch.ones(NUM_IDS, ROW_VALUES, device=device)
    ids = torch.randint(NUM_IDS, (NUM_IDS // LOOKUPS, LOOKUPS), generator=torch.Generator().manual_seed(0)).to(device)
    # The start of a GPU's kernel takes longer than a small one.
    batches = itertools.cycle([ids] if device.type == "cuda" else torch.split(ids, BAGS))
    num_read = NUM_IDS if device.type == "cuda" else BAGS * LOOKUPS
    with torch.no_grad():
        return _rates(lambda: F.embedding_bag(next(batches), table, mode="sum"), num_read * ROW_VALUES * 4 / 1e9, device)


def _multiply(threads: int, folder: Path, device: torch.device) -> tuple[float, ...]:
    """The faster of the libraries at hand: torch's own may suit other makes of processors better than this one."""
    own = _multiply_in_torch(threads, folder, device)
    if device.type == "cuda":
        return own
    one, other = (np.random.default_rng(0).random((MATRIX, MATRIX), dtype=np.float32) for _ in range(2))
    numpys = _rates(lambda: one @ other, 2 * MATRIX**3 / 1e9, device)
    return max(own, numpys, key=lambda blocks: sorted(blocks)[len(blocks) // 2])


def _multiply_in_torch(threads: int, folder: Path, device: torch.device) -> tuple[float, ...]:
    size = GPU_MATRIX if device.type == "cuda" else MATRIX
    one, other = (torch.rand(size, size, device=device) for _ in range(2))
    return _rates(lambda: torch.mm(one, other), 2 * size**3 / 1e9, device)


def _all_reduce(threads: int, folder: Path, device: torch.device) -> tuple[float, ...]:
    values = torch.ones(ALL_REDUCE_BYTES // 4)
    return _rates(lambda: dist.all_reduce(values, op=dist.ReduceOp.MAX), ALL_REDUCE_BYTES / 1e9, device, num_calls=6)


def _all_reduce_latency(threads: int, folder: Path, device: torch.device) -> tuple[float, ...]:
    values = torch.ones(2)
    rates = _rates(lambda: dist.all_reduce(values, op=dist.ReduceOp.MAX), 1.0, device, num_calls=300)
    return tuple(1e6 / rate for rate in rates)


def _disk_write(threads: int, folder: Path, device: torch.device) -> tuple[float, ...]:
    return tuple(_disk(folder)[0])


def _disk_read(threads: int, folder: Path, device: torch.device) -> tuple[float, ...]:
    return tuple(_disk(folder)[1])


def _disk(folder: Path, num_blocks: int = 3) -> tuple[list[float], list[float]]:
    """Write a file through to the disk, drop it from the page cache, and read it."""
    file = folder / f"disk-{os.getpid()}"
    data = os.urandom(2**20)
    written, read = [], []
    try:
        for _ in range(num_blocks):
            descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
            try:
                began = time.perf_counter()
                for _ in range(DISK_BYTES // len(data)):
                    os.write(descriptor, data)
                os.fsync(descriptor)
                written.append(DISK_BYTES / 1e9 / (time.perf_counter() - began))
                with suppress(AttributeError):
                    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                os.lseek(descriptor, 0, os.SEEK_SET)
                began = time.perf_counter()
                while os.read(descriptor, 2**20):
                    pass
                read.append(DISK_BYTES / 1e9 / (time.perf_counter() - began))
            finally:
                os.close(descriptor)
    finally:
        file.unlink(missing_ok=True)
    return written, read


def _rates(call: Callable[[], object], amount: float, device: torch.device, num_calls: int | None = None) -> tuple[float, ...]:
    """Return the amount per second in each block.

    Args:
        num_calls: calls of a block, where workers must make the same number.
    """

    def seconds(calls: int) -> float:
        _settle(device)
        began = time.perf_counter()
        for _ in range(calls):
            call()
        _settle(device)
        return time.perf_counter() - began

    seconds(2)
    calls = num_calls or max(2, round(BLOCK_S / seconds(1)))
    return tuple(calls * amount / seconds(calls) for _ in range(NUM_BLOCKS))


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


_MEASURES = {
    "copy": _copy,
    "rows": _rows,
    "multiply": _multiply,
    "multiply_torch": _multiply_in_torch,
    "all_reduce": _all_reduce,
    "all_reduce_latency": _all_reduce_latency,
    "disk_write": _disk_write,
    "disk_read": _disk_read,
}
LIMITS = {
    "copy": ("memory copy, read and written", "GB/s"),
    "rows": ("random table rows read", "GB/s"),
    "multiply": ("matrix multiply, best library", "GFLOP/s"),
    "multiply_torch": ("matrix multiply, torch", "GFLOP/s"),
    "all_reduce": ("all-reduce of 16 MiB, two workers", "GB/s"),
    "all_reduce_latency": ("all-reduce of 8 bytes, two workers", "us"),
    "disk_write": ("disk, written through", "GB/s"),
    "disk_read": ("disk, read without cache", "GB/s"),
    "gpu_copy": ("GPU memory copy, read and written", "GB/s"),
    "gpu_rows": ("random table rows read by the GPU", "GB/s"),
    "gpu_multiply": ("matrix multiply on the GPU, 32-bit", "GFLOP/s"),
}
"""Meaning and unit of each limit."""

NEEDS_WORKERS = {"all_reduce": 2, "all_reduce_latency": 2}
"""Limits that take more than one worker."""
