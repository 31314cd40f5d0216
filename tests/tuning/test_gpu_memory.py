"""Peaks of a GPU's memory, by torch's counters of a played allocator and of a real one."""

from __future__ import annotations

import pytest
import torch

from lightning_dlrover.tuning.profiler import CUDA_CONTEXT_BYTES, GpuPeak, gpu_bytes

GPU = torch.device("cuda")
MIB = 1 << 20


class PlayedAllocator:
    """Torch's counters of a GPU's memory."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = self.peak = 0
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        patch.setattr(torch.cuda, "max_memory_allocated", lambda device: self.peak)
        patch.setattr(torch.cuda, "memory_reserved", lambda device: self.now)
        patch.setattr(torch.cuda, "max_memory_reserved", lambda device: self.peak)
        patch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: self.take(0))

    def take(self, size: int) -> None:
        """Allocate some bytes, and free them."""
        self.peak = max(self.now + size, self.peak if size else 0)


def allocate(size: int) -> None:
    torch.ones(size, dtype=torch.uint8, device="cuda")


@pytest.mark.parametrize("is_played", [True, pytest.param(False, marks=pytest.mark.gpu)])
def test_peak_of_a_window_does_not_hide_a_smaller_one_nor_the_process_own(
    is_played: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = PlayedAllocator(monkeypatch).take if is_played else allocate
    take(1)
    peak, other = GpuPeak(GPU), GpuPeak(torch.device("cuda:0"))
    before = torch.cuda.memory_reserved(GPU)
    take(800 * MIB)
    assert 800 * MIB <= peak.take() < 900 * MIB + before
    if not is_played:
        torch.cuda.empty_cache()
    take(100 * MIB)
    assert 100 * MIB <= peak.take() < 200 * MIB + before
    assert other.take() >= 800 * MIB
    now, most = gpu_bytes(GPU)
    assert most >= CUDA_CONTEXT_BYTES + 800 * MIB > now
    assert GpuPeak(torch.device("cpu")).take() == 0
