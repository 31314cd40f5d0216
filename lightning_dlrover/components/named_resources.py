"""Named resources of TorchX for the nodes of a job: what one worker gets. TorchX's own, such as `gpu.small`, serve as well."""

from __future__ import annotations

from torchx.specs import Resource

__all__ = ["cpu_large", "cpu_small", "gpu_1"]

GIB = 1024  # in the MB of TorchX, which schedulers take for MiB


def cpu_small() -> Resource:
    """A dense model: as many small workers as the planner finds a use for."""
    return Resource(cpu=2, gpu=0, memMB=4 * GIB)


def cpu_large() -> Resource:
    """A model with embedding tables, of which each worker holds its share and a copy of a neighbour's."""
    return Resource(cpu=8, gpu=0, memMB=32 * GIB)


def gpu_1() -> Resource:
    """One accelerator, and the cores and memory that its loader workers need."""
    return Resource(cpu=8, gpu=1, memMB=32 * GIB)
