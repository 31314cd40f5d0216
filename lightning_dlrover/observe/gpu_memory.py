"""Memory that this process has on its GPU. The only place that reads and resets torch's peaks, of which there is one set."""

from __future__ import annotations

import weakref
from collections import defaultdict

import torch

__all__ = ["CUDA_CONTEXT_BYTES", "GpuPeak", "gpu_bytes", "gpu_limit_bytes"]

CUDA_CONTEXT_BYTES = 500 << 20
"""Context and loaded kernels: 300 to 500 MB (PyTorch forum; RMixer's code charges 310 MB)."""

_most_reserved: defaultdict[int, int] = defaultdict(int)  # before the last reset, by index of the device
_readers: weakref.WeakSet[GpuPeak] = weakref.WeakSet()


def gpu_limit_bytes(device: torch.device) -> int:
    """Return the bytes of a GPU that tensors of one process can fill; 0 for a CPU."""
    if device.type != "cuda":
        return 0
    return torch.cuda.get_device_properties(device).total_memory - CUDA_CONTEXT_BYTES


def gpu_bytes(device: torch.device) -> tuple[int, int]:
    """Return the bytes of a GPU that this process has now, and those that it had at the most.

    Both are 0 for a CPU, and before this process uses CUDA.
    """
    if not _is_in_use(device):
        return 0, 0
    reserved, most = torch.cuda.memory_reserved(device), torch.cuda.max_memory_reserved(device)
    return CUDA_CONTEXT_BYTES + reserved, CUDA_CONTEXT_BYTES + max(most, _most_reserved[_index(device)])


class GpuPeak:
    """Reads the most bytes of tensors on a GPU again and again. Several readers do not disturb each other."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._most = 0
        _readers.add(self)
        self.take()

    def take(self) -> int:
        """Return the peak since the last call; 0 for a CPU, and before this process uses CUDA."""
        device = self._device
        if _is_in_use(device):
            index = _index(device)
            _most_reserved[index] = max(_most_reserved[index], torch.cuda.max_memory_reserved(device))
            peak = torch.cuda.max_memory_allocated(device)
            torch.cuda.reset_peak_memory_stats(device)
            for reader in _readers:
                if _is_in_use(reader._device) and _index(reader._device) == index:
                    reader._most = max(reader._most, peak)
        most, self._most = self._most, 0
        return most


def _is_in_use(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index
