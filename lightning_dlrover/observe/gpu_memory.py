"""Memory that this process has on its GPU."""

from __future__ import annotations

import torch

__all__ = ["CUDA_CONTEXT_BYTES", "gpu_bytes", "gpu_limit_bytes"]

CUDA_CONTEXT_BYTES = 500 << 20
"""Context and loaded kernels: 300 to 500 MB (PyTorch forum; RMixer's code charges 310 MB)."""


def gpu_limit_bytes(device: torch.device) -> int:
    """Return the bytes of a GPU that tensors of one process can fill; 0 for a CPU."""
    if device.type != "cuda":
        return 0
    return torch.cuda.get_device_properties(device).total_memory - CUDA_CONTEXT_BYTES


def gpu_bytes(device: torch.device) -> tuple[int, int]:
    """Return the bytes of a GPU that this process has now, and those that it had at the most.

    Both are 0 for a CPU, and before this process uses CUDA.
    """
    if device.type != "cuda" or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return 0, 0
    reserved, most = torch.cuda.memory_reserved(device), torch.cuda.max_memory_reserved(device)
    return CUDA_CONTEXT_BYTES + reserved, CUDA_CONTEXT_BYTES + most
